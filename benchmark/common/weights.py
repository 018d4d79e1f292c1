"""Random weights with a model's own layer sizes, for benchmark servers: bfloat16, with NVFP4, INT4 or FP8 experts.

A checkpoint of Kimi-K2.5 has 10 GB per layer. Nobody wants to write and read that, so the model folder contains only
the configuration and the tokenizer. This module is also an engine plugin (``register``) that replaces the function that
reads weight files. It draws each tensor on the device, with the tensor's name as the seed. The engine's own weight
loaders, sharding and weight preparation do the rest. Every expert has its own weights. Block scales and activation
scales are chosen so that nothing saturates.
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
"""Environment variable. Its value is a JSON object with environment variables that the engine must not change."""
SERVABLE = {name: MODELS[name] for name in MODELS if MODELS[name].family and not name.endswith("-fused")} | TINY_MODELS
"""Models that these servers can load."""
RUNNERS = {"flashinfer_trtllm_routed": "nvfp4", "triton": None, "marlin": "int4"}
"""Quantization of the routed experts by the name of the MoE runner; ``None``: the experts are not quantized."""
INT4_GROUP = 32
"""Number of INT4 weights that share a scale, as in Kimi-K2.5's checkpoint."""
FP8_BLOCK = 128
"""Number of rows and of columns of FP8 weights that share a scale, as in the checkpoints of DeepSeek-V3 and Qwen3."""


@dataclass(frozen=True)
class ServedModel:
    """A few layers of a model. The layers have the model's own sizes. Only the vocabulary has another size.

    :param dense_layers: number of dense layers. It becomes 0 for a model without dense layers.
    :param moe_layers: number of MoE layers.
    :param runner: MoE runner, one of ``RUNNERS``.
    :param fp8: whether the routed experts are FP8 in blocks. The runner must have no quantization of its own.
    """

    model: Model
    dense_layers: int = 1
    moe_layers: int = 3
    runner: str = "flashinfer_trtllm_routed"
    fp8: bool = False

    def __post_init__(self) -> None:
        if self.fp8 and self.quantization != "fp8":
            raise ValueError(f"{self.runner} has {self.quantization} experts, so fp8 must be False")
        if not self.model.dense_layers:
            object.__setattr__(self, "dense_layers", 0)

    @property
    def quantization(self) -> str | None:
        """Quantization of the routed experts; ``None``: bfloat16. All other weights are bfloat16."""
        return RUNNERS[self.runner] or ("fp8" if self.fp8 else None)

    @property
    def layers(self) -> int:
        return self.dense_layers + self.moe_layers


def config(served: ServedModel) -> dict[str, Any]:
    """Build the config.json of a served model."""
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
        unquantized = ["self_attn", "shared_experts", "lm_head", *dense]
        values["quantization_config"] = {"quant_method": "fp8", **scheme, "modules_to_not_convert": unquantized}
    return values


def int4_config() -> dict[str, Any]:
    """Return the ``quantization_config`` of Kimi-K2.5's own checkpoint. Only the routed experts are quantized, to four
    bits without zero points.
    """
    scheme = {"num_bits": 4, "type": "int", "symmetric": True, "strategy": "group", "group_size": INT4_GROUP}
    groups = {"group_0": {"weights": scheme | {"dynamic": False}, "targets": ["Linear"]}}
    unquantized = ["self_attn", "shared_experts", r"mlp\.(gate|up|gate_up|down)_proj"]
    return {
        "quant_method": "compressed-tensors",
        "format": "pack-quantized",
        "quantization_status": "compressed",
        "config_groups": groups,
        "ignore": ["lm_head", *(f"re:.*{name}.*" for name in unquantized)],
    }


def write_folder(folder: Path, config_json: dict[str, Any]) -> Path:
    """Write a model folder: the configuration, and a tokenizer with few tokens.

    :param config_json: content of config.json.
    """
    folder.mkdir(parents=True)
    tokenizer = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": model.SPECIAL_TOKENS[model.EOS_ID]}
    (folder / "config.json").write_text(json.dumps(config_json))
    (folder / "tokenizer.json").write_text(model.tokenizer_json(), encoding="utf-8")
    (folder / "tokenizer_config.json").write_text(json.dumps(tokenizer))
    return folder


