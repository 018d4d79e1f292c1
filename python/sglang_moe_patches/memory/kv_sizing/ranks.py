"""Communication between the ranks of a server: shared values, and rank 0's orders.

A *turn* is one iteration of a scheduler's event loop. The *store* is the key-value store of ``torch.distributed``,
through which the engine's ranks found one another.

- :func:`all_gather`: before the event loop, when all ranks are at the same line of code.
- :class:`Board`: in the event loop. There, ranks cannot wait for one another at the same line of code, because a stage
  of a pipeline is some turns later than the stage before it. Each rank publishes values in the store, and rank 0 polls.
- :class:`Orders`: rank 0 broadcasts through the scheduler's inbox, as the engine broadcasts a flush or an abort. Every
  rank receives an order at the same point of a turn.
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
"""Seconds that rank 0 waits for other machines, which may still be loading their weights. Other ranks wait twice as
long for rank 0's decision."""
RECEIVER = "sglang.srt.managers.scheduler_components.request_receiver"
SECRET_BYTES = DIGEST_BYTES = 32
"""Two numbers of bytes: ``SECRET_BYTES`` in the secret that all ranks share, ``DIGEST_BYTES`` in an HMAC-SHA256."""
_KEY = f"sglang-moe-patches {__version__}: kv-sizing: "
_ABSENT, _ANY_RANK = "absent", -1


def encode(value: Any) -> str:
    """Return a value as JSON: a number, a text, or a tuple, mapping or dataclass of such values.

    :raises ValueError: a number is infinite or not a number.
    """
    return json.dumps(value, allow_nan=False, default=asdict)


def decode(kind: Any, text: str) -> Any:
    """Read JSON as a value of a type, and check each field.

    :param kind: type of the value: ``int``, ``float``, ``str``, ``bool``, a ``StrEnum``, or a ``tuple[...]``, a
        ``Mapping[str, ...]``, a ``NamedTuple`` or a dataclass of such types.
    :raises ValueError: the text is not JSON, or a field is missing or has another type.
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
    """Return the values of all ranks, in the order of the ranks. Every rank must call it at the same point.

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
    payloads = [torch.zeros(len(padded), dtype=torch.uint8, device="cpu") for _ in range(ranks)]
    torch.distributed.all_gather(payloads, torch.frombuffer(padded, dtype=torch.uint8), group=group)
    return [each.numpy().tobytes()[: int(size)] for each, size in zip(payloads, lengths, strict=True)]


def share_secret() -> bytes:
    """Return the same random bytes on every rank. Every rank must call this function at the same point."""
    return bytes.fromhex(all_gather(secrets.token_hex(SECRET_BYTES), str)[0])


def is_rank_0() -> bool:
    """Return whether this process is rank 0 of the server, the rank that logs and broadcasts."""
    from sglang.srt.distributed.parallel_state import get_world_group

    return bool(get_world_group().rank_in_group == 0)


def all_machines_take_part() -> bool:
    """Return whether all ranks of the server call this function in time. All ranks that call it get the same answer.

    Ranks of one machine share a launcher's environment. Another machine may run without this package or with kv-sizing
    off, so waiting for its ranks in a collective could block for ever. Instead, each rank sets a key in the store, and
    rank 0 decides by these keys. If rank 0's decision is not in the store in time, another rank decides ``False``. All
    ranks follow the decision that reaches the store first.

    No secret is shared yet, so a foreign process can write these keys. It can cause a wrong ``False``. If it causes a
    wrong ``True``, the ranks wait in vain for the missing ranks to connect. After :data:`WAIT_S` seconds this function
    raises.

    :raises RuntimeError: the store does not answer, or a rank does not connect in time.
    """
    store, rank, ranks = _store()
    there = [f"{_KEY}{each} takes part" for each in range(ranks)]
    decided = f"{_KEY}decided"
    store.set(there[rank], "")
    together = _wait_for_keys(store, [decided], 2 * WAIT_S) if rank else _wait_for_keys(store, there, WAIT_S)
    if store.compare_set(decided, "", str(together)) != b"True":
        return False
    _connect(store, rank, ranks)
    return True


