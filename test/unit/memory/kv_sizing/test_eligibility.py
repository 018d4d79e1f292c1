"""Tests of the decision whether kv-sizing sizes a server's KV cache or keeps the engine's size. They also check how
kv-sizing finds out whether the user set ``--mem-fraction-static``."""

from __future__ import annotations

from itertools import groupby
from types import SimpleNamespace

import pytest
import unsized_servers
from releases import ROOT
from sglang_moe_patches.core import patch
from sglang_moe_patches.memory.kv_sizing import eligibility
from sglang_moe_patches.memory.kv_sizing.eligibility import UNSIZED
from sglang_moe_patches.registry import CHANGES
from unsized_servers import SERVERS

NAME = eligibility.KV_SIZING.name


def test_unknown_values_of_the_variable_are_refused_in_one_line_with_its_name():
    for text, mode in (("", ""), ("off", ""), ("auto", "auto"), (" auto ", "auto"), ("always", "always")):
        assert eligibility.KV_SIZING.read({NAME: text}) == mode
    for text, why in (
        ("given", "the value given is now called always"),
        ("1", "expected off, auto or always, got '1'"),
    ):
        with pytest.raises(ValueError, match=f"^{NAME}: {why}$"):
            patch.check_environment(CHANGES, {NAME: text})


def test_the_margin_is_given_in_megabytes_and_has_a_lower_bound():
    margin, name = eligibility.KV_MARGIN, eligibility.KV_MARGIN.name
    for text, bytes_kept in (("", int(margin.default) * 10**6), ("200", 200_000_000), (" 3000 ", 3_000_000_000)):
        assert margin.read({name: text}) == bytes_kept
    for text in ("199", "-1", "2GB", "0.5", "nothing"):
        with pytest.raises(ValueError, match=f"^{name}: expected a whole number of MB, at least 200"):
            margin.read({name: text})


def test_the_page_states_the_default_margin():
    page = (ROOT / "docs/changes/kv-sizing.md").read_text()
    assert f"*margin* of {int(eligibility.KV_MARGIN.default):,} MB" in page


def test_a_given_fraction_is_kept_unless_the_variable_is_always():
    assert [bool(eligibility.kept_fraction_reason(mode)) for mode in ("auto", "always")] == [True, False]


ARGUMENTS: dict[str, object] = {"device": "cuda", "nnodes": 1, "pp_size": 1, "dp_size": 1, "tp_size": 8}
ARGUMENTS |= {"disaggregation_mode": "null", "offload_group_size": -1, "radix_cache_backend": None}


@pytest.mark.parametrize("name", SERVERS)
def test_a_server_in_the_table_is_not_measured_and_the_reason_names_the_argument(name):
    arguments = ARGUMENTS | unsized_servers.arguments(name)
    assert str(eligibility.skip_reason(True, arguments, {})).startswith(f"of {name}: ")


def test_the_table_has_each_name_once_and_groups_names_by_reason():
    names, reasons = [kind.name for kind in UNSIZED], [kind.reason for kind in UNSIZED]
    assert len(set(names)) == len(names) > 40
    assert len([reason for reason, _ in groupby(reasons)]) == len(set(reasons))
    assert set(unsized_servers.SPECIAL) <= set(names)


ALONE: dict[str, object] = {"attn_dp_size": 1}
RUST, MOONCAKE, SKIP = "SGLANG_RUST_SERVER", "SGLANG_MOONCAKE_CUSTOM_MEM_POOL", eligibility.SKIP_ALL_GATHER
REASONS = {kind.name: kind.reason for kind in UNSIZED}


@pytest.mark.parametrize(
    ("arguments", "environ", "reason"),
    [
        ({}, {}, None),
        ({"dp_size": 4}, {}, None),
        ({"pp_size": 2}, {}, None),
        ({"attn_dp_size": 2}, {}, None),
        ({"dp_size": 2, "enable_dp_attention": True}, {}, None),  # arguments up to engine release 0.5.19
        # The reason concerns servers whose data-parallel ranks exchange requests or batch information. This server has
        # one rank.
        (unsized_servers.arguments("--enable-dp-attention-local-control-broadcast") | ALONE, {}, None),
        (unsized_servers.arguments("--moe-dense-tp-size") | ALONE, {}, None),
        ({"device": "cpu"}, {}, "--device is cpu"),
        ({}, {RUST: "1"}, f"of {RUST}: {REASONS[RUST]}"),
        ({}, {MOONCAKE: "true"}, f"of {MOONCAKE}: {REASONS[MOONCAKE]}"),
        ({}, {RUST: "0", MOONCAKE: ""}, None),
        ({}, {"SGLANG_ENABLE_POST_CAPTURE_KV_SIZING": "1"}, None),  # the engine's own sizing, which may have no effect
        ({}, {SKIP: "1"}, None),  # only data-parallel ranks exchange batch information
        ({"attn_dp_size": 2}, {SKIP: "1"}, f"of {SKIP}: {REASONS[SKIP]}"),
    ],
    ids=str,
)
def test_a_server_is_sized_unless_there_is_a_reason(arguments, environ, reason):
    assert eligibility.skip_reason(True, ARGUMENTS | arguments, environ) == reason
    assert eligibility.skip_reason("", ARGUMENTS | arguments, environ) == f"{NAME} is off; auto turns it on"


class Resolving:
    """Stand-in for ``ServerArgs`` up to engine release 0.5.19. Its constructor fills in a missing
    ``mem_fraction_static``."""

    def __init__(self, fraction=None, device="cuda"):
        self.mem_fraction_static, self.device = fraction, device
        self.__post_init__()

    def __post_init__(self):
        self.mem_fraction_static = self.mem_fraction_static or 0.88


def test_nothing_is_hooked_without_the_variable(patcher, monkeypatch):
    before = vars(Resolving)["__post_init__"]
    monkeypatch.delenv(NAME, raising=False)
    eligibility.hook_server_args(SimpleNamespace(ServerArgs=Resolving), patcher)
    assert vars(Resolving)["__post_init__"] is before
    change = next(each for each in CHANGES if each.name == "kv-sizing")
    skip = change.skip(Resolving())
    assert ("turns it on" in skip.reason, skip.can_be_enabled) == (True, True)
    monkeypatch.setenv(NAME, "auto")
    assert not change.skip(Resolving(device="cpu")).can_be_enabled


def test_a_given_fraction_is_distinguished_from_the_engines_own(patcher, monkeypatch):
    monkeypatch.setenv(NAME, "auto")
    early = Resolving()
    eligibility.hook_server_args(SimpleNamespace(ServerArgs=Resolving), patcher)
    assert not eligibility.is_given_by_the_user(Resolving())
    assert eligibility.is_given_by_the_user(Resolving(0.88))
    assert eligibility.is_given_by_the_user(early)  # constructed before the hook, so its fraction counts as given
    # A server that is not sized gets no mark, because no scheduler would remove the mark there.
    assert eligibility.NOT_GIVEN_MARK not in vars(Resolving(device="cpu"))
    for raw in (0.9, None):
        server_args = SimpleNamespace(_raw_input={"mem_fraction_static": raw})
        assert eligibility.is_given_by_the_user(server_args) == (raw is not None)
