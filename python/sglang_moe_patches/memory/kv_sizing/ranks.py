"""How the ranks of a server exchange what they know, and how the first has all of them do something in one turn.

Before the event loop all ranks are at the same point of their code, and gather (:func:`all_gather`). In the loop they
are not, as the stages of a pipeline follow one another: there each publishes in the store by which the ranks found one
another, and the first looks now and then (:class:`Board`). What the first decides travels as the engine's own control
messages do, a flush or an abort, so that every rank takes it in at the same point of its turns (:class:`Orders`).
"""

from __future__ import annotations

import pickle
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

from sglang_moe_patches import __version__
from sglang_moe_patches.core import engine
from sglang_moe_patches.core.patch import Patcher, around

WAIT_S = 60.0
"""Of the first rank, for other machines, whose weights may be loaded later; others wait for it twice as long."""
RECEIVER = "sglang.srt.managers.scheduler_components.request_receiver"
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


def is_first_rank() -> bool:
    """Of the server's world, whose first rank decides and logs."""
    from sglang.srt.distributed.parallel_state import get_world_group

    return bool(get_world_group().rank_in_group == 0)


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


def is_idle(scheduler: Any) -> bool:
    """Whether a scheduler has nothing to do, on a stage of a pipeline either: up to 0.5.12.post1 the engine's own word
    leaves out a prefill whose result is still to come."""
    return bool(scheduler.is_fully_idle()) and not any(getattr(scheduler, "mbs", ()))


class Board:
    """What each rank publishes on a topic, once, and the first finds without waiting."""

    def __init__(self) -> None:
        self._store, self._rank, self._ranks = _store()
        self._raised: set[str] = set()

    def publish(self, topic: str, told: Any) -> None:
        self._store.set(f"{_KEY}{topic} {self._rank}", pickle.dumps(told))

    def collect(self, topic: str) -> list[Any] | None:
        """All ranks' words on a topic, in their order; ``None``: some are not there yet."""
        keys = [f"{_KEY}{topic} {each}" for each in range(self._ranks)]
        if not self._store.check(keys):
            return None
        return [pickle.loads(self._store.get(each)) for each in keys]

    def raise_flag(self, name: str) -> None:
        """Any rank may, as often as it likes."""
        self._raised.add(name)
        self._store.set(f"{_KEY}{name}", "True")

    def is_raised(self, name: str) -> bool:
        """Whether any rank has raised it. The store takes milliseconds to answer: a server of one rank asks nobody."""
        return name in self._raised or (self._ranks > 1 and bool(self._store.check([f"{_KEY}{name}"])))


@dataclass(frozen=True)
class Broadcast:
    """What every rank is to take in now: the engine's requests, and :class:`Order`."""

    what: tuple[Any, ...]


@dataclass(frozen=True)
class Order:
    """What every rank is to do now; each kind is a subclass."""


class Orders:
    """On every rank: the first gives orders, all of them obey.

    :param obey: called with each order on every rank, between two turns of the scheduler's loop.
    """

    def __init__(self, scheduler: Any, obey: Callable[[Order], None]) -> None:
        self._scheduler, self._obey = scheduler, obey
        self.instead: Callable[[], list[Any]] | None = None
        """Says what is read in place of users' requests, which wait meanwhile; ``None``: those are read."""
        self.each_turn: Callable[[], None] = lambda: None
        """Called on every rank in each turn, before what was read is taken in."""
        self._given: deque[Any] = deque()
        self._inbox: _Inbox | None = None
        self._patcher = Patcher()
        self._channels = getattr(scheduler, "ipc_channels", scheduler)

    def open(self) -> None:
        """:raises Exception: it is not open; the caller must call :meth:`close`."""
        scheduler = self._scheduler
        if self._channels.recv_from_tokenizer is not None:  # this rank reads
            if hasattr(scheduler, "ipc_channels"):
                self._patcher.wrap(
                    engine.module(RECEIVER).SchedulerRequestReceiver, "_pull_raw_reqs", around(self._pull)
                )
            else:
                self._inbox = _Inbox(scheduler.recv_from_tokenizer, self._first_to_read)
                self._patcher.replace(scheduler, "recv_from_tokenizer", self._inbox)
        original = scheduler.process_input_requests

        def process_input_requests(read: Sequence[Any], *args: Any, **kwargs: Any) -> Any:
            if self._inbox is not None:
                self._inbox.end_turn()
            self.each_turn()
            return original(self._unpack(read) if read else read, *args, **kwargs)

        self._patcher.add(scheduler, "process_input_requests", process_input_requests)

    def close(self) -> None:
        self._patcher.undo()

    def give(self, *what: Any) -> None:
        """On the first rank: have every rank take this in, in the first turn that it reads in.

        :param what: orders, and requests of the engine's; in this order.
        """
        self._given.append(Broadcast(what))

    def _unpack(self, read: Sequence[Any]) -> list[Any]:
        """Obey the orders among what was read. :returns: the rest."""
        requests: list[Any] = []
        for each in read:
            for one in each.what if isinstance(each, Broadcast) else (each,):
                if isinstance(one, Order):
                    self._obey(one)
                else:
                    requests.append(one)
        return requests

    def _pull(self, original: Callable[[Any], list[Any]], receiver: Any) -> list[Any]:
        told = self._first_to_read()
        return original(receiver) if told is None else told

    def _first_to_read(self) -> list[Any] | None:
        """What is read instead of users' requests, which come in the next turn; ``None``: those are read."""
        told = self.instead() if self.instead is not None else None
        while self._given:
            told = [*(told or ()), self._given.popleft()]
        return told


class _Inbox:
    """In the place of the socket that a scheduler reads, up to 0.5.12.post1.

    :param first: says what is read instead of what the socket has; ``None``: what that has.
    """

    def __init__(self, real: Any, first: Callable[[], list[Any] | None]) -> None:
        self._real, self._first = real, first
        self._queue: deque[Any] = deque()
        self._asked = False

    def __getattr__(self, name: str) -> Any:
        return getattr(self._real, name)

    def end_turn(self) -> None:
        """Ask for orders again at the next read.

        With ``SGLANG_SCHEDULER_MAX_RECV_PER_POLL`` the scheduler stops reading before the socket is empty.
        """
        self._asked = False

    def recv_pyobj(self, *flags: Any) -> Any:
        import zmq

        # The scheduler reads until the socket is empty, or up to its limit: that is one turn.
        if not self._asked:
            told = self._first()
            self._queue.extend(told or ())
            self._asked = True
            self._only_told = told is not None
        if self._queue:
            return self._queue.popleft()
        if self._only_told:
            self._asked = False
            raise zmq.Again()
        try:
            return self._real.recv_pyobj(*flags)
        except zmq.ZMQError:
            self._asked = False
            raise


def require_inbox(scheduler: type) -> None:
    """:raises engine.Unsupported: this release's scheduler does not read as :class:`Orders` expects."""
    engine.require_unpatched(scheduler, "process_input_requests")
    if engine.has_module(RECEIVER):
        receiver = engine.require_unpatched(engine.module(RECEIVER), "SchedulerRequestReceiver")
        engine.require_mentions(engine.require_unpatched(receiver, "_pull_raw_reqs"), "recv_from_tokenizer")
    else:
        engine.require_mentions(
            engine.require_unpatched(scheduler, "recv_requests"), "recv_from_tokenizer", "recv_pyobj"
        )
