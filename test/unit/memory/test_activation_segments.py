"""Tests of the change activation-segments, which switches PyTorch's allocator to expandable segments. They check on
which servers the change switches the allocator. They also check when the change returns to ordinary segments for a
while, such as during the capture of a CUDA graph."""

from __future__ import annotations

import logging
from contextlib import contextmanager, suppress
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from sglang_moe_patches.core import patch
from sglang_moe_patches.core.patch import Patcher
from sglang_moe_patches.memory import activation_segments
from sglang_moe_patches.memory.activation_segments import eligibility, switch
from sglang_moe_patches.memory.activation_segments.eligibility import (
    FEATURES,
    SEGMENTS,
    VIT_GRAPHS,
    skip,
)

# --- Servers ---------------------------------------------------------------------------------------------------------


TESTED = f"{eligibility.TESTED_PYTORCH[0]}.0+cu130"
NAME = SEGMENTS.name
CHANGE = activation_segments.CHANGE


def test_values_other_than_on_and_off_are_refused_by_name():
    for text, setting in (("", None), ("on", True), ("off", False), ("  on ", True)):
        assert SEGMENTS.read({NAME: text}) is setting
    for text in ("1", "On", "auto"):
        with pytest.raises(ValueError, match=f"{NAME}: expected on or off, got '{text}'"):
            SEGMENTS.read({NAME: text})


VALUES: dict[str, tuple[object, object]] = {
    "disaggregation_mode": ("null", "prefill"),
    "elastic_ep_backend": (None, "mooncake"),
    "load_format": ("auto", "remote_instance"),
    "weight_cache_mode": ("off", "daemon"),
    "moe_a2a_backend": ("none", "deepep"),
    **dict.fromkeys(("speculative_algorithm", "hicache_storage_backend", "kt_weight_path"), (None, "a")),
    **dict.fromkeys(("attn_cp_size", "dcp_size", "nnodes"), (1, 2)),
}
"""Two values for each argument of the engine's ``ServerArgs``: one that turns a feature off, and one that turns it on.
Arguments that are not listed have the values False and True."""


def server_arguments(**more):
    """Return a stand-in for the engine's ``ServerArgs``. All features are off, except for the features in ``more``."""
    off = {each.argument: VALUES.get(each.argument, (False, True))[0] for each in FEATURES}
    return SimpleNamespace(**{"device": "cuda", **off, **more})


def skip_reason(setting=None, environ=None, pytorch=TESTED, **more):
    """Return why the change is skipped on a server with these settings; ``None`` if it is not skipped."""
    reason = skip(setting, environ or {}, pytorch, server_arguments(**more))
    return reason and reason.reason


@pytest.mark.parametrize("feature", FEATURES, ids=str)
def test_each_feature_is_detected_from_its_argument_and_named_in_the_reason(feature):
    has = {feature.argument: VALUES.get(feature.argument, (False, True))[1]}
    assert str(feature) in str(skip_reason(**has))
    assert bool(skip_reason(True, **has)) is bool(feature.exclusion_reason), (
        "features that share memory rule the change out, even with on"
    )


def test_features_that_share_memory_rule_the_change_out():
    never = {each.argument for each in FEATURES if each.exclusion_reason}
    assert {"enable_memory_saver", "disaggregation_mode", "elastic_ep_backend", "enable_symm_mem", "nnodes"} <= never


SET = "{} is set, and this change would reset it"
UNTESTED = f"{{}} has not been tested with expandable segments on a GPU; {NAME}=on uses them anyway"


@pytest.mark.parametrize(
    ("more", "by_default", "on"),
    [
        ({}, None, None),
        ({**dict.fromkeys(("tp_size", "ep_size", "pp_size", "dp_size"), 2), "lora_paths": ["a"]}, None, None),
        ({"device": "cpu"}, *["--device is cpu"] * 2),
        *[
            ({"environ": {name: "x:1"}}, *[SET.format(name)] * 2)
            for name in ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF")
        ],
        ({"environ": {"PYTORCH_ALLOC_CONF": " "}}, None, None),
        ({"environ": {VIT_GRAPHS: "true"}}, UNTESTED.format(VIT_GRAPHS), None),
        ({"environ": {VIT_GRAPHS: "0"}}, None, None),
        ({"dcp_size": 2, "enable_pdmux": True}, UNTESTED.format("--dcp-size"), None),
        ({"pytorch": "2.11.1"}, None, None),
        ({"pytorch": "2.1.1"}, UNTESTED.format("PyTorch 2.1"), None),
        ({"pytorch": "2.14.1"}, UNTESTED.format("PyTorch 2.14"), None),
    ],
    ids=str,
)
def test_reasons_why_a_server_is_not_switched(more, by_default, on):
    assert (skip_reason(None, **more), skip_reason(True, **more)) == (by_default, on)
    assert skip_reason(False, **more) == f"{NAME} is off"