_connections: list[Any] = []
"""Process groups that this process has connected. They are kept, because a freed group closes connections that other
ranks still use."""


def _connect(store: Any, rank: int, ranks: int) -> None:
    """Connect all ranks by a separate process group, which the engine does not use.

    :raises RuntimeError: a rank does not connect within :data:`WAIT_S` seconds.
    """
    import torch

    here = torch.distributed.PrefixStore(f"{_KEY}connect", store)
    group = torch.distributed.ProcessGroupGloo(here, rank, ranks, timedelta(seconds=WAIT_S))
    _connections.append(group)
    group.barrier().wait()


def _store() -> tuple[Any, int, int]:
    """Return the store of the engine's ranks, the number of this rank and the number of ranks."""
    import torch

    distributed = torch.distributed
    return distributed.distributed_c10d._get_default_store(), distributed.get_rank(), distributed.get_world_size()


def _wait_for_keys(store: Any, keys: list[str], timeout_s: float) -> bool:
    """Wait until the store has all keys. Return whether it has them in time."""
    import torch

    try:
        store.wait(keys, timedelta(seconds=timeout_s))
    except torch.distributed.DistStoreError:
        return False
    return True


def is_idle(scheduler: Any) -> bool:
    """Return whether a scheduler has no request.

    Up to 0.5.12.post1 the engine's own ``is_fully_idle`` overlooks batches of pipeline stages that wait for the result
    of a prefill. So this function checks these batches, too.
    """
    return bool(scheduler.is_fully_idle()) and not any(getattr(scheduler, "mbs", ()))


class Board:
    """Key-value store that all ranks share. Each rank publishes one value per topic (such as ``measured 1``), and polls
    without blocking.

    The store belongs to ``torch.distributed``, and the engine's ranks found one another through it. It listens on all
    interfaces without a password, so each value carries an HMAC over its topic, its rank and its text. A value without
    the right HMAC counts as not published. The names of the keys depend on the secret, too. A server of one rank uses
    no store.

    :param secret: random bytes that the ranks share (:func:`share_secret`).
    """

    def __init__(self, secret: bytes) -> None:
        import torch

        self._secret, self._rank, self.ranks = secret, 0, torch.distributed.get_world_size()
        self._store: Any = None
        if self.ranks > 1:
            self._store, self._rank, self.ranks = _store()
        self._own: dict[str, str] = {}
        """Texts that this rank has published, by their topics. A flag that this rank has raised has an empty text."""

    def publish(self, topic: str, value: Any) -> None:
        """Publish this rank's value on a topic, for all ranks to read.

        :raises ValueError: the value cannot be written (:func:`encode`).
        """
        self._write(topic, self._rank, encode(value))

    def collect(self, topic: str, kind: Any) -> list[Any | None]:
        """Return the values of all ranks on a topic, in the order of the ranks.

        :param kind: type of the values, as :func:`decode` takes it.
        :returns: ``None`` in the place of a rank that has not published yet.
        :raises ValueError: a rank has published a value of another type.
        """
        texts = [self._read(topic, rank) for rank in range(self.ranks)]
        return [None if text is None else decode(kind, text) for text in texts]

    def wait_for_all(self, topic: str, kind: Any, timeout_s: float) -> list[Any | None]:
        """Wait until all ranks have published on a topic, at most ``timeout_s`` seconds. Return the values as
        :meth:`collect` does."""
        deadline = time.monotonic() + timeout_s
        while None in (values := self.collect(topic, kind)) and time.monotonic() < deadline:
            time.sleep(0.01)
        return values

    def raise_flag(self, name: str) -> None:
        """Raise a flag that all ranks see. The flag stays raised."""
        self._write(name, _ANY_RANK, "")

    def is_raised(self, name: str) -> bool:
        """Return whether any rank has raised a flag."""
        return name in self._own or self._read(name, _ANY_RANK) is not None

    def _write(self, topic: str, rank: int, text: str) -> None:
        self._own[topic] = text
        if self._store is not None:
            self._store.set(self._key(topic, rank), self._digest("value", topic, rank, text) + text.encode())

    def _read(self, topic: str, rank: int) -> str | None:
        """Return a rank's text on a topic; ``None`` if there is no text, or if its HMAC is wrong."""
        if self._store is None:
            return self._own.get(topic)
        # `get` would block if the key is deleted meanwhile. `compare_set` with a text that no rank writes only reads
        # the key.
        value = bytes(self._store.compare_set(self._key(topic, rank), _ABSENT, _ABSENT))
        digest, payload = value[:DIGEST_BYTES], value[DIGEST_BYTES:]
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
class Order:
    """Base class of rank 0's orders, such as the order to shrink the KV cache. Every rank carries out an order in the
    turn (iteration of the event loop) in which it receives the order."""


