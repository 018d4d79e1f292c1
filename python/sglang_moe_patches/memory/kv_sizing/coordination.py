"""How the ranks of a server exchange what they know.

Before the event loop all ranks are at the same point of their code, and gather (:func:`all_gather`). In the loop they
are not, as the stages of a pipeline follow one another: there each publishes its result in the store by which the ranks
found one another, and the leader looks now and then (:class:`RankResults`).
"""

from __future__ import annotations

import pickle
from datetime import timedelta
from typing import Any

from sglang_moe_patches import __version__

WAIT_S = 60.0
"""Of the first rank, for other machines, whose weights may be loaded later; others wait for it twice as long."""
_KEY = f"sglang-moe-patches {__version__}: kv-sizing: "


def all_gather(told: Any) -> list[Any]:
    """What every rank tells, in the order of the world's ranks; every rank must ask at the same place."""
    import torch
    from sglang.srt.distributed.parallel_state import get_world_group

    group = get_world_group()
    if group.world_size == 1:
        return [told]
    found: list[Any] = [None] * group.world_size
    torch.distributed.all_gather_object(found, told, group=group.cpu_group)
    return found


def all_machines_take_part() -> bool:
    """Whether every rank of the server asks this: the same answer for all that ask.

    Ranks of one machine have one launcher's environment. Another machine may not have this package, or its variable,
    so that waiting for its ranks could block for ever. The first rank decides, by the keys that the others have set,
    unless one has given up before: whatever is decided first counts.

    :raises RuntimeError: the store does not answer.
    """
    store, rank, ranks = _store()
    there = [f"{_KEY}{each} takes part" for each in range(ranks)]
    decided = f"{_KEY}decided"
    store.set(there[rank], "")
    together = _come(store, [decided], 2 * WAIT_S) if rank else _come(store, there, WAIT_S)
    return bool(store.compare_set(decided, "", str(together)) == b"True")


def _store() -> tuple[Any, int, int]:
    """The store, this rank and how many there are."""
    import torch

    distributed = torch.distributed
    return distributed.distributed_c10d._get_default_store(), distributed.get_rank(), distributed.get_world_size()


def _come(store: Any, keys: list[str], seconds: float) -> bool:
    import torch

    try:
        store.wait(keys, timedelta(seconds=seconds))
    except torch.distributed.DistStoreError:
        return False
    return True


class RankResults:
    """What each rank publishes once in the life of a server, and the leader finds without waiting."""

    def __init__(self) -> None:
        self._store, self._rank, ranks = _store()
        self._results = [f"{_KEY}result {each}" for each in range(ranks)]
        self._low = f"{_KEY}low"

    def report_low_memory(self) -> None:
        """Of this rank's memory."""
        self._store.set(self._low, "True")

    def any_rank_low_on_memory(self) -> bool:
        return bool(self._store.check([self._low]))

    def publish(self, result: Any) -> None:
        self._store.set(self._results[self._rank], pickle.dumps(result))

    def collect(self) -> list[Any] | None:
        """All ranks' results, in their order; ``None``: some are not there yet."""
        if not self._store.check(self._results):
            return None
        return [pickle.loads(self._store.get(each)) for each in self._results]
