"""Servers of real layer shapes for the benchmarks: stock and patched, with the same random NVFP4 weights.

A checkpoint of a few layers of Kimi-K2.5 would be 10 GB a layer to write and read. So the folder holds the
configuration and the tokenizer alone, and this module is also a plugin of the engine (``register``) that stands where
the engine reads weight files: it yields each tensor of the checkpoint by its name, drawn on the device from a seed that
is the name. The engine's own weight loaders, sharding and weight preparation do the rest. Every expert has its own
weights; block scales and activation scales are such that nothing saturates.
"""

from __future__ import annotations

import functools
import hashlib
import json
import math
import os
import random
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from sglang_moe_patches.patch import SELECT_VARIABLE
from sglang_moe_patches.reference import environment, model
from sglang_moe_patches.reference.flashinfer_kernels import WORKSPACE_VARIABLE
from sglang_moe_patches.regression import observe
from sglang_moe_patches.regression.server import Server

VARIABLES_KEPT = "SGLANG_MOE_PATCHES_BENCHMARK_VARIABLES"
#: The engine turns NVLink multicast on with --enable-symm-mem. Where the machine has it off, it stays off.
MULTICAST_VARIABLES = ("NCCL_NVLS_ENABLE", "TORCH_SYMM_MEM_DISABLE_MULTICAST", "NVSHMEM_DISABLE_NVLS")
SERVERS = ("stock", "patched")
#: A second stock server: what differs between it and the first is not the patches' doing.
CONTROL = "stock-again"


@dataclass(frozen=True)
class Shape:
    """What decides the activations' sizes: a model's own figures, but for the vocabulary and the layers served.

    ``layers``: of the whole model; ``dense_layers`` and ``moe_layers`` are served.
    """

    hidden: int = 7168
    heads: int = 64
    experts: int = 384
    top_k: int = 8
    groups: tuple[int, int] = (1, 1)
    moe_intermediate: int = 2048
    intermediate: int = 18432
    q_lora_rank: int = 1536
    dense_layers: int = 1
    moe_layers: int = 3
    layers: int = 61


SHAPES = {
    "kimi-k2.5": Shape(),
    "deepseek-v3": Shape(heads=128, experts=256, groups=(8, 4)),
    "tiny": Shape(256, 4, 8, 2, (4, 2), 256, 512, 128),
}


def config(shape: Shape) -> dict[str, Any]:
    """config.json of a model of this shape."""
    spec = model.ModelSpec(
        layers=shape.dense_layers + shape.moe_layers,
        dense_layers=shape.dense_layers,
        experts=shape.experts,
        top_k=shape.top_k,
        hidden=shape.hidden,
        moe_intermediate=shape.moe_intermediate,
        heads=shape.heads,
        max_position=65536,
    )
    return model.config(spec) | {
        "intermediate_size": shape.intermediate,
        "q_lora_rank": shape.q_lora_rank,
        "n_group": shape.groups[0],
        "topk_group": shape.groups[1],
    }


def write_model(folder: Path, shape: Shape) -> Path:
    """The folder that the servers are given: configuration and tokenizer."""
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(config(shape)))
    (folder / "tokenizer.json").write_text(model.tokenizer_json())
    (folder / "tokenizer_config.json").write_text(
        json.dumps({"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": model.SPECIAL_TOKENS[model.EOS_ID]})
    )
    return folder


# --- In the servers --------------------------------------------------------------------------------------------------


