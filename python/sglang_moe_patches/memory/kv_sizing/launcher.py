"""Hooks in the launcher: before the engine fills in ``--mem-fraction-static``, and before it says that it is ready."""

from __future__ import annotations

import functools
import os
import time
from collections.abc import Callable
from types import ModuleType
from typing import Any

from sglang_moe_patches.core import log
from sglang_moe_patches.core.patch import Patcher
from sglang_moe_patches.memory.kv_sizing import eligibility
from sglang_moe_patches.memory.kv_sizing.eligibility import KV_SIZING

MARK = "_moe_patches_fraction_by_rule"
"""Attribute of a ``ServerArgs`` that came without a fraction. It goes with it to the schedulers, which take it off."""
ENGINE_WARMUP_LIMIT_S = 600.0
"""What the engine gives its first request where ``SGLANG_WARMUP_TIMEOUT`` is not set."""
RETRY_S = 0.5
"""Between two attempts to connect to a server that does not listen yet."""


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
    """Why this server is neither sized nor recorded, by its arguments and this process's environment."""
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


def hook_warmup(module: ModuleType, patcher: Patcher) -> None:
    """Have a server that skips its warm-up say that it is ready when its scheduler reads requests, and not before."""
    original = module._wait_and_warmup
    if KV_SIZING.read(os.environ):
        patcher.replace(module, "_wait_and_warmup", _make_wait_and_warmup(original))


def _make_wait_and_warmup(original: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(original)
    def wait_and_warmup(server_args: Any, *args: Any, **kwargs: Any) -> None:
        try:
            arguments = eligibility.arguments_of(server_args)
            if arguments.get("skip_server_warmup") and skip_reason(server_args) is None:
                _wait_for_scheduler(server_args.url(), arguments.get("api_key"))
        except Exception as error:
            message = log.of("kv-sizing", "the server may say too early that it is ready: %s")
            log.logger.warning(message, error)
        original(server_args, *args, **kwargs)

    return wait_and_warmup


def _wait_for_scheduler(url: str, api_key: str | None) -> None:
    """Wait for an answer that every scheduler gives in its loop; while it rehearses, it reads no message.

    :raises Exception: there is none within the engine's limit, or it is an error.
    """
    import ssl
    import urllib.request
    from urllib.error import URLError

    # It is this server's own address: no proxy, and its certificate may be for another name.
    context = ssl.create_default_context()
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}), urllib.request.HTTPSHandler(context=context))
    headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
    request = urllib.request.Request(f"{url}/server_info", headers=headers)
    until = time.monotonic() + (warmup_limit_s() or ENGINE_WARMUP_LIMIT_S)
    while (left := until - time.monotonic()) > 0:
        try:
            with opener.open(request, timeout=left):
                return
        except URLError as error:
            if not isinstance(error.reason, ConnectionRefusedError):  # it listens a moment later
                raise
        time.sleep(RETRY_S)
    raise TimeoutError("its scheduler does not answer")
