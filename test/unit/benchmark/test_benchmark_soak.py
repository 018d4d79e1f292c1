"""Tests of ``benchmark/whole/soak.py``: its requests, the servers' results, and the reasons for a failed run."""

from __future__ import annotations

import json
from itertools import islice
from typing import Any

import pytest
from common.allocator_trace import Line
from whole import soak

SHORT, LONG = "weights 0, 5 tokens", "weights 0, 700 tokens"


def server_results(**changes: Any) -> dict[str, Any]:
    """Return the results of a server that passes. ``changes`` replaces some of its figures."""
    answers = {SHORT: {"a": 9}, LONG: {"b": 9}, "weights 1, 5 tokens": {"c": 4}, "weights 1, 700 tokens": {"d": 4}}
    counted = {"aborted": 3, "left": 2, "flushes": 2, "updates": 2, "columns": 7, "dead_inputs": 7}
    sizes = {"before": 1000, "first_half": 2000, "second_half": 1990, "first_peak": 1500, "second_peak": 1500}
    return vars(soak.Record(answers=answers, logprobs=answers, **counted, **sizes)) | changes


ANSWERS = server_results()["answers"]
ALIKE = {"answers": {key: {"a": 1} for key in ANSWERS}}
GROWN = "patched: 0 MB more reserved in the second half, beyond what tensors grew"


@pytest.mark.parametrize(
    ("patched", "stock", "reason"),
    [
        ({}, {}, ""),
        ({"errors": ["HTTP 500: no", "x"]}, {}, "patched: 2 errors, the first: HTTP 500: no"),
        ({"updates": 0}, {}, "patched: updates: none"),
        (ALIKE, ALIKE, "both sets of weights give the same answers, so no weight update took effect"),
        ({"columns": 0, "dead_inputs": 0}, {}, "patched: no change acted in any forward pass"),
        ({"answers": ANSWERS | {SHORT: {"a": 8, "z": 1}}}, {}, f"{SHORT}: 2 different answers (stock 1, patched 2)"),
        ({"answers": ANSWERS | {LONG: {"z": 9}}}, {}, f"{LONG}: 2 different answers (stock 1, patched 1)"),
        # The first half reserved 1,000 bytes for forward passes. The second half may reserve 2 % of them more, and
        # also as much as its peak of tensors grew.
        ({"second_half": 2000 + 20}, {}, ""),
        ({"second_half": 2000 + 20 + 1}, {}, GROWN),
        ({"second_half": 2120, "second_peak": 1600}, {}, ""),
        ({"second_half": 2121, "second_peak": 1600}, {}, GROWN),
        ({"second_half": 2000, "second_peak": 100}, {}, ""),  # a smaller peak of tensors does not lower the limit
        ({}, {"second_half": 4000}, ""),  # the stock server may grow
    ],
)
def test_each_reason_for_a_failure_is_reported(patched: dict[str, Any], stock: dict[str, Any], reason: str):
    figures = {"gpu": True, "servers": {"stock": server_results(**stock), "patched": server_results(**patched)}}
    assert soak.find_failures(figures) == ([reason] if reason else [])


def test_a_missing_server_is_a_failure_and_without_a_gpu_no_change_has_to_act():
    servers = {"stock": server_results(), "patched": server_results(columns=0, dead_inputs=0)}
    assert soak.find_failures({"gpu": False, "servers": servers}) == []
    del servers["patched"]
    assert soak.find_failures({"gpu": True, "servers": servers}) == ["patched: not run"]


def test_requests_depend_on_the_seed_alone_and_no_id_is_a_prefix_of_another():
    first, again, other = (list(islice(soak.draw_requests(seed, 0, 0, 4096, 64), 300)) for seed in (1, 1, 2))
    assert first == again != other
    draws = [draw for client in range(12) for draw in islice(soak.draw_requests(1, 0, client, 4096, 64), 12)]
    ids = [draw.rid for draw in draws]
    assert not any(rid != other and rid.startswith(other) for rid in ids for other in ids)
    assert all(1 <= draw.tokens <= 4096 and 1 <= draw.new_tokens <= 64 for draw in first)
    endings = {(bool(draw.closes_after_s), bool(draw.aborts_after_s)) for draw in first}
    assert endings == {(True, False), (False, True), (False, False)}
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
def test_answers_are_classified(status: int, text: str, outcome: str):
    assert soak.classify_answer(status, text) == outcome


def test_memory_is_split_into_two_halves_of_the_time_since_the_first_round():
    record = soak.Record()
    lines = ((0, 10, 9), (90, 99, 9), (100, 30, 9), (104, 40, 9), (106, 35, 3), (110, 20, 9))
    soak.add_memory(record, [Line(at, 5, reserved - 1, reserved, free) for at, reserved, free in lines], 100)
    assert (record.before, record.first_half, record.second_half) == (10, 40, 35)
    assert (record.first_peak, record.second_peak, record.lowest_free) == (39, 34, 3)
