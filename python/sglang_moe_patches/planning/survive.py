"""Does a server with one ``--mem-fraction-static`` survive the verification's load? What a plan is judged by.

    python -m sglang_moe_patches.planning.survive --model M --fraction 0.95 --only patched -- SERVER_ARGS

Exit code: 0 it does, 1 it does not, 2 it could not be tried.
"""

from __future__ import annotations

import json as json_module
import os
import traceback
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from sglang_moe_patches import extras


def main(
    model: Annotated[str, typer.Option()],
    fraction: Annotated[float, typer.Option(min=0.1, max=0.999)],
    server_args: Annotated[list[str] | None, typer.Argument()] = None,
    only: Annotated[str, typer.Option()] = "patched",
    seconds: Annotated[float, typer.Option(min=1)] = 120,
    output: Annotated[Path, typer.Option(help="Folder for the server's log.")] = Path("plan-survive"),
) -> None:
    """Print what came of it as one JSON object."""
    try:
        extras.require("plan")
    except extras.Missing as error:
        typer.echo(f"survive: {error}", err=True)
        raise typer.Exit(2) from None
    from rich.console import Console

    from sglang_moe_patches.planning import plan
    from sglang_moe_patches.servers.folders import keep, logs_in, scratch
    from sglang_moe_patches.servers.interrupts import Interrupts
    from sglang_moe_patches.servers.subject import Subject

    subject = Subject(model, tuple(server_args or ()))
    try:
        plan.check(subject, (only,), os.environ, output)
        with Interrupts() as interrupts, scratch() as logs:
            goal = plan.Goal(0, False, seconds)
            session = plan.Session(subject, goal, dict(os.environ), logs, Console(stderr=True), interrupts.check)
            try:
                found = session.verify(only, fraction, logprobs=False)
            finally:
                keep(logs_in(logs), output)
    except (plan.CannotPlan, *plan.ENDS_A_PLAN) as error:
        typer.echo(f"survive: {error}", err=True)
        raise typer.Exit(2) from None
    except Exception:  # 1 would say that the server does not survive
        traceback.print_exc()
        raise typer.Exit(2) from None
    typer.echo(json_module.dumps(asdict(found)))
    raise typer.Exit(0 if found.held else 1)


if __name__ == "__main__":
    typer.run(main)
