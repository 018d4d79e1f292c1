"""What the engine sets aside for everything that is neither weights nor KV cache, by its own rule.

The rule is not restated: the engine's resolver answers (:mod:`resolve`), and a term is what the reserve falls by when
one more input is put to its smallest. So the terms add up to the reserve in every release, whatever its rule says.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any


class NotResolved(ValueError):
    """The engine does not accept the server arguments. The message is the engine's."""


@dataclass(frozen=True)
class Term:
    """One line of the reserve.

    :param mib: MiB; the engine rounds the fraction to three places, so each is uncertain by half a thousandth of the
        GPU's memory.
    """

    name: str
    mib: float


@dataclass(frozen=True)
class Rule:
    """What the engine resolves the user's arguments to.

    :param gpu_memory_mib: the GPU's memory as the resolver sees it; ``None`` where it does not know.
    :param fraction: ``--mem-fraction-static``.
    :param terms: of the reserve, see :attr:`reserve_mib`.
    :param resolved: every plain value of the resolved server arguments.
    """

    gpu_memory_mib: float | None
    fraction: float
    terms: tuple[Term, ...]
    resolved: Mapping[str, Any]

    @property
    def reserve_mib(self) -> float:
        """What is not to be weights or KV cache, of a GPU that is empty before loading."""
        return (self.gpu_memory_mib or 0.0) * (1 - self.fraction)


SMALLEST_CHUNK = "2048"


def _change(*add: str, without: tuple[str, ...] = ()) -> dict[str, list[str]]:
    return {"without": list(without), "add": list(add)}


_DATA_PARALLEL = ("--dp", "--dp-size", "--data-parallel-size", "--enable-dp-attention")
INPUTS: tuple[tuple[str, tuple[dict[str, list[str]], ...]], ...] = (
    (f"prefill chunk beyond {SMALLEST_CHUNK} tokens", (_change("--chunked-prefill-size", SMALLEST_CHUNK),)),
    (
        "prefill graphs",
        (_change("--disable-piecewise-cuda-graph"), _change("--cuda-graph-backend-prefill", "disabled")),
    ),
    (
        "decode graphs beyond one request",
        (_change("--cuda-graph-max-bs", "1"), _change("--cuda-graph-max-bs-decode", "1")),
    ),
    ("speculative decoding", (_change(without=("--speculative-*",)),)),
    ("data-parallel attention", (_change(without=_DATA_PARALLEL),)),
    ("parallel ranks beyond one", (_change("--tp-size", "1", "--pp-size", "1", "--ep-size", "1"),)),
)
"""The rule's inputs, each with how to put it to its smallest: the first way that this release accepts."""
REST = "all else, and the least that the engine sets aside"


def resolve(
    arguments: list[str],
    environment: Mapping[str, str],
    gpu_memory_mib: float | None = None,
    watching: Callable[[], None] = lambda: None,
    timeout: float = 600,
) -> Rule:
    """Ask the engine.

    :param arguments: of the server, the model among them, without ``--mem-fraction-static``.
    :param environment: of the process that resolves.
    :param gpu_memory_mib: what to tell the resolver the GPU's memory is; ``None``: it asks the device itself.
    :param watching: called about five times a second; what it raises ends the resolver.
    :param timeout: seconds that it may take.
    :raises NotResolved: the engine refuses the arguments, or does not answer.
    """
    asked = {"arguments": arguments, "gpu_memory_mib": gpu_memory_mib, "steps": [ways for _, ways in INPUTS]}
    command = [sys.executable, "-W", "ignore", "-m", "sglang_moe_patches.planning.resolve"]
    given: str | None = json.dumps(asked)
    pipe = subprocess.PIPE
    deadline = time.monotonic() + timeout
    with subprocess.Popen(command, env=dict(environment), text=True, stdin=pipe, stdout=pipe, stderr=pipe) as process:
        try:
            while True:
                try:
                    out, errors = process.communicate(given, timeout=min(timeout, 0.2))
                    break
                except subprocess.TimeoutExpired:
                    given = None  # is on its way
                watching()
                if time.monotonic() > deadline:
                    raise NotResolved(f"the engine's resolver did not answer within {timeout:.0f} s")
        except BaseException:
            process.kill()
            raise
    found = json.loads(out) if out else {"base": {"error": ""}}
    if "error" in found["base"]:
        said = [line for line in errors.splitlines() if line.strip()] or [f"exit code {process.returncode}"]
        raise NotResolved(f"the engine refuses the server arguments: {found['base']['error'] or said[-1]}")
    return read(found)


def read(found: Mapping[str, Any]) -> Rule:
    """The rule from the resolver's answer.

    :param found: ``base`` and, in the order of ``INPUTS``, ``steps``, each from the one before it; ``None`` where this
        release accepts no way to change that input, whose part then stays in what is left.
    """
    base = found["base"]
    memory = base["gpu_memory_mib"]
    fraction = float(base["resolved"]["mem_fraction_static"])
    terms = []
    left = reserve = (memory or 0.0) * (1 - fraction)
    for (name, _), step in zip(INPUTS, found["steps"], strict=True):
        if step is None:
            continue
        now = (memory or 0.0) * (1 - float(step["resolved"]["mem_fraction_static"]))
        # What the rounding of the fraction leaves of nothing is nothing.
        if abs(left - now) > reserve * 1e-9:
            terms.append(Term(name, left - now))
            left = now
    return Rule(memory, fraction, (*terms, Term(REST, left)), base["resolved"])
