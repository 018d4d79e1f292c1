"""Tests of ``common.growth``, which reads how kv-sizing resized the KV cache. Its sources are a
server's ``/metrics`` and log."""

from __future__ import annotations

import pytest
from common import growth

TOKENS = """# TYPE sglang_moe_patches:kv_tokens gauge
sglang_moe_patches:kv_tokens{gpu="0",rank="0"} 1235.0
sglang_moe_patches:kv_tokens{gpu="1",rank="1"} 1235.0
# TYPE sglang:num_running_reqs gauge
sglang:num_running_reqs 3.0
"""
RULE = '# TYPE sglang_moe_patches:kv_tokens_by_rule gauge\nsglang_moe_patches:kv_tokens_by_rule{rank="0"} %d\n'
NEED = '# TYPE sglang_moe_patches:need_bytes gauge\nsglang_moe_patches:need_bytes{gpu="0",rank="0"} 4.99e+09\n'


def test_a_gauge_has_its_smallest_value_on_any_rank():
    gauge = "# TYPE sglang_moe_patches:given_back_bytes gauge\n"
    ranks = "".join(f'sglang_moe_patches:given_back_bytes{{rank="{rank}"}} {7 - rank}e+06\n' for rank in range(3))
    assert growth.read_gauges(gauge + ranks + "sglang:num_running_reqs 3.0\n") == {"given_back_bytes": 5e6}


@pytest.mark.parametrize(
    ("metrics", "sizing"),
    [
        pytest.param(TOKENS + RULE % 987 + NEED, growth.Growth(1235, 987, 4_990_000_000), id="grew"),
        pytest.param(TOKENS + RULE % 2000 + NEED, growth.Growth(1235, 2000, 4_990_000_000), id="shrank"),
        pytest.param(TOKENS + RULE % 1235 + NEED, None, id="kept the rule's size"),
        pytest.param(TOKENS + RULE % 987, None, id="did not measure"),
        pytest.param("", None, id="stock server"),
    ],
)
def test_the_growth_of_the_kv_cache_is_read_from_the_metrics(metrics, sizing):
    assert growth.read_growth(metrics) == sizing


def test_log_lines_and_rehearsal_seconds_are_found_behind_the_engines_time_and_rank():
    lines = ["sized", "rehearsed in 12 s: prefill 2.1 s, decode 9 s"]
    log = "\n".join(["another line", *(f"[2026-11-27 07:11:25 TP0] {growth.LOG_PREFIX}{line}" for line in lines)])
    assert growth.kv_sizing_lines(log) == lines
    assert growth.rehearsal_seconds(lines) == 12
    assert growth.rehearsal_seconds(lines[:1]) is None
