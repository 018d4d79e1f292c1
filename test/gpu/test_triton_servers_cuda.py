"""GPU tests of servers with the Triton runner, combined with other features: patched answers equal stock answers.

Each case starts a stock and a patched server with a few layers of a model's widths and random weights, and sends both
the same prompts. The patched server must compute in several column slices. Its layers with a dead input must overwrite
the dead input with their output or activation. The tests add no synchronization with the GPU between forward passes.
"""

from __future__ import annotations

import json
import os
import tempfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")
if not torch.cuda.is_available():
    pytest.skip("needs a CUDA device: the engine's Triton runner does not run on the CPU", allow_module_level=True)

import httpx  # noqa: E402
import mismatch  # noqa: E402
from common import forwards, plugins  # noqa: E402
from common.servers import EAGER, Setup, run_servers  # noqa: E402
from common.shapes import MODELS  # noqa: E402
from common.weights import ServedModel  # noqa: E402
from mismatch import Request  # noqa: E402
from sglang_moe_patches.changes.moe_workspace.column_slices import MOE_WORKSPACE_MB  # noqa: E402
from sglang_moe_patches.lab.servers.server import Server  # noqa: E402

#: Number of tensor-parallel ranks among which each model's widths are divided. The servers run at the sizes of one
#: rank.
SHARES = {"qwen3-235b": 4, "glm-4.5": 4, "minimax-m2": 4, "deepseek-v3": 8}
QWEN, DEEPSEEK = "qwen3-235b", "deepseek-v3"
LAYERS = 3
#: Two layers for each pipeline stage, because the first layer of a stage has no dead input.
STAGED_LAYERS = 4
IN_FLIGHT = 6
#: Number of tokens in a prompt. The expert outputs then take 384 MiB in the narrowest model.
TOKENS = 8192
CAPTURED_TOKENS = 4096
RANK = 8
ATTENTION = {"q_proj": (4096, 2048), "v_proj": (4096, 128)}


#: Folder for the answers and logs of a failed test.
MISMATCHES = Path(os.environ.get("MISMATCHES", Path(tempfile.gettempdir()) / "mismatches"))


@dataclass(frozen=True)
class Case:
    """Test case: a kind of server, and the way in which it receives its prompts."""

    arguments: tuple[str, ...] = EAGER
    model: str = QWEN
    gpus: int = 1
    before: str = ""
    """Endpoint that is called before the prompts are sent. If it is empty, no endpoint is called."""
    lora: str = ""
    """Modules that a LoRA adapter changes: ``attention`` or ``experts``. If it is empty, the server has no adapter."""
    reads_expert_outputs: bool = False
    """Whether other code reads the expert outputs. They are then not cut into column slices."""
    ranks: int = 1
    """Number of ranks that record their forward passes."""
    scattered: bool = False
    """Whether the experts of a rank also receive tokens of other ranks, as with data-parallel attention. The test then
    does not check the use of the dead input."""
    draft: bool = False
    """Whether the server has EAGLE-3's draft model, which reads hidden states of the model's layers."""
    staged: bool = False
    """Whether the server has two pipeline stages. While one stage computes, the other one sends and receives hidden
    states.
    """
    request: dict[str, Any] = field(default_factory=dict)

    @property
    def graphs(self) -> bool:
        """Whether the server has the engine's default CUDA graphs, of decodes and of prefills up to
        ``CAPTURED_TOKENS`` tokens.
        """
        return "--cuda-graph-max-bs" in self.arguments


