"""activation-segments: which servers, and when the switch is off."""

from __future__ import annotations

import logging
import threading
from contextlib import contextmanager
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from sglang_moe_patches.core.patch import Patcher
from sglang_moe_patches.memory import activation_segments
from sglang_moe_patches.memory.activation_segments import eligibility, switch
from sglang_moe_patches.memory.activation_segments.eligibility import (
    Allocator,
    Situation,
    allocator_skip_reason,
    skip_reason,
)

# --- Which servers ---------------------------------------------------------------------------------------------------


SEEN = f"{eligibility.SEEN_PYTORCH[0]}.0+cu130"


@pytest.mark.parametrize(("text", "asked"), [("", None), ("on", True), ("off", False), ("  on ", True)])
def test_what_is_asked(text, asked):
    assert eligibility.SEGMENTS.read({eligibility.SEGMENTS.name: text}) is asked


@pytest.mark.parametrize("text", ["1", "yes", "On", "auto"])
def test_anything_else_is_an_error_that_names_the_variable(text):
    with pytest.raises(ValueError, match=f"{eligibility.SEGMENTS.name}: expected on or off, got '{text}'"):
        eligibility.SEGMENTS.read({eligibility.SEGMENTS.name: text})


CONFIGURED = Situation(configured="PYTORCH_ALLOC_CONF")


@pytest.mark.parametrize(
    ("asked", "server", "why"),
    [
        (True, Situation(), None),
        (None, Situation(), None),
        (False, Situation(), "SGLANG_MOE_PATCHES_SEGMENTS is off"),
        (True, Situation(device="cpu"), "--device is cpu"),
        (None, Situation(device="xpu"), "--device is xpu"),
        (True, CONFIGURED, "PYTORCH_ALLOC_CONF is set, and the switch would undo it"),
        (None, CONFIGURED, "PYTORCH_ALLOC_CONF is set, and the switch would undo it"),
        (True, Situation(unseen=("--dcp-size",)), None),
        (
            None,
            Situation(unseen=("--dcp-size", "--enable-pdmux")),
            "--dcp-size was not seen with it on a GPU; SGLANG_MOE_PATCHES_SEGMENTS=on turns it on",
        ),
    ],
)
def test_a_server_stands_back_with_a_reason(asked, server, why):
    assert skip_reason(asked, server) == why


#: As the engine's ``ServerArgs`` have them where nothing is on.
NOTHING = {
    "device": "cuda",
    "load_format": "auto",
    "disaggregation_mode": "null",
    "moe_a2a_backend": "none",
    "weight_cache_mode": "off",
    **dict.fromkeys(("attn_cp_size", "dcp_size", "nnodes"), 1),
    **dict.fromkeys(("elastic_ep_backend", "speculative_algorithm", "hicache_storage_backend", "kt_weight_path")),
}
HAD = {
    "disaggregation_mode": "prefill",
    "elastic_ep_backend": "mooncake",
    "load_format": "remote_instance",
    "weight_cache_mode": "daemon",
    "moe_a2a_backend": "deepep",
    "speculative_algorithm": "EAGLE",
    "hicache_storage_backend": "file",
    "kt_weight_path": "a",
    **dict.fromkeys(("attn_cp_size", "dcp_size", "nnodes"), 2),
}


def arguments(**more):
    """As the engine's ``ServerArgs``, where nothing is on."""
    off = {each.argument: NOTHING.get(each.argument, False) for each in eligibility.FEATURES}
    return SimpleNamespace(**{"device": "cuda", **off, **more})


def situation(more=None, environ=None, pytorch=SEEN):
    return eligibility.situation_of(arguments(**more or {}), environ or {}, pytorch)


def test_a_plain_server_has_nothing():
    assert situation() == Situation()
    assert eligibility.situation_of(SimpleNamespace(device="cuda"), {}, SEEN) == Situation(), "of a release without any"
    assert skip_reason(None, situation()) is None


@pytest.mark.parametrize("feature", eligibility.FEATURES, ids=str)
def test_each_feature_is_known_by_its_argument_and_left_alone_by_name(feature):
    had = situation({feature.argument: HAD.get(feature.argument, True)})
    assert str(feature) in str(skip_reason(None, had))
    assert bool(skip_reason(True, had)) is bool(feature.why), "what hands memory to others, even where it is asked for"
    assert (len(had.never), len(had.unseen)) == ((1, 0) if feature.why else (0, 1))


