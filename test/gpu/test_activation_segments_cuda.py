"""activation-segments on a GPU: what PyTorch's allocator does when it is switched over, and off again for a while.

Each case runs in a process of its own: an allocator forgets nothing.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")
if not torch.cuda.is_available():
    pytest.skip("needs a CUDA device: expandable segments are the driver's", allow_module_level=True)

import httpx  # noqa: E402
from sglang_moe_patches.servers.server import ServerFailed  # noqa: E402

#: What each process begins with. ``Coordinator``: the engine's region around its captures, without a server.
BEGIN = """
from contextlib import contextmanager
import torch
from sglang_moe_patches.changes.activation_segments import decide, switch
from sglang_moe_patches.patch import Patcher

MB = 1 << 20

class Coordinator:
    @contextmanager
    def graph_capture(self):
        yield torch.empty(33 * MB, dtype=torch.uint8, device="cuda")

assert decide.lacks(switch.allocator()) is None, switch.allocator()
turn, patcher = switch.Switch(switch.setter()), Patcher()

def start(guarded=True):
    "A server that has started: ordinary blocks, a graph, and then the switch."
    global weights, early
    weights = torch.empty(40 * MB, dtype=torch.uint8, device="cuda")
    early = captured()
    if guarded:
        switch.hold_off(turn, patcher, torch.cuda.CUDAGraph, Coordinator)
    switch.switch_over(turn)

def captured(mb=24, pool=None):
    "A graph, and the tensor that it writes."
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, pool=pool):
        out = torch.full((mb * MB,), 7, dtype=torch.uint8, device="cuda") + 1
    graph.replay()
    torch.cuda.synchronize()
    assert int(out[-1]) == 8
    return graph, out

def kind(tensor):
    address = tensor.data_ptr()
    found = [s for s in torch.cuda.memory_snapshot() if s["address"] <= address < s["address"] + s["total_size"]]
    return "expandable" if found[0]["is_expandable"] else "ordinary"

def pools():
    "The kinds of segments in each private pool."
    made = {}
    for s in torch.cuda.memory_snapshot():
        if tuple(s["segment_pool_id"]) != (0, 0):
            made.setdefault(tuple(s["segment_pool_id"]), set()).add(s["is_expandable"])
    return made

def eager(mb=50):
    return torch.empty(mb * MB, dtype=torch.uint8, device="cuda")
"""


def run(script: str) -> str:
    """What the process said.

    :raises AssertionError: it failed.
    """
    kept = {k: v for k, v in os.environ.items() if k not in ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF")}
    done = subprocess.run([sys.executable, "-c", BEGIN + script], env=kept, capture_output=True, text=True)
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    return done.stdout + done.stderr


def test_activations_come_from_expandable_segments_and_what_was_there_is_what_it_was() -> None:
    run("""
start()
assert kind(weights) == kind(early[1]) == "ordinary"
activation = eager()
assert kind(activation) == "expandable"
small = torch.empty(1000, device="cuda")
assert kind(small) == "expandable"
early[0].replay()
""")


def test_a_graph_that_is_captured_later_has_no_expandable_segment_in_its_pool() -> None:
    run("""
start()
held = eager()
late, again = captured(), captured(30, pool=early[0].pool())
assert pools() and all(kinds == {False} for kinds in pools().values()), pools()
assert kind(late[1]) == kind(again[1]) == "ordinary"
assert kind(eager(60)) == "expandable", "and it is on again"
""")


def test_without_the_guard_a_later_graphs_pool_has_expandable_segments() -> None:
    run("""
start(guarded=False)
late = captured()
assert {True} in pools().values(), "without the guard this would have been seen"
""")


def test_a_capture_that_fails_leaves_it_on() -> None:
    run("""
start()
graph = torch.cuda.CUDAGraph()
try:
    with torch.cuda.graph(graph):
        torch.zeros(3, device="cuda").cpu()  # a wait, which no capture allows
except Exception as error:
    print(error)
else:
    raise AssertionError("it was captured")
torch.cuda.synchronize()
assert kind(eager(61)) == "expandable"
""")


def test_in_the_engines_region_around_captures_and_in_a_pool_memory_is_ordinary() -> None:
    run("""
start()
with Coordinator().graph_capture() as registered:
    between = eager(70)
    late = captured()
    after = eager(80)
    assert kind(registered) == kind(between) == kind(after) == "ordinary"
