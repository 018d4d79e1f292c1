"""Comparison of two servers' answers, which should be equal. A statistical test decides whether a patch or the stock
engine causes differences.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from common.servers import prompt
from sglang_moe_patches.lab.servers.server import Server

LEVEL = 0.05


@dataclass(frozen=True)
class Request:
    """A request that all compared servers receive.

    :param tokens: number of tokens in the prompt. The prompt is random, with ``seed``.
    :param new_tokens: number of tokens to generate.
    :param together: whether the request is sent at the same time as all other requests with ``together``. Otherwise it
        is sent alone.
    :param more: additional fields of the request's body.
    """

    tokens: int
    seed: int
    new_tokens: int
    together: bool = False
    more: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Answer:
    """Answer of a server.

    :param tokens: generated token ids.
    :param logprobs: log-probability of each token.
    """

    tokens: list[int]
    logprobs: list[float]


@dataclass(frozen=True)
class Difference:
    """Difference between two servers' answers to one request.

    :param request: number of the request.
    :param asked: the request.
    :param position: position of the first token that differs in its id or log-probability.
    :param one: token and log-probability of the first server at this position; ``None``: its answer is shorter.
    :param other: token and log-probability of the second server at this position; ``None``: its answer is shorter.
    """

    request: int
    asked: Request
    position: int
    one: tuple[int, float] | None
    other: tuple[int, float] | None

    def __str__(self) -> str:
        return (
            f"request {self.request} ({self.asked.tokens} tokens, seed {self.asked.seed}"
            f"{', among others' if self.asked.together else ''}), token {self.position}: {self.one} and {self.other}"
        )


def make_simultaneous_requests(tokens: int, count: int) -> list[Request]:
    """Make requests that are sent at the same time. Each request asks for one token.

    :param tokens: number of tokens of each prompt. A prompt should fill a forward pass, so that the batches do not
        depend on the times at which requests arrive.
    """
    return [Request(tokens, seed, 1, together=True) for seed in range(1, count + 1)]


def ask(server: Server, requests: Sequence[Request]) -> list[Answer]:
    """Send requests to a server: first those without ``together``, one after another, then all others at the same
    time.
    """
    import httpx

    def send_request(request: Request) -> Answer:
        body = {
            "input_ids": prompt(request.tokens, request.seed),
            "sampling_params": {"temperature": 0, "max_new_tokens": request.new_tokens, "ignore_eos": True},
            "return_logprob": True,
            **request.more,
        }
        answer = httpx.post(f"{server.url}/generate", json=body, timeout=300).raise_for_status().json()
        return Answer(answer["output_ids"], [entry[0] for entry in answer["meta_info"]["output_token_logprobs"]])

    alone = {number: send_request(request) for number, request in enumerate(requests) if not request.together}
    numbers = [number for number, request in enumerate(requests) if request.together]
    with ThreadPoolExecutor(max(1, len(numbers))) as pool:
        answers = pool.map(lambda number: send_request(requests[number]), numbers)
        together = dict(zip(numbers, answers, strict=True))
    return [{**alone, **together}[number] for number in range(len(requests))]


def find_differences(requests: Sequence[Request], one: Sequence[Answer], other: Sequence[Answer]) -> list[Difference]:
    """Compare two servers' answers to the same requests, bit for bit. Return a difference for each unequal answer."""
    different = []
    for number, (request, a, b) in enumerate(zip(requests, one, other, strict=True)):
        sides = [list(zip(answer.tokens, answer.logprobs, strict=True)) for answer in (a, b)]
        longest = max(map(len, sides))
        padded = [[*side, *[None] * (longest - len(side))] for side in sides]
        where = next((at for at, (x, y) in enumerate(zip(*padded, strict=True)) if x != y), None)
        if where is not None:
            different.append(Difference(number, request, where, *(side[where] for side in padded)))
    return different


def save_mismatch(
    folder: Path, different: Sequence[Difference], answers: Mapping[str, Sequence[Answer]], files: Iterable[Path]
) -> Path:
    """Write the differences, all answers and copies of ``files`` into a new folder.

    :param answers: answers by the name of the server.
    :param files: logs and recorded forward passes.
    :returns: the folder. If ``folder`` exists, a number is added to its name.
    """
    number, new_folder = 1, folder
    while new_folder.exists():
        number += 1
        new_folder = folder.with_name(f"{folder.name}-{number}")
    new_folder.mkdir(parents=True)
    record = {
        "differences": [{**asdict(difference), "said": str(difference)} for difference in different],
        "answers": {name: [asdict(answer) for answer in server_answers] for name, server_answers in answers.items()},
    }
    (new_folder / "mismatch.json").write_text(json.dumps(record, indent=1))
    for file in files:
        if file.exists():
            (new_folder / file.name).write_bytes(file.read_bytes())
    return new_folder


def find_cause(stock: Sequence[bool], patched: Sequence[bool]) -> str:
    """Return a sentence that says whether a patch or the stock engine causes the differences.

    Fisher's exact test, one-sided, decides whether stock and patched differ more often than stock and stock.

    :param stock: for each comparison of two stock servers, whether any answer differed.
    :param patched: for each comparison of a stock and a patched server, whether any answer differed.
    """
    from scipy.stats import fisher_exact

    control, differing = sum(stock), sum(patched)
    counts = (
        f"stock and patched differed in {differing} of {len(patched)} runs, "
        f"stock and stock in {control} of {len(stock)}"
    )
    table = [[differing, len(patched) - differing], [control, len(stock) - control]]
    p = float(fisher_exact(table, alternative="greater").pvalue)
    if p < LEVEL:
        return f"OURS: {counts} (p = {p:.2g})"
    if control:
        return f"THE ENGINE'S: {counts}; it differs from itself, and patched no more often (p = {p:.2g})"
    if differing:
        return f"OPEN: {counts} (p = {p:.2g}); run it more often"
    most = [100 * (1 - LEVEL ** (1 / max(1, len(runs)))) for runs in (patched, stock)]
    return f"NOT SEEN: {counts}; with 95 % less than {most[0]:.0f} and {most[1]:.0f} % of runs do"
