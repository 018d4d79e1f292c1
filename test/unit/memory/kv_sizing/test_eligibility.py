"""Which servers measure what they need, and which the engine's rule sizes."""

from __future__ import annotations

import pytest
import unsized_servers
from releases import ROOT
from sglang_moe_patches.core import patch
from sglang_moe_patches.memory.kv_sizing import eligibility
from sglang_moe_patches.registry import CHANGES
from unsized_servers import INELIGIBLE

NAME = eligibility.KV_SIZING.name


@pytest.mark.parametrize(
    ("text", "asked"), [("", ""), ("off", ""), ("auto", "auto"), (" auto ", "auto"), ("always", "always")]
)
def test_what_is_asked(text, asked):
    assert eligibility.KV_SIZING.read({NAME: text}) == asked


def test_anything_else_is_one_line_that_names_the_variable():
    for text, why in (("given", "given is now called always"), ("1", "expected off, auto or always, got '1'")):
        with pytest.raises(ValueError, match=f"^{NAME}: {why}$"):
            patch.check_environment(CHANGES, {NAME: text})


@pytest.mark.parametrize(
    ("text", "bytes_kept"),
    [("", int(eligibility.KV_MARGIN.default) * 10**6), ("500", 500_000_000), (" 3000 ", 3_000_000_000)],
)
def test_the_margin_is_asked_for_in_megabytes(text, bytes_kept):
    assert eligibility.KV_MARGIN.read({eligibility.KV_MARGIN.name: text}) == bytes_kept


@pytest.mark.parametrize("text", ["199", "-1", "2GB", "0.5", "nothing"])
def test_a_margin_that_is_too_small_or_no_number_is_refused(text):
    with pytest.raises(ValueError, match=f"^{eligibility.KV_MARGIN.name}: expected a whole number of MB, at least 200"):
        eligibility.KV_MARGIN.read({eligibility.KV_MARGIN.name: text})


@pytest.mark.parametrize(("asked", "left_alone"), [("auto", True), ("always", False)])
def test_a_given_fraction_is_left_alone_unless_always_is_asked_for(asked, left_alone):
    assert bool(eligibility.given_reason(asked)) == left_alone


ARGUMENTS: dict[str, object] = {"device": "cuda", "nnodes": 1, "pp_size": 1, "dp_size": 1, "tp_size": 8}
ARGUMENTS |= {"disaggregation_mode": "null", "offload_group_size": -1, "radix_cache_backend": None}


@pytest.mark.parametrize("flag", INELIGIBLE)
def test_a_server_that_is_not_rehearsed_keeps_the_rule_and_the_flag_is_named(flag):
    arguments = ARGUMENTS | unsized_servers.arguments(flag)
    assert str(eligibility.skip_reason(True, arguments, {})).startswith(f"of {flag}, ")


def test_every_server_that_is_not_sized_is_tested_and_on_the_page():
    assert set(eligibility.INELIGIBLE) == set(INELIGIBLE)
    page = (ROOT / "docs/changes/kv-sizing.md").read_text()
    assert [flag for flag in (*INELIGIBLE, *eligibility.ENGINE_SWITCHES) if f"`{flag}`" not in page] == []


BROADCAST, DENSE = "--enable-dp-attention-local-control-broadcast", "--moe-dense-tp-size"
SKIP, RUST = eligibility.SKIP_ALL_GATHER, "SGLANG_RUST_SERVER"
MOONCAKE = "SGLANG_MOONCAKE_CUSTOM_MEM_POOL"


@pytest.mark.parametrize(
    ("arguments", "environ", "reason"),
    [
        pytest.param({}, {}, None, id="a plain server"),
        pytest.param({"dp_size": 4}, {}, None, id="replicas"),
        pytest.param({"pp_size": 2}, {}, None, id="a pipeline"),
        pytest.param({"attn_dp_size": 2}, {}, None, id="data-parallel attention"),
        pytest.param({"dp_size": 2, "enable_dp_attention": True}, {}, None, id="data-parallel attention up to 0.5.19"),
        pytest.param(
            unsized_servers.arguments(BROADCAST) | {"attn_dp_size": 1},
            {},
            None,
            id="no other rank to receive rank 0's requests",
        ),
        pytest.param(
            unsized_servers.arguments(DENSE) | {"attn_dp_size": 1},
            {},
            None,
            id="no other rank to exchange batch information with",
        ),
        pytest.param({"device": "cpu"}, {}, "--device is cpu", id="no GPU"),
        ({}, {RUST: "1"}, f"{RUST} is set: {eligibility.ENGINE_SWITCHES[RUST]}"),
        ({}, {MOONCAKE: "true"}, f"{MOONCAKE} is set: {eligibility.ENGINE_SWITCHES[MOONCAKE]}"),
        pytest.param({}, {RUST: "0", MOONCAKE: ""}, None, id="switches that are off"),
        pytest.param({}, {"SGLANG_ENABLE_POST_CAPTURE_KV_SIZING": "1"}, None, id="the engine's own, maybe in vain"),
        pytest.param({}, {SKIP: "1"}, None, id="ranks without requests of their own exchange no batch information"),
        pytest.param({"attn_dp_size": 2}, {SKIP: "1"}, f"{SKIP} is set", id="ranks do not exchange batch information"),
    ],
)
def test_a_server_is_sized_unless_there_is_a_reason(arguments, environ, reason):
    assert eligibility.skip_reason(True, ARGUMENTS | arguments, environ) == reason
    assert eligibility.skip_reason("", ARGUMENTS | arguments, environ) == f"{NAME} is off; auto turns it on"
