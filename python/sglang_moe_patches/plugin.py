"""Entry point of this package: the engine calls :func:`register` once in each process.

If a plugin raises an exception, the engine logs it and starts without the plugin. :func:`register` therefore does
little: it checks the environment variables, and registers hooks for the imports of engine modules. If it fails in a
strict process (``SGLANG_MOE_PATCHES_STRICT=1``), it ends the process.

The changes are applied later, when the engine constructs its model runner (:func:`activate`):

- This happens only in processes that run a model, and before the model is built.
- An exception there ends the scheduler and the server, like any other failure to start.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable
from types import ModuleType
from typing import Any


def _end_if_strict(error: Exception) -> None:
    """End the process if ``SGLANG_MOE_PATCHES_STRICT=1``.

    This function uses no other module of this package, because the import of such a module may have failed.

    :param error: the exception that prevents all changes from being applied.
    :raises SystemExit: the variable is 1. The message contains ``error``.
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
    """Check this package's environment variables, and register hooks for the imports of engine modules.

    The engine calls this function through the entry point ``sglang.srt.plugins``.

    :raises SystemExit: a variable of this package has an invalid value, such as the misspelt name of a change, or
        another error occurs and ``SGLANG_MOE_PATCHES_STRICT=1``. A ``SystemExit`` ends the server's start. After an
        ``Exception``, the engine would start the server without the changes.
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
    """Register import hooks: functions that run when an engine module is imported.

    One hook wraps the model runner. The other hooks are the launcher hooks of the selected changes (the field
    ``launcher_hooks`` of a ``Change``).
    """
    names = patch.read_selected_names(CHANGES)
    for change in CHANGES:
        for module, hook in change.launcher_hooks if change.name in names else ():
            wrapt.register_post_import_hook(functools.partial(_run_launcher_hook, change.name, hook), module)
    wrapt.register_post_import_hook(_wrap_model_runner, MODEL_RUNNER_MODULE)
    if not engine.has_file("srt", "model_executor", "model_runner.py"):
        _report_no_model_runner(f"the engine has no {MODEL_RUNNER_MODULE}")


def _report_no_model_runner(reason: str) -> None:
    """Log that no change can be applied, because the engine's model runner is missing.

    :raises SystemExit: ``SGLANG_MOE_PATCHES_STRICT=1``.
    """
    message = f"{log.PREFIX}{reason}; no change can be applied"
    if variables.STRICT.read():
        raise SystemExit(message)
    log.logger.warning(message)


def _run_launcher_hook(change: str, hook: Callable[[ModuleType, patch.Patcher], None], module: ModuleType) -> None:
    """Run a change's launcher hook for the engine module that was just imported. If the hook fails, undo all its
    patches.
    """
    patcher = patch.Patcher()
    with patch.best_effort(f"patching {module.__name__} (change {change})"):
        try:
            hook(module, patcher)
        except Exception:
            patcher.undo()
            raise


def _wrap_model_runner(module: Any) -> None:
    """Wrap the constructor of the engine's model runner, so that it calls :func:`activate` first.

    :param module: the engine's module that defines ``ModelRunner``.
    """
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
    """Apply the selected changes in this process and log one summary line. A second call does nothing.

    :param server_args: the engine's ``ServerArgs``, or ``None`` if they are not known.
    :returns: the plan of every change, by the change's name.
    :raises patch.PatchError: ``SGLANG_MOE_PATCHES_STRICT=1`` and a selected change is unsupported.
    """
    global _plans
    if _plans is not None:
        return _plans
    plans = patch.apply(CHANGES, patch.read_selected_names(CHANGES), server_args)
    is_unsupported = any(plan.status is patch.Status.UNSUPPORTED for plan in plans.values())
    summary = "; ".join(f"{name}: {plan}" for name, plan in plans.items())
    if is_unsupported and variables.STRICT.read():
        raise patch.PatchError(f"{variables.STRICT.name}=1 and a change cannot be applied. {summary}")
    for warning in patch.describe_unread_variables(CHANGES):
        log.logger.warning(f"{log.PREFIX}{warning}")
    level = log.logger.warning if is_unsupported else log.logger.info
    level(f"sglang-moe-patches on SGLang {engine.version()}: {summary}")
    if folder := variables.OBSERVE.read():
        from sglang_moe_patches.lab.observers import forwards

        forwards.install(folder, plans)
    _plans = plans
    return plans
