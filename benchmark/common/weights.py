"""Random NVFP4 weights of a model's own widths, for servers that a benchmark starts.

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
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sglang_moe_patches.reference import model

from common.shapes import MODELS, TINY, Model

VARIABLES_KEPT = "SGLANG_MOE_PATCHES_BENCHMARK_VARIABLES"
#: The models that can be served so: DeepSeek's architecture.
SERVABLE = {name: MODELS[name] for name in ("kimi-k2.5", "deepseek-v3")} | {"tiny": TINY}


@dataclass(frozen=True)
class Served:
    """A few layers of a model: what decides the activations' sizes is its own, but for the vocabulary."""

    model: Model
    dense_layers: int = 1
    moe_layers: int = 3

    @property
    def layers(self) -> int:
        return self.dense_layers + self.moe_layers


def config(served: Served) -> dict[str, Any]:
    """config.json of these layers."""
    whole = served.model
    spec = model.ModelSpec(
        layers=served.layers,
        dense_layers=served.dense_layers,
        experts=whole.experts,
        top_k=whole.top_k,
        hidden=whole.hidden,
        moe_intermediate=whole.moe_intermediate,
        heads=whole.heads,
        shared_experts=whole.shared_experts,
        max_position=65536,
    )
    return model.config(spec) | {
        "intermediate_size": whole.intermediate,
        "q_lora_rank": whole.q_lora_rank,
        "n_group": whole.groups[0],
        "topk_group": whole.groups[1],
    }


def write_model(folder: Path, served: Served) -> Path:
    """The folder that the servers are given: configuration and tokenizer."""
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(config(served)))
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
