"""A rehearsal in a scheduler that has started, through its own inbox and outbox.

Requests are put where the scheduler reads the tokenizer's, and answers are swallowed where it sends them. Everything in
between is the engine's: broadcast to the ranks, admission, chunking, overlap, sampling. Everything that is set for it
is taken back when it is over.

The first rank alone puts. With data-parallel attention each rank has an inbox and requests of its own, so requests
travel as orders do (:class:`.ranks.Orders`): every rank unpacks the same ones in the same turn, and all run the same
batches in step. The engine itself confirms it: a phase counts when the tokens of all ranks have reached its bound. All
end in the same turn, with the flush, so that none waits for another that has still forwards to run. The stages of a
pipeline take their turns one after another: what is put comes to the next stage with what the one before hands on.
"""

from __future__ import annotations

import math
import random
import sys
import time
from array import array
from collections.abc import Callable, Iterator, Mapping, Sequence
from copy import copy
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import count
from typing import Any

from sglang_moe_patches.core import gpu_memory, log
from sglang_moe_patches.core.patch import Patcher, one_line_error
from sglang_moe_patches.memory.kv_sizing.eligibility import arguments_of
from sglang_moe_patches.memory.kv_sizing.phases import (
    DECODES,
    SAMPLED,
    SHORT_PROMPT_TOKENS,
    Batch,
    Estimate,
    Limits,
    Phase,
    PhaseKind,
    Plant,
    ServerFacts,
    Tokens,
    derive_limits,
    first_tokens,
    max_new_tokens,
    shared_prefix,
)
from sglang_moe_patches.memory.kv_sizing.planted_prefix import can_plant, plant
from sglang_moe_patches.memory.kv_sizing.pools import GIB, hybrid, pool_bytes, pools_of
from sglang_moe_patches.memory.kv_sizing.ranks import Board, Broadcast, is_idle
from sglang_moe_patches.memory.kv_sizing.sizing import MIN_FREE_BYTES

REHEARSAL_TIMEOUT_S = 300.0
"""After which no further phase begins. The engine's own first request gives up after ten minutes."""
ABANDON_AFTER_S = 60.0
"""More, after which what still runs is left to itself, and nothing counts."""
STUCK_AFTER_S = 10.0
"""Seconds without a forward after which a scheduler that runs nothing will admit none of the requests that wait."""
MORE_REQUESTS_FRACTION = 1 / 32
"""Of the KV cache: what may be given up for more requests at once than the other forwards have memory for. Each takes
about 2 MB in a decode, and holds tens of times as much in the KV cache."""
ATTEMPTS_PER_PHASE = 2
"""Which requests share a forward depends on what the scheduler has left to do when they arrive."""
LOW = "little memory is left"
"""What a rank tells the first on the board."""
ALL = "all"
"""Of :attr:`Measured.seconds`: the whole rehearsal, beside its phases."""

COUNTERS = (
    *("forward_ct", "forward_ct_decode", "forward_pass_id", "num_generated_tokens", "last_gen_throughput"),
    *("num_retracted_reqs", "total_prefill_uncached_tokens", "total_prefill_busy_us", "decode_moment_totals"),
    *("_prev_decode_launch_ts", "max_prefill_bs"),
)
"""Of the scheduler, or of what keeps its metrics: as before afterwards, like those of speculation (``spec_...``)."""
METRICS = {"Counter": ("inc",), "Gauge": ("inc", "dec", "set"), "Histogram": ("observe",), "Summary": ("observe",)}
"""What changes a metric, by the kinds that ``prometheus_client`` has."""
RECORDING = ("enable_metrics", "current_scheduler_metrics_enabled")
"""Whether metrics are counted: not meanwhile."""


