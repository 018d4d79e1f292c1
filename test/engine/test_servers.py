"""Real servers, started the way a user starts them: equal answers, caught mutations, clean ends.

A start costs three imports of the engine, so what only asks shares one stock and one patched server (``pair``), several
servers start at once, and ``regress`` starts its own only where that is what is tested.
"""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from importlib import util
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest
from conftest import DEFAULT_ENGINE_ONLY
from sglang_moe_patches.reference import environment
from sglang_moe_patches.regression import observe
from sglang_moe_patches.regression.server import Server, ServerFailed, free_port
from tiny_moe.mutations import SHIPPED, plugin

ROOT = Path(__file__).parents[2]
QUESTIONS = ROOT / "data" / "gsm8k" / "test.jsonl"
ROUTED = "flashinfer_trtllm_routed"
SERVER = ["--quantization", "modelopt_fp4", "--moe-runner-backend"]
EVALUATION = ["--data-path", str(QUESTIONS), "--num-questions", "6", "--num-shots", "1", "--max-new-tokens", "24"]
ARITHMETIC = ["--data-path", str(SHIPPED / "test.jsonl"), "--num-questions", "24", "--num-shots", "1"]
ARITHMETIC += ["--max-new-tokens", "128"]
REGRESS = [sys.executable, "-m", "sglang_moe_patches.cli", "regress", "--reference-kernels"]
PATIENCE = 1800
"""Seconds that any request or start may take. None comes near it on a machine ten times slower than ours."""
PORTS: list[int] = []
PROMPTS = [[random.Random(length).randrange(3, 700) for _ in range(length)] for length in (9, 300, 40, 1)]


def _has_native_buffer() -> bool:
    """Whether this engine has an output buffer of its own. Looks without importing the engine."""
    where = util.find_spec("sglang")
    (root,) = where.submodule_search_locations
    return "moe_output_buffer_ctx" in (Path(root) / "srt/layers/moe/moe_runner/base.py").read_text()


NATIVE_BUFFER = _has_native_buffer()


def child_environment(**more: str) -> dict[str, str]:
    kept = {name: value for name, value in os.environ.items() if not name.startswith("SGLANG_MOE_PATCHES")}
    return {**kept, **environment.variables(kept), **more}


def on_path(*folders: str) -> str:
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


def server(name: str, model: Path, folder: Path, *arguments: str, backend: str = ROUTED, **variables: str) -> Server:
    """Not started yet. It records what it uses in ``folder / name``, and its log is ``folder / name.log``."""
    (folder / name).mkdir()
    PORTS.append(next(port for port in iter(free_port, None) if port not in PORTS))  # several start at once
    given = environment.server_arguments(["--model-path", str(model), *SERVER, backend, *arguments])
    child = child_environment(**{observe.VARIABLE: str(folder / name), **variables})
    return Server(name, given, child, folder / f"{name}.log", timeout=PATIENCE, port=PORTS[-1])


def both(model: Path, folder: Path, *arguments: str, backend: str = ROUTED) -> list[Server]:
    """Stock and patched."""
    return [
        server("stock", model, folder, *arguments, backend=backend, SGLANG_MOE_PATCHES="none"),
        server("patched", model, folder, *arguments, backend=backend),
    ]


@contextmanager
def started(*servers: Server) -> Iterator[tuple[Server, ...]]:
    """All at once: a start mostly waits for imports on one core."""
    with ExitStack() as stack:
        with ThreadPoolExecutor() as pool:
            list(pool.map(stack.enter_context, servers))
        yield servers


def generate(url: str, prompt: list[int] | str, tokens: int = 8) -> list[int]:
    """Greedy tokens."""
    asked = {"text": prompt} if isinstance(prompt, str) else {"input_ids": prompt}
    body = {**asked, "sampling_params": {"temperature": 0, "max_new_tokens": tokens, "ignore_eos": True}}
    return httpx.post(f"{url}/generate", json=body, timeout=PATIENCE).raise_for_status().json()["output_ids"]


def answers(*servers: Server, prompts: list[list[int]] = PROMPTS) -> list[list[list[int]]]:
    """What each server says to the prompts, asked one after the other."""
    with ThreadPoolExecutor() as pool:
        return list(pool.map(lambda server: [generate(server.url, prompt) for prompt in prompts], servers))


