"""Loads that differ from kv-sizing's rehearsal. A server must survive them with the KV cache size that it chose.

- :func:`overfill` sends more requests than the KV cache has room for. Prompts of growing length come first, because the
  allocator keeps most memory after them. Requests that together need a little more than the KV cache follow, until the
  engine retracts some of them. At the end, clients send the requests of :func:`send_mixed`.
- :func:`send_mixed` sends requests of random lengths, with shared prefixes and penalties. Some clients close their
  connection early.
- :func:`send_penalized` sends many requests with penalties, which decode in one batch.

``benchmark/memory/serving.py`` uses this module.
"""

from __future__ import annotations

import random
import re
import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor, wait
from typing import Any

from sglang_moe_patches.lab.servers.server import Server, ServerFailed
from sglang_moe_patches.memory.kv_sizing.phases import (
    PENALIZED_SAMPLING,
    SAMPLING,
    Limits,
    ServerFacts,
    Tokens,
    attention_ranks,
    derive_limits,
    growing_lengths,
)

from common.client import TIMEOUT_S, Client, Unanswered

RANDOM_CLIENTS = 48
"""Number of concurrent clients of :func:`send_mixed`."""
SHARED_PREFIXES = 6
"""Number of prefixes that the prompts of the random requests share."""
ABORTED_FRACTION = 0.15
"""Fraction of the random requests for which the client closes the connection early."""
PENALIZED_FRACTION = 0.2
"""Fraction of the random requests that have penalties and a logit bias."""
ABORT_TIMEOUT_S = 60.0
"""Seconds until the server must have ended all aborted requests."""
END_TIMEOUT_S = 240.0
"""Seconds until the last requests must have ended, if requests may not be aborted."""
MAX_NEW_TOKENS_UNABORTED = 256
"""Maximum new tokens of a request if requests may not be aborted. With more tokens, the load would not end in time."""
MIN_FILLING_REQUESTS = 256
"""Lowest number of requests that fill the KV cache, unless the server admits fewer. A KV cache of 1,000,000 tokens then
needs prompts of 3,828 tokens. If the prompts would be longer than a prefill chunk, they may become whole chunks. An
eighth of this number of requests is then enough.
"""
PROMPT_FRACTION = 0.98
"""Largest fraction of the KV cache that the prompts of :func:`filling_requests` take. The new tokens of these requests
need more than the rest of the KV cache.
"""
MAX_DECODED_TOKENS = 1024
"""Maximum new tokens of a random request. A filling request with a prompt of whole chunks needs at most about this many
new tokens. Otherwise its prompt gets one more chunk, because a prefill chunk takes less time than the decode steps.
"""
FILL_TIME_FRACTION = 0.75
"""Largest fraction of the time of :func:`overfill` during which requests fill the KV cache. This part of the load ends
earlier if the engine retracts a request. Random requests use the rest of the time."""
PENALIZED_PROMPT_TOKENS, PENALIZED_NEW_TOKENS = 64, 64
"""Prompt tokens and new tokens of a request of :func:`send_penalized`. Both numbers are small, so that all requests
decode in one batch."""
RETRACTED = re.compile(r"KV cache pool is full\. Retract")
USAGE = re.compile(r"token usage: ([0-9.]+\d)")
OUT_OF_MEMORY = re.compile(r"out of memory|OutOfMemory", re.IGNORECASE)


def overfill(
    server: Server, info: Mapping[str, Any], vocabulary: int, seconds: float, *, may_abort: bool = True
) -> dict[str, Any]:
    """Send more requests than the KV cache has room for.

    :param info: the server's ``/get_server_info``.
    :param vocabulary: number of token ids of the model.
    :param seconds: time in which clients send requests. The last requests may end later.
    :param may_abort: whether some clients close their connection early, and the last requests are aborted.
    :returns: numbers of answered and aborted requests, errors, and from the server's log: the number of retractions,
        the highest token usage, and whether memory ran out. If the server ends, that is one of the errors.
    """
    load, start_s = _Load(Client(server.url), info, vocabulary, may_abort), time.monotonic()

    def drive(log: Callable[[], str]) -> None:
        def is_full() -> bool:
            return time.monotonic() > start_s + FILL_TIME_FRACTION * seconds or RETRACTED.search(log()) is not None

        load.run(load.fill_cache, 1, is_full, server)
        load.run(load.send_random_requests, RANDOM_CLIENTS, lambda: time.monotonic() > start_s + seconds, server)

    return _outcome(server, load, drive)


