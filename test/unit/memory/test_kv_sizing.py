"""kv-sizing: which servers, what a record gives, what becomes of a file of records, and when which request is put."""

from __future__ import annotations

import errno
import json
import os
import random
import signal
import stat
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace

import prometheus_client
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from releases import ROOT
from sglang_moe_patches import cli
from sglang_moe_patches.core import log, patch
from sglang_moe_patches.core.gpu_memory import Memory
from sglang_moe_patches.core.patch import Patcher, Plan, Status
from sglang_moe_patches.lab import kv_records
from sglang_moe_patches.memory.kv_sizing import (
    coordination,
    eligibility,
    facts,
    fingerprint,
    hooks,
    images,
    launcher,
    metrics,
    phases,
    record,
    rehearsal,
    sizing,
)
from sglang_moe_patches.memory.kv_sizing.driver import ATTEMPTS_PER_PHASE, LoadDriver
from sglang_moe_patches.memory.kv_sizing.facts import GIB
from sglang_moe_patches.memory.kv_sizing.monitor import SAMPLE_INTERVAL_S, SAVE_INTERVAL_S, FreeMemoryMonitor
from sglang_moe_patches.memory.kv_sizing.phases import Batch, Limits, PhaseKind
from sglang_moe_patches.memory.kv_sizing.record import Record
from sglang_moe_patches.registry import CHANGES
from typer.testing import CliRunner

GB = 1_000_000_000
KEY = "0123456789abcdef"


@pytest.fixture(autouse=True)
def metrics_that_count(monkeypatch):
    """Tests run two rehearsals in one process, or end none: what they mute counts again afterwards."""
    for name, methods in rehearsal.METRICS.items():
        kind = getattr(prometheus_client, name)
        for method in methods:
            monkeypatch.setattr(kind, method, getattr(kind, method))


# --- Which servers ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "asked"), [("", ""), ("off", ""), ("auto", "auto"), (" auto ", "auto"), ("always", "always")]
)
def test_what_is_asked(text, asked):
    assert eligibility.KV_SIZING.read({eligibility.KV_SIZING.name: text}) == asked


@pytest.mark.parametrize(
    ("text", "why"),
    [("given", "given is now called always"), ("1", "expected off, auto or always, got '1'")],
)
def test_anything_else_is_one_line_that_names_the_variable(text, why):
    with pytest.raises(ValueError, match=f"^{eligibility.KV_SIZING.name}: {why}$"):
        patch.check_environment(CHANGES, {eligibility.KV_SIZING.name: text})


def test_a_record_is_where_it_is_asked_for_or_in_the_users_cache():
    assert eligibility.record_path({eligibility.KV_RECORD.name: "/x/kv.json"}) == Path("/x/kv.json")
    assert eligibility.record_path({"XDG_CACHE_HOME": "/c"}) == Path("/c/sglang-moe-patches") / eligibility.FILE


ARGUMENTS: dict[str, object] = {
    "device": "cuda",
    "nnodes": 1,
    "pp_size": 1,
    "dp_size": 1,
    "tp_size": 8,
    "disaggregation_mode": "null",
}
ARGUMENTS |= {"offload_group_size": -1, "radix_cache_backend": None}
MONITOR_ONLY_CASES = {
    "--attn-cp-size": {"attn_cp_size": 2},
    "--speculative-algorithm": {"speculative_algorithm": "DFLASH"},
    "--speculative-adaptive": {"speculative_algorithm": "EAGLE", "speculative_adaptive": True},
    "--speculative-skip-dp-mlp-sync": {"speculative_algorithm": "EAGLE", "speculative_skip_dp_mlp_sync": True},
    "--speculative-ngram-external-corpus-path": {
        "speculative_algorithm": "NGRAM",
        "speculative_ngram_external_corpus_path": "x",
    },
    "--pp-size": {"speculative_algorithm": "EAGLE", "pp_size": 2},
    "--disaggregation-mode": {"disaggregation_mode": "decode"},
    "--enable-eplb": {"enable_eplb": True},
    "--moe-a2a-backend": {"moe_a2a_backend": "deepep"},
}
"""Servers that are monitored, and their arguments."""
INELIGIBLE_CASES = {
    "--enable-dp-attention-local-control-broadcast": {
        "attn_dp_size": 2,
        "enable_dp_attention_local_control_broadcast": 1,
    },
    "--moe-dense-tp-size": {"attn_dp_size": 2, "moe_dense_tp_size": 1, "enable_dp_lm_head": True},
    "--is-embedding": {"is_embedding": True},
    "--encoder-only": {"encoder_only": True},
    "--language-only": {"language_only": True},
    "--dllm-algorithm": {"dllm_algorithm": "x"},
    "--enable-pdmux": {"enable_pdmux": True},
    "--elastic-ep-backend": {"elastic_ep_backend": "mooncake"},
    "--enable-lora": {"lora_paths": ["x"]},
    "--enable-memory-saver": {"enable_memory_saver": True},
    "--cpu-offload-gb": {"cpu_offload_gb": 1},
    "--enable-unified-memory": {"enable_unified_memory": True},
    "--keep-mm-feature-on-device": {"keep_mm_feature_on_device": True},
    "--offload-group-size": {"offload_group_size": 2},
    "--enable-return-hidden-states": {"enable_return_hidden_states": True},
    "--enable-hisparse": {"enable_hisparse": True},
    "--enable-hierarchical-cache": {"enable_hierarchical_cache": True},
    "--enable-lmcache": {"enable_lmcache": True},
    "--enable-flexkv": {"enable_flexkv": True},
    "--radix-cache-backend": {"radix_cache_backend": "x"},
    "--enable-unified-cache-external-linker": {"enable_unified_cache_external_linker": True},
}
"""Servers of which nothing is recorded, and their arguments."""
ATTENTION = {"attn_dp_size": {"dp_size": 1, "attn_dp_size": 2}, "dp_size": {"dp_size": 2}}
ATTENTION["both, as 0.5.23 tells it"] = ATTENTION["attn_dp_size"] | {"enable_dp_attention": True}
ATTENTION["dp_size"] |= {"enable_dp_attention": True}


def test_a_plain_server_is_sized_where_it_is_asked_for():
    assert eligibility.skip_reason(True, ARGUMENTS, {}) is None
    assert eligibility.skip_reason(False, ARGUMENTS, {}) == "SGLANG_MOE_PATCHES_KV_SIZING is off; auto turns it on"
    assert eligibility.skip_reason(True, {**ARGUMENTS, "device": "cpu"}, {}) == "--device is cpu"


@pytest.mark.parametrize("name", [*MONITOR_ONLY_CASES, *INELIGIBLE_CASES])
def test_a_server_that_is_not_rehearsed_keeps_the_rule_and_the_flag_is_named(name):
    arguments = {**ARGUMENTS, **{**MONITOR_ONLY_CASES, **INELIGIBLE_CASES}[name]}
    refused, monitored = eligibility.skip_reason(True, arguments, {}), eligibility.monitor_only_reason(arguments)
    assert str(refused if name in INELIGIBLE_CASES else monitored).startswith(f"of {name}, ")
    assert (monitored if name in INELIGIBLE_CASES else refused) is None


def test_every_server_that_is_not_sized_is_tested_and_on_the_page():
    assert (set(eligibility.MONITOR_ONLY), set(eligibility.INELIGIBLE)) == (
        set(MONITOR_ONLY_CASES),
        set(INELIGIBLE_CASES),
    )
    page = (ROOT / "docs/changes/kv-sizing.md").read_text()
    assert [name for name in (*MONITOR_ONLY_CASES, *INELIGIBLE_CASES) if f"`{name}`" not in page] == []


@pytest.mark.parametrize("given", ATTENTION.values(), ids=ATTENTION)
def test_data_parallel_attention_is_driven_on_all_ranks_at_once_and_replicas_each_for_itself(given):
    assert (
        eligibility.skip_reason(True, {**ARGUMENTS, **given}, {})
        is eligibility.monitor_only_reason({**ARGUMENTS, **given})
        is None
    )
    for name in ("--enable-dp-attention-local-control-broadcast", "--moe-dense-tp-size"):
        alone = {**ARGUMENTS, **INELIGIBLE_CASES[name], "attn_dp_size": 1}
        assert eligibility.skip_reason(True, alone, {}) is None
        assert str(eligibility.skip_reason(True, {**alone, **given}, {})).startswith(f"of {name}, ")
    server = phases.ServerFacts(1, 5000, 1, 1, 20, 320, 1000)
    c = phases.derive_limits(given, server)
    assert (c.ranks, c.gathered) == (2, 2)
    for phase in phases.derive_phases(c).phases:
        assert phase.bound.all_ranks == 2 * (phase.bound.tokens or phase.bound.requests) > 0
    of_both = phases.derive_limits({**given, "dp_size": 4, "attn_dp_size": 2}, server)
    assert (of_both.ranks, of_both.gathered) == (8, 2)
    assert [each.bound for each in phases.derive_phases(of_both).phases] == [
        each.bound for each in phases.derive_phases(c).phases
    ]


def test_replicas_are_each_driven_as_if_they_were_alone():
    replicas = {**ARGUMENTS, "dp_size": 4}
    assert eligibility.skip_reason(True, replicas, {}) is eligibility.monitor_only_reason(replicas) is None
    c = phases.derive_limits(replicas, phases.ServerFacts(1, 5000, 1, 1, 20, 320, 1000))
    assert (c.ranks, c.gathered) == (4, 1)
    assert {phase.bound.all_ranks for phase in phases.derive_phases(c).phases} == {0}


def test_a_pipelines_stages_are_driven_by_what_one_batch_of_several_may_be():
    told = phases.ServerFacts(1, 50_000, 1, 1, 20, 4096, 1000)
    given = {"chunked_prefill_size": 64, "enable_mixed_chunk": True, "max_req_input_len": 3000}
    whole, c = (phases.derive_limits({**given, "pp_size": stages}, told) for stages in (1, 2))
    assert (whole.batch, c.batch) == (20, 10)
    assert eligibility.monitor_only_reason({**ARGUMENTS, "pp_size": 2}) is None
    assert "mixed chunk" in [phase.name for phase in phases.derive_phases(whole).phases]
    assert "mixed chunks: each stage has several batches under way" in phases.derive_phases(c).skipped
    driven = {phase.kind: phase for phase in phases.derive_phases(c).phases}
    for kind in (PhaseKind.EAGER_DECODE, PhaseKind.PENALTIES, PhaseKind.LONG_AMONG_SHORT):
        assert driven[kind].bound.requests == 10
        assert len(driven[kind].prompts(phases.Tokens("x", 1000))) == 20
    prompts = driven[PhaseKind.LONG_AMONG_SHORT].prompts(phases.Tokens("x", 1000))
    assert driven[PhaseKind.LONG_AMONG_SHORT].bound.longest == len(prompts[0]) > 2000
    assert {phase.bound.longest for phase in phases.derive_phases(whole).phases} == {0}
    graphs = phases.derive_phases(replace(c, captured=4))
    (captured,) = [phase for phase in graphs.phases if phase.kind is PhaseKind.CAPTURED_DECODE]
    assert captured.bound.requests == len(captured.prompts(phases.Tokens("x", 1000))) == 4
    # Four prompts of a page do not fit into one chunk.
    paged = phases.derive_phases(replace(c, captured=4, page=32))
    assert PhaseKind.CAPTURED_DECODE not in {phase.kind for phase in paged.phases}
    assert any(why.startswith("captured decode of 4 requests: ") for why in paged.skipped)
    assert phases.derive_limits({**given, "pp_size": 2, "pp_max_micro_batch_size": 3}, told).batch == 3


def test_the_fraction_in_force_is_the_schedulers():
    assert phases.fraction_in_force({"mem_fraction_static": 0.8}) == 0.8
    told = {"mem_fraction_static": 0.8, "internal_states": [{"mem_fraction_static": 0.9}, {"mem_fraction_static": 0.9}]}
    assert phases.fraction_in_force(told) == 0.9


@pytest.mark.parametrize("name", eligibility.ENGINE_SWITCHES)
def test_where_the_engine_does_it_otherwise_it_stays_with_the_rule(name):
    assert eligibility.skip_reason(True, ARGUMENTS, {name: "1"}) == f"{name} is set"
    assert eligibility.skip_reason(True, ARGUMENTS, {name: "0"}) is None


def test_ranks_with_requests_of_their_own_that_do_not_say_what_they_run_stay_with_the_rule():
    silent = {eligibility.SKIP_ALL_GATHER: "1"}
    assert eligibility.skip_reason(True, ARGUMENTS, silent) is None
    assert (
        eligibility.skip_reason(True, ARGUMENTS | {"attn_dp_size": 2}, silent)
        == f"{eligibility.SKIP_ALL_GATHER} is set"
    )


def test_nothing_is_hooked_where_it_is_not_asked_for(monkeypatch):
    arguments = type("ServerArgs", (), {"__post_init__": lambda self: None})
    before = vars(arguments)["__post_init__"]
    monkeypatch.delenv(eligibility.KV_SIZING.name, raising=False)
    launcher.hook_server_args(SimpleNamespace(ServerArgs=arguments), Patcher())
    assert vars(arguments)["__post_init__"] is before
    change = next(each for each in CHANGES if each.name == "kv-sizing")
    assert "turns it on" in str(change.skip_reason(SimpleNamespace(**ARGUMENTS)))


class Resolving:
    """As the engine's ``ServerArgs`` up to 0.5.19: construction fills in the fraction."""

    def __init__(self, fraction=None):
        self.mem_fraction_static, self.device = fraction, "cuda"
        self.__post_init__()

    def __post_init__(self):
        self.mem_fraction_static = self.mem_fraction_static or 0.88


