"""How the ranks of a server exchange what they know, and how the first has all of them do something in one turn.

Before the event loop all ranks are at the same point of their code, and gather (:func:`all_gather`). In the loop they
are not, as the stages of a pipeline follow one another: there each publishes in the store by which the ranks found one
another, and the first looks now and then (:class:`Board`). What the first decides travels as the engine's own control
messages do, a flush or an abort, so that every rank takes it in at the same point of its turns (:class:`Orders`).
"""

from __future__ import annotations

import hmac
import json
import math
import secrets
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import timedelta
from enum import StrEnum
from typing import Any, get_args, get_origin, get_type_hints

from sglang_moe_patches import __version__
from sglang_moe_patches.core import engine
from sglang_moe_patches.core.patch import Patcher, around

WAIT_S = 60.0
"""Of the first rank, for other machines, whose weights may be loaded later; others wait for it twice as long."""
RECEIVER = "sglang.srt.managers.scheduler_components.request_receiver"
SECRET_BYTES = DIGEST_BYTES = 32
"""Bytes of the secret and of an HMAC-SHA256."""
MAX_TEXT_BYTES = 1 << 20
"""Bytes of a published text; a longer one counts as not published."""
_KEY = f"sglang-moe-patches {__version__}: kv-sizing: "
_ABSENT, _ANY_RANK = "absent", -1


def encode(value: Any) -> str:
    """Write numbers, text, tuples, mappings and dataclasses of these as JSON.

    :raises ValueError: a number is infinite or not a number.
    """
    return json.dumps(value, allow_nan=False, default=asdict)


def decode(kind: Any, text: str) -> Any:
    """Read JSON as a value of a type, and check each field.

    :param kind: type of the value: ``int``, ``float``, ``str``, ``bool``, a ``StrEnum``, or a ``tuple[...]``, a
        ``Mapping[str, ...]``, a ``NamedTuple`` or a dataclass of such types.
    :raises ValueError: the text is no JSON, or a field is missing or has another type.
    """

    def refuse(constant: str) -> None:
        raise ValueError(f"{constant} is no number")

    return _checked(kind, json.loads(text, parse_constant=refuse))


def _checked(kind: Any, value: Any) -> Any:
    def require(is_right: bool) -> None:
        if not is_right:
            raise ValueError(f"expected {kind}, got {str(value)[:100]!r}")

    arguments, origin = get_args(kind), get_origin(kind)
    if hasattr(kind, "__dataclass_fields__"):
        hints = get_type_hints(kind)
        require(isinstance(value, dict) and value.keys() == hints.keys())
        return kind(**{name: _checked(hint, value[name]) for name, hint in hints.items()})
    if origin is tuple or hasattr(kind, "_fields"):
        parts = arguments or tuple(get_type_hints(kind).values())
        require(isinstance(value, list) and len(value) == len(parts))
        checked = list(map(_checked, parts, value))
        return tuple(checked) if origin is tuple else kind(*checked)
    if origin is Mapping:
        require(isinstance(value, dict))
        return {name: _checked(arguments[1], each) for name, each in value.items()}
    if issubclass(kind, StrEnum):
        require(isinstance(value, str))
        return kind(value)
    if kind is float:
        require(type(value) in (int, float) and math.isfinite(value))
        return float(value)
    require(type(value) is kind)
    return value


def all_gather(value: Any, kind: Any) -> list[Any]:
    """Gather one value of each rank, in the order of the world's ranks. Every rank must call it at the same point.

    :param kind: type of the values, as :func:`decode` takes it.
    """
    from sglang.srt.distributed.parallel_state import get_world_group

    group = get_world_group()
    if group.world_size == 1:
        return [value]
    texts = _gather_bytes(encode(value).encode(), group.world_size, group.cpu_group)
    return [decode(kind, text.decode()) for text in texts]


def _gather_bytes(payload: bytes, ranks: int, group: Any) -> list[bytes]:
    import torch

    lengths = [torch.zeros(1, dtype=torch.int64, device="cpu") for _ in range(ranks)]
    length = torch.tensor([len(payload)], dtype=torch.int64, device="cpu")
    torch.distributed.all_gather(lengths, length, group=group)
    padded = bytearray(payload.ljust(max(map(int, lengths)), b"\0"))
    found = [torch.zeros(len(padded), dtype=torch.uint8, device="cpu") for _ in range(ranks)]
    torch.distributed.all_gather(found, torch.frombuffer(padded, dtype=torch.uint8), group=group)
    return [each.numpy().tobytes()[: int(size)] for each, size in zip(found, lengths, strict=True)]


def share_secret() -> bytes:
    """Return the same random bytes on every rank. Collective, through the engine's own process group."""
    return bytes.fromhex(all_gather(secrets.token_hex(SECRET_BYTES), str)[0])


def is_first_rank() -> bool:
    """Of the server's world, whose first rank decides and logs."""
    from sglang.srt.distributed.parallel_state import get_world_group

    return bool(get_world_group().rank_in_group == 0)


