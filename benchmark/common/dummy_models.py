"""Configurations of models for servers with ``--load-format dummy``. Nothing is downloaded.

``dummy_models.json`` has the fields of each model's public ``config.json`` that decide sizes. Its entry *common*
belongs to all models.

- ``gpt-oss-120b``: openai/gpt-oss-120b with bfloat16 experts instead of MXFP4. Every other layer has a sliding window.
- ``gpt-oss-120b-mxfp4``: the same with MXFP4 experts and ``triton_kernels``, the engine's default on Hopper.
- ``qwen3-next-80b``: Qwen/Qwen3-Next-80B-A3B-Instruct. Of four layers, three have a Mamba state for each request, and
  one has a KV cache.
- ``deepseek-r1``: deepseek-ai/DeepSeek-R1-0528 in FP8, with its draft layer.
- ``kimi-k2.5-int4``: language model of moonshotai/Kimi-K2.5 in INT4, as in its own checkpoint.
- ``qwen3-vl-30b``: Qwen/Qwen3-VL-30B-A3B-Instruct from the configurations of `doctor --model`, with its vision model.
- ``qwen3-235b-fp8``: Qwen/Qwen3-235B-A22B-Instruct-2507-FP8.
- ``qwen3.5-397b-fp8``: Qwen/Qwen3.5-397B-A17B-FP8 with its vision model. It has Mamba states as Qwen3-Next.
"""

from __future__ import annotations

import json
from copy import deepcopy
from pathlib import Path
from typing import Any

from sglang_moe_patches.lab.predict.config import load_model
from sglang_moe_reference import model

from common import weights

_PUBLIC = json.loads(Path(__file__).with_suffix(".json").read_text(encoding="utf-8"))
_TOKENS = {"bos_token_id": model.BOS_ID, "eos_token_id": model.EOS_ID, "pad_token_id": model.PAD_ID}
_COMMON = _PUBLIC.pop("common") | _TOKENS
CONFIGS: dict[str, dict[str, Any]] = {name: _COMMON | own for name, own in _PUBLIC.items()}
CONFIGS["gpt-oss-120b-mxfp4"] = CONFIGS["gpt-oss-120b"] | {
    "quantization_config": {
        "quant_method": "mxfp4",
        "modules_to_not_convert": [
            *("model.layers.*.self_attn", "model.layers.*.mlp.router", "model.embed_tokens", "lm_head")
        ],
    }
}
RUNNERS = {"gpt-oss-120b-mxfp4": "triton_kernel", "qwen3-235b-nvfp4": "marlin"}
"""``--moe-runner-backend`` by model. Models without an entry use ``triton``."""
CONFIGS["kimi-k2.5-int4"] = (
    CONFIGS["deepseek-r1"]
    | {"num_attention_heads": 64, "num_key_value_heads": 64, "n_routed_experts": 384, "first_k_dense_replace": 1}
    | {"n_group": 1, "topk_group": 1, "routed_scaling_factor": 2.827, "num_nextn_predict_layers": 0}
    | {"rope_theta": 50_000.0, "vocab_size": 163_840, "quantization_config": weights.int4_config()}
)
IMAGE_TOKENS = {
    **{"vision_start_token_id": "<|vision_start|>", "vision_end_token_id": "<|vision_end|>"},
    **{"image_token_id": "<|image_pad|>", "video_token_id": "<|video_pad|>"},
}
"""Special tokens of models that take images, by their names in ``config.json``."""


def _image_model_config(source: str, first_token: int) -> dict[str, Any]:
    """Build the config.json of a model that takes images: ``doctor``'s copy, with fields that only a server needs.

    :param source: Hugging Face name of the model.
    :param first_token: id of the token that begins an image. The ids of three other tokens follow from it: the token
        that ends an image (+1), the image token (+3) and the video token (+4).
    """
    own = load_model(source)[0]
    # Without this field, the engine's default would add Qwen3-VL's deepstack layers.
    own["vision_config"].setdefault("deepstack_visual_indexes", [])
    tokens = dict(zip(IMAGE_TOKENS, (first_token + place for place in (0, 1, 3, 4)), strict=True))
    return own | _TOKENS | tokens | {"vocab_size": own["text_config"]["vocab_size"]}