def figures(server: Server) -> dict[str, Any]:
    """What the server has recorded of itself."""
    return observe.collect(server.log.with_suffix(""))


def check_figures(stock: dict[str, Any], patched: dict[str, Any], moe_layers: int, backend: str = ROUTED) -> None:
    """Stock uses a buffer for each layer, or where it has a buffer of its own one; patched always uses one."""
    stock_buffers = 1 if NATIVE_BUFFER else moe_layers
    assert (stock["moe_layers"], stock["output_buffers"]) == (moe_layers, stock_buffers)
    assert (patched["moe_layers"], patched["output_buffers"]) == (moe_layers, 1)
    if not NATIVE_BUFFER:
        assert patched["live_at_kernel_bytes"] < stock["live_at_kernel_bytes"]
    assert {status for _, status, _ in stock["changes"]} == {"not selected"}
    statuses = {name: status for name, status, _ in patched["changes"]}
    unreached = {"mori-input-truncation", "nvfp4-weights" if backend == "flashinfer_cutedsl" else "cutedsl-sizing"}
    assert {statuses.pop(name) for name in unreached} <= {"not needed here", "native"}
    assert statuses.pop("output-buffer") == ("hardened" if NATIVE_BUFFER else "applied")
    assert set(statuses.values()) <= {"applied", "native", "hardened"}


# --- What a user runs: regress starts both ---------------------------------------------------------------------------


@pytest.fixture(scope="module")
def arithmetic(tmp_path_factory) -> Path:
    """The folder of the report on the shipped model, both servers started by ``regress``."""
    output = tmp_path_factory.mktemp("arithmetic") / "report"
    model = str(SHIPPED / "model")
    done = regress("--model", model, *ARITHMETIC, "--output", str(output), "--", *SERVER, ROUTED)
    assert done.returncode == 0, done.stdout + done.stderr
    return output


@pytest.mark.every_release
def test_a_model_that_can_do_arithmetic_loses_no_answer(arithmetic):
    results = json.loads((arithmetic / "report.json").read_text())["results"]
    assert results["accuracy"]["stock"] >= 0.85
    assert results["accuracy_can_tell"]
    assert results["token_identical"]


@pytest.mark.every_release
def test_the_report_has_both_runs_answers_memory_and_changes(arithmetic):
    report = json.loads((arithmetic / "report.json").read_text())
    stock, patched = report["runs"]["stock"], report["runs"]["patched"]
    assert [a["tokens"] for a in stock["answers"]] == [a["tokens"] for a in patched["answers"]]
    assert len(stock["answers"]) == 24
    check_figures(*({**run["memory"], "changes": run["changes"]} for run in (stock, patched)), moe_layers=3)
    assert (arithmetic / "report.html").stat().st_size > 10_000


# --- Pairs of their own: before the shared one, which then stays in memory to the end ---------------------------------


@DEFAULT_ENGINE_ONLY
@pytest.mark.parametrize(
    ("backend", "dense_layers", "arguments"),
    [
        ("flashinfer_trtllm", 0, ["--tp", "2"]),
        pytest.param("flashinfer_trtllm", 0, [], marks=pytest.mark.product),
        pytest.param(ROUTED, 0, ["--tp", "2"], marks=pytest.mark.product),
        pytest.param(ROUTED, 1, [], marks=pytest.mark.product),
    ],
)
def test_each_kind_of_server_answers_alike_and_patched_uses_one_buffer(
    checkpoint, tmp_path, backend, dense_layers, arguments
):
    with started(*both(checkpoint(dense_layers=dense_layers), tmp_path, *arguments, backend=backend)) as running:
        stock, patched = answers(*running)
    assert stock == patched
    check_figures(*map(figures, running), moe_layers=4 - dense_layers)


