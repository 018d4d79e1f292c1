"""activation-segments: which servers, and when the switch is off."""

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

# --- Which servers ---------------------------------------------------------------------------------------------------


SEEN = f"{eligibility.SEEN_PYTORCH[0]}.0+cu130"
NAME = SEGMENTS.name
CHANGE = activation_segments.CHANGE


def test_on_and_off_are_asked_for_and_anything_else_is_an_error_that_names_the_variable():
    for text, asked in (("", None), ("on", True), ("off", False), ("  on ", True)):
        assert SEGMENTS.read({NAME: text}) is asked
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
"""Of arguments that are no switches: as the engine's ``ServerArgs`` has them where nothing is on, and where it is."""


def arguments(**more):
    """As the engine's ``ServerArgs``, where nothing is on."""
    off = {each.argument: VALUES.get(each.argument, (False, True))[0] for each in FEATURES}
    return SimpleNamespace(**{"device": "cuda", **off, **more})


def reason(asked=None, environ=None, pytorch=SEEN, **more):
    found = skip(asked, environ or {}, pytorch, arguments(**more))
    return found and found.reason


@pytest.mark.parametrize("feature", FEATURES, ids=str)
def test_each_feature_is_known_by_its_argument_and_left_alone_by_name(feature):
    has = {feature.argument: VALUES.get(feature.argument, (False, True))[1]}
    assert str(feature) in str(reason(**has))
    assert bool(reason(True, **has)) is bool(feature.why), "what hands memory to others, even where it is asked for"


def test_what_hands_memory_to_others_is_never_switched():
    never = {each.argument for each in FEATURES if each.why}
    assert {"enable_memory_saver", "disaggregation_mode", "elastic_ep_backend", "enable_symm_mem", "nnodes"} <= never


SET = "{} is set, and the switch would undo it"
UNSEEN = f"{{}} was not seen with it on a GPU; {NAME}=on turns it on"


@pytest.mark.parametrize(
    ("more", "unasked", "on"),
    [
        ({}, None, None),
        ({**dict.fromkeys(("tp_size", "ep_size", "pp_size", "dp_size"), 2), "lora_paths": ["a"]}, None, None),
        ({"device": "cpu"}, *["--device is cpu"] * 2),
        *[
            ({"environ": {name: "x:1"}}, *[SET.format(name)] * 2)
            for name in ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF")
        ],
        ({"environ": {"PYTORCH_ALLOC_CONF": " "}}, None, None),
        ({"environ": {VIT_GRAPHS: "true"}}, UNSEEN.format(VIT_GRAPHS), None),
        ({"environ": {VIT_GRAPHS: "0"}}, None, None),
        ({"dcp_size": 2, "enable_pdmux": True}, UNSEEN.format("--dcp-size"), None),
        ({"pytorch": "2.11.1"}, None, None),
        ({"pytorch": "2.1.1"}, UNSEEN.format("PyTorch 2.1"), None),
        ({"pytorch": "2.14.1"}, UNSEEN.format("PyTorch 2.14"), None),
    ],
    ids=str,
)
def test_a_server_is_left_alone_with_a_reason(more, unasked, on):
    assert (reason(None, **more), reason(True, **more)) == (unasked, on)
    assert reason(False, **more) == f"{NAME} is off"


@pytest.fixture
def environ(monkeypatch):
    """Nothing is asked, nothing configured, of a PyTorch that was seen."""
    for name in (NAME, *eligibility.CONFIGURATIONS):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(activation_segments, "_pytorch", lambda: SEEN)
    return monkeypatch


