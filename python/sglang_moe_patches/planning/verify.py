"""A load of another kind than the one that was planned with: what a server with the planned value must survive."""

from __future__ import annotations

import random
import re
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from typing import Any

from sglang_moe_patches.lab.observers.events import Event, Forward, Watch, of_kind
from sglang_moe_patches.lab.servers.client import LONGEST_S, Client, Unanswered, watched
from sglang_moe_patches.lab.servers.server import Server
from sglang_moe_patches.memory.kv_sizing.script import PENALIZED, SAMPLED, Configuration, Tokens, derive, rising
from sglang_moe_patches.planning import measure
from sglang_moe_patches.planning.measure import Verified

CLIENTS = 48
PREFIXES = 6
ABORTED = 0.15
"""Part of the requests whose client goes away."""
LOGPROBS = 0.2
PENALTIES = 0.2
"""Part of the requests that have them, and a logit bias."""
ABORTING_S = 60.0
"""Seconds in which a server answers what was aborted."""
ENDING_S = 20.0
"""Seconds in which a server that stopped answering is expected to end."""
ATTEMPTS = 3
"""Which prompts share a forward depends on when they arrive."""
RETRACTED = re.compile(r"KV cache pool is full\. Retract")
FILLERS = 256
"""Requests that fill the KV cache where it has fewer tokens than as many chunks."""
PROMPTS = 0.98
"""Part of the KV cache that their prompts fill; their new tokens want the rest, and more."""
DECODED = 1024
"""Tokens of each request up to which decodes fill the rest faster than one more chunk behind a prefix."""
FILLING = 0.75
"""Part of the time that filling the KV cache may take."""
FILLED = 0.95
"""From which token usage on the KV cache counts as full."""


def verify(
    server: Server,
    watch: Watch,
    processes: dict[str, list[Event]],
    c: Configuration,
    fraction: float,
    seconds: float,
    *,
    logprobs: bool,
    watching: Callable[[], None],
) -> Verified:
    """Prompts that grow, requests that overfill the KV cache until some are taken back, and then random ones.

    :param processes: what was recorded until now; added to.
    :param fraction: the server's ``--mem-fraction-static``.
    :param seconds: of all of it.
    :param watching: called about five times a second; what it raises ends the load.
    :raises ServerFailed: the server has ended.
    """
    load = _Load(Client(server.url), c, logprobs)
    begin, before = time.monotonic(), len(server.log_text())
    known = {name: len(events) for name, events in processes.items()}

    def look() -> None:
        watching()
        measure.add(processes, watch.new())

    def retracted() -> bool:
        return RETRACTED.search(server.log_text()[before:]) is not None

    for work, clients, part, over in ((load.fill, 1, FILLING, retracted), (load.random, CLIENTS, 1.0, lambda: False)):
        stop = threading.Event()
        pool = ThreadPoolExecutor(clients)
        try:
            running = [pool.submit(work, number, stop) for number in range(clients)]
            while time.monotonic() < begin + part * seconds and not over():
                look()
                wait(running, 0.5)
        finally:
            stop.set()
            load.client.abort_all()
            pool.shutdown(wait=False)
        # What was asked is aborted; clients that already got their answer end by themselves.
        deadline = time.monotonic() + ABORTING_S
        while wait(running, 0).not_done and time.monotonic() < deadline:
            look()
            load.client.abort_all()
            wait(running, 0.5)
        for future in running:
            if not future.done():
                load.errors.append(f"what was aborted is not answered after {ABORTING_S:.0f} s")
                break
            future.result()
    watched(load.after, look)
    look()
    during = {name: events[known.get(name, 0) :] for name, events in processes.items()}
    return judge(processes, during, server.log_text()[before:], load, c, fraction)