@DEFAULT_ENGINE_ONLY
def test_cutedsl_serves_a_prompt_beyond_the_budget_from_buffers_of_one_layer(checkpoint, tmp_path):
    """With these limits the stock engine ends on the prompt of 300 tokens (test_reference_cutedsl.py)."""
    limits = ["--chunked-prefill-size", "-1", "--max-prefill-tokens", "128"]
    # Stock sizes its buffers by the chunk: 2,048 tokens hold every forward here, and no prompt is cut.
    ample = ["--chunked-prefill-size", "2048", "--max-prefill-tokens", "2048"]
    model, backend = checkpoint(dense_layers=0), "flashinfer_cutedsl"
    stock = server("stock", model, tmp_path, *ample, backend=backend, SGLANG_MOE_PATCHES="none")
    patched = server("patched", model, tmp_path, *limits, backend=backend)
    with started(stock, patched):
        expected, found = answers(stock, patched)
    assert found == expected
    check_figures(figures(stock), figures(patched), moe_layers=4, backend=backend)
    assert figures(stock)["kernel_buffer_bytes"] > 4 * figures(patched)["kernel_buffer_bytes"] > 0
    assert patched.log_text().count("CuteDSL: one set of buffers") == 1
    assert "runs in slices" not in patched.log_text()


# --- One pair for all that only ask ----------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def pair(checkpoint, tmp_path_factory) -> Iterator[tuple[Server, Server]]:
    """Stock and patched, of a model whose first layer is MoE and has no residual."""
    with started(*both(checkpoint(dense_layers=0), tmp_path_factory.mktemp("pair"))) as running:
        yield running


@DEFAULT_ENGINE_ONLY
def test_stock_and_patched_answer_alike_and_patched_uses_one_buffer(pair):
    stock, patched = answers(*pair)
    assert stock == patched
    check_figures(*map(figures, pair), moe_layers=4)


WITHOUT_THE_ENGINES_BUFFER = """
import contextlib, wrapt
def switch_off(base):
    base.moe_output_buffer_ctx = lambda buf: contextlib.nullcontext()
wrapt.register_post_import_hook(switch_off, "sglang.srt.layers.moe.moe_runner.base")
"""


@pytest.mark.every_release
@pytest.mark.skipif(not NATIVE_BUFFER, reason="this engine release has no output buffer of its own")
def test_where_the_engines_buffer_answers_wrongly_the_patched_server_answers_as_without_it(pair, checkpoint, tmp_path):
    """`first_k_dense_replace: 0`, in-place norm as on a GPU: compared with the engine whose buffer is switched off."""
    off = plugin(tmp_path, WITHOUT_THE_ENGINES_BUFFER)
    without = server("off", checkpoint(dense_layers=0), tmp_path, PYTHONPATH=on_path(off), SGLANG_MOE_PATCHES="none")
    with started(without):
        for other, wrong in zip(pair, (True, False), strict=True):
            urls = ["--baseline-url", without.url, "--patched-url", other.url, "--require-identical"]
            done = regress(*urls, *EVALUATION, "--output", str(tmp_path / f"report-{other.name}"))
            assert done.returncode == (1 if wrong else 0), done.stdout + done.stderr
            assert ("of 6 answers differ" in done.stdout) == wrong


@DEFAULT_ENGINE_ONLY
def test_weights_updated_by_request_answer_as_on_the_stock_server(pair, checkpoint):
    first, second = checkpoint(dense_layers=0), checkpoint(dense_layers=0, seed=1)

    def answers_while_updating(server):
        answers = []
        with httpx.Client(timeout=PATIENCE) as client:
            for path in (first, second, first):
                # The engine answers before it takes note that nothing runs any more, and an update that comes in
                # between ends it ("Cache flush failed after updating weights").
                client.post(f"{server.url}/flush_cache", params={"timeout": PATIENCE}).raise_for_status()
                updated = client.post(f"{server.url}/update_weights_from_disk", json={"model_path": str(path)})
                assert updated.json()["success"], updated.text
                answers.append([generate(server.url, text, 16) for text in ("How many apples?", "2 + 2 =")])
        return answers

    with ThreadPoolExecutor() as pool:
        stock, patched = pool.map(answers_while_updating, pair)
    assert patched == stock
    assert stock[0] == stock[2] != stock[1]