@pytest.fixture
def environ(monkeypatch):
    """Environment without the change's variable and without allocator settings. PyTorch's release is one with which the
    change has been tested on a GPU."""
    for name in (NAME, *eligibility.CONFIGURATIONS):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(activation_segments, "_read_pytorch_version", lambda: TESTED)
    return monkeypatch


def test_a_skipped_server_is_not_probed(environ):
    for setting, why in (("", UNTESTED.format("--dcp-size")), ("on", None), ("off", f"{NAME} is off")):
        environ.setenv(NAME, setting)
        skipped = CHANGE.skip(server_arguments(dcp_size=2))
        assert (skipped and skipped.reason) == why
    environ.delenv(NAME)
    for has in ({"enable_memory_saver": True}, {"nnodes": 2}, {"device": "cpu"}):
        environ.delenv(NAME, raising=False)
        why = CHANGE.skip(server_arguments(**has)).reason
        environ.setenv(NAME, "on")
        found = patch.plan_for(CHANGE, {CHANGE.name}, server_arguments(**has))
        assert found == patch.Plan.unsupported(f"{NAME}=on, but {why}")
    environ.delenv(NAME)
    assert CHANGE.skip(SimpleNamespace(device="cuda")) is None  # a release of the engine may lack the arguments


NOT_SETTABLE = "the settings of this PyTorch's allocator cannot be changed in a running process"


@pytest.mark.parametrize(
    ("variables", "owner", "name", "value", "told"),
    [
        ({}, switch, "_driver_supports_mapping", True, "applied"),
        ({}, switch, "_driver_supports_mapping", None, "applied"),
        ({}, activation_segments, "_read_pytorch_version", "2.14.1", f"off, because {UNTESTED.format('PyTorch 2.14')}"),
        ({NAME: "on"}, activation_segments, "_read_pytorch_version", "2.14.1", "applied"),
        ({NAME: "off"}, switch, "_driver_supports_mapping", True, f"off, because {NAME} is off"),
        (
            *({"PYTORCH_ALLOC_CONF": "x:1"}, switch, "_driver_supports_mapping", True),
            f"not needed here, because {SET.format('PYTORCH_ALLOC_CONF')}",
        ),
        (
            *({NAME: "on", "PYTORCH_ALLOC_CONF": "x:1"}, switch, "_driver_supports_mapping", True),
            f"unsupported, because {NAME}=on, but {SET.format('PYTORCH_ALLOC_CONF')}",
        ),
        *[
            ({NAME: setting}, owner, name, value, f"{status}, because {but}{why}")
            for setting, status, but in (("off", "not needed here", ""), ("on", "unsupported", f"{NAME}=on, but "))
            for owner, name, value, why in (
                (switch, "_driver_supports_mapping", False, "the CUDA driver has no virtual memory management"),
                (torch.version, "hip", "6.0", "this PyTorch is built for AMD GPUs, which have not been tested"),
                (switch, "find_settings_function", None, NOT_SETTABLE),
                (torch.cuda, "get_allocator_backend", "x", "the allocator is x, not PyTorch's own"),
            )
        ],
    ],
)
def test_doctor_without_a_server_reports_the_common_reasons(environ, variables, owner, name, value, told):
    environ.setattr(switch, "_driver_supports_mapping", lambda: True)
    environ.setattr(owner, name, value if name == "hip" else lambda: value)
    environ.setattr(switch, "probe", lambda: lambda patcher: None)
    for variable, text in variables.items():
        environ.setenv(variable, text)
    assert str(patch.probe(CHANGE)) == told


# --- The switch ------------------------------------------------------------------------------------------------------


class Settings:
    """Stand-in for PyTorch's function that changes the allocator's settings. It records every setting."""

    def __init__(self):
        self.applied_settings = []

    def __call__(self, setting):
        self.applied_settings.append(setting)

    @property
    def on(self):
        return self.applied_settings[-1:] == [switch.ON]


@pytest.fixture
def settings():
    return Settings()


@pytest.fixture
def active_switch(settings):
    made = switch.Switch(settings)
    made.turn_on()
    return made


def test_a_failing_allocator_setting_is_logged_and_not_repeated(caplog):
    given = []

    def refuses(setting):
        given.append(setting)
        raise RuntimeError("no")

    made = switch.Switch(refuses)
    made.turn_on()
    with made.suspension():
        pass
    assert given == [switch.ON]
    assert (
        "(no) and keeps its last setting. If a graph capture fails, restart with SGLANG_MOE_PATCHES_SEGMENTS=off"
        in caplog.text
    )


@given(st.lists(st.sampled_from(["suspend", "resume", "turn_on", "turn_off"]), max_size=30))
def test_the_switch_is_on_exactly_while_it_is_not_suspended(steps):
    """Between ``turn_on`` and ``turn_off``, expandable segments are on, except while the switch is suspended. Before
    the first ``turn_on``, the switch changes no setting of the allocator."""
    settings = Settings()
    made, wanted, holding = switch.Switch(settings), False, 0
    for number, step in enumerate(steps):
        if step == "resume" and not holding:
            continue
        getattr(made, step)()
        holding += (step == "suspend") - (step == "resume")
        wanted = {"turn_on": True, "turn_off": False}.get(step, wanted)
        assert settings.on == (wanted and not holding)
        assert "turn_on" in steps[: number + 1] or settings.applied_settings == []