def test_a_server_that_is_skipped_says_so_before_anything_is_probed(environ):
    for asked, why in (("", UNSEEN.format("--dcp-size")), ("on", None), ("off", f"{NAME} is off")):
        environ.setenv(NAME, asked)
        skipped = CHANGE.skip(arguments(dcp_size=2))
        assert (skipped and skipped.reason) == why
    environ.delenv(NAME)
    for has in ({"enable_memory_saver": True}, {"nnodes": 2}, {"device": "cpu"}):
        environ.delenv(NAME, raising=False)
        why = CHANGE.skip(arguments(**has)).reason
        environ.setenv(NAME, "on")
        found = patch.plan_for(CHANGE, {CHANGE.name}, arguments(**has))
        assert found == patch.Plan.unsupported(f"{NAME}=on, but {why}")
    environ.delenv(NAME)
    assert CHANGE.skip(SimpleNamespace(device="cuda")) is None  # of a release without any feature


NOT_SETTABLE = "this PyTorch's allocator cannot be set while it runs"


@pytest.mark.parametrize(
    ("variables", "owner", "name", "value", "told"),
    [
        ({}, switch, "_driver_maps", True, "applied"),
        ({}, switch, "_driver_maps", None, "applied"),
        ({}, activation_segments, "_pytorch", "2.14.1", f"off, because {UNSEEN.format('PyTorch 2.14')}"),
        ({NAME: "on"}, activation_segments, "_pytorch", "2.14.1", "applied"),
        ({NAME: "off"}, switch, "_driver_maps", True, f"off, because {NAME} is off"),
        (
            *({"PYTORCH_ALLOC_CONF": "x:1"}, switch, "_driver_maps", True),
            f"not needed here, because {SET.format('PYTORCH_ALLOC_CONF')}",
        ),
        (
            *({NAME: "on", "PYTORCH_ALLOC_CONF": "x:1"}, switch, "_driver_maps", True),
            f"unsupported, because {NAME}=on, but {SET.format('PYTORCH_ALLOC_CONF')}",
        ),
        *[
            ({NAME: asked}, owner, name, value, f"{status}, because {but}{why}")
            for asked, status, but in (("off", "not needed here", ""), ("on", "unsupported", f"{NAME}=on, but "))
            for owner, name, value, why in (
                (switch, "_driver_maps", False, "the driver has no virtual memory management"),
                (torch.version, "hip", "6.0", "this PyTorch is AMD's: not seen"),
                (switch, "setter", None, NOT_SETTABLE),
                (torch.cuda, "get_allocator_backend", "x", "the allocator is x, not PyTorch's own"),
            )
        ],
    ],
)
def test_without_a_server_doctor_is_told_what_holds_for_all_of_them(environ, variables, owner, name, value, told):
    environ.setattr(switch, "_driver_maps", lambda: True)
    environ.setattr(owner, name, value if name == "hip" else lambda: value)
    environ.setattr(switch, "probe", lambda: lambda patcher: None)
    for variable, text in variables.items():
        environ.setenv(variable, text)
    assert str(patch.probe(CHANGE)) == told


# --- The switch ------------------------------------------------------------------------------------------------------


class Settings:
    """An allocator's settings: every one that it was given."""

    def __init__(self):
        self.given = []

    def __call__(self, setting):
        self.given.append(setting)

    @property
    def on(self):
        return self.given[-1:] == [switch.ON]


@pytest.fixture
def settings():
    return Settings()


@pytest.fixture
def turned(settings):
    made = switch.Switch(settings)
    made.turn_on()
    return made


def test_an_allocator_that_refuses_is_left_alone_and_nothing_is_raised(caplog):
    given = []

    def refuses(setting):
        given.append(setting)
        raise RuntimeError("no")

    made = switch.Switch(refuses)
    made.turn_on()
    with made.held():
        pass
    assert given == [switch.ON]
    assert "the allocator cannot be set: no" in caplog.text


@given(st.lists(st.sampled_from(["hold", "release", "turn_on", "turn_off"]), max_size=30))
def test_whatever_the_order_it_is_on_exactly_while_nobody_holds_it(steps):
    """From when it is turned on to when it is turned off; before, nothing is set."""
    settings = Settings()
    made, wanted, holding = switch.Switch(settings), False, 0
    for number, step in enumerate(steps):
        if step == "release" and not holding:
            continue
        getattr(made, step)()
        holding += (step == "hold") - (step == "release")
        wanted = {"turn_on": True, "turn_off": False}.get(step, wanted)
        assert settings.on == (wanted and not holding)
        assert "turn_on" in steps[: number + 1] or settings.given == []