def test_a_fraction_that_was_given_is_told_from_the_engines_own(monkeypatch):
    monkeypatch.setenv(eligibility.KV_SIZING.name, "auto")
    early, patcher = Resolving(), Patcher()
    launcher.hook_server_args(SimpleNamespace(ServerArgs=Resolving), patcher)
    try:
        assert not launcher.given_by_the_user(Resolving())
        assert launcher.given_by_the_user(Resolving(0.88))
        assert launcher.given_by_the_user(early)  # it arrived resolved
    finally:
        patcher.undo()
    assert launcher.given_by_the_user(SimpleNamespace(_raw_input={"mem_fraction_static": 0.9}))
    assert not launcher.given_by_the_user(SimpleNamespace(_raw_input={"mem_fraction_static": None}))


# --- The fingerprint -------------------------------------------------------------------------------------------------


def test_what_listens_elsewhere_is_the_same_server_and_what_runs_otherwise_is_not():
    def key(**arguments):
        return record.fingerprint({"arguments": fingerprint.lasting_arguments({**ARGUMENTS, **arguments})})

    assert key(port=1, host="a", log_level="error", mem_fraction_static=0.9) == key(port=2, mem_fraction_static=0.8)
    assert key(some_new_flag=False) == key()
    assert len({key(), key(chunked_prefill_size=8192), key(tp_size=4), key(some_new_flag=True)}) == 4


def test_what_a_release_has_by_itself_is_not_said():
    @dataclass
    class Arguments:
        model_path: str
        tp_size: int = 1
        page_size: int | None = None

    struct = type("Struct", (), {"__struct_fields__": ("a", "b"), "__struct_defaults__": (5,)})
    given = Arguments("m", 2, 64)
    assert fingerprint.defaults_of(given) == {"tp_size": 1, "page_size": None}
    assert fingerprint.defaults_of(struct()) == {"b": 5}
    sized = {"tp_size": 2, "page_size": 64}
    assert fingerprint.lasting_arguments(vars(given), fingerprint.defaults_of(given)) == sized
    assert fingerprint.lasting_arguments({"tp_size": 1}, fingerprint.defaults_of(given)) == {}


def test_no_secret_gets_into_a_file():
    kept = {"max_total_tokens": 5, "swa_full_tokens_ratio": 0.7}
    secrets = {"api_key": "x", "ssl_keyfile": "x", "some_password": "x", "hf_token": "x"}
    assert fingerprint.lasting_arguments(kept | secrets) == kept
    assert fingerprint.variables_of({"SGLANG_AUTH_TOKEN": "x", "SGLANG_X": "1", "HOME": "/"}) == {"SGLANG_X": "1"}


def test_nested_arguments_and_lists_count():
    @dataclass
    class Phase:
        backend: str = "full"
        max_bs: int = 64

    @dataclass
    class Graphs:
        decode: Phase

    keys = [
        record.fingerprint(fingerprint.lasting_arguments(arguments))
        for arguments in (
            {"cuda_graph_config": Graphs(Phase())},
            {"cuda_graph_config": Graphs(Phase(max_bs=128))},
            {"cuda_graph_bs": [1, 2]},
            {"cuda_graph_bs": [1, 2, 4]},
            {},
        )
    ]
    assert len(set(keys)) == len(keys)
    as_a_mapping = fingerprint.lasting_arguments({"cuda_graph_config": {"decode": {"backend": "full", "max_bs": 64}}})
    assert record.fingerprint(as_a_mapping) == keys[0]


def test_what_an_orchestrator_injects_does_not_count():
    injected = {
        "SGLANG_SERVICE_HOST": "10.0.0.1",
        "SGLANG_ROUTER_SERVICE_PORT_HTTP": "80",
        "SGLANG_PORT_30000_TCP_ADDR": "10.0.0.1",
        "SGLANG_PORT": "tcp://10.0.0.1:30000",
    }
    assert fingerprint.variables_of(injected | {"SGLANG_X": "1"}) == {"SGLANG_X": "1"}


def test_a_model_is_its_configuration_wherever_it_lies():
    configs = ['{"_name_or_path": "/a", "n": 1}', '{"_name_or_path": "/b", "n": 1}', '{"_name_or_path": "/a", "n": 2}']
    same, moved, another = (
        record.fingerprint({"model": number, "config": fingerprint.model_configuration(config)})
        for number, config in enumerate(configs)
    )
    assert same == moved != another


def test_a_draft_that_the_model_contains_is_the_models_and_another_one_counts():
    def arguments(model, draft):
        return fingerprint.lasting_arguments({"model_path": model, "speculative_draft_model_path": draft})

    assert arguments("/a", "/a") == arguments("/b", "/b") != arguments("/a", "/c")


def test_the_nearest_record_is_named_by_what_differs():
    inputs = {"torch": "2.11", "model": "a", "arguments": {"tp_size": 2, "page_size": 1}}
    known = {
        "x": Record(fingerprint_inputs={**inputs, "model": "b", "arguments": {"tp_size": 4}}),
        "y": Record(fingerprint_inputs={**inputs, "torch": "2.12"}),
    }
    assert fingerprint.nearest(inputs, known) == "the nearest record differs in torch"
    assert fingerprint.nearest(inputs, {"x": known["x"]}).endswith("arguments.page_size, arguments.tp_size")
    assert fingerprint.nearest(inputs, {}) == ""


def test_the_changes_that_patch_the_engine_count_and_why_others_do_not_is_no_matter():
    plans = {status.value: Plan(status) for status in Status}
    assert set(fingerprint.changes_of(plans)) == {"applied", "hardened"}


def test_variables_of_changes_count_and_those_of_this_one_and_of_commands_do_not():
    environ = {
        "SGLANG_MOE_PATCHES_SEGMENTS": "on",
        "SGLANG_MOE_PATCHES_OBSERVE": "/tmp",
        eligibility.KV_SIZING.name: "auto",
    }
    assert fingerprint.variables_of(environ) == {"SGLANG_MOE_PATCHES_SEGMENTS": "on"}


# --- What a record gives ---------------------------------------------------------------------------------------------

A, B, ELSEWHERE = "h:1@1.0", "h:2@1.0", "another:1@1.0"
"""Launches: host, process and when it began."""
START = sizing.LaunchMemory(before=140 * GB, total=141 * GB, fraction=0.8)
MEASURED = Record(
    measured=1000.0,
    total=141 * GB,
    before=140 * GB,
    rule_fraction=0.8,
    rule_tokens=382_206,
    fraction=0.8,
    tokens=382_206,
    kv_bytes=20 * GB,
    reserve=28 * GB,
    need=8 * GB,
    ranks=(8 * GB, 7 * GB),
    reached=("prefill chunk",),
)


def test_what_was_not_needed_goes_to_the_kv_cache_but_for_the_margin():
    found = sizing.decide(START, MEASURED)
    assert found.fraction == pytest.approx(
        1 - (8 * GB + sizing.MARGIN_BYTES) / (140 * GB), abs=2 * sizing.FRACTION_STEP
    )
    assert found.reserve >= 8 * GB + sizing.MARGIN_BYTES
    assert found.rehearse
    assert not sizing.decide(START, replace(MEASURED, proven=True)).rehearse


@pytest.mark.parametrize(
    ("known", "why", "rehearses"),
    [
        (None, "no record for this configuration", True),
        (Record(unfinished=("0 of a",)), "no record for this configuration", True),
        (Record(unfinished=("0 of a", "0 of b")), "2 rehearsals have begun and not ended", False),
        (replace(MEASURED, unfinished=("0 of a", "0 of b")), "2 rehearsals have begun and not ended", False),
        (replace(MEASURED, missed=("mixed chunk",), rehearsals=1), "did not reach: mixed chunk", True),
        (replace(MEASURED, missed=("mixed chunk",), rehearsals=2), "did not reach: mixed chunk", False),
        (replace(MEASURED, ooms=2), "2 servers ran out of memory", False),
        (
            replace(MEASURED, before=130 * GB),
            "other processes hold 1,000 MB of the GPU, 11,000 MB when it was measured",
            False,
        ),
        (replace(MEASURED, need=26 * GB), "0.0 % more KV cache", False),
        (replace(MEASURED, need=27 * GB), "it already leaves 1,000 MB less than the largest forward", False),
        (replace(MEASURED, serving_peak_need=26 * GB), "less than 2 %", False),
    ],
)
def test_the_rule_stands_with_a_reason(known, why, rehearses):
    found = sizing.decide(START, known)
    assert found.fraction is None
    assert why in found.reason
    assert found.rehearse is rehearses
    assert found.reserve == START.reserve


def test_where_no_memory_is_free_nothing_is_divided():
    assert sizing.decide(sizing.LaunchMemory(0, GB, 0.9), MEASURED).reason == "no memory is free"


def test_a_file_that_cannot_be_read_is_the_reason():
    found = sizing.decide(START, None, "x.json is not whole JSON")
    assert (found.fraction, found.reason, found.rehearse) == (None, "x.json is not whole JSON", True)


def test_after_an_out_of_memory_a_server_takes_less():
    assert sizing.decide(START, replace(MEASURED, ooms=1)).reserve >= 8 * GB + 2 * sizing.MARGIN_BYTES


LIMITED = {
    # The KV cache that --max-total-tokens allows in tokens, what was set aside beside it, and the need.
    "the rule gives it": (382_206, 28 * GB, 8 * GB, "--max-total-tokens 382,206 is used; 726,191 would fit"),
    "the rule would give more": (382_206, 60 * GB, 8 * GB, "--max-total-tokens 382,206 is used; 1,337,721 would fit"),
    "hardly more than the rule gives": (
        383_000,
        28 * GB,
        8 * GB,
        "--max-total-tokens 383,000 is used; 726,191 would fit",
    ),
    "the need is larger": (382_206, 60 * GB, 59 * GB, "it already leaves 1,000 MB less than the largest forward"),
    "more than fits": (800_000, 28 * GB, 8 * GB, ""),
    "more than the rule gives": (500_000, 28 * GB, 8 * GB, ""),
}


@pytest.mark.parametrize("name", LIMITED)
def test_a_limit_of_the_users_is_the_reason_and_nothing_is_rehearsed_for_it(name):
    limit, reserve, need, why = LIMITED[name]
    launch = replace(START, max_tokens=limit)
    known = replace(MEASURED, reserve=reserve, need=need)
    found = sizing.decide(launch, known)
    assert found.reason.startswith(why)
    assert (found.fraction is None) == (not found.rehearse) == bool(why)
    advice, is_warning = sizing.advise(launch, known)
    assert is_warning == ("already" in why)
    more = min(limit, 726_191) - 382_206
    if not name.startswith("hardly"):  # which a given fraction may be told
        assert (
            advice.startswith(why or f"18,000 MB of it were never needed: 0.9285 would give {more:,} more")
            or is_warning
        )


def test_what_the_rule_keeps_for_images_is_in_the_suggestion():
    plain, images = (kv_records.advice(replace(MEASURED, images=size))["suggested_fraction"] for size in (0, 14 * GB))
    assert plain - images == pytest.approx(0.1)


@pytest.mark.parametrize(
    ("known", "fraction"),
    [(None, None), (replace(MEASURED, missed=("x",)), None), (MEASURED, 0.9285), (Record(), None)],
)
def test_a_fraction_is_suggested_where_the_need_is_known(known, fraction):
    assert sizing.suggested_fraction(START, known) == fraction


@pytest.mark.parametrize("name", ["table_bytes", "draft_kv_bytes"])
def test_what_grows_with_the_kv_cache_is_paid_for(name):
    larger = sizing.decide(START, replace(MEASURED, **{name: 2 * GB}))
    plain = sizing.decide(START, MEASURED)
    grows = (20 * GB + 28 * GB - plain.reserve) / (20 * GB) - 1
    assert larger.reserve == pytest.approx(plain.reserve + grows * 2 * GB, abs=0.03 * GB)


amounts = st.integers(0, 200 * GB)


@given(amounts, amounts, amounts, amounts, amounts, st.floats(0, 1), st.floats(0, 0.99), st.integers(0, 3))
def test_never_worse_than_the_rule_and_never_less_than_was_needed(need, serving, table, kv, before, f, rule, ooms):
    start = sizing.LaunchMemory(before=max(1, before), total=max(1, before), fraction=rule)
    known = Record(
        need=need,
        serving_peak_need=serving,
        table_bytes=table,
        kv_bytes=kv,
        before=before,
        total=start.total,
        reserve=int(before * (1 - f)),
        ooms=ooms,
    )
    found = sizing.decide(start, known)
    if found.fraction is not None:
        assert rule < found.fraction < 1
        assert start.before * (1 - found.fraction) >= max(need, serving) + sizing.MARGIN_BYTES - 1
    else:
        assert found.reason


def test_memory_that_others_gave_back_meanwhile_is_not_taken_for_ours():
    assert sizing.lowest(seen=20 * GB, began=25 * GB, reserved_growth=4 * GB) == 20 * GB
    assert sizing.lowest(seen=24 * GB, began=25 * GB, reserved_growth=4 * GB) == 21 * GB


# --- The file --------------------------------------------------------------------------------------------------------


def test_what_is_written_is_read(tmp_path):
    path = tmp_path / "new" / "kv.json"
    known = replace(
        MEASURED, fingerprint_inputs={"model": "m", "arguments": {"tp_size": 2}}, lowest_free_serving=5, proven=True
    )
    record.update(path, KEY, lambda old: known)
    assert record.read(path) == {KEY: known}
    assert record.read(tmp_path / "none.json") == {}


def test_other_records_stay_and_one_can_be_forgotten(tmp_path):
    path = tmp_path / "kv.json"
    record.update(path, "a", lambda old: MEASURED)
    record.update(path, "b", lambda old: record.with_rehearsal_begun(old, 0, "launch"))
    record.update(path, "a", lambda old: None)
    assert record.read(path) == {"b": Record(unfinished=("0 of launch",))}


