"""Tests of the change cutedsl-sizing, without an engine.

The change makes CuteDSL's MoE buffers large enough for every forward pass. If a forward pass is larger nevertheless,
the change splits it into slices.
"""

from __future__ import annotations

import logging
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from sglang_moe_patches.changes.cutedsl_sizing import wrapper as module
from sglang_moe_patches.changes.cutedsl_sizing.launcher import BUDGET, check_budget, find_budget_error
from sglang_moe_patches.changes.cutedsl_sizing.tokens import (
    ForwardLimits,
    compute_max_forward_tokens,
    compute_other_tokens_per_request,
    compute_wrapper_tokens,
    split_tokens,
)
from sglang_moe_patches.changes.cutedsl_sizing.wrapper import SharedMoE

COUNTS = st.integers(0, 20_000)
LIMITS = st.builds(
    ForwardLimits,
    max_prefill_tokens=COUNTS,
    graph_requests=st.integers(0, 1024),
    piecewise_tokens=COUNTS,
    draft_tokens=st.integers(1, 16),
    chunk_tokens=st.none() | COUNTS,
    request_tokens=COUNTS,
    unchecked_requests=st.booleans(),
    requests=st.integers(0, 4096),
    other_tokens_per_request=st.integers(1, 16),
    cache_tokens=COUNTS,
    padding=st.sampled_from([1, 2, 4, 6, 8]),
)


@given(LIMITS)
def test_the_bound_is_never_below_upstreams_number(limits):
    upstream = max(limits.max_prefill_tokens, limits.piecewise_tokens, limits.graph_requests * limits.draft_tokens)
    assert compute_max_forward_tokens(limits) >= upstream
    assert compute_max_forward_tokens(limits) % limits.padding == 0


@given(LIMITS, st.sampled_from(["max_prefill_tokens", "graph_requests", "piecewise_tokens", "requests"]), COUNTS)
def test_the_bound_grows_with_every_limit(limits, name, more):
    larger = replace(limits, **{name: getattr(limits, name) + more})
    assert compute_max_forward_tokens(larger) >= compute_max_forward_tokens(limits)


@given(LIMITS)
def test_unknown_limits_add_nothing(limits):
    known = replace(limits, requests=0, request_tokens=0, cache_tokens=0, chunk_tokens=0, padding=1)
    decode = limits.graph_requests * max(limits.draft_tokens, limits.other_tokens_per_request)
    assert compute_max_forward_tokens(known) == max(limits.max_prefill_tokens, limits.piecewise_tokens, decode)


def test_draft_steps_and_buffers_count_the_tokens_of_every_step_and_rank():
    assert compute_other_tokens_per_request(1, 3, multi_layer=False) == 4
    assert compute_other_tokens_per_request(8, 3, multi_layer=False) == 8
    # Layer i of a draft model with n layers has n + 1 + i tokens of each request in the engine's graph runner. These
    # are 5, 6, 7 and 8 for n = 4.
    assert compute_other_tokens_per_request(1, 4, multi_layer=True) == max(4 + 1 + step for step in range(4))
    # The buffers have room for the tokens of all gathered ranks, or for the tokens that the dispatcher accepts.
    assert [compute_wrapper_tokens(100, *more, 8) for more in ((4, None), (1, None), (4, 1024))] == [400, 100, 8192]


@given(required=st.integers(1, 100_000), budget=st.integers(1, 5_000), ep_size=st.integers(1, 64))
def test_the_named_budget_is_the_smallest_that_suffices(required, budget, ep_size):
    error = find_budget_error(required, budget, ep_size)
    assert (error is None) == (budget * ep_size >= required)
    if error:
        named = int(error.split(f"export {BUDGET.name}=")[1].split()[0])
        assert find_budget_error(required, named, ep_size) is None
        assert find_budget_error(required, named - 1, ep_size)


@pytest.mark.parametrize(
    "other",
    [{"moe_runner_backend": "flashinfer_trtllm"}, {"moe_a2a_backend": "none"}, {"disaggregation_mode": "decode"}],
)
def test_only_prefilling_cutedsl_servers_with_the_dispatcher_need_the_budget(other):
    values = {
        "moe_runner_backend": "flashinfer_cutedsl",
        "moe_a2a_backend": "flashinfer",
        "disaggregation_mode": "null",
        "ep_size": 2,
        "cutedsl_moe_max_num_tokens": lambda: 5000,
    }
    with pytest.raises(ValueError, match=f"{BUDGET.name}=1024 times"):
        check_budget(SimpleNamespace(**values), {})
    check_budget(SimpleNamespace(**{**values, **other}), {})


def test_unknown_server_arguments_do_not_stop_the_launcher(caplog):
    check_budget(SimpleNamespace(moe_runner_backend="flashinfer_cutedsl"), {})
    assert "failed and is skipped: AttributeError" in caplog.text


@given(st.integers(0, 500), st.integers(1, 100))
def test_the_fewest_slices_cover_every_row_once(tokens, size):
    parts = split_tokens(tokens, size)
    assert [row for part in parts for row in range(tokens)[part]] == list(range(tokens))
    assert len(parts) == max(-(-tokens // size), 1)
    assert all(part.stop - part.start <= size for part in parts)


class Wrapper:
    """Stand-in for FlashInfer's CuteDslMoEWrapper. It computes nothing, and raises an exception if its buffers are too
    small for the tokens.
    """

    max_num_tokens, hidden_size, output_dtype = 4, 3, torch.float32

    def run(self, *, token_selected_experts):
        assert token_selected_experts.shape[0] <= self.max_num_tokens


def test_the_warning_names_the_flag_per_rank_and_an_error_keeps_no_output(caplog):
    shared = SharedMoE(Wrapper(), 2, lambda: False)
    with caplog.at_level(logging.WARNING, module.log.logger.name):
        shared.run(token_selected_experts=torch.empty(11, 1))
    assert "--max-prefill-tokens 6 " in caplog.text
    with pytest.raises(TypeError):
        shared.run(token_selected_experts=torch.empty(2, 1), unknown=1)
    assert shared._moe_output is None
