"""The highest ``--mem-fraction-static`` that survives the verification's load, by bisection: what a plan is judged by.

    python -m sglang_moe_patches.planning.bisect --model M --low 0.93 --high 0.99 --only patched -- SERVER_ARGS

Each step starts a server and takes minutes. ``--low`` must survive and ``--high`` must not; both are tried.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Annotated

import typer

from sglang_moe_patches.planning import need


def highest(survives: Callable[[float], bool], low: float, high: float) -> tuple[float, float]:
    """(the highest fraction that was seen to survive, the lowest that was seen not to), ``need.STEP`` apart.

    :param survives: starts a server with a fraction.
    :raises ValueError: ``low`` does not survive, or ``high`` does.
    """
    if not survives(low):
        raise ValueError(f"{low:.3f} does not survive; give a lower --low")
    if survives(high):
        raise ValueError(f"{high:.3f} survives; give a higher --high")
    while high - low > 1.5 * need.STEP:
        middle = need.down((low + high) / 2)
        low, high = (middle, high) if survives(middle) else (low, middle)
    return low, high


def main(
    model: Annotated[str, typer.Option()],
    low: Annotated[float, typer.Option(min=0.1, max=0.99)],
    high: Annotated[float, typer.Option(min=0.1, max=0.999)],
    server_args: Annotated[list[str] | None, typer.Argument()] = None,
    only: Annotated[str, typer.Option()] = "patched",
    seconds: Annotated[float, typer.Option()] = 120,
    output: Annotated[Path, typer.Option()] = Path("plan-bisection"),
) -> None:
    """Print each fraction that was tried with what came of it, and at last the two that lie a step apart."""
    from rich.console import Console

    from sglang_moe_patches.planning import plan
    from sglang_moe_patches.planning.result import Recommendation
    from sglang_moe_patches.regression.folders import keep, logs_in, scratch
    from sglang_moe_patches.regression.interrupts import Interrupts

    subject = plan.Subject(model, tuple(server_args or ()), servers=(only,))
    plan.check(subject, os.environ, output)
    with Interrupts() as interrupts, scratch() as logs:
        session = plan.Session(
            subject, plan.Goal(0, False, seconds), dict(os.environ), logs, Console(), interrupts.check
        )

        def survives(fraction: float) -> bool:
            found = session.verify(only, Recommendation(False, fraction, fraction))
            lowest = min(found.lowest_free.values(), default=0)
            print(f"{fraction:.3f} {'held' if found.held else found.reasons} lowest free {lowest:,} {found.not_seen}")
            return found.held

        try:
            best, worst = highest(survives, low, high)
        finally:
            keep(logs_in(logs), output)
    print(f"survives: {best:.3f}; does not: {worst:.3f}")


if __name__ == "__main__":
    typer.run(main)
