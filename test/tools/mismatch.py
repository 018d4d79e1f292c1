"""Answers of two servers that ought to be equal: where they differ, and whether stock or our patch did it."""

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
class Asked:
    """A request.

    :param tokens: of its prompt, which follows from them and ``seed``.
    :param together: sent at once with the others that are.
    :param more: of its body.
    """

    tokens: int
    seed: int
    new_tokens: int
    together: bool = False
    more: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Answer:
    """:param logprobs: of each token."""

    tokens: list[int]
    logprobs: list[float]


@dataclass(frozen=True)
class Difference:
    """An answer that is not the other server's.

    :param request: its number.
    :param position: of the first token that differs, or whose log-probability does.
    :param one: token and log-probability there, ``None`` beyond its end; ``other``: the other server's.
    """

    request: int
    asked: Asked
    position: int
    one: tuple[int, float] | None
    other: tuple[int, float] | None

    def __str__(self) -> str:
        return (
            f"request {self.request} ({self.asked.tokens} tokens, seed {self.asked.seed}"
            f"{', among others' if self.asked.together else ''}), token {self.position}: {self.one} and {self.other}"
        )


def at_once(tokens: int, count: int) -> list[Asked]:
    """Prompts as long as a forward can be, for one token each: no batch depends on when they arrive."""
    return [Asked(tokens, seed, 1, together=True) for seed in range(1, count + 1)]


def ask(server: Server, requests: Sequence[Asked]) -> list[Answer]:
    """Those that are sent alone one after the other, then the others at once."""
    import httpx

    def one(asked: Asked) -> Answer:
        body = {
            "input_ids": prompt(asked.tokens, asked.seed),
            "sampling_params": {"temperature": 0, "max_new_tokens": asked.new_tokens, "ignore_eos": True},
            "return_logprob": True,
            **asked.more,
        }
        answer = httpx.post(f"{server.url}/generate", json=body, timeout=300).raise_for_status().json()
        return Answer(answer["output_ids"], [entry[0] for entry in answer["meta_info"]["output_token_logprobs"]])

    alone = {number: one(asked) for number, asked in enumerate(requests) if not asked.together}
    others = [number for number, asked in enumerate(requests) if asked.together]
    with ThreadPoolExecutor(max(1, len(others))) as pool:
        together = dict(zip(others, pool.map(lambda number: one(requests[number]), others), strict=True))
    return [{**alone, **together}[number] for number in range(len(requests))]


def differences(requests: Sequence[Asked], one: Sequence[Answer], other: Sequence[Answer]) -> list[Difference]:
    """Of two servers' answers to the same requests, bit for bit."""
    different = []
    for number, (asked, a, b) in enumerate(zip(requests, one, other, strict=True)):
        sides = [list(zip(answer.tokens, answer.logprobs, strict=True)) for answer in (a, b)]
        longest = max(map(len, sides))
        padded = [[*side, *[None] * (longest - len(side))] for side in sides]
        where = next((at for at, (x, y) in enumerate(zip(*padded, strict=True)) if x != y), None)
        if where is not None:
            different.append(Difference(number, asked, where, *(side[where] for side in padded)))
    return different


def keep(
    folder: Path, different: Sequence[Difference], answers: Mapping[str, Sequence[Answer]], files: Iterable[Path]
) -> Path:
    """Write what differs, every answer by its server, and copies of ``files`` (logs, forwards) to a new ``folder``.

    :returns: it, or where it is there already the next one that is not.
    """
    number, new_folder = 1, folder
    while new_folder.exists():
        number += 1
        new_folder = folder.with_name(f"{folder.name}-{number}")
    new_folder.mkdir(parents=True)
    record = {
        "differences": [{**asdict(one), "said": str(one)} for one in different],
        "answers": {name: [asdict(answer) for answer in given] for name, given in answers.items()},
    }
    (new_folder / "mismatch.json").write_text(json.dumps(record, indent=1))
    for file in files:
        if file.exists():
            (new_folder / file.name).write_bytes(file.read_bytes())
    return new_folder


def whose(stock: Sequence[bool], patched: Sequence[bool]) -> str:
    """Whether stock or our patch caused what differs: a sentence.

    :param stock: of each run of stock against stock, whether any answer differed; ``patched``: stock against patched.

    Fisher's exact test, one-sided: does patched differ from stock more often than stock does from itself?
    """
    from scipy.stats import fisher_exact

    control, ours = sum(stock), sum(patched)
    counts = (
        f"stock and patched differed in {ours} of {len(patched)} runs, stock and stock in {control} of {len(stock)}"
    )
    table = [[ours, len(patched) - ours], [control, len(stock) - control]]
    p = float(fisher_exact(table, alternative="greater").pvalue)
    if p < LEVEL:
        return f"OURS: {counts} (p = {p:.2g})"
    if control:
        return f"THE ENGINE'S: {counts}; it differs from itself, and patched no more often (p = {p:.2g})"
    if ours:
        return f"OPEN: {counts} (p = {p:.2g}); run it more often"
    most = [100 * (1 - LEVEL ** (1 / max(1, len(runs)))) for runs in (patched, stock)]
    return f"NOT SEEN: {counts}; with 95 % less than {most[0]:.0f} and {most[1]:.0f} % of runs do"
