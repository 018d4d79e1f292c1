"""Tests of kv-sizing on servers that also use another feature: deterministic inference, larger pages, streaming
sessions or beam search. A stand-in replaces the GPU's driver.

Each server starts, answers as a stock server, shrinks when memory is short, and answers again.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import pytest
from common import plugins
from releases import ALL
from servers import PATIENCE, Server, ask_servers, generate, start_servers
from test_kv_sizing import (
    LONG,
    PROMPTS,
    RELEASE,
    STAND_INS,
    answers_at_once,
    capacities,
    log_lines,
    only_logged_size,
    sized_server,
    tokens,
    wait_for,
)

CHECKED = {"SGLANG_ENABLE_STRICT_MEM_CHECK_DURING_BUSY": "1", "SGLANG_DEBUG_MEMORY_POOL": "1"}
"""Environment variables that make the engine count free, cached and running tokens in every turn of its event loop. If
the counts do not add up, the server ends."""
INTERPRETED = {"TRITON_INTERPRET": "1"}
"""Environment variable that lets two of the engine's Triton kernels run on the CPU: the hash of a sampling seed, and up
to 0.5.13 the allocation of pages."""
ONE_A_TURN = {"SGLANG_SCHEDULER_MAX_RECV_PER_POLL": "1"}
"""Environment variable that makes a scheduler read only one request in each turn of its event loop."""
DRIVER = {"CACHE": "2000000", "GAIN": "150000000"}
"""Settings of the stand-in for the GPU's driver, in bytes. ``CACHE`` is the KV cache size by the engine's rule.
``GAIN`` is the size by which kv-sizing enlarges this KV cache. The three prompts ``LONG`` fit at the same time only
into the larger KV cache."""
NEW_TOKENS = 8


@dataclass(frozen=True)
class Flags:
    """Server arguments and environment variables of a server with kv-sizing."""

    arguments: list[str] = field(default_factory=list)
    variables: dict[str, str] = field(default_factory=dict)


SERVERS = {
    "deterministic": Flags(
        ["--enable-deterministic-inference", "--tokenizer-worker-num", "2", "--page-size", "1"],
        # If a tokenizer process spent more than this time on imports, the engine would end and restart it.
        {"SGLANG_UVICORN_WORKER_HEALTHCHECK_TIMEOUT": str(PATIENCE)},
    ),
    "pages of 16": Flags(["--page-size", "16"], ONE_A_TURN),
    # Each open session keeps one of the server's request slots. A stock server without a free slot answers no request,
    # even after a session is closed. The test opens three sessions.
    "sessions": Flags(["--page-size", "64", "--enable-streaming-session", "--max-running-requests", "4"]),
    "beams": Flags(["--page-size", "1"], ONE_A_TURN),
}
UNSUPPORTED = (
    {"beams": "this release has no beam search"}
    if ALL.index(RELEASE) < ALL.index("0.5.23")
    else {"deterministic": "this release cannot sample with a seed on the CPU"}
)
"""Servers of ``SERVERS`` that the tests skip with the installed release. The key is the server's name, and the value is
the reason."""
MARKS = {name: [pytest.mark.ci] for name in SERVERS}
MARKS["beams"].append(pytest.mark.every_release)
for name, reason in UNSUPPORTED.items():
    MARKS[name].append(pytest.mark.skip(reason=reason))


def post(running: Server, path: str, body: dict[str, Any]) -> Any:
    return httpx.post(f"{running.url}{path}", json=body, timeout=PATIENCE).raise_for_status().json()


def seeded_answers(running: Server) -> list[list[int]]:
    """Return one answer to each prompt, sampled with a seed. Only servers with deterministic inference use the seed."""
    sampling = {"temperature": 1, "sampling_seed": 7, "max_new_tokens": NEW_TOKENS, "ignore_eos": True}
    bodies = [{"input_ids": prompt, "sampling_params": sampling} for prompt in PROMPTS]
    return [post(running, "/generate", body)["output_ids"] for body in bodies]


def beams_of(running: Server) -> list[list[int]]:
    """Return the three best answers of a beam search to each prompt."""
    sampling = {"beam_width": 3, "n": 3, "max_new_tokens": NEW_TOKENS, "ignore_eos": True}
    bodies = [{"input_ids": prompt, "sampling_params": sampling} for prompt in PROMPTS]
    found = [post(running, "/generate", body)["meta_info"]["beam_results"] for body in bodies]
    return [each["output_ids"] for beams in found for each in beams]


class Session:
    """Streaming session of a server. Each of its requests continues the text of the requests before it."""

    def __init__(self, running: Server) -> None:
        self._running, self._text = running, list[int]()
        self._name = post(running, "/open_session", {"capacity_of_str_len": 1000, "streaming": True})

    def ask(self, prompt: list[int], stock: Server) -> None:
        """Append a prompt to the session, and check the answer. It must equal the stock server's answer to the
        session's whole text."""
        sampling = {"temperature": 0, "max_new_tokens": NEW_TOKENS, "ignore_eos": True}
        body = {"input_ids": prompt, "sampling_params": sampling, "session_params": {"id": self._name}}
        answer = post(self._running, "/generate", body)["output_ids"]
        self._text += prompt
        assert answer == generate(stock.url, self._text, NEW_TOKENS)
        self._text += answer


