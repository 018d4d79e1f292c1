"""benchmark/memory/serving.py: what the engine's client is told, and what is kept of several runs."""

from __future__ import annotations

import json
import sys
from contextlib import nullcontext
from itertools import pairwise

import pytest
import torch
from common import kinds
from memory import serving
from tokenizers import Tokenizer


def options(monkeypatch, *arguments: str):
    """As parsed, up to where a GPU is wanted."""
    found = []
    monkeypatch.setattr(sys, "argv", ["benchmark/memory/serving.py", *arguments])
    monkeypatch.setattr(serving.output, "parse", lambda parser: found.append(parser.parse_args()) or found[0])
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(SystemExit) as ended:
        serving.main()
    assert ended.value.code == 2
    return found[0]


@pytest.mark.parametrize("lengths", [("--chunk", "8192"), ("--chunk", "32768", "--context", "10240")])
def test_prompts_before_the_load_fill_a_chunk_and_fit_the_context(monkeypatch, lengths):
    given = options(monkeypatch, *lengths)
    for _, tokens in (asked := serving.warm_up_prompts(given)):
        assert tokens + serving.WARM_UP_TOKENS < given.context
    assert asked[0][0] * asked[0][1] >= given.chunk * 15 // 16


def test_the_client_asks_for_lengths_and_answers_as_said(monkeypatch, tmp_path):
    given = options(monkeypatch, "--input", "3000,9000", "--output", "768", "--prompts", "200")
    command = serving.bench_command(given, tmp_path, "http://here", tmp_path / "into")
    told = dict(pairwise(command))
    assert int(9000 * float(told["--random-range-ratio"])) == 3000
    assert (told["--random-input-len"], told["--num-prompts"]) == ("9000", "200")
    assert json.loads(told["--extra-request-body"])["sampling_params"]["max_new_tokens"] == 768
    given = options(monkeypatch, "--images", "2", "--input", "30000")
    images = serving.bench_command(given, tmp_path, "http://here", tmp_path / "into")
    assert images[images.index("--dataset-name") + 1 :][:3] == ["image", "--image-count", "2"]
    assert "--tokenize-prompt" not in images
    assert dict(pairwise(images))["--random-range-ratio"] == "1.0"


@pytest.mark.parametrize(
    ("found", "why"),
    [
        ({}, ""),
        # So many were counted of a load on an H100 in which no request failed.
        ({"total_output_tokens": 120 * 256 - 5}, ""),
        ({"total_output_tokens": 119 * 256 + 1}, "30465 of 30720 new tokens came"),
        ({"completed": 119}, "1 requests failed"),
        ({"total_input_vision_tokens": 239 * 880}, "the client has left images out"),
    ],
)
def test_a_load_of_which_something_is_missing_is_refused(monkeypatch, found, why):
    given = options(monkeypatch, "--images", "2", "--prompts", "120", "--output", "256")
    whole = {"completed": 120, "total_output_tokens": 120 * 256, "total_input_vision_tokens": 240 * 880}
    assert serving.left_out(whole | found, given) == why


def test_a_model_that_takes_images_is_divided_but_for_its_vision_model():
    own = kinds.config("qwen3.5-397b-fp8", 8, 4, 2048)
    text = own["text_config"]
    sizes = ("num_attention_heads", "num_key_value_heads", "linear_num_value_heads", "moe_intermediate_size")
    assert [text[size] for size in sizes] == [4, 1, 8, 128]
    assert (text["num_hidden_layers"], text["max_position_embeddings"], text["num_experts"]) == (4, 2048, 512)
    assert own["vision_config"] == kinds.config("qwen3.5-397b-fp8", 1, 60, 4096)["vision_config"]


def test_each_token_is_a_word(monkeypatch):
    made = Tokenizer.from_str(serving.tokenizer_json(300, {298: "<image>"}))
    assert made.get_vocab_size() == 300
    assert made.decode([1, 298, 299]) == "1 <image> 12b"
    assert made.encode("1<image>12b ?").ids == [1, 298, 299, 0]


