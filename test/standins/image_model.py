"""Write a tiny Qwen3-VL model with routed experts, and make pictures to send to it."""

from __future__ import annotations

import base64
import io
import json
from pathlib import Path

from architectures import CONFIGS
from common import dummy_models
from sglang_moe_reference import model


def write(folder: Path) -> Path:
    """Write the model's configuration and tokenizer without weights, for ``--load-format dummy``.

    :returns: the folder.
    """
    from tokenizers import AddedToken, Tokenizer

    tokenizer = Tokenizer.from_str(model.tokenizer_json())
    named = dummy_models.IMAGE_TOKENS
    tokenizer.add_special_tokens([AddedToken(word, special=True, normalized=False) for word in named.values()])
    own, vocabulary = CONFIGS["qwen3-vl-moe"], {"vocab_size": tokenizer.get_vocab_size()}
    # The engine adds the results of the vision model's layers 0, 1 and 2 to the same layers of the text model.
    vision = own["vision_config"] | {"depth": 3, "deepstack_visual_indexes": [0, 1, 2], "patch_size": 16}
    vision |= {"temporal_patch_size": 2, "spatial_merge_size": 2, "num_position_embeddings": 64}
    tokens = {name: tokenizer.token_to_id(word) for name, word in named.items()}
    sizes = {"text_config": own["text_config"] | vocabulary, "vision_config": vision}
    dummy_models.write(folder, own | vocabulary | tokens | sizes)
    tokenizer.save(str(folder / "tokenizer.json"))
    special = dict(zip(("bos_token", "eos_token", "pad_token"), model.SPECIAL_TOKENS, strict=True))
    special |= {"tokenizer_class": "PreTrainedTokenizerFast"}
    (folder / "tokenizer_config.json").write_text(json.dumps(special))
    return folder


def picture(width: int, height: int) -> str:
    """Return a PNG image as a data URL. Neighbouring pixels differ in colour."""
    from PIL import Image

    drawn = Image.new("RGB", (width, height))
    drawn.putdata([(x * 7 % 256, y * 5 % 256, (x + y) % 256) for y in range(height) for x in range(width)])
    into = io.BytesIO()
    drawn.save(into, "PNG")
    return "data:image/png;base64," + base64.b64encode(into.getvalue()).decode()