# --- Hook points -----------------------------------------------------------------------------------------------------


@pytest.fixture
def wrapped_graph(monkeypatch, settings, active_switch):
    """Stand-in for ``torch.cuda.CUDAGraph`` whose methods the change has wrapped. When a capture begins, the graph
    stores in its attribute ``during`` whether expandable segments are on. The fixture also replaces
    ``torch.cuda.use_mem_pool`` by a stand-in that the change has wrapped."""

    class Graph:
        """Stand-in for ``torch.cuda.CUDAGraph``, not wrapped by the change."""

        fails = ""

        def capture_begin(self, pool=None):
            assert self.fails != "begin", "begin"
            self.during = settings.on

        def capture_end(self):
            assert self.fails != "end", "end"

    @contextmanager
    def use_mem_pool(pool):
        yield settings.on

    for module in (torch.cuda, torch.cuda.memory):
        monkeypatch.setattr(module, "use_mem_pool", use_mem_pool)
    patcher = Patcher()
    switch.suspend_during_captures(active_switch, patcher, Graph, SimpleNamespace(graph_capture=use_mem_pool))
    yield Graph
    patcher.undo()
    assert torch.cuda.use_mem_pool is use_mem_pool


def test_the_switch_is_suspended_during_a_capture(wrapped_graph, settings):
    graph = wrapped_graph()
    graph.capture_begin(pool=(0, 1))
    assert not graph.during
    assert not settings.on
    graph.capture_end()
    assert settings.on


@pytest.mark.parametrize("fails", ["begin", "end"])
def test_a_failed_capture_resumes_the_switch(wrapped_graph, settings, fails):
    graph = wrapped_graph()
    graph.fails = fails
    with suppress(AssertionError):
        graph.capture_begin()
        graph.capture_end()
        pytest.fail("it did not fail")
    assert settings.on


def test_a_capture_end_without_a_begin_resumes_nothing(wrapped_graph, settings, active_switch):
    graph = wrapped_graph()
    with active_switch.suspension():
        graph.capture_begin()
        for each in (graph, graph, wrapped_graph()):
            each.capture_end()
        assert not settings.on
    assert settings.on


def test_the_switch_is_suspended_in_a_separate_memory_pool(wrapped_graph, settings):
    for module in (torch.cuda, torch.cuda.memory):
        with module.use_mem_pool("pool") as on:
            assert not on
        assert settings.on


# --- Turning the switch on -------------------------------------------------------------------------------------------


@pytest.fixture
def set_expandable(monkeypatch, settings, caplog):
    """Return a function that replaces the check whether PyTorch's allocator makes expandable segments. The real check
    needs a GPU."""
    caplog.set_level(logging.INFO, "sglang.srt.moe_patches")
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
    return lambda found: monkeypatch.setattr(switch, "allocates_expandable", found)


def test_the_switch_is_turned_on_before_the_event_loop(monkeypatch, settings, set_expandable, caplog):
    set_expandable(lambda: settings.on)
    monkeypatch.setattr(switch, "agree_on_all_ranks", lambda works: works and setting.append(works) is None)
    setting: list[bool] = []

    def run_event_loop(self, *args):
        assert settings.on
        return args

    assert switch._run_event_loop(switch.Switch(settings), run_event_loop, None, 1, 2) == (1, 2)
    assert setting == [True], "all ranks"
    assert "activation-segments: expandable segments are on from now on" in caplog.text


def fails(works=None):
    raise RuntimeError("no")


ORDINARY = "off: the allocator still makes ordinary segments"
OTHER = "off: another rank cannot use expandable segments"


@pytest.mark.parametrize(
    ("found", "setting", "agreed", "said"),
    [
        pytest.param(lambda: False, False, bool, ORDINARY, id="ordinary"),
        pytest.param(fails, False, bool, "off: RuntimeError: no", id="a driver that fails"),
        pytest.param(lambda: True, True, lambda works: False, OTHER, id="another rank"),
        pytest.param(
            lambda: True,
            True,
            fails,
            "off: the ranks could not exchange their results, RuntimeError: no",
            id="no agreement",
        ),
    ],
)
def test_the_switch_is_turned_off_with_a_reason_if_a_rank_cannot_use_it(
    settings, set_expandable, caplog, found, setting, agreed, said
):
    """If expandable segments fail on one rank, all ranks must turn them off and log the reason. The rank with the
    failure must report it, because the other ranks wait for its report."""
    set_expandable(found)
    told: list[bool] = []
    switch.turn_on_if_it_works(switch.Switch(settings), lambda works: told.append(works) or agreed(works))
    assert told == [setting]
    assert settings.applied_settings[-1] == switch.OFF
    assert said in caplog.text
    assert "expandable segments are on from now on" not in caplog.text