RECORDER = ("--expert-distribution-recorder-mode", "stat")
GRAPHS = ("--cuda-graph-max-bs", "2", "--piecewise-cuda-graph-tokens", str(CAPTURED_TOKENS))
TWO_RANKS = (*EAGER, "--tp", "2")
EAGLE = (
    *("--speculative-algorithm", "EAGLE3", "--speculative-num-steps", "2"),
    *("--speculative-eagle-topk", "1", "--speculative-num-draft-tokens", "3"),
)
#: Value of SGLANG_MOE_PATCHES_MOE_WORKSPACE_MB that is below the runner's workspace for each of these prompts. By
#: default, the tensor stays uncut with tuned tile sizes.
WORKSPACE_MB = "200"
CASES = {
    "Qwen3-MoE": Case(GRAPHS),
    "GLM-4-MoE": Case(GRAPHS, "glm-4.5"),
    "MiniMax-M2": Case(GRAPHS, "minimax-m2"),
    "DeepSeek-V3": Case((*GRAPHS, "--disable-shared-experts-fusion"), DEEPSEEK),
    "fused shared experts": Case(model=DEEPSEEK),
    "EAGLE-3": Case((*EAGER, *EAGLE), draft=True),
    "EPLB recorder": Case((*EAGER, *RECORDER), before="start_expert_distribution_record"),
    "LoRA on attention": Case(lora="attention", request={"lora_path": "adapter"}),
    "LoRA on experts": Case(lora="experts", reads_expert_outputs=True, request={"lora_path": "adapter"}),
    "two ranks": Case(TWO_RANKS, gpus=2, ranks=2),
    "two ranks of DeepSeek-V3": Case((*TWO_RANKS, "--disable-shared-experts-fusion"), DEEPSEEK, gpus=2, ranks=2),
    "two ranks of GLM-4-MoE": Case(TWO_RANKS, "glm-4.5", gpus=2, ranks=2),
    "two ranks of MiniMax-M2": Case(TWO_RANKS, "minimax-m2", gpus=2, ranks=2),
    "expert parallelism": Case((*TWO_RANKS, "--ep-size", "2"), gpus=2, ranks=2),
    "data-parallel attention": Case((*TWO_RANKS, "--dp", "2", "--enable-dp-attention"), gpus=2, scattered=True),
    # If these two servers' answers differ, test/tools/pipeline.py finds the cause.
    "pipeline stages": Case((*EAGER, "--pp-size", "2"), gpus=2, ranks=2, staged=True),
    "pipeline stages of DeepSeek-V3": Case(
        (*EAGER, "--pp-size", "2", "--disable-shared-experts-fusion"), DEEPSEEK, gpus=2, ranks=2, staged=True
    ),
}

#: Plugin of the servers. It records the hidden states that EAGLE-3's draft model reads, each as the sum of its bits.
DRAFT = """
import functools, os
import wrapt

def register():
    wrapt.register_post_import_hook(_read, "sglang.srt.models.llama_eagle3")

def _read(module):
    import torch
    original = module.LlamaModel.forward

    @functools.wraps(original)
    def forward(self, input_ids, positions, forward_batch, *args, **kwargs):
        hidden = forward_batch.spec_info.hidden_states
        bits = int(hidden.contiguous().view(torch.int16).long().sum())
        with open(os.environ["DRAFT_READ"], "a") as lines:
            print(tuple(hidden.shape), bits, file=lines)
        return original(self, input_ids, positions, forward_batch, *args, **kwargs)

    module.LlamaModel.forward = forward
"""


