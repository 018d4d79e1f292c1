"""Loads of another kind than a rehearsal's, which a sizing must survive.

:func:`overfill`: more requests than the KV cache holds. First prompts of growing length, after which the allocator
keeps most, then requests that together want a little more than the KV cache has, until the engine retracts some; then
clients with random lengths, shared prefixes, penalties and connections that close early, which alone are :func:`mixed`.
:func:`penalized`: one decode of many requests with penalties. Used by ``benchmark/memory/serving.py``.
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
    PENALIZED,
    SAMPLED,
    Limits,
    ServerFacts,
    Tokens,
    attention_ranks,
    derive_limits,
    growing_lengths,
)

from common.client import LONGEST_S, Client, Unanswered

RANDOM_CLIENTS = 48
SHARED_PREFIXES = 6
ABORTED_FRACTION = 0.15
"""Of the random requests, those whose client closes the connection."""
PENALIZED_FRACTION = 0.2
"""Of the random requests, those with penalties and a logit bias."""
ABORT_TIMEOUT_S = 60.0
"""Within which a server answers requests that were aborted."""
END_TIMEOUT_S = 240.0
"""Within which it answers those that end by their own length, because nothing may be aborted."""
MAX_NEW_TOKENS_UNABORTED = 256
"""Of each of these requests, so that a load ends in time."""
MIN_FILLING_REQUESTS = 256
"""Requests that fill the KV cache where it has fewer tokens than as many chunks."""
PROMPT_FRACTION = 0.98
"""Part of the KV cache that their prompts fill; their new tokens want the rest, and more."""
MAX_DECODED_TOKENS = 1024
"""Of each request: up to these, decodes fill the rest faster than one more chunk behind a prefix does."""
FILL_TIME_FRACTION = 0.75
"""Part of the time that filling the KV cache may take."""
PENALIZED_PROMPT_TOKENS, PENALIZED_NEW_TOKENS = 64, 64
"""Of each request that :func:`penalized` asks for: short, so that all of them decode at once."""
RETRACTED = re.compile(r"KV cache pool is full\. Retract")
USAGE = re.compile(r"token usage: ([0-9.]+\d)")
OUT_OF_MEMORY = re.compile(r"out of memory|OutOfMemory", re.IGNORECASE)


def overfill(
    server: Server, info: Mapping[str, Any], vocabulary: int, seconds: float, *, may_abort: bool = True
) -> dict[str, Any]:
    """Drive the load.

    :param info: the server's ``/get_server_info``.
    :param seconds: for all of it, at the most; the requests that are asked for by then may end later.
    :param may_abort: some clients go away early, and what is left at the end is aborted.
    :returns: answered and aborted requests, errors, retractions, the highest token usage and whether memory ran out, by
        the server's log. Where the server ends meanwhile, that is an error like others: what was measured before stays.
    """
    load, start_s = _Load(Client(server.url), info, vocabulary, may_abort), time.monotonic()

    def drive(log: Callable[[], str]) -> None:
        def is_full() -> bool:
            return time.monotonic() > start_s + FILL_TIME_FRACTION * seconds or RETRACTED.search(log()) is not None

        load.run(load.fill, 1, is_full, server)
        load.run(load.random, RANDOM_CLIENTS, lambda: time.monotonic() > start_s + seconds, server)

    return _outcome(server, load, drive)


def mixed(server: Server, info: Mapping[str, Any], vocabulary: int, seconds: float) -> dict[str, Any]:
    """The second half of :func:`overfill`, which leaves the KV cache room: clients with random lengths."""
    load, until_s = _Load(Client(server.url), info, vocabulary, True), time.monotonic() + seconds
    return _outcome(
        server, load, lambda log: load.run(load.random, RANDOM_CLIENTS, lambda: time.monotonic() > until_s, server)
    )


def penalized(server: Server, info: Mapping[str, Any], vocabulary: int, requests: int) -> dict[str, Any]:
    """So many short requests in one decode, each with penalties and a logit bias, which take memory by vocabulary."""
    load, tokens = _Load(Client(server.url), info, vocabulary, True), Tokens("penalized", vocabulary)
    prompts = [tokens.some(PENALIZED_PROMPT_TOKENS) for _ in range(requests)]
    never = threading.Event()
    return _outcome(
        server,
        load,
        lambda log: load.ask(prompts, PENALIZED_NEW_TOKENS, never, sampling=PENALIZED, patience_s=END_TIMEOUT_S),
    )


def limits_of(info: Mapping[str, Any], vocabulary: int) -> Limits:
    """What a server may be asked for at once.

    :param info: its ``/get_server_info``.
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
    """All data-parallel ranks of a server: of data-parallel attention, and replicas, which have nothing in common.

    :param info: its ``/get_server_info``.
    """
    counts_others = info.get("enable_dp_attention") and int(info.get("attn_dp_size") or 1) == 1
    return attention_ranks(info) * (1 if counts_others else int(info.get("dp_size") or 1))


def _outcome(server: Server, load: _Load, drive: Callable[[Callable[[], str]], None]) -> dict[str, Any]:
    """What became of a load, as :func:`overfill` returns it.

    :param drive: is given what reads the server's log since now.
    """
    log_start = len(server.log_text())

    def log() -> str:
        return server.log_text()[log_start:]

    try:
        drive(log)
        load.ask([Tokens("after", load.limits.vocabulary).some(8)], 4, threading.Event())
    except ServerFailed as error:
        load.errors.insert(0, str(error).partition(". ")[0])
    return {
        "answered": load.answered,
        "aborted": load.aborted,
        "errors": load.errors[:3],
        "retractions": len(RETRACTED.findall(said := log())),
        "highest_usage": max(map(float, USAGE.findall(said)), default=0.0),
        "out_of_memory": OUT_OF_MEMORY.search(said) is not None,
    }