# --- Where it is turned ----------------------------------------------------------------------------------------------


@pytest.fixture
def wrapped(monkeypatch, settings, turned):
    """A graph's class, guarded; ``torch.cuda.use_mem_pool`` as well: each says whether it is on."""

    class Graph:
        """As ``torch.cuda.CUDAGraph``."""

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
    switch.hold_off(turned, patcher, Graph, SimpleNamespace(graph_capture=use_mem_pool))
    yield Graph
    patcher.undo()
    assert torch.cuda.use_mem_pool is use_mem_pool


def test_a_capture_sees_it_off_and_leaves_it_on(wrapped, settings):
    graph = wrapped()
    graph.capture_begin(pool=(0, 1))
    assert not graph.during
    assert not settings.on
    graph.capture_end()
    assert settings.on


@pytest.mark.parametrize("fails", ["begin", "end"])
def test_a_capture_that_fails_leaves_it_on(wrapped, settings, fails):
    graph = wrapped()
    graph.fails = fails
    with suppress(AssertionError):
        graph.capture_begin()
        graph.capture_end()
        pytest.fail("it did not fail")
    assert settings.on


def test_a_capture_that_ends_twice_or_was_never_begun_releases_nothing_more(wrapped, settings, turned):
    graph = wrapped()
    with turned.held():
        graph.capture_begin()
        for each in (graph, graph, wrapped()):
            each.capture_end()
        assert not settings.on
    assert settings.on


def test_in_a_pool_of_somebodys_own_it_is_off(wrapped, settings):
    for module in (torch.cuda, torch.cuda.memory):
        with module.use_mem_pool("pool") as on:
            assert not on
        assert settings.on


# --- Switching over --------------------------------------------------------------------------------------------------


@pytest.fixture
def expandable(monkeypatch, settings, caplog):
    """What is found of new memory; without a GPU."""
    caplog.set_level(logging.INFO, "sglang.srt.moe_patches")
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
    return lambda found: monkeypatch.setattr(switch, "expandable", found)


def test_a_server_that_has_started_is_switched_over_before_its_loop(monkeypatch, settings, expandable, caplog):
    expandable(lambda: settings.on)
    monkeypatch.setattr(switch, "everywhere", lambda works: works and asked.append(works) is None)
    asked: list[bool] = []

    def run_event_loop(self, *args):
        assert settings.on
        return args

    assert switch._run_event_loop(switch.Switch(settings), run_event_loop, None, 1, 2) == (1, 2)
    assert asked == [True], "all ranks"
    assert "activation-segments: on from here" in caplog.text


def fails(works=None):
    raise RuntimeError("no")


ORDINARY = "off: the allocator makes ordinary segments all the same"
OTHER = "off: another rank stays with ordinary segments"


@pytest.mark.parametrize(
    ("found", "asked", "agreed", "said"),
    [
        pytest.param(lambda: False, False, bool, ORDINARY, id="ordinary"),
        pytest.param(fails, False, bool, "off: RuntimeError: no", id="a driver that fails"),
        pytest.param(lambda: True, True, lambda works: False, OTHER, id="another rank"),
        pytest.param(lambda: True, True, fails, "off: the ranks cannot agree, RuntimeError: no", id="no agreement"),
    ],
)
def test_where_it_does_not_work_everywhere_it_is_off_and_says_why(
    settings, expandable, caplog, found, asked, agreed, said
):
    """Every rank asks the others, whatever it found itself, or they would wait for it."""
    expandable(found)
    told: list[bool] = []
    switch.switch_over(switch.Switch(settings), lambda works: told.append(works) or agreed(works))
    assert told == [asked]
    assert settings.given[-1] == switch.OFF
    assert said in caplog.text
    assert "on from here" not in caplog.text
