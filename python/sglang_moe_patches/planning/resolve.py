"""The engine's own resolver of server arguments, asked in a process of its own.

``python -m sglang_moe_patches.planning.resolve`` reads one JSON object from standard input and answers with one on
standard output: see :mod:`rule`, which asks. Importing the engine and resolving its arguments change the process (its
environment, its logging) and take seconds: nothing for the process that starts servers. It is not forked for each
resolution: on a machine with a GPU, importing the engine initialises CUDA, and a fork cannot use it. The environment is
put back after each, and what was asked first is asked again at the end: where that has another answer by then, what
came in between is not known.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import Any

from sglang_moe_patches.core import engine


def main() -> None:
    out = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # whatever the engine prints
    json.dump(answer(json.load(sys.stdin)), out)
    out.close()


def answer(asked: dict[str, Any]) -> dict[str, Any]:
    """``base``: what ``arguments`` resolve to; ``steps``: what they do after each change, see :func:`rule.read`.

    :param asked: ``arguments``; ``gpu_memory_mib``, told to the resolver instead of the device's, or ``None``;
        ``steps``, for each input the ways to change it, of which the first that resolves is taken and kept.
    """
    from sglang.srt.server_args import prepare_server_args

    capacity = _capacity(asked["gpu_memory_mib"])
    current: list[str] = asked["arguments"]
    resolve = partial(_alone, partial(_resolved, prepare_server_args, capacity=capacity))
    base = resolve(current)
    steps = []
    for alternatives in asked["steps"]:
        taken = None
        for change in alternatives if "error" not in base else ():
            changed = changed_arguments(current, change["without"], change["add"])
            found = resolve(changed)
            if "error" not in found:
                current, taken = changed, found
                break
        steps.append(taken)
    if "error" not in base and _fraction(resolve(asked["arguments"])) != _fraction(base):
        steps = [None] * len(steps)
    return {"base": base, "steps": steps}


def changed_arguments(arguments: list[str], without: list[str], add: list[str]) -> list[str]:
    """``arguments`` less each flag that is named in ``without``, with its values, and then ``add``.

    :param without: flags; one that ends in ``*`` stands for all that begin so.
    """
    kept, dropping = [], False
    for argument in arguments:
        if argument.startswith("--"):
            flag = argument.partition("=")[0]
            dropping = any(flag.startswith(name[:-1]) if name.endswith("*") else flag == name for name in without)
        if not dropping:
            kept.append(argument)
    return [*kept, *add]


def _capacity(given: float | None) -> Callable[[Any], float | None]:
    """The function by which the engine asks for the GPU's memory in MiB; with ``given``, told that instead."""
    import sglang.srt.utils.common as common

    if given is None:
        return common.get_device_memory_capacity
    with suppress(ImportError):
        import sglang.srt.arg_groups.memory_hook  # noqa: F401  where the rule lives from 0.5.18 on

    def told(device: Any = None) -> float:
        return given

    for name, module in list(sys.modules.items()):
        # By name, and by vars(): among the engine's dependencies are modules that are none, or make up any attribute.
        if name.startswith("sglang") and "get_device_memory_capacity" in vars(module):
            module.get_device_memory_capacity = told  # type: ignore[attr-defined]
    return told


def _resolved(prepare: Callable[[list[str]], Any], arguments: list[str], *, capacity: Any) -> dict[str, Any]:
    server_args = prepare(arguments)
    if hasattr(server_args, "resolve_once"):  # elsewhere construction resolves
        server_args.resolve_once()
    found = vars(engine.resolved(server_args))
    plain = {name: value for name, value in found.items() if isinstance(value, int | float | str | bool | None)}
    return {"resolved": plain, "gpu_memory_mib": capacity(found["device"])}


def _fraction(found: dict[str, Any]) -> Any:
    return found.get("resolved", {}).get("mem_fraction_static")


def _alone(work: Callable[[list[str]], dict[str, Any]], arguments: list[str]) -> dict[str, Any]:
    """``work(arguments)``, or why it could not be done; the environment is as before."""
    before = dict(os.environ)
    try:
        return work(arguments)
    except SystemExit:  # argparse has said why
        return {"error": ""}
    except Exception as error:
        return {"error": f"{type(error).__name__}: {error}"}
    finally:
        os.environ.clear()
        os.environ.update(before)


if __name__ == "__main__":
    main()
