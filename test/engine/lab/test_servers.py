"""Compare answers of real stock and patched servers, started as a user starts them.

A start costs three imports of the engine. So tests that only send requests share one stock and one patched server
(``pair``), and several servers start at once. ``test_arithmetic.py`` has servers that ``regress`` starts.
``test_server_kinds.py`` has servers of other kinds, and the end of servers. Two workers can run the files in parallel.
"""

from __future__ import annotations

import os
import random
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest
from common import plugins
from conftest import DEFAULT_ENGINE_ONLY, without_buffer
from servers import (
    EVALUATION,
    NATIVE_BUFFER,
    PATIENCE,
    QUESTIONS,
    SERVER,
    TRTLLM,
    answers_in_process,
    ask_servers,
    check_doctor,
    check_figures,
    generate,
    make_server,
    prepend_to_path,
    read_observations,
    regress,
    start_servers,
)
from sglang_moe_patches.lab.predict import model_report
from sglang_moe_patches.lab.servers.server import Server
from sglang_moe_reference import environment

pytestmark = pytest.mark.long("the start of the pair counts for the first test that uses it")

# --- One pair for tests that only send requests ----------------------------------------------------------------------

RANKS = ["--tp", "2"]
"""Server arguments of both servers of :func:`pair`, and of every server whose answers are compared with the pair's."""
FIRST = "the reference kernels are loaded first"
REGISTER = "from sglang_moe_reference.environment import register"


@pytest.fixture(scope="module")
def pair(checkpoint, tmp_path_factory) -> Iterator[tuple[Server, Server]]:
    """Running stock server and patched server of a model whose first layer is a MoE layer and has no residual.

    The patched server loads the plugin of the reference kernels before this package's plugin. All other servers of the
    tests load the plugins in the opposite order, so both orders are tested.
    """
    model, folder = checkpoint(dense_layers=0), tmp_path_factory.mktemp("pair")
    source = f'import sys\n"sglang_moe_patches.plugin" in sys.modules or print("{FIRST}")\n{REGISTER}\n'
    first = plugins.write_module(folder / "plugin", environment.PLUGIN_NAME, source)
    stock = make_server("stock", model, folder, *RANKS, backend=TRTLLM, SGLANG_MOE_PATCHES="none")
    patched = make_server("patched", model, folder, *RANKS, backend=TRTLLM, PYTHONPATH=prepend_to_path(str(first)))
    with start_servers(stock, patched) as running:
        yield running


@DEFAULT_ENGINE_ONLY
def test_stock_and_patched_give_equal_answers_and_patched_uses_one_buffer(pair):
    stock, patched = ask_servers(*pair)
    assert stock == patched
    check_figures(*map(read_observations, pair), moe_layers=4)
    assert FIRST in pair[1].log.read_text(errors="replace")


@DEFAULT_ENGINE_ONLY
def test_the_patched_server_runs_as_doctor_predicts(pair, checkpoint, monkeypatch):
    """The patched server of :func:`pair` must agree with doctor's report. `test_doctor_servers.py` checks other kinds
    of servers."""
    ask_servers(pair[1])
    monkeypatch.setenv("SGLANG_MOE_PATCHES", "all")
    report = model_report.examine(
        str(checkpoint(dense_layers=0)), [*SERVER, TRTLLM, *RANKS], "b200"
    )  # a GPU with NVFP4
    check_doctor(report, read_observations(pair[1]), TRTLLM)


@pytest.mark.every_release
@pytest.mark.skipif(not NATIVE_BUFFER, reason="this engine release has no output buffer of its own")
def test_the_patched_server_is_correct_for_a_model_with_which_the_native_buffer_is_wrong(engine, checkpoint, tmp_path):
    """The patched server gives right answers for a model with which the engine's own output buffer causes wrong
    answers. The model has `first_k_dense_replace: 0` and a norm that writes in place, as on a GPU. An engine without
    this buffer, in this process, computes the expected answers."""

    def ask_in_process():
        with engine.override_arguments(moe_runner_backend=TRTLLM):
            return answers_in_process(engine, engine.load(checkpoint(dense_layers=0)))

    with without_buffer():
        expected = ask_in_process()
    assert ask_in_process() != expected
    with start_servers(make_server("patched", checkpoint(dense_layers=0), tmp_path, backend=TRTLLM)) as (patched,):
        assert ask_servers(patched) == [expected]


