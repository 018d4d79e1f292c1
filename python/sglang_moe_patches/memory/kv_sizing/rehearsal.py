"""A rehearsal: the largest forward passes of a server, run through the scheduler's own inbox and outbox.

Rank 0 puts requests into the scheduler's *inbox*, the socket of its requests (:mod:`.load_driver`). Each rank swallows
the answers in its *outbox*, the sockets of its answers. Everything in between is the engine's code: broadcast to the
ranks, admission, chunking, overlap, sampling. The end of the rehearsal takes back every change of the scheduler.

A *turn* is one iteration of the scheduler's event loop. A *phase* is the set of requests that makes one kind of largest
forward pass, and its *bound* is the least sizes that this forward pass must have. An *order* is a message of rank 0
that all ranks carry out in the same turn.

With data-parallel attention each rank has an inbox of its own, so requests travel as orders do
(:class:`.ranks.Orders`). Every rank unpacks the same requests in the same turn, and all ranks run the same batches in
step. A phase is reached when the tokens of all ranks together reach its bound. The rehearsal ends with a flush of the
prefix cache, which all ranks read in the same turn. The stages of a pipeline follow one another: each stage passes its
requests on to the next.
"""

from __future__ import annotations

import math
import random
import sys
import time
from array import array
from collections.abc import Callable, Mapping, Sequence
from copy import copy
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from sglang_moe_patches.core import gpu_memory, log
from sglang_moe_patches.core.patch import Patcher, one_line_error
from sglang_moe_patches.memory.kv_sizing.eligibility import arguments_of
from sglang_moe_patches.memory.kv_sizing.load_driver import LoadDriver
from sglang_moe_patches.memory.kv_sizing.phases import (
    Batch,
    Estimate,
    Limits,
    Phase,
    PhaseKind,
    Plant,
    ServerFacts,
    derive_limits,
)
from sglang_moe_patches.memory.kv_sizing.planted_prefix import can_plant, plant
from sglang_moe_patches.memory.kv_sizing.pools import GIB, hybrid, pool_bytes, pools_of
from sglang_moe_patches.memory.kv_sizing.ranks import Board, Broadcast, is_idle
from sglang_moe_patches.memory.kv_sizing.sizing import MIN_FREE_BYTES

REHEARSAL_TIMEOUT_S = 300.0
"""Seconds after which no further phase begins. The engine's own warm-up request gives up after ten minutes."""
ABANDON_AFTER_S = 60.0
"""Seconds after :data:`REHEARSAL_TIMEOUT_S` after which the rehearsal ends without a result, even if requests still
run."""
STUCK_AFTER_S = 10.0
"""Seconds without a forward pass after which a rehearsal concludes that the scheduler will not admit its waiting
requests."""
MORE_REQUESTS_FRACTION = 1 / 32
"""Largest fraction of the KV cache that the server gives up to run more requests at once than fit into the memory of
the other forward passes. A request takes about 2 MB in a decode, and tens of times as much in the KV cache."""
LOW = "little memory is left"
"""Flag that a rank raises on the board (:class:`.ranks.Board`). Rank 0 then ends the rehearsal."""
ALL = "all"
"""Key of the whole rehearsal in :attr:`Measured.seconds`. The other keys are the names of phases."""

COUNTERS = (
    *("forward_ct", "forward_ct_decode", "forward_pass_id", "num_generated_tokens", "last_gen_throughput"),
    *("num_retracted_reqs", "total_prefill_uncached_tokens", "total_prefill_busy_us", "decode_moment_totals"),
    *("_prev_decode_launch_ts", "max_prefill_bs"),
)
"""Counters of the scheduler, its metrics reporter and its model runner that the end of the rehearsal restores.
Counters of speculation (``spec_...``) are restored, too."""
METRICS = {"Counter": ("inc",), "Gauge": ("inc", "dec", "set"), "Histogram": ("observe",), "Summary": ("observe",)}
"""Methods that change a metric, by the name of the metric's class in ``prometheus_client``."""
RECORDING = ("enable_metrics", "current_scheduler_metrics_enabled")
"""Attributes that switch the engine's metrics. The rehearsal sets them to false."""