def send_mixed(server: Server, info: Mapping[str, Any], vocabulary: int, seconds: float) -> dict[str, Any]:
    """Send requests of random lengths for ``seconds``. The KV cache has room for these requests.

    :returns: the same figures as :func:`overfill`.
    """
    load, until_s = _Load(Client(server.url), info, vocabulary, True), time.monotonic() + seconds
    return _outcome(
        server,
        load,
        lambda log: load.run(load.send_random_requests, RANDOM_CLIENTS, lambda: time.monotonic() > until_s, server),
    )


def send_penalized(server: Server, info: Mapping[str, Any], vocabulary: int, requests: int) -> dict[str, Any]:
    """Send ``requests`` short requests with penalties and a logit bias, which decode in one batch.

    Penalties need memory in proportion to the vocabulary.

    :returns: the same figures as :func:`overfill`.
    """
    load, tokens = _Load(Client(server.url), info, vocabulary, True), Tokens("penalized", vocabulary)
    prompts = [tokens.draw(PENALIZED_PROMPT_TOKENS) for _ in range(requests)]
    unset_stop = threading.Event()
    return _outcome(
        server,
        load,
        lambda log: load.send(
            prompts, PENALIZED_NEW_TOKENS, unset_stop, sampling=PENALIZED_SAMPLING, timeout_s=END_TIMEOUT_S
        ),
    )


def limits_of(info: Mapping[str, Any], vocabulary: int) -> Limits:
    """Return the limits of a server's requests and batches, derived by the same function as in kv-sizing's rehearsal.

    :param info: the server's ``/get_server_info``.
    """
    tokens, states = int(info["max_total_num_tokens"]), info.get("internal_states") or [{}]
    running = states[0].get("effective_max_running_requests_per_dp") or info.get("max_running_requests")
    return derive_limits(
        info,
        ServerFacts(fixed_bytes=0, page=int(info.get("page_size") or 1), vocabulary=vocabulary),
        cache_tokens=tokens,
        requests=int(running or MIN_FILLING_REQUESTS),
        input_tokens=int(info.get("max_req_input_len") or tokens - 6) - 1,
    )


def ranks_of(info: Mapping[str, Any]) -> int:
    """Return the number of data-parallel ranks of a server: ranks of data-parallel attention, or independent replicas.

    :param info: the server's ``/get_server_info``.
    """
    counts_others = info.get("enable_dp_attention") and int(info.get("attn_dp_size") or 1) == 1
    return attention_ranks(info) * (1 if counts_others else int(info.get("dp_size") or 1))


def _outcome(server: Server, load: _Load, drive: Callable[[Callable[[], str]], None]) -> dict[str, Any]:
    """Run a load and return its results; see :func:`overfill`.

    :param drive: function that runs the load. Its argument is a function that returns the part of the server's log that
        was written since the load began.
    """
    log_start = len(server.log_text())

    def log() -> str:
        return server.log_text()[log_start:]

    try:
        drive(log)
        load.send([Tokens("after", load.limits.vocabulary).draw(8)], 4, threading.Event())
    except ServerFailed as error:
        load.errors.insert(0, str(error).partition(". ")[0])
    return {
        "answered": load.answered,
        "aborted": load.aborted,
        "errors": load.errors[:3],
        "retractions": len(RETRACTED.findall(log_text := log())),
        "highest_usage": max(map(float, USAGE.findall(log_text)), default=0.0),
        "out_of_memory": OUT_OF_MEMORY.search(log_text) is not None,
    }


