"""benchmark/whole/soak.py: what is asked, what is read of two servers, and when it held."""

from __future__ import annotations

import json
from itertools import islice
from typing import Any

import pytest
from common.allocator_trace import Line
from whole import soak

SHORT, LONG = "weights 0, 5 tokens", "weights 0, 700 tokens"


def server(**more: Any) -> dict[str, Any]:
    """What is known of one that held."""
    answers = {SHORT: {"a": 9}, LONG: {"b": 9}, "weights 1, 5 tokens": {"c": 4}, "weights 1, 700 tokens": {"d": 4}}
    counted = {"aborted": 3, "left": 2, "flushes": 2, "updates": 2, "columns": 7, "dead_inputs": 7}
    sizes = {"before": 1000, "first_half": 2000, "second_half": 1990, "first_peak": 1500, "second_peak": 1500}
    return vars(soak.Record(answers=answers, logprobs=answers, **counted, **sizes)) | more


ANSWERS = server()["answers"]
ALIKE = {"answers": {key: {"a": 1} for key in ANSWERS}}
GROWN = "patched: 0 MB more reserved in the second half, beyond what tensors grew"


@pytest.mark.parametrize(
    ("patched", "stock", "reason"),
    [
        ({}, {}, ""),
        ({"errors": ["HTTP 500: no", "x"]}, {}, "patched: 2 errors, the first: HTTP 500: no"),
        ({"updates": 0}, {}, "patched: updates: none"),
        (ALIKE, ALIKE, "the other weights answer alike: no update was seen"),
        ({"columns": 0, "dead_inputs": 0}, {}, "patched: no change was seen to act"),
        ({"answers": ANSWERS | {SHORT: {"a": 8, "z": 1}}}, {}, f"{SHORT}: 2 different answers (stock 1, patched 2)"),
        ({"answers": ANSWERS | {LONG: {"z": 9}}}, {}, f"{LONG}: 2 different answers (stock 1, patched 1)"),
        # Two per cent of the 1,000 that forwards took pass; what tensors grow by is not the allocator's.
        ({"second_half": 2000 + 20}, {}, ""),
        ({"second_half": 2000 + 20 + 1}, {}, GROWN),
        ({"second_half": 2120, "second_peak": 1600}, {}, ""),
        ({"second_half": 2121, "second_peak": 1600}, {}, GROWN),
        ({"second_half": 2000, "second_peak": 100}, {}, ""),  # nor is what they shrink by
        ({}, {"second_half": 4000}, ""),  # stock's does not decide
    ],
)
def test_what_speaks_against_it_is_said(patched: dict[str, Any], stock: dict[str, Any], reason: str):
    figures = {"gpu": True, "servers": {"stock": server(**stock), "patched": server(**patched)}}
    assert soak.reasons(figures) == ([reason] if reason else [])


def test_a_server_that_is_not_there_did_not_hold_and_without_a_gpu_no_change_need_act():
    servers = {"stock": server(), "patched": server(columns=0, dead_inputs=0)}
    assert soak.reasons({"gpu": False, "servers": servers}) == []
    del servers["patched"]
    assert soak.reasons({"gpu": True, "servers": servers}) == ["patched: not run"]


def test_requests_are_those_of_the_seed_and_no_id_begins_another():
    first, again, other = (list(islice(soak.drawn(seed, 0, 0, 4096, 64), 300)) for seed in (1, 1, 2))
    assert first == again != other
    everything = [draw for client in range(12) for draw in islice(soak.drawn(1, 0, client, 4096, 64), 12)]
    ids = [draw.rid for draw in everything]
    assert not any(one != other and one.startswith(other) for one in ids for other in ids)
    assert all(1 <= draw.tokens <= 4096 and 1 <= draw.new_tokens <= 64 for draw in first)
    fates = {(bool(draw.leaves_s), bool(draw.aborted_s)) for draw in first}
    assert fates == {(True, False), (False, True), (False, False)}
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
    record = soak.Record()
    seen = ((0, 10, 9), (90, 99, 9), (100, 30, 9), (104, 40, 9), (106, 35, 3), (110, 20, 9))
    soak.add_up(record, [Line(at, 5, reserved - 1, reserved, free) for at, reserved, free in seen], 100)
    assert (record.before, record.first_half, record.second_half) == (10, 40, 35)
    assert (record.first_peak, record.second_peak, record.lowest_free) == (39, 34, 3)