@dataclass(frozen=True)
class Measured:
    """What a rank has seen in a rehearsal; bytes.

    :param lowest: its lowest free memory.
    :param expected: what a forward that did not run would have left; it may be negative.
    :param free: free when it began: graphs and what start-up has left are taken from it.
    :param graphs: what went into graphs of decodes before.
    :param slack: what the allocator keeps beyond the most tensors.
    :param phases: the peak of tensors in each phase; only the first rank has the names.
    :param failure: why it is not known; "" where it is.
    :param stopped: the rehearsal ended early, before memory ran out.
    :param fewer_requests: as the driver has found; only the first rank knows.
    :param fallback: the next smaller number of requests at once, where more have run than anybody asked for; 0: no
        more have. Only the first rank knows.
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
    """``SGLANG_WARMUP_TIMEOUT``, after which the engine ends a server without a first answer; infinite: not set."""
    try:
        from sglang.srt.environ import envs

        given = float(envs.SGLANG_WARMUP_TIMEOUT.get())
    except Exception:
        return math.inf
    return given if given > 0 else math.inf


def timeout_s() -> float:
    """Seconds after which no further phase begins: within the time that the engine gives its own warm-up."""
    # The warm-up request waits for the rehearsal, and takes a while itself.
    return min(REHEARSAL_TIMEOUT_S, warmup_limit_s() / 2)


def abandon_after_s() -> float:
    """Seconds more, after which what still runs is left to itself: within the same time."""
    return min(ABANDON_AFTER_S, warmup_limit_s() / 4)


def mute_metrics(patcher: Patcher) -> None:
    """Have no metric of this process counted, whoever counts it."""
    # Not imported here: where it puts metrics is decided by a variable that the engine sets before it imports it.
    prometheus_client = sys.modules.get("prometheus_client")
    if prometheus_client is None:
        return
    for name, methods in METRICS.items():
        kind = getattr(prometheus_client, name)
        for method in methods:
            patcher.wrap(kind, method, lambda original: lambda self, *args, **kwargs: None)


# --- What the engine says ---------------------------------------------------------------------------------------------


def batch_facts(batch: Any) -> Batch:
    """What the engine's ``ForwardBatch`` says of itself."""
    lengths = getattr(batch, "seq_lens_cpu", None)
    prefixes = _numbers(getattr(batch, "extend_prefix_lens_cpu", None))
    gathered = _numbers(getattr(batch, "global_num_tokens_cpu", None))
    return Batch(
        mode=batch.forward_mode.name,
        tokens=0 if batch.input_ids is None else int(batch.input_ids.shape[0]),
        requests=int(batch.batch_size),
        prefix=sum(prefixes),
        longest_prefix=max(prefixes, default=0),
        longest=0 if lengths is None or not len(lengths) else int(lengths.max()),
        all_ranks=sum(gathered),
    )


def _numbers(values: Any) -> list[int]:
    return [] if values is None else [int(value) for value in values]


def server_facts(runner: Any) -> ServerFacts:
    """What a model runner consists of, as far as this release tells."""
    pool, table = pools_of(runner)
    config = runner.model_config
    rows = getattr(table, "req_to_token", None)
    graphs = getattr(runner, "decode_cuda_graph_runner", None) or getattr(runner, "graph_runner", None)
    captured = getattr(graphs, "max_bs", None)
    # By the allocator: the pool's own number counts addresses, with and without memory.
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
    """Bytes that the engine has seen go into graphs of decodes, and what they read: 0 where it does not say."""
    told = getattr(runner, "graph_memory_usage", None)  # from 0.5.14 on
    if told is None:
        return round(float(getattr(runner, "graph_mem_usage", 0) or 0) * GIB)
    return round(sum(float(told.get(phase, 0)) for phase in ("decode", "target_verify")) * GIB)


