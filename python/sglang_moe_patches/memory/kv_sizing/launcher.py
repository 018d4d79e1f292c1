"""Whether ``--mem-fraction-static`` is the user's: asked where arguments are made, before the engine fills it in."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable
from types import ModuleType
from typing import Any

from sglang_moe_patches.core.patch import Patcher
from sglang_moe_patches.memory.kv_sizing.decide import KV_SIZING

MARK = "_moe_patches_fraction_by_rule"
"""Attribute of a ``ServerArgs`` that came without a fraction; it goes with it to the schedulers."""


def hook_server_args(module: ModuleType, patcher: Patcher) -> None:
    """Have ``ServerArgs`` remember it, where the engine does not by itself."""
    server_args = module.ServerArgs
    if not KV_SIZING.read(os.environ) or hasattr(server_args, "resolve_once"):
        return
    patcher.wrap(server_args, "__post_init__", _make_post_init)


def _make_post_init(original: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(original)
    def __post_init__(self: Any, *args: Any, **kwargs: Any) -> None:
        by_rule = self.mem_fraction_static is None
        original(self, *args, **kwargs)
        if by_rule:
            setattr(self, MARK, True)

    return __post_init__


def given_by_the_user(server_args: Any) -> bool:
    """Whether it is. Arguments that arrive resolved, as from ``Engine(server_args=...)``, count as given."""
    raw = getattr(server_args, "_raw_input", None)
    if isinstance(raw, dict):
        return raw.get("mem_fraction_static") is not None
    return not getattr(server_args, MARK, False)
