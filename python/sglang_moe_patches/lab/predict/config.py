"""Read a model's sizes from its ``config.json``.

Weights are neither read nor fetched.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sglang_moe_patches.lab.predict.shapes import Latent, Model

_EXPERTS = ("n_routed_experts", "num_experts", "num_local_experts", "moe_num_experts")
_TOP_K = (
    *("num_experts_per_tok", "num_experts_per_token", "experts_per_token", "moe_top_k", "moe_topk", "moe_k"),
    *("moe_router_topk", "top_k_experts"),
)
_SIZES = ("moe_intermediate_size", "expert_ffn_hidden_size", "intermediate_size")
_DENSE_SIZES = (
    *("intermediate_size_mlp", "dense_intermediate_size", "prefix_dense_intermediate_size"),
    *("intermediate_size", "ffn_hidden_size"),
)
_SHARED = ("n_shared_experts", "num_shared_experts", "num_shared_expert", "moe_num_shared_experts")
_SHARED_SIZES = (
    *("shared_expert_intermediate_size", "share_expert_dim", "shared_intermediate_size"),
    "moe_shared_expert_intermediate_size",
)
_FIRST_LAYERS = ("first_k_dense_replace", "num_dense_layers", "moe_layer_start_index", "dense_mlp_idx")
_TEXT = ("text_config", "language_config", "llm_config")
FAMILIES = {
    "DeepseekV3ForCausalLM": ("deepseek-v3", "deepseek_v2"),
    "Qwen3MoeForCausalLM": ("qwen3-moe", "qwen3_moe"),
    "Glm4MoeForCausalLM": ("glm4-moe", "glm4_moe"),
    "MiniMaxM2ForCausalLM": ("minimax-m2", "minimax_m2"),
}
"""Model families whose layers the changes know. The key is the engine's model class. The value is the family's name,
and the module below ``sglang.srt.models`` that contains the family's layers."""


class NoConfig(ValueError):
    """Raised if no ``config.json`` of a mixture-of-experts model can be read. The message says why in one line."""


@dataclass(frozen=True)
class ModelSizes:
    """Sizes of a model from its ``config.json``.

    :param model: sizes of the language model.
    :param attention: reason why the memory of attention's tensors cannot be predicted; empty if it can be predicted.
    :param residual: reason why the memory of the [tokens, hidden] tensors between the layers cannot be predicted; empty
        if it can be predicted.
    """

    model: Model
    attention: str = ""
    residual: str = ""


def find(model: str) -> Path:
    """Return the path of a model's ``config.json``.

    :param model: folder with the file, path of the file, or Hugging Face name whose file is in the local cache.
    :raises NoConfig: no ``config.json`` was found.
    """
    if not model.strip():
        raise NoConfig("--model is empty: give a folder with config.json, that file, or a Hugging Face name")
    path = Path(model).expanduser()
    if path.suffix.lower() == ".gguf":
        raise NoConfig(
            f"{model} is a GGUF file, which has no config.json: give the folder of the model it was made from"
        )
    if path.is_file():
        return path
    if path.is_dir():
        if (path / "config.json").is_file():
            return path / "config.json"
        if any(path.glob("*.gguf")):
            raise NoConfig(
                f"{model} has GGUF files and no config.json: give the folder of the model they were made from"
            )
        raise NoConfig(f"the folder {model} has no config.json")
    if model.count("/") != 1 or model.startswith((".", "/", "~")):
        raise NoConfig(f"{model} is neither a folder, nor a file, nor a Hugging Face name")
    try:
        from huggingface_hub import try_to_load_from_cache
    except ImportError:
        raise NoConfig(f"{model}: huggingface_hub is not installed; give a folder with config.json") from None
    cached = try_to_load_from_cache(model, "config.json")
    if not isinstance(cached, str):
        raise NoConfig(
            f"{model}'s config.json is not in the local cache; to download it, run `hf download {model} config.json`"
        )
    return Path(cached)


def served_models() -> list[dict[str, Any]]:
    """Return a list of models that people serve. Each entry is a dictionary with the model's public ``config.json``,
    its weight format and its hardware."""
    models: list[dict[str, Any]] = json.loads(Path(__file__).with_name("models.json").read_text(encoding="utf-8"))
    return models