def all_machines_take_part() -> bool:
    """Return whether all ranks of the server have asked. The answer is the same for all ranks that ask.

    Ranks of one machine share a launcher's environment. Another machine may not have this package or its variable, so
    waiting for its ranks in a collective could block for ever. The first rank decides by keys in the store, and the
    decision that reaches the store first counts.

    No secret is shared yet, so another process can write these keys. It can make the answer *no*. A false *yes* fails
    after :data:`WAIT_S` seconds, because the ranks then connect to one another.

    :raises RuntimeError: the store does not answer, or a rank does not connect in time.
    """
    store, rank, ranks = _store()
    there = [f"{_KEY}{each} takes part" for each in range(ranks)]
    decided = f"{_KEY}decided"
    store.set(there[rank], "")
    together = _come(store, [decided], 2 * WAIT_S) if rank else _come(store, there, WAIT_S)
    if store.compare_set(decided, "", str(together)) != b"True":
        return False
    _connect(store, rank, ranks)
    return True


_connections: list[Any] = []
"""Process groups that this process has connected. A group that is freed closes connections that others still use."""


def _connect(store: Any, rank: int, ranks: int) -> None:
    """Connect all ranks by a process group of our own, which the engine does not use.

    :raises RuntimeError: a rank does not connect within :data:`WAIT_S` seconds.
    """
    import torch

    here = torch.distributed.PrefixStore(f"{_KEY}connect", store)
    group = torch.distributed.ProcessGroupGloo(here, rank, ranks, timedelta(seconds=WAIT_S))
    _connections.append(group)
    group.barrier().wait()


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
    """Key-value store that all ranks share. Each rank publishes one value per topic, and polls without blocking.

    The store is the one by which the engine's ranks found one another. It listens on all interfaces without a password,
    so each value carries an HMAC over its topic, its rank and its text. A value without the right HMAC counts as not
    published. The names of the keys depend on the secret, too. A server of one rank uses no store.

    :param secret: random bytes that the ranks share (:func:`share_secret`).
    """

    def __init__(self, secret: bytes) -> None:
        import torch

        self._secret, self._rank, self._ranks = secret, 0, torch.distributed.get_world_size()
        self._store: Any = None
        if self._ranks > 1:
            self._store, self._rank, self._ranks = _store()
        self._own: dict[str, str] = {}
        """Text of each topic that this rank has published, or raised as a flag."""

    def publish(self, topic: str, value: Any) -> None:
        """:raises ValueError: the value cannot be written (:func:`encode`)."""
        self._write(topic, self._rank, encode(value))

    def collect(self, topic: str, kind: Any) -> list[Any] | None:
        """Return the values of all ranks on a topic, in the order of the ranks.

        :param kind: type of the values, as :func:`decode` takes it.
        :returns: ``None`` if a rank has not published yet.
        :raises ValueError: a rank has published a value of another type.
        """
        texts: list[str] = []
        for rank in range(self._ranks):
            text = self._read(topic, rank)
            if text is None:
                return None
            texts.append(text)
        return [decode(kind, text) for text in texts]

    def wait_for_all(self, topic: str, kind: Any, timeout_s: float) -> list[Any] | None:
        """Block until all ranks have published on a topic; ``None``: they have not in time."""
        deadline = time.monotonic() + timeout_s
        while (values := self.collect(topic, kind)) is None and time.monotonic() < deadline:
            time.sleep(0.01)
        return values

    def raise_flag(self, name: str) -> None:
        """Raise a flag that all ranks see. A rank may raise it again."""
        self._write(name, _ANY_RANK, "")

    def is_raised(self, name: str) -> bool:
        """Return whether any rank has raised a flag."""
        return name in self._own or self._read(name, _ANY_RANK) is not None

    def _write(self, topic: str, rank: int, text: str) -> None:
        self._own[topic] = text
        if self._store is not None:
            self._store.set(self._key(topic, rank), self._digest("value", topic, rank, text) + text.encode())

    def _read(self, topic: str, rank: int) -> str | None:
        """Return the text on a topic; ``None`` if there is none whose HMAC is right."""
        if self._store is None:
            return self._own.get(topic)
        # `get` would block if the key is deleted meanwhile. This compares with a text that no rank writes.
        found = bytes(self._store.compare_set(self._key(topic, rank), _ABSENT, _ABSENT))
        digest, payload = found[:DIGEST_BYTES], found[DIGEST_BYTES:]
        if len(payload) > MAX_TEXT_BYTES:
            return None
        try:
            text = payload.decode()
        except UnicodeDecodeError:
            return None
        return text if hmac.compare_digest(digest, self._digest("value", topic, rank, text)) else None

    def _key(self, topic: str, rank: int) -> str:
        return _KEY + self._digest("key", topic, rank, "").hex()

    def _digest(self, *parts: object) -> bytes:
        # JSON marks where each part ends, so no two different lists of parts have the same text.
        return hmac.digest(self._secret, json.dumps(parts).encode(), "sha256")


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

    def send(self, *what: Any) -> None:
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