@dataclass(frozen=True)
class Broadcast:
    """Message of rank 0 to all ranks.

    :param items: the engine's requests, and orders (:class:`Order`), in the sequence in which ranks handle them.
    """

    items: tuple[Any, ...]


class Orders:
    """Sender and receiver of rank 0's broadcasts, which travel through the schedulers' inboxes. Every rank has one
    object.

    :param obey: function that is called with each order on every rank, between two turns of the scheduler.
    """

    def __init__(self, scheduler: Any, obey: Callable[[Order], None]) -> None:
        self._scheduler, self._obey = scheduler, obey
        self._read_instead: Callable[[], list[Any]] | None = None
        self.on_turn: Callable[[], None] = lambda: None
        """Function that is called on every rank in each turn, before the scheduler handles the requests that it has
        read."""
        self._outbox: deque[Broadcast] = deque()
        self._inbox: _Inbox | None = None
        self._patcher = Patcher()
        self._channels = getattr(scheduler, "ipc_channels", scheduler)

    def open(self) -> None:
        """Patch the scheduler's inbox.

        :raises Exception: the scheduler is not as expected; the caller must call :meth:`close`.
        """
        scheduler = self._scheduler
        if self._channels.recv_from_tokenizer is not None:  # this rank reads the socket
            if hasattr(scheduler, "ipc_channels"):
                self._patcher.wrap(
                    engine.import_module(RECEIVER).SchedulerRequestReceiver, "_pull_raw_reqs", around(self._pull)
                )
            else:
                self._inbox = _Inbox(scheduler, self._take_broadcasts)
        original = scheduler.process_input_requests

        inbox = self._inbox

        def process_input_requests(read: Sequence[Any]) -> Any:
            if inbox is not None and inbox.is_open:
                inbox.end_turn()
            self.on_turn()
            return original(self._unpack(read) if read else read)

        self._patcher.add(scheduler, "process_input_requests", process_input_requests)
        self._open_inbox()

    def close(self) -> None:
        """Remove all patches of this object."""
        if self._inbox is not None:
            self._inbox.close()
        self._patcher.undo()

    @property
    def read_instead(self) -> Callable[[], list[Any]] | None:
        """Function that returns the broadcasts which the scheduler reads in place of users' requests. Users' requests
        wait meanwhile. With ``None``, the scheduler reads users' requests."""
        return self._read_instead

    @read_instead.setter
    def read_instead(self, read: Callable[[], list[Any]] | None) -> None:
        self._read_instead = read
        self._open_inbox()

    def send(self, *items: Any) -> None:
        """On rank 0: broadcast orders and requests of the engine. Rank 0's scheduler reads them in its next turn, and
        the engine passes them on to all other ranks."""
        self._outbox.append(Broadcast(items))
        self._open_inbox()

    def _open_inbox(self) -> None:
        if self._inbox is not None and (self._read_instead is not None or self._outbox):
            self._inbox.open()

    def _unpack(self, read: Sequence[Any]) -> list[Any]:
        """Carry out the orders among the messages that the scheduler has read, and return the requests."""
        requests: list[Any] = []
        for message in read:
            for item in message.items if isinstance(message, Broadcast) else (message,):
                if isinstance(item, Order):
                    self._obey(item)
                else:
                    requests.append(item)
        return requests

    def _pull(self, original: Callable[[Any], list[Any]], receiver: Any) -> list[Any]:
        broadcasts = self._take_broadcasts()
        return original(receiver) if broadcasts is None else broadcasts

    def _take_broadcasts(self) -> list[Any] | None:
        """Return the broadcasts of this turn; ``None`` if the scheduler reads users' requests in this turn."""
        broadcasts = self._read_instead() if self._read_instead is not None else None
        while self._outbox:
            broadcasts = [*(broadcasts or ()), self._outbox.popleft()]
        return broadcasts


