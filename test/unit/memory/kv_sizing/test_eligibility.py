"""Which servers may be sized by a record, and which are monitored alone."""

from __future__ import annotations

from pathlib import Path

import pytest
import unsized_servers
from releases import ROOT
from sglang_moe_patches.core import patch
from sglang_moe_patches.memory.kv_sizing import eligibility
from sglang_moe_patches.registry import CHANGES
from unsized_servers import INELIGIBLE, MONITOR_ONLY

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


def test_a_record_is_where_it_is_asked_for_or_in_the_users_cache():
    assert eligibility.record_path({eligibility.KV_RECORD.name: "/x/kv.json"}) == Path("/x/kv.json")
    assert eligibility.record_path({"XDG_CACHE_HOME": "/c"}) == Path("/c/sglang-moe-patches") / eligibility.FILE


ARGUMENTS: dict[str, object] = {"device": "cuda", "nnodes": 1, "pp_size": 1, "dp_size": 1, "tp_size": 8}
ARGUMENTS |= {"disaggregation_mode": "null", "offload_group_size": -1, "radix_cache_backend": None}


@pytest.mark.parametrize("flag", [*MONITOR_ONLY, *INELIGIBLE])
def test_a_server_that_is_not_rehearsed_keeps_the_rule_and_the_flag_is_named(flag):
    arguments = ARGUMENTS | unsized_servers.arguments(flag)
    refused, monitored = eligibility.skip_reason(True, arguments, {}), eligibility.monitor_only_reason(arguments)
    assert str(refused if flag in INELIGIBLE else monitored).startswith(f"of {flag}, ")
    assert (monitored if flag in INELIGIBLE else refused) is None


def test_every_server_that_is_not_sized_is_tested_and_on_the_page():
    assert (set(eligibility.MONITOR_ONLY), set(eligibility.INELIGIBLE)) == (set(MONITOR_ONLY), set(INELIGIBLE))
    page = (ROOT / "docs/changes/kv-sizing.md").read_text()
    assert [flag for flag in (*MONITOR_ONLY, *INELIGIBLE) if f"`{flag}`" not in page] == []


BROADCAST, DENSE = "--enable-dp-attention-local-control-broadcast", "--moe-dense-tp-size"
SKIP, POST_CAPTURE = eligibility.SKIP_ALL_GATHER, "SGLANG_ENABLE_POST_CAPTURE_KV_SIZING"


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
        ({}, {POST_CAPTURE: "1"}, f"{POST_CAPTURE} is set"),
        ({}, {"SGLANG_RUST_SERVER": "1"}, "SGLANG_RUST_SERVER is set"),
        pytest.param({}, {POST_CAPTURE: "0", "SGLANG_RUST_SERVER": "0"}, None, id="switches that are off"),
        pytest.param({}, {SKIP: "1"}, None, id="ranks without requests of their own exchange no batch information"),
        pytest.param({"attn_dp_size": 2}, {SKIP: "1"}, f"{SKIP} is set", id="ranks do not exchange batch information"),
    ],
)
def test_a_server_is_sized_unless_there_is_a_reason(arguments, environ, reason):
    assert eligibility.skip_reason(True, ARGUMENTS | arguments, environ) == reason
    assert eligibility.monitor_only_reason(ARGUMENTS | arguments) is None
    assert eligibility.skip_reason("", ARGUMENTS | arguments, environ) == f"{NAME} is off; auto turns it on"