@dataclass(frozen=True)
class Measured:
    """Result of a rehearsal on one rank, in bytes. Only rank 0 sets ``phases``, ``missed`` and the last two fields.

    :param lowest: lowest free memory in the rehearsal.
    :param expected: free memory that a forward pass would have left, if it did not run because of too little memory. It
        may be negative. Infinite: there was no such forward pass.
    :param free: free memory when the rehearsal began, after CUDA graphs were captured.
    :param graphs: memory of the decode graphs.
    :param slack: memory that PyTorch's allocator keeps in addition to the largest sum of tensors.
    :param phases: peak of the tensors in each phase, by the phase's name.
    :param failure: reason why the need is not known; "": it is known.
    :param stopped: whether the rehearsal ended early, before memory ran out.
    :param seconds: seconds of each phase that began, and of the whole rehearsal.
    :param missed: kinds of the phases that were not reached, by the phases' names.
    :param fewer_requests: :attr:`.load_driver.LoadDriver.fewer_requests`.
    :param fallback: :attr:`.load_driver.LoadDriver.fallback`.
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
    fallback: int = 0


def warmup_limit_s() -> float:
    """Return the seconds after which the engine ends a server that has not answered its warm-up request.

    Infinite: there is no limit. ``SGLANG_WARMUP_TIMEOUT`` sets the limit.
    """
    try:
        from sglang.srt.environ import envs

        limit_s = float(envs.SGLANG_WARMUP_TIMEOUT.get())
    except Exception:
        return math.inf
    return limit_s if limit_s > 0 else math.inf


def timeout_s() -> float:
    """Return the seconds after which no further phase begins, within the time limit of the engine's warm-up request."""
    # The warm-up request waits for the rehearsal, and takes time itself.
    return min(REHEARSAL_TIMEOUT_S, warmup_limit_s() / 2)


def abandon_after_s() -> float:
    """Return the seconds after :func:`timeout_s` after which the rehearsal ends without a result."""
    return min(ABANDON_AFTER_S, warmup_limit_s() / 4)


def mute_metrics(patcher: Patcher) -> None:
    """Stop all metrics of this process until the patcher undoes its patches."""
    # Do not import the module here. The engine must first set the variable with the folder of the metrics.
    prometheus_client = sys.modules.get("prometheus_client")
    if prometheus_client is None:
        return
    for name, methods in METRICS.items():
        kind = getattr(prometheus_client, name)
        for method in methods:
            patcher.wrap(kind, method, lambda original: lambda self, *args, **kwargs: None)


# --- Facts from the engine -------------------------------------------------------------------------------------------


def batch_facts(batch: Any) -> Batch:
    """Return the sizes of the engine's ``ForwardBatch``."""
    lengths = getattr(batch, "seq_lens_cpu", None)
    prefixes = _integers(getattr(batch, "extend_prefix_lens_cpu", None))
    gathered = _integers(getattr(batch, "global_num_tokens_cpu", None))
    return Batch(
        mode=batch.forward_mode.name,
        tokens=0 if batch.input_ids is None else int(batch.input_ids.shape[0]),
        requests=int(batch.batch_size),
        prefix=sum(prefixes),
        longest_prefix=max(prefixes, default=0),
        longest=0 if lengths is None or not len(lengths) else int(lengths.max()),
        all_ranks=sum(gathered),
    )


def _integers(values: Any) -> list[int]:
    return [] if values is None else [int(value) for value in values]