def prompt_logprobs(
    server: Server, watch: Watch, processes: dict[str, list[Event]], c: Configuration, watching: Callable[[], None]
) -> bool:
    """Have the log-probabilities of a whole chunk of prompt computed; whether every rank was seen to.

    :param processes: what was recorded until now; added to.
    :param watching: called about five times a second; what it raises ends it.
    :raises ServerFailed: the server has ended.
    """
    (phase,) = (each for each in derive(c, logprobs=True).phases if each.logprobs)
    client, reached = Client(server.url), set[str]()
    for attempt in range(ATTEMPTS):
        tokens = Tokens(f"{phase.name} {attempt}", c.vocabulary)
        prompts = [prompt for _ in range(c.ranks) for prompt in phase.prompts(tokens)]
        # Sampling comes after a forward and is seen when the next begins.
        short = [tokens.some(8) for _ in range(c.ranks)]
        try:
            for asked, new, wanted in ((prompts, phase.new_tokens, True), (short, 2, False)):
                watched(lambda a=asked, n=new, w=wanted: client.generate(a, n, logprobs=w), watching)  # type: ignore[misc]
        except Unanswered:
            _until_it_ends(watching)
            return False
        more = watch.new()
        measure.add(processes, more)
        reached |= {name for name, events in more.items() if any(map(phase.bound.met, of_kind(events, Forward)))}
        if reached >= measure.target_ranks(processes):
            return True
    return False


def _until_it_ends(watching: Callable[[], None]) -> None:
    """A server that stopped answering may be ending, which whoever watches it then says."""
    deadline = time.monotonic() + ENDING_S
    while time.monotonic() < deadline:
        watching()
        time.sleep(0.2)


