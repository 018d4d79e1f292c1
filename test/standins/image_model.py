"""A tiny Qwen3-VL model with experts, and what the engine reads to take images: its processors' files."""

from __future__ import annotations

import base64
import io
import json
from pathlib import Path

from architectures import CONFIGS
from sglang_moe_patches.lab.reference import model

PATCH = {"patch_size": 16, "temporal_patch_size": 2}
IMAGE = "<|vision_start|><|image_pad|><|vision_end|>"
"""In a prompt, the place of an image."""
TEMPLATE = (
    "{% for message in messages %}{% for part in message.content %}"
    "{% if part.type == 'image' %}" + IMAGE + "{% else %}{{ part.text }}{% endif %}"
    "{% endfor %}{% endfor %}"
)
"""Of a chat: by one the engine asks about an image before it says that a server is ready."""
PROCESSOR = PATCH | {"merge_size": 2, "size": {"shortest_edge": 1024, "longest_edge": 262_144}}
PROCESSOR |= {"image_mean": [0.5] * 3, "image_std": [0.5] * 3, "processor_class": "Qwen3VLProcessor"}


def write(folder: Path) -> Path:
    """Without weights, for ``--load-format dummy``."""
    from tokenizers import AddedToken, Tokenizer

    folder.mkdir()
    tokenizer = Tokenizer.from_str(model.tokenizer_json())
    named = ("vision_start", "vision_end", "image_pad", "video_pad")
    tokenizer.add_special_tokens([AddedToken(f"<|{name}|>", special=True, normalized=False) for name in named])
    start, end, image, video = (tokenizer.token_to_id(f"<|{name}|>") for name in named)
    tokenizer.save(str(folder / "tokenizer.json"))
    vocabulary = {"vocab_size": tokenizer.get_vocab_size()}
    own = CONFIGS["qwen3-vl-moe"]
    # The engine adds what layers 0, 1 and 2 of the vision model saw to the same layers of the text model.
    vision = own["vision_config"] | PATCH | {"depth": 3, "deepstack_visual_indexes": [0, 1, 2]}
    vision |= {"spatial_merge_size": 2, "num_position_embeddings": 64, "in_channels": 3}
    tokens = {"vision_start_token_id": start, "vision_end_token_id": end}
    tokens |= {"image_token_id": image, "video_token_id": video}
    sizes = {"text_config": own["text_config"] | vocabulary, "vision_config": vision}
    special = dict(zip(("bos_token", "eos_token", "pad_token"), model.SPECIAL_TOKENS, strict=True))
    files = {
        "config.json": own | vocabulary | tokens | sizes,
        "tokenizer_config.json": special | {"tokenizer_class": "PreTrainedTokenizerFast", "chat_template": TEMPLATE},
        "preprocessor_config.json": PROCESSOR | {"image_processor_type": "Qwen2VLImageProcessorFast"},
        "video_preprocessor_config.json": PROCESSOR | {"video_processor_type": "Qwen3VLVideoProcessor"},
    }
    for name, content in files.items():
        (folder / name).write_text(json.dumps(content))
    return folder


def picture(width: int, height: int) -> str:
    """A PNG as a URL, each pixel of another colour."""
    from PIL import Image

    drawn = Image.new("RGB", (width, height))
    drawn.putdata([(x * 7 % 256, y * 5 % 256, (x + y) % 256) for y in range(height) for x in range(width)])
    into = io.BytesIO()
    drawn.save(into, "PNG")
    return "data:image/png;base64," + base64.b64encode(into.getvalue()).decode()
