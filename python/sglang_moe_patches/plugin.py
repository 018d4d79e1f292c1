"""``register()``: the engine calls it once per process, and nothing else lives here.

The engine logs an exception of a plugin and goes on without it, in the launcher and in every scheduler process alike.
So little is done there: ``register`` only checks the variables and asks to be told when the engine's model runner is
imported; where even that fails, a strict process ends. The changes are applied when a model runner is *constructed*,
which happens in exactly the processes that run a model, before the model is built, and inside the engine's own error
handling: an exception there ends the scheduler and the server like any other failure to start.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable
from types import ModuleType
from typing import Any


def _end_if_strict(error: Exception) -> None:
    """The variable is read without any module of ours: one of them may be what failed.

    :raises SystemExit: ``SGLANG_MOE_PATCHES_STRICT=1``, and nothing can be applied.
    """
    if os.environ.get("SGLANG_MOE_PATCHES_STRICT", "").strip() == "1":
        message = f"sglang-moe-patches: SGLANG_MOE_PATCHES_STRICT=1, and no change can be applied: {error!r}"
        raise SystemExit(" ".join(message.split())) from error


try:
    import wrapt

    from sglang_moe_patches.core import engine, log, patch, variables
    from sglang_moe_patches.registry import CHANGES
except Exception as error:
    _end_if_strict(error)
    raise

MODEL_RUNNER_MODULE = "sglang.srt.model_executor.model_runner"

_plans: dict[str, patch.Plan] | None = None


def register() -> None:
    """Entry point ``sglang.srt.plugins``.

    :raises SystemExit: a variable of ours is wrong, or anything fails and ``SGLANG_MOE_PATCHES_STRICT=1``. The engine
        swallows an ``Exception`` here, and a server that runs without the change that its user asked for by a misspelt
        name is what must not happen.
    """
    try:
        patch.check_environment(CHANGES)
    except ValueError as error:
        raise SystemExit(f"{log.PREFIX}{error}") from None
    try:
        _register_hooks()
    except Exception as error:
        _end_if_strict(error)
        raise


def _register_hooks() -> None:
    names = patch.selected_names(CHANGES)
    for change in CHANGES:
        for module, hook in change.launcher_hooks if change.name in names else ():
            wrapt.register_post_import_hook(functools.partial(_run_launcher_hook, change.name, hook), module)
    wrapt.register_post_import_hook(_wrap_model_runner, MODEL_RUNNER_MODULE)
    if not engine.has_file("srt", "model_executor", "model_runner.py"):
        _report_no_model_runner(f"the engine has no {MODEL_RUNNER_MODULE}")


def _report_no_model_runner(reason: str) -> None:
    message = f"{log.PREFIX}{reason}; no change can be applied"
    if variables.STRICT.read():
        raise SystemExit(message)
    log.logger.warning(message)


def _run_launcher_hook(change: str, hook: Callable[[ModuleType, patch.Patcher], None], module: ModuleType) -> None:
    """When its module is imported: the hook's wrappers stay for the life of the process, all of them or none."""
    patcher = patch.Patcher()
    with patch.best_effort(f"{module.__name__} (change {change})"):
        try:
            hook(module, patcher)
        except Exception:
            patcher.undo()
            raise


def _wrap_model_runner(module: Any) -> None:
    runner = getattr(module, "ModelRunner", None)
    if runner is None:
        _report_no_model_runner(f"{MODEL_RUNNER_MODULE} has no ModelRunner")
        return

    @patch.around
    def wrap_init(original: Callable[..., None], self: Any, *args: Any, **kwargs: Any) -> None:
        activate(kwargs.get("server_args") or next((a for a in args if hasattr(a, "moe_runner_backend")), None))
        original(self, *args, **kwargs)

    runner.__init__ = wrap_init(runner.__init__)


def activate(server_args: Any = None) -> dict[str, patch.Plan]:
    """Apply the selected changes in this process, once, and log one summary line.

    :raises patch.PatchError: ``SGLANG_MOE_PATCHES_STRICT=1`` and a selected change is unsupported.
    """
    global _plans
    if _plans is not None:
        return _plans
    plans = patch.apply(CHANGES, patch.selected_names(CHANGES), server_args)
    is_unsupported = any(plan.status is patch.Status.UNSUPPORTED for plan in plans.values())
    summary = "; ".join(f"{name}: {plan}" for name, plan in plans.items())
    if is_unsupported and variables.STRICT.read():
        raise patch.PatchError(f"{variables.STRICT.name}=1 and a change cannot be applied. {summary}")
    for line in patch.describe_unread_variables(CHANGES):
        log.logger.warning(f"{log.PREFIX}{line}")
    level = log.logger.warning if is_unsupported else log.logger.info
    level(f"sglang-moe-patches on SGLang {engine.version()}: {summary}")
    if folder := variables.OBSERVE.read():
        from sglang_moe_patches.lab.observers import forwards

        forwards.install(folder, plans)
    _plans = plans
    return plans