BROKEN = {
    "empty": ("", "is not whole JSON"),
    "half": ('{"format": 3, "records": {"a": {"need": 12', "is not whole JSON"),
    "a list": ("[]", "is no file of records"),
    "another format": ('{"format": 1, "records": {}}', "has format 1, this version reads 3"),
    "a number": ('{"format": 3, "records": {"a": 5}}', "has a Record that is none"),
    "text for bytes": ('{"format": 3, "records": {"a": {"need": "many"}}}', "whose need is 'many'"),
    "a bool for bytes": ('{"format": 3, "records": {"a": {"need": true}}}', "whose need is True"),
    "less than nothing": ('{"format": 3, "records": {"a": {"need": -1}}}', "whose need is -1"),
    "no number": ('{"format": 3, "records": {"a": {"fraction": NaN}}}', "whose fraction is nan"),
    "parts": ('{"format": 3, "records": {"a": {"parts": {"slack": "x"}}}}', "whose slack is 'x'"),
    "ranks": ('{"format": 3, "records": {"a": {"ranks": [1, null]}}}', "whose ranks is None"),
}


@pytest.mark.parametrize("name", BROKEN)
def test_a_broken_file_is_a_reason_and_is_put_aside_when_the_next_record_is_written(tmp_path, name):
    text, why = BROKEN[name]
    path = tmp_path / "kv.json"
    path.write_text(text)
    with pytest.raises(record.Unreadable, match=why):
        record.read(path)
    record.update(path, KEY, lambda old: MEASURED)
    assert record.read(path) == {KEY: MEASURED}
    assert (tmp_path / "kv.json.unreadable").read_text() == text


@given(st.text(max_size=60) | st.binary(max_size=60))
def test_whatever_a_file_has_it_is_read_or_a_reason(tmp_path_factory, text):
    path = tmp_path_factory.mktemp("any") / "kv.json"
    path.write_bytes(text if isinstance(text, bytes) else text.encode(errors="surrogatepass"))
    with suppress(record.Unreadable):
        assert record.read(path) == {}


def test_fields_that_a_newer_version_has_are_left_out(tmp_path):
    path = tmp_path / "kv.json"
    path.write_text('{"format": 3, "records": {"a": {"need": 5, "of_the_future": 1}}}')
    assert record.read(path) == {"a": Record(need=5)}


