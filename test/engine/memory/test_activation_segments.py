"""Tests of activation-segments in real servers. PyTorch's allocator switches to expandable segments once, after the
server's start.

The CPU has no expandable segments. A plugin therefore makes the change act as on a GPU. The plugin records the
allocator settings that the change makes, and the calls of the model runner.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import releases
from common import plugins
from conftest import DEFAULT_ENGINE_ONLY, RELEASE, installed
from releases import DEFAULT
from servers import ask_servers, make_server, prepend_to_path, start_servers
from sglang_moe_patches.memory import activation_segments
from sglang_moe_patches.memory.activation_segments import eligibility, switch

pytestmark = pytest.mark.every_release

RECORDING_PLUGIN = """
import functools, json, os, types
import wrapt

def write(what):
    with open(os.environ["TURNED"], "a") as lines:
        print(json.dumps([os.getpid(), what]), file=lines)

def register():
    wrapt.register_post_import_hook(allow, "sglang_moe_patches.memory.activation_segments.eligibility")
    wrapt.register_post_import_hook(stand_in, "sglang_moe_patches.memory.activation_segments.switch")
    wrapt.register_post_import_hook(watch, "sglang.srt.model_executor.model_runner")

def allow(eligibility):
    original = eligibility.skip

    def skip(asked, environ, pytorch, server_args=None):
        if server_args is not None:  # not what holds for every server
            assert original(asked, environ, pytorch, server_args).reason == "--device is cpu"
            server_args = types.SimpleNamespace(**{**vars(server_args), "device": "cuda"})
        return original(asked, environ, pytorch, server_args)

    eligibility.skip = skip

def stand_in(switch):
    switch.find_settings_function = lambda: write
    switch.allocates_expandable = lambda: os.environ.get("FAILS_ON") != str(rank())

def rank():
    import torch
    return torch.distributed.get_rank()

def watch(module):
    for name in ("__init__", "forward"):
        original = getattr(module.ModelRunner, name)

        def run(self, *args, original=original, name=name, **kwargs):
            result = original(self, *args, **kwargs)
            write(name)
            return result

        setattr(module.ModelRunner, name, functools.wraps(original)(run))
"""


def record_server(checkpoint, tmp_path: Path, *arguments: str, **variables: str) -> tuple[list[list[str]], str]:
    """Start a server with the recording plugin, send one request and stop the server.

    :returns: for each process of the server, its allocator settings and its calls of the model runner, in their order;
        and the server's log.
    """
    plugins.write_module(tmp_path / "plugin", "writes_down", RECORDING_PLUGIN)
    written = tmp_path / "turned"
    patched = make_server(
        "patched",
        checkpoint(),
        tmp_path,
        *arguments,
        SGLANG_MOE_PATCHES="activation-segments",
        SGLANG_MOE_PATCHES_SEGMENTS="on",
        TURNED=str(written),
        PYTHONPATH=prepend_to_path(str(tmp_path / "plugin")),
        **variables,
    )
    with start_servers(patched):
        ask_servers(patched, prompts=[[7, 8, 9]])
    did: dict[int, list[str]] = {}
    for process, events in map(json.loads, written.read_text().splitlines()):
        did.setdefault(process, []).append(events)
    log = patched.log_text()
    assert "activation-segments: applied" in log
    return list(did.values()), log


@pytest.mark.ci
@pytest.mark.long("a server's start")
@pytest.mark.skipif(RELEASE not in (DEFAULT, releases.ALL[-1]), reason="its seam is that of the default release")
def test_segments_are_switched_after_the_start_and_before_the_first_request(checkpoint, tmp_path: Path):
    (events,), log = record_server(checkpoint, tmp_path)
    assert events.count(switch.ON) == 1
    assert events.index("__init__") < events.index(switch.ON)
    assert "forward" in events[events.index(switch.ON) :]
    assert log.count("activation-segments: expandable segments are on from now on") == 1


@pytest.mark.product
@DEFAULT_ENGINE_ONLY
@pytest.mark.parametrize("fails_on", ["1", ""])
def test_two_ranks_make_the_same_decision_about_segments(checkpoint, tmp_path: Path, fails_on: str):
    """If both ranks can switch to expandable segments, both ranks switch. If the second rank cannot, both ranks keep
    ordinary segments."""
    ranks, log = record_server(checkpoint, tmp_path, "--tp", "2", FAILS_ON=fails_on)
    assert len(ranks) == 2
    set_ = [[each for each in events if each in (switch.ON, switch.OFF)] for events in ranks]
    assert [each[-1] for each in set_] == [switch.OFF if fails_on else switch.ON] * 2
    assert log.count("activation-segments: expandable segments are on from now on") == (0 if fails_on else 2)
    assert log.count("another rank stays with ordinary segments") == (1 if fails_on else 0)


def test_each_argument_that_the_change_reads_exists_in_the_engine():
    """Each server argument that the change reads exists in the engine, except for listed arguments of newer releases.
    If the change read a misspelt argument, it would never notice that a server uses the argument's feature."""
    from sglang.srt.server_args import ServerArgs

    missing = {each.argument for each in eligibility.FEATURES if not hasattr(ServerArgs, each.argument)}
    assert missing == {
        argument
        for argument, since in {"weight_cache_mode": "0.5.17", "dcp_size": "0.5.15"}.items()
        if since not in releases.ALL or releases.ALL.index(RELEASE) < releases.ALL.index(since)
    }


def test_the_engines_context_manager_around_captures_suspends_the_switch(monkeypatch):
    """Expandable segments are switched off inside the engine's context manager ``GroupCoordinator.graph_capture``, in
    which the engine captures CUDA graphs."""
    from contextlib import nullcontext
    from types import SimpleNamespace

    import torch
    from sglang.srt.distributed import parallel_state

    monkeypatch.setenv(eligibility.SEGMENTS.name, "on")
    given: list[str] = []
    turn = switch.Switch(given.append)
    monkeypatch.setattr(switch, "Switch", lambda set_: turn)
    stream = SimpleNamespace(wait_stream=lambda other: None)
    monkeypatch.setattr(parallel_state, "get_current_device_stream_fast", lambda: stream)
    group = SimpleNamespace(
        device_module=SimpleNamespace(Stream=lambda: stream, stream=lambda stream: nullcontext()),
        ca_comm=SimpleNamespace(capture=lambda: nullcontext(given.append("registers"))),
        pynccl_comm=None,
        pymscclpp_comm=None,
        torch_symm_mem_comm=None,
        qr_comm=None,
    )
    with installed(activation_segments.CHANGE):
        turn.turn_on()
        with parallel_state.GroupCoordinator.graph_capture(group) as context:
            given.append("captures")
            assert context.stream is stream
        with pytest.raises(KeyError), parallel_state.GroupCoordinator.graph_capture(group):
            raise KeyError
        graph = torch.cuda.CUDAGraph
        assert graph.capture_begin.__wrapped__.__qualname__ == "CUDAGraph.capture_begin"
    assert given == [switch.ON, switch.OFF, "registers", "captures", switch.ON, switch.OFF, "registers", switch.ON]
    assert not hasattr(graph.capture_begin, "__wrapped__")
