"""A rehearsal: the largest forward passes of a server, run through the scheduler's own inbox and outbox.

Rank 0 puts requests into the scheduler's *inbox*, the socket from which the scheduler reads requests
(:mod:`.load_driver`). Each rank discards the answers at its *outbox*, the sockets to which the scheduler writes
answers. Everything in between is the engine's code: broadcast to the ranks, admission, chunking, overlap, sampling. The
end of the rehearsal undoes every change of the scheduler.

A *turn* is one iteration of the scheduler's event loop. A *phase* is the set of requests that makes one kind of largest
forward pass, and its *bound* is the least sizes that this forward pass must have. An *order* is a message of rank 0
that all ranks carry out in the same turn.

With data-parallel attention, each rank has its own inbox. Rank 0 therefore broadcasts the requests, as it broadcasts
orders (:class:`.ranks.Orders`). All ranks read the same requests in the same turn, and run the same batches. A phase is
reached when the tokens of all ranks together reach its bound. The rehearsal ends with a flush of the prefix cache,
which all ranks read in the same turn. A stage of a pipeline gets the requests from the stage before it, some turns
later.
"""

from __future__ import annotations

import math
import random
import time
from collections.abc import Callable, Mapping, Sequence
from copy import copy
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from sglang_moe_patches.core import gpu_memory, log
from sglang_moe_patches.core.patch import Patcher, format_error
from sglang_moe_patches.memory.kv_sizing.engine_objects import (
    batch_facts,
    graph_bytes,
    make_abort,
    make_flush,
    make_request,
    mute_metrics,
    warmup_limit_s,
)
from sglang_moe_patches.memory.kv_sizing.load_driver import LoadDriver
from sglang_moe_patches.memory.kv_sizing.phases import Estimate, Limits, Phase, PhaseKind, Plant
from sglang_moe_patches.memory.kv_sizing.planted_prefix import plant
from sglang_moe_patches.memory.kv_sizing.ranks import Board, Broadcast, is_idle
from sglang_moe_patches.memory.kv_sizing.sizing import MIN_FREE_BYTES, MORE_REQUESTS_FRACTION

REHEARSAL_TIMEOUT_S = 300.0
"""Seconds after which a rehearsal begins no further phase. The engine's warm-up request waits for the rehearsal, and
gives up after ten minutes."""
ABANDON_AFTER_S = 60.0
"""Seconds that a rehearsal may take beyond :data:`REHEARSAL_TIMEOUT_S`. Then it ends without a result, even if requests
still run."""
STUCK_AFTER_S = 10.0
"""Seconds without a forward pass after which a rehearsal concludes that the scheduler will not admit its waiting
requests."""
LOW_MEMORY_FLAG = "little memory is left"
"""Flag that a rank raises on the board (:class:`.ranks.Board`) if fewer than :data:`.MIN_FREE_BYTES` are free. Rank 0
then ends the rehearsal."""
WHOLE_REHEARSAL = "all"
"""Key of the whole rehearsal in :attr:`Measured.seconds`. The other keys are the names of phases."""

COUNTERS = (
    *("forward_ct", "forward_ct_decode", "forward_pass_id", "num_generated_tokens", "last_gen_throughput"),
    *("num_retracted_reqs", "total_prefill_uncached_tokens", "total_prefill_busy_us", "decode_moment_totals"),
    *("_prev_decode_launch_ts", "max_prefill_bs"),
)
"""Names of the counters whose values the end of the rehearsal restores. The counters belong to the scheduler, to its
metrics reporter or to its model runner. Counters of speculation are restored, too: their names begin with ``spec_``."""
METRIC_SWITCHES = ("enable_metrics", "current_scheduler_metrics_enabled")
"""Attributes that switch the engine's metrics. The rehearsal sets them to false."""