class _Load:
    def __init__(self, client: Client, c: Configuration, logprobs: bool) -> None:
        self.client, self.c, self.logprobs = client, c, logprobs
        self.answered = self.aborted = 0
        self.errors: list[str] = []
        self._prefixes = [Tokens(f"verify {n}", c.vocabulary).some(c.input_tokens // 2) for n in range(PREFIXES)]
        self._lock = threading.Lock()

    def random(self, number: int, stop: threading.Event) -> None:
        """One client's requests: lengths over all orders of magnitude, half of them behind a prefix that others use."""
        draw, tokens = random.Random(number), Tokens(f"client {number}", self.c.vocabulary)
        while not stop.is_set():
            prefix = draw.choice(self._prefixes) if draw.random() < 0.5 else []
            prompt = prefix[: _length(draw, len(prefix))] + tokens.some(_length(draw, self.c.input_tokens // 2 - 1))
            new = min(_length(draw, 1024), self.c.input_tokens - len(prompt))
            asks = self.logprobs and draw.random() < LOGPROBS
            leaves = 0.05 + 2 * draw.random() if draw.random() < ABORTED else None
            sampling = PENALIZED if draw.random() < PENALTIES else SAMPLED
            self.ask([prompt], max(new, 1), stop, logprobs=asks, leaves=leaves, sampling=sampling)

    def fill(self, number: int, stop: threading.Event) -> None:
        """As many requests as together want a little more than the KV cache has, again and again.

        Before them what makes the allocator keep most; none of the requests is longer.
        """
        count, prompt, new = filling(self.c)
        tokens = Tokens("fill", self.c.vocabulary)
        for length in rising(self.c.largest):
            if not stop.is_set():
                self.ask([tokens.some(length) for _ in range(self.c.ranks)], 1, stop)
        while not stop.is_set():
            self.ask([tokens.some(prompt) for _ in range(count * self.c.ranks)], new, stop)

    def ask(
        self,
        prompts: list[list[int]],
        new_tokens: int,
        stop: threading.Event,
        *,
        logprobs: bool = False,
        leaves: float | None = None,
        sampling: Mapping[str, Any] = SAMPLED,
    ) -> None:
        """:param leaves: seconds after which the client goes away."""
        try:
            said = self.client.generate(
                prompts, new_tokens, sampling=sampling, logprobs=logprobs, patience_s=leaves or LONGEST_S
            )
        except Unanswered as error:
            left = not error.lost and leaves is not None
            with self._lock:
                self.aborted += len(prompts) if left else 0
                if not left and not stop.is_set():
                    self.errors.append(str(error))
            if error.lost:
                stop.wait(1)  # the server may be ending: who watches it says so
            return
        with self._lock:
            if not said:
                self.answered += len(prompts)
            elif not stop.is_set():
                self.errors.append(said)

    def after(self) -> None:
        """Does it still answer?"""
        self.ask([Tokens("after", self.c.vocabulary).some(8)], 4, threading.Event())


def filling(c: Configuration) -> tuple[int, int, int]:
    """(requests, tokens of each prompt, new tokens of each) that together want more than the KV cache has.

    The engine admits by 70 % of the new tokens (``SGLANG_INIT_NEW_TOKEN_RATIO``): all but a request or two come in, and
    want more than there is. Prompts of whole chunks fill it fastest: none is taken up behind a part of itself.
    """
    chunk = c.largest
    count = max(1, min(c.requests, max(FILLERS, -(-c.cache_tokens * 5 // (c.input_tokens * 4)))))
    prompt = int(PROMPTS * c.cache_tokens / count)
    whole = chunk * max(1, -(-(c.cache_tokens // c.requests - DECODED) // chunk))
    fewer = min(c.requests, int(PROMPTS * c.cache_tokens / whole))
    # Of a few large requests too large a part is not let in.
    if chunk < prompt and fewer >= FILLERS // 8 and 2 * whole <= c.input_tokens:
        count, prompt = fewer, whole
    prompt, share = max(1, min(prompt, c.input_tokens * 9 // 10)), c.cache_tokens / count
    return count, prompt, max(1, min(c.input_tokens - prompt, int(share - prompt + 3 / count * share) + 1))


def _length(draw: random.Random, most: int) -> int:
    """1 to ``most``, each order of magnitude as likely as the other."""
    return max(1, min(most, round(max(most, 1) ** draw.random())))


def judge(
    processes: Mapping[str, Sequence[Event]],
    during: Mapping[str, Sequence[Event]],
    log: str,
    load: Any,
    c: Configuration,
    fraction: float,
) -> Verified:
    """What came of a load that the server survived.

    :param during: the events that the load brought about.
    :param log: the server's.
    :param load: with ``answered``, ``aborted`` and ``errors``.
    """
    ranks = measure.target_ranks(processes)
    lowest = {}
    reasons = []
    ran_out = False
    for name in sorted(ranks):
        found = measure.rank(processes[name], 0)
        lowest[found.name] = found.lowest_free
        if not of_kind(during.get(name, ()), Forward):
            reasons.append(f"{found.name}: no forward was recorded, so it is not known what was free")
        if found.retries:
            ran_out = True
            often = "once" if found.retries == 1 else f"{found.retries} times"
            reasons.append(f"{found.name}: the allocator gave memory back and tried again {often}")
    if failure := measure.failure(processes):
        reasons.append(f"what was free is not known to the end: {failure}")
    reasons += [f"a request failed: {error}" for error in load.errors[:3]]
    retractions = len(RETRACTED.findall(log))
    usage = max((float(value) for value in re.findall(r"token usage: ([0-9.]+\d)", log)), default=0.0)
    not_seen = []
    if not retractions:
        not_seen.append("a retraction")
    if usage < FILLED and not retractions:
        not_seen.append(f"a full KV cache (at most {100 * usage:.0f} %)")
    return Verified(
        held=not reasons,
        fraction=fraction,
        reasons=tuple(reasons),
        lowest_free=lowest,
        requests=load.answered,
        aborted=load.aborted,
        retractions=retractions,
        usage=usage,
        cache_tokens=c.cache_tokens,
        not_seen=tuple(not_seen),
        ran_out=ran_out,
    )
