"""Models with more than one kind of memory, for servers with ``--load-format dummy``: windows, states, images.

What is in the folder is their public ``config.json`` as far as it decides sizes, by the Hugging Face repository that
each is named after, and for images a processor with the model's own limits and a tokenizer of few tokens. Nothing is
downloaded.
"""

from __future__ import annotations

import json
import random
from copy import deepcopy
from pathlib import Path
from typing import Any

from sglang_moe_patches.lab.reference import model

COMMON: dict[str, Any] = {
    "num_hidden_layers": 48,
    "hidden_act": "silu",
    "attention_bias": False,
    "rms_norm_eps": 1e-6,
    "torch_dtype": "bfloat16",
    "tie_word_embeddings": False,
    "vocab_size": 151_936,
    "bos_token_id": model.BOS_ID,
    "eos_token_id": model.EOS_ID,
    "pad_token_id": model.PAD_ID,
}
_QWEN3_MOE = COMMON | {"hidden_size": 2048, "head_dim": 128, "decoder_sparse_step": 1, "mlp_only_layers": []}
_YARN = {"rope_type": "yarn", "factor": 32.0, "beta_fast": 32.0, "beta_slow": 1.0, "truncate": False}
IMAGE, VIDEO, BEGIN, END = "<|image_pad|>", "<|video_pad|>", "<|vision_start|>", "<|vision_end|>"
SPECIAL = {BEGIN: 151_652, END: 151_653, IMAGE: 151_655, VIDEO: 151_656}
"""Of Qwen's vision models, by id: where an image begins and ends, and what stands for a part of it."""
CONFIGS: dict[str, dict[str, Any]] = {
    # openai/gpt-oss-120b; its experts are MXFP4 there, bfloat16 here. Every other layer has a window.
    "gpt-oss-120b": COMMON
    | {"architectures": ["GptOssForCausalLM"], "model_type": "gpt_oss", "num_hidden_layers": 36}
    | {"hidden_size": 2880, "intermediate_size": 2880, "num_local_experts": 128, "num_experts_per_tok": 4}
    | {"num_attention_heads": 64, "num_key_value_heads": 8, "head_dim": 64, "attention_bias": True}
    | {"sliding_window": 128, "initial_context_length": 4096, "swiglu_limit": 7.0, "rms_norm_eps": 1e-5}
    | {"rope_theta": 150_000, "rope_scaling": _YARN | {"original_max_position_embeddings": 4096}}
    | {"vocab_size": 201_088},
    # Qwen/Qwen3-Next-80B-A3B-Instruct: three layers with a state for each request, one with a KV cache.
    "qwen3-next-80b": _QWEN3_MOE
    | {"architectures": ["Qwen3NextForCausalLM"], "model_type": "qwen3_next", "head_dim": 256}
    | {"num_attention_heads": 16, "num_key_value_heads": 2, "intermediate_size": 5120, "partial_rotary_factor": 0.25}
    | {"moe_intermediate_size": 512, "shared_expert_intermediate_size": 512, "num_experts": 512}
    | {"num_experts_per_tok": 10, "norm_topk_prob": True, "full_attention_interval": 4, "rope_theta": 10_000_000}
    | {"linear_num_value_heads": 32, "linear_num_key_heads": 16, "linear_conv_kernel_dim": 4}
    | {"linear_key_head_dim": 128, "linear_value_head_dim": 128},
    # Qwen/Qwen3-VL-30B-A3B-Instruct
    "qwen3-vl-30b": {
        "architectures": ["Qwen3VLMoeForConditionalGeneration"],
        "model_type": "qwen3_vl_moe",
        "torch_dtype": "bfloat16",
        "tie_word_embeddings": False,
        "image_token_id": SPECIAL[IMAGE],
        "video_token_id": SPECIAL[VIDEO],
        "vision_start_token_id": SPECIAL[BEGIN],
        "vision_end_token_id": SPECIAL[END],
        "text_config": _QWEN3_MOE
        | {"model_type": "qwen3_vl_moe_text", "num_attention_heads": 32, "num_key_value_heads": 4}
        | {"intermediate_size": 6144, "moe_intermediate_size": 768, "num_experts": 128, "num_experts_per_tok": 8}
        | {"norm_topk_prob": True, "rope_theta": 5_000_000}
        | {"rope_scaling": {"rope_type": "default", "mrope_interleaved": True, "mrope_section": [24, 20, 20]}},
        "vision_config": {"model_type": "qwen3_vl_moe", "depth": 27, "hidden_size": 1152, "intermediate_size": 4304}
        | {"num_heads": 16, "in_channels": 3, "patch_size": 16, "spatial_merge_size": 2, "temporal_patch_size": 2}
        | {"out_hidden_size": 2048, "num_position_embeddings": 2304, "deepstack_visual_indexes": [8, 16, 24]}
        | {"hidden_act": "gelu_pytorch_tanh"},
    },
}
SHARED = (
    *("num_attention_heads", "num_key_value_heads", "linear_num_value_heads", "linear_num_key_heads"),
    *("moe_intermediate_size", "shared_expert_intermediate_size"),
)
"""What a tensor-parallel rank has its part of; the vision model, whose heads tell its width, is whole."""
PIXELS = {"shortest_edge": 65_536, "longest_edge": 16_777_216}
"""The smallest and the largest image that the model's processor makes of any, in pixels."""