@dataclass(frozen=True)
class Measured:
    """Result of a rehearsal on one rank, in bytes. Only rank 0 sets ``phases``, ``missed``, ``fewer_requests`` and
    ``restart_requests``.

    :param lowest: lowest free memory in the rehearsal.
    :param expected: estimate of the memory that stays free in a forward pass that was too large to run. The estimate
        may be negative. It is infinite if no forward pass was too large.
    :param free: free memory when the rehearsal began, after CUDA graphs were captured.
    :param graphs: memory of the decode graphs.
    :param slack: memory that PyTorch's allocator keeps in addition to the largest sum of tensors.
    :param phases: peak of the tensors in each phase, by the phase's name.
    :param failure: reason why the need is not known; empty if the need is known.
    :param stopped: whether the rehearsal ended early because little memory was left.
    :param seconds: seconds of each phase that began, and of the whole rehearsal.
    :param missed: phases that did not reach their sizes: no forward pass was as large as intended. The key is the
        phase's name, and the value is its kind.
    :param fewer_requests: limit of concurrent requests that this rehearsal has set, because more requests would take
        too much memory; 0 for the server's own limit.
    :param restart_requests: limit of concurrent requests for a new rehearsal, in case the present one leaves too little
        memory for the KV cache; 0 for no such limit (:attr:`.LoadDriver.restart_requests`).
    """

    lowest: int = 0
    expected: float = math.inf
    free: int = 0
    graphs: int = 0
    slack: int = 0
    phases: Mapping[str, int] = field(default_factory=dict)
    failure: str = ""
    stopped: bool = False
    seconds: Mapping[str, float] = field(default_factory=dict)
    missed: Mapping[str, PhaseKind] = field(default_factory=dict)
    fewer_requests: int = 0
    restart_requests: int = 0


def timeout_s() -> float:
    """Return the seconds after which no further phase begins: at most half of the engine's limit for its warm-up
    request."""
    # The warm-up request waits for the rehearsal, and takes time itself.
    return min(REHEARSAL_TIMEOUT_S, warmup_limit_s() / 2)


def abandon_after_s() -> float:
    """Return the seconds that a rehearsal may take beyond :func:`timeout_s` before it ends without a result."""
    return min(ABANDON_AFTER_S, warmup_limit_s() / 4)


