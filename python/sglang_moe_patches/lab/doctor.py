"""Facts for ``sglang-moe-patches doctor``: the installed engine, and the effect that each change would have on it."""

from __future__ import annotations

import dataclasses
import functools
import gc
import json
import os
import platform
import subprocess
import sys
from collections.abc import Iterable
from types import SimpleNamespace
from typing import Any

from sglang_moe_patches import __version__
from sglang_moe_patches.core import engine, patch
from sglang_moe_patches.core.machine import PLUGIN_NAME
from sglang_moe_patches.core.variables import STRICT, WrongValue
from sglang_moe_patches.lab import without_gpu
from sglang_moe_patches.registry import CHANGES


class EngineUnusable(RuntimeError):
    """Raised if the engine cannot be imported. The message says why."""


def examine() -> dict[str, Any]:
    """Collect facts about the engine in a new process, so that this process does not import the engine.

    If no CUDA driver is installed, the engine's kernels can be imported only with a stub driver (:mod:`.without_gpu`).

    :returns: the facts that ``doctor --json`` prints, as a dictionary for JSON.
    :raises ValueError: an environment variable has a value with which no server starts. The message is the server's
        error message.
    :raises EngineUnusable: the engine cannot be imported.
    """
    patch.check_environment(CHANGES)

    child = dict(os.environ)
    try:
        child |= without_gpu.variables(child)
    except without_gpu.UnusableEnvironment as error:
        raise EngineUnusable(str(error)) from error
    # -P: the process imports no module from the user's current folder.
    done = subprocess.run(
        [sys.executable, "-P", "-m", "sglang_moe_patches.lab.doctor"],
        env=child,
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        last = (done.stderr.strip() or "no output").splitlines()[-1]
        raise EngineUnusable(f"probing SGLang {engine.version()} failed: {last}")
    return json.loads(done.stdout.splitlines()[-1])


def _examine_here() -> dict[str, Any]:
    import torch

    names = patch.read_selected_names(CHANGES)
    ours = [variable.name for _, variable in patch.list_variables(CHANGES)]
    plans = [(change, _plan_of_a_server(change, names), patch.plan_for(change, names)) for change in CHANGES]
    return {
        "package": __version__,
        "engine": engine.version(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "gpus": [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())],
        "strict": STRICT.read(),
        "changes": [
            {
                "name": change.name,
                "summary": change.summary,
                "status": str(plan.status),
                "reason": plan.reason,
                "engine": {"status": str(probed.status), "reason": probed.reason},
            }
            for change, plan, probed in plans
        ],
        "variables": {name: os.environ[name] for name in (*ours, "SGLANG_PLUGINS") if name in os.environ},
        "unread": [*patch.describe_unread_variables(CHANGES), *_describe_wrong_values()],
    }


def _describe_wrong_values() -> list[str]:
    """Return one error message for each environment variable with a wrong value. The message names the change that
    reads the variable. If this change applies, a server with the wrong value does not start."""
    lines = []
    for change, variable in patch.list_variables(CHANGES):
        try:
            variable.read()
        except WrongValue as error:
            lines.append(f"{error}: with this value, a server in which {change} applies does not start")
    return lines


def _plan_of_a_server(change: patch.Change, names: set[str]) -> patch.Plan:
    """Return the plan of a change (its status and the reason) for a server without arguments on a GPU. The server has
    the environment variables of this process.

    :param names: names of the selected changes.
    """
    if engine.is_plugin_left_out():
        reason = (
            f"SGLANG_PLUGINS={os.environ['SGLANG_PLUGINS']} makes the engine load only other plugins; add {PLUGIN_NAME}"
        )
        return patch.Plan(patch.Status.NOT_SELECTED, reason)
    return patch.plan_for(change, names, _arguments_without_flags() if change.name in names else None)


@functools.cache
def _arguments_without_flags() -> Any:
    """Return the engine's server arguments with their default values, and with ``cuda`` as the device. Arguments whose
    value the engine would derive from the model keep their defaults, such as ``None``."""
    from sglang.srt.server_args import ServerArgs

    if dataclasses.is_dataclass(ServerArgs):
        fields: Iterable[Any] = dataclasses.fields(ServerArgs)
    else:  # releases from 0.5.2x on
        from msgspec import structs

        fields = structs.fields(ServerArgs)
    values = {
        field.name: field.default_factory() if callable(field.default_factory) else field.default for field in fields
    }
    return SimpleNamespace(**{**values, "device": "cuda"})


def show(report: dict[str, Any]) -> None:
    """Print the facts as a table on the terminal."""
    from rich.console import Console
    from rich.markup import escape
    from rich.table import Table

    console = Console()
    console.print(
        f"[bold]SGLang {report['engine']}[/], torch {report['torch']}, Python {report['python']}, "
        f"sglang-moe-patches {report['package']}"
    )
    console.print(f"GPU: {', '.join(report['gpus']) or 'none'}", markup=False)
    table = Table("change", "status", "what the change does, and why, or why it does not apply")
    colours = dict.fromkeys((*patch.ACTIVE, patch.Status.NATIVE), "green") | {patch.Status.UNSUPPORTED: "bold red"}
    for change in report["changes"]:
        colour = colours.get(change["status"], "dim")
        does = change["summary"] if change["status"] in patch.ACTIVE else ""
        words = "; ".join(filter(None, [does, change["reason"]])) or change["summary"]
        table.add_row(change["name"], f"[{colour}]{change['status']}[/]", escape(words))
    console.print(table)
    if report["variables"]:
        console.print("Variables in force:")
        for name, value in report["variables"].items():
            console.print(f"  {name}={value}", highlight=False, markup=False, soft_wrap=True)
    else:
        console.print(
            "No variable of sglang-moe-patches is set: every change is selected (SGLANG_MOE_PATCHES=all), and a server "
            "starts even if a change cannot be applied."
        )
    for line in report["unread"]:
        console.print(f"[bold yellow]{escape(line)}[/]", highlight=False, soft_wrap=True)


if __name__ == "__main__":
    gc.disable()  # Importing thousands of modules creates no garbage worth collecting.
    try:
        result = _examine_here()
    except (ValueError, ImportError) as problem:
        sys.exit(f"{type(problem).__name__}: {problem}")
    print(json.dumps(result))
