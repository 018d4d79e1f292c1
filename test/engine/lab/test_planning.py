"""``plan`` on the real engine: its rule asked of the engine's ServerArgs, both starts of a real server.

There is no GPU: the forwards are real, what they leave free is stood in for, as in ``test_kv_sizing.py``.
"""

from __future__ import annotations

import io
import json
import os
import signal
import threading
from pathlib import Path
from typing import Any

import pytest
from common import plugins
from conftest import DEFAULT_ENGINE_ONLY
from hypothesis import given, settings
from hypothesis import strategies as st
from rich.console import Console
from servers import ROOT, child_environment, on_path
from sglang_moe_patches.lab.servers.subject import PATCHED, Subject
from sglang_moe_patches.planning import plan, resolve, rule
from test_kv_sizing import STAND_INS
from tiny_moe.mutations import SHIPPED

MODEL = SHIPPED / "model"
GPU_MIB = 143_771.0
"""An H200's, as nvidia-smi says it."""
RESOLVED = ["--model-path", str(MODEL), "--device", "cuda"]
SERVED = [
    *("--quantization", "modelopt_fp4", "--moe-runner-backend", "flashinfer_trtllm_routed"),
    *("--device", "cpu", "--attention-backend", "torch_native", "--disable-overlap-schedule", "--disable-cuda-graph"),
    *("--max-total-tokens", "6144", "--chunked-prefill-size", "256", "--context-length", "2048"),
    *("--max-running-requests", "16", "--enable-mixed-chunk", "--sleep-on-idle"),
]


# --- the rule ---------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def warm() -> None:
    """What resolving imports, imported once; the environment stays as it is."""
    from sglang.srt.server_args import prepare_server_args

    before = dict(os.environ)
    resolve._resolved(prepare_server_args, RESOLVED, capacity=resolve._capacity(GPU_MIB))
    os.environ.clear()
    os.environ.update(before)


def engine_says(*arguments: str, memory: float = GPU_MIB) -> float:
    """The fraction that the engine's own ServerArgs resolves to."""
    from sglang.srt.server_args import prepare_server_args

    given_arguments = [*RESOLVED, *arguments]
    found = resolve._alone(
        lambda given: resolve._resolved(prepare_server_args, given, capacity=resolve._capacity(memory)), given_arguments
    )
    return found["resolved"]["mem_fraction_static"]


@pytest.mark.every_release
@pytest.mark.usefixtures("warm")
@settings(max_examples=2)
@given(chunk=st.sampled_from([1024, 4096, 8192, 16384]), tp=st.sampled_from([1, 8]), memory=st.floats(3e4, 2e5))
def test_the_terms_add_up_to_what_server_args_sets_aside(chunk: int, tp: int, memory: float) -> None:
    arguments = ["--chunked-prefill-size", str(chunk), "--tp-size", str(tp)]
    steps = [ways for _, ways in rule.INPUTS]
    found = rule.read(resolve.answer({"arguments": [*RESOLVED, *arguments], "gpu_memory_mib": memory, "steps": steps}))
    assert found.fraction == engine_says(*arguments, memory=memory)
    assert found.gpu_memory_mib == memory
    assert sum(term.mib for term in found.terms) == pytest.approx(memory * (1 - found.fraction))
    assert all(term.mib > 0 for term in found.terms)


@pytest.mark.every_release
@pytest.mark.usefixtures("warm")
def test_the_chunk_is_the_term_that_it_is_in_the_rule() -> None:
    # Below 60 GB the engine has no least reserve that would hide a part: 1.5 MiB a token, by its own comment.
    memory = 59_000.0
    steps = [ways for _, ways in rule.INPUTS]
    asked = {"arguments": [*RESOLVED, "--chunked-prefill-size", "8192"], "gpu_memory_mib": memory, "steps": steps}
    terms = {term.name: term.mib for term in rule.read(resolve.answer(asked)).terms}
    assert terms["prefill chunk beyond 2048 tokens"] == pytest.approx(1.5 * (8192 - 2048), abs=memory / 1000)