def write_draft(folder: Path) -> Path:
    """Write EAGLE-3's draft model for ``QWEN`` with random weights, and return its folder. The draft model reads the
    inputs of ``QWEN``'s last two layers."""
    from safetensors.torch import save_file
    from sglang_moe_reference.model import vocab_size

    folder.mkdir()
    hidden, heads, size = MODELS[QWEN].hidden, 16, 128
    config = {"architectures": ["LlamaForCausalLMEagle3"], "model_type": "llama", "hidden_size": hidden,
              "intermediate_size": 512, "num_hidden_layers": 1, "num_attention_heads": heads, "head_dim": size,
              "num_key_value_heads": 4, "vocab_size": vocab_size(), "draft_vocab_size": None, "hidden_act": "silu",
              "rms_norm_eps": 1e-6, "max_position_embeddings": 65536, "tie_word_embeddings": False,
              "torch_dtype": "bfloat16", "eagle_config": {"eagle_aux_hidden_state_layer_ids": [0, 1]}}  # fmt: skip
    shapes = {"fc": (hidden, 2 * hidden), "midlayer.self_attn.q_proj": (heads * size, 2 * hidden),
              "midlayer.self_attn.k_proj": (4 * size, 2 * hidden), "midlayer.self_attn.v_proj": (4 * size, 2 * hidden),
              "midlayer.self_attn.o_proj": (hidden, heads * size), "midlayer.mlp.gate_proj": (512, hidden),
              "midlayer.mlp.up_proj": (512, hidden), "midlayer.mlp.down_proj": (hidden, 512)}  # fmt: skip
    generator = torch.Generator().manual_seed(0)
    tensors = {
        f"{name}.weight": (torch.randn(*shape, generator=generator) / shape[1] ** 0.5).bfloat16()
        for name, shape in shapes.items()
    }
    norms = ("norm", *(f"midlayer.{name}" for name in ("input_layernorm", "hidden_norm", "post_attention_layernorm")))
    tensors |= {f"{name}.weight": torch.ones(hidden, dtype=torch.bfloat16) for name in norms}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def write_adapter(folder: Path, target: str) -> Path:
    """Write a LoRA adapter for ``QWEN``, and return its folder. The random weights are large enough to change
    answers."""
    from safetensors.torch import save_file

    folder.mkdir()
    generator = torch.Generator().manual_seed(0)
    qwen = MODELS[QWEN].shard(SHARES[QWEN])
    hidden, intermediate = qwen.hidden, qwen.moe_intermediate
    shapes = {f"self_attn.{name}": shape for name, shape in ATTENTION.items()}
    if target == "experts":
        sizes = {"gate_proj": (hidden, intermediate), "up_proj": (hidden, intermediate)}
        sizes["down_proj"] = (intermediate, hidden)
        shapes = {f"mlp.experts.{e}.{name}": shape for e in range(qwen.experts) for name, shape in sizes.items()}
    tensors = {}
    for layer in range(LAYERS):
        for name, (columns, rows) in shapes.items():
            prefix = f"base_model.model.model.layers.{layer}.{name}"
            a, b = (torch.randn(*shape, generator=generator) for shape in ((RANK, columns), (rows, RANK)))
            tensors[f"{prefix}.lora_A.weight"] = (a / columns**0.5).bfloat16()
            tensors[f"{prefix}.lora_B.weight"] = b.bfloat16()
    save_file(tensors, folder / "adapter_model.safetensors")
    config = {"peft_type": "LORA", "r": RANK, "lora_alpha": RANK, "bias": "none", "base_model_name_or_path": "",
              "target_modules": sorted({name.rsplit(".", 1)[1] for name in shapes})}  # fmt: skip
    (folder / "adapter_config.json").write_text(json.dumps(config))
    return folder


def requests(case: Case) -> list[Request]:
    """Return the requests of a test case.

    The list begins with the requests that are sent one after another. In cases with pipeline stages, the requests that
    are sent at the same time follow. Each of these simultaneous requests has a prompt that fills a forward pass, and
    asks for one token. The batches therefore do not depend on the times at which the requests arrive.
    """
    lengths = [TOKENS, TOKENS - 16, TOKENS - 33, 5]
    lengths += (CAPTURED_TOKENS, CAPTURED_TOKENS - 7) if case.graphs else ()
    alone = [Request(tokens, tokens, 6, more=case.request) for tokens in lengths]
    return [*alone, *mismatch.make_simultaneous_requests(TOKENS, IN_FLIGHT if case.staged else 0)]


def ask(server: Server, case: Case) -> list[mismatch.Answer]:
    """Send the prompts to a server. Return the generated tokens and their log-probabilities."""
    if case.before:
        httpx.post(f"{server.url}/{case.before}", timeout=60).raise_for_status()
    return mismatch.ask(server, requests(case))


def environments(case: Case, folder: Path) -> dict[str, tuple[tuple[str, str], ...]]:
    """Return the environment variables of the two servers, by the server's name: ``stock`` or ``patched``."""
    own = (
        (MOE_WORKSPACE_MB.name, WORKSPACE_MB),
        (forwards.UNTIMED, "1"),
        # Both servers compile small kernels and would choose them by their time. Other kernels round differently.
        ("TORCHINDUCTOR_DETERMINISTIC", "1"),
    )
    return {
        name: (*own, (forwards.VARIABLE, str(folder / name)), ("DRAFT_READ", str(folder / f"{name}-draft")))
        for name in ("stock", "patched")
    }