def text(config: dict[str, Any]) -> dict[str, Any]:
    """The part of a configuration that is about the language model."""
    found: dict[str, Any] = config.get("text_config", config)
    return found


def sees(name: str) -> bool:
    """Whether a model takes images."""
    return "vision_config" in CONFIGS.get(name, ())


def config(name: str, shard: int, layers: int, context: int) -> dict[str, Any]:
    """config.json of so many layers of the model, at the sizes of one of ``shard`` tensor-parallel ranks."""
    made = deepcopy(CONFIGS[name])
    own = text(made)
    own |= {each: max(1, own[each] // shard) for each in SHARED if each in own}
    if name == "gpt-oss-120b":
        own["intermediate_size"] //= shard
        own["layer_types"] = [("sliding_attention", "full_attention")[layer % 2] for layer in range(layers)]
    own |= {"num_hidden_layers": layers, "max_position_embeddings": context}
    return made


def write(folder: Path, made: dict[str, Any], pixels: dict[str, int] | None = None) -> Path:
    """The folder that a server is given.

    :param made: config.json; with a part for vision, a processor of Qwen's goes with it.
    :param pixels: the least and the most of an image; ``None``: the model's own.
    """
    folder.mkdir(parents=True)
    vision = made.get("vision_config")
    files: dict[str, Any] = {
        "config.json": made,
        "tokenizer.json": tokenizer(SPECIAL if vision else {}),
        "tokenizer_config.json": {
            "tokenizer_class": "Qwen2TokenizerFast" if vision else "PreTrainedTokenizerFast",
            "eos_token": model.SPECIAL_TOKENS[model.EOS_ID],
        },
    }
    if vision:
        sizes = {name: vision[name] for name in ("patch_size", "temporal_patch_size")}
        sizes |= {"merge_size": vision["spatial_merge_size"], "size": pixels or PIXELS}
        sizes |= {"image_mean": [0.5] * 3, "image_std": [0.5] * 3, "processor_class": "Qwen3VLProcessor"}
        files["preprocessor_config.json"] = sizes | {"image_processor_type": "Qwen2VLImageProcessorFast"}
        files["video_preprocessor_config.json"] = sizes | {"video_processor_type": "Qwen3VLVideoProcessor"}
    for file, content in files.items():
        (folder / file).write_text(json.dumps(content))
    return folder


def tokenizer(special: dict[str, int]) -> dict[str, Any]:
    """The reference model's, with more special tokens, at their own ids."""
    made: dict[str, Any] = json.loads(model.tokenizer_json())
    made["model"]["vocab"] |= special
    form = made["added_tokens"][0]
    made["added_tokens"] += [form | {"content": content, "id": number} for content, number in special.items()]
    return made


def prompt(made: dict[str, Any], counts: list[int], seed: int) -> list[int]:
    """So many tokens of text, an image, more text and so on; of another seed, all other text.

    Text is digits: the tokenizer never merges them, so that a prompt that a processor decodes keeps its length.
    """
    image = [made[f"{each}_token_id"] for each in ("vision_start", "image", "vision_end")]
    digits = [model._vocabulary()[0][digit] for digit in "0123456789"]
    draw = random.Random(seed)
    ids = draw.choices(digits, k=counts[0])
    for count in counts[1:]:
        ids += [*image, *draw.choices(digits, k=count)]
    return ids