def server_facts(runner: Any) -> ServerFacts:
    """Return the facts of a model runner: pools, graphs and sizes, as far as this release has them."""
    pool, table = pools_of(runner)
    config = runner.model_config
    rows = getattr(table, "req_to_token", None)
    graphs = getattr(runner, "decode_cuda_graph_runner", None) or getattr(runner, "graph_runner", None)
    captured = getattr(graphs, "max_bs", None)
    # Read the allocator's number. The pool's own number counts all addresses, also those without memory.
    window_tokens = int(getattr(getattr(runner, "token_to_kv_pool_allocator", None), "size_swa", 0) or 0)
    return ServerFacts(
        fixed_bytes=(0 if rows is None else rows.nbytes) + pool_bytes(getattr(table, "mamba_pool", None)),
        page=int(getattr(runner, "page_size", None) or getattr(pool, "page_size", 1) or 1),
        vocabulary=int(config.vocab_size),
        hybrid=hybrid(pool, table),
        window=int(getattr(runner, "sliding_window_size", 0) or 0) if window_tokens else 0,
        window_tokens=window_tokens,
        captured=None if captured is None else int(captured),
    )


def graph_bytes(runner: Any) -> int:
    """Return the bytes of the decode graphs and their inputs, as the engine measured them; 0: it did not."""
    usage = getattr(runner, "graph_memory_usage", None)  # from 0.5.14 on
    if usage is None:
        return round(float(getattr(runner, "graph_mem_usage", 0) or 0) * GIB)
    return round(sum(float(usage.get(phase, 0)) for phase in ("decode", "target_verify")) * GIB)


def limits_of(scheduler: Any, fewer_requests: int = 0) -> Limits:
    """Return the limits of this scheduler's forward passes.

    :param fewer_requests: most requests at once, if an earlier rehearsal has lowered the number; 0: the scheduler's own
        number.
    """
    in_force = {name: getattr(scheduler, name) for name in ("chunked_prefill_size", "max_prefill_tokens")}
    limits = derive_limits(
        arguments_of(scheduler.server_args) | in_force,
        server_facts(scheduler.tp_worker.model_runner),
        cache_tokens=scheduler.max_total_num_tokens,
        requests=scheduler.max_running_requests,
        input_tokens=scheduler.max_req_input_len - 1,  # the engine refuses a prompt of ``max_req_input_len`` tokens
    )
    if fewer_requests:
        limits = limits.with_requests(fewer_requests)
    tokenizer = getattr(scheduler, "tokenizer", None)
    # For a request with min_new_tokens the engine reads both attributes. If they are missing, such a request ends the
    # server.
    stops = getattr(tokenizer, "eos_token_id", None) is not None and hasattr(tokenizer, "additional_stop_token_ids")
    return replace(limits, stop_token=stops, plants=can_plant(scheduler))


# --- The engine's requests -------------------------------------------------------------------------------------------


def make_request(name: str, prompt: Sequence[int], new: int, phase: Phase, *, tokenizer: Any) -> Any:
    """Make a request as the tokenizer process of the installed release makes it."""
    from sglang.srt.managers.io_struct import TokenizedGenerateReqInput
    from sglang.srt.sampling.sampling_params import SamplingParams

    params = SamplingParams(max_new_tokens=new, ignore_eos=True, **phase.sampling)
    params.normalize(tokenizer)  # without a tokenizer 0.5.23 refuses min_new_tokens
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
        return_logprob=phase.output_logprobs,
        logprob_start_len=-1,
        top_logprobs_num=0,
        token_ids_logprob=None,
        stream=False,
    )
    made.rid = name
    return made


def make_abort() -> Any:
    """Make a request that aborts all others."""
    from sglang.srt.managers.io_struct import AbortReq

    return AbortReq(abort_all=True)


def make_flush() -> Any:
    """Make a request that flushes the prefix cache."""
    from sglang.srt.managers.io_struct import FlushCacheReqInput

    return FlushCacheReqInput()


