"""benchmark/whole/soak.py: what is asked, what is read of two servers, and when it held."""

from __future__ import annotations

import json
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import torch
from common import weights
from common.held import Line
from common.shapes import TINY
from safetensors.torch import load_file
from whole import soak

SHORT, LONG = "weights 0, 5 tokens", "weights 0, 700 tokens"


def server(**more: Any) -> dict[str, Any]:
    """What is known of one that held."""
    answers = {SHORT: {"a": 9}, LONG: {"b": 9}, "weights 1, 5 tokens": {"c": 4}, "weights 1, 700 tokens": {"d": 4}}
    counted = {"aborted": 3, "left": 2, "flushes": 2, "updates": 2, "columns": 7, "dead_inputs": 7}
    sizes = {"before": 1000, "first_half": 2000, "second_half": 1990, "first_peak": 1500, "second_peak": 1500}
    return vars(soak.Record(answers=answers, logprobs=answers, **counted, **sizes)) | more


def figures(gpu: bool = True, **patched: Any) -> dict[str, Any]:
    return {"gpu": gpu, "servers": {"stock": server(), "patched": server(**patched)}}


ANSWERS = server()["answers"]
GROWN = "patched: 0 MB more reserved in the second half, beyond what tensors grew"


@pytest.mark.parametrize(
    ("patched", "reason"),
    [
        ({}, ""),
        ({"errors": ["HTTP 500: no", "x"]}, "patched: 2 errors, the first: HTTP 500: no"),
        ({"updates": 0}, "patched: updates: none"),
        ({"aborted": 0}, "patched: aborted: none"),
        ({"columns": 0, "dead_inputs": 0}, "patched: no change was seen to act"),
        ({"gpu": False, "columns": 0, "dead_inputs": 0}, ""),
        (
            {"answers": server()["answers"] | {SHORT: {"a": 8, "z": 1}}},
            f"{SHORT}: 2 different answers (stock 1, patched 2)",
        ),
        ({"answers": server()["answers"] | {LONG: {"z": 9}}}, f"{LONG}: 2 different answers (stock 1, patched 1)"),
        # Two per cent of the 1,000 that forwards took pass; what tensors grow by is not the allocator's.
        ({"second_half": 2000 + 20}, ""),
        ({"second_half": 2000 + 20 + 1}, GROWN),
        ({"second_half": 0}, ""),
        ({"second_half": 2120, "second_peak": 1600}, ""),
        ({"second_half": 2121, "second_peak": 1600}, GROWN),
        ({"second_half": 2021, "second_peak": 100}, GROWN),
        ({"second_half": 2000, "second_peak": 100}, ""),  # nor is what they shrink by
    ],
)
def test_what_speaks_against_it_is_said(patched: dict[str, Any], reason: str):
    assert soak.reasons(figures(**patched)) == ([reason] if reason else [])


def test_what_stock_reserves_does_not_decide_and_a_server_that_is_not_there_did_not_hold():
    found = figures()
    found["servers"]["stock"]["second_half"] *= 2
    assert soak.reasons(found) == []
    del found["servers"]["patched"]
    assert soak.reasons(found) == ["patched: not run"]


def test_an_update_that_nobody_sees_is_none():
    same = {key: {"a": 1} for key in server()["answers"]}
    found = figures()
    for each in found["servers"].values():
        each["answers"] = same
    assert soak.reasons(found) == ["the other weights answer alike: no update was seen"]


def test_requests_are_those_of_the_seed_and_no_id_begins_another():
    first, again, other = (list(islice(soak.drawn(seed, 0, 0, 4096, 64), 300)) for seed in (1, 1, 2))
    assert first == again != other
    everything = [draw for client in range(12) for draw in islice(soak.drawn(1, 0, client, 4096, 64), 12)]
    ids = [draw.rid for draw in everything]
    assert not any(one != other and one.startswith(other) for one in ids for other in ids)
    assert all(1 <= draw.tokens <= 4096 and 1 <= draw.new_tokens <= 64 for draw in first)
    assert {(bool(draw.leaves_s), bool(draw.aborted_s)) for draw in first} == {
        (True, False),
        (False, True),
        (False, False),
    }
    assert any(draw.prefix for draw in first)
    assert all(draw.prefix <= draw.tokens // 2 for draw in first)


@pytest.mark.parametrize(
    ("status", "text", "outcome"),
    [
        (200, json.dumps({"meta_info": {"finish_reason": {"type": "length"}}}), "answered"),
        (200, json.dumps({"meta_info": {"finish_reason": {"type": "abort", "message": "x"}}}), "aborted"),
        (503, "Abort in waiting queue", "aborted"),
        (503, "no place", "HTTP 503: no place"),
        (500, "abort", "HTTP 500: abort"),
    ],
)
def test_what_became_of_a_request(status: int, text: str, outcome: str):
    assert soak.outcome_of(status, text) == outcome


def test_the_halves_are_those_of_the_time_since_the_first_round():
    def line(at: float, reserved: int, free: int = 9) -> Line:
        return Line(at, 5, reserved - 1, reserved, free)

    record = soak.Record()
    soak.add_up(record, [line(0, 10), line(90, 99), line(100, 30), line(104, 40), line(106, 35, 3), line(110, 20)], 100)
    assert (record.before, record.first_half, record.second_half) == (10, 40, 35)
    assert (record.first_peak, record.second_peak, record.lowest_free) == (39, 34, 3)


def test_checkpoints_of_two_seeds_differ_in_every_drawn_tensor(tmp_path: Path):
    served = weights.Served(TINY, moe_layers=1, runner="triton")
    first, second = (
        load_file(weights.write_checkpoint(tmp_path / str(seed), served, seed, "cpu") / "model.safetensors")
        for seed in range(2)
    )
    assert list(first) == list(second)
    assert not any(torch.equal(first[name], second[name]) for name in first)
    config = json.loads((tmp_path / "0" / "config.json").read_text())
    drawn = dict(weights.tensors(config, torch.device("cpu")))
    assert all(torch.equal(first[name], tensor) for name, tensor in drawn.items())