def load_model(model: str) -> tuple[dict[str, Any], Path | None]:
    """Return the content and the path of a model's ``config.json``. The path is ``None`` if the content comes from
    :func:`served_models`.

    :param model: model, as :func:`find` takes it, or the name of one of :func:`served_models`.
    :raises NoConfig: no ``config.json`` was found.
    """
    try:
        path = find(model)
    except NoConfig:
        for served in served_models():
            if model.lower() == served["source"].lower():
                return served["config"], None
        raise
    return load(path), path


def load(path: Path) -> dict[str, Any]:
    """Return the content of a ``config.json`` file.

    :raises NoConfig: the file contains no JSON object.
    """
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise NoConfig(f"{path} cannot be read: {error}") from None
    if not isinstance(config, dict):
        raise NoConfig(f"{path} contains no JSON object")
    return config


def check_class(config: Mapping[str, Any], source: str) -> None:
    """Raise an error if a ``config.json`` lacks ``architectures`` or ``model_type``. The engine cannot build a model
    without them.

    :param source: name of the model, for the error message.
    :raises NoConfig: one of the two fields is missing.
    """
    for name, words in (("architectures", "the class of the model"), ("model_type", "the kind of the configuration")):
        if not config.get(name):
            raise NoConfig(
                f"{source}: config.json has no {name} ({words}); copy this field from config.json on the model's page"
            )


MODEL_TYPES = {"kimi_k2": "deepseek_v3"}
"""Replacements for values of ``model_type`` that transformers does not know, because the model's class comes with the
checkpoint. The replacement is a type of transformers with the same fields."""