def drop_requests(scheduler: Any) -> None:
    """Drop all requests of a scheduler whose event loop has ended with an exception, and free their KV cache slots.

    :raises Exception: the scheduler does not flush its cache, or the CUDA context no longer works.
    """
    from sglang.srt.managers.schedule_batch import ScheduleBatch

    scheduler.waiting_queue.clear()
    scheduler.running_batch = ScheduleBatch(reqs=[], batch_is_full=False)
    for name in ("last_batch", "cur_batch", "chunked_req"):
        if hasattr(scheduler, name):
            setattr(scheduler, name, None)
    if (results := getattr(scheduler, "result_queue", None)) is not None:
        results.clear()
    if not scheduler.flush_cache():
        raise RuntimeError("requests are left after a rehearsed forward pass failed")


# --- One rank --------------------------------------------------------------------------------------------------------


class Rehearsal:
    """One rank's rehearsal, from its beginning until the prefix cache is flushed.

    :param gpu: number of this rank's GPU.
    :param board: key-value store of the server's ranks.
    :param number: number of this rehearsal in this start.
    :param derive: function that derives the phases from the limits of this scheduler.
    :param leads: whether this is rank 0, which puts the requests into the inbox.
    :param peaks: peak bytes of the tensors in the phases of earlier rehearsals, by the phases' names.
    :param fewer_requests: most requests at once, as for :func:`limits_of`.
    :param limits_penalized: :attr:`.phases.Limits.limits_penalized`.
    :param bytes_per_token: bytes of one token in the KV cache.
    :param margin: bytes that must stay free when more requests run at once than the user asked for.
    """

    def __init__(
        self,
        scheduler: Any,
        gpu: int,
        board: Board,
        number: int,
        derive: Callable[[Limits], Sequence[Phase]],
        *,
        leads: bool,
        peaks: Mapping[str, int],
        fewer_requests: int = 0,
        limits_penalized: bool = False,
        bytes_per_token: float = 0.0,
        margin: int = 0,
    ) -> None:
        self.scheduler, self.gpu, self.leads = scheduler, gpu, leads
        self.on_end: Callable[[Measured], None] = lambda measured: None
        """Function that is called once with the result, on every rank in the same turn."""
        self._board, self._low, self._derive = board, f"{LOW} {number}", derive
        self._peaks, self._fewer_requests, self._limits_penalized = dict(peaks), fewer_requests, limits_penalized
        self._bytes_per_token, self._margin = bytes_per_token, margin
        self.runner = scheduler.tp_worker.model_runner
        channels = getattr(scheduler, "ipc_channels", scheduler)
        self._senders = [channels.send_to_tokenizer, channels.send_to_detokenizer]
        self._failure, self._stopped, self._is_flushing, self._has_planted = "", False, False, False
        self._undo: list[Callable[[], None]] = []
        self._driver: LoadDriver | None = None

    def begin(self) -> Limits:
        """Begin the rehearsal on this rank: save the scheduler's state, and patch the scheduler.

        :returns: the limits of this scheduler's forward passes.
        :raises Exception: this rank cannot rehearse; the caller must call :meth:`end`.
        """
        self._began = self._last_forward = time.monotonic()
        gpu_memory.reset_peak(self.gpu)
        self._first = first = gpu_memory.read(self.gpu)
        self._lowest, self._peak_reserved, self._peak = first.free, first.reserved, first.allocated
        self._expected = math.inf
        self._phase, self._phases = "", dict[str, int]()
        limits = limits_of(self.scheduler, self._fewer_requests)
        if self._limits_penalized:
            limits = replace(limits, limits_penalized=True)
        # Decodes of more requests than the user asked for may be left out. The first number is the bytes that the
        # allocator had reserved before the first of these decodes, the second the bytes that they may take.
        self._reserved_by_others: int | None = None
        self._for_more_requests = self._bytes_per_token * limits.cache_tokens * MORE_REQUESTS_FRACTION
        # A prompt of a whole chunk would wait for ever with fewer window tokens, or be computed in smaller chunks.
        least = max(limits.largest, limits.window) + 2 * limits.page
        if limits.window_tokens and limits.window_tokens <= least:
            raise RuntimeError(
                f"sliding windows of {limits.window_tokens} tokens have no room for {limits.largest} more"
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
            self._set_until_end(sender, "send_output", self._swallow)
        # Lift the queue limit. The limit does not bound a batch, because retracted requests come back into the batch.
        self._set_until_end(self.scheduler, "max_queued_requests", None)
        self._watch_forwards()
        return limits

    def end(self) -> None:
        """Restore the scheduler's state. This never raises, because the other ranks wait for this rank afterwards."""
        while self._undo:
            try:
                self._undo.pop()()
            except Exception as error:
                log.logger.warning(
                    log.format_line("kv-sizing", "the scheduler is not wholly as before the rehearsal: %s"), error
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
        import numpy
        import torch

        self._undo.append(partial(torch.set_rng_state, torch.get_rng_state()))
        self._undo.append(partial(random.setstate, random.getstate()))
        self._undo.append(partial(numpy.random.set_state, numpy.random.get_state()))
        if torch.cuda.is_available() and torch.cuda.is_initialized():
            self._undo.append(partial(torch.cuda.set_rng_state, torch.cuda.get_rng_state(self.gpu), self.gpu))

    def _save_counters(self) -> None:
        patcher = Patcher()
        self._undo.append(patcher.undo)
        mute_metrics(patcher)
        reporter = getattr(self.scheduler, "metrics_reporter", None)
        for owner in filter(None, (self.scheduler, reporter, self.runner)):
            for name, value in list(vars(owner).items()):
                if name in COUNTERS or (name.startswith("spec_") and isinstance(value, int | float)):
                    self._undo.append(partial(setattr, owner, name, copy(value)))
                elif name in RECORDING:
                    self._set_until_end(owner, name, False)

    def look_at_turn(self) -> None:
        """Read the memory in each turn, because sampling and a draft model's forward pass run after the watched one."""
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
                self._driver.record_planted(is_planted)
        except Exception as error:
            self.fail(one_line_error(error))

    def _watch_forwards(self) -> None:
        original = self.runner.forward

        def forward(batch: Any, *args: Any, **kwargs: Any) -> Any:
            try:
                # Read the sizes now, before the engine pads the ranks to the longest batch.
                facts = batch_facts(batch) if self._driver is not None else None
            except Exception as error:
                facts = None
                self.fail(one_line_error(error))
            result = original(batch, *args, **kwargs)
            self._last_forward = time.monotonic()
            try:
                self._read_memory()
                if self._driver is not None and facts is not None:
                    self._driver.record_forward(replace(facts, graph=bool(getattr(result, "can_run_graph", False))))
            except Exception as error:
                self.fail(one_line_error(error))
            return result

        self._set_until_end(self.runner, "forward", forward)

    def _read_memory(self) -> None:
        if self._failure:
            return
        try:
            now = gpu_memory.read(self.gpu)
            self._lowest = min(self._lowest, now.free)
            self._peak_reserved = max(self._peak_reserved, now.reserved)
            self._peak = max(self._peak, now.peak)
            if self._phase:
                self._phases[self._phase] = max(self._phases.get(self._phase, 0), now.peak - self._first.allocated)
            if now.free < MIN_FREE_BYTES and not self._stopped:
                self._stopped = True
                self._board.raise_flag(self._low)
        except Exception as error:
            self.fail(one_line_error(error))

    def _fits(self, estimate: Estimate) -> bool:
        """Return whether there is memory for a forward pass of the estimated size.

        The estimate counts only tensors, as if the allocator could use all of its memory for them.
        """
        self._read_memory()  # the last reading was before the last forward pass's sampling
        taken = self._phases.get(estimate.name) or self._peaks.get(estimate.name)
        if taken is None:
            return True
        if estimate.with_graphs:
            taken += graph_bytes(self.runner)
        now, must = gpu_memory.read(self.gpu), not estimate.fewer_requests
        taken_next = int(estimate.times * taken)
        left = now.free + now.reserved - self._first.allocated - taken_next
        largest = max([*self._phases.values(), *self._peaks.values()])
        if self._reserved_by_others is None and not must:
            self._reserved_by_others = self._peak_reserved
        if left >= MIN_FREE_BYTES and (must or taken_next <= largest):
            return True
        if must:
            self._stopped, self._expected = True, min(self._expected, left)
            return False
        # If its free blocks are too small, the allocator reserves new memory for a larger decode. So count the memory
        # that it has reserved since the first decode of more requests than the user asked for, not the tensors.
        assert self._reserved_by_others is not None
        cost = self._peak_reserved - self._reserved_by_others + taken_next - taken
        # The margin must stay free, too, so that more requests never make the KV cache smaller than the engine's own.
        return cost <= self._for_more_requests and left >= self._margin + MIN_FREE_BYTES

    def _slack(self) -> int:
        """Return the bytes that PyTorch's allocator keeps in addition to the largest sum of tensors."""
        return max(0, self._peak_reserved - self._first.reserved - (self._peak - self._first.allocated))

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
            if self._seconds_to_deadline() < 0 or (not self._driver.is_over and self._board.is_raised(self._low)):
                self._driver.end()
            requests = [] if self._driver.is_over else self._driver.next_requests(idle, self._is_stuck())
        except Exception as error:
            self.fail(one_line_error(error))
            self._driver.is_over, requests = True, self._driver.abort_all()
        is_abandoned = self._seconds_to_deadline() + self._abandon_after_s < 0
        if is_abandoned and self._has_planted:  # no user's prompt may find a planted prefix
            is_abandoned, requests = False, requests or ([] if idle else self._driver.abort_all())
        if self._is_flushing or (not is_abandoned and (requests or not self._driver.is_over or not idle)):
            return [Broadcast(tuple(requests))] if requests else []
        self._is_flushing = True
        return [Broadcast((make_flush(),))]

    def _is_stuck(self) -> bool:
        """Return whether the scheduler has waiting requests, and runs no request that could free slots for them.

        The engine admits a request if enough KV cache slots are free, or can be freed while the request's own prefix is
        in use. It does not report that it will never admit a request.
        """
        if time.monotonic() - self._last_forward < STUCK_AFTER_S:
            return False
        scheduler = self.scheduler
        stages = (*getattr(scheduler, "running_mbs", ()), *getattr(scheduler, "mbs", ()))
        batches = [batch for batch in (scheduler.running_batch, *stages) if batch is not None]
        runs = scheduler.chunked_req is not None or not all(batch.is_empty() for batch in batches)
        return bool(scheduler.waiting_queue) and not runs

    def _swallow(self, output: Any, recv_obj: Any = None) -> None:
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
        try:
            result = self._measured(flushed)
        except Exception as error:
            result = Measured(failure=self._failure or one_line_error(error))
        self.end()
        self.on_end(result)

    def _measured(self, flushed: bool) -> Measured:
        driver, reserved = self._driver, self._peak_reserved - self._first.reserved
        return Measured(
            # Memory that other processes have freed in the meantime is not counted as free.
            lowest=min(self._lowest, self._first.free - max(0, reserved)),
            expected=self._expected,
            free=self._first.free,
            graphs=graph_bytes(self.runner),
            slack=self._slack(),
            phases=self._phases,
            failure=self._failure or ("" if flushed else "requests were left"),
            stopped=self._stopped,
            seconds={**(driver.seconds if driver else {}), ALL: time.monotonic() - self._began},
            missed=driver.missed if driver else {},
            fewer_requests=driver.fewer_requests if driver else 0,
            fallback=driver.fallback if driver else 0,
        )