def limits_of(scheduler: Any, fewer_requests: int = 0) -> Limits:
    """What bounds a forward of this scheduler.

    :param fewer_requests: how many run at once, where an earlier rehearsal has lowered it; 0: as many as can.
    """
    in_force = {name: getattr(scheduler, name) for name in ("chunked_prefill_size", "max_prefill_tokens")}
    limits = derive_limits(
        arguments_of(scheduler.server_args) | in_force,
        server_facts(scheduler.tp_worker.model_runner),
        cache_tokens=scheduler.max_total_num_tokens,
        requests=scheduler.max_running_requests,
        input_tokens=scheduler.max_req_input_len - 1,  # the engine refuses a prompt of as many tokens as that
    )
    if fewer_requests:
        limits = limits.with_requests(fewer_requests)
    tokenizer = getattr(scheduler, "tokenizer", None)
    # The engine reads both for a request with min_new_tokens, and without them such a request ends the server.
    stops = getattr(tokenizer, "eos_token_id", None) is not None and hasattr(tokenizer, "additional_stop_token_ids")
    return replace(limits, stop_token=stops, plants=can_plant(scheduler))


# --- The engine's requests -------------------------------------------------------------------------------------------


def make_request(name: str, prompt: Sequence[int], new: int, phase: Phase, *, tokenizer: Any) -> Any:
    """A request as the engine's tokenizer process makes it, in the words of the installed release."""
    from sglang.srt.managers.io_struct import TokenizedGenerateReqInput
    from sglang.srt.sampling.sampling_params import SamplingParams

    params = SamplingParams(max_new_tokens=new, ignore_eos=True, **phase.sampling)
    params.normalize(tokenizer)  # without one 0.5.23 refuses min_new_tokens
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
    from sglang.srt.managers.io_struct import AbortReq

    return AbortReq(abort_all=True)


def make_flush() -> Any:
    from sglang.srt.managers.io_struct import FlushCacheReqInput

    return FlushCacheReqInput()


