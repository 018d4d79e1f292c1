"""benchmark/memory/serving.py: what the engine's client is told, and what is kept of several runs."""

from __future__ import annotations

import json
import sys
from itertools import pairwise

import pytest
import torch
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


def test_without_a_gpu_one_line_says_so(monkeypatch, capsys):
    options(monkeypatch)
    assert capsys.readouterr().err == "serving: needs a GPU, and PyTorch sees none here; --quick runs without one\n"


def test_the_client_asks_for_lengths_and_answers_as_said(monkeypatch, tmp_path):
    given = options(monkeypatch, "--input", "3000,9000", "--output", "768", "--prompts", "200")
    command = serving.bench_command(given, tmp_path, "http://here", tmp_path / "into")
    told = dict(pairwise(command))
    assert int(9000 * float(told["--random-range-ratio"])) == 3000
    assert (told["--random-input-len"], told["--num-prompts"]) == ("9000", "200")
    assert json.loads(told["--extra-request-body"])["sampling_params"]["max_new_tokens"] == 768
    one = options(monkeypatch, "--input", "30000")
    assert "1.0" in serving.bench_command(one, tmp_path, "http://here", tmp_path / "into")


def test_each_token_is_a_word(monkeypatch):
    made = Tokenizer.from_str(serving.tokenizer_json(300))
    assert made.get_vocab_size() == 300
    assert made.decode([1, 299]) == "1 12b"
    assert made.encode("1 12b ?").ids == [1, 299, 0]


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
    records = {name: serving.variables(name, tmp_path).get(serving.KV_RECORD.name) for name in serving.SERVERS}
    assert records["stock"] is records["patched"] is None
    assert records["sized"] == records["sized-first"] != records["stock-sized"] == records["stock-first"]


def test_where_nothing_is_recorded_a_sized_server_is_not_started(tmp_path, monkeypatch):
    monkeypatch.setattr(serving, "has_gpu", lambda: True)
    with pytest.raises(serving.Failed, match="start sized-first before"):
        serving.serve("sized", options(monkeypatch), tmp_path, tmp_path)