@DEFAULT_ENGINE_ONLY
def test_concurrent_requests_get_the_answers_they_get_alone(pair):
    """64 requests in flight, of mixed lengths: one each, or for SOAK_SECONDS (`make soak` takes two minutes)."""
    seconds = float(os.environ.get("SOAK_SECONDS", "0"))
    _, patched = pair
    rng = random.Random(0)
    text = QUESTIONS.read_text()[:20000]
    requests = []
    for _ in range(24):
        start = rng.randrange(len(text) - 3000)
        length = rng.choice([10, 60, 200, 600])
        requests.append((text[start : start + length], rng.choice([1, 4, 16, 24])))
    alone = [generate(patched.url, *request) for request in requests]
    deadline = time.monotonic() + seconds
    checked, wrong = 0, []

    def keep_asking(index):
        nonlocal checked
        order = random.Random(index)
        asked = 0
        while not asked or time.monotonic() < deadline:
            which = order.randrange(len(requests))
            if generate(patched.url, *requests[which]) != alone[which]:
                wrong.append(which)
            asked += 1
        checked += asked

    with ThreadPoolExecutor(64) as pool:
        list(pool.map(keep_asking, range(64)))
    patched.check()
    print(f"{checked} answers checked")
    assert not wrong


# --- Mutations -------------------------------------------------------------------------------------------------------

OFFER_THE_RESIDUAL = """
from sglang_moe_patches.changes.output_buffer import lend as change
change.may_offer = lambda hidden_states, residual: True
make = change._make_model_init
def make_model_init(original):
    initialise = make(original)
    def __init__(self, *args, **kwargs):
        initialise(self, *args, **kwargs)
        setattr(self.layers[0], change._OFFERS, True)
    return __init__
change._make_model_init = make_model_init
"""

# What is offered is the MoE input itself, which the shared experts read after the routed ones have written.
SHARED_EXPERTS_ON_A_MUTATED_INPUT = """
from sglang_moe_patches.changes.output_buffer import lend as change
from sglang_moe_patches.handoff import moe_output_buffer_ctx
from sglang_moe_patches.patch import Plan
change.shares_storage = lambda a, b: False
plan = change.plan
def plan_offering_the_moe_input():
    install = plan().install
    def offering_the_moe_input(patcher):
        install(patcher)
        from sglang.srt.models.deepseek_v2 import DeepseekV2MoE
        def make(original):
            def forward(self, hidden_states, *args, **kwargs):
                with moe_output_buffer_ctx(hidden_states):
                    return original(self, hidden_states, *args, **kwargs)
            return forward
        patcher.wrap(DeepseekV2MoE, "forward", make)
    return Plan.applied(offering_the_moe_input)
change.plan = plan_offering_the_moe_input
"""

# Buffers of another shape are offered, as under data-parallel attention, where layer and experts see other tokens: to
# questions, not to the short forward with which the server warms up.
NO_SHAPE_CHECK = """
from sglang_moe_patches import handoff
from sglang_moe_patches.changes.output_buffer import lend as change
handoff.fits = lambda *args, **kwargs: True
make = change._make_layer_forward
def make_layer_forward(original, is_compiling):
    def forward(self, positions, hidden_states, forward_batch, residual, *args, **kwargs):
        rows = len(hidden_states) + (len(hidden_states) > 100)
        with handoff.moe_output_buffer_ctx(hidden_states.new_zeros(rows, hidden_states.shape[1])):
            return original(self, positions, hidden_states, forward_batch, residual, *args, **kwargs)
    return forward
change._make_layer_forward = make_layer_forward
"""


@DEFAULT_ENGINE_ONLY
@pytest.mark.parametrize(
    "mutation",
    [OFFER_THE_RESIDUAL, pytest.param(SHARED_EXPERTS_ON_A_MUTATED_INPUT, marks=pytest.mark.product)],
    ids=["offer the residual", "shared experts on a mutated input"],
)
def test_regress_calls_a_broken_guard_worse(pair, checkpoint, tmp_path, mutation):
    path = on_path(plugin(tmp_path, mutation))
    with started(server("mutated", checkpoint(dense_layers=0), tmp_path, PYTHONPATH=path)) as (mutated,):
        urls = ["--baseline-url", pair[0].url, "--patched-url", mutated.url]
        done = regress(*urls, *EVALUATION, "--output", str(tmp_path / "report"))
    assert done.returncode == 1, done.stdout + done.stderr
    assert "Patched is WORSE than stock" in done.stdout
    assert "of 6 answers differ" in done.stdout