class _Inbox:
    """Stand-in for the socket of a scheduler's requests, up to 0.5.12.post1. It returns broadcasts.

    It replaces the socket only in turns with broadcasts. In these turns users' requests wait.

    :param take_broadcasts: function that returns the broadcasts of a turn, or ``None``.
    """

    def __init__(self, scheduler: Any, take_broadcasts: Callable[[], list[Any] | None]) -> None:
        self._scheduler, self._take_broadcasts = scheduler, take_broadcasts
        self._socket = scheduler.recv_from_tokenizer
        self._queue: deque[Any] = deque()
        self._has_taken_broadcasts = False
        """Whether this turn's broadcasts were taken."""
        self.is_open = False
        """Whether the scheduler reads from this object instead of the socket."""

    def __getattr__(self, name: str) -> Any:
        return getattr(self._socket, name)

    def open(self) -> None:
        """Let the scheduler read from this object instead of the socket."""
        self._scheduler.recv_from_tokenizer, self.is_open = self, True

    def close(self) -> None:
        """Let the scheduler read from the socket again."""
        self._scheduler.recv_from_tokenizer, self.is_open, self._has_taken_broadcasts = self._socket, False, False

    def end_turn(self) -> None:
        """Mark this turn as ended, so that the first read of the next turn asks for that turn's broadcasts.

        With ``SGLANG_SCHEDULER_MAX_RECV_PER_POLL`` the scheduler may stop before it has read all broadcasts of a turn.
        The unread broadcasts stay in the queue. The next turn reads them before its own broadcasts.
        """
        self._has_taken_broadcasts = False

    def recv_pyobj(self, *flags: Any) -> Any:
        """Return the next broadcast, or the next request if this turn has no broadcasts.

        :raises zmq.Again: every broadcast of this turn has been read.
        """
        if not self._has_taken_broadcasts:
            self._has_taken_broadcasts = True
            broadcasts = self._take_broadcasts()
            if broadcasts is None and not self._queue:
                self.close()
                return self._socket.recv_pyobj(*flags)
            self._queue.extend(broadcasts or ())
        if self._queue:
            return self._queue.popleft()
        import zmq

        raise zmq.Again()


def require_inbox(scheduler: type) -> None:
    """Check that a scheduler reads its requests as :class:`Orders` expects.

    :raises engine.Unsupported: this release's scheduler reads them in another way.
    """
    engine.require_unpatched(scheduler, "process_input_requests")
    if engine.has_module(RECEIVER):
        receiver = engine.require_unpatched(engine.import_module(RECEIVER), "SchedulerRequestReceiver")
        engine.require_mentions(engine.require_unpatched(receiver, "_pull_raw_reqs"), "recv_from_tokenizer")
    else:
        engine.require_mentions(
            engine.require_unpatched(scheduler, "recv_requests"), "recv_from_tokenizer", "recv_pyobj"
        )