def test_a_later_run_adds_to_an_earlier_one_of_the_same_load_alone(tmp_path):
    path = tmp_path / "found.json"
    assert serving.earlier(path, {"model": "m", "servers": {}}) == {}
    path.write_text(json.dumps({"figures": {"model": "m", "input": [1, 2], "servers": {"stock": {"tokens": 1}}}}))
    same = {"model": "m", "input": (1, 2), "servers": {}}
    assert serving.earlier(path, same) == {"stock": {"tokens": 1}}
    with pytest.raises(SystemExit, match="is of another configuration"):
        serving.earlier(path, {**same, "model": "n"})


def test_servers_with_a_record_share_it_with_their_first_start_and_with_nobody_else(tmp_path, monkeypatch):
    monkeypatch.setattr(serving, "has_gpu", lambda: True)
    records = {name: serving.variables(name, tmp_path, "auto").get(serving.KV_RECORD.name) for name in serving.SERVERS}
    assert records["stock"] is records["patched"] is None
    assert records["sized"] == records["sized-first"] != records["stock-sized"] == records["stock-first"]


def measured(*said: str, **more):
    """What is known of a server."""
    loaded = {"total_throughput": 10.0, "duration": 1.0, "concurrency": 2.0, "median_tpot_ms": 3.0, "retractions": 0}
    known = {"startup_s": 1.0, "tokens": 5, "rehearsed_s": None, "lowest_free": None, "median_ttft_ms": 4.0}
    return {**known, **loaded, "said": list(said), **more}


RULE, BY_RECORD = "using the engine's default fraction 0.8000: why", "0.9285 instead of 0.8000: 5 tokens instead of 4; "
FULL = {"answered": 3, "retractions": 1, "lowest_free": None, "out_of_memory": False, "errors": []}


@pytest.mark.parametrize(
    ("second", "said"),
    [
        pytest.param(serving.Failed("no KV cache"), "sized-first", id="it is not measured"),
        pytest.param(measured(overfill=FULL | {"out_of_memory": True}), "sized-first (out of memory)", id="memory"),
        pytest.param(measured(overfill=FULL | {"errors": ["no answer"]}), "sized-first (no answer)", id="no answer"),
        pytest.param(measured(overfill=FULL), "", id="it survives"),
    ],
)
def test_a_server_that_fails_is_named_and_loses_no_other_ones_figures(second, said, tmp_path, monkeypatch):
    servers = {"stock": measured(), "sized-first": second, "sized": measured(BY_RECORD)}

    def serve(name, options, work, model):
        if name == "sized":  # whatever ends a run here, the first one's are kept
            assert "stock" in json.loads(path.read_text())["figures"]["servers"]
        if isinstance(servers[name], Exception):
            raise servers[name]
        return servers[name]

    path = tmp_path / "found.json"
    monkeypatch.setattr(serving, "serve", serve)
    monkeypatch.setattr(serving, "write_model", lambda folder, options: folder)
    monkeypatch.setattr(sys, "argv", ["memory/serving.py", "--quick", "--json", str(path)])
    with pytest.raises(SystemExit) if said else nullcontext() as ended:
        serving.main()
    assert not said or str(ended.value).rpartition(": ")[2] == said
    known = {name: found for name, found in servers.items() if isinstance(found, dict)}
    assert json.loads(path.read_text())["figures"]["servers"] == known


@pytest.mark.parametrize(
    ("name", "said", "label"),
    [
        ("sized", [BY_RECORD], "sized"),
        ("stock-sized", [RULE], "stock-sized (by the rule)"),
        ("sized-first", [RULE], "sized-first"),
        ("patched", [], "patched"),
    ],
)
def test_a_start_that_stayed_with_the_rule_is_not_shown_as_sized(name, said, label):
    figures = {**dict.fromkeys(("shard", "layers", "tp", "prompts", "output", "chunk"), 1), "model": "m", "input": [1]}
    table = serving.tables([{"conditions": {"engine": "1"}, "figures": figures | {"servers": {name: measured(*said)}}}])
    assert f" | {label} | " in table


def test_where_nothing_is_recorded_a_sized_server_is_not_started(tmp_path, monkeypatch):
    monkeypatch.setattr(serving, "has_gpu", lambda: True)
    with pytest.raises(serving.Failed, match="start sized-first before"):
        serving.serve("sized", options(monkeypatch), tmp_path, tmp_path)