def filling(limits: Limits) -> tuple[int, int, int]:
    """Choose requests that together want more than the KV cache has.

    The engine admits by 70 % of the new tokens (``SGLANG_INIT_NEW_TOKEN_RATIO``): all but a request or two come in, and
    want more than there is. Prompts of whole chunks fill it fastest: none is taken up behind a part of itself.

    :returns: requests, tokens of each prompt, new tokens of each.
    """
    chunk = limits.largest
    several = max(MIN_FILLING_REQUESTS, -(-limits.cache_tokens * 5 // (limits.input_tokens * 4)))
    count = max(1, min(limits.requests, several))
    prompt = int(PROMPT_FRACTION * limits.cache_tokens / count)
    whole = chunk * max(1, -(-(limits.cache_tokens // limits.requests - MAX_DECODED_TOKENS) // chunk))
    fewer = min(limits.requests, int(PROMPT_FRACTION * limits.cache_tokens / whole))
    # Of a few large requests too large a part is not let in.
    if chunk < prompt and fewer >= MIN_FILLING_REQUESTS // 8 and 2 * whole <= limits.input_tokens:
        count, prompt = fewer, whole
    prompt, share = max(1, min(prompt, limits.input_tokens * 9 // 10)), limits.cache_tokens / count
    return count, prompt, max(1, min(limits.input_tokens - prompt, int(share - prompt + 3 / count * share) + 1))


def random_length(draw: random.Random, longest: int) -> int:
    """1 to ``longest``, each order of magnitude as likely as the other."""
    return max(1, min(longest, round(max(longest, 1) ** draw.random())))


class _Load:
    def __init__(self, client: Client, info: Mapping[str, Any], vocabulary: int, may_abort: bool) -> None:
        limits = limits_of(info, vocabulary)
        self.client, self.limits, self.ranks, self.may_abort = client, limits, ranks_of(info), may_abort
        self.max_new_tokens = MAX_DECODED_TOKENS if may_abort else MAX_NEW_TOKENS_UNABORTED
        self.answered = self.aborted = 0
        self.errors: list[str] = []
        half = max(1, limits.input_tokens // 2)
        self._prefixes = [Tokens(f"overfill {n}", limits.vocabulary).some(half) for n in range(SHARED_PREFIXES)]
        self._lock = threading.Lock()

    def run(
        self, work: Callable[[int, threading.Event], None], clients: int, is_over: Callable[[], bool], server: Server
    ) -> None:
        """Run ``work`` with so many clients until it is over, then abort what is still asked for."""
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
                self.errors.append(f"the last requests are not answered after {timeout_s:.0f} s")
                return
            if self.may_abort:
                self.client.abort_all()
        for future in running:
            future.result()

    def fill(self, number: int, stop: threading.Event) -> None:
        """Growing prompts, then requests that overfill the KV cache, again and again."""
        count, prompt, new_tokens = filling(self.limits)
        if not self.may_abort:
            new_tokens = min(new_tokens, self.max_new_tokens)
        tokens = Tokens("fill", self.limits.vocabulary)
        for length in growing_lengths(self.limits.largest):
            if not stop.is_set():
                self.ask([tokens.some(length) for _ in range(self.ranks)], 1, stop)
        while not stop.is_set():
            self.ask([tokens.some(prompt) for _ in range(count * self.ranks)], new_tokens, stop)

    def random(self, number: int, stop: threading.Event) -> None:
        """One client's requests: lengths over all orders of magnitude, half of them behind a prefix that others use."""
        draw, tokens = random.Random(number), Tokens(f"client {number}", self.limits.vocabulary)
        while not stop.is_set():
            prefix = draw.choice(self._prefixes) if draw.random() < 0.5 else []
            prefix = prefix[: random_length(draw, len(prefix))]
            prompt = prefix + tokens.some(random_length(draw, self.limits.input_tokens // 2 - 1))
            new_tokens = min(random_length(draw, self.max_new_tokens), self.limits.input_tokens - len(prompt))
            goes_away = draw.random() < ABORTED_FRACTION and self.may_abort
            patience_s = 0.05 + 2 * draw.random() if goes_away else None
            sampling = PENALIZED if draw.random() < PENALIZED_FRACTION else SAMPLED
            self.ask([prompt], max(new_tokens, 1), stop, patience_s, sampling)

    def ask(
        self,
        prompts: list[list[int]],
        new_tokens: int,
        stop: threading.Event,
        patience_s: float | None = None,
        sampling: Mapping[str, Any] = SAMPLED,
    ) -> None:
        """:param patience_s: seconds after which the client closes the connection; ``None``: it does not."""
        try:
            refusal = self.client.generate(prompts, new_tokens, sampling=sampling, patience_s=patience_s or LONGEST_S)
        except Unanswered as error:
            client_left = not error.lost and patience_s is not None
            with self._lock:
                self.aborted += len(prompts) if client_left else 0
                if not client_left and not stop.is_set():
                    self.errors.append(str(error))
            if error.lost:
                stop.wait(1)  # the server may be ending: whoever watches it says so
            return
        with self._lock:
            if not refusal:
                self.answered += len(prompts)
            elif not stop.is_set():
                self.errors.append(refusal)