def filling_requests(limits: Limits) -> tuple[int, int, int]:
    """Choose requests that together need more tokens than the KV cache has.

    The engine admits a request if 70 % of its new tokens have room (``SGLANG_INIT_NEW_TOKEN_RATIO``). So it admits all
    but one or two of these requests, and later has to retract some. Prompts of whole chunks fill the KV cache fastest,
    because no prompt is prefilled in parts.

    :returns: number of requests, tokens of each prompt, new tokens of each request.
    """
    chunk = limits.largest_prefill_tokens
    several = max(MIN_FILLING_REQUESTS, -(-limits.cache_tokens * 5 // (limits.input_tokens * 4)))
    count = max(1, min(limits.requests, several))
    prompt = int(PROMPT_FRACTION * limits.cache_tokens / count)
    whole = chunk * max(1, -(-(limits.cache_tokens // limits.requests - MAX_DECODED_TOKENS) // chunk))
    fewer = min(limits.requests, int(PROMPT_FRACTION * limits.cache_tokens / whole))
    # Use whole chunks only if enough requests remain. The engine could not admit the last of a few large requests, and
    # too much of the KV cache would stay free.
    if chunk < prompt and fewer >= MIN_FILLING_REQUESTS // 8 and 2 * whole <= limits.input_tokens:
        count, prompt = fewer, whole
    prompt, share = max(1, min(prompt, limits.input_tokens * 9 // 10)), limits.cache_tokens / count
    return count, prompt, max(1, min(limits.input_tokens - prompt, int(share - prompt + 3 / count * share) + 1))


def random_length(draw: random.Random, longest: int) -> int:
    """Draw a length from 1 to ``longest``. All orders of magnitude are equally probable."""
    return max(1, min(longest, round(max(longest, 1) ** draw.random())))


class _Load:
    """Sender of requests to one server. It counts answers and errors, and many threads may use it."""

    def __init__(self, client: Client, info: Mapping[str, Any], vocabulary: int, may_abort: bool) -> None:
        limits = limits_of(info, vocabulary)
        self.client, self.limits, self.ranks, self.may_abort = client, limits, ranks_of(info), may_abort
        self.max_new_tokens = MAX_DECODED_TOKENS if may_abort else MAX_NEW_TOKENS_UNABORTED
        self.answered = self.aborted = 0
        self.errors: list[str] = []
        half = max(1, limits.input_tokens // 2)
        self._prefixes = [Tokens(f"overfill {n}", limits.vocabulary).draw(half) for n in range(SHARED_PREFIXES)]
        self._lock = threading.Lock()

    def run(
        self, work: Callable[[int, threading.Event], None], clients: int, is_over: Callable[[], bool], server: Server
    ) -> None:
        """Run clients in threads until ``is_over`` returns true. Then abort their requests, or wait until they end.

        :param work: function of a client. It takes the client's number, and an event that is set at the end.
        """
        stop, pool = threading.Event(), ThreadPoolExecutor(clients)
        try:
            running = [pool.submit(work, number, stop) for number in range(clients)]
            while not is_over():
                server.check()
                wait(running, 0.5)
        finally:
            stop.set()
            pool.shutdown(wait=False)
        timeout_s = ABORT_TIMEOUT_S if self.may_abort else END_TIMEOUT_S
        deadline = time.monotonic() + timeout_s
        while wait(running, 0.5).not_done:
            server.check()
            if time.monotonic() > deadline:
                self.errors.append(f"the last requests were not answered within {timeout_s:.0f} s")
                return
            if self.may_abort:
                self.client.abort_all()
        for future in running:
            future.result()

    def fill_cache(self, number: int, stop: threading.Event) -> None:
        """Send prompts of growing length. Then send requests that overfill the KV cache, again and again."""
        count, prompt, new_tokens = filling_requests(self.limits)
        if not self.may_abort:
            new_tokens = min(new_tokens, self.max_new_tokens)
        tokens = Tokens("fill", self.limits.vocabulary)
        for length in growing_lengths(self.limits.largest_prefill_tokens):
            if not stop.is_set():
                self.send([tokens.draw(length) for _ in range(self.ranks)], 1, stop)
        while not stop.is_set():
            self.send([tokens.draw(prompt) for _ in range(count * self.ranks)], new_tokens, stop)

    def send_random_requests(self, number: int, stop: threading.Event) -> None:
        """Send requests of random lengths, one after the other. Half of the prompts begin with a shared prefix."""
        draw, tokens = random.Random(number), Tokens(f"client {number}", self.limits.vocabulary)
        while not stop.is_set():
            prefix = draw.choice(self._prefixes) if draw.random() < 0.5 else []
            prefix = prefix[: random_length(draw, len(prefix))]
            prompt = prefix + tokens.draw(random_length(draw, self.limits.input_tokens // 2 - 1))
            new_tokens = min(random_length(draw, self.max_new_tokens), self.limits.input_tokens - len(prompt))
            closes_early = draw.random() < ABORTED_FRACTION and self.may_abort
            timeout_s = 0.05 + 2 * draw.random() if closes_early else None
            sampling = PENALIZED_SAMPLING if draw.random() < PENALIZED_FRACTION else SAMPLING
            self.send([prompt], max(new_tokens, 1), stop, timeout_s, sampling)

    def send(
        self,
        prompts: list[list[int]],
        new_tokens: int,
        stop: threading.Event,
        timeout_s: float | None = None,
        sampling: Mapping[str, Any] = SAMPLING,
    ) -> None:
        """Send prompts in one request, and count the answers or the error.

        :param stop: event after which errors do not count.
        :param timeout_s: seconds until the client closes the connection; ``None``: it stays open.
        """
        try:
            refusal = self.client.generate(prompts, new_tokens, sampling=sampling, timeout_s=timeout_s or TIMEOUT_S)
        except Unanswered as error:
            client_closed = not error.lost and timeout_s is not None
            with self._lock:
                self.aborted += len(prompts) if client_closed else 0
                if not client_closed and not stop.is_set():
                    self.errors.append(str(error))
            if error.lost:
                stop.wait(1)  # the server may have ended, which run() reports
            return
        with self._lock:
            if not refusal:
                self.answered += len(prompts)
            elif not stop.is_set():
                self.errors.append(refusal)
