"""Servers of tests: started the way a user starts them, asked, and examined."""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from importlib import metadata, util
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import pages
import pytest
from common import processes
from releases import ROOT
from sglang_moe_patches.changes import cutedsl_sizing, deferred_shared_experts, fp4_weights, moe_workspace
from sglang_moe_patches.core import machine
from sglang_moe_patches.core.dead_input import counts
from sglang_moe_patches.core.patch import (
    COLUMNS,
    OUTPUT_IN_DEAD_INPUT,
    SCRATCH_IN_DEAD_INPUT,
    SHARED_BUFFERS,
    SHARED_LAST,
    Plan,
)
from sglang_moe_patches.core.variables import OBSERVE
from sglang_moe_patches.lab.observers import events
from sglang_moe_patches.lab.observers.acted import acts_of
from sglang_moe_patches.lab.servers.server import Server, free_port
from sglang_moe_patches.registry import CHANGES
from sglang_moe_reference import environment
from tiny_moe.mutations import SHIPPED

QUESTIONS = ROOT / "benchmark" / "gsm8k" / "test.jsonl"
ROUTED, TRTLLM = "flashinfer_trtllm_routed", "flashinfer_trtllm"
SERVER = ["--quantization", "modelopt_fp4", "--moe-runner-backend"]
EVALUATION = ["--data-path", str(QUESTIONS), "--num-questions", "6", "--num-shots", "1", "--max-new-tokens", "24"]
QUESTION_COUNT, MAX_ANSWER_TOKENS = 24, 64
"""Of the questions with the shortest answers, and how many tokens those have at most: each costs a forward."""
REGRESS = [sys.executable, "-m", "sglang_moe_reference.cli", "regress", "--require-identical"]
PATIENCE = 1800
"""Seconds that any request or start may take. None comes near it on a machine ten times slower than ours."""
PORTS: list[int] = []
PRELOADED = str(ROOT / "test/standins/preloaded")
TOKENS = 8
"""That an answer has."""
PROMPTS = [[random.Random(length).randrange(3, 700) for _ in range(length)] for length in (9, 300, 40, 1)]


def _has_native_buffer() -> bool:
    """Whether this engine has an output buffer of its own. Looks without importing the engine."""
    where = util.find_spec("sglang")
    (root,) = where.submodule_search_locations
    return "moe_output_buffer_ctx" in (Path(root) / "srt/layers/moe/moe_runner/base.py").read_text()


NATIVE_BUFFER = _has_native_buffer()


def shortest_questions(questions: int = QUESTION_COUNT) -> list[str]:
    """Of the shipped model's held-out questions, as lines of JSON."""
    lines = (SHIPPED / "test.jsonl").read_text().splitlines()
    return sorted(lines, key=lambda line: len(json.loads(line)["answer"]))[:questions]


def child_environment(**more: str) -> dict[str, str]:
    kept = processes.variables()
    return {**kept, **environment.variables(kept), **more}


def prepend_to_path(*folders: str) -> str:
    """PYTHONPATH with these folders in front."""
    return os.pathsep.join([*folders, *filter(None, [os.environ.get("PYTHONPATH")])])


def regress(*arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*REGRESS, *arguments],
        env=child_environment(**variables),
        capture_output=True,
        text=True,
        check=False,
    )


def make_server(
    name: str, model: Path, folder: Path, *arguments: str, backend: str = ROUTED, **variables: str
) -> Server:
    """Not started yet. It records what it uses in ``folder / name``, and its log is ``folder / name.log``."""
    (folder / name).mkdir()
    # Several start at once, those of another worker too: each has its own ports.
    ours = int(os.environ.get("PYTEST_XDIST_WORKER", "gw0")[2:]) % 2
    PORTS.append(next(port for port in iter(free_port, None) if port % 2 == ours and port not in PORTS))
    given = environment.server_arguments(["--model-path", str(model), *SERVER, backend, *arguments])
    child = child_environment(**{OBSERVE.name: str(folder / name), **variables})
    # A GPU cannot be used in forks of a process that has asked for one. What controls data-parallel ranks, a fork, was
    # not seen to start them, and uvicorn cannot fork its workers.
    if not machine.has_gpu() and not {"--dp-size", "--dp", "--tokenizer-worker-num"} & set(arguments):
        child["PYTHONPATH"] = os.pathsep.join([PRELOADED, *filter(None, [child.get("PYTHONPATH")])])
    return Server(name, given, child, folder / f"{name}.log", timeout=PATIENCE, port=PORTS[-1])


@contextmanager
def start_servers(*servers: Server) -> Iterator[tuple[Server, ...]]:
    """All at once: a start mostly waits for imports on one core."""
    with ExitStack() as stack:
        with ThreadPoolExecutor() as pool:
            list(pool.map(stack.enter_context, servers))
        yield servers


def generate(url: str, prompt: list[int] | str, tokens: int = TOKENS) -> list[int]:
    """Greedy tokens."""
    asked = {"text": prompt} if isinstance(prompt, str) else {"input_ids": prompt}
    body = {**asked, "sampling_params": {"temperature": 0, "max_new_tokens": tokens, "ignore_eos": True}}
    return httpx.post(f"{url}/generate", json=body, timeout=PATIENCE).raise_for_status().json()["output_ids"]


