"""GPU tests of activation-segments: PyTorch's allocator switches to expandable segments, and back to ordinary segments
during each capture of a CUDA graph.

Each case runs in a process of its own, because the settings and segments of an allocator last as long as its process.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from itertools import product
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")
if not torch.cuda.is_available():
    pytest.skip("needs a CUDA device: expandable segments are the driver's", allow_module_level=True)

import httpx  # noqa: E402
from common import plugins  # noqa: E402
from common.servers import generate, prompt  # noqa: E402
from sglang_moe_patches.lab.servers.server import Server, ServerFailed  # noqa: E402
from sglang_moe_reference.families import ModelSpec  # noqa: E402
from sglang_moe_reference.model import make_model  # noqa: E402

#: Beginning of each program that :func:`run` starts. ``Coordinator`` stands in for the engine's context manager around
#: captures, which needs a server.
BEGIN = """
from contextlib import contextmanager
import torch
from sglang_moe_patches.memory.activation_segments import switch
from sglang_moe_patches.core.patch import Patcher

MB = 1 << 20

class Coordinator:
    @contextmanager
    def graph_capture(self):
        yield torch.empty(33 * MB, dtype=torch.uint8, device="cuda")

assert switch.find_allocator_skip_reason() is None, switch.find_allocator_skip_reason()
turn, patcher = switch.Switch(switch.find_settings_function()), Patcher()

