"""What observing a server's processes from within needs, for ``regress`` and the benchmarks.

Observing never ends a server: the first thing that goes wrong is written down, and nothing is observed from then on.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any

from sglang_moe_patches.core.log import logger
from sglang_moe_patches.core.patch import Plan
from sglang_moe_patches.lab.observers.events import ChangeStatus
from sglang_moe_patches.memory.kv_sizing.facts import hybrid, pool_bytes, pools


class Observing:
    """An observer's steps, none of which ends the process that it runs in."""

    failure = ""
    """Why observing has ended, or ""."""

    def attempt(self, step: Callable[..., None], *args: Any) -> None:
        """Observe one step; whatever goes wrong with it, the server goes on unobserved."""
        if self.failure:
            return
        try:
            step(*args)
        except Exception as error:
            self.failure = f"observing failed: {type(error).__name__}: {error}"
            logger.warning("sglang-moe-patches: %s", self.failure)
            try:
                self.write_failure()
            except Exception:
                return  # the folder is gone or full: the warning has to do

    def write_failure(self) -> None:
        """Write down :attr:`failure`."""
        raise NotImplementedError


def change_statuses(plans: Mapping[str, Plan]) -> tuple[ChangeStatus, ...]:
    """What became of each change, for the record."""
    return tuple(ChangeStatus(name, str(plan.status), plan.reason) for name, plan in plans.items())


def observe_forwards(observer: Observing, starts: Callable[[Any, Any], None], ends: Callable[[Any, Any], None]) -> None:
    """Call both around every forward of a model in this process, but for those that a draft model's graph captures.

    :param starts: takes the engine's ``ModelRunner`` and its ``ForwardBatch``.
    :param ends: takes the runner and what its forward returned.
    """
    import torch
    from sglang.srt.model_executor.model_runner import ModelRunner

    original = ModelRunner.forward

    @functools.wraps(original)
    def run(self: Any, forward_batch: Any, *args: Any, **kwargs: Any) -> Any:
        if torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing():
            return original(self, forward_batch, *args, **kwargs)
        observer.attempt(starts, self, forward_batch)
        result = original(self, forward_batch, *args, **kwargs)
        observer.attempt(ends, self, result)
        return result

    ModelRunner.forward = run


def cache_token_bytes(runner: Any) -> float | None:
    """Bytes that a token takes in the KV cache of this rank; ``None`` where there is more than one kind of cache."""
    pool, table = pools(runner)
    if hybrid(pool, table) or not pool_bytes(pool) or getattr(runner, "is_draft_worker", False):
        return None
    return pool_bytes(pool) / int(runner.max_total_num_tokens)