def drop_requests(scheduler: Any) -> None:
    """Forget all requests of a scheduler whose event loop was left by an exception, and free their slots.

    :raises Exception: the scheduler does not flush its cache; or the exception has broken the CUDA context.
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


# --- Which request is put next ---------------------------------------------------------------------------------------


class LoadDriver:
    """The script of one server, from the first request to the last answer.

    Asked again and again for what to put; in between it is told what was seen and answered.

    :param derive: makes what is driven from the limits.
    :param make: makes a request of the engine's from a name, a prompt, its new tokens and the phase that says how it is
        sampled.
    :param fits: whether there is memory for a phase or a prompt that is larger than what ran.
    :param abort: makes the request that ends all others.
    :param seconds_to_deadline: seconds until no further phase begins.
    :param grace_s: so many more, after which what still runs is left to itself.
    """

    def __init__(
        self,
        derive: Callable[[Limits], Sequence[Phase]],
        limits: Limits,
        make: Callable[[str, Sequence[int], int, Phase], Any],
        abort: Callable[[], Any],
        seconds_to_deadline: Callable[[], float],
        grace_s: float,
        fits: Callable[[Estimate], bool],
    ):
        self._derive, self.limits, self._make, self._abort, self._fits = derive, limits, make, abort, fits
        self.phases = derive(limits)
        self._seconds_to_deadline, self._grace_s, self._slowest_s = seconds_to_deadline, grace_s, 0.0
        self.seconds: dict[str, float] = {}
        """Of each phase that began, by its name."""
        self.fewer_requests = 0
        """How many run at once from now on, because more would have taken too much memory; 0: as many as can."""
        self.fallback = self._most_requests = 0
        """The next smaller number of requests, and the largest that has run; 0: no more than anybody asked for."""
        self.missed: dict[str, PhaseKind] = {}
        """Of phases that were not reached, by their names."""
        self.over = False
        self._numbers, self._first_tokens = count(1), first_tokens(limits)
        self._waiting: set[str] = set()
        self._phase: Phase | None = None
        self._reached = self._decoding = self._idle = self._stuck = self._ended = self._planted = False
        self._steps = self._run()

    @property
    def phase_name(self) -> str:
        return self._phase.name if self._phase is not None else ""

    def saw(self, batch: Batch) -> None:
        """A forward has run."""
        if self._phase is None:
            return
        self._reached = self._reached or self._phase.bound.is_met(batch)
        behind = batch.mode in DECODES and batch.requests >= self._phase.background
        self._decoding = self._decoding or behind

    def answered(self, name: str) -> None:
        """A request has ended, however it did."""
        self._waiting.discard(name)

    def planted(self, held: bool) -> None:
        """The caches have been given a :class:`Plant`.

        :param held: what :func:`.planted_prefix.plant` said on this rank.
        """
        self._planted = held

    def end(self) -> None:
        """No further phase; what runs is aborted, or ends by its length."""
        self._ended = True

    def put(self, idle: bool, stuck: bool) -> list[Any]:
        """What to put now: requests, or one :class:`Plant`; nothing while requests are waited for.

        :param idle: the scheduler has nothing to do: what is waited for has been lost.
        :param stuck: it runs nothing and admits none of the requests that wait: they are aborted.
        """
        self._idle, self._stuck = idle, stuck
        try:
            return next(self._steps)
        except StopIteration:
            self.over = True
            return []

    def abort_all(self) -> list[Any]:
        """The request that ends all others; none with speculation, where requests are short and end by their length."""
        return [] if self.limits.draft_tokens else [self._abort()]

    def _run(self) -> Iterator[list[Any]]:
        left, began_kinds = list(self.phases), set[PhaseKind]()
        while left:
            phase = left.pop(0)
            began_kinds.add(phase.kind)
            if phase.estimate is not None and not self._fits(phase.estimate):
                if phase.estimate.fewer_requests:
                    self.fewer_requests = phase.estimate.fewer_requests * self.limits.stages
                    self.limits = self.limits.with_requests(self.fewer_requests)
                    left = [later for later in self._derive(self.limits) if later.kind not in began_kinds]
                    continue
                self.end()
            unasked = phase.kind is PhaseKind.EAGER_DECODE and phase.bound.requests > self.limits.penalized
            if unasked and self.limits.stages == 1:  # a pipeline's may have more in a forward than are put for it
                self.fallback = max(self.limits.penalized, self._most_requests)
                self._most_requests = phase.bound.requests
            self._phase, self._reached = phase, False
            began = self._seconds_to_deadline()
            for attempt in range(ATTEMPTS_PER_PHASE):
                if self._stopping():
                    break
                yield from self._attempt(phase, Tokens(f"{phase.name} {attempt}", self.limits.vocabulary))
                self.seconds[phase.name] = began - self._seconds_to_deadline()
                if self._reached:
                    break
            if phase.name in self.seconds and phase.bound.modes == DECODES and not phase.bound.graph:
                yield from self._displace(phase)
            not_reached = [] if self._reached else [phase]
            if self._stopping():
                not_reached, left = not_reached + left, []
            self.missed |= {each.name: each.kind for each in not_reached}
        self._phase = None

    def _stopping(self) -> bool:
        return self._ended or self._seconds_to_deadline() < 0

    @property
    def _nothing_more_comes(self) -> bool:
        """Whether the requests that were put are waited for in vain: they were lost, are not admitted, or must end."""
        return self._idle or self._stuck or self._ended

    def _attempt(self, phase: Phase, tokens: Tokens) -> Iterator[list[Any]]:
        self._decoding = self._planted = False
        prefix = shared_prefix(phase.shared, self.limits)
        if prefix and self.limits.plants:
            yield [Plant(tuple(prefix))]
            if not self._planted:
                return  # computing it may take minutes
        if phase.background:
            others = [self._own(SHORT_PROMPT_TOKENS, tokens) for _ in range(phase.background)]
            yield self._requests(others, max_new_tokens(phase.background, self.limits, 4096), phase)
            while self._waiting and not (self._decoding or self._nothing_more_comes):
                yield []
        behind = set(self._waiting)
        prompts, last_tokens = [prefix[: each.shared] + self._own(each.fresh, tokens) for each in phase.prompts], 0
        for turn in [[prompt] for prompt in prompts] if phase.in_turn else [prompts]:
            # What comes behind a prefix is about as large as what came before.
            if last_tokens and not (phase.growth or self._fits(Estimate(phase.name, len(turn[0]) / last_tokens))):
                self.end()
                break
            last_tokens = len(turn[0])
            if (left_s := self._seconds_to_deadline() + self._grace_s) < phase.growth * self._slowest_s:
                self.end()
                break
            yield self._requests(turn, phase.new_tokens, phase)
            while self._waiting - behind and not self._nothing_more_comes:
                if self._reached and not phase.to_the_end and not phase.in_turn:
                    break
                yield []
            if phase.growth:
                self._slowest_s = max(self._slowest_s, left_s - self._seconds_to_deadline() - self._grace_s)
            if self._ended or self._stuck:
                break
        yield from self._end_requests()

    def _displace(self, phase: Phase) -> Iterator[list[Any]]:
        """Run one short request after a decode that may have had no graph.

        What attention worked on in such a decode, gigabytes for hundreds of requests, and what its requests were
        sampled with, are held until others take their place. The next phase would begin with them, and the flush would
        not free them.
        """
        while not self._idle:  # else it is merged into the decode's batch
            yield []
        plain = replace(phase, name="", sampling=SAMPLED, output_logprobs=False)
        prompt = self._own(SHORT_PROMPT_TOKENS, Tokens(f"behind {phase.name}", self.limits.vocabulary))
        yield self._requests([prompt], 2, plain)
        while self._waiting and not (self._idle or self._stuck):
            yield []
        yield from self._end_requests()

    def _end_requests(self) -> Iterator[list[Any]]:
        """Abort those that are still waited for, and wait until nothing of them is left."""
        if self._waiting and not self._idle:
            yield [self._abort()] if self._stuck else self.abort_all()
            while self._waiting and not self._idle:
                # The engine aborts in the batch whose turn it is, and a pipeline has several.
                yield self.abort_all() if self.limits.stages > 1 else []
        self._waiting.clear()
        # The engine keeps a batch for a turn or two after its last answer, with all that its penalties take. Requests
        # that come meanwhile are merged into it.
        while not (self._idle or self._ended):
            yield []

    def _own(self, length: int, tokens: Tokens) -> list[int]:
        """What a prompt has in common with no other. A token that the radix cache has of it would be missing in a
        forward, and move where a chunk ends."""
        return [next(self._first_tokens), *tokens.some(length - 1)] if length else []

    def _requests(self, prompts: Sequence[Sequence[int]], new: int, phase: Phase) -> list[Any]:
        names = [f"rehearsal-{next(self._numbers)}" for _ in prompts]
        self._waiting.update(names)
        return [self._make(name, prompt, new, phase) for name, prompt in zip(names, prompts, strict=True)]


# --- One rank --------------------------------------------------------------------------------------------------------


class Rehearsal:
    """What one rank does from its begin until its cache is flushed.

    :param gpu: whose memory is read.
    :param board: of the server's ranks.
    :param number: of the rehearsals of this start.
    :param derive: makes what is driven from the limits of this scheduler.
    :param leads: whether this rank puts what all of them take in.
    :param peaks: bytes of tensors in phases of an earlier rehearsal.
    :param fewer_requests: as :func:`limits_of` takes them.
    :param limits_penalized: :attr:`.phases.Limits.limits_penalized`.
    :param bytes_per_token: of the KV cache.
    :param margin: bytes that must be left beside more requests at once than the other forwards have memory for.
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
        """Called once with the result, on every rank in the same turn of its loop."""
        self._board, self._low, self._derive = board, f"{LOW} {number}", derive
        self._peaks, self._fewer_requests, self._limits_penalized = dict(peaks), fewer_requests, limits_penalized
        self._bytes_per_token, self._margin = bytes_per_token, margin
        self.runner = scheduler.tp_worker.model_runner
        channels = getattr(scheduler, "ipc_channels", scheduler)
        self._senders = [channels.send_to_tokenizer, channels.send_to_detokenizer]
        self._failure, self._stopped, self._flushing, self._has_planted = "", False, False, False
        self._undo: list[Callable[[], None]] = []
        self._driver: LoadDriver | None = None

    def begin(self) -> Limits:
        """Install all wrappers.

        :returns: what bounds a forward.
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
        # Bytes that the allocator had reserved before the first decode of more requests than must be; then the bytes
        # that such decodes may take.
        self._reserved_by_others: int | None = None
        self._for_more_requests = self._bytes_per_token * limits.cache_tokens * MORE_REQUESTS_FRACTION
        # Longer prompts would wait for ever, or come in chunks that are smaller.
        least = max(limits.largest, limits.window) + 2 * limits.page
        if limits.window_tokens and limits.window_tokens <= least:
            raise RuntimeError(
                f"sliding windows of {limits.window_tokens} tokens have no room for {limits.largest} more"
            )
        self._keep_random_state()
        self._timeout_s, self._abandon_after_s = timeout_s(), abandon_after_s()
        self._keep_counters()
        if self.leads:
            make = partial(make_request, tokenizer=getattr(self.scheduler, "tokenizer", None))
            self._driver = LoadDriver(
                *(self._derive, limits, make, make_abort, self._seconds_to_deadline, self._abandon_after_s, self._fits)
            )
        for sender in self._senders:
            self._meanwhile(sender, "send_output", self._swallow)
        # Of requests that wait: a forward is as large with it, as those that are taken back count, too.
        self._meanwhile(self.scheduler, "max_queued_requests", None)
        self._watch_forwards()
        return limits

    def end(self) -> None:
        """Take everything back; never raises, as the other ranks wait for this one afterwards."""
        while self._undo:
            try:
                self._undo.pop()()
            except Exception as error:
                log.logger.warning(log.format_line("kv-sizing", "not all is what it was: %s"), error)

    def _meanwhile(self, owner: Any, name: str, value: Any) -> None:
        """An attribute of one object, until the end."""
        patcher = Patcher()
        self._undo.append(patcher.undo)
        patcher.add(owner, name, value)

    def _seconds_to_deadline(self) -> float:
        """Seconds until no further phase begins."""
        return self._began + self._timeout_s - time.monotonic()

    def _keep_random_state(self) -> None:
        import numpy
        import torch

        self._undo.append(partial(torch.set_rng_state, torch.get_rng_state()))
        self._undo.append(partial(random.setstate, random.getstate()))
        self._undo.append(partial(numpy.random.set_state, numpy.random.get_state()))
        if torch.cuda.is_available() and torch.cuda.is_initialized():
            self._undo.append(partial(torch.cuda.set_rng_state, torch.cuda.get_rng_state(self.gpu), self.gpu))

    def _keep_counters(self) -> None:
        patcher = Patcher()
        self._undo.append(patcher.undo)
        mute_metrics(patcher)
        reporter = getattr(self.scheduler, "metrics_reporter", None)
        for owner in filter(None, (self.scheduler, reporter, self.runner)):
            for name, value in list(vars(owner).items()):
                if name in COUNTERS or (name.startswith("spec_") and isinstance(value, int | float)):
                    self._undo.append(partial(setattr, owner, name, copy(value)))
                elif name in RECORDING:
                    self._meanwhile(owner, name, False)

    def look_at_turn(self) -> None:
        """Called in each turn: sampling and a draft model's forward come after the one that was watched."""
        self._look()
        if self._driver is not None and self._driver.phase_name != self._phase:
            self._phase = self._driver.phase_name
            gpu_memory.reset_peak(self.gpu)

    def plant(self, order: Plant) -> None:
        """On every rank: have the cache of prefixes hold what a phase needs of one."""
        try:
            self._has_planted = True
            held = plant(self.scheduler, order.tokens)
            if self._driver is not None:
                self._driver.planted(held)
        except Exception as error:
            self.fail(one_line_error(error))

    def _watch_forwards(self) -> None:
        original = self.runner.forward

        def forward(batch: Any, *args: Any, **kwargs: Any) -> Any:
            try:
                # Before ranks are padded to the longest.
                facts = batch_facts(batch) if self._driver is not None else None
            except Exception as error:
                facts = None
                self.fail(one_line_error(error))
            result = original(batch, *args, **kwargs)
            self._last_forward = time.monotonic()
            try:
                self._look()
                if self._driver is not None and facts is not None:
                    self._driver.saw(replace(facts, graph=bool(getattr(result, "can_run_graph", False))))
            except Exception as error:
                self.fail(one_line_error(error))
            return result

        self._meanwhile(self.runner, "forward", forward)

    def _look(self) -> None:
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
        """Whether there is memory for it; judged by tensors, as if the allocator could use all that it keeps."""
        self._look()  # the last forward's sampling came after it
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
        # The allocator reserves a larger decode anew if its free blocks are too small. So count the memory that it has
        # reserved since the first decode of more requests, not the tensors.
        assert self._reserved_by_others is not None
        cost = self._peak_reserved - self._reserved_by_others + taken_next - taken
        # The margin must stay free, too: more requests never make the KV cache smaller than the engine's own.
        return cost <= self._for_more_requests and left >= self._margin + MIN_FREE_BYTES

    def _slack(self) -> int:
        """Bytes that the allocator keeps beyond the most tensors."""
        return max(0, self._peak_reserved - self._first.reserved - (self._peak - self._first.allocated))

    @property
    def is_running(self) -> bool:
        """Whether the rehearsal has begun and has not been ended."""
        return bool(self._undo)

    def fail(self, problem: str) -> None:
        """End the rehearsal early, without a result."""
        self._failure = self._failure or problem
        if self._driver is not None:
            self._driver.end()

    def poll(self) -> list[Any]:
        """What the scheduler reads now in place of users' requests."""
        if self._driver is None:
            return []
        idle = is_idle(self.scheduler)
        try:
            if self._seconds_to_deadline() < 0 or (not self._driver.over and self._board.is_raised(self._low)):
                self._driver.end()
            put = self._driver.put(idle, self._is_stuck()) if not self._driver.over else []
        except Exception as error:
            self.fail(one_line_error(error))
            self._driver.over, put = True, self._driver.abort_all()
        given_up = self._seconds_to_deadline() + self._abandon_after_s < 0
        if given_up and self._has_planted:  # a prefix that was not computed must not be left to users' prompts
            given_up, put = False, put or ([] if idle else self._driver.abort_all())
        if self._flushing or (not given_up and (put or not self._driver.over or not idle)):
            return [Broadcast(tuple(put))] if put else []
        self._flushing = True
        return [Broadcast((make_flush(),))]

    def _is_stuck(self) -> bool:
        """Whether requests wait that the scheduler will not admit: nothing runs that could make room for them.

        The engine admits a request by the slots that are free, or become free when its own prefix is in use, and does
        not say that it will never do so.
        """
        if time.monotonic() - self._last_forward < STUCK_AFTER_S:
            return False
        scheduler = self.scheduler
        stages = (*getattr(scheduler, "running_mbs", ()), *getattr(scheduler, "mbs", ()))
        batches = [each for each in (scheduler.running_batch, *stages) if each is not None]
        runs = scheduler.chunked_req is not None or not all(each.is_empty() for each in batches)
        return bool(scheduler.waiting_queue) and not runs

    def _swallow(self, output: Any, recv_obj: Any = None) -> None:
        """In the place of sending an answer."""
        kind = type(output).__name__
        if kind == "FlushCacheReqOutput":
            self._finish(bool(output.success))
            return
        if self._driver is None:
            return
        if kind == "AbortReq":
            self._driver.answered(output.rid)
        reasons = getattr(output, "finished_reasons", None) or []
        for name, reason in zip(getattr(output, "rids", None) or [], reasons, strict=False):
            if reason is not None:
                self._driver.answered(name)

    def _finish(self, flushed: bool) -> None:
        try:
            result = self._measured(flushed)
        except Exception as error:
            result = Measured(failure=self._failure or one_line_error(error))
        self.end()
        self.on_end(result)

    def _measured(self, flushed: bool) -> Measured:
        driver, grown = self._driver, self._peak_reserved - self._first.reserved
        return Measured(
            # Memory that other processes gave back meanwhile does not count.
            lowest=min(self._lowest, self._first.free - max(0, grown)),
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
