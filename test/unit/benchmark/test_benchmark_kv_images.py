"""benchmark/kv_images.py and the models that it and plan.py write: sizes, processor, what is asked, one row a load."""

from __future__ import annotations

import json
from argparse import Namespace
from types import SimpleNamespace
from typing import Any

import kv_images
import pytest
from common import kinds
from common.held import Line
from common.output import Result

CONFIG = kinds.config("qwen3-vl-30b", 1, 2, 1024)
FREE = [900, 700, 800, 600]


@pytest.mark.parametrize(
    ("name", "sizes"),
    [
        ("gpt-oss-120b", {"intermediate_size": 720, "num_attention_heads": 16, "num_key_value_heads": 2}),
        ("qwen3-next-80b", {"moe_intermediate_size": 128, "linear_num_value_heads": 8, "num_key_value_heads": 1}),
        ("qwen3-vl-30b", {"moe_intermediate_size": 192, "num_attention_heads": 8, "num_key_value_heads": 1}),
    ],
)
def test_a_rank_has_its_part_and_the_widths_are_the_models(name, sizes):
    whole, rank = (kinds.text(kinds.config(name, shard, 8, 4096)) for shard in (1, 4))
    assert {each: rank[each] for each in sizes} == sizes
    assert rank["hidden_size"] == whole["hidden_size"]
    assert (rank["num_hidden_layers"], rank["max_position_embeddings"]) == (8, 4096)
    assert kinds.text(kinds.CONFIGS[name])["num_hidden_layers"] >= 36  # the table itself is as it was


def test_every_other_layer_of_gpt_oss_has_a_window():
    made = kinds.config("gpt-oss-120b", 1, 3, 4096)
    assert made["layer_types"] == ["sliding_attention", "full_attention", "sliding_attention"]
    assert made["sliding_window"] == 128


def test_the_processor_takes_an_image_of_a_prompt_that_it_decodes_and_its_text_stays(tmp_path):
    from PIL import Image
    from transformers import AutoProcessor

    processor = AutoProcessor.from_pretrained(kinds.write(tmp_path / "model", CONFIG))
    ids = kinds.prompt(CONFIG, [5, 3, 4], seed=1)
    text = processor.tokenizer.decode(ids)
    assert processor.tokenizer.encode(text) == ids
    images = [Image.new("RGB", (512, 256))] * 2
    found = processor(text=[text], images=images, return_tensors="pt")
    each = 512 * 256 // (16 * 2) ** 2
    assert found["input_ids"].tolist()[0].count(CONFIG["image_token_id"]) == 2 * each
    assert len(found["input_ids"][0]) == len(ids) + 2 * (each - 1)
    assert len(found["pixel_values"]) == 2 * each * 4


def test_text_is_another_for_each_seed_or_it_would_come_from_the_cache():
    assert kinds.prompt(CONFIG, [32], 1) == kinds.prompt(CONFIG, [32], 1) != kinds.prompt(CONFIG, [32], 2)


class Answers:
    """In the place of HTTP: answers each prompt, and notes it and one forward."""

    def __init__(self, lines) -> None:
        self.lines = lines
        self.bodies: list[dict[str, Any]] = []

    def post(self, url: str, json: dict, **how):
        self.bodies.append(json)
        free = FREE[min(len(self.bodies) - 1, 3)]
        with self.lines.open("a") as file:
            file.write(_json(Line(0.0, "EXTEND", 1, 1, 10, 30, 50, free)))
        answer = {"output_ids": [1] * 4, "meta_info": {"prompt_tokens": len(json["input_ids"])}}
        return SimpleNamespace(status_code=200, json=lambda: answer)


def _json(line: Line) -> str:
    return json.dumps(vars(line)) + "\n"


def test_each_load_is_asked_with_its_images_and_keeps_what_was_free_during_it(tmp_path, monkeypatch):
    import httpx

    answers = Answers(tmp_path / "lines")
    answers.lines.write_text(_json(Line(0.0, "DECODE", 1, 1, 10, 10, 10, 1)))  # before any image
    monkeypatch.setattr(httpx, "post", answers.post)
    options = Namespace(chunk=40, pixels=1024, images=2, prompts=3)
    found = kv_images.drive(SimpleNamespace(url=""), CONFIG, options, answers.lines)
    assert [(load["requests"], load["images"]) for load in found] == [(1, 1), (2, 2), (1, 2), (4, 1)]
    assert found[0]["lowest_free"] == FREE[0]
    assert found[1]["lowest_free"] == FREE[1]
    assert {load["peak"] for load in found} == {20}
    images = [image for body in answers.bodies for image in body.get("image_data", [])]
    assert len(images) == len(set(images)) == 6
    for body in answers.bodies:
        assert body["input_ids"].count(CONFIG["image_token_id"]) == len(body.get("image_data", []))
    long = [tuple(body["input_ids"]) for body in answers.bodies if "image_data" not in body]
    assert len(set(long)) == 3
    assert {len(each) for each in long} == {40}


def test_what_is_not_answered_in_full_has_failed(monkeypatch):
    import httpx

    server = SimpleNamespace(url="")
    for answer in (SimpleNamespace(status_code=400, text="no"), SimpleNamespace(status_code=200, json=dict)):
        monkeypatch.setattr(httpx, "post", lambda *args, answer=answer, **how: answer)
        with pytest.raises(kv_images.Failed):
            kv_images.asked(server, [1], [])


def test_a_load_that_fails_is_the_last_and_is_kept_with_those_before(tmp_path, monkeypatch):
    def refuse(server, ids, images):
        if len(images) == 2:
            raise kv_images.Failed("gone")
        return len(ids)

    monkeypatch.setattr(kv_images, "asked", refuse)
    options = Namespace(chunk=40, pixels=1024, images=2, prompts=3)
    found = kv_images.drive(SimpleNamespace(url=""), CONFIG, options, tmp_path / "none")
    assert [load["failed"] for load in found] == ["", "", "gone"]


def test_a_row_has_the_prediction_beside_the_figure():
    load = {"name": "one image", "requests": 1, "images": 1, "tokens": 16_416, "seconds": 8.0, "forwards": 5}
    load |= {"longest": 16_416, "lowest_free": 3_000_000_000, "reserved": 0, "peak": 2_000_000_000}
    sizes = {"model": "qwen3-vl-30b", "shard": 1, "tp": 1, "layers": 48, "pixels": 16_777_216}
    result: Result = {"benchmark": "kv_images", "command": "", "conditions": {}, "figures": sizes | {"loads": [load]}}
    load["failed"] = ""
    row = "qwen3-vl-30b, 48 layers, 16,777,216 pixels: one image | 1 | 1 | 16,416 | 8.0 | 2,000 | 6,554 | 3,000 |  |"
    assert row in kv_images.tables([result])