def text_config(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the part of a configuration that describes the language model. If the configuration has no such part,
    return the whole configuration."""
    return next((config[name] for name in _TEXT if isinstance(config.get(name), Mapping)), config)


def language_model(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the configuration of the language model within a multimodal model, if the engine can build the language
    model alone. Otherwise return the whole configuration.

    The encoders of a multimodal model have no experts, and the engine takes minutes to build them.
    """
    text = text_config(config)
    if text is config or not text.get("architectures"):
        return config
    beside = ("quantization_config", "compression_config")
    known = MODEL_TYPES.get(str(text.get("model_type")))
    model_type = {"model_type": known} if known else {}
    return {**text, **model_type, **{name: config[name] for name in beside if name in config}}


def read_sizes(config: Mapping[str, Any], source: str) -> ModelSizes:
    """Return the sizes of a model.

    Models name their sizes differently. The function tries the names of all public models.

    :param source: name of the model, for the error message.
    :raises NoConfig: a size is missing, or the model has no routed experts.
    """
    text = text_config(config)

    def first(*names: str) -> Any:
        return next((text[name] for name in names if text.get(name) is not None), None)

    def largest(value: Any) -> Any:
        """Return the largest number of a list, or a single number itself. Hunyuan lists one number per layer, and ERNIE
        VL lists one number per kind of experts."""
        return max(value) if isinstance(value, list) and value and all(type(item) is int for item in value) else value

    def size(*names: str) -> int:
        number = largest(first(*names))
        if not isinstance(number, int) or isinstance(number, bool):
            others = f", nor under {', '.join(names[1:])}" if names[1:] else ""
            raise NoConfig(
                f"{source}: config.json has no number under the key {names[0]}{others}{_describe_unknown_keys(text)}"
            )
        return number

    if first(*_EXPERTS) is None and (others := _describe_unknown_keys(text)):
        raise NoConfig(
            f"{source}: the number of experts cannot be read, because config.json has none of the keys "
            f"{', '.join(_EXPERTS)}{others}"
        )
    if first(*_EXPERTS) is None:
        raise NoConfig(f"{source} has no routed experts: config.json has none of the keys {', '.join(_EXPERTS)}")
    if (experts := size(*_EXPERTS)) < 2:
        raise NoConfig(f"{source} has no routed experts: the number of experts in config.json is {experts}")
    architectures = [*(config.get("architectures") or []), *(text.get("architectures") or [])]
    heads, hidden = size("num_attention_heads"), size("hidden_size")
    dense = dense_layers(text)
    latent = Latent()
    if first("kv_lora_rank"):
        latent = Latent(size("kv_lora_rank"), size("qk_rope_head_dim"), size("qk_nope_head_dim"), size("v_head_dim"))
    model = Model(
        source,
        layers=size("num_hidden_layers", "num_layers"),
        dense_layers=dense,
        hidden=hidden,
        experts=experts,
        top_k=size(*_TOP_K),
        moe_intermediate=size(*_SIZES),
        shared_experts=largest(first(*_SHARED)) or int(any(first(name) for name in _SHARED_SIZES)),
        intermediate=size(*_DENSE_SIZES) if dense else 0,
        heads=heads,
        kv_heads=first("num_key_value_heads", "num_attention_groups") or heads,
        q_lora_rank=first("q_lora_rank") if first("kv_lora_rank") else None,
        family=next((FAMILIES[name][0] for name in architectures if name in FAMILIES), ""),
        head_dim=first("head_dim") or hidden // heads,
        latent=latent,
    )
    return ModelSizes(model, _find_unsupported_attention(first), _find_unsupported_residual(first))


def _describe_unknown_keys(text: Mapping[str, Any]) -> str:
    """Return the end of an error message: a list of the keys in ``config.json`` that are about experts, but that doctor
    does not know. Return an empty text if there are no such keys."""
    known = {*_EXPERTS, *_TOP_K, *_SIZES, *_SHARED, *_SHARED_SIZES, *_FIRST_LAYERS}
    sections = ("", text), *((f"{name}.", part) for name, part in text.items() if isinstance(part, Mapping))
    keys = [
        prefix + name
        for prefix, part in sections
        for name, value in part.items()
        if ("expert" in name or "moe" in name) and not (prefix == "" and name in known) and value not in (None, False)
    ]
    return f"; keys about experts that doctor does not know: {', '.join(keys)}" if keys else ""


def dense_layers(text: Mapping[str, Any]) -> int:
    """Return the number of layers without experts at the beginning of a model."""
    for name in ("moe_layer_freq", "mlp_layer_types", "is_moe_layer"):  # one value for each layer
        if isinstance(kinds := text.get(name), list):
            sparse = [kind in (1, "sparse") for kind in kinds]
            return sparse.index(True) if True in sparse else len(sparse)
    if numbers := text.get("moe_layers_enum"):  # models of the Step family: "4,5,6"
        return min(int(number) for number in (numbers.split(",") if isinstance(numbers, str) else numbers))
    if without := text.get("mlp_only_layers"):
        return next(layer for layer in range(len(without) + 1) if layer not in without)
    for name in ("interleave_moe_layer_step", "decoder_sparse_step"):
        if (step := text.get(name)) is not None:
            return max(0, step - 1)
    number = next((text[name] for name in _FIRST_LAYERS if text.get(name)), 0)
    return min(number) if isinstance(number, list) else number


def _find_unsupported_residual(first: Any) -> str:
    """Return the reason why the memory of the [tokens, hidden] tensors between the layers cannot be predicted; empty if
    it can be predicted."""
    for name, why in (
        ("hc_mult", "the residual of this model has several streams"),
        ("zero_expert_num", "the experts of this model run in parallel with attention and dense layers"),
        ("moe_latent_size", "the experts of this model have a different hidden size than its other layers"),
        ("routed_expert_hidden_size", "the experts of this model have a different hidden size than its other layers"),
        ("moe_hidden_size", "the experts of this model have a different hidden size than its other layers"),
    ):
        if first(name):
            return f"{why} ({name} in config.json)"
    return ""


def _find_unsupported_attention(first: Any) -> str:
    """Return the reason why the memory of a model's attention cannot be predicted; empty if it can be
    predicted."""
    for keys, why in (
        (("compress_ratios", "o_lora_rank"), "attends to compressed keys"),
        (("index_topk", "sparse_attention_config"), "attends to keys that an indexer chooses"),
        (("linear_num_value_heads", "linear_attn_config"), "has layers of linear attention"),
        (("swa_head_dim", "swa_v_head_dim"), "has heads of several sizes"),
        (("mamba_num_heads", "hybrid_override_pattern"), "is mixed with Mamba layers"),
    ):
        if any(first(key) is not None for key in keys):
            return why
    if first("kv_lora_rank") and not first("q_lora_rank"):
        return "has latents for keys and values, but none for queries"
    return ""