@pytest.mark.parametrize("name", CASES)
def test_a_patched_server_answers_as_stock(tmp_path, monkeypatch, name):
    case = CASES[name]
    if torch.cuda.device_count() < case.gpus:
        pytest.skip(f"needs {case.gpus} GPUs")
    arguments = [*case.arguments, "--max-running-requests", "8", "--max-total-tokens", str(8 * TOKENS)]
    arguments += ["--mem-fraction-static", "0.9"]
    if case.lora:
        adapter = write_adapter(tmp_path / "adapter", case.lora)
        arguments += ["--enable-lora", "--lora-paths", f"adapter={adapter}", "--max-loras-per-batch", "2"]
    if case.draft:
        arguments += ["--speculative-draft-model-path", str(write_draft(tmp_path / "draft"))]
        folder = plugins.write_module(tmp_path / "reader", "draft_reader", DRAFT)
        monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(folder), os.environ.get("PYTHONPATH", "")]))
    served = ServedModel(MODELS[case.model].shard(SHARES[case.model]), moe_layers=count_layers(case), runner="triton")
    setups = {
        name: Setup(
            served, tmp_path / "servers", tokens=TOKENS, arguments=tuple(arguments), observe=False, variables=variables
        )
        for name, variables in environments(case, tmp_path).items()
    }
    setups["stock"].prepare()
    plugins.write(tmp_path / "servers" / "plugin", "benchmark_forwards", "common.forwards:register")
    with run_servers(setups, at_once=True) as servers:
        # The servers start one after another, so that the second server reuses the compiled kernels of the first.
        stock, patched = (ask(server, case) for server in servers.values())
        log = servers["patched"].log_text()
    print(name, *(line for line in log.splitlines() if "moe-patches" in line), sep="\n")
    if found := mismatch.find_differences(requests(case), stock, patched):
        lines = [tmp_path / each for each in ("stock", "patched")]  # the recorded forward passes
        kept = mismatch.save_mismatch(
            MISMATCHES / name.replace(" ", "-"),
            found,
            {"stock": stock, "patched": patched},
            [*(server.log for server in servers.values()), *lines],
        )
        pytest.fail(f"stock and patched differ in {found[0]} ({len(found)} in all); kept in {kept}")
    if case.draft:
        read = [(tmp_path / f"{name}-draft").read_text() for name in ("stock", "patched")]
        assert str((TOKENS, 2 * MODELS[QWEN].hidden)) in read[0]
        assert read[0] == read[1]
    assert all(one.is_untouched for one in forwards.read(tmp_path / "stock"))
    # Some releases capture no graphs of prefills with MLA.
    captures_prompts = case.graphs and "disabling prefill CUDA graph" not in log
    check_forwards(case, forwards.read(tmp_path / "patched"), CAPTURED_TOKENS if captures_prompts else 0)


def count_layers(case: Case) -> int:
    """Return the number of layers with routed experts in a server's model."""
    return STAGED_LAYERS - (case.model == DEEPSEEK) if case.staged else LAYERS


def check_forwards(case: Case, lines: list[forwards.Forward], captured_tokens: int) -> None:
    last = case.model == DEEPSEEK and "--disable-shared-experts-fusion" in case.arguments
    captured = [one for one in lines if one.tokens is None]
    prefills = [one for one in lines if (one.tokens or 0) > CAPTURED_TOKENS // 2]
    decodes = [one for one in lines if one.decode]
    print(*captured, *prefills, *decodes[:1], sep="\n")
    if case.reads_expert_outputs:
        assert all(one.slices == [] for one in lines)
        return
    replayed = [one for one in prefills if one.tokens <= captured_tokens]
    assert len(replayed) == (2 if captured_tokens else 0)
    assert all(one.is_untouched for one in replayed)
    # EAGLE-3's own layer has no experts.
    ran = [one for one in prefills if one not in replayed and (one.slices or not case.draft)]
    assert ran
    assert all(max(one.slices) > 1 for one in ran)
    if case.scattered:
        return
    prompts = 3 + (case.graphs and not captured_tokens) * 2 + case.staged * IN_FLIGHT
    # The first layers of the model and of the second pipeline stage have no dead input.
    dying = 1 if case.staged else LAYERS + (case.model in (DEEPSEEK, "glm-4.5")) - 1
    for rank in range(case.ranks):
        acted = [one.outputs if last else one.scratch for one in ran if one.rank == rank]
        assert acted == [dying] * prompts
    # A decode writes its output into the dead input only if the shared experts run last.
    assert decodes or case.draft
    if case.graphs:
        assert all(one.is_untouched for one in decodes)
        assert (sum(one.outputs for one in captured) > 0) == last
    elif not case.staged:
        assert {one.outputs for one in decodes} <= {dying if last else 0}
