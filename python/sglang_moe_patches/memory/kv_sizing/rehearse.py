"""A rehearsal in a scheduler that has started: its own inbox and outbox, for as long as it takes.

Requests are put where the scheduler reads the tokenizer's, and answers are swallowed where it sends them. Everything in
between is the engine's: broadcast to the ranks, admission, chunking, overlap, sampling. Everything that is set for it
is taken back when it is over.

The first rank alone puts. With data-parallel attention each rank has an inbox and requests of its own, but the engine
hands what is no request, a flush or an abort, from the first rank to all, in every turn of their loops. So requests go
in a word of that kind (:class:`Put`): every rank unpacks the same ones in the same turn, and all run the same batches
in step. That they did, the engine says itself: a phase counts when the tokens of all ranks have reached its bound. And
all end in the same turn, with the flush, so that none waits for another that is still to run forwards with it. The
stages of a pipeline take their turns one after another: what is put comes to the next with what it hands on.
"""

from __future__ import annotations

import random
import time
from array import array
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from sglang_moe_patches.core import gpu_memory
from sglang_moe_patches.core.log import logger
from sglang_moe_patches.core.patch import Patcher
from sglang_moe_patches.memory.kv_sizing.conduct import Conductor
from sglang_moe_patches.memory.kv_sizing.decide import arguments_of
from sglang_moe_patches.memory.kv_sizing.facts import batch_facts, not_known, server_facts
from sglang_moe_patches.memory.kv_sizing.ranks import Notes
from sglang_moe_patches.memory.kv_sizing.script import Batch, Configuration, ServerFacts, configuration, rehearsed
from sglang_moe_patches.memory.kv_sizing.size import lowest

LIMIT_S = 300.0
"""After which no further phase begins. The engine's own first request gives up after ten minutes."""
ENDING_S = 60.0
"""More, after which what still runs is left to itself, and nothing counts."""
LEAST_FREE = 1_000_000_000
"""Bytes; with less left after a forward the script ends: the next one might not have them."""
RECEIVER = "sglang.srt.managers.scheduler_components.request_receiver"

COUNTERS = ("forward_ct", "forward_ct_decode", "num_generated_tokens", "last_gen_throughput", "num_retracted_reqs")
"""Of the scheduler, or of what keeps its metrics: as before afterwards."""
RECORDING = ("enable_metrics", "current_scheduler_metrics_enabled")
"""Whether metrics are counted: not meanwhile."""


@dataclass(frozen=True)
class Forward:
    """A forward that has run."""

    batch: Batch
    graph: bool


@dataclass(frozen=True)
class Result:
    """What a rank has seen.

    :param lowest: its lowest free memory in bytes.
    :param set_aside: what it has beside its weights and its KV cache, in bytes.
    :param failure: why it is not known; "" where it is.
    :param stopped: the script ended before memory ran out.
    :param flushed: its cache is empty again.
    """

    lowest: int = 0
    set_aside: int = 0
    failure: str = ""
    stopped: bool = False
    flushed: bool = True
    seconds: float = 0.0
    driven: tuple[str, ...] = ()
    missed: tuple[str, ...] = ()
    left_out: tuple[str, ...] = ()


def limits_of(scheduler: Any, facts: ServerFacts) -> Configuration:
    """What bounds a forward of this scheduler."""
    told = arguments_of(scheduler.server_args) | {
        "chunked_prefill_size": scheduler.chunked_prefill_size,
        "max_prefill_tokens": scheduler.max_prefill_tokens,
        "max_req_input_len": scheduler.max_req_input_len,
        "max_total_num_tokens": scheduler.max_total_num_tokens,
        "internal_states": [{"effective_max_running_requests_per_dp": scheduler.max_running_requests}],
    }
    return configuration(told, facts)


# --- The engine's requests -------------------------------------------------------------------------------------------


def make_request(name: str, prompt: Sequence[int], new: int, sampling: Mapping[str, Any]) -> Any:
    """A request as the tokenizer makes it, in the words of the installed release."""
    from sglang.srt.managers.io_struct import TokenizedGenerateReqInput
    from sglang.srt.sampling.sampling_params import SamplingParams

    params = SamplingParams(max_new_tokens=new, ignore_eos=True, **sampling)
    params.normalize(None)
    if params.stop_regex_strs is None:
        params.stop_regex_strs = []
    wants_array = "array" in str(TokenizedGenerateReqInput.__annotations__["input_ids"])
    made = TokenizedGenerateReqInput(
        input_text="",
        input_ids=array("q", prompt) if wants_array else list(prompt),
        input_embeds=None,
        mm_inputs=None,
        token_type_ids=None,
        sampling_params=params,
        return_logprob=False,
        logprob_start_len=-1,
        top_logprobs_num=0,
        token_ids_logprob=None,
        stream=False,
    )
    made.rid = name
    return made


