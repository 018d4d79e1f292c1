"""Random weights of a model's own widths, for servers that a benchmark starts: bfloat16; NVFP4, INT4 or FP8 experts.

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

from sglang_moe_reference import families, model

from common.shapes import MODELS, TINY_MODELS, Model

VARIABLES_KEPT = "MOE_PATCHES_BENCHMARK_VARIABLES"
#: The models that can be served so.
SERVABLE = {name: MODELS[name] for name in MODELS if MODELS[name].family and not name.endswith("-fused")} | TINY_MODELS
#: The runners, and how the routed experts are quantized for them; None: not.
RUNNERS = {"flashinfer_trtllm_routed": "nvfp4", "triton": None, "marlin": "int4"}
#: Inputs that share a scale of INT4 weights, as in Kimi-K2.5's checkpoint.
INT4_GROUP = 32
#: Rows and columns of FP8 weights that share a scale, as in DeepSeek-V3's and Qwen3's checkpoints.
FP8_BLOCK = 128


@dataclass(frozen=True)
class Served:
    """A few layers of a model: what decides the activations' sizes is its own, but for the vocabulary.

    :param dense_layers: none where the model has none.
    :param runner: one of ``RUNNERS``.
    :param fp8: the routed experts are FP8 in blocks, where the runner has them unquantized.
    """

    model: Model
    dense_layers: int = 1
    moe_layers: int = 3
    runner: str = "flashinfer_trtllm_routed"
    fp8: bool = False

    def __post_init__(self) -> None:
        if self.fp8 and self.quantization != "fp8":
            raise ValueError(f"{self.runner} has {self.quantization} experts, not FP8 ones")
        if not self.model.dense_layers:
            object.__setattr__(self, "dense_layers", 0)

    @property
    def quantization(self) -> str | None:
        """Of the routed experts; the rest is bfloat16."""
        return RUNNERS[self.runner] or ("fp8" if self.fp8 else None)

    @property
    def layers(self) -> int:
        return self.dense_layers + self.moe_layers


def config(served: Served) -> dict[str, Any]:
    """config.json of these layers."""
    whole = served.model
    spec = families.ModelSpec(
        family=whole.family,
        layers=served.layers,
        dense_layers=served.dense_layers,
        experts=whole.experts,
        top_k=whole.top_k,
        hidden=whole.hidden,
        moe_intermediate=whole.moe_intermediate,
        intermediate=whole.intermediate or families.OF_FAMILY,
        heads=whole.heads,
        kv_heads=whole.kv_heads,
        shared_experts=whole.shared_experts,
        q_lora_rank=whole.q_lora_rank or families.ModelSpec.q_lora_rank,
        max_position=65536,
    )
    values = model.config(spec, quantized=served.quantization == "nvfp4")
    if "n_group" in values:
        values |= {"n_group": whole.groups[0], "topk_group": whole.groups[1]}
    if served.quantization == "int4":
        values["quantization_config"] = int4_config()
    elif served.quantization == "fp8":
        dense = [f"layers.{layer}.mlp" for layer in range(served.dense_layers)]
        scheme = {"activation_scheme": "dynamic", "fmt": "e4m3", "weight_block_size": [FP8_BLOCK, FP8_BLOCK]}
        kept = ["self_attn", "shared_experts", "lm_head", *dense]
        values["quantization_config"] = {"quant_method": "fp8", **scheme, "modules_to_not_convert": kept}
    return values


def int4_config() -> dict[str, Any]:
    """The quantization of Kimi-K2.5's own checkpoint: the routed experts' weights alone, four bits, no zero points."""
    scheme = {"num_bits": 4, "type": "int", "symmetric": True, "strategy": "group", "group_size": INT4_GROUP}
    groups = {"group_0": {"weights": scheme | {"dynamic": False}, "targets": ["Linear"]}}
    kept = ["self_attn", "shared_experts", r"mlp\.(gate|up|gate_up|down)_proj"]
    return {
        "quant_method": "compressed-tensors",
        "format": "pack-quantized",
        "quantization_status": "compressed",
        "config_groups": groups,
        "ignore": ["lm_head", *(f"re:.*{name}.*" for name in kept)],
    }


def write_folder(folder: Path, described: dict[str, Any]) -> Path:
    """The folder that the servers are given: configuration and a tokenizer of few tokens.

    :param described: config.json.
    """
    folder.mkdir(parents=True)
    tokenizer = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": model.SPECIAL_TOKENS[model.EOS_ID]}
    (folder / "config.json").write_text(json.dumps(described))
    (folder / "tokenizer.json").write_text(model.tokenizer_json(), encoding="utf-8")
    (folder / "tokenizer_config.json").write_text(json.dumps(tokenizer))
    return folder


def write_model(folder: Path, served: Served) -> Path:
    return write_folder(folder, config(served))


def write_checkpoint(folder: Path, served: Served, seed: int, device: str) -> Path:
    """A folder with the weights in it, for what reads them from disk; another seed makes all of them others."""
    from safetensors.torch import save_file

    described = config(served)
    described[model.MARKER]["seed"] = seed
    write_folder(folder, described)
    made = {name: tensor.cpu() for name, tensor in tensors(described, device)}
    save_file(made, str(folder / "model.safetensors"), metadata={"format": "pt"})
    return folder


# --- In the servers --------------------------------------------------------------------------------------------------


def named_generator(name: str, device: Any) -> Any:
    """A ``torch.Generator`` on the device with a seed that is the name."""
    import torch

    return torch.Generator(device).manual_seed(int.from_bytes(hashlib.sha256(name.encode()).digest()[:7], "big"))


def draw_int4(packed: Any, generator: Any) -> None:
    """Draw INT4 weights, 8 in each int32, from -7 to 7.

    A mean of -0.5, as uniform ones from -8 to 7 have, would make the hidden states of all tokens alike within a few
    layers, so that nearly every token went to the same experts.
    """
    import torch

    bits = torch.iinfo(packed.dtype)
    packed.random_(bits.min, bits.max, generator=generator)
    # Of each 4-bit code the lowest bit says here whether it is not 0. The code 0, -8, becomes 8, which stands for 0.
    any_bit = packed | packed >> 1 | packed >> 2 | packed >> 3
    packed |= (~any_bit & 0x11111111) << 3


def int4_scale(inputs: int) -> float:
    """The scale that gives :func:`draw_int4`'s weights of so many inputs a standard deviation of 1 / sqrt(inputs)."""
    return 1 / math.sqrt(17.5 * inputs)  # from -7 to 7, 0 twice as often: a mean square of 17.5