@pytest.mark.every_release
@pytest.mark.usefixtures("warm")
def test_a_refusal_is_told_from_an_answer_and_said_by_the_engine(capsys) -> None:
    found = resolve.answer({"arguments": [*RESOLVED, "--no-such-thing"], "gpu_memory_mib": GPU_MIB, "steps": [[], []]})
    assert found == {"base": {"error": ""}, "steps": [None, None]}
    assert capsys.readouterr().err.splitlines()[-1].endswith("unrecognized arguments: --no-such-thing")


@pytest.mark.every_release
@pytest.mark.product
def test_a_command_line_that_the_engine_refuses_is_refused_in_its_words() -> None:
    with pytest.raises(rule.NotResolved, match="unrecognized arguments: --no-such-thing"):
        rule.resolve([*RESOLVED, "--no-such-thing"], child_environment(), GPU_MIB)


# --- servers ----------------------------------------------------------------------------------------------------------

# A KV cache that a load on the CPU can fill, and a little more of it by the record.
MEMORY = STAND_INS.replace("CACHE = 100_000_000", "CACHE = 20_000_000").replace("MARGIN = 200_", "MARGIN = 275_")


class Planning:
    """The command on a machine that believes in its GPU."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, folder: Path, **variables: str) -> None:
        self.output, self.said = folder / "report", io.StringIO()
        plugins.write_module(folder / "plugin", "tells_memory", MEMORY)
        self.environment = child_environment(
            PYTHONPATH=on_path(str(folder / "plugin"), str(ROOT / "python")), **variables
        )
        monkeypatch.setattr(plan.machine, "has_gpu", lambda: True)
        monkeypatch.setattr(plan.decide, "stands_back", lambda *given: None)  # it is asked in the servers, too

    def run(self, verify_s: float = 0.0) -> Any:
        return plan.run(
            Subject(str(MODEL), tuple(SERVED)),
            plan.Goal(verify_s=verify_s),
            servers=(PATCHED,),
            environment=self.environment,
            output=self.output,
            console=Console(file=self.said, width=160),
            gpu_memory_mib=GPU_MIB,
        )


@DEFAULT_ENGINE_ONLY
@pytest.mark.product
def test_a_first_start_rehearses_and_the_second_is_verified(monkeypatch, tmp_path) -> None:
    planning = Planning(monkeypatch, tmp_path)
    found = planning.run(verify_s=60)
    said = planning.said.getvalue()
    (server,) = found.servers
    assert server.judged == ("held", ()), said
    assert found.exit_code == 0
    assert server.record.proven
    assert {"prefill chunk", "mixed chunk", "prompts of many lengths"} <= set(server.record.driven)
    assert server.second.tokens == 6144 > server.first.tokens
    assert server.second.fraction > server.first.fraction
    assert server.verified.retractions
    assert "about" in said
    assert "min left" in said
    written = json.loads((planning.output / "plan.json").read_text())
    assert (written["verdict"], written["servers"][0]["verdict"]) == ("held", "held")
    command = written["servers"][0]["command"]
    assert f"--mem-fraction-static {server.second.fraction:.4f}" in command
    assert "SGLANG_MOE_PATCHES_STRICT=1" in command
    assert "SGLANG_MOE_PATCHES=output-buffer," in command
    assert command in (planning.output / "plan.html").read_text()
    logs = ["1-patched.log", "2-patched.log"]
    assert sorted(path.name for path in planning.output.glob("*-patched.log")) == logs
    assert (planning.output / "patched.records.json").exists()


@DEFAULT_ENGINE_ONLY
@pytest.mark.product
def test_an_interrupted_plan_leaves_nothing_running(monkeypatch, tmp_path) -> None:
    import psutil

    planning = Planning(monkeypatch, tmp_path)
    before = {child.pid for child in psutil.Process().children(recursive=True)}
    threading.Timer(30, os.kill, (os.getpid(), signal.SIGINT)).start()
    with pytest.raises(KeyboardInterrupt):
        planning.run()
    assert {child.pid for child in psutil.Process().children(recursive=True)} <= before