def make_abort() -> Any:
    from sglang.srt.managers.io_struct import AbortReq

    return AbortReq(abort_all=True)


def make_flush() -> Any:
    from sglang.srt.managers.io_struct import FlushCacheReqInput

    return FlushCacheReqInput()


class Inbox:
    """In the place of the socket that a scheduler reads, up to 0.5.12.post1: hands out what ``poll`` gives."""

    def __init__(self, real: Any, poll: Callable[[], list[Any]]) -> None:
        self._real, self._poll = real, poll
        self._queue: deque[Any] = deque()
        self._polled = False

    def __getattr__(self, name: str) -> Any:
        return getattr(self._real, name)

    def recv_pyobj(self, *flags: Any) -> Any:
        import zmq

        # The scheduler asks until there is no more; that is one poll.
        if not self._queue and not self._polled:
            self._queue.extend(self._poll())
            self._polled = True
        if not self._queue:
            self._polled = False
            raise zmq.Again()
        return self._queue.popleft()


@dataclass(frozen=True)
class Put:
    """What every rank is to take in now, of whichever kind."""

    what: tuple[Any, ...]


# --- One rank --------------------------------------------------------------------------------------------------------


class Rehearsal:
    """What one rank does from its begin until its cache is flushed.

    :param gpu: whose memory is read.
    :param over: takes this rank's result; called once, on every rank in the same turn of its loop.
    :param notes: by which the first rank learns that another has little memory left.
    :param leads: whether this rank puts what all of them take in.
    """

    def __init__(self, scheduler: Any, gpu: int, over: Callable[[Result], None], notes: Notes, *, leads: bool) -> None:
        self.scheduler, self.gpu, self._over, self._notes, self.leads = scheduler, gpu, over, notes, leads
        self.runner = scheduler.tp_worker.model_runner
        channels = getattr(scheduler, "ipc_channels", scheduler)
        self.reads = channels.recv_from_tokenizer is not None
        self._senders = [channels.send_to_tokenizer, channels.send_to_detokenizer]
        self._failure, self._stopped, self._flushing = "", False, False
        self._undo: list[Callable[[], None]] = []
        self._conductor: Conductor | None = None

    def begin(self) -> None:
        """Put everything in place; whoever calls undoes it with :meth:`end` if this raises."""
        self._began = time.monotonic()
        first = gpu_memory.read(self.gpu)
        self._free, self._reserved = first.free, first.reserved
        self._lowest, self._most_reserved = first.free, first.reserved
        if pool := not_known(self.runner):
            raise RuntimeError(f"pools of the kind {pool} are not rehearsed yet")
        facts = server_facts(self.runner)
        limits = limits_of(self.scheduler, facts)
        # Longer prompts would wait for ever, or come in chunks that are smaller.
        least = max(limits.largest, limits.window) + 2 * limits.page
        if limits.window_tokens and limits.window_tokens <= least:
            raise RuntimeError(
                f"sliding windows of {limits.window_tokens} tokens have no room for {limits.largest} more"
            )
        self._keep_random_state()
        self._keep_counters()
        if self.leads:
            load = rehearsed(limits)
            self._conductor = Conductor(load, limits, make_request, make_abort, self._late)
        if self.reads:
            self._open_inbox()
        self._unpack()
        for sender in self._senders:
            self._meanwhile(sender, "send_output", self._swallow)
        self._watch_forwards()

    def end(self) -> None:
        """Take everything back; never raises, as the other ranks wait for this one afterwards."""
        while self._undo:
            try:
                self._undo.pop()()
            except Exception as error:
                logger.warning("sglang-moe-patches: kv-sizing: not all is what it was: %s", error)

    def _meanwhile(self, owner: Any, name: str, value: Any) -> None:
        """An attribute of one object, until the end."""
        own = {name: vars(owner)[name]} if name in vars(owner) else {}
        setattr(owner, name, value)
        self._undo.append(lambda: setattr(owner, name, own[name]) if own else delattr(owner, name))

    def _late(self, more_s: float = 0.0) -> bool:
        return time.monotonic() - self._began > LIMIT_S + more_s

    def _keep_random_state(self) -> None:
        import numpy
        import torch

        cpu, python, of_numpy = torch.get_rng_state(), random.getstate(), numpy.random.get_state()
        self._undo.append(lambda: torch.set_rng_state(cpu))
        self._undo.append(lambda: random.setstate(python))
        self._undo.append(lambda: numpy.random.set_state(of_numpy))
        if torch.cuda.is_available() and torch.cuda.is_initialized():
            device = torch.cuda.get_rng_state(self.gpu)
            self._undo.append(lambda: torch.cuda.set_rng_state(device, self.gpu))

    def _keep_counters(self) -> None:
        reporter = getattr(self.scheduler, "metrics_reporter", None)
        for owner in filter(None, (self.scheduler, reporter, self.runner)):
            kept = {name: vars(owner)[name] for name in (*COUNTERS, "forward_pass_id") if name in vars(owner)}
            recording = {name: vars(owner)[name] for name in RECORDING if name in vars(owner)}
            for name in recording:
                setattr(owner, name, False)
            self._undo.append(lambda owner=owner, was={**kept, **recording}: _set(owner, was))  # type: ignore[misc]

    def _open_inbox(self) -> None:
        scheduler = self.scheduler
        if not hasattr(scheduler, "ipc_channels"):
            real = scheduler.recv_from_tokenizer
            self._meanwhile(scheduler, "recv_from_tokenizer", Inbox(real, self._poll))
            return
        from importlib import import_module

        patcher = Patcher()
        receiver = import_module(RECEIVER).SchedulerRequestReceiver
        patcher.wrap(receiver, "_pull_raw_reqs", lambda original: lambda receiver: self._poll())
        self._undo.append(patcher.undo)

    def _unpack(self) -> None:
        original = self.scheduler.process_input_requests

        def process_input_requests(read: Sequence[Any], *args: Any, **kwargs: Any) -> Any:
            whole = [each for one in read for each in (one.what if isinstance(one, Put) else (one,))]
            return original(whole, *args, **kwargs)

        self._meanwhile(self.scheduler, "process_input_requests", process_input_requests)

    def _watch_forwards(self) -> None:
        original = self.runner.forward

        def forward(batch: Any, *args: Any, **kwargs: Any) -> Any:
            self._look()  # what came after the forward before, sampling above all
            try:
                # Before ranks are padded to the longest.
                facts = batch_facts(batch) if self._conductor is not None else None
            except Exception as error:
                facts = None
                self._fail(error)
            result = original(batch, *args, **kwargs)
            try:
                self._look()
                if self._conductor is not None and facts is not None:
                    self._conductor.saw(Forward(facts, bool(getattr(result, "can_run_graph", False))))
            except Exception as error:
                self._fail(error)
            return result

        self._meanwhile(self.runner, "forward", forward)

    def _look(self) -> None:
        if self._failure:
            return
        try:
            now = gpu_memory.read(self.gpu)
            self._lowest = min(self._lowest, now.free)
            self._most_reserved = max(self._most_reserved, now.reserved)
            if now.free < LEAST_FREE and not self._stopped:
                self._stopped = True
                self._notes.little_is_left()
        except Exception as error:
            self._fail(error)

    def _fail(self, error: Exception) -> None:
        self._failure = self._failure or f"{type(error).__name__}: {error}"
        if self._conductor is not None:
            self._conductor.end()

    def _poll(self) -> list[Any]:
        """What the scheduler reads now."""
        if self._conductor is None:
            return []
        idle = bool(self.scheduler.is_fully_idle()) and not any(getattr(self.scheduler, "mbs", ()))
        try:
            if self._late() or (not self._conductor.over and self._notes.little_is_left_somewhere()):
                self._conductor.end()
            put = self._conductor.put(idle) if not self._conductor.over else []
        except Exception as error:
            self._fail(error)
            self._conductor.over, put = True, [make_abort()]
        given_up = self._late(ENDING_S)
        if self._flushing or (not given_up and (put or not self._conductor.over or not idle)):
            return [Put(tuple(put))] if put else []
        self._flushing = True
        return [Put((make_flush(),))]

    def _swallow(self, output: Any, recv_obj: Any = None) -> None:
        """In the place of sending an answer."""
        kind = type(output).__name__
        if kind == "FlushCacheReqOutput":
            self._finish(bool(output.success))
            return
        if self._conductor is None:
            return
        if kind == "AbortReq":
            self._conductor.answered(output.rid)
        reasons = getattr(output, "finished_reasons", None) or []
        for name, reason in zip(getattr(output, "rids", None) or [], reasons, strict=False):
            if reason is not None:
                self._conductor.answered(name)

    def _finish(self, flushed: bool) -> None:
        result = Result(failure=self._failure or "it was ended by something else", flushed=flushed)
        with suppress(Exception):
            result = self._result(flushed)
        self.end()
        self._over(result)

    def _result(self, flushed: bool) -> Result:
        conductor = self._conductor
        return Result(
            lowest=lowest(self._lowest, self._free, self._most_reserved - self._reserved),
            failure=self._failure or ("" if flushed else "requests were left"),
            stopped=self._stopped,
            flushed=flushed,
            seconds=time.monotonic() - self._began,
            driven=tuple(conductor.driven) if conductor else (),
            missed=tuple(conductor.missed) if conductor else (),
            left_out=conductor.load.not_driven if conductor else (),
        )


def _set(owner: Any, values: Mapping[str, Any]) -> None:
    for name, value in values.items():
        try:
            setattr(owner, name, value)
        except Exception as error:
            logger.warning("sglang-moe-patches: kv-sizing: %s is not what it was: %s", name, error)
