"""Whether all machines of a server take part, found out before any rank waits for another.

Ranks of one machine have one launcher's environment. Another machine may not have this package, or its variable, and
who waited for its ranks in a collective operation would wait for ever.
"""

from __future__ import annotations

from datetime import timedelta

from sglang_moe_patches import __version__

WAIT_S = 30.0
"""Of the first rank, for the others. The engine has all of them wait for one another when weights are loaded."""
_KEY = f"sglang-moe-patches {__version__}: kv-sizing: "


def all_take_part(takes_part: bool) -> bool:
    """Whether every rank of the server asks this, and takes part itself: the same answer for all that ask.

    The first rank decides, by what the others have put into the store by which they found one another.

    :raises RuntimeError: the store does not answer.
    """
    import torch

    store = torch.distributed.distributed_c10d._get_default_store()
    rank, ranks = torch.distributed.get_rank(), torch.distributed.get_world_size()
    told = [f"{_KEY}{each}" for each in range(ranks)]
    decided = f"{_KEY}decided"
    store.set(told[rank], str(takes_part))
    if rank:
        return _heard(store, [decided], 2 * WAIT_S)
    everybody = _heard(store, told, WAIT_S)
    store.set(decided, str(everybody))
    return everybody


def _heard(store: object, keys: list[str], seconds: float) -> bool:
    import torch

    try:
        store.wait(keys, timedelta(seconds=seconds))  # type: ignore[attr-defined]
    except torch.distributed.DistStoreError:
        return False
    return all(store.get(key) == b"True" for key in keys)  # type: ignore[attr-defined]