def tensors(c: dict[str, Any], device: Any) -> Iterator[tuple[str, Any]]:
    """Every tensor of the checkpoint that ``config.json`` describes, by name; of another seed, all of them others."""
    import torch

    spec = families.ModelSpec(**c[model.MARKER])
    quantization = c.get("quantization_config", {}).get("quant_method")

    def generator(name: str) -> torch.Generator:
        return named_generator(f"{spec.seed}/{name}" if spec.seed else name, device)

    def nvfp4(name: str, rows: int, columns: int) -> Iterator[tuple[str, Any]]:
        random_bits = generator(name)
        codes = torch.randint(0, 256, (rows, columns // 2), dtype=torch.uint8, device=device, generator=random_bits)
        yield f"{name}.weight", codes
        scale = 64 + 384 * torch.rand(rows, columns // 16, device=device, generator=random_bits)
        yield f"{name}.weight_scale", scale.to(torch.float8_e4m3fn)
        # Uniform codes have a root mean square of 2.93, these scales one of 279.
        yield f"{name}.weight_scale_2", torch.tensor(1 / (2.93 * 279 * math.sqrt(columns)), device=device)
        down = name.endswith(families.FAMILIES[spec.family].projections[2])
        yield f"{name}.input_scale", torch.tensor((16 if down else 8) / (448 * 6), device=device)

    def int4(name: str, rows: int, columns: int) -> Iterator[tuple[str, Any]]:
        packed = torch.empty(rows, columns // 8, dtype=torch.int32, device=device)
        draw_int4(packed, generator(name))
        yield f"{name}.weight_packed", packed
        scale = torch.full((rows, columns // INT4_GROUP), int4_scale(columns), device=device)
        yield f"{name}.weight_scale", scale.bfloat16()
        yield f"{name}.weight_shape", torch.tensor((rows, columns), dtype=torch.int32)

    def fp8(name: str, rows: int, columns: int) -> Iterator[tuple[str, Any]]:
        normal = torch.randn(rows, columns, device=device, generator=generator(name))
        yield f"{name}.weight", normal.to(torch.float8_e4m3fn)
        blocks = (-(-rows // FP8_BLOCK), -(-columns // FP8_BLOCK))
        yield f"{name}.weight_scale_inv", torch.full(blocks, columns**-0.5, device=device)

    quantized = {"compressed-tensors": int4, "fp8": fp8}.get(quantization, nvfp4)
    for tensor in families.tensors(spec, c["vocab_size"]):
        if tensor.expert and quantization:
            yield from quantized(tensor.name, *tensor.shape)
        else:
            normal = torch.randn(tensor.shape, device=device, generator=generator(tensor.key))
            yield tensor.key, model.scaled(tensor, normal)


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
    read = loader.DefaultModelLoader._get_all_weights

    @functools.wraps(read)
    def weights(self: Any, model_config: Any, model_: Any) -> Iterator[tuple[str, Any]]:
        import torch

        described = json.loads((Path(model_config.model_path) / "config.json").read_text())
        if model.MARKER not in described:  # a draft model on disk
            yield from read(self, model_config, model_)
            return
        device = torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")
        with device:
            yield from tensors(described, device)

    loader.DefaultModelLoader._get_all_weights = weights