def ask_servers(*servers: Server, prompts: list[list[int]] = PROMPTS) -> list[list[list[int]]]:
    """What each server says to the prompts, asked one after the other."""
    with ThreadPoolExecutor() as pool:
        return list(pool.map(lambda server: [generate(server.url, prompt) for prompt in prompts], servers))


def answers_in_process(engine: Any, model: Any, prompts: list[list[int]] = PROMPTS) -> list[list[int]]:
    """What a stock server says to the prompts, by the session's ``engine``: asked one after the other, too."""
    # From 0.5.23 on an answer may depend on its batch.
    return [engine.generate(model, [prompt], TOKENS - 1)[0][0] for prompt in prompts]


def read_observations(server: Server) -> events.Process:
    """What the server has recorded of itself."""
    return events.collect(server.log.with_suffix(""))


def check_figures(stock: events.Process, patched: events.Process, moe_layers: int, backend: str = ROUTED) -> None:
    """Stock uses a buffer for each layer, or where it has a buffer of its own one; patched always uses one."""
    stock_buffers = 1 if NATIVE_BUFFER else moe_layers
    assert (stock.memory.moe_layers, stock.memory.output_buffers) == (moe_layers, stock_buffers)
    if not NATIVE_BUFFER:
        assert patched.memory.live_at_kernel_bytes < stock.memory.live_at_kernel_bytes
    assert stock.acted.acts == ()
    assert {status for _, status, _ in stock.changes} == {"not selected"}
    check_patched(patched, moe_layers, backend)


def check_patched(patched: events.Process, moe_layers: int, backend: str = ROUTED) -> None:
    """It uses one buffer, each layer but the first offers its input, and every change is what it is here."""
    assert (patched.memory.moe_layers, patched.memory.output_buffers) == (moe_layers, 1)
    inputs = (counts.OFFERED, counts.AS_OUTPUT)
    offered, taken = ({act.layer for act in acts_of(patched.acted, count.name)} for count in inputs)
    assert offered == set(patched.acted.layers) - {0}  # the input of the model's first layer becomes the residual
    assert taken == (offered if not NATIVE_BUFFER or backend == "flashinfer_cutedsl" else set())  # else by the engine
    assert {name: status for name, status, _ in patched.changes} == expected_statuses(backend)


COUNTED = {
    SHARED_LAST: deferred_shared_experts.DEFERS,
    SCRATCH_IN_DEAD_INPUT: counts.AS_SCRATCH,
    COLUMNS: moe_workspace.COLUMNS,
    SHARED_BUFFERS: cutedsl_sizing.CHANGE.counts[0],
}
"""By what doctor says of a change, what an observed server counts of it."""
NEED_CUDA = ("activation-segments", "moe-workspace")
"""Changes that no server on a CPU applies."""


def check_doctor(report: dict[str, Any], ran: events.Process, backend: str) -> None:
    """What ``doctor --model`` says of a server is what the server became and did.

    :param report: of the same model and flags, on a GPU.
    """
    assert report["server"]["runner"] == backend
    rows = {row["name"]: row for row in report["changes"]}
    for name, status, _ in ran.changes:
        # Without its variable kv-sizing is off; doctor says what it would do.
        if name not in (*NEED_CUDA, "kv-sizing"):
            assert rows[name]["status"] == status, rows[name]
    said = "; ".join(row["does"] for row in rows.values() if row["acts"])
    if "the engine defers them by itself" in rows[deferred_shared_experts.CHANGE.name]["reason"]:
        said += SHARED_LAST  # who defers is not counted apart
    is_ours = not NATIVE_BUFFER or backend == "flashinfer_cutedsl"  # else the engine takes what we offer
    outputs = {OUTPUT_IN_DEAD_INPUT: counts.AS_OUTPUT if is_ours else counts.OFFERED}
    for effect, count in {**COUNTED, **outputs}.items():
        assert (effect in said) == bool(acts_of(ran.acted, count.name)), (effect, said, ran.acted)
    shuffled = acts_of(ran.acted, fp4_weights.CHANGE.counts[0].name)
    assert rows["fp4-weights"]["acts"] == bool(shuffled), rows["fp4-weights"]
    assert report["fit"]["token_bytes"] == pytest.approx(ran.memory.cache_token_bytes, rel=0.001)


class _Arguments(SimpleNamespace):
    """A server's, as far as the changes ask: what is not given is off."""

    def __getattr__(self, name: str) -> None:
        return None


def expected_statuses(backend: str) -> dict[str, str]:
    """What becomes of each change in a server on the CPU: what docs/compatibility.json says, where it is needed."""
    recorded = json.loads(pages.FOUND.read_text())[metadata.version("sglang")]["changes"]
    asked = _Arguments(device="cpu", moe_runner_backend=backend, moe_a2a_backend="none")
    skips = {change.name: change.skip(asked) for change in CHANGES}
    return {name: Plan.skipped(skip).status if skip else recorded[name][0] for name, skip in skips.items()}
