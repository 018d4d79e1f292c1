"""The decision and the promise of deferred-shared-experts."""

from __future__ import annotations

import itertools

import pytest
import torch
from sglang_moe_patches.changes.deferred_shared_experts import SharedExpertsLater, may_defer

FACTS = ("inplace", "runner_is_trtllm", "overlapped", "fused", "present")


@pytest.mark.parametrize("values", list(itertools.product([False, True], repeat=5)))
def test_may_defer(values):
    facts = dict(zip(FACTS, values, strict=True))
    reasons_not_to = [
        not facts["present"],
        facts["fused"],
        facts["overlapped"],
        facts["inplace"] and not facts["runner_is_trtllm"],
    ]
    assert may_defer(**facts) == (not any(reasons_not_to))


def test_the_promise_is_kept_when_it_is_added_and_in_place():
    computed = []

    def compute():
        computed.append(True)
        return torch.full((2, 3), 2.0)

    routed = torch.ones(2, 3)
    promise = SharedExpertsLater(compute)
    assert promise is not None
    assert not computed
    alias = routed
    routed += promise
    assert routed is alias
    assert torch.equal(routed, torch.full((2, 3), 3.0))
    assert computed == [True]


@pytest.mark.parametrize(
    "use",
    [
        lambda t, p: torch.add(t, p),
        lambda t, p: t.add_(p, alpha=2),
        lambda t, p: t.mul_(p),
        lambda t, p: torch.cat([t, p]),
    ],
)
def test_any_other_use_is_an_error_that_says_what_to_do(use):
    with pytest.raises(TypeError, match="SGLANG_MOE_PATCHES"):
        use(torch.ones(2, 3), SharedExpertsLater(lambda: torch.ones(2, 3)))