@pytest.fixture(scope="module")
def servers(request: pytest.FixtureRequest, tmp_path_factory, checkpoint) -> Iterator[dict[str, Server]]:
    """Yield running servers by name: the stock server, and servers of ``SERVERS``. A server is started only if this run
    of pytest has a test of it."""
    items = [
        item for item in request.session.items if item.path == request.path and not item.get_closest_marker("skip")
    ]
    kinds = {item.callspec.params["kind"] for item in items if isinstance(item, pytest.Function)}
    made = tmp_path_factory.mktemp("kv")
    plugins.write_module(made / "plugin", "tells_memory", STAND_INS["tells_memory"])
    place = made / "servers"
    place.mkdir()
    model = checkpoint(family="qwen3-moe")  # with this attention, the engine refuses deterministic DeepSeek
    # With a seed, only a deterministic server's answers repeat.
    seeds = ["--enable-deterministic-inference"] if "deterministic" in kinds else []
    variables = {"SGLANG_MOE_PATCHES": "none", **INTERPRETED}
    found = {"stock": sized_server("stock", model, place, *seeds, limited=True, **variables)}
    for name, flags in SERVERS.items():
        if name in kinds:
            variables = {**DRIVER, **CHECKED, **INTERPRETED, **flags.variables, "SHORT": str(place / f"short {name}")}
            found[name] = sized_server(name.replace(" ", "-"), model, place, *flags.arguments, **variables)
    with start_servers(*found.values()):
        yield found


@pytest.mark.parametrize("kind", [pytest.param(name, marks=MARKS[name]) for name in SERVERS])
def test_a_sized_server_with_flags_answers_as_stock_shrinks_and_answers_again(kind: str, servers: dict[str, Server]):
    stock, grown = servers["stock"], servers[kind]
    expected = ask_servers(stock, prompts=[*PROMPTS, *LONG])[0]

    def check_answers() -> None:
        assert ask_servers(grown, prompts=[*PROMPTS, *LONG])[0] == expected
        assert answers_at_once(grown, LONG) == expected[len(PROMPTS) :]
        if kind == "deterministic":
            assert seeded_answers(grown) == seeded_answers(stock)
        elif kind == "beams":
            assert beams_of(grown) == beams_of(stock)
        elif kind == "sessions":
            session = Session(grown)
            for prompt in (LONG[0][:100], LONG[1][:40]):
                session.ask(prompt, stock)

    assert not any("not reached" in line for line in log_lines(grown))
    now, rule, _ = only_logged_size(grown)
    assert now > 3 * len(LONG[0]) > rule
    assert {tokens(grown) for _ in range(8)} == {now}  # several processes answer if there are several tokenizers
    check_answers()
    if kind == "sessions":
        session = Session(grown)
        session.ask(PROMPTS[1], stock)
    Path(grown.environment["SHORT"]).write_text("110000000")  # bytes that leave 90 MB of the margin's 200 MB free
    wait_for(lambda: "memory was short" in log_lines(grown)[-1])
    assert rule < capacities(grown).pop() < now
    if kind == "sessions":
        session.ask(LONG[2][:40], stock)
    check_answers()
    assert httpx.get(f"{grown.url}/health", timeout=PATIENCE).status_code == 200
