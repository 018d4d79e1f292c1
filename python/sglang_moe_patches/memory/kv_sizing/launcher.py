"""A hook in the launcher, before the engine fills in ``--mem-fraction-static``: whether it was given."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable
from types import ModuleType
from typing import Any

from sglang_moe_patches.core.patch import Patcher
from sglang_moe_patches.memory.kv_sizing import eligibility
from sglang_moe_patches.memory.kv_sizing.eligibility import KV_SIZING

MARK = "_moe_patches_fraction_by_rule"
"""Attribute of a ``ServerArgs`` that came without a fraction. It goes with it to the schedulers, which take it off."""


def hook_server_args(module: ModuleType, patcher: Patcher) -> None:
    """Have ``ServerArgs`` remember whether ``--mem-fraction-static`` was given, where the engine does not by itself."""
    server_args = module.ServerArgs
    if not KV_SIZING.read(os.environ) or hasattr(server_args, "resolve_once"):
        return
    patcher.wrap(server_args, "__post_init__", _make_post_init)


def _make_post_init(original: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(original)
    def __post_init__(self: Any, *args: Any, **kwargs: Any) -> None:
        by_rule = self.mem_fraction_static is None
        original(self, *args, **kwargs)
        # Schedulers that size nothing would show it among their arguments.
        if by_rule and skip_reason(self) is None:
            setattr(self, MARK, True)

    return __post_init__


def skip_reason(server_args: Any) -> str | None:
    """Why this server is not sized, by its arguments and this process's environment."""
    asked = KV_SIZING.read()
    return eligibility.skip_reason(asked, eligibility.arguments_of(server_args) if asked else {}, os.environ)


def given_by_the_user(server_args: Any) -> bool:
    """Whether ``--mem-fraction-static`` was given.

    Arguments that arrive resolved, as from ``Engine(server_args=...)``, count as given.
    """
    raw = getattr(server_args, "_raw_input", None)
    if isinstance(raw, dict):
        return raw.get("mem_fraction_static") is not None
    return not getattr(server_args, MARK, False)


def warmup_limit_s() -> float | None:
    """``SGLANG_WARMUP_TIMEOUT``, after which the engine ends a server without a first answer; ``None``: not set."""
    try:
        from sglang.srt.environ import envs

        given = float(envs.SGLANG_WARMUP_TIMEOUT.get())
    except Exception:
        return None
    return given if given > 0 else None