pool = torch.cuda.MemPool()
with torch.cuda.use_mem_pool(pool):
    assert kind(own := eager(90)) == "ordinary"
assert kind(eager(100)) == "expandable"
""")


def test_ordinary_blocks_that_are_freed_later_are_used_again_or_given_back() -> None:
    run("""
start()
blocks = eager(10)
with turn.held():
    ordinary = [eager(64) for _ in range(4)]
addresses = {t.data_ptr() for t in ordinary}
del ordinary
assert eager(64).data_ptr() in addresses, "of a size that is free, it is taken"
torch.cuda.empty_cache()
before = torch.cuda.memory_reserved()
assert kind(eager(64)) == "expandable"
torch.cuda.empty_cache()
assert torch.cuda.memory_reserved() == before, "unmapped again"
""")


def test_of_many_lengths_less_is_kept() -> None:
    """The point of it: tensors of rising and of random sizes, one set alive at a time."""
    said = run("""
import random
def forwards():
    draw = random.Random(1)
    for size in [*range(64, 1024, 64), *(draw.randrange(16, 1024) for _ in range(60))]:
        held = [eager(size // part + 1) for part in (1, 2, 3, 5, 8)]
        del held[1::2]
        held += [eager(size // part + 1) for part in (4, 6)]
        del held
torch.cuda.empty_cache()
torch.cuda.reset_peak_memory_stats()
forwards()
ordinary, peak = torch.cuda.memory_reserved(), torch.cuda.max_memory_allocated()
torch.cuda.empty_cache()
start()
torch.cuda.reset_peak_memory_stats()
forwards()
expandable = torch.cuda.memory_reserved()
print("reserved", ordinary / MB, expandable / MB, "peak", peak / MB)
assert expandable < 1.3 * torch.cuda.max_memory_allocated() < ordinary
""")
    print(said)


def test_an_allocator_that_does_not_do_it_is_left_alone() -> None:
    said = run("""
import logging
logging.basicConfig(level=logging.INFO)
turn = switch.Switch(lambda setting: None)
switch.switch_over(turn)
assert kind(eager()) == "ordinary"
""")
    assert "ordinary segments all the same" in said


NOT_UNDERSTOOD = pytest.mark.xfail(
    reason="on H200s, 0.5.12.post1: an index out of bounds after capturing in the middle of a forward, guarded and "
    "not; on two GPUs no graph address was registered. Not tried without the change: docs/activation-segments.md",
    strict=False,
)


def serve(tmp_path: Path, gpus: int, guarded: bool) -> tuple[list[dict[str, Any]], list[list[int]]]:
    """A real server that captures graphs while it serves, each into a pool of its own.

    :returns: what its first rank saw after each prefill, and the answers to one prompt before that and after it.
    """
    from common import plugins, weights
    from common.shapes import MODELS
    from sglang_moe_patches.servers.server import Server

    served = weights.Served(MODELS["qwen3-30b"], moe_layers=2, runner="triton")
    model = weights.write_model(tmp_path / "model", served)
    plugins.write_module(tmp_path / "plugin", "captures_later", CAPTURES_LATER)
    arguments = ["--model-path", str(model), "--load-format", "dummy", "--skip-tokenizer-init", "--random-seed", "1"]
    arguments += ["--grammar-backend", "none", "--attention-backend", "triton", "--sampling-backend", "pytorch"]
    arguments += ["--cuda-graph-max-bs", "4", "--disable-piecewise-cuda-graph", "--max-total-tokens", "40000"]
    arguments += ["--disable-radix-cache", "--skip-server-warmup", "--tp", str(gpus)]
    # The other fast way of two GPUs would leave custom all-reduce unused.
    arguments += ["--enforce-disable-flashinfer-allreduce-fusion"] if gpus > 1 else []
    variables = {
        **os.environ,
        "SGLANG_MOE_PATCHES": "activation-segments",
        "SGLANG_MOE_PATCHES_SEGMENTS": "on",
        "PYTHONPATH": ":".join([str(tmp_path / "plugin"), os.environ.get("PYTHONPATH", "")]),
        "SEEN": str(tmp_path / "seen.jsonl"),
        "GUARDED": "1" if guarded else "0",
    }
    answers = []
    with Server("patched", arguments, variables, tmp_path / "log", timeout=300) as server:
        for length in (100, 3000, 700, 100):
            asked = {
                "input_ids": list(range(3, 3 + length)),
                "sampling_params": {"temperature": 0, "max_new_tokens": 8},
            }
            answer = httpx.post(f"{server.url}/generate", json=asked, timeout=120).raise_for_status()
            answers.append(answer.json()["output_ids"])
        log = server.log_text()
    assert "activation-segments: applied" in log
    assert log.count("activation-segments: on from here") == gpus
    seen = [json.loads(line) for line in (tmp_path / "seen.jsonl").read_text().splitlines()]
    assert len(seen) >= 4
    assert all(each["eager"] for each in seen), "forwards allocate from expandable segments"
    assert seen[0]["pools"]
    assert not any(seen[0]["pools"].values()), "the graphs of the start are ordinary"
    assert set(seen[-1]["pools"]) - set(seen[0]["pools"]), "some were captured later, into pools of their own"
    return seen, [answers[0], answers[-1]]


@NOT_UNDERSTOOD
@pytest.mark.parametrize("guarded", [True, False])
def test_a_graph_that_a_server_captures_while_it_serves_has_ordinary_memory(tmp_path: Path, guarded: bool) -> None:
    seen, (before, after) = serve(tmp_path, 1, guarded)
    assert any(seen[-1]["pools"].values()) is not guarded
    assert before == after


@NOT_UNDERSTOOD
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs 2 GPUs")
def test_a_server_of_two_ranks_captures_again_and_registers_with_custom_all_reduce(tmp_path: Path) -> None:
    seen, (before, after) = serve(tmp_path, 2, guarded=True)
    assert all(each["custom_all_reduce"] for each in seen), "or nothing would have been shown"
    assert not any(seen[-1]["pools"].values())
    assert before == after


@NOT_UNDERSTOOD
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs 2 GPUs")
def test_without_the_guard_a_server_of_two_ranks_ends_where_it_captures_again(tmp_path: Path) -> None:
    """A handle of CUDA IPC cannot be had for what the new graphs read."""
    with pytest.raises((httpx.HTTPError, ServerFailed)):
        serve(tmp_path, 2, guarded=False)
    assert "Scheduler hit an exception" in (tmp_path / "log").read_text()


#: In the server: after each prefill, what its segments are. After the second it captures its graphs anew, and another.
CAPTURES_LATER = """
import json, os, sys
import wrapt

def register():
    wrapt.register_post_import_hook(watch, "sglang.srt.model_executor.model_runner")
    if os.environ["GUARDED"] == "0":
        wrapt.register_post_import_hook(unguard, "sglang_moe_patches.changes.activation_segments.switch")

def unguard(switch):
    switch.hold_off = lambda *args: None

def watch(module):
    import torch
    original, state = module.ModelRunner.forward, {"count": 0, "busy": False, "kept": []}

    def capture():
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            state["kept"].append(torch.ones(64 << 20, dtype=torch.uint8, device="cuda") + 1)
        graph.replay()
        state["kept"].append(graph)

    def capture_again(runner):
        # Into a pool of their own: the one of the start has memory that is free.
        for loaded in list(sys.modules.values()):
            if forget := getattr(loaded, "__dict__", {}).get("set_global_graph_memory_pool"):
                forget(None)
        for name in ("init_device_graphs", "init_decode_cuda_graph"):
            if hasattr(runner, name):
                return getattr(runner, name)()
        raise AssertionError("it captures in another way")

    def forward(self, batch, *args, **kwargs):
        result = original(self, batch, *args, **kwargs)
        if state["busy"] or torch.cuda.is_current_stream_capturing() or batch.forward_mode.is_decode():
            return result
        state["count"] += 1
        if state["count"] == 2:
            state["busy"] = True
            capture()
            capture_again(self)
            state["busy"] = False
        probe = torch.empty(200 << 20, dtype=torch.uint8, device="cuda")
        address, pools, eager = probe.data_ptr(), {}, None
        for s in torch.cuda.memory_snapshot():
            name = str(tuple(s["segment_pool_id"]))
            if name != "(0, 0)":
                pools[name] = pools.get(name, False) or s["is_expandable"]
            if s["address"] <= address < s["address"] + s["total_size"]:
                eager = s["is_expandable"]
        if self.tp_rank == 0:
            from sglang.srt.distributed import get_tp_group
            custom = getattr(get_tp_group(), "ca_comm", None)
            used = custom is not None and not custom.disabled
            with open(os.environ["SEEN"], "a") as lines:
                print(json.dumps({"eager": eager, "pools": pools, "custom_all_reduce": used}), file=lines)
        return result

    module.ModelRunner.forward = forward
"""