@DEFAULT_ENGINE_ONLY
def test_regress_calls_a_patched_server_worse_that_fails_without_the_shape_check(pair, checkpoint, tmp_path):
    path = on_path(plugin(tmp_path, NO_SHAPE_CHECK))
    with started(server("mutated", checkpoint(dense_layers=0), tmp_path, PYTHONPATH=path)) as (mutated,):
        urls = ["--baseline-url", pair[0].url, "--patched-url", mutated.url]
        done = regress(*urls, *EVALUATION, "--output", str(tmp_path / "report"))
    assert done.returncode == 1, done.stdout + done.stderr
    assert "worse: the patched server failed where the stock one answered" in done.stderr
    assert "got torch.bfloat16" in mutated.log_text()  # the kernel's own complaint about its output


# --- Ends ------------------------------------------------------------------------------------------------------------


def processes_with(marker: str) -> list[psutil.Process]:
    found = []
    for process in psutil.process_iter():
        try:
            if process.environ().get("MARKER") == marker and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process)
        except (psutil.AccessDenied, psutil.NoSuchProcess):
            continue
    return found


@DEFAULT_ENGINE_ONLY
def test_ctrl_c_leaves_no_process_and_no_report(checkpoint, tmp_path):
    marker = uuid.uuid4().hex
    output = tmp_path / "report"
    arguments = ["--model", str(checkpoint()), *EVALUATION, "--output", str(output), "--"]
    process = subprocess.Popen(
        [*REGRESS, *arguments, *SERVER, ROUTED],
        env=child_environment(MARKER=marker),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        deadline = time.monotonic() + PATIENCE
        while len(processes_with(marker)) < 3:  # ours, the launcher, and a process that it has spawned
            assert process.poll() is None, process.stderr.read()
            assert time.monotonic() < deadline
            time.sleep(0.2)
        process.send_signal(signal.SIGINT)
        _, message = process.communicate(timeout=PATIENCE)
    finally:
        process.kill()
    assert process.returncode == 130
    assert message.strip() == "sglang-moe-patches: interrupted; the servers are stopped and no report was written"
    assert processes_with(marker) == []
    assert not output.exists()


@DEFAULT_ENGINE_ONLY
def test_a_server_that_cannot_start_gives_exit_2_with_its_log(checkpoint, tmp_path):
    marker = uuid.uuid4().hex
    output = tmp_path / "report"
    arguments = ["--model", str(checkpoint()), *EVALUATION, "--output", str(output), "--"]
    done = regress(*arguments, *SERVER, "no_such_backend", MARKER=marker)
    assert done.returncode == 2
    assert "the stock server ended with exit code" in done.stderr
    assert "invalid choice: 'no_such_backend'" in done.stderr
    assert processes_with(marker) == []
    assert [path.name for path in output.iterdir()] == ["stock.log"]  # the whole log, and no report


ANOTHER_PLUGIN = """
from sglang.srt.plugins.hook_registry import HookRegistry, HookType
HookRegistry.register(
    "sglang.srt.models.deepseek_v2.DeepseekV2DecoderLayer.forward",
    lambda original, *args, **kwargs: original(*args, **kwargs),
    HookType.AROUND,
)
"""


@DEFAULT_ENGINE_ONLY
def test_strict_ends_the_start_up_beside_a_plugin_that_has_wrapped_a_seam(checkpoint, tmp_path):
    path = on_path(plugin(tmp_path, ANOTHER_PLUGIN))
    strict = server("strict", checkpoint(), tmp_path, PYTHONPATH=path, SGLANG_MOE_PATCHES_STRICT="1")
    with pytest.raises(ServerFailed) as failure, strict:
        pass
    assert "SGLANG_MOE_PATCHES_STRICT=1 and a change cannot be applied" in failure.value.args[0]
    assert "output-buffer: unsupported, because" in strict.log_text()


@DEFAULT_ENGINE_ONLY
def test_an_unknown_change_ends_the_start_up(checkpoint, tmp_path):
    with (
        pytest.raises(ServerFailed, match="exit code 1") as failure,
        server("unknown", checkpoint(), tmp_path, SGLANG_MOE_PATCHES="output-bufer"),
    ):
        pass
    assert "unknown change 'output-bufer'; valid: all, none" in failure.value.args[0]