def tensors(c: dict[str, Any], device: Any) -> Iterator[tuple[str, Any]]:
    """Every tensor of the checkpoint that ``config.json`` describes, by name."""
    import torch

    hidden, heads = c["hidden_size"], c["num_attention_heads"]

    def generator(name: str) -> torch.Generator:
        seed = int.from_bytes(hashlib.sha256(name.encode()).digest()[:7], "big")
        return torch.Generator(device).manual_seed(seed)

    def normal(name: str, *shape: int, gain: float, dtype: Any = torch.bfloat16) -> tuple[str, Any]:
        return name, (torch.randn(shape, device=device, generator=generator(name)) * gain).to(dtype)

    def linear(name: str, rows: int, columns: int) -> tuple[str, Any]:
        gain = model.GAINS.get(name.rsplit(".", 1)[-1], 1.0)
        return normal(f"{name}.weight", rows, columns, gain=gain / math.sqrt(columns))

    def norm(name: str, size: int) -> tuple[str, Any]:
        name, spread = normal(f"{name}.weight", size, gain=model.NORM_SPREAD)
        return name, 1 + spread

    def mlp(prefix: str, intermediate: int) -> Iterator[tuple[str, Any]]:
        yield linear(f"{prefix}.gate_proj", intermediate, hidden)
        yield linear(f"{prefix}.up_proj", intermediate, hidden)
        yield linear(f"{prefix}.down_proj", hidden, intermediate)

    def nvfp4(name: str, rows: int, columns: int, largest_input: float) -> Iterator[tuple[str, Any]]:
        random_bits = generator(name)
        codes = torch.randint(0, 256, (rows, columns // 2), dtype=torch.uint8, device=device, generator=random_bits)
        yield f"{name}.weight", codes
        scale = 64 + 384 * torch.rand(rows, columns // 16, device=device, generator=random_bits)
        yield f"{name}.weight_scale", scale.to(torch.float8_e4m3fn)
        # Uniform codes have a root mean square of 2.93, these scales one of 279.
        yield f"{name}.weight_scale_2", torch.tensor(1 / (2.93 * 279 * math.sqrt(columns)), device=device)
        yield f"{name}.input_scale", torch.tensor(largest_input / (448 * 6), device=device)

    vocabulary = c["vocab_size"]
    yield normal("model.embed_tokens.weight", vocabulary, hidden, gain=model.GAINS["embed_tokens"])
    yield norm("model.norm", hidden)
    yield linear("lm_head", vocabulary, hidden)
    for layer in range(c["num_hidden_layers"]):
        prefix = f"model.layers.{layer}"
        attention = f"{prefix}.self_attn"
        yield norm(f"{prefix}.input_layernorm", hidden)
        yield norm(f"{prefix}.post_attention_layernorm", hidden)
        yield norm(f"{attention}.q_a_layernorm", c["q_lora_rank"])
        yield norm(f"{attention}.kv_a_layernorm", c["kv_lora_rank"])
        yield linear(f"{attention}.q_a_proj", c["q_lora_rank"], hidden)
        head = c["qk_nope_head_dim"] + c["qk_rope_head_dim"]
        yield linear(f"{attention}.q_b_proj", heads * head, c["q_lora_rank"])
        yield linear(f"{attention}.kv_a_proj_with_mqa", c["kv_lora_rank"] + c["qk_rope_head_dim"], hidden)
        yield linear(f"{attention}.kv_b_proj", heads * (c["qk_nope_head_dim"] + c["v_head_dim"]), c["kv_lora_rank"])
        yield linear(f"{attention}.o_proj", hidden, heads * c["v_head_dim"])
        if layer < c["first_k_dense_replace"]:
            yield from mlp(f"{prefix}.mlp", c["intermediate_size"])
            continue
        yield linear(f"{prefix}.mlp.gate", c["n_routed_experts"], hidden)
        bias = f"{prefix}.mlp.gate.e_score_correction_bias"
        yield normal(bias, c["n_routed_experts"], gain=model.CORRECTION_BIAS_STD, dtype=torch.float32)
        yield from mlp(f"{prefix}.mlp.shared_experts", c["moe_intermediate_size"])
        for expert in range(c["n_routed_experts"]):
            experts = f"{prefix}.mlp.experts.{expert}"
            intermediate = c["moe_intermediate_size"]
            yield from nvfp4(f"{experts}.gate_proj", intermediate, hidden, largest_input=8)
            yield from nvfp4(f"{experts}.up_proj", intermediate, hidden, largest_input=8)
            yield from nvfp4(f"{experts}.down_proj", hidden, intermediate, largest_input=16)


def register() -> None:
    """Entry point ``sglang.srt.plugins``, in servers that a benchmark starts."""
    import torch.distributed
    import wrapt

    kept = json.loads(os.environ[VARIABLES_KEPT])
    start = torch.distributed.init_process_group

    @functools.wraps(start)
    def with_variables_kept(*args: Any, **kwargs: Any) -> Any:
        os.environ.update(kept)
        print(f"benchmark: as on this machine: {kept}", flush=True)
        return start(*args, **kwargs)

    torch.distributed.init_process_group = with_variables_kept
    os.environ.update(kept)
    wrapt.register_post_import_hook(_replace_reader, "sglang.srt.model_loader.loader")


def _replace_reader(loader: Any) -> None:
    def weights(self: Any, model_config: Any, model: Any) -> Iterator[tuple[str, Any]]:
        import torch

        device = torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")
        with device:
            yield from tensors(json.loads((Path(model_config.model_path) / "config.json").read_text()), device)

    loader.DefaultModelLoader._get_all_weights = weights


def plugin(folder: Path) -> Path:
    """A folder for PYTHONPATH from which the engine loads this module as a plugin."""
    info = folder / "benchmark_weights-0.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: benchmark-weights\nVersion: 0\n")
    (info / "entry_points.txt").write_text("[sglang.srt.plugins]\nbenchmark_weights = serving:register\n")
    return folder


# --- Around them -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Setup:
    """How servers are started.

    Attributes:
        shape: of the model.
        work: a folder for the model, logs and observations; must not exist.
        tp: tensor-parallel ranks.
        tokens: the longest prompt, and the chunk size of the prefill.
        arguments: more server arguments.
        workspace_mb: memory that the reference kernel takes while it runs, in place of the vendor kernel's workspace.
        observe: have the servers record their memory; costs time in every forward.
        history: record the allocator's history of one forward too.
        variables: more environment variables.
    """

    shape: Shape
    work: Path
    tp: int = 1
    tokens: int = 16384
    arguments: tuple[str, ...] = ()
    workspace_mb: int = 0
    observe: bool = True
    history: bool = False
    variables: tuple[tuple[str, str], ...] = ()

    def command(self) -> list[str]:
        given = ["--model-path", str(self.work / "model"), "--quantization", "modelopt_fp4"]
        given += ["--moe-runner-backend", "flashinfer_trtllm_routed", "--tp", str(self.tp), "--disable-radix-cache"]
        given += ["--chunked-prefill-size", str(self.tokens), "--max-prefill-tokens", str(self.tokens)]
        given += ["--grammar-backend", "none", "--skip-server-warmup", "--random-seed", "1", *self.arguments]
        if environment.has_gpu():
            given += ["--attention-backend", "triton", "--sampling-backend", "pytorch"]
            # Neither of them touches what is measured; both can use NVLink multicast.
            given += ["--disable-custom-all-reduce", "--enforce-disable-flashinfer-allreduce-fusion"]
        if "--max-total-tokens" not in given and "--mem-fraction-static" not in given:
            # Some GB of KV cache on a GPU: the engine gives its size in hundredths of a GiB.
            capacity = 1_000_000 if environment.has_gpu() else self.tokens + 4096
            given += ["--max-total-tokens", str(capacity), "--mem-fraction-static", "0.95"]
        return environment.server_arguments(given)

    def environment(self, name: str) -> dict[str, str]:
        own = {k: v for k, v in os.environ.items() if not k.startswith("SGLANG_MOE_PATCHES")}
        paths = [str(self.work / "plugin"), str(Path(__file__).parent), *filter(None, [own.get("PYTHONPATH")])]
        own |= environment.variables(own) | {
            SELECT_VARIABLE: "none" if name.startswith("stock") else "all",
            **dict(self.variables),
            VARIABLES_KEPT: json.dumps({k: own[k] for k in MULTICAST_VARIABLES if k in own}),
            "PYTHONPATH": ":".join(paths),
            # Servers start at once on the same GPUs; and with symmetric memory each compiles an allocator there.
            "SGLANG_ENABLE_TP_MEMORY_INBALANCE_CHECK": "0",
            "TMPDIR": str(self.temporary(name)),
        }
        if self.workspace_mb:
            own[WORKSPACE_VARIABLE] = str(self.workspace_mb)
        if self.observe:
            own[observe.VARIABLE] = str(self.observed(name))
        if self.history:
            own[observe.HISTORY_VARIABLE] = str(self.tokens)
        return own

    def observed(self, name: str) -> Path:
        return self.work / f"observed-{name}"

    def temporary(self, name: str) -> Path:
        return self.work / f"tmp-{name}"

    def prepare(self) -> None:
        write_model(self.work / "model", self.shape)
        plugin(self.work / "plugin")

    def server(self, name: str) -> Server:
        """``name`` starts with ``stock`` or ``patched``."""
        self.observed(name).mkdir()
        self.temporary(name).mkdir()

        def progress(seconds: float, line: str) -> None:
            if round(seconds * 2) % 20 == 0:
                print(f"  {name}: {seconds:.0f} s  {line[:140]}", flush=True)

        log = self.work / f"{name}.log"
        return Server(name, self.command(), self.environment(name), log, timeout=400, progress=progress)


@contextmanager
def servers(setups: dict[str, Setup], *, at_once: bool) -> Iterator[dict[str, Server]]:
    """All these servers at the same time, started one after another or ``at_once``; none is left when it ends."""
    with ExitStack() as stack:
        made = {name: setup.server(name) for name, setup in setups.items()}
        with ThreadPoolExecutor(len(made) if at_once else 1) as pool:
            entered = [pool.submit(server.__enter__) for server in made.values()]
            for server in made.values():
                stack.callback(server.stop)
        for future in entered:
            future.result()
        yield made


def prompt(tokens: int, seed: int) -> list[int]:
    """Random token ids."""
    return random.Random(f"{tokens}/{seed}").choices(range(3, model.vocab_size()), k=tokens)


def generate(server: Server, ids: list[int], new_tokens: int, *, logprobs: bool = True) -> dict[str, Any]:
    """One greedy answer: its tokens, their log-probabilities if asked for, and the engine's own latency in seconds."""
    import httpx

    server.check()
    response = httpx.post(
        f"{server.url}/generate",
        json={
            "input_ids": ids,
            "sampling_params": {"temperature": 0, "max_new_tokens": new_tokens, "ignore_eos": True},
            "return_logprob": logprobs,
        },
        timeout=300,
    )
    response.raise_for_status()
    answer = response.json()
    return {
        "tokens": answer["output_ids"],
        "logprobs": [logprob for logprob, _, _ in answer["meta_info"].get("output_token_logprobs", [])],
        "latency_s": answer["meta_info"]["e2e_latency"],
    }


def same(stock: dict[str, Any], patched: dict[str, Any]) -> bool:
    """Whether two answers are equal, token for token and log-probability for log-probability."""
    return bool(stock["tokens"] == patched["tokens"] and stock["logprobs"] == patched["logprobs"])


def state(server: Server) -> dict[str, Any]:
    """The engine's version, and its own account of its memory: weights and KV cache in GB, KV cache in tokens."""
    import httpx

    for path in ("get_server_info", "server_info"):
        response = httpx.get(f"{server.url}/{path}", timeout=60)
        if response.status_code == 200:
            info = response.json()
            return {"version": info["version"], **info["internal_states"][0]["memory_usage"]}
    response.raise_for_status()
    raise AssertionError


def with_layers(shape: Shape, dense: int | None, moe: int | None) -> Shape:
    """The same widths with other numbers of layers; ``None`` leaves one as it is."""
    return replace(
        shape,
        dense_layers=shape.dense_layers if dense is None else dense,
        moe_layers=shape.moe_layers if moe is None else moe,
    )