def test_what_hands_memory_to_others_is_never_switched():
    never = {each.argument for each in eligibility.FEATURES if each.why}
    assert {"enable_memory_saver", "disaggregation_mode", "elastic_ep_backend", "enable_symm_mem", "nnodes"} <= never


@pytest.mark.parametrize(
    "more", [{"tp_size": 2}, {"ep_size": 2}, {"pp_size": 2}, {"dp_size": 2}, {"lora_paths": ["a"]}], ids=str
)
def test_what_was_seen_is_switched_without_being_asked(more):
    assert skip_reason(None, situation(more)) is None


def test_a_vision_towers_graphs_are_left_alone_by_their_variable():
    assert "SGLANG_VIT_ENABLE_CUDA_GRAPH" in str(skip_reason(None, situation(environ={eligibility.VIT_GRAPHS: "true"})))
    assert skip_reason(None, situation(environ={eligibility.VIT_GRAPHS: "0"})) is None


@pytest.mark.parametrize(("pytorch", "seen"), [(SEEN, True), ("2.11.1", True), ("2.1.1", False), ("2.14.1", False)])
def test_another_pytorch_is_left_alone_unless_it_is_asked_for(pytorch, seen):
    assert (skip_reason(None, situation(pytorch=pytorch)) is None) is seen
    assert skip_reason(True, situation(pytorch=pytorch)) is None
    assert (skip_reason(None, eligibility.of_process({}, pytorch)) is None) is seen


def test_a_device_is_read_from_the_arguments():
    assert situation({"device": "cpu"}) == Situation(device="cpu")


@pytest.mark.parametrize("name", eligibility.CONFIGURATIONS)
def test_a_configuration_of_the_users_is_read_from_either_variable(name):
    given = {name: "max_split_size_mb:128"}
    assert situation(environ=given).configured == eligibility.of_process(given, SEEN).configured == name
    assert situation(environ={name: " "}).configured == ""


@pytest.mark.parametrize(
    ("found", "why"),
    [
        (Allocator(), None),
        (Allocator(maps=None), None),
        (Allocator(maps=False), "the driver has no virtual memory management"),
        (Allocator(hip=True), "this PyTorch is AMD's: not seen"),
        (Allocator(settable=False), "this PyTorch's allocator cannot be set while it runs"),
        (Allocator(backend="cudaMallocAsync"), "the allocator is cudaMallocAsync, not PyTorch's own"),
    ],
)
def test_an_allocator_that_cannot_is_left_alone(found, why):
    assert allocator_skip_reason(found) == why


@pytest.fixture
def environ(monkeypatch):
    """Nothing is asked, nothing configured, of a PyTorch that was seen."""
    for name in (eligibility.SEGMENTS.name, *eligibility.CONFIGURATIONS):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(activation_segments, "_pytorch", lambda: SEEN)
    return monkeypatch


def test_a_server_that_is_skipped_says_so_before_anything_is_probed(environ):
    assert activation_segments.CHANGE.skip_reason(arguments()) is None
    assert "--dcp-size was not seen" in str(activation_segments.CHANGE.skip_reason(arguments(dcp_size=2)))
    environ.setenv(eligibility.SEGMENTS.name, "on")
    assert activation_segments.CHANGE.skip_reason(arguments(dcp_size=2)) is None
    environ.setenv(eligibility.SEGMENTS.name, "off")
    assert activation_segments.CHANGE.skip_reason(arguments()) == "SGLANG_MOE_PATCHES_SEGMENTS is off"


@pytest.mark.parametrize(
    ("variables", "pytorch", "told"),
    [
        ({}, SEEN, "applied"),
        (
            *({}, "2.14.1"),
            "off, because PyTorch 2.14 was not seen with it on a GPU; SGLANG_MOE_PATCHES_SEGMENTS=on turns it on",
        ),
        ({eligibility.SEGMENTS.name: "on"}, "2.14.1", "applied"),
        ({eligibility.SEGMENTS.name: "off"}, SEEN, "off, because SGLANG_MOE_PATCHES_SEGMENTS is off"),
        (
            *({"PYTORCH_ALLOC_CONF": "backend:native"}, SEEN),
            "not needed here, because PYTORCH_ALLOC_CONF is set, and the switch would undo it",
        ),
    ],
)
def test_without_a_server_doctor_is_told_what_holds_for_all_of_them(environ, variables, pytorch, told):
    environ.setattr(activation_segments, "_pytorch", lambda: pytorch)
    environ.setattr(switch, "allocator", Allocator)
    environ.setattr(switch, "probe", lambda: lambda patcher: None)
    for name, value in variables.items():
        environ.setenv(name, value)
    plan = activation_segments.CHANGE.plan()
    assert str(plan) == told