CONFIGS["qwen3-vl-30b"] = _image_model_config("Qwen/Qwen3-VL-30B-A3B-Instruct", 151_652)
CONFIGS["qwen3-235b-fp8"] = (
    load_model("Qwen/Qwen3-235B-A22B-FP8")[0] | _TOKENS | {"rope_theta": 5_000_000.0, "rms_norm_eps": 1e-06}
)
CONFIGS["qwen3.5-397b-fp8"] = _image_model_config("Qwen/Qwen3.5-397B-A17B-FP8", 248_053)
IMAGE = "<|vision_start|><|image_pad|><|vision_end|>"
"""Text in a prompt at the place of an image."""
CHAT_TEMPLATE = (
    "{% for message in messages %}{% if message.content is string %}{{ message.content }}{% else %}"
    "{% for part in message.content %}{% if part.type == 'image' %}" + IMAGE + "{% else %}{{ part.text }}{% endif %}"
    "{% endfor %}{% endif %}{% endfor %}"
)
"""Chat template of models that take images. The engine needs it for its warm-up request with an image. The engine's
client needs it to build prompts."""
DIVIDED_SIZES = (
    *("num_attention_heads", "num_key_value_heads", "linear_num_value_heads", "linear_num_key_heads"),
    *("moe_intermediate_size", "shared_expert_intermediate_size"),
)
"""Fields of config.json with sizes that tensor-parallel ranks divide among themselves."""


def config(name: str, shard: int, layers: int, context: int) -> dict[str, Any]:
    """Build the config.json of a model with fewer layers. Its sizes are those of one tensor-parallel rank.

    :param name: key of ``CONFIGS``.
    :param shard: number of tensor-parallel ranks among which the sizes are divided.
    :param layers: number of layers.
    :param context: maximum length of a request, in tokens.
    """
    own = deepcopy(CONFIGS[name])
    sizes = {"num_hidden_layers": layers, "max_position_embeddings": context}
    if (text := own.get("text_config")) is not None:  # the vision model keeps its sizes
        text |= {size: max(1, text[size] // shard) for size in DIVIDED_SIZES if size in text} | sizes
        return own
    own |= {size: max(1, own[size] // shard) for size in DIVIDED_SIZES if size in own}
    windowed = own["model_type"] == "gpt_oss"
    if windowed or name in ("deepseek-r1", "kimi-k2.5-int4"):
        own["intermediate_size"] //= shard
    if windowed:
        own["layer_types"] = [("sliding_attention", "full_attention")[layer % 2] for layer in range(layers)]
    if "first_k_dense_replace" in own:
        own["first_k_dense_replace"] = min(own["first_k_dense_replace"], layers - 1)
    return own | sizes


def processor_files(vision: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """Return the content of the processor files that the engine reads for images, by file name.

    :param vision: ``vision_config`` of the model.
    """
    size = {"shortest_edge": 65_536, "longest_edge": 16_777_216}  # areas in pixels, as in the published processor files
    common = {"patch_size": vision["patch_size"], "temporal_patch_size": 2, "merge_size": 2, "size": size}
    common |= {"image_mean": [0.5] * 3, "image_std": [0.5] * 3, "processor_class": "Qwen3VLProcessor"}
    return {
        "preprocessor_config.json": common | {"image_processor_type": "Qwen2VLImageProcessorFast"},
        "video_preprocessor_config.json": common | {"video_processor_type": "Qwen3VLVideoProcessor"},
    }


def write(folder: Path, config_json: dict[str, Any]) -> Path:
    """Write the model folder for a server, with processor files and chat template if the model takes images."""
    weights.write_folder(folder, config_json)
    if vision := config_json.get("vision_config"):
        for name, content in processor_files(vision).items():
            (folder / name).write_text(json.dumps(content))
        (folder / "chat_template.jinja").write_text(CHAT_TEMPLATE)
    return folder