def write_model(folder: Path, served: ServedModel) -> Path:
    """Write the folder of a model without weights."""
    return write_folder(folder, config(served))


def write_checkpoint(folder: Path, served: ServedModel, seed: int, device: str) -> Path:
    """Write the folder of a model with weights, for tests that read weights from disk.

    :param seed: seed of all weights.
    :param device: device on which the weights are drawn.
    """
    from safetensors.torch import save_file

    config_json = config(served)
    config_json[model.MARKER]["seed"] = seed
    write_folder(folder, config_json)
    drawn = {name: tensor.cpu() for name, tensor in tensors(config_json, device)}
    save_file(drawn, str(folder / "model.safetensors"), metadata={"format": "pt"})
    return folder


# --- In the servers --------------------------------------------------------------------------------------------------


def named_generator(name: str, device: Any) -> Any:
    """Make a ``torch.Generator`` on a device. The name is its seed."""
    import torch

    return torch.Generator(device).manual_seed(int.from_bytes(hashlib.sha256(name.encode()).digest()[:7], "big"))


def draw_int4(packed: Any, generator: Any) -> None:
    """Draw INT4 weights from -7 to 7, packed as eight weights per int32.

    Uniform weights from -8 to 7 would have a mean of -0.5. After a few layers, the hidden states of all tokens would be
    alike, and nearly every token would go to the same experts.
    """
    import torch

    bits = torch.iinfo(packed.dtype)
    packed.random_(bits.min, bits.max, generator=generator)
    # In ``any_bit``, the lowest bit of each 4-bit code says whether the code is not 0. Code 0 (weight -8) becomes code
    # 8 (weight 0).
    any_bit = packed | packed >> 1 | packed >> 2 | packed >> 3
    packed |= (~any_bit & 0x11111111) << 3


def int4_scale(inputs: int) -> float:
    """Return the scale with which the weights of :func:`draw_int4` have a standard deviation of 1 / sqrt(inputs)."""
    return 1 / math.sqrt(
        17.5 * inputs
    )  # 17.5 is the mean square of the weights from -7 to 7, of which 0 is twice as probable


def tensors(c: dict[str, Any], device: Any) -> Iterator[tuple[str, Any]]:
    """Draw every tensor of a model's checkpoint.

    :param c: config.json of the model, with the seed.
    :returns: (name, tensor) pairs.
    """
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
        # The root mean square of uniform codes is 2.93, and the root mean square of these scales is 279.
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
    """Entry point of the engine plugin. It draws weights, and keeps the environment variables of ``VARIABLES_KEPT``."""
    import torch.distributed
    import wrapt

    kept_variables = json.loads(os.environ[VARIABLES_KEPT])
    start = torch.distributed.init_process_group

    @functools.wraps(start)
    def with_variables_kept(*args: Any, **kwargs: Any) -> Any:
        os.environ.update(kept_variables)
        print(f"benchmark: variables kept as on this machine: {kept_variables}", flush=True)
        return start(*args, **kwargs)

    torch.distributed.init_process_group = with_variables_kept
    os.environ.update(kept_variables)
    wrapt.register_post_import_hook(_replace_reader, "sglang.srt.model_loader.loader")


def _replace_reader(loader: Any) -> None:
    read = loader.DefaultModelLoader._get_all_weights

    @functools.wraps(read)
    def weights(self: Any, model_config: Any, model_: Any) -> Iterator[tuple[str, Any]]:
        import torch

        config_json = json.loads((Path(model_config.model_path) / "config.json").read_text())
        if model.MARKER not in config_json:  # the model is a draft model whose weights are files
            yield from read(self, model_config, model_)
            return
        device = torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")
        with device:
            yield from tensors(config_json, device)

    loader.DefaultModelLoader._get_all_weights = weights