def test_without_a_server_an_allocator_that_cannot_is_said_first(environ):
    environ.setattr(switch, "allocator", lambda: Allocator(maps=False))
    assert activation_segments.CHANGE.plan().reason == "the driver has no virtual memory management"


# --- The switch ------------------------------------------------------------------------------------------------------


class Settings:
    """An allocator's settings, and every one that it was given."""

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


def test_before_the_server_has_started_nothing_is_set(settings):
    made = switch.Switch(settings)
    with made.held():
        pass
    assert settings.given == []
    made.turn_on()
    assert settings.on


def test_it_is_off_while_somebody_holds_it_and_on_again_afterwards(turned, settings):
    with turned.held():
        assert not settings.on
        with turned.held():
            assert not settings.on
        assert not settings.on
    assert settings.on


def test_it_is_on_again_after_an_exception(turned, settings):
    with pytest.raises(KeyError), turned.held():
        raise KeyError
    assert settings.on


def test_held_when_the_server_starts_it_is_on_once_released(settings):
    made = switch.Switch(settings)
    with made.held():
        made.turn_on()
        assert not settings.on
    assert settings.on


def test_turned_off_for_good_it_stays_off(turned, settings):
    turned.turn_off()
    with turned.held():
        pass
    assert settings.given[-1] == switch.OFF


def test_an_allocator_that_refuses_is_left_alone_and_nothing_is_raised(caplog):
    given = []

    def refuses(setting):
        given.append(setting)
        raise RuntimeError("no")

    made = switch.Switch(refuses)
    with caplog.at_level(logging.WARNING, "sglang.srt.moe_patches"):
        made.turn_on()
        with made.held():
            pass
    assert given == [switch.ON]
    assert "the allocator cannot be set: no" in caplog.text


@given(st.lists(st.booleans(), max_size=30))
def test_whatever_the_order_it_is_on_exactly_while_nobody_holds_it(steps):
    settings = Settings()
    made = switch.Switch(settings)
    made.turn_on()
    holding = 0
    for hold in steps:
        if hold:
            made.hold()
            holding += 1
        elif holding:
            made.release()
            holding -= 1
        assert settings.on == (holding == 0)


def test_threads_that_hold_it_leave_it_on(turned, settings):
    def work():
        for _ in range(200):
            with turned.held():
                pass

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert settings.on


# --- Where it is turned ----------------------------------------------------------------------------------------------


class Graph:
    """As ``torch.cuda.CUDAGraph``: what the settings are while it captures."""

    settings: Settings
    fails = ""

    def capture_begin(self, pool=None):
        if self.fails == "begin":
            raise RuntimeError("begin")
        self.during = self.settings.on

    def capture_end(self):
        if self.fails == "end":
            raise RuntimeError("end")


class Coordinator:
    """As the engine's ``GroupCoordinator``."""

    settings: Settings

    @contextmanager
    def graph_capture(self, context=None):
        self.entered = self.settings.on
        yield context
        self.left = self.settings.on  # where the engine registers what was captured


@pytest.fixture
def wrapped(monkeypatch, settings, turned):
    """A graph's class and a coordinator's, guarded; ``torch.cuda.use_mem_pool`` as well."""
    torch = pytest.importorskip("torch")

    @contextmanager
    def use_mem_pool(pool):
        yield settings.on

    monkeypatch.setattr(torch.cuda, "use_mem_pool", use_mem_pool)
    monkeypatch.setattr(torch.cuda.memory, "use_mem_pool", use_mem_pool)
    graph = type(
        "Graph", (Graph,), {"settings": settings, **{n: vars(Graph)[n] for n in ("capture_begin", "capture_end")}}
    )
    coordinator = type("Coordinator", (Coordinator,), {"settings": settings})
    patcher = Patcher()
    switch.hold_off(turned, patcher, graph, coordinator)
    yield SimpleNamespace(graph=graph, coordinator=coordinator, cuda=torch.cuda, original=use_mem_pool)
    patcher.undo()
    assert torch.cuda.use_mem_pool is use_mem_pool