def test_a_folder_that_is_a_file_is_one_line(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(record.Unwritable, match=r"kv.json cannot be written \("):
        record.update(tmp_path / "file" / "kv.json", KEY, lambda old: MEASURED)


@pytest.fixture
def read_only(tmp_path, monkeypatch):
    """A folder in which nobody writes; root does in spite of its mode, so for root opening says what it would say."""
    tmp_path.chmod(stat.S_IRUSR | stat.S_IXUSR)
    if os.geteuid() == 0:
        opens = Path.open

        def refuses(self, mode="r", *given, **more):
            if self.parent == tmp_path and set(mode) & set("wax+"):
                raise OSError(errno.EROFS, os.strerror(errno.EROFS))
            return opens(self, mode, *given, **more)

        monkeypatch.setattr(Path, "open", refuses)
    yield tmp_path
    tmp_path.chmod(stat.S_IRWXU)


def test_a_read_only_folder_is_one_line(read_only):
    with pytest.raises(record.Unwritable, match=r"kv.json cannot be written \("):
        record.update(read_only / "kv.json", KEY, lambda old: MEASURED)


def test_what_does_not_change_is_not_written(tmp_path):
    path = tmp_path / "kv.json"
    record.update(path, KEY, lambda old: None)
    assert not path.exists()
    record.update(path, KEY, lambda old: MEASURED)
    written = path.stat().st_ino
    record.update(path, KEY, lambda old: old)
    assert path.stat().st_ino == written
    record.update(path, KEY, record.with_out_of_memory)
    assert path.stat().st_ino != written


def test_what_fails_while_it_is_written_leaves_the_old_file(tmp_path, monkeypatch):
    path = tmp_path / "kv.json"
    record.update(path, KEY, lambda old: MEASURED)

    def fail(*args):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(record.os, "fsync", fail)
    with pytest.raises(record.Unwritable, match="No space left on device"):
        record.update(path, KEY, lambda old: None)
    monkeypatch.undo()
    assert record.read(path) == {KEY: MEASURED}
    assert sorted(each.name for each in tmp_path.iterdir()) == ["kv.json", "kv.json.lock"]


KILLED = """
import os, signal, sys
from pathlib import Path
from sglang_moe_patches.memory.kv_sizing import record

setattr(record.os, sys.argv[2], lambda *given: os.kill(os.getpid(), signal.SIGKILL))
record.update(Path(sys.argv[1]), sys.argv[3], lambda old: None)
"""


@pytest.mark.parametrize("at", ["fsync", "replace"])
def test_who_is_killed_while_it_writes_leaves_the_old_file_and_nobody_waiting(tmp_path, at):
    path = tmp_path / "kv.json"
    record.update(path, KEY, lambda old: MEASURED)
    done = subprocess.run([sys.executable, "-c", KILLED, str(path), at, KEY], check=False)
    assert done.returncode == -signal.SIGKILL
    assert record.read(path) == {KEY: MEASURED}
    record.update(path, KEY, record.with_out_of_memory)
    assert record.read(path) == {KEY: replace(MEASURED, ooms=1)}
    assert sorted(each.name for each in tmp_path.iterdir()) == ["kv.json", "kv.json.lock"]


def test_who_writes_while_another_does_waits_for_it_and_loses_nothing(tmp_path):
    path = tmp_path / "kv.json"
    other = threading.Thread(target=record.update, args=(path, KEY, record.with_out_of_memory))

    def slowly(old):
        other.start()
        other.join(0.5)  # as long as it may take to come in between
        return record.with_out_of_memory(old)

    record.update(path, KEY, slowly)
    other.join()
    assert record.read(path)[KEY].ooms == 2


# --- What becomes of a record ----------------------------------------------------------------------------------------


def test_a_first_rehearsal_is_the_record_and_a_second_one_proves_it_or_makes_it_larger():
    first = record.with_rehearsal(record.with_rehearsal_begun(Record(), 0, A), MEASURED, 0, A)
    assert (first.attempts, first.need, first.proven) == (0, 8 * GB, False)
    second = replace(MEASURED, need=9 * GB, fraction=0.9, rule_tokens=0, proven=True)
    became = record.with_rehearsal(record.with_rehearsal_begun(first, 0, B), second, 0, A)
    assert (became.need, became.proven, became.rule_tokens, became.fraction) == (9 * GB, True, 382_206, 0.9)
    assert record.with_rehearsal(first, replace(second, need=GB), 0, A).need == 8 * GB


def test_a_second_rehearsal_that_stops_early_makes_the_next_server_smaller_and_is_no_proof():
    stopped = replace(MEASURED, need=12 * GB, reached=(), missed=("mixed chunk",), fraction=0.9)
    became = record.with_rehearsal(MEASURED, stopped, 0, A, stopped=True)
    assert (became.need, became.proven, became.missed, became.reached) == (12 * GB, False, (), MEASURED.reached)
    assert sizing.decide(START, became).reserve >= 12 * GB + sizing.MARGIN_BYTES - 1


@pytest.mark.parametrize("stopped", [False, True])
def test_the_replicas_of_a_launch_have_rehearsed_once(stopped):
    missed = replace(MEASURED, missed=("mixed chunk",))
    for rehearsals, gpu, launch in ((1, 0, A), (1, 1, A), (2, 0, B), (2, 1, B)):
        missed = record.with_rehearsal(missed, missed, gpu, launch, stopped=stopped)
        assert missed.rehearsals == rehearsals
        assert sizing.decide(START, missed).rehearse == (launch == A)


def test_a_replica_is_no_proof_where_another_needs_more_than_it_set_aside():
    second = replace(MEASURED, reserve=14 * GB, proven=True)
    for more, proven in ((14 * GB - 1, True), (15 * GB, False)):
        meanwhile = record.with_rehearsal(MEASURED, replace(MEASURED, need=more), 1, A, stopped=True)
        became = record.with_rehearsal(meanwhile, second, 0, A)
        assert (became.need, became.proven) == (more, proven)


def test_rehearsals_that_do_not_end_are_counted_by_launch_and_forgiven_by_gpu_and_machine():
    both = record.with_rehearsal_begun(record.with_rehearsal_begun(Record(), 0, A), 1, A)
    assert both.attempts == 1
    one = record.with_rehearsal(both, MEASURED, 0, A)
    assert one.attempts == 1
    # The second replica ends its server again and again, long after the first is done.
    again = record.with_rehearsal_begun(record.with_rehearsal_begun(one, 0, B), 1, B)
    again = record.with_rehearsal(again, MEASURED, 0, B)
    assert again.attempts == sizing.MAX_UNFINISHED_REHEARSALS
    assert "2 rehearsals have begun and not ended" in sizing.decide(START, again).reason
    assert record.with_rehearsal(again, MEASURED, 1, B).attempts == 0
    elsewhere = record.with_rehearsal_begun(Record(), 0, ELSEWHERE)
    assert record.with_rehearsal(elsewhere, MEASURED, 0, A).attempts == 1


def test_launches_that_are_under_way_are_no_failures():
    two = record.with_rehearsal_begun(record.with_rehearsal_begun(Record(), 0, A), 0, B)
    two = replace(two, unserved=(A, B))
    left = record.without_living(two, lambda launch: launch == B)
    assert (left.unfinished, left.unserved) == ((f"0 of {A}",), (A,))


def test_a_sized_start_that_dies_before_it_serves_makes_the_next_smaller_and_then_the_rule_applies():
    """Graph capture, a warm-up, an orchestrator's kill: the start after it must not take the same fraction."""
    fractions = []
    known = MEASURED
    for launch in (A, B, ELSEWHERE):
        found = sizing.decide(START, known)
        fractions.append(found.fraction)
        known = record.with_unserved(known, launch)
    assert fractions[0] > fractions[1] > START.fraction
    assert fractions[2] is None
    assert "2 starts with the record's fraction ended before they served" in found.reason
    assert sizing.decide(START, record.with_served_start(known)).fraction == fractions[0]
    assert record.with_unserved(Record(), A) is None


def test_the_parts_are_of_the_need_that_counts():
    small, large = (replace(MEASURED, need=need, parts=record.NeedParts(slack=need)) for need in (GB, 9 * GB))
    for old, new, stopped in ((small, large, False), (large, small, False), (small, large, True), (large, small, True)):
        became = record.with_rehearsal(old, new, 0, A, stopped=stopped)
        assert (became.need, became.parts) == (9 * GB, large.parts)


def test_what_is_seen_while_serving_counts_from_then_on():
    seen = record.with_serving(record.with_serving(MEASURED, 12 * GB, 5 * GB), 12 * GB, 2 * GB)
    assert (seen.serving_peak_need, seen.lowest_free_serving) == (10 * GB, 2 * GB)
    assert record.with_serving(seen, 12 * GB, 6 * GB) == seen
    assert sizing.decide(START, seen).reserve >= 10 * GB + sizing.MARGIN_BYTES - 1
    again = record.with_rehearsal(seen, MEASURED, 0, A)
    assert (again.serving_peak_need, again.lowest_free_serving) == (10 * GB, 2 * GB)


TOLD = {
    "measured": (
        MEASURED,
        ("8,000 MB needed", "8,000, 7,000 by rank", "382,206 tokens", "reached: prefill chunk", "rehearses once more"),
    ),
    "suggested": (MEASURED, ("suggested: --mem-fraction-static 0.9285, with which 726,191 tokens fit",)),
    "limited": (
        replace(MEASURED, fingerprint_inputs={"arguments": {"max_total_tokens": 100_000}}),
        ("the next start: --max-total-tokens 100,000 is used; 726,191 would fit",),
    ),
    "parts": (
        replace(
            MEASURED,
            table_bytes=GB // 2,
            draft_kv_bytes=GB // 2,
            parts=record.NeedParts(GB, 2 * GB, 3 * GB, "mixed chunk", slack=GB // 2),
        ),
        (
            "500 MB request table",
            "500 MB the draft model's KV cache",
            "1,000 MB decode graphs",
            "2,000 MB prefill graphs",
            "3,000 MB tensors of the largest forward (mixed chunk)",
            "500 MB slack of PyTorch's allocator",
            f"500 MB {kv_records.REST}",
        ),
    ),
    "nothing of it told apart": (MEASURED, (f"8,000 MB {kv_records.REST}",)),
    "ended early": (replace(MEASURED, parts=record.NeedParts(not_run=GB)), ("1,000 MB kept for the forward before",)),
    "counted twice": (
        replace(MEASURED, parts=record.NeedParts(decode_graphs=5 * GB, tensors=4 * GB)),
        ("8,000 MB parts that overlap",),
    ),
    "serving": (replace(MEASURED, lowest_free_serving=3 * GB, ooms=1), ("3,000 MB free", "while serving: 1")),
    "not driven": (replace(MEASURED, missed=("x",), skipped=("y: z",)), ("not reached, so", "skipped: y: z")),
    "begun": (Record(unfinished=("0 of a",)), ("1 rehearsals have begun and not ended",)),
    "of what": (
        replace(
            MEASURED,
            fingerprint_inputs={"model": "m", "device": "H200", "devices": 2, "changes": {"moe-workspace": "applied"}},
        ),
        (KEY, "m on 2 x H200", "moe-workspace: applied"),
    ),
}


@pytest.mark.parametrize("name", TOLD)
def test_a_record_is_told_to_people(name):
    known, parts = TOLD[name]
    text = "\n".join(kv_records.describe(KEY, known))
    assert [part for part in parts if part not in text] == []
    made_of = kv_records.advice(known)["need_made_of"]
    assert sum(made_of.values()) == known.need


@pytest.mark.parametrize(
    ("seconds", "words"), [(5, "less than a minute"), (60, "1 minute"), (7200, "2 hours"), (260_000, "3 days")]
)
def test_an_age_in_words(seconds, words):
    assert record.age(Record(measured=1000.0), 1000.0 + seconds) == words


def test_doctor_lists_and_forgets(tmp_path, monkeypatch):
    def said(*arguments):
        found = CliRunner().invoke(cli.app, ["doctor", *arguments])
        return found.exit_code, found.output

    path = tmp_path / "kv.json"
    monkeypatch.setenv(eligibility.KV_RECORD.name, str(path))
    assert said("--kv") == (0, f"{path}: 0 records\n")
    for name in ("abc", "abd", "xyz"):
        record.update(path, name, lambda old: MEASURED)
    assert said("--kv")[1].startswith(f"{path}: 3 records\n")
    told = json.loads(said("--kv", "--json")[1])["records"]["xyz"]
    assert (told["need"], told["suggested_fraction"], told["suggested_tokens"]) == (8 * GB, SIZED, 726_191)
    assert said("--forget", "ab") == (0, f"{path}: abc, abd forgotten\n")
    with pytest.raises(ValueError, match="has no record q; it has xyz"):
        kv_records.forget("q")
    assert said("--forget", "all") == (0, f"{path}: xyz forgotten\n")
    assert said("--kv") == (0, f"{path}: 0 records\n")
    path.write_text("{")
    with pytest.raises(ValueError, match="is not whole JSON"):
        kv_records.format_records()
    assert said("--forget", "x")[0] == 2


# --- The script ------------------------------------------------------------------------------------------------------

LIMITS = Limits(
    chunk=1024, input_tokens=10_000, cache_tokens=50_000, requests=300, captured=64, vocabulary=5000, context=10_006
)


def test_the_largest_decode_asks_for_all_that_sampling_may_take():
    kinds = {phase.kind: phase for phase in phases.derive_phases(replace(LIMITS, stop_token=True)).phases}
    asked = kinds[PhaseKind.PENALTIES]
    assert asked.output_logprobs
    assert asked.sampling.keys() >= {"presence_penalty", "repetition_penalty", "min_p", "logit_bias", "min_new_tokens"}
    # Without an end of sequence a request with min_new_tokens ends the server.
    unending = {phase.kind: phase for phase in phases.derive_phases(LIMITS).phases}[PhaseKind.PENALTIES]
    assert "min_new_tokens" not in unending.sampling
    prompts = kinds[PhaseKind.LONG_AMONG_SHORT].prompts(phases.Tokens("x", 5000))
    assert len(prompts) == LIMITS.requests
    assert len(prompts[0]) > 0.9 * LIMITS.input_tokens
    assert {len(prompt) for prompt in prompts[1:]} == {phases.SHORT_PROMPT_TOKENS}


@given(
    st.integers(16, 4096),
    st.integers(20, 5000),
    st.integers(200, 50_000),
    st.integers(1, 300),
    st.sampled_from([1, 64]),
)
def test_every_request_of_a_rehearsal_is_admitted(chunk, longest, cache, requests, page):
    c = replace(LIMITS, chunk=chunk, input_tokens=longest, cache_tokens=cache, requests=requests, captured=0, page=page)
    for phase in phases.derive_phases(c).phases:
        if phase.kind in (PhaseKind.PENALTIES, PhaseKind.LONG_AMONG_SHORT):
            for prompt in phase.prompts(phases.Tokens("x", 5000)):
                assert len(prompt) <= max(longest, phases.SHORT_PROMPT_TOKENS)
                assert phase.new_tokens >= 2


def batch(mode="EXTEND", tokens=0, requests=1, **more):
    return Batch(mode, tokens, requests, **more)


class Server:
    """In the place of a scheduler: answers every request with one forward of all tokens that were put at once."""

    def __init__(self, limits=LIMITS, refuses=(), loses=(), late=lambda: False):
        self.put, self.aborts = [], 0
        self.refuses, self.loses = refuses, loses
        load = phases.derive_phases(limits)
        self.driver = LoadDriver(load, limits, self.make, lambda: "abort", late)

    def make(self, name, prompt, new, phase):
        return SimpleNamespace(name=name, prompt=prompt, new=new)

    def step(self, idle=False):
        got = self.driver.put(idle)
        self.aborts += got.count("abort")
        new = [each for each in got if each != "abort"]
        self.put += new
        return new

    def serve(self, requests):
        bounds = self.driver._phase.bound
        wide = dict.fromkeys(phases.BOUND_FIELDS, 10**9)
        if self.driver._phase.name not in self.refuses:
            self.driver.saw(Batch(bounds.modes[0], **wide, graph=bool(bounds.graph)))
        for each in requests:
            if self.driver._phase.name not in self.loses:
                self.driver.answered(each.name)


def run(server, most=5000):
    for _ in range(most):
        got = server.step(idle=True)
        if server.driver.over:
            return server.driver
        if got:
            server.serve(got)
    raise AssertionError("it never ends")


def test_every_phase_is_brought_about_in_turn():
    server = Server()
    driver = run(server)
    assert driver.reached == [phase.name for phase in driver.load.phases]
    assert driver.missed == []
    rising = [len(each.prompt) for each in server.put[: phases.GROWING_PROMPTS]]
    assert rising == sorted(rising)
    assert rising[-1] == LIMITS.chunk
    assert len({each.name for each in server.put}) == len(server.put)


def test_a_phase_that_is_never_seen_at_its_bound_is_tried_again_and_then_named():
    server = Server(refuses=("prefill chunk",))
    driver = run(server)
    assert driver.missed == ["prefill chunk"]
    assert sum(len(each.prompt) == LIMITS.chunk for each in server.put) >= ATTEMPTS_PER_PHASE


def test_requests_that_a_server_loses_are_not_waited_for():
    assert run(Server(loses=("prefill chunk",))).over


@pytest.mark.parametrize("stages", [1, 2])
def test_what_decodes_on_when_its_batch_was_seen_is_aborted(stages):
    server = Server(limits=replace(LIMITS, stages=stages))
    (decode,) = [each for each in server.driver.load.phases if each.kind is PhaseKind.EAGER_DECODE]
    server.driver.load = replace(server.driver.load, phases=(decode,))
    first = server.step()
    assert len(first) == LIMITS.requests
    assert server.step() == []
    assert server.aborts == 0
    server.driver.saw(batch("DECODE", requests=LIMITS.requests, tokens=LIMITS.requests))
    server.step()
    assert server.aborts == 1
    assert server.step() == []
    assert server.aborts == stages  # each turn of a pipeline is another batch's
    assert not server.driver.over  # what was aborted is still to be answered
    for each in first:
        server.driver.answered(each.name)
    server.step()
    assert server.driver.over
    assert server.driver.reached == [decode.name]


def test_with_speculation_nothing_is_aborted_and_requests_end_by_their_length():
    server = Server(limits=replace(LIMITS, draft_tokens=4, draft_slots=8))
    assert max(each.new_tokens for each in server.driver.load.phases) <= phases.LONG_PROMPT_NEW_TOKENS
    assert not any(each.output_logprobs for each in server.driver.load.phases)
    (decode,) = [each for each in server.driver.load.phases if each.kind is PhaseKind.EAGER_DECODE]
    server.driver.load = replace(server.driver.load, phases=(decode,))
    first = server.step()
    server.driver.saw(batch("TARGET_VERIFY", requests=LIMITS.requests, tokens=4 * LIMITS.requests))
    server.driver.end()
    assert server.step() == []
    assert not server.driver.over
    for each in first:
        server.driver.answered(each.name)
    server.step()
    assert (server.driver.over, server.aborts, server.driver.reached) == (True, 0, [decode.name])


def test_when_time_or_memory_runs_short_nothing_further_begins():
    server = Server()
    server.serve(server.step())
    server.driver.end()
    driver = run(server)
    assert driver.missed
    assert len(driver.missed) + len(driver.reached) == len(driver.load.phases)
    assert run(Server(late=lambda: True)).reached == []


# --- Inbox and outbox ------------------------------------------------------------------------------------------------


def test_an_inbox_hands_out_one_poll_at_a_time_and_then_says_that_there_is_no_more():
    zmq = pytest.importorskip("zmq")
    polls = iter([["a", "b"], [], ["c"]])
    inbox = rehearsal.Inbox(SimpleNamespace(fileno=7), lambda: next(polls))

    def drained():
        found = []
        while True:
            try:
                found.append(inbox.recv_pyobj(zmq.NOBLOCK))
            except zmq.ZMQError:
                return found

    assert [drained(), drained(), drained()] == [["a", "b"], [], ["c"]]
    assert inbox.fileno == 7


SMALL = replace(LIMITS, chunk=64, input_tokens=300, cache_tokens=5000, requests=3, captured=0)


class FlushCacheReqOutput:
    """As the engine's; it is known by its name."""

    def __init__(self, success):
        self.success = success


class Outbox:
    def __init__(self):
        self.sent = []

    def send_output(self, output, recv_obj=None):
        self.sent.append(output)


class Scheduler:
    """One rank, as far as a rehearsal touches it: every request that is put is a forward, then an answer."""

    def __init__(self, monkeypatch, reads=True, free=lambda forwards: 9 * GB, flushes=True):
        import zmq

        self.zmq, self.flushes, self.forwards, self.drawn = zmq, flushes, 0, []
        self.real = SimpleNamespace(recv_pyobj=self._nothing)
        self.recv_from_tokenizer = self.real if reads else None
        self.send_to_tokenizer, self.send_to_detokenizer = Outbox(), Outbox()
        self.enable_metrics, self.forward_ct, self.spec_num_forward_ct = True, 7, 3
        self.max_queued_requests, self.phase = 2, str
        self.tp_worker = SimpleNamespace(
            model_runner=type("Runner", (), {"forward": lambda runner, batch: self._forward(runner)})()
        )
        self.tp_worker.model_runner.forward_pass_id = 11
        monkeypatch.setattr(rehearsal.gpu_memory, "read", lambda gpu: self.read(free(self.forwards)))
        monkeypatch.setattr(rehearsal, "server_facts", lambda runner: SimpleNamespace(hybrid=""))
        monkeypatch.setattr(rehearsal, "limits_of", lambda scheduler, facts: SMALL)
        monkeypatch.setattr(rehearsal, "batch_facts", lambda batch: batch)
        monkeypatch.setattr(rehearsal, "make_abort", lambda: "abort")
        monkeypatch.setattr(rehearsal, "make_flush", lambda: "flush")
        monkeypatch.setattr(rehearsal, "make_request", lambda name, prompt, *more, **also: SimpleNamespace(name=name))

    def read(self, free):
        return Memory(free, 10 * GB)

    def _nothing(self, *flags):
        raise self.zmq.Again()

    def _forward(self, runner):
        import torch

        assert not self.enable_metrics
        self.forwards += 1
        self.forward_ct += 1
        self.spec_num_forward_ct += 1
        runner.forward_pass_id += 1
        random.random()
        torch.rand(1)
        return SimpleNamespace(can_run_graph=False)

    def is_fully_idle(self):
        return True

    def turn(self, bound):
        """One turn of its loop."""
        read = []
        while True:
            try:
                read.append(self.recv_from_tokenizer.recv_pyobj(self.zmq.NOBLOCK))
            except self.zmq.ZMQError:
                break
        self.bound = bound
        self.process_input_requests(read)
        return read

    def process_input_requests(self, read):
        for each in read:
            if each == "flush":
                self.send_to_tokenizer.send_output(FlushCacheReqOutput(self.flushes))
            elif each != "abort":
                wide = dict.fromkeys(phases.BOUND_FIELDS, 10**9)
                self.tp_worker.model_runner.forward(Batch((self.bound() or phases.Bound(("EXTEND",))).modes[0], **wide))
                answer = SimpleNamespace(rids=[each.name], finished_reasons=[{"type": "length"}])
                self.send_to_detokenizer.send_output(answer)


class Notes:
    """What ranks leave for the first; those of ``others`` are there when it looks for the last time of ``looks``."""

    def __init__(self, *others, looks=1):
        self.left, self.others, self.looks, self.low = [], list(others), looks, False

    def report_low_memory(self):
        self.low = True

    def any_rank_low_on_memory(self):
        return self.low

    def publish(self, result):
        self.left.append(result)

    def collect(self):
        self.looks -= 1
        return [*self.left, *self.others] if self.looks <= 0 else None


def rehearse_it(scheduler, turns=3000, notes=None):
    """:returns: its result, and what of it is left in the scheduler."""
    results: list[rehearsal.RankResult] = []
    run = rehearsal.Rehearsal(scheduler, 0, results.append, notes or Notes(), leads=True)
    before = state_of(scheduler)
    run.begin()
    driver = run._driver
    scheduler.phase = lambda: driver.phase_name
    for _ in range(turns):
        scheduler.turn(lambda: driver._phase and driver._phase.bound)
        if results:
            assert state_of(scheduler) == before
            return results[0]
    raise AssertionError("it never ends")


def state_of(scheduler):
    import torch

    runner = scheduler.tp_worker.model_runner
    plain = {
        name: value for name, value in vars(scheduler).items() if name not in ("forwards", "drawn", "bound", "phase")
    }
    return (
        plain,
        dict(vars(runner)),
        [dict(vars(box)) for box in (scheduler.send_to_tokenizer, scheduler.send_to_detokenizer)],
        random.getstate(),
        torch.get_rng_state().tolist(),
    )


def test_a_rehearsal_drives_every_phase_and_leaves_nothing_behind(monkeypatch):
    scheduler = Scheduler(monkeypatch, free=lambda forwards: 9 * GB - forwards * 1_000_000)
    result = rehearse_it(scheduler)
    assert result.reached == tuple(phase.name for phase in phases.derive_phases(SMALL).phases)
    assert (result.missed, result.failure, result.stopped) == ((), "", False)
    assert result.lowest == 9 * GB - scheduler.forwards * 1_000_000
    assert scheduler.send_to_detokenizer.sent == scheduler.send_to_tokenizer.sent == []


PARTS = {
    # From the rehearsal's begin on: what the allocator took, the most in tensors, and what is slack of that.
    "some is slack": (3 * GB, 2 * GB, GB),
    "graphs had left some": (GB, 2 * GB, 0),
}


@pytest.mark.parametrize("name", PARTS)
def test_a_rehearsal_tells_what_was_needed_apart(name, monkeypatch):
    taken, tensors, slack = PARTS[name]
    scheduler = Scheduler(monkeypatch)
    scheduler.tp_worker.model_runner.graph_memory_usage = {"decode": 1, "target_verify": 2, "prefill": 4, "draft": 8}
    phase, forward, has_run = phases.derive_phases(SMALL).phases[2].name, scheduler._forward, []

    def run(runner):
        has_run.append(scheduler.phase())
        return forward(runner)

    def read(free):
        large = phase in has_run
        return Memory(free, 10 * GB, 5 * GB + taken * large, allocated=4 * GB, peak=4 * GB + tensors * large)

    monkeypatch.setattr(scheduler, "_forward", run)
    monkeypatch.setattr(scheduler, "read", read)
    result = rehearse_it(scheduler)
    assert result.parts == record.NeedParts(3 * GIB, 4 * GIB, tensors, phase, slack)


GRAPHS = [({"graph_mem_usage": 2}, (2, 0)), ({}, (0, 0)), ({"graph_memory_usage": {"decode": 2}}, (2, 0))]


@pytest.mark.parametrize(("told", "gib"), GRAPHS)
def test_graphs_took_what_the_engine_says(told, gib):
    assert facts.graph_bytes(SimpleNamespace(**told)) == tuple(each * GIB for each in gib)


def test_what_waits_is_not_limited_meanwhile(monkeypatch):
    scheduler, limits = Scheduler(monkeypatch), []
    original = scheduler.process_input_requests
    monkeypatch.setattr(
        scheduler, "process_input_requests", lambda read: limits.append(scheduler.max_queued_requests) or original(read)
    )
    rehearse_it(scheduler)
    assert (set(limits), scheduler.max_queued_requests) == ({None}, 2)


def test_a_rehearsal_ends_before_memory_does(monkeypatch):
    scheduler = Scheduler(monkeypatch, free=lambda forwards: 9 * GB if forwards < 5 else rehearsal.MIN_FREE_BYTES - 1)
    result = rehearse_it(scheduler)
    assert result.stopped
    assert result.missed
    assert scheduler.forwards < 10


def test_a_rehearsal_ends_before_the_memory_of_any_rank_does(monkeypatch):
    left, notes = [3 * GB], Notes()
    other = Scheduler(monkeypatch, reads=False, free=lambda forwards: left[0])
    run = rehearsal.Rehearsal(other, 0, print, notes, leads=False)
    run.begin()
    other.tp_worker.model_runner.forward(Batch("EXTEND", 1, 1))
    assert not notes.low
    left[0] = rehearsal.MIN_FREE_BYTES - 1
    other.tp_worker.model_runner.forward(Batch("EXTEND", 1, 1))
    assert notes.low
    first = Scheduler(monkeypatch)
    result = rehearse_it(first, notes=notes)
    assert (result.reached, result.stopped, first.forwards) == ((), False, 0)  # the other one says that it stopped


def test_a_store_that_does_not_answer_ends_the_rehearsal_and_not_the_server(monkeypatch):
    notes = Notes()
    monkeypatch.setattr(notes, "any_rank_low_on_memory", lambda: 1 // 0)
    assert "ZeroDivisionError" in rehearse_it(Scheduler(monkeypatch), notes=notes).failure


def test_a_stage_is_not_idle_while_batches_are_under_way(monkeypatch):
    scheduler = Scheduler(monkeypatch)
    under_way = [None, object()]
    vars(scheduler).update(mbs=under_way)
    run = rehearsal.Rehearsal(scheduler, 0, print, Notes(), leads=True)
    run.begin()
    seen = []
    monkeypatch.setattr(run._driver, "put", lambda idle: seen.append(idle) or [])
    for _ in range(2):
        run._poll()
        under_way[1] = None
    assert seen == [False, True]


def test_a_cache_that_is_not_flushed_is_a_failure(monkeypatch):
    assert rehearse_it(Scheduler(monkeypatch, flushes=False)).failure == "requests were left"


def test_a_driver_that_does_not_answer_ends_the_rehearsal_and_not_the_server(monkeypatch):
    def free(forwards):
        if forwards > 3:
            raise RuntimeError("no answer")
        return 9 * GB

    assert rehearse_it(Scheduler(monkeypatch, free=free)).failure == "RuntimeError: no answer"


def test_a_rank_that_does_not_read_learns_the_end_from_the_flush(monkeypatch):
    scheduler = Scheduler(monkeypatch, reads=False, free=lambda forwards: (9 - forwards) * GB)
    results: list[rehearsal.RankResult] = []
    run = rehearsal.Rehearsal(scheduler, 0, results.append, Notes(), leads=False)
    before = state_of(scheduler)
    run.begin()
    for _ in range(2):
        scheduler.tp_worker.model_runner.forward(Batch("EXTEND", 1, 1))
    scheduler.send_to_tokenizer.send_output(FlushCacheReqOutput(True))
    assert state_of(scheduler) == before
    assert [(each.lowest, each.failure, each.reached) for each in results] == [(7 * GB, "", ())]


@pytest.mark.parametrize("name", ["decode_cuda_graph_runner", "graph_runner"])
def test_the_largest_captured_decode_is_of_what_was_captured(name, monkeypatch):
    told = facts_of(monkeypatch, a_pool("MHATokenToKVPool"), PLAIN_TABLE, **{name: SimpleNamespace(max_bs=144)})
    none = facts_of(monkeypatch, a_pool("MHATokenToKVPool"), PLAIN_TABLE, **{name: None})
    for asked, captured in ((150, 144), (100, 100)):
        assert phases.derive_limits({"cuda_graph_max_bs": asked}, told).captured == captured
        assert phases.derive_limits({"cuda_graph_max_bs": asked}, none).captured == asked


def test_what_another_has_set_on_a_scheduler_is_there_again_afterwards(monkeypatch, caplog):
    scheduler = Scheduler(monkeypatch)
    scheduler.process_input_requests = another = print
    run = rehearsal.Rehearsal(scheduler, 0, print, Notes(), leads=True)
    run.begin()
    assert scheduler.process_input_requests is not another
    run._undo.append(lambda: 1 // 0)
    run.end()  # whoever waits for this rank would wait for ever, if it raised
    assert scheduler.process_input_requests is another
    assert "not all is what it was" in caplog.text


def test_ranks_of_data_parallel_attention_take_in_what_the_first_puts_and_nothing_else(monkeypatch):
    first, other = Scheduler(monkeypatch), Scheduler(monkeypatch)
    other.real.recv_pyobj = lambda *flags: pytest.fail("a user's request is read")
    before = state_of(other)[0]
    results: list[rehearsal.RankResult] = []
    lead = rehearsal.Rehearsal(first, 0, results.append, Notes(), leads=True)
    follow = rehearsal.Rehearsal(other, 0, results.append, Notes(), leads=False)
    lead.begin()
    follow.begin()

    def bound():
        return lead._driver._phase and lead._driver._phase.bound

    while not results:
        assert other.turn(bound) == []
        read = first.turn(bound)
        assert {type(each) for each in read} <= {rehearsal.Broadcast}  # which the engine hands to all ranks
        other.process_input_requests(read)
    assert [each.failure for each in results] == ["", ""]
    assert other.forwards == first.forwards > 0
    assert state_of(other)[0] == before


def refused(scheduler):
    """:returns: why there is no rehearsal."""
    run, before = rehearsal.Rehearsal(scheduler, 0, print, Notes(), leads=True), state_of(scheduler)
    with pytest.raises(RuntimeError) as why:
        run.begin()
    run.end()
    assert state_of(scheduler) == before
    return str(why.value)


def a_pool(name, *bases, **has):
    return type(name, bases or (object,), {})() if not has else type(name, bases or (object,), has)()


PLAIN_TABLE, STATE_TABLE = a_pool("ReqToTokenPool"), a_pool("HybridReqToTokenPool")


@pytest.mark.parametrize(
    ("pool", "table", "named"),
    [
        (a_pool("MHATokenToKVPool"), PLAIN_TABLE, ""),
        (a_pool("SWAKVPool"), PLAIN_TABLE, ""),
        (a_pool("HybridLinearKVPool"), STATE_TABLE, ""),
        (a_pool("SWAKVPool"), STATE_TABLE, "SWAKVPool"),
        (a_pool("HybridLinearKVPool"), PLAIN_TABLE, ""),
        (a_pool("MHATokenToKVPool"), STATE_TABLE, "MHATokenToKVPool"),
        (a_pool("DeepSeekV4TokenToKVPool", type("BaseSWAKVPool", (), {})), PLAIN_TABLE, "DeepSeekV4TokenToKVPool"),
        (a_pool("Another", type("SWAKVPool", (), {})), PLAIN_TABLE, "Another"),
    ],
    ids=lambda value: value if isinstance(value, str) else type(value).__name__,
)
def test_pools_of_a_kind_that_nobody_has_looked_at_are_not_rehearsed(pool, table, named, monkeypatch):
    scheduler = Scheduler(monkeypatch)
    runner = scheduler.tp_worker.model_runner
    runner.token_to_kv_pool, runner.req_to_token_pool = pool, table
    if named:
        assert refused(scheduler) == f"pools of the kind {named} are not rehearsed yet"
    else:
        assert rehearse_it(scheduler).reached


def test_sliding_windows_in_a_pool_that_is_not_called_so_are_not_rehearsed(monkeypatch):
    scheduler = Scheduler(monkeypatch)
    runner = scheduler.tp_worker.model_runner
    runner.token_to_kv_pool, runner.req_to_token_pool, runner.is_hybrid_swa = a_pool("Windows"), PLAIN_TABLE, True
    assert refused(scheduler) == "pools of the kind Windows are not rehearsed yet"


@pytest.mark.parametrize(("chunk", "tokens", "enough"), [(64, 64, False), (64, 67, True), (None, 200, False)])
def test_windows_that_hold_less_than_a_prefill_are_not_rehearsed(chunk, tokens, enough, monkeypatch):
    scheduler = Scheduler(monkeypatch)
    limits = replace(SMALL, chunk=chunk, window=16, window_tokens=tokens)
    monkeypatch.setattr(rehearsal, "limits_of", lambda scheduler, facts: limits)
    if enough:
        assert rehearse_it(scheduler).reached
    else:
        assert refused(scheduler) == f"sliding windows of {tokens} tokens have no room for {limits.largest} more"


# --- Sliding windows, states, images ---------------------------------------------------------------------------------


def facts_of(monkeypatch, pool, table, **runner):
    config = SimpleNamespace(context_len=1000, vocab_size=5000)
    given = {"token_to_kv_pool": pool, "req_to_token_pool": table, "model_config": config, "max_total_num_tokens": 900}
    return facts.server_facts(SimpleNamespace(**{**given, **runner}))


def test_a_sliding_windows_pool_bounds_what_is_driven(monkeypatch):
    pool = a_pool("SWAKVPool", size_swa=700, mem_usage=2)
    told = facts_of(monkeypatch, pool, PLAIN_TABLE, sliding_window_size=128)
    assert (told.hybrid, told.window, told.window_tokens, told.kv_bytes) == ("sliding-window", 128, 700, 2 * GIB)
    c = phases.derive_limits({}, told)
    assert (c.window, c.window_tokens, c.states) == (128, 700, False)
    whole = facts_of(monkeypatch, a_pool("MHATokenToKVPool"), PLAIN_TABLE, sliding_window_size=128)
    assert (whole.window, whole.window_tokens) == (0, 0)  # one KV cache for all layers


def test_states_count_as_kv_cache_and_end_a_prefix(monkeypatch):
    table = a_pool("HybridReqToTokenPool", mamba_pool=SimpleNamespace(mem_usage=3))
    told = facts_of(monkeypatch, a_pool("HybridLinearKVPool", mem_usage=2), table)
    assert (told.hybrid, told.kv_bytes, told.window_tokens) == ("Mamba", 5 * GIB, 0)
    assert phases.derive_limits({}, told).states


def of_kind(c, kind):
    found = [phase for phase in phases.derive_phases(c).phases if phase.kind is kind]
    return found[0] if found else None


@pytest.mark.parametrize("page", [1, 64, 96])
def test_a_prefix_ends_where_a_state_is_kept(page):
    c = replace(LIMITS, states=True, page=page)
    before = of_kind(c, PhaseKind.BEHIND_PREFIX).bound.longest_prefix
    assert before % phases.STATE_INTERVAL_TOKENS == before % page == 0
    assert 0 <= LIMITS.input_tokens - LIMITS.chunk - before < phases.STATE_INTERVAL_TOKENS * page
    alone = of_kind(replace(c, chunk=1000, radix_cache=False, page=1), PhaseKind.BEHIND_PREFIX)
    assert alone.bound.longest_prefix == 9 * 1000  # where a chunk ended


def test_no_more_prompts_are_driven_together_than_there_are_windows_for():
    short = replace(LIMITS, input_tokens=100)
    assert short.together == 11
    assert replace(short, window=512, window_tokens=2570).together == 4
    assert replace(short, window=512, window_tokens=1000).together == 1


def test_requests_share_a_prefix_where_there_are_windows_for_all_of_them():
    assert of_kind(replace(LIMITS, window=128, window_tokens=40_000), PhaseKind.SHARED_PREFIX)
    assert of_kind(replace(LIMITS, window=4096, window_tokens=40_000), PhaseKind.SHARED_PREFIX) is None


@pytest.mark.parametrize(("requests", "sharers"), [(300, 8), (9, 8), (8, 7), (3, 2), (2, None)])
def test_as_many_share_a_prefix_as_run_beside_the_filler(requests, sharers):
    c = replace(LIMITS, requests=requests)
    phase = of_kind(c, PhaseKind.SHARED_PREFIX)
    assert (phase and phase.bound.requests) == sharers
    if phase:
        before = phase.bound.prefix // sharers
        new = [len(prompt) - before for prompt in phase.prompts(phases.Tokens("x", 5000))[1:]]
        assert len(new) == sharers
        assert LIMITS.chunk > sum(new) == phase.bound.tokens


def test_a_decode_of_all_requests_stays_in_the_windows_pool():
    def new(**windows):
        return of_kind(replace(LIMITS, **windows), PhaseKind.EAGER_DECODE).new_tokens

    plain = new()
    assert new(window=16, window_tokens=46_500) == plain  # a window for each
    few = new(window=4096, window_tokens=20_000)
    assert 2 < few < plain
    assert LIMITS.requests * (few + phases.SHORT_PROMPT_TOKENS) + 2 * LIMITS.chunk <= 20_000


def test_where_requests_follow_the_pools_all_that_was_needed_may_grow_with_them():
    plain, follows = (sizing.decide(START, replace(MEASURED, requests_grow=each)) for each in (False, True))
    grows = (20 * GB + 28 * GB - plain.reserve) / (20 * GB) - 1
    assert follows.reserve == pytest.approx(plain.reserve + grows * 8 * GB, abs=0.03 * GB)
    served = sizing.decide(START, replace(MEASURED, requests_grow=True, serving_peak_need=9 * GB))
    assert served.reserve > follows.reserve + GB


def test_what_the_rule_keeps_for_images_is_kept_beside_what_was_needed():
    kept = sizing.decide(replace(START, images=6 * GB), MEASURED)
    assert kept.reserve >= 8 * GB + 6 * GB + sizing.MARGIN_BYTES
    assert kept.fraction == pytest.approx(
        1 - (14 * GB + sizing.MARGIN_BYTES) / (140 * GB), abs=2 * sizing.FRACTION_STEP
    )
    # What was taken while serving was taken by images too.
    assert sizing.decide(replace(START, images=6 * GB), replace(MEASURED, serving_peak_need=12 * GB)) == kept
    assert sizing.decide(replace(START, images=6 * GB), replace(MEASURED, serving_peak_need=15 * GB)).reserve >= 17 * GB


def test_images_are_said_not_to_be_driven(monkeypatch):
    told = facts_of(monkeypatch, a_pool("MHATokenToKVPool"), PLAIN_TABLE, is_multimodal=True)
    assert phases.derive_phases(replace(LIMITS, images=phases.derive_limits({}, told).images)).skipped == (
        "images: the engine's own allowance is kept for them",
    )


@pytest.fixture
def seeing(monkeypatch):
    """A model runner that takes images, for which the rule makes the fraction a tenth smaller."""
    monkeypatch.setattr(images, "factor", lambda config: config)
    monkeypatch.setattr(images, "cache_gib", lambda arguments: 0.5)
    return SimpleNamespace(model_config=0.9)


def test_the_rules_share_for_images_and_their_cache_are_kept(seeing):
    assert images.allowance(seeing, {}, 0.81, 100) == pytest.approx(9.5 * GIB, abs=1)


def test_where_the_rule_keeps_nothing_for_images_it_stands(seeing):
    seeing.model_config = 1.0
    with pytest.raises(images.NoAllowance, match="the rule keeps nothing for them"):
        images.allowance(seeing, {}, 0.81, 100)


def test_graphs_that_images_have_captured_while_serving_leave_the_rule(seeing, monkeypatch):
    monkeypatch.setenv(images.GRAPHS, "1")
    with pytest.raises(images.NoAllowance, match=f"nor what {images.GRAPHS} captures"):
        images.allowance(seeing, {}, 0.81, 100)


# --- The watch -------------------------------------------------------------------------------------------------------


class Clock:
    def __init__(self):
        self.now = 100.0

    def __call__(self):
        return self.now


def watched(readings, not_yet=0):
    saved, clock, left = [], Clock(), iter(readings)

    def save(lowest, ran_out):
        saved.append((lowest, ran_out))
        return len(saved) > not_yet

    return FreeMemoryMonitor(lambda: next(left), save, clock), clock, saved


def test_the_lowest_is_saved_now_and_then_and_at_the_end():
    watch, clock, saved = watched([Memory(9 * GB), Memory(8 * GB), Memory(5 * GB), Memory(7 * GB), Memory(6 * GB)])
    watch.sample()
    assert saved == [(8 * GB, False)]
    for _ in range(3):
        clock.now += SAMPLE_INTERVAL_S
        watch.sample()
        watch.sample()  # too early: nothing is read
    assert saved == [(8 * GB, False)]
    watch.end()
    assert saved == [(8 * GB, False), (5 * GB, False)]


def test_what_found_no_place_is_saved_again():
    watch, clock, saved = watched([Memory(9 * GB)] * 4, not_yet=1)
    for _ in range(3):
        watch.sample()
        clock.now += SAVE_INTERVAL_S
    assert saved == [(9 * GB, False)] * 2


def test_the_lowest_is_shown_each_time():
    shown: list[int] = []
    left, clock = iter([Memory(9 * GB), Memory(8 * GB), Memory(9 * GB)]), Clock()
    watch = FreeMemoryMonitor(lambda: next(left), lambda *found: True, clock, shown.append)
    for _ in range(2):
        watch.sample()
        clock.now += SAMPLE_INTERVAL_S
    assert shown == [8 * GB, 8 * GB]


@pytest.fixture
def metric(monkeypatch):
    """Looks a metric up by its name and labels; the rank is the third."""
    state = SimpleNamespace(get_world_group=lambda: SimpleNamespace(rank_in_group=3))
    monkeypatch.setitem(sys.modules, "sglang.srt.distributed.parallel_state", state)
    registry = prometheus_client.CollectorRegistry()
    gauge = prometheus_client.Gauge
    monkeypatch.setattr(prometheus_client, "Gauge", lambda *args, **more: gauge(*args, **more, registry=registry))

    def find(name, **labels):
        return registry.get_sample_value(name, {"gpu": "1", "rank": "3", **labels})

    return find


def test_metrics_are_there_where_the_engines_are(metric, caplog):
    for arguments, seen in (({}, (None, None, None, None)), ({"enable_metrics": True}, (5, 0.8, 0.9, 1))):
        shown = metrics.Metrics(arguments, 1)
        shown.show_lowest_free(5)
        shown.show_sizing(0.8, 0.9, metrics.Source.GIVEN, "why")
        found = [metric(name) for name in (metrics.LOWEST_FREE, metrics.FRACTION, metrics.SUGGESTED)]
        assert (*found, metric(metrics.STATE, source="given", reason="why")) == seen
    again = metrics.Metrics({"enable_metrics": True}, 1)  # a name that is taken is no reason to end a server
    again.show_sizing(0.7, None, metrics.Source.GIVEN, "why")
    assert "no metrics: " in caplog.text
    assert metric(metrics.FRACTION) == 0.8


def test_what_nobody_knows_is_no_metric(metric):
    metrics.Metrics({"enable_metrics": True}, 1).show_sizing(None, None, metrics.Source.DEFAULT, "why")
    assert metric(metrics.FRACTION) is metric(metrics.SUGGESTED) is None
    assert metric(metrics.STATE, source="default", reason="why") == 1


def test_a_file_that_cannot_be_written_ends_neither_the_monitor_nor_its_metric(caplog):
    shown: list[int] = []
    left, clock = iter([Memory(9 * GB), Memory(8 * GB), Memory(7 * GB), Memory(6 * GB)]), Clock()

    def fail(*found):
        raise OSError("read-only")

    monitor = FreeMemoryMonitor(lambda: next(left), fail, clock, shown.append)
    for _ in range(2):
        monitor.sample()
        clock.now += SAVE_INTERVAL_S
    assert shown == [8 * GB, 7 * GB]
    assert caplog.text.count("free memory is not recorded: read-only") == 1


def test_the_last_moment_before_an_out_of_memory_is_seen():
    monitor, _, saved = watched([Memory(9 * GB), Memory(GB // 2)])
    monitor.end(ran_out=True)
    assert saved == [(GB // 2, True)]


def test_a_lock_held_elsewhere_is_not_waited_for_while_serving(tmp_path):
    path = tmp_path / "kv.json"
    with record._locked(path, 0), pytest.raises(record.Busy, match="by another process"):
        record.update(path, KEY, record.with_out_of_memory, wait_s=0)


@pytest.mark.parametrize(
    ("error", "is_memory"),
    [
        (type("OutOfMemoryError", (RuntimeError,), {})("x"), True),
        (RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling cublasCreate"), True),
        (RuntimeError("cuDNN error: CUDNN_STATUS_ALLOC_FAILED"), True),
        (type("AcceleratorError", (RuntimeError,), {})("CUDA error: out of memory"), True),
        (type("DistBackendError", (RuntimeError,), {})("NCCL error: Failed to CUDA calloc 4 bytes"), True),
        (RuntimeError("Triton Error [CUDA]: out of memory"), True),
        (RuntimeError("device-side assert triggered"), False),
        (KeyboardInterrupt(), False),
    ],
    ids=str,
)
def test_an_out_of_memory_is_known_by_any_name(error, is_memory):
    around = ValueError("a forward failed")
    around.__cause__ = error
    assert hooks.is_out_of_memory(error) is hooks.is_out_of_memory(around) is is_memory


def test_a_rehearsal_counts_no_metric_and_afterwards_they_count_again():
    from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

    registry, patcher = CollectorRegistry(), Patcher()
    counter, gauge = Counter("c", "", ["x"], registry=registry), Gauge("g", "", registry=registry)
    histogram = Histogram("h", "", registry=registry)

    def count():
        counter.labels(x="1").inc(5)
        gauge.set(3)
        histogram.observe(1)
        found = {each.name: each.value for metric in registry.collect() for each in metric.samples}
        return found["c_total"], found["g"], found["h_count"]

    rehearsal.mute_metrics(patcher)
    assert count() == (0, 0, 0)
    patcher.undo()
    assert count() == (5, 3, 1)


@pytest.mark.parametrize(("warmup_s", "limits_s"), [(-1, (300, 60)), (60, (30, 15)), (3600, (300, 60))])
def test_a_rehearsal_ends_within_the_engines_own_warm_up(warmup_s, limits_s, monkeypatch):
    envs = SimpleNamespace(SGLANG_WARMUP_TIMEOUT=SimpleNamespace(get=lambda: warmup_s))
    monkeypatch.setitem(sys.modules, "sglang.srt.environ", SimpleNamespace(envs=envs))
    assert (rehearsal.timeout_s(), rehearsal.abandon_after_s()) == limits_s


def test_what_hardly_fell_is_not_written_again():
    watch, clock, saved = watched([Memory(9 * GB), Memory(9 * GB), Memory(9 * GB - 5), Memory(8 * GB)])
    for _ in range(3):
        watch.sample()
        clock.now += SAVE_INTERVAL_S
    assert saved == [(9 * GB, False), (8 * GB, False)]


def test_an_allocator_that_gave_up_is_remembered_once():
    watch, clock, saved = watched([Memory(9 * GB, ooms=1)] + [Memory(9 * GB, ooms=2)] * 3)
    for _ in range(3):
        watch.sample()
        clock.now += SAVE_INTERVAL_S
    watch.end()
    assert [ran_out for _, ran_out in saved] == [True]


def test_a_server_that_ends_for_want_of_memory_says_so():
    watch, _, saved = watched([Memory(GB)])
    watch.end(ran_out=True)
    assert saved == [(GB, True)]


def test_a_watch_that_fails_says_it_once_and_ends_no_server(caplog):
    watch, clock, saved = watched([Memory(GB)])
    watch.sample()
    clock.now += SAMPLE_INTERVAL_S
    watch.sample()
    watch.end()
    assert saved == []
    assert caplog.text.count("free memory is not monitored any more") == 1


# --- A start of several ranks ----------------------------------------------------------------------------------------


@dataclass
class Rank:
    """What the driver says to one rank, and the file that it would read."""

    path: Path
    device: str = "H200"
    total: int = 141 * GB
    before: int = 140 * GB
    silent: bool = False

    def read(self):
        if self.silent:
            raise RuntimeError("the driver does not answer")
        return Memory(self.before, self.total)


LAUNCH = "1@2.0"


def start(monkeypatch, caplog, *ranks, agree=None, by_user=False, config="{}", sees=False, mode="auto", **arguments):
    """:returns: of each rank its state, and the fraction that the engine divides by; and what was said."""

    class Told(Exception):
        pass

    def first_ask(told):
        everybody.append(told)
        raise Told

    def run(rank, agree):
        given = SimpleNamespace(**{"model_path": "m", "tp_size": len(ranks), "mem_fraction_static": 0.8, **arguments})
        given.node_rank = given.base_gpu_id = rank if arguments.get("nnodes") else 0  # one rank a machine
        setattr(given, launcher.MARK, not by_user)
        model = SimpleNamespace(hf_config=SimpleNamespace(to_json_string=lambda use_diff: config))
        runner = SimpleNamespace(server_args=given, gpu_id=rank, mem_fraction_static=0.8, model_config=model)
        runner.is_multimodal = sees
        state = hooks.State(ranks[rank].path)
        monkeypatch.setattr(hooks.coordination, "all_gather", agree)
        hooks._size(state, runner, ranks[rank].before / GIB, False)
        if state.launch is not None:
            state.rank_reserve = hooks._rank_reserve(state, runner, 0)
        assert runner.mem_fraction_static == given.mem_fraction_static
        return state, runner.mem_fraction_static

    everybody: list[sizing.RankReport] = []
    monkeypatch.setenv(eligibility.KV_SIZING.name, mode)
    monkeypatch.setattr(hooks.record, "current_launch", lambda is_replica: LAUNCH)
    monkeypatch.setattr(hooks.record, "is_alive", lambda launch: launch == LAUNCH)
    monkeypatch.setattr(hooks, "_is_leader", lambda runner: runner.gpu_id == 0)
    monkeypatch.setattr(hooks.gpu_memory, "read", lambda gpu: ranks[gpu].read())
    monkeypatch.setattr(hooks.gpu_memory, "device", lambda gpu: ranks[gpu].device)
    for rank in range(len(ranks)):
        with suppress(Told):
            run(rank, agree or first_ask)
    caplog.clear()
    with caplog.at_level("INFO", logger=log.logger.name):
        found = [run(rank, agree or (lambda told: everybody)) for rank in range(len(ranks))]
    states, fractions = zip(*found, strict=True)
    return states, set(fractions), [each.message.removeprefix(log.of("kv-sizing", "")) for each in caplog.records]


@pytest.fixture
def recorded(tmp_path, monkeypatch, caplog):
    """A file with the record of a server with two ranks."""
    path = tmp_path / "kv.json"
    (first, _), _, _ = start(monkeypatch, caplog, Rank(path), Rank(path))
    record.update(path, first.key, lambda old: MEASURED)
    return path


SIZED = 0.9285  # 8 GB of 140 were needed, and 2 GB are the margin


def test_all_ranks_are_sized_by_what_the_first_has_read_whatever_another_would(recorded, monkeypatch, caplog):
    for path in (recorded, recorded.parent / "none.json", recorded.parent):
        states, fractions, said = start(monkeypatch, caplog, Rank(recorded), Rank(path))
        assert (fractions, said) == ({SIZED}, [])
        assert [(state.fraction, state.record) for state in states] == [(SIZED, MEASURED)] * 2


def test_launches_that_are_alive_are_no_failures_and_those_that_ended_are(recorded, monkeypatch, caplog):
    (key,) = record.read(recorded)
    for launch, fraction in ((LAUNCH, SIZED), ("a third", 0.8)):
        known = replace(MEASURED, unfinished=("0 of another", f"1 of {launch}"))
        record.update(recorded, key, lambda old, known=known: known)
        assert start(monkeypatch, caplog, Rank(recorded), Rank(recorded))[1] == {fraction}


def test_replicas_that_one_process_launches_have_one_launch_and_other_servers_one_each():
    code = "from sglang_moe_patches.memory.kv_sizing import record; import sys\n"
    code += "print(*(record.current_launch(is_replica=each) for each in (True, False)))"
    command = [sys.executable, "-c", code]
    found = [subprocess.run(command, check=True, capture_output=True, text=True).stdout.split() for _ in range(2)]
    (replica, alone), (another, other) = found
    assert replica == another == record.current_launch(is_replica=False)
    assert f":{os.getpid()}@" in replica
    assert len({replica, alone, other}) == 3
    assert [record.is_alive(each) for each in (replica, alone, other)] == [True, False, False]


@pytest.mark.parametrize(("age_s", "alive"), [(60, True), (3600, False)])
def test_a_launch_on_another_machine_counts_as_ended_after_half_an_hour(age_s, alive):
    assert record.is_alive(f"another:1@{time.time() - age_s:.2f}") is alive


def test_a_server_that_takes_images_keeps_what_the_rule_keeps_for_them(recorded, monkeypatch, caplog):
    monkeypatch.setattr(images, "factor", lambda config: 0.95)
    monkeypatch.setattr(images, "cache_gib", lambda arguments: 0.0)
    states, fractions, _ = start(monkeypatch, caplog, Rank(recorded), Rank(recorded), sees=True)
    kept = 0.8 / 0.95 - 0.8
    (fraction,) = fractions
    assert fraction == pytest.approx(SIZED - kept, abs=2 * sizing.FRACTION_STEP)
    assert [state.launch.images for state in states] == [pytest.approx(kept * 140 * GB, abs=GIB)] * 2


def test_where_nothing_is_kept_for_images_the_rule_stands(recorded, monkeypatch, caplog):
    monkeypatch.setattr(images, "factor", lambda config: 1.0)
    states, fractions, said = start(monkeypatch, caplog, Rank(recorded), Rank(recorded), sees=True)
    why = "images are not rehearsed yet, and the rule keeps nothing for them"
    assert (fractions, said) == ({0.8}, [f"using the engine's default fraction 0.8000: {why}"])
    assert [state.launch for state in states] == [None, None]


@pytest.mark.parametrize(
    ("kept", "part"), [(0, "margin, measured"), (6 * GB, "margin, 6,000 MB the engine's for images, measured")]
)
def test_a_sized_start_says_what_it_keeps_for_images(kept, part, monkeypatch, caplog):
    def sized(state, runner, *given):
        state.leader, state.record = True, MEASURED
        state.launch = replace(START, images=kept)
        state.decision = sizing.decide(state.launch, MEASURED)

    monkeypatch.setattr(hooks, "_rank_reserve", lambda state, runner, before: 0)
    monkeypatch.setenv(eligibility.KV_SIZING.name, "auto")
    monkeypatch.setattr(hooks, "_size", sized)
    runner = SimpleNamespace(max_total_num_tokens=5, pre_model_load_memory=1, server_args=SimpleNamespace())
    with caplog.at_level("INFO", logger=log.logger.name):
        hooks._make_init_memory_pool(lambda runner: None, hooks.State(Path("x")), False)(runner)
    assert f"2,000 MB of {part}" in caplog.text


@pytest.mark.parametrize("text", ['{"format": 3, "records": {"a', "\0", None])
def test_where_the_first_rank_cannot_read_all_start_by_the_rule(text, recorded, monkeypatch, caplog):
    if text is None:
        recorded.unlink()
        recorded.mkdir()
    else:
        recorded.write_text(text)
    states, fractions, (said,) = start(monkeypatch, caplog, Rank(recorded), Rank(recorded))
    assert fractions == {0.8}
    assert said.startswith(f"using the engine's default fraction 0.8000: {recorded} ")
    assert said.endswith("; measuring during this start")
    assert all(state.decision.rehearse for state in states)


def another(**changed):
    return lambda monkeypatch: changed


OF_ANOTHER = {
    "GPU": another(device="B200"),
    "GPU of the kind with more memory": another(total=282 * GB),
    "model": another(config='{"layers": 2}'),
    "argument": another(chunked_prefill_size=64),
    "variable": lambda monkeypatch: monkeypatch.setenv("SGLANG_MOE_PATCHES_SEGMENTS", "on"),
    "driver": lambda monkeypatch: monkeypatch.setattr(hooks.gpu_memory, "driver", lambda: "another"),
    "engine": lambda monkeypatch: monkeypatch.setattr(hooks.engine, "version", lambda: "another"),
    "torch": lambda monkeypatch: monkeypatch.setattr("torch.__version__", "another"),
    "package": lambda monkeypatch: monkeypatch.setattr("sglang_moe_patches.__version__", "another"),
    "status of a change": lambda monkeypatch: monkeypatch.setattr(
        hooks.patch, "_in_force", {"a": Plan(Status.APPLIED)}
    ),
}


@pytest.mark.parametrize("what", OF_ANOTHER)
def test_a_record_of_another_is_none(what, recorded, monkeypatch, caplog):
    changed = OF_ANOTHER[what](monkeypatch) or {}
    rank = Rank(recorded, **{name: changed.pop(name) for name in ("device", "total") if name in changed})
    states, fractions, said = start(monkeypatch, caplog, rank, rank, **changed)
    assert fractions == {0.8}
    assert said == [
        "using the engine's default fraction 0.8000: no record for this configuration; measuring during this start"
    ]
    assert all(state.decision.rehearse for state in states)


def test_beside_a_second_server_on_a_gpu_all_start_by_the_rule(recorded, monkeypatch, caplog):
    states, fractions, said = start(monkeypatch, caplog, Rank(recorded), Rank(recorded, before=100 * GB))
    assert fractions == {0.8}
    assert said == [
        "using the engine's default fraction 0.8000: other processes hold 41,000 MB of the GPU, "
        "1,000 MB when it was measured"
    ]
    assert not any(state.decision.rehearse for state in states)


@pytest.mark.parametrize(
    ("other", "why"),
    [
        ({"device": "H100"}, "the ranks differ in: device"),
        ({"silent": True}, "RuntimeError: the driver does not answer"),
    ],
)
def test_where_one_rank_cannot_tell_all_start_by_the_rule_and_nothing_is_recorded(
    other, why, recorded, monkeypatch, caplog
):
    for both in ((Rank(recorded), Rank(recorded, **other)), (Rank(recorded, **other), Rank(recorded))):
        states, fractions, said = start(monkeypatch, caplog, *both)
        assert (fractions, said) == ({0.8}, [f"using the engine's default fraction 0.8000: {why}"])
        assert [state.launch for state in states] == [None, None]


def test_a_given_fraction_is_used_unchanged_and_what_it_leaves_is_said(recorded, monkeypatch, caplog):
    states, fractions, said = start(monkeypatch, caplog, Rank(recorded), Rank(recorded), by_user=True)
    given = "using the given --mem-fraction-static 0.8000: it is used unchanged; "
    never = "18,000 MB of it were never needed: 0.9285 would give 343,985 more tokens"
    assert (fractions, said) == ({0.8}, [given + never])
    assert {state.decision.rehearse for state in states} == {False}
    (key,) = record.read(recorded)
    record.update(recorded, key, lambda old: replace(MEASURED, need=27 * GB))
    _, fractions, said = start(monkeypatch, caplog, Rank(recorded), Rank(recorded), by_user=True)
    short = "it leaves 1,000 MB less than the largest forward and a margin of 2,000 MB need; 0.7928 would be safe"
    assert (fractions, said) == ({0.8}, [given + short])
    assert caplog.records[0].levelname == "WARNING"


def test_where_phases_were_not_reached_no_advice_is_given_beside_a_given_fraction(recorded, monkeypatch, caplog):
    (key,) = record.read(recorded)
    record.update(recorded, key, lambda old: replace(MEASURED, missed=("mixed chunk",), rehearsals=1))
    states, _, said = start(monkeypatch, caplog, Rank(recorded), Rank(recorded), by_user=True)
    assert "did not reach: mixed chunk; measuring during this start" in said[0]
    assert {state.decision.rehearse for state in states} == {True}


def test_a_given_fraction_is_measured_once(tmp_path, monkeypatch, caplog):
    states, fractions, said = start(monkeypatch, caplog, Rank(tmp_path / "kv.json"), by_user=True)
    assert fractions == {0.8}
    assert states[0].decision.rehearse
    assert said[0].endswith("it is used unchanged; no record for this configuration; measuring during this start")


def test_always_has_the_record_decide_beside_a_given_fraction(recorded, monkeypatch, caplog):
    both = Rank(recorded), Rank(recorded)
    assert start(monkeypatch, caplog, *both, by_user=True, mode="always")[1] == {SIZED}


# --- A rehearsal of several ranks ------------------------------------------------------------------------------------


@pytest.fixture
def serving(tmp_path, monkeypatch, caplog):
    """The first rank's, with a rehearsal in front of it."""
    (state, _), _, _ = start(monkeypatch, caplog, Rank(tmp_path / "kv.json"), Rank(tmp_path / "kv.json"))
    scheduler = Scheduler(monkeypatch)
    vars(scheduler).update(server_args=SimpleNamespace())
    caplog.clear()
    caplog.set_level("INFO", logger=log.logger.name)
    monkeypatch.setattr(hooks.coordination, "RankResults", Notes)
    state.rank_reserve = 28 * GB
    return hooks.Serving(state, scheduler)


def shown(state, metric, monkeypatch):
    """The fraction, the suggestion and the source that a server's metrics have, or what of them nobody knows."""
    scheduler = Scheduler(monkeypatch)
    vars(scheduler).update(server_args=SimpleNamespace(enable_metrics=True))
    hooks._make_run_event_loop(lambda scheduler: None, state)(scheduler)
    names = {"gpu": "0"}
    source = metric(metrics.STATE, source=str(state.source), reason=state.decision.reason, **names)
    return (metric(metrics.FRACTION, **names), metric(metrics.SUGGESTED, **names), state.source if source else None)


SHOWN = {
    "sized": ({}, MEASURED, (SIZED, SIZED, "record")),
    "given": ({"by_user": True}, MEASURED, (0.8, SIZED, "given")),
    "limited": ({"max_total_tokens": 5}, MEASURED, (0.8, SIZED, "default")),
    "monitored": ({"attn_cp_size": 2}, None, (0.8, None, "default")),
    "ranks differ": ({}, None, (None, None, "default")),
}


@pytest.mark.parametrize("name", SHOWN)
def test_a_servers_metrics_say_how_it_was_sized(name, tmp_path, monkeypatch, caplog, metric):
    arguments, known, expected = SHOWN[name]
    ranks = [
        Rank(tmp_path / "kv.json"),
        Rank(tmp_path / "kv.json", device="H100" if name == "ranks differ" else "H200"),
    ]
    (state, other), _, _ = start(monkeypatch, caplog, *ranks, **arguments)
    if known:
        record.update(tmp_path / "kv.json", state.key, lambda old: known)
        (state, other), _, said = start(monkeypatch, caplog, *ranks, **arguments)
        if state.fraction is None:
            assert state.decision.reason in said[0]
    state.decision = replace(state.decision, rehearse=False)
    hooks.Serving(other, SimpleNamespace(server_args=SimpleNamespace()))._show_sizing()  # the leader says it
    assert shown(state, metric, monkeypatch) == expected


def test_a_server_that_is_not_driven_stays_with_the_rule_and_what_it_leaves_free_is_recorded(
    tmp_path, monkeypatch, caplog
):
    path = tmp_path / "kv.json"
    one, other = start(monkeypatch, caplog, Rank(path), Rank(path, total=150 * GB), attn_cp_size=2)[0]
    assert one.key != other.key  # nobody waits for another
    states, fractions, said = start(monkeypatch, caplog, Rank(path), Rank(path), attn_cp_size=2)
    because = "of --attn-cp-size, whose largest forwards are not rehearsed yet"
    line = f"using the engine's default fraction 0.8000 because {because}; free memory is recorded while it serves"
    assert (fractions, said) == ({0.8}, [line])
    assert not any(each.decision.rehearse for each in states)
    for state, free in zip(states, (9 * GB, 7 * GB), strict=True):
        scheduler = Scheduler(monkeypatch)
        vars(scheduler).update(server_args=SimpleNamespace())
        monkeypatch.setattr(hooks.gpu_memory, "read", lambda gpu, free=free: Memory(free, 141 * GB))
        serving = hooks.Serving(state, scheduler)
        serving.begin()
        scheduler.process_input_requests([])
        serving.end()
    (kept,) = record.read(path).values()
    assert (kept.need, kept.lowest_free_serving) == (0, 7 * GB)
    assert kept.serving_peak_need == pytest.approx(21 * GB, abs=1)
    assert "7,000 MB of 28,000 MB stayed free at the worst moment seen" in "\n".join(kv_records.describe(KEY, kept))
    _, fractions, said = start(monkeypatch, caplog, Rank(path), Rank(path), attn_cp_size=2)
    seen = ": 7,000 MB were free at the worst moment until now"
    assert (fractions, said) == ({0.8}, [line + seen])


@pytest.fixture
def store(monkeypatch):
    """PyTorch's, by which ranks found one another, of as many ranks as ``store.ranks``; each thread is one."""
    made, here = torch.distributed.HashStore(), threading.local()
    world = SimpleNamespace(ranks=2, here=here)
    monkeypatch.setattr(torch.distributed.distributed_c10d, "_get_default_store", lambda: made)
    monkeypatch.setattr(torch.distributed, "get_rank", lambda: here.rank)
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda: world.ranks)
    return world


def test_what_ranks_leave_is_found_when_all_have(store):
    made = []
    for rank in range(2):
        store.here.rank = rank
        made.append(coordination.RankResults())
    first, other = made
    assert first.collect() is None
    assert not first.any_rank_low_on_memory()
    other.publish(rehearsal.RankResult(lowest=2))
    other.report_low_memory()
    assert first.any_rank_low_on_memory()
    assert first.collect() is None
    first.publish(rehearsal.RankResult(lowest=1))
    assert [each.lowest for each in first.collect()] == [1, 2]


# --- Several machines ------------------------------------------------------------------------------------------------


@pytest.fixture
def machines_of(store, monkeypatch):
    """What ranks find out of one another; ``None``: one that has not the variable."""
    monkeypatch.setattr(coordination, "WAIT_S", 2.0)

    def ask(rank, takes_part):
        store.here.rank = rank
        return coordination.all_machines_take_part(takes_part)

    def found(*take_part):
        store.ranks = len(take_part)
        asking = [(rank, each) for rank, each in enumerate(take_part) if each is not None]
        with ThreadPoolExecutor() as pool:
            return set(pool.map(lambda each: ask(*each), asking))

    return found


@pytest.mark.parametrize(
    ("take_part", "together"),
    [
        ((True, True, True), True),
        ((True, False, True), False),
        ((False, True, True), False),
        ((True, True, None), False),
        ((None, True, True), False),
    ],
)
def test_machines_decide_together_or_none_does(take_part, together, machines_of):
    assert machines_of(*take_part) == {together}


def test_a_machine_that_comes_too_late_finds_that_the_others_have_given_up(machines_of):
    assert machines_of(None, True) == {False}
    assert machines_of(True, True) == {False}


def test_machines_with_another_version_do_not_decide_together(machines_of, monkeypatch):
    monkeypatch.setattr(coordination, "_KEY", "another: ")
    assert machines_of(None, True) == {False}


def test_where_machines_do_not_decide_together_nobody_is_waited_for(tmp_path, monkeypatch, caplog):
    path = tmp_path / "kv.json"

    def waits(told):
        raise AssertionError("another rank was waited for")

    for found in (lambda takes_part: False, lambda takes_part: 1 // 0):
        monkeypatch.setattr(hooks.coordination, "all_machines_take_part", found)
        states, fractions, said = start(monkeypatch, caplog, Rank(path), Rank(path), nnodes=2, agree=waits)
        assert fractions == {0.8}
        assert all(state.decision.monitor for state in states)
        assert len(said) == 2  # by the first rank of each machine
        assert all("using the engine's default fraction 0.8000 because of --nnodes, " in line for line in said)


@pytest.fixture
def two_machines(monkeypatch, caplog, tmp_path):
    """A server of two ranks on two machines, whose files are the first's record and another."""
    monkeypatch.setattr(hooks.coordination, "all_machines_take_part", bool)
    paths = [tmp_path / "one.json", tmp_path / "other.json"]

    def begin():
        return start(monkeypatch, caplog, *map(Rank, paths), nnodes=2)

    (one, other), _, _ = begin()
    assert one.key == other.key
    record.update(paths[0], one.key, lambda old: MEASURED)
    return paths, one.key, begin


def test_two_machines_are_sized_by_the_record_of_the_first(two_machines):
    _, _, begin = two_machines
    states, fractions, _ = begin()
    assert fractions == {SIZED}
    assert [state.elsewhere for state in states] == [False, True]


def test_what_another_machine_has_seen_while_serving_counts_for_all(two_machines):
    (_, path), key, begin = two_machines
    record.update(path, key, lambda old: record.with_serving(Record({"model": "m"}), 12 * GB, GB))
    states, (less,), _ = begin()
    assert less == pytest.approx(1 - (11 * GB + sizing.MARGIN_BYTES) / (140 * GB), abs=2 * sizing.FRACTION_STEP)
    assert [state.record.lowest_free_serving for state in states] == [GB] * 2
    record.update(path, key, record.with_out_of_memory)
    (after_one,) = begin()[1]
    assert after_one < less
    record.update(path, key, record.with_out_of_memory)
    assert begin()[1] == {0.8}


def test_what_another_machine_sees_is_kept_in_its_own_file(two_machines, monkeypatch):
    (_, path), key, begin = two_machines
    (_, other), _, _ = begin()
    scheduler = Scheduler(monkeypatch)
    vars(scheduler).update(server_args=SimpleNamespace())
    monkeypatch.setattr(hooks.gpu_memory, "read", lambda gpu: Memory(3 * GB, 141 * GB))
    other.decision = replace(other.decision, rehearse=False)
    serving = hooks.Serving(other, scheduler)
    serving.begin()
    serving.end(ran_out=True)
    kept = record.read(path)[key]
    assert (kept.lowest_free_serving, kept.ooms, kept.need, kept.fingerprint_inputs) == (
        3 * GB,
        1,
        0,
        other.fingerprint_inputs,
    )


def test_where_one_rank_fails_nothing_is_recorded(serving, monkeypatch, caplog):
    serving._results = Notes(rehearsal.RankResult(failure="no answer"))
    serving._rehearsed(rehearsal.RankResult(lowest=9 * GB))
    assert [each.message for each in caplog.records] == [
        f"{log.of('kv-sizing', '')}the rehearsal failed, and nothing is recorded: rank 1: no answer"
    ]
    assert not serving.state.path.exists()


def test_where_others_gave_memory_back_meanwhile_nothing_is_recorded(serving, monkeypatch, caplog):
    serving._results = Notes(rehearsal.RankResult(lowest=50 * GB, reserve=28 * GB))
    serving._rehearsed(rehearsal.RankResult(lowest=50 * GB))
    assert "more memory was free than was set aside, so nothing is recorded: others gave it back" in caplog.text
    assert not serving.state.path.exists()


def test_where_nothing_can_be_written_no_rank_rehearses_and_all_serve(serving, read_only, monkeypatch, caplog):
    before = state_of(serving.scheduler)
    monkeypatch.setattr(hooks.coordination, "all_gather", lambda told: [told, ""])
    serving.begin()
    (said,) = [each.message for each in caplog.records]
    assert said.startswith(f"{log.of('kv-sizing', '')}no rehearsal: {serving.state.path} cannot be written (")
    assert state_of(serving.scheduler) == before


def test_a_rehearsal_that_cannot_begin_is_not_counted(serving, monkeypatch, caplog):
    serving.scheduler.tp_worker.model_runner.token_to_kv_pool = a_pool("UnifiedSWAKVPool")
    before = state_of(serving.scheduler)
    monkeypatch.setattr(hooks.coordination, "all_gather", lambda told: [told, told])
    serving.begin()
    assert [each.message for each in caplog.records] == [
        f"{log.of('kv-sizing', '')}no rehearsal: pools of the kind UnifiedSWAKVPool are not rehearsed yet"
    ]
    assert not serving.state.path.exists()
    assert state_of(serving.scheduler) == before


def test_what_states_took_and_that_requests_follow_them_is_recorded(serving, monkeypatch):
    runner = serving.scheduler.tp_worker.model_runner
    runner.token_to_kv_pool = a_pool("HybridLinearKVPool", mem_usage=2)
    runner.req_to_token_pool = a_pool("HybridReqToTokenPool", mamba_pool=SimpleNamespace(mem_usage=3))
    runner.model_config, runner.max_total_num_tokens = SimpleNamespace(context_len=1000, vocab_size=5000), 900
    serving._results = Notes()
    serving._rehearsed(rehearsal.RankResult(lowest=9 * GB))
    (written,) = record.read(serving.state.path).values()
    assert (written.kv_bytes, written.requests_grow, written.need) == (5 * GIB, True, 19 * GB)


def test_the_kv_caches_that_drafts_have_of_their_own_are_recorded(serving, monkeypatch):
    monkeypatch.setenv(eligibility.KV_SIZING.name, "auto")
    runner = serving.scheduler.tp_worker.model_runner
    vars(runner).update(
        token_to_kv_pool=a_pool("MHATokenToKVPool", mem_usage=5), req_to_token_pool=None, max_total_num_tokens=900
    )
    runner.model_config = SimpleNamespace(context_len=1000, vocab_size=5000)
    shared_by_two_drafts = a_pool("MHATokenToKVPool", mem_usage=1)
    make_pool = hooks._make_init_memory_pool(lambda draft: "made", serving.state, False)
    for pool in (shared_by_two_drafts, shared_by_two_drafts, runner.token_to_kv_pool):
        assert make_pool(SimpleNamespace(is_draft_worker=True, token_to_kv_pool=pool)) == "made"
    serving._results = Notes()
    serving._rehearsed(rehearsal.RankResult(lowest=9 * GB))
    (written,) = record.read(serving.state.path).values()
    assert (written.kv_bytes, written.draft_kv_bytes) == (5 * GIB, GIB)


PLAIN = {"hybrid": "", "kv_tokens": 900, "kv_bytes": 20 * GB, "table_bytes": GB}


def test_the_first_rank_waits_for_what_others_have_seen_while_it_serves(serving, monkeypatch):
    monkeypatch.setattr(hooks, "server_facts", lambda runner: SimpleNamespace(**PLAIN))
    parts = record.NeedParts(tensors=2 * GB), record.NeedParts(tensors=GB, phase="mixed chunk")
    serving._results = Notes(rehearsal.RankResult(lowest=5 * GB, reserve=30 * GB, parts=parts[0]), looks=3)
    serving._rehearsed(rehearsal.RankResult(lowest=9 * GB, parts=parts[1]))
    turn = serving.scheduler.process_input_requests
    for _ in range(2):
        assert not serving.state.path.exists() or record.read(serving.state.path) == {}
        turn([])
    (written,) = record.read(serving.state.path).values()
    assert (written.ranks, written.need, written.reserve) == ((19 * GB, 25 * GB), 25 * GB, 28 * GB)
    assert written.parts == replace(parts[0], phase="mixed chunk")
    assert serving._results.looks == 0


def test_what_a_rehearsal_that_ended_early_did_not_run_is_kept_free_and_what_images_take_is_known(serving, monkeypatch):
    monkeypatch.setattr(hooks, "server_facts", lambda runner: SimpleNamespace(**PLAIN))
    serving.state.launch = replace(serving.state.launch, images=GB)
    serving._results = Notes()
    serving._rehearsed(rehearsal.RankResult(lowest=9 * GB, stopped=True))
    (written,) = record.read(serving.state.path).values()
    kept = rehearsal.MIN_FREE_BYTES
    assert (written.need, written.parts.not_run, written.images) == (19 * GB + kept, kept, GB)


@pytest.mark.parametrize("rehearses", [True, False])
def test_a_sized_start_is_crossed_off_when_requests_are_read(rehearses, serving, monkeypatch):
    """Not while it rehearses: its largest forwards come then."""
    state = serving.state
    state.decision = replace(state.decision, fraction=0.9, rehearse=rehearses)
    monkeypatch.setattr(hooks, "server_facts", lambda runner: SimpleNamespace(**PLAIN))
    monkeypatch.setattr(hooks.coordination, "all_gather", lambda told: [told])
    monkeypatch.setattr(rehearsal.Rehearsal, "begin", lambda rehearsal: None)
    record.update(state.path, state.key, lambda old: replace(MEASURED, unserved=(A,)))

    def unserved():
        return record.read(state.path)[state.key].unserved

    serving.begin()
    assert unserved() == (A,) * rehearses
    if rehearses:
        serving._rehearsed(rehearsal.RankResult(lowest=9 * GB))
        assert unserved() == ()


def test_the_first_rank_does_not_wait_for_ever(serving, monkeypatch, caplog):
    monkeypatch.setattr(rehearsal, "ABANDON_AFTER_S", 0.0)
    serving._results = Notes(looks=9)
    serving._rehearsed(rehearsal.RankResult(lowest=9 * GB))
    assert "nothing is recorded: not every rank has published its result" in caplog.text
    assert not serving.state.path.exists()


@pytest.mark.parametrize(
    ("free", "stages", "limit", "aside"),
    [(60, 1, 0, 28), (60, 2, 0, 40), (40, 2, 0, 28), (None, 2, 0, 28), (60, 1, 5, 40)],
)
def test_a_rank_may_have_more_left_than_the_fraction_says(free, stages, limit, aside, monkeypatch):
    """A stage with fewer layers, and a KV cache that the user limits."""

    def sized(state, runner, *given):
        state.launch = replace(START, max_tokens=limit)
        state.decision = sizing.decide(state.launch, None)

    monkeypatch.setenv(eligibility.KV_SIZING.name, "auto")
    monkeypatch.setattr(hooks, "_size", sized)
    monkeypatch.setattr(hooks, "server_facts", lambda runner: SimpleNamespace(**PLAIN))  # a KV cache of 20 GB
    monkeypatch.setattr(hooks.gpu_memory, "read", lambda gpu: Memory(free * GB, 141 * GB))
    state = hooks.State(Path("x"))
    runner = SimpleNamespace(server_args=SimpleNamespace(pp_size=stages), pre_model_load_memory=1)
    hooks._make_init_memory_pool(lambda runner: None, state, False)(runner)
    assert state.rank_reserve == pytest.approx(aside * GB, abs=1)


def test_a_rank_whose_first_can_write_nothing_takes_its_rehearsal_back(serving, monkeypatch):
    before = state_of(serving.scheduler)
    monkeypatch.setattr(hooks.coordination, "all_gather", lambda told: ["kv.json cannot be written", told])
    serving.state.leader = False
    serving.begin()
    assert state_of(serving.scheduler) == before
