"""Helpers that start servers as a user does, send prompts to them, and check the observations that servers write."""

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
from sglang_moe_patches.lab.observers.counting import select_acts
from sglang_moe_patches.lab.servers.server import Server, free_port
from sglang_moe_patches.registry import CHANGES
from sglang_moe_reference import environment
from tiny_moe.mutations import SHIPPED

QUESTIONS = ROOT / "benchmark" / "gsm8k" / "test.jsonl"
ROUTED, TRTLLM = "flashinfer_trtllm_routed", "flashinfer_trtllm"
SERVER = ["--quantization", "modelopt_fp4", "--moe-runner-backend"]
EVALUATION = ["--data-path", str(QUESTIONS), "--num-questions", "6", "--num-shots", "1", "--max-new-tokens", "24"]
QUESTION_COUNT, MAX_ANSWER_TOKENS = 24, 64
"""Number of questions for the shipped model, and maximum number of tokens of its answers. The tests ask the questions
with the shortest answers, because each token costs a forward pass."""
REGRESS = [sys.executable, "-m", "sglang_moe_reference.cli", "regress", "--require-identical"]
PATIENCE = 1800
"""Timeout of a request or a start in seconds. It is long enough for a machine that is ten times slower than usual."""
PORTS: list[int] = []
PRELOADED = str(ROOT / "test/standins/preloaded")
TOKENS = 8
"""Default number of tokens of an answer."""
PROMPTS = [[random.Random(length).randrange(3, 700) for _ in range(length)] for length in (9, 300, 40, 1)]


def _has_native_buffer() -> bool:
    """Return whether the installed engine has an output buffer of its own, without importing the engine."""
    where = util.find_spec("sglang")
    (root,) = where.submodule_search_locations
    return "moe_output_buffer_ctx" in (Path(root) / "srt/layers/moe/moe_runner/base.py").read_text()


NATIVE_BUFFER = _has_native_buffer()


def shortest_questions(questions: int = QUESTION_COUNT) -> list[str]:
    """Return the questions with the shortest answers from the shipped model's test set, as lines of JSON."""
    lines = (SHIPPED / "test.jsonl").read_text().splitlines()
    return sorted(lines, key=lambda line: len(json.loads(line)["answer"]))[:questions]


def child_environment(**more: str) -> dict[str, str]:
    kept = processes.variables()
    return {**kept, **environment.variables(kept), **more}


def prepend_to_path(*folders: str) -> str:
    """Return the value of ``PYTHONPATH`` with these folders in front."""
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
    """Make a server without starting it. The server writes observations of itself to ``folder / name``, and its log is
    ``folder / name.log``.
    """
    (folder / name).mkdir()
    # Several servers start at once, also those of another worker, so each server needs a port of its own.
    ours = int(os.environ.get("PYTEST_XDIST_WORKER", "gw0")[2:]) % 2
    PORTS.append(next(port for port in iter(free_port, None) if port % 2 == ours and port not in PORTS))
    given = environment.server_arguments(["--model-path", str(model), *SERVER, backend, *arguments])
    child = child_environment(**{OBSERVE.name: str(folder / name), **variables})
    # Servers with a GPU are not forked, because CUDA does not work in forks of a process that has used it. A forked
    # controller of data-parallel ranks did not start its ranks.
    if not machine.has_gpu() and not {"--dp-size", "--dp"} & set(arguments):
        child["PYTHONPATH"] = os.pathsep.join([PRELOADED, *filter(None, [child.get("PYTHONPATH")])])
    return Server(name, given, child, folder / f"{name}.log", timeout=PATIENCE, port=PORTS[-1])


@contextmanager
def start_servers(*servers: Server) -> Iterator[tuple[Server, ...]]:
    """Start several servers at the same time, and stop them at the end of the block.

    A single start uses only one core, so starting several servers at once saves time.
    """
    with ExitStack() as stack:
        with ThreadPoolExecutor() as pool:
            list(pool.map(stack.enter_context, servers))
        yield servers


def generate(url: str, prompt: list[int] | str, tokens: int = TOKENS) -> list[int]:
    """Send a prompt to a server and return the greedy answer, as token ids."""
    asked = {"text": prompt} if isinstance(prompt, str) else {"input_ids": prompt}
    body = {**asked, "sampling_params": {"temperature": 0, "max_new_tokens": tokens, "ignore_eos": True}}
    return httpx.post(f"{url}/generate", json=body, timeout=PATIENCE).raise_for_status().json()["output_ids"]


def ask_servers(*servers: Server, prompts: list[list[int]] = PROMPTS) -> list[list[list[int]]]:
    """Send the prompts to each server, one after another. Return the answers of each server."""
    with ThreadPoolExecutor() as pool:
        return list(pool.map(lambda server: [generate(server.url, prompt) for prompt in prompts], servers))


def answers_in_process(engine: Any, model: Any, prompts: list[list[int]] = PROMPTS) -> list[list[int]]:
    """Return a stock server's answers to the prompts, computed by the session's ``engine`` without a server."""
    # The prompts run one after another, because an answer may depend on its batch from 0.5.23 on.
    return [engine.generate(model, [prompt], TOKENS - 1)[0][0] for prompt in prompts]