def test_a_capture_sees_it_off_and_leaves_it_on(wrapped, settings):
    graph = wrapped.graph()
    graph.capture_begin(pool=(0, 1))
    assert not graph.during
    assert not settings.on
    graph.capture_end()
    assert settings.on


@pytest.mark.parametrize("fails", ["begin", "end"])
def test_a_capture_that_fails_leaves_it_on(wrapped, settings, fails):
    graph = wrapped.graph()
    graph.fails = fails

    def capture():
        graph.capture_begin()
        graph.capture_end()

    with pytest.raises(RuntimeError, match=fails):
        capture()
    assert settings.on


def test_a_capture_that_ends_twice_or_was_never_begun_releases_nothing_more(wrapped, settings, turned):
    graph = wrapped.graph()
    with turned.held():
        graph.capture_begin()
        graph.capture_end()
        graph.capture_end()
        wrapped.graph().capture_end()
        assert not settings.on
    assert settings.on


def test_in_the_engines_region_it_is_off_until_buffers_are_registered(wrapped, settings):
    coordinator = wrapped.coordinator()
    with coordinator.graph_capture("context") as context:
        assert context == "context"
        graph = wrapped.graph()
        graph.capture_begin()
        graph.capture_end()
        assert not settings.on, "between two graphs, as of a breakable capture, too"
    assert (coordinator.entered, coordinator.left) == (False, False)
    assert settings.on


def test_an_exception_in_the_region_passes_and_leaves_it_on(wrapped, settings):
    with pytest.raises(KeyError), wrapped.coordinator().graph_capture():
        raise KeyError
    assert settings.on


def test_in_a_pool_of_somebodys_own_it_is_off(wrapped, settings):
    for module in (wrapped.cuda, wrapped.cuda.memory):
        with module.use_mem_pool("pool") as on:
            assert not on
        assert settings.on


# --- Switching over --------------------------------------------------------------------------------------------------


@pytest.fixture
def cuda(monkeypatch):
    torch = pytest.importorskip("torch")
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
    return torch.cuda


def test_a_server_that_has_started_is_switched_over_before_its_loop(monkeypatch, settings, cuda, caplog):
    monkeypatch.setattr(switch, "expandable", lambda: settings.on)
    monkeypatch.setattr(switch, "everywhere", bool)  # the one rank of a server
    made = switch.Switch(settings)

    def run_event_loop(self, *args):
        assert settings.on
        return args

    with caplog.at_level(logging.INFO, "sglang.srt.moe_patches"):
        assert switch._make_run_event_loop(run_event_loop, made)(None, 1, 2) == (1, 2)
    assert "activation-segments: on from here" in caplog.text


def fails():
    raise RuntimeError("CUDA driver error: operation not permitted")


def cannot_agree(works):
    raise RuntimeError("connection closed")


@pytest.mark.parametrize(
    ("expandable", "agreed", "said"),
    [
        (lambda: False, bool, "off: the allocator makes ordinary segments all the same"),
        (fails, bool, "off: RuntimeError: CUDA driver error"),
        (lambda: True, lambda works: False, "off: another rank stays with ordinary segments"),
        (lambda: True, cannot_agree, "off: the ranks cannot agree, RuntimeError: connection closed"),
    ],
    ids=["ordinary", "a driver that fails", "another rank", "no agreement"],
)
def test_where_it_does_not_work_everywhere_it_is_off_and_says_why(
    monkeypatch, settings, cuda, caplog, expandable, agreed, said
):
    monkeypatch.setattr(switch, "expandable", expandable)
    with caplog.at_level(logging.INFO, "sglang.srt.moe_patches"):
        switch.switch_over(switch.Switch(settings), agreed)
    assert settings.given[-1] == switch.OFF
    assert said in caplog.text
    assert "on from here" not in caplog.text


@pytest.mark.parametrize(("expandable", "asked"), [(lambda: False, [False]), (fails, [False]), (lambda: True, [True])])
def test_every_rank_asks_whatever_it_found_itself(monkeypatch, settings, cuda, expandable, asked):
    """Or the others would wait for it."""
    monkeypatch.setattr(switch, "expandable", expandable)
    told = []
    switch.switch_over(switch.Switch(settings), lambda works: told.append(works) or works)
    assert told == asked