def update_weights(server: Server, path: Path) -> None:
    """Replace the weights of a running server with the weights of a checkpoint."""
    with httpx.Client(timeout=PATIENCE, base_url=server.url) as client:
        # The engine answers a request before it notes that it is idle. If an update came in between, the server would
        # end with "Cache flush failed after updating weights".
        client.post("/flush_cache", params={"timeout": PATIENCE}).raise_for_status()
        updated = client.post("/update_weights_from_disk", json={"model_path": str(path)})
        assert updated.json()["success"], updated.text


@DEFAULT_ENGINE_ONLY
def test_answers_after_a_weight_update_equal_those_of_the_stock_server(pair, checkpoint):
    first, second = checkpoint(dense_layers=0), checkpoint(dense_layers=0, seed=1)

    def ask(server):
        return [generate(server.url, text, 16) for text in ("How many apples?", "2 + 2 =")]

    def answers_while_updating(server):
        rounds = [ask(server)]
        for path in (second, first):
            update_weights(server, path)
            rounds.append(ask(server))
        return rounds

    with ThreadPoolExecutor() as pool:
        stock, patched = pool.map(answers_while_updating, pair)
    assert patched == stock
    assert stock[0] == stock[2] != stock[1]


@DEFAULT_ENGINE_ONLY
def test_concurrent_requests_get_the_same_answers_as_single_requests(pair):
    """Each of 12 requests that are sent at once gets the same answer as alone. If SOAK_SECONDS is set, 64 clients send
    requests for that many seconds (`make soak` takes two minutes)."""
    seconds = float(os.environ.get("SOAK_SECONDS", "0"))
    in_flight = 64 if seconds else 12
    _, patched = pair
    rng = random.Random(0)
    text = QUESTIONS.read_text()[:20000]
    requests = []
    for _ in range(12):
        start = rng.randrange(len(text) - 3000)
        length = rng.choice([10, 60, 200, 600])
        requests.append((text[start : start + length], rng.choice([1, 4, 8])))
    alone = [generate(patched.url, *request) for request in requests]
    deadline = time.monotonic() + seconds
    checked, wrong = 0, []

    def send_requests(index):
        nonlocal checked
        order = random.Random(index)
        sent = 0
        while not sent or time.monotonic() < deadline:
            number = order.randrange(len(requests))
            if generate(patched.url, *requests[number]) != alone[number]:
                wrong.append(number)
            sent += 1
        checked += sent

    with ThreadPoolExecutor(in_flight) as pool:
        list(pool.map(send_requests, range(in_flight)))
    patched.check()
    print(f"{checked} answers checked")
    assert not wrong


@pytest.mark.ci
@DEFAULT_ENGINE_ONLY
def test_regress_calls_a_server_with_other_answers_worse(pair, checkpoint, tmp_path):
    """The second server has different weights, so its answers are wrong. ``test_tiny_moe.py`` tests broken patches."""
    stock, patched_server = pair
    update_weights(patched_server, checkpoint(dense_layers=0, seed=1))
    try:
        addresses = ["--baseline-url", stock.url, "--patched-url", patched_server.url, *EVALUATION]
        settings = ["--num-questions", "2", "--max-new-tokens", "4", "--output", str(tmp_path / "report")]
        process = regress(*addresses, *settings)
        assert process.returncode == 1, process.stdout + process.stderr
        assert "Patched is WORSE than stock" in process.stdout
        assert "2 of 2 answers differ" in process.stdout
    finally:
        update_weights(patched_server, checkpoint(dense_layers=0))
