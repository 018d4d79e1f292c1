"""activation-segments: which servers, and when the switch is off."""

from __future__ import annotations

import logging
import threading
from contextlib import contextmanager
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from sglang_moe_patches.changes import activation_segments
from sglang_moe_patches.changes.activation_segments import decide, switch
from sglang_moe_patches.changes.activation_segments.decide import Allocator, Situation, lacks, stands_back
from sglang_moe_patches.patch import Patcher

# --- Which servers ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("text", "asked"), [("", False), ("on", True), ("off", False), ("  on ", True)])
def test_what_is_asked(text, asked):
    assert decide.SEGMENTS.read({decide.SEGMENTS.name: text}) is asked


@pytest.mark.parametrize("text", ["1", "yes", "On", "auto"])
def test_anything_else_is_an_error_that_names_the_variable(text):
    with pytest.raises(ValueError, match=f"{decide.SEGMENTS.name}: expected on or off, got '{text}'"):
        decide.SEGMENTS.read({decide.SEGMENTS.name: text})


CONFIGURED = Situation(configured="PYTORCH_ALLOC_CONF")


@pytest.mark.parametrize(
    ("asked", "server", "why"),
    [
        (True, Situation(), None),
        (False, Situation(), "SGLANG_MOE_PATCHES_SEGMENTS=on turns it on"),
        (True, Situation(device="cpu"), "--device is cpu"),
        (True, Situation(device="xpu"), "--device is xpu"),
        (True, CONFIGURED, "PYTORCH_ALLOC_CONF is set, and the switch would undo it"),
    ],
)
def test_a_server_stands_back_with_a_reason(asked, server, why):
    assert stands_back(asked, server) == why


@pytest.mark.parametrize("feature", decide.NEVER)
def test_what_hands_memory_to_others_is_left_alone_even_where_it_is_asked_for(feature):
    assert feature in str(stands_back(True, Situation(never=(feature,))))


def arguments(**more):
    """As the engine's ``ServerArgs``, where nothing is on."""
    off = {"device": "cuda", "load_format": "auto", "disaggregation_mode": "null", "elastic_ep_backend": None}
    off |= dict.fromkeys(("enable_memory_saver", "enable_symm_mem", "encoder_only", "language_only"), False)
    off |= {"remote_instance_weight_loader_start_seed_via_transfer_engine": False}
    return SimpleNamespace(**off | more)


def test_a_plain_server_has_nothing():
    assert decide.situation_of(arguments(), {}) == Situation()


@pytest.mark.parametrize(
    ("more", "expected"),
    [
        ({"device": "cpu"}, Situation(device="cpu")),
        ({"enable_memory_saver": True}, Situation(never=("--enable-memory-saver",))),
        ({"disaggregation_mode": "prefill"}, Situation(never=("--disaggregation-mode",))),
        ({"elastic_ep_backend": "mooncake"}, Situation(never=("--elastic-ep-backend",))),
        ({"load_format": "remote_instance"}, Situation(never=("--load-format remote_instance",))),
        ({"enable_symm_mem": True}, Situation(never=("--enable-symm-mem",))),
        ({"encoder_only": True}, Situation(never=("--encoder-only",))),
    ],
)
def test_what_a_server_has_is_read_from_its_arguments(more, expected):
    assert decide.situation_of(arguments(**more), {}) == expected


@pytest.mark.parametrize("name", decide.CONFIGURATIONS)
def test_a_configuration_of_the_users_is_read_from_either_variable(name):
    assert decide.situation_of(arguments(), {name: "max_split_size_mb:128"}).configured == name
    assert decide.situation_of(arguments(), {name: " "}).configured == ""


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
    assert lacks(found) == why


def test_a_server_that_stands_back_says_so_before_anything_is_looked_at(monkeypatch):
    monkeypatch.delenv(decide.SEGMENTS.name, raising=False)
    assert activation_segments.CHANGE.unneeded(arguments()) == "SGLANG_MOE_PATCHES_SEGMENTS=on turns it on"
    monkeypatch.setenv(decide.SEGMENTS.name, "on")
    for name in decide.CONFIGURATIONS:
        monkeypatch.delenv(name, raising=False)
    assert activation_segments.CHANGE.unneeded(arguments()) is None


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
    made = switch.Switch(settings)

    def run_event_loop(self, *args):
        assert settings.on
        return args

    with caplog.at_level(logging.INFO, "sglang.srt.moe_patches"):
        assert switch._make_run_event_loop(run_event_loop, made)(None, 1, 2) == (1, 2)
    assert "activation-segments: on from here" in caplog.text


def test_where_segments_are_ordinary_all_the_same_it_is_off_and_says_so(monkeypatch, settings, cuda, caplog):
    monkeypatch.setattr(switch, "expandable", lambda: False)
    with caplog.at_level(logging.INFO, "sglang.srt.moe_patches"):
        switch.switch_over(switch.Switch(settings))
    assert settings.given[-1] == switch.OFF
    assert "ordinary segments all the same" in caplog.text


def test_a_driver_that_fails_leaves_the_server_as_it_was(monkeypatch, settings, cuda, caplog):
    def fails():
        raise RuntimeError("CUDA driver error: operation not permitted")

    monkeypatch.setattr(switch, "expandable", fails)
    with caplog.at_level(logging.INFO, "sglang.srt.moe_patches"):
        switch.switch_over(switch.Switch(settings))
    assert settings.given[-1] == switch.OFF
    assert "off, RuntimeError: CUDA driver error" in caplog.text
