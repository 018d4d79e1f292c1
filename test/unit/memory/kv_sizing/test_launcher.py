"""What is hooked in the launcher: whether a fraction was given."""

from __future__ import annotations

import sys
from types import SimpleNamespace

import pytest
from sglang_moe_patches.core.patch import Patcher
from sglang_moe_patches.memory.kv_sizing import eligibility, rehearsal
from sglang_moe_patches.registry import CHANGES


class Resolving:
    """As the engine's ``ServerArgs`` up to 0.5.19: construction fills in the fraction."""

    def __init__(self, fraction=None, device="cuda"):
        self.mem_fraction_static, self.device = fraction, device
        self.__post_init__()

    def __post_init__(self):
        self.mem_fraction_static = self.mem_fraction_static or 0.88


def test_nothing_is_hooked_where_it_is_not_asked_for(monkeypatch):
    before = vars(Resolving)["__post_init__"]
    monkeypatch.delenv(eligibility.KV_SIZING.name, raising=False)
    eligibility.hook_server_args(SimpleNamespace(ServerArgs=Resolving), Patcher())
    assert vars(Resolving)["__post_init__"] is before
    change = next(each for each in CHANGES if each.name == "kv-sizing")
    skip = change.skip(Resolving())
    assert ("turns it on" in skip.reason, skip.switchable) == (True, True)
    monkeypatch.setenv(eligibility.KV_SIZING.name, "auto")
    assert not change.skip(Resolving(device="cpu")).switchable


def test_a_fraction_that_was_given_is_told_from_the_engines_own(monkeypatch):
    monkeypatch.setenv(eligibility.KV_SIZING.name, "auto")
    early, patcher = Resolving(), Patcher()
    eligibility.hook_server_args(SimpleNamespace(ServerArgs=Resolving), patcher)
    try:
        assert not eligibility.given_by_the_user(Resolving())
        assert eligibility.given_by_the_user(Resolving(0.88))
        assert eligibility.given_by_the_user(early)  # it arrived resolved
        # Of a server that is not sized no scheduler would take the mark off.
        assert eligibility.MARK not in vars(Resolving(device="cpu"))
    finally:
        patcher.undo()
    for raw in (0.9, None):
        server_args = SimpleNamespace(_raw_input={"mem_fraction_static": raw})
        assert eligibility.given_by_the_user(server_args) == (raw is not None)


@pytest.mark.parametrize(("warmup_s", "limits_s"), [(-1, (300, 60)), (60, (30, 15)), (3600, (300, 60))])
def test_a_rehearsal_ends_within_the_engines_own_warm_up(warmup_s, limits_s, monkeypatch):
    envs = SimpleNamespace(SGLANG_WARMUP_TIMEOUT=SimpleNamespace(get=lambda: warmup_s))
    monkeypatch.setitem(sys.modules, "sglang.srt.environ", SimpleNamespace(envs=envs))
    assert (rehearsal.timeout_s(), rehearsal.abandon_after_s()) == limits_s
