"""``plan`` on the real engine: its rule asked of the engine's ServerArgs, its phases seen by real servers.

There is no GPU: the forwards are real, what they need is stood in for (``test/standins/gpu``).
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
from conftest import DEFAULT_ENGINE_ONLY
from hypothesis import given, settings
from hypothesis import strategies as st
from rich.console import Console
from servers import ROOT, child_environment, on_path
from sglang_moe_patches.planning import plan, resolve, rule
from sglang_moe_patches.servers.subject import PATCHED, Subject
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
@settings(max_examples=2, deadline=None)
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


class Planning:
    """The command on a machine that believes in its GPU."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, folder: Path, **variables: str) -> None:
        self.output, self.said = folder / "report", io.StringIO()
        standin = {"PYTHONPATH": on_path(str(ROOT / "test" / "standins" / "gpu"), str(ROOT / "python"))}
        self.environment = child_environment(**standin, **variables)
        monkeypatch.setattr(plan.machine, "has_gpu", lambda: True)

    def run(self, *arguments: str, servers: tuple[str, ...] = (PATCHED,), verify_s: float = 0.0) -> Any:
        return plan.run(
            Subject(str(MODEL), (*SERVED, *arguments)),
            # The engine makes tensors of log-probabilities on "cuda" whatever the device.
            plan.Goal(1_000_000_000, logprobs=False, verify_s=verify_s),
            servers=servers,
            environment=self.environment,
            output=self.output,
            console=Console(file=self.said, width=160),
            gpu_memory_mib=GPU_MIB,
        )


PHASES = [
    "prefill chunk",
    "prefill chunk behind the longest prefix",
    "8 requests behind one prefix",
    "mixed chunk",
    "eager decode of 16 requests",
    "prompts of many lengths",
]
"""What the engine has without a GPU: no captured decode, no prompt log-probabilities."""


@DEFAULT_ENGINE_ONLY
@pytest.mark.product
def test_every_phase_is_seen_and_the_value_leaves_the_margin_and_is_verified(monkeypatch, tmp_path) -> None:
    planning = Planning(monkeypatch, tmp_path, STANDIN_TOKEN_MB="8")
    found = planning.run(verify_s=48)
    (server,) = found.servers
    for trial in server.trials:
        assert [(phase.name, phase.seen) for phase in trial.phases] == [(name, True) for name in PHASES]
        assert trial.not_driven == ()
        # 256 tokens of 8 MB.
        assert [(rank.name, rank.forwards) for rank in trial.ranks] == [("GPU 0", 256 * 8_000_000)]
    assert dict(server.default.settings)["chunked_prefill_size"] == 256
    # Those 2.048 GB and the margin of 1 GB, of the 99 GB before loading: 0.9692.
    (value,) = server.recommendations
    assert value.fraction == pytest.approx(0.969)
    assert server.default.fraction == pytest.approx(server.trials[0].fraction) != value.fraction
    assert value.verified.held, value.verified
    assert value.verified.not_seen == ()
    assert value.verified.requests > 10
    # The server that was measured with the value is the one that was verified, before it was driven.
    assert found.exit_code == 0
    written = json.loads((planning.output / "plan.json").read_text())
    assert written["servers"][0]["recommendations"][0]["fraction"] == value.fraction
    assert "mem-fraction-static 0.969" in (planning.output / "plan.html").read_text()
    assert len(list(planning.output.glob("*-patched.log"))) == len(server.trials)


@DEFAULT_ENGINE_ONLY
@pytest.mark.product
def test_an_interrupted_plan_leaves_nothing_running(monkeypatch, tmp_path) -> None:
    import psutil

    planning = Planning(monkeypatch, tmp_path, STANDIN_TOKEN_MB="8")
    before = {child.pid for child in psutil.Process().children(recursive=True)}
    threading.Timer(30, os.kill, (os.getpid(), signal.SIGINT)).start()
    with pytest.raises(KeyboardInterrupt):
        planning.run()
    assert {child.pid for child in psutil.Process().children(recursive=True)} <= before