def start(guarded=True):
    "A server that has started: ordinary blocks, a graph, and then the switch."
    global weights, early
    weights = torch.empty(40 * MB, dtype=torch.uint8, device="cuda")
    early = captured()
    if guarded:
        switch.suspend_during_captures(turn, patcher, torch.cuda.CUDAGraph, Coordinator)
    switch.turn_on_if_it_works(turn)

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
    """Run a program in a new process, which must not fail. Return its output."""
    kept = {k: v for k, v in os.environ.items() if k not in ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF")}
    done = subprocess.run([sys.executable, "-c", BEGIN + script], env=kept, capture_output=True, text=True)
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    return done.stdout + done.stderr


def test_activations_use_expandable_segments_and_older_tensors_keep_their_values() -> None:
    run("""
start()
assert kind(weights) == kind(early[1]) == "ordinary"
activation = eager()
assert kind(activation) == "expandable"
small = torch.empty(1000, device="cuda")
assert kind(small) == "expandable"
early[0].replay()
""")


def test_the_pool_of_a_later_graph_has_no_expandable_segment() -> None:
    run("""
start()
held = eager()
late, again = captured(), captured(30, pool=early[0].pool())
assert pools() and all(kinds == {False} for kinds in pools().values()), pools()
assert kind(late[1]) == kind(again[1]) == "ordinary"
assert kind(eager(60)) == "expandable", "and it is on again"
""")


def test_without_the_guard_the_pool_of_a_later_graph_has_expandable_segments() -> None:
    run("""
start(guarded=False)
late = captured()
assert {True} in pools().values(), "without the guard, a graph must use expandable segments"
""")


def test_a_failed_graph_capture_leaves_expandable_segments_on() -> None:
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


def test_captures_and_memory_pools_use_ordinary_segments() -> None:
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


def test_ordinary_blocks_that_are_freed_later_are_reused_or_released() -> None:
    run("""
start()
blocks = eager(10)
with turn.suspension():
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


def test_expandable_segments_reserve_less_memory_for_many_lengths() -> None:
    """Expandable segments reserve less memory than ordinary ones for tensors of rising and of random sizes."""
    run("""
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
ordinary = torch.cuda.memory_reserved()
torch.cuda.empty_cache()
start()
torch.cuda.reset_peak_memory_stats()
forwards()
expandable, peak = torch.cuda.memory_reserved(), torch.cuda.max_memory_allocated()
assert expandable < 1.3 * peak < ordinary, (expandable, peak, ordinary)
""")


def test_an_allocator_without_expandable_segments_is_left_alone() -> None:
    said = run("""
import logging
logging.basicConfig(level=logging.INFO)
turn = switch.Switch(lambda setting: None)
switch.turn_on_if_it_works(turn)
assert kind(eager()) == "ordinary"
""")
    assert "ordinary segments all the same" in said


# --- Real servers ----------------------------------------------------------------------------------------------------

QWEN: dict[str, Any] = {"family": "qwen3-moe", "layers": 2, "hidden": 2048, "moe_intermediate": 256}
QWEN |= {"heads": 32, "kv_heads": 4}
DEEPSEEK = {"layers": 2, "hidden": 512, "nextn": True}
LENGTHS = (100, 3000, 700, 40)
STEPS = 12
GREEDY = {"temperature": 0, "max_new_tokens": STEPS, "ignore_eos": True}


@dataclass(frozen=True)
class Case:
    """Test case: a kind of server, and an event between two rounds of the same questions.

    :param meanwhile: function that causes the event. It receives the server and its model's folder.
    :param aborts: whether many requests are aborted before the second round. It is False in cases with a draft model:
        after so many aborts, such a server does not answer for half a minute (0.5.12.post1).
    """

    gpus: int = 1
    arguments: tuple[str, ...] = ()
    variables: Mapping[str, str] = field(default_factory=dict)
    spec: Mapping[str, Any] = field(default_factory=lambda: QWEN)
    meanwhile: Callable[[Server, Path], None] = lambda server, model: None
    aborts: bool = True


@dataclass(frozen=True)
class Observations:
    """Results of one server in a test case.

    :param answers: answers to the same questions, before and after the event.
    :param prefills: one dictionary for each prefill of rank 0, with the state after the prefill:

        - ``pools``: for each memory pool of CUDA graphs, whether it has an expandable segment.
        - ``expandable``: bytes of the expandable segments outside these pools.
        - ``custom_all_reduce``: whether the rank uses custom all-reduce.

    :param registered: number of addresses that custom all-reduce registered in each capture.
    """

    answers: tuple[list[list[int]], list[list[int]]]
    prefills: list[dict[str, Any]]
    registered: list[int]
    log: str


def post(server: Server, path: str, **asked: Any) -> Any:
    server.check()
    answer = httpx.post(f"{server.url}/{path}", json=asked, timeout=150).raise_for_status()
    return answer.json() if answer.headers.get("content-type", "").startswith("application/json") else answer.text


def ask(server: Server) -> list[list[int]]:
    """Send prompts of several lengths to a server, one after another. Return the answers."""
    found = [generate(server, prompt(length, 1), STEPS, logprobs=False)["tokens"] for length in LENGTHS]
    assert all(len(answer) == STEPS for answer in found)
    return found


def abort_and_flush(server: Server) -> None:
    """Abort many running requests, and flush the cache once they have ended."""
    asked = [prompt(200 + 50 * each, each) for each in range(16)]
    with ThreadPoolExecutor(1) as pool:
        sampling = {"max_new_tokens": 4000, "ignore_eos": True}
        body = {"input_ids": asked, "sampling_params": sampling}
        running = pool.submit(httpx.post, f"{server.url}/generate", json=body, timeout=150)
        time.sleep(2)
        assert not running.done()
        post(server, "abort_request", rid="", abort_all=True)
        assert "abort" in running.result().text
    assert httpx.post(f"{server.url}/flush_cache", params={"timeout": 30}, timeout=60).status_code == 200


def update_from_disk(server: Server, model: Path) -> None:
    """Load the same weights from disk again. The server captures all its graphs again."""
    assert post(server, "update_weights_from_disk", model_path=str(model), recapture_cuda_graph=True)["success"]


def update_from_tensor(server: Server, model: Path) -> None:
    """Send the server the same weights again, as tensors of this process."""
    from safetensors.torch import load_file
    from sglang.srt.utils import MultiprocessingSerializer
    from sglang.srt.utils.patch_torch import monkey_patch_torch_reductions

    monkey_patch_torch_reductions()
    tensors = [(name, tensor.cuda()) for name, tensor in load_file(model / "model.safetensors").items()]
    given = MultiprocessingSerializer.serialize(tensors, output_str=True)
    assert post(server, "update_weights_from_tensor", serialized_named_tensors=[given])["success"]


def load_adapter(server: Server, model: Path) -> None:
    """Load a LoRA adapter while the server runs."""
    from safetensors.torch import save_file

    folder, rank = model.parent / f"adapter-{server.name}", 8
    folder.mkdir()
    rows = {"q_proj": QWEN["heads"] * 128, "v_proj": QWEN["kv_heads"] * 128}
    config = {"peft_type": "LORA", "r": rank, "lora_alpha": 64, "target_modules": [*rows], "bias": "none"}
    (folder / "adapter_config.json").write_text(json.dumps(config))
    draw = torch.Generator().manual_seed(1)
    tensors = {}
    for layer, (name, count) in product(range(QWEN["layers"]), rows.items()):
        for part, shape in (("lora_A", (rank, QWEN["hidden"])), ("lora_B", (count, rank))):
            key = f"base_model.model.model.layers.{layer}.self_attn.{name}.{part}.weight"
            tensors[key] = (torch.randn(*shape, generator=draw) / 50).bfloat16()
    save_file(tensors, str(folder / "adapter_model.safetensors"))
    assert post(server, "load_lora_adapter", lora_name="late", lora_path=str(folder))["success"]
    asked = {"input_ids": prompt(500, 1), "sampling_params": GREEDY}
    with_it, without = post(server, "generate", lora_path="late", **asked), post(server, "generate", **asked)
    assert with_it["output_ids"] != without["output_ids"], "or the adapter was not used"


def evict_and_reload(server: Server, model: Path) -> None:
    """Send prompts that make the server evict the KV cache of an earlier prompt to the host, and then load that KV
    cache back.
    """
    for seed in (0, 1, 2, 3, 0):
        answer = post(server, "generate", input_ids=prompt(3000, seed), sampling_params=GREEDY)
    assert answer["meta_info"]["cached_tokens"] > 2000


def serve(case: Case, mode: str, model: Path, work: Path) -> Observations:
    """Start one server, run a test case on it, and return the observations.

    :param mode: one of four modes:

        - ``control``: without the change.
        - ``unset``: with the change and its default settings.
        - ``guarded``: with the change, switched on.
        - ``unguarded``: like ``guarded``, but the allocator does not switch back to ordinary segments while a CUDA
          graph is captured.
    """
    plugins.write_module(work / f"plugin-{mode}", "segment_recorder", SEGMENT_RECORDER)
    arguments = ["--model-path", str(model), "--skip-tokenizer-init", "--random-seed", "1", "--grammar-backend", "none"]
    arguments += ["--attention-backend", "triton", "--sampling-backend", "pytorch", "--disable-piecewise-cuda-graph"]
    arguments += ["--max-total-tokens", "40000", "--tp", str(case.gpus), *case.arguments]
    if "--cuda-graph-bs" not in arguments:
        arguments += ["--cuda-graph-max-bs", "4", "--max-running-requests", "32"]
    # FlashInfer's fused all-reduce would replace custom all-reduce.
    arguments += ["--enforce-disable-flashinfer-allreduce-fusion"] if case.gpus > 1 else []
    seen = work / f"{mode}.jsonl"
    variables = {
        **{name: value for name, value in os.environ.items() if not name.startswith("SGLANG_MOE_PATCHES")},
        "SGLANG_MOE_PATCHES": "none" if mode == "control" else "activation-segments",
        "SGLANG_MOE_PATCHES_SEGMENTS": "" if mode == "unset" else "on",
        # Other servers start on the same GPUs at the same time.
        "SGLANG_ENABLE_TP_MEMORY_INBALANCE_CHECK": "0",
        "PYTHONPATH": ":".join([str(work / f"plugin-{mode}"), os.environ.get("PYTHONPATH", "")]),
        "SEEN": str(seen),
        "MODE": mode,
        **case.variables,
    }
    log = work / f"{mode}.log"
    with Server(mode, arguments, variables, log, timeout=400) as server:
        before = ask(server)
        if case.aborts:
            abort_and_flush(server)
        case.meanwhile(server, model)
        after = ask(server)
        said = server.log_text()
    prefills = [json.loads(line) for line in seen.read_text().splitlines()]
    registered = [int(count) for count in re.findall(r"Registering (\d+) cuda graph addresses", said)]
    return Observations((before, after), prefills, registered, said)


def serve_at_once(case: Case, modes: Sequence[str], work: Path) -> list[Observations | Exception]:
    """Run a test case on one server for each mode, at the same time. Return each server's observations, or the
    exception that ended it."""
    model = work / "model"
    make_model(model, ModelSpec(**case.spec), quantized=False)

    def serve_mode(mode: str) -> Observations | Exception:
        try:
            return serve(case, mode, model, work)
        except (httpx.HTTPError, ServerFailed) as error:
            return error

    with ThreadPoolExecutor(len(modes)) as pool:
        return list(pool.map(serve_mode, modes))


def get_observations(found: Observations | Exception) -> Observations:
    if isinstance(found, Exception):
        raise found
    return found


def check_switched(seen: Observations, ranks: int) -> None:
    assert seen.log.count("activation-segments: expandable segments are on from now on") == ranks
    assert "activation-segments: applied" in seen.log
    assert seen.prefills[-1]["expandable"] > 0, "forwards allocate from expandable segments"
    assert not any(seen.prefills[0]["pools"].values()), "the graphs of the start are ordinary"


NEEDS_TWO = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs 2 GPUs")
SPECULATIVE = (
    *("--speculative-algorithm", "EAGLE", "--speculative-num-steps", "2"),
    *("--speculative-eagle-topk", "1", "--speculative-num-draft-tokens", "3"),
)
LORA = ("--enable-lora", "--max-lora-rank", "8", "--lora-target-modules", "q_proj", "k_proj", "v_proj", "o_proj")
SMALL_CACHE = ("--max-total-tokens", "5000", "--enable-hierarchical-cache", "--hicache-ratio", "4")


@pytest.mark.parametrize(
    ("case", "ranks"),
    [
        pytest.param(Case(meanwhile=update_from_tensor), 1, id="update from tensor"),
        pytest.param(Case(arguments=SPECULATIVE, spec=DEEPSEEK, aborts=False), 1, id="a draft model"),
        pytest.param(Case(arguments=LORA, meanwhile=load_adapter), 1, id="LoRA"),
        pytest.param(Case(arguments=SMALL_CACHE, meanwhile=evict_and_reload), 1, id="hierarchical cache"),
        pytest.param(Case(2, ("--ep", "2")), 2, id="expert-parallel ranks", marks=NEEDS_TWO),
        pytest.param(Case(2, ("--dp", "2", "--enable-dp-attention")), 2, id="data-parallel ranks", marks=NEEDS_TWO),
        pytest.param(Case(1, ("--pp-size", "2")), 2, id="pipeline stages", marks=NEEDS_TWO),
    ],
)
def test_a_server_answers_as_without_the_change(tmp_path: Path, case: Case, ranks: int) -> None:
    control, on = map(get_observations, serve_at_once(case, ("control", "guarded"), tmp_path))
    check_switched(on, ranks)
    assert not any(on.prefills[-1]["pools"].values()), "graphs that are captured later must use ordinary segments, too"
    assert on.answers == control.answers
    assert control.prefills[-1]["expandable"] == 0


def test_a_graph_captured_while_serving_uses_ordinary_segments(tmp_path: Path) -> None:
    """A CUDA graph that is captured while the server serves uses ordinary segments. Without the guard (the switch to
    ordinary segments during a capture) such a graph uses expandable segments. On one GPU the server works even so.
    """
    case = Case(meanwhile=update_from_disk, variables={"ANEW": "1"})
    control, guarded, unguarded = map(
        get_observations, serve_at_once(case, ("control", "unset", "unguarded"), tmp_path)
    )
    check_switched(guarded, 1)
    for seen in (control, guarded, unguarded):
        assert set(seen.prefills[-1]["pools"]) - set(seen.prefills[0]["pools"]), "some have a pool of their own"
        assert seen.answers[0] == seen.answers[1] == control.answers[0]
    assert not any(guarded.prefills[-1]["pools"].values())
    assert any(unguarded.prefills[-1]["pools"].values()), "without the guard, a graph must use expandable segments"


#: Arguments with which custom all-reduce registers tensors of a CUDA graph. On two H200s, its second version does so
#: only for tensors of more than 2 MiB.
LARGE = ("--cuda-graph-bs", "1", "2", "4", "600", "--max-running-requests", "600")


@NEEDS_TWO
@pytest.mark.parametrize("variables", [{"SGLANG_OPT_USE_CUSTOM_ALL_REDUCE_V2": "0"}, {}], ids=["v1", "v2"])
def test_two_ranks_that_capture_again_fail_without_the_guard_and_serve_with_it(
    tmp_path: Path, variables: dict[str, str]
) -> None:
    """If two ranks capture their graphs again without the guard (the switch to ordinary segments during a capture), the
    server fails: the new graphs use expandable segments, for which CUDA IPC has no handles.
    """
    case = Case(2, LARGE, {"ANEW": "1", **variables}, meanwhile=update_from_disk)
    control, guarded, unguarded = serve_at_once(case, ("control", "guarded", "unguarded"), tmp_path)
    for seen in (get_observations(control), get_observations(guarded)):
        assert all(prefill["custom_all_reduce"] for prefill in seen.prefills), "the server must use custom all-reduce"
        assert seen.registered[-1] > 0, "the capture must register an address"
        assert len(seen.registered) > 1
        assert seen.answers[0] == seen.answers[1] == get_observations(control).answers[0]
    check_switched(get_observations(guarded), 2)
    assert not any(get_observations(guarded).prefills[-1]["pools"].values())
    assert isinstance(unguarded, Exception), "the server without the guard did not fail"
    log = (tmp_path / "unguarded.log").read_text()
    assert log.count("activation-segments: expandable segments are on from now on") == 2
    assert "Scheduler hit an exception" in log


#: Plugin of the server. It records the kinds of its segments after each prefill. With ``ANEW``, graphs that are
#: captured again get a pool of their own, as the graphs of a draft model or a vision tower have. The first pool has
#: free memory, so that a second capture there would allocate nothing.
SEGMENT_RECORDER = """
import functools, json, os, sys
import wrapt

def register():
    wrapt.register_post_import_hook(watch, "sglang.srt.model_executor.model_runner")
    if os.environ["MODE"] == "unguarded":
        wrapt.register_post_import_hook(unguard, "sglang_moe_patches.memory.activation_segments.switch")

def unguard(switch):
    switch.suspend_during_captures = lambda *args: None

def anew(original):
    @functools.wraps(original)
    def capture(self, *args, **kwargs):
        for loaded in list(sys.modules.values()):
            if forget := getattr(loaded, "__dict__", {}).get("set_global_graph_memory_pool"):
                forget(None)
        return original(self, *args, **kwargs)
    return capture

def watch(module):
    import torch
    runner = module.ModelRunner
    for name in ("init_device_graphs", "init_decode_cuda_graph"):  # up to 0.5.14, from 0.5.15
        if os.environ.get("ANEW") and hasattr(runner, name):
            setattr(runner, name, anew(getattr(runner, name)))
    original = runner.forward

    @functools.wraps(original)
    def forward(self, batch, *args, **kwargs):
        result = original(self, batch, *args, **kwargs)
        of_first = self.gpu_id == 0 and not getattr(self, "is_draft_worker", False)
        if not of_first or torch.cuda.is_current_stream_capturing() or batch.forward_mode.is_decode():
            return result
        pools, expandable = {}, 0
        for segment in torch.cuda.memory_snapshot():
            name = str(tuple(segment["segment_pool_id"]))
            if name == "(0, 0)":
                expandable += segment["total_size"] * segment["is_expandable"]
            else:
                pools[name] = pools.get(name, False) or segment["is_expandable"]
        from sglang.srt.distributed import get_tp_group
        custom = getattr(get_tp_group(), "ca_comm", None)
        used = custom is not None and not custom.disabled
        with open(os.environ["SEEN"], "a") as lines:
            print(json.dumps({"pools": pools, "expandable": expandable, "custom_all_reduce": used}), file=lines)
        return result

    runner.forward = forward
"""