def read_observations(server: Server) -> events.Process:
    """Return the observations that a server has written about itself."""
    return events.collect(server.log.with_suffix(""))


def check_figures(stock: events.Process, patched: events.Process, moe_layers: int, backend: str = ROUTED) -> None:
    """Check the output buffers of a stock and of a patched server.

    The stock server uses one buffer per layer, or a single buffer if the engine has an output buffer of its own. The
    patched server always uses a single buffer.
    """
    stock_buffers = 1 if NATIVE_BUFFER else moe_layers
    assert (stock.memory.moe_layers, stock.memory.output_buffers) == (moe_layers, stock_buffers)
    if not NATIVE_BUFFER:
        assert patched.memory.live_at_kernel_bytes < stock.memory.live_at_kernel_bytes
    assert stock.acted.acts == ()
    assert {status for _, status, _ in stock.changes} == {"not selected"}
    check_patched(patched, moe_layers, backend)


def check_patched(patched: events.Process, moe_layers: int, backend: str = ROUTED) -> None:
    """Check the observations of a patched server.

    The server uses one output buffer, all layers but the first offer their input, and each change has its expected
    status.
    """
    assert (patched.memory.moe_layers, patched.memory.output_buffers) == (moe_layers, 1)
    inputs = (counts.OFFERED, counts.AS_OUTPUT)
    offered, taken = ({act.layer for act in select_acts(patched.acted, count.name)} for count in inputs)
    assert offered == set(patched.acted.layers) - {
        0
    }  # the input of the first layer becomes the residual, so it is not dead
    assert taken == (offered if not NATIVE_BUFFER or backend == "flashinfer_cutedsl" else set())  # else by the engine
    assert {name: status for name, status, _ in patched.changes} == expected_statuses(backend)


COUNTS_BY_EFFECT = {
    SHARED_LAST: deferred_shared_experts.DEFERS,
    SCRATCH_IN_DEAD_INPUT: counts.AS_SCRATCH,
    COLUMNS: moe_workspace.COLUMNS,
    SHARED_BUFFERS: cutedsl_sizing.CHANGE.counts[0],
}
"""Counters (:class:`sglang_moe_patches.core.patch.Count`) by effect. The key is the text with which doctor's report
describes an effect of a change. The value counts this effect in a running server."""
NEED_CUDA = ("activation-segments", "moe-workspace")
"""Names of changes that apply only on a GPU."""


def check_doctor(report: dict[str, Any], ran: events.Process, backend: str) -> None:
    """Check that the report of ``doctor --model`` matches the observations of a server.

    :param report: doctor's report for the same model and flags, on a GPU.
    :param ran: observations of the server.
    """
    assert report["server"]["runner"] == backend
    rows = {row["name"]: row for row in report["changes"]}
    for name, status, _ in ran.changes:
        # kv-sizing is off without its variable, but doctor reports what it would do.
        if name not in (*NEED_CUDA, "kv-sizing"):
            assert rows[name]["status"] == status, rows[name]
    said = "; ".join(row["does"] for row in rows.values() if row["acts"])
    if "the engine itself runs the shared experts last here" in rows[deferred_shared_experts.CHANGE.name]["reason"]:
        said += SHARED_LAST  # the counter counts shared experts that run last, by the engine or by this package
    is_ours = (
        not NATIVE_BUFFER or backend == "flashinfer_cutedsl"
    )  # otherwise the engine itself takes the offered buffer
    outputs = {OUTPUT_IN_DEAD_INPUT: counts.AS_OUTPUT if is_ours else counts.OFFERED}
    for effect, count in {**COUNTS_BY_EFFECT, **outputs}.items():
        assert (effect in said) == bool(select_acts(ran.acted, count.name)), (effect, said, ran.acted)
    shuffled = select_acts(ran.acted, fp4_weights.CHANGE.counts[0].name)
    assert rows["fp4-weights"]["acts"] == bool(shuffled), rows["fp4-weights"]
    assert report["fit"]["token_bytes"] == pytest.approx(ran.memory.cache_token_bytes, rel=0.001)


class _Arguments(SimpleNamespace):
    """Arguments of a server. An argument that was not set has the value ``None``."""

    def __getattr__(self, name: str) -> None:
        return None


def expected_statuses(backend: str) -> dict[str, str]:
    """Return the expected status of each change in a server on the CPU: ``not needed here`` or ``off`` if the change is
    skipped on the CPU, else the status in docs/compatibility.json."""
    recorded = json.loads(pages.FOUND.read_text())[metadata.version("sglang")]["changes"]
    asked = _Arguments(device="cpu", moe_runner_backend=backend, moe_a2a_backend="none")
    skips = {change.name: change.skip(asked) for change in CHANGES}
    return {name: Plan.skipped(skip).status if skip else recorded[name][0] for name, skip in skips.items()}