class Rehearsal:
    """One rank's rehearsal, from its beginning until the prefix cache is flushed.

    :param gpu: number of this rank's GPU.
    :param board: key-value store of the server's ranks.
    :param number: number of this rehearsal in this start.
    :param derive: function that derives the phases from limits of forward passes.
    :param limits: limits of this scheduler's forward passes.
    :param leads: whether this is rank 0, which puts the requests into the inbox.
    :param peaks: peak bytes of the tensors in the phases of earlier rehearsals, by the phases' names.
    :param bytes_per_token: bytes of one token in the KV cache.
    :param margin: bytes that must stay free in a decode that the rehearsal may leave out.
    """

    def __init__(
        self,
        scheduler: Any,
        gpu: int,
        board: Board,
        number: int,
        derive: Callable[[Limits], Sequence[Phase]],
        limits: Limits,
        *,
        leads: bool,
        peaks: Mapping[str, int],
        bytes_per_token: float = 0.0,
        margin: int = 0,
    ) -> None:
        self.scheduler, self.gpu, self.leads = scheduler, gpu, leads
        self.on_end: Callable[[Measured], None] = lambda measured: None
        """Function that is called once with the result, on every rank in the same turn."""
        self._board, self._low_flag, self._derive, self._limits = board, f"{LOW_MEMORY_FLAG} {number}", derive, limits
        self._peaks, self._margin = dict(peaks), margin
        self.runner = scheduler.tp_worker.model_runner
        channels = getattr(scheduler, "ipc_channels", scheduler)
        self._senders = [channels.send_to_tokenizer, channels.send_to_detokenizer]
        # Decodes of many requests may be left out. `_reserved_by_others`: bytes that the allocator had reserved before
        # the first of these decodes. `_for_more_requests`: bytes that these decodes may take.
        self._reserved_by_others: int | None = None
        self._for_more_requests = bytes_per_token * limits.cache_tokens * MORE_REQUESTS_FRACTION
        self._failure, self._stopped, self._is_flushing, self._has_planted = "", False, False, False
        self._undo: list[Callable[[], None]] = []
        self._driver: LoadDriver | None = None

    def begin(self) -> None:
        """Begin the rehearsal on this rank: save the scheduler's state, and patch the scheduler.

        :raises Exception: this rank cannot rehearse; the caller must call :meth:`end`.
        """
        self._began = self._last_forward = time.monotonic()
        gpu_memory.reset_peak(self.gpu)
        self._at_start = before = gpu_memory.read(self.gpu)
        self._lowest, self._peak_reserved, self._peak = before.free, before.reserved, before.allocated
        self._expected = math.inf
        self._phase, self._phases = "", dict[str, int]()
        # A prompt of a whole chunk would wait for ever with fewer window tokens, or be computed in smaller chunks.
        limits = self._limits
        least = max(limits.largest_prefill_tokens, limits.window) + 2 * limits.page
        if limits.window_tokens and limits.window_tokens <= least:
            raise RuntimeError(
                f"the KV cache of sliding-window layers has {limits.window_tokens} tokens, too few for a window of "
                f"{limits.window} tokens or a prefill of {limits.largest_prefill_tokens} tokens"
            )
        self._save_random_state()
        self._timeout_s, self._abandon_after_s = timeout_s(), abandon_after_s()
        self._save_counters()
        if self.leads:
            make = partial(make_request, tokenizer=getattr(self.scheduler, "tokenizer", None))
            self._driver = LoadDriver(
                *(self._derive, limits, make, make_abort, self._seconds_to_deadline, self._abandon_after_s, self._fits)
            )
        for sender in self._senders:
            self._set_until_end(sender, "send_output", self._record_answer)
        # Lift the queue limit. The limit does not bound a batch, because retracted requests come back into the batch.
        self._set_until_end(self.scheduler, "max_queued_requests", None)
        self._watch_forwards()

    def end(self) -> None:
        """Restore the scheduler's state. This method never raises, because other ranks would wait for a failed
        rank."""
        while self._undo:
            try:
                self._undo.pop()()
            except Exception as error:
                log.logger.warning(
                    log.format_line(
                        "kv-sizing",
                        "a setting of the scheduler was not restored after the rehearsal (%s); restart the server, "
                        "with SGLANG_MOE_PATCHES_KV_SIZING=off if this happens again",
                    ),
                    error,
                )

    def _set_until_end(self, owner: Any, name: str, value: Any) -> None:
        """Set an attribute of an object until the rehearsal ends."""
        patcher = Patcher()
        self._undo.append(patcher.undo)
        patcher.add(owner, name, value)

    def _seconds_to_deadline(self) -> float:
        """Return the seconds until no further phase begins."""
        return self._began + self._timeout_s - time.monotonic()

    def _save_random_state(self) -> None:
        """Save the states of all random number generators. The end of the rehearsal restores these states."""
        import numpy
        import torch

        self._undo.append(partial(torch.set_rng_state, torch.get_rng_state()))
        self._undo.append(partial(random.setstate, random.getstate()))
        self._undo.append(partial(numpy.random.set_state, numpy.random.get_state()))
        if torch.cuda.is_available() and torch.cuda.is_initialized():
            self._undo.append(partial(torch.cuda.set_rng_state, torch.cuda.get_rng_state(self.gpu), self.gpu))

    def _save_counters(self) -> None:
        """Save the engine's counters, and switch its metrics off. The end of the rehearsal restores both."""
        patcher = Patcher()
        self._undo.append(patcher.undo)
        mute_metrics(patcher)
        reporter = getattr(self.scheduler, "metrics_reporter", None)
        for owner in filter(None, (self.scheduler, reporter, self.runner)):
            for name, value in list(vars(owner).items()):
                if name in COUNTERS or (name.startswith("spec_") and isinstance(value, int | float)):
                    self._undo.append(partial(setattr, owner, name, copy(value)))
                elif name in METRIC_SWITCHES:
                    self._set_until_end(owner, name, False)

    def read_turn_memory(self) -> None:
        """Read the memory once in each turn. Sampling and a draft model's forward pass run after the watched forward
        pass, so :meth:`_watch_forwards` does not see them."""
        self._read_memory()
        if self._driver is not None and self._driver.phase_name != self._phase:
            self._phase = self._driver.phase_name
            gpu_memory.reset_peak(self.gpu)

    def plant(self, order: Plant) -> None:
        """Plant a phase's prefix on this rank: put it into the prefix cache without computing it. All ranks do so."""
        try:
            self._has_planted = True
            is_planted = plant(self.scheduler, order.tokens)
            if self._driver is not None:
                self._driver.record_planting(is_planted)
        except Exception as error:
            self.fail(format_error(error))

    def _watch_forwards(self) -> None:
        """Wrap the runner's ``forward``. After each forward pass, the wrapper reads the GPU memory, and the load
        driver of this rank, if there is one, records the sizes of the batch.
        """
        original = self.runner.forward

        def forward(batch: Any, *args: Any, **kwargs: Any) -> Any:
            try:
                # Read the sizes now, before the engine pads the ranks to the longest batch.
                facts = batch_facts(batch) if self._driver is not None else None
            except Exception as error:
                facts = None
                self.fail(format_error(error))
            result = original(batch, *args, **kwargs)
            self._last_forward = time.monotonic()
            try:
                self._read_memory()
                if self._driver is not None and facts is not None:
                    self._driver.record_forward(replace(facts, graph=bool(getattr(result, "can_run_graph", False))))
            except Exception as error:
                self.fail(format_error(error))
            return result

        self._set_until_end(self.runner, "forward", forward)

    def _read_memory(self) -> None:
        """Read the GPU memory. If fewer than :data:`.MIN_FREE_BYTES` are free, raise a flag for rank 0."""
        if self._failure:
            return
        try:
            now = gpu_memory.read(self.gpu)
            self._lowest = min(self._lowest, now.free)
            self._peak_reserved = max(self._peak_reserved, now.reserved)
            self._peak = max(self._peak, now.peak)
            if self._phase:
                self._phases[self._phase] = max(self._phases.get(self._phase, 0), now.peak - self._at_start.allocated)
            if now.free < MIN_FREE_BYTES and not self._stopped:
                self._stopped = True
                self._board.raise_flag(self._low_flag)
        except Exception as error:
            self.fail(format_error(error))

    def _fits(self, estimate: Estimate) -> bool:
        """Return whether there is memory for a forward pass of the estimated size.

        The result may be too optimistic: it assumes that the allocator can use all of its memory for tensors.
        """
        self._read_memory()  # the last reading was before the last forward pass's sampling
        peak_bytes = self._phases.get(estimate.name) or self._peaks.get(estimate.name)
        if peak_bytes is None:
            return True
        if estimate.with_graphs:
            peak_bytes += graph_bytes(self.runner)
        now, is_required = gpu_memory.read(self.gpu), not estimate.fewer_requests
        taken_next = int(estimate.times * peak_bytes)
        free_bytes = now.free + now.reserved - self._at_start.allocated - taken_next
        if is_required:
            if free_bytes >= MIN_FREE_BYTES:
                return True
            self._stopped, self._expected = True, min(self._expected, free_bytes)
            return False
        if self._reserved_by_others is None:
            self._reserved_by_others = self._peak_reserved
        # The allocator often reserves new memory for a larger decode, even if an earlier forward pass had more tensors.
        # So count the memory that it has reserved since the first decode that may be left out.
        cost = self._peak_reserved - self._reserved_by_others + taken_next - peak_bytes
        # The margin must stay free, too, so that more requests never make the KV cache smaller than the engine's own.
        return cost <= self._for_more_requests and free_bytes >= self._margin + MIN_FREE_BYTES

    @property
    def is_running(self) -> bool:
        """Whether the rehearsal has begun and has not been ended."""
        return bool(self._undo)

    def fail(self, problem: str) -> None:
        """End the rehearsal early, with ``problem`` as the reason why the need is not known."""
        self._failure = self._failure or problem
        if self._driver is not None:
            self._driver.end()

    def poll(self) -> list[Any]:
        """Return the broadcasts that the scheduler reads in this turn in place of users' requests, at most one."""
        if self._driver is None:
            return []
        idle = is_idle(self.scheduler)
        try:
            if self._seconds_to_deadline() < 0 or (not self._driver.is_over and self._board.is_raised(self._low_flag)):
                self._driver.end()
            requests = [] if self._driver.is_over else self._driver.next_requests(idle, self._is_stuck())
        except Exception as error:
            self.fail(format_error(error))
            self._driver.is_over, requests = True, self._driver.abort_all()
        is_abandoned = self._seconds_to_deadline() + self._abandon_after_s < 0
        if is_abandoned and self._has_planted:  # no user's prompt may find a planted prefix
            is_abandoned, requests = False, requests or ([] if idle else self._driver.abort_all())
        if self._is_flushing or (not is_abandoned and (requests or not self._driver.is_over or not idle)):
            return [Broadcast(tuple(requests))] if requests else []
        self._is_flushing = True
        return [Broadcast((make_flush(),))]

    def _is_stuck(self) -> bool:
        """Return whether the scheduler will never admit its waiting requests. The engine does not report this.

        It is assumed if no forward pass has run for :data:`STUCK_AFTER_S` seconds, and no request runs that could free
        KV cache slots for the waiting requests.
        """
        if time.monotonic() - self._last_forward < STUCK_AFTER_S:
            return False
        scheduler = self.scheduler
        stages = (*getattr(scheduler, "running_mbs", ()), *getattr(scheduler, "mbs", ()))
        batches = [batch for batch in (scheduler.running_batch, *stages) if batch is not None]
        runs = scheduler.chunked_req is not None or not all(batch.is_empty() for batch in batches)
        return bool(scheduler.waiting_queue) and not runs

    def _record_answer(self, output: Any, recv_obj: Any = None) -> None:
        """Stand in for the sockets' ``send_output``: record an answer, and send nothing."""
        kind = type(output).__name__
        if kind == "FlushCacheReqOutput":
            self._finish(bool(output.success))
            return
        if self._driver is None:
            return
        if kind == "AbortReq":
            self._driver.finish_request(output.rid)
        reasons = getattr(output, "finished_reasons", None) or []
        for name, reason in zip(getattr(output, "rids", None) or [], reasons, strict=False):
            if reason is not None:
                self._driver.finish_request(name)

    def _finish(self, flushed: bool) -> None:
        """End the rehearsal with its result, after the flush of the prefix cache was answered.

        :param flushed: whether the cache was flushed.
        """
        try:
            result = self._make_result(flushed)
        except Exception as error:
            result = Measured(failure=self._failure or format_error(error))
        self.end()
        self.on_end(result)

    def _make_result(self, flushed: bool) -> Measured:
        driver, reserved = self._driver, self._peak_reserved - self._at_start.reserved
        return Measured(
            # Memory that other processes have freed in the meantime is not counted as free.
            lowest=min(self._lowest, self._at_start.free - max(0, reserved)),
            expected=self._expected,
            free=self._at_start.free,
            graphs=graph_bytes(self.runner),
            slack=max(0, reserved - (self._peak - self._at_start.allocated)),
            phases=self._phases,
            failure=self._failure
            or ("" if flushed else "SGLang did not flush its prefix cache, because requests were left"),
            stopped=self._stopped,
            seconds={**(driver.seconds if driver else {}), WHOLE_REHEARSAL: time.monotonic() - self._began},
            missed=driver.missed if driver else {},
            fewer_requests=driver.fewer_requests if driver else 0,
            restart_requests=driver.restart_requests if driver else 0,
        )
