"""The start of a server whose KV cache is measured: rehearse, resize the KV cache, serve.

:meth:`ServerStart.start_up` is the start from top to bottom, the same on every rank. A *turn* is one iteration of the
scheduler's event loop. The start runs between turns.

A *rehearsal* runs the server's largest forward passes before the first user's request, and measures their memory. Its
parts are *phases*. A start has one to three rehearsals, its *passes*. The *need* is the memory that forward passes,
CUDA graphs and buffers take in addition to weights and KV cache. The *margin* is the memory that stays free. An *order*
is a message of rank 0 that all ranks carry out in the same turn.

Failures in a start have these effects. The *first size* of the KV cache is its size before any growth:

- A rank cannot reserve addresses for its first KV cache: the server serves with the engine's size. Free memory is not
  watched.
- A rank has no memory to map for a larger KV cache: the KV cache keeps the size that it had before.
- A rank still runs its event loop, but its measured need does not reach rank 0 within a minute: the KV cache has at
  most its first size, and the server serves.
- A rehearsed forward pass raises on all ranks: the KV cache has at most its first size, and the server serves.
- A rehearsed forward pass raises on some ranks only, or in a pipeline: the server ends, because the other ranks wait
  for the failed rank.
- A rank hangs, or its process dies: the engine's watchdog or launcher ends the server. This package does nothing.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Generator
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from types import SimpleNamespace
from typing import Any

from sglang_moe_patches.core import gpu_memory, log
from sglang_moe_patches.core.patch import Patcher, format_error
from sglang_moe_patches.memory.kv_sizing import phases, ranks, rehearsal, serving, sizing, token_count
from sglang_moe_patches.memory.kv_sizing.eligibility import arguments_of
from sglang_moe_patches.memory.kv_sizing.engine_objects import drop_requests, limits_of, server_facts
from sglang_moe_patches.memory.kv_sizing.pools import ElasticPools
from sglang_moe_patches.memory.kv_sizing.rehearsal import Measured, Rehearsal
from sglang_moe_patches.memory.kv_sizing.sizing import LaunchMemory, RankNeed, format_megabytes
from sglang_moe_patches.memory.kv_sizing.token_count import TokenCounts

IDLE_SLEEP_S = 0.001
"""Seconds that an idle scheduler sleeps in each iteration of its event loop during a rehearsal, with
``--sleep-on-idle``. The engine's own sleep of up to a second would make the rehearsal slow. Without any sleep the ranks
of a server would keep all processors busy."""
EXCHANGE_WAIT_S = 60.0
"""Seconds that rank 0 waits for a value of every other rank, such as its measured need. The other ranks wait for rank 0
without a limit."""
EXCEPTION_WAIT_S = 30.0
"""Seconds that a rank waits after its rehearsed forward pass has raised an exception. All other ranks must report an
exception in this time. Otherwise the server ends."""


def log_on_rank_0(leads: bool, message: str, *, warn: bool = False) -> None:
    """Log a message if this process is rank 0 (``leads``)."""
    if leads:
        (log.logger.warning if warn else log.logger.info)("%s", log.format_line("kv-sizing", message))


# --- Steps that all ranks take together -------------------------------------------------------------------------------


@dataclass(frozen=True)
class Exchange:
    """Step of a start in which each rank publishes a value, such as its need, and gets the values of all ranks.

    Rank 0 collects the values, and broadcasts them as a list. Users' requests wait meanwhile. A rank that does not
    publish within :data:`EXCHANGE_WAIT_S` seconds has ``None`` in the list. Rank 0's own value is always there.

    :param topic: name under which the ranks publish, such as ``measured 1``; each name is used once in a start.
    :param value: value of this rank. The values of all ranks have the same type.
    """

    topic: str
    value: Any


Start = Generator[Exchange | Rehearsal, Any, None]
"""Generator of the steps of a start. After an :class:`Exchange`, it resumes with the values of all ranks. After a
:class:`.Rehearsal`, it resumes with the rehearsal's result, or with ``None`` if rank 0 no longer waits for the end of
this rank's rehearsal."""


# --- The start --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Reservation:
    """KV cache of one rank over reserved addresses, and the facts from which its first size was computed.

    :param pools: the rank's KV cache.
    :param launch: the rank's memory before the engine made the KV cache.
    :param gpu: index of the rank's GPU.
    :param leads: whether this is rank 0.
    :param margin: bytes that stay free.
    :param bytes_per_token: KV cache bytes of one token on this rank.
    :param raised_tokens: number of tokens by which the first KV cache size is larger than the size by the engine's
        rule, because the rehearsal needs more tokens; 0 if the size by the rule is enough.
    :param max_tokens: ``--max-total-tokens``; 0 if not given.
    :param fraction_is_given: whether the user gave ``--mem-fraction-static``.
    """

    pools: ElasticPools
    launch: LaunchMemory
    gpu: int
    leads: bool
    margin: int
    bytes_per_token: float
    raised_tokens: int
    max_tokens: int
    fraction_is_given: bool


class ServerStart:
    """Start of one scheduler process, from the first turn of its event loop until it serves.

    :param reservation: this rank's KV cache.
    :param release: function that sends the final number of tokens to the launcher.
    """

    board: ranks.Board
    _limits: phases.Limits
    """Limits of the forward passes in the latest rehearsal."""

    def __init__(self, scheduler: Any, reservation: Reservation, release: Callable[[], None]) -> None:
        self.scheduler, self._release = scheduler, release
        self.reservation, self.pools = reservation, reservation.pools
        self.launch, self.leads, self.margin = reservation.launch, reservation.leads, reservation.margin
        self.log = partial(log_on_rank_0, self.leads)
        self.metrics = serving.Metrics(arguments_of(scheduler.server_args), reservation.gpu)
        self.orders = ranks.Orders(scheduler, self.obey)
        self.needs: list[RankNeed] = []
        """Memory needs (:class:`.RankNeed`) of all ranks after the latest rehearsal."""
        self._rehearsal: Rehearsal | None = None
        self._serving: serving.Serving | None = None
        self._pass = self._fewer_requests = self._exceptions = 0
        self._has_started_over = self._limits_penalized = False
        self._sleeper = Patcher()
        """Patch that shortens the sleep of ``--sleep-on-idle`` until the server serves."""
        # The following numbers cover all rehearsals, because a later rehearsal runs only the phases that have become
        # larger. The estimate `Measured.expected` is not among them, because its phase runs in the next rehearsal.
        self._need = self._bytes_before = self._slack_bytes = self._graph_bytes = 0
        self._seconds, self._phases = dict[str, float](), dict[str, int]()

    def begin(self, problem: str) -> None:
        """Begin the start. If a rank has a problem, all ranks serve with the engine's KV cache size. All ranks must
        call this method at the same point.

        :param problem: reason why this rank's KV cache cannot be resized; empty if it can.
        """
        self.board = ranks.Board(ranks.share_secret())
        if not problem:
            try:
                if getattr(self.scheduler, "idle_sleeper", None) is not None:
                    sleeper = SimpleNamespace(maybe_sleep=partial(time.sleep, IDLE_SLEEP_S))
                    self._sleeper.add(self.scheduler, "idle_sleeper", sleeper)
                self.orders.open()
                self._begin_rehearsal(phases.derive_phases)
            except Exception as error:
                problem = str(error) if isinstance(error, RuntimeError) else format_error(error)
        # Tell all ranks of a failure, because they would wait for the failed rank.
        problem = next(filter(None, ranks.all_gather(problem, str)), "")
        if not problem:
            limit_s = rehearsal.timeout_s()
            self.log(f"rehearses the largest forward passes before the first request, at most {limit_s:.0f} s")
            self._runner = StartRunner(self.start_up(), self.orders, self.board, leads=self.leads)
            self._runner.run()
            return
        if self._rehearsal is not None:
            self._rehearsal.end()
        self.orders.close()
        self._sleeper.undo()
        self.log(f"the KV cache keeps the engine's size and is not measured because {problem}", warn=True)
        self._set_metrics("rule", problem)
        self._release()

    def start_up(self) -> Start:
        """Measure the need, resize the KV cache, and serve. Yield each step that all ranks take together.

        All ranks resume with the same values in the same turn, so they make the same decisions.
        """
        failure = ""
        while True:
            assert self._rehearsal is not None
            measured = Measured(failure=failure) if failure else (yield self._rehearsal)
            needs = yield Exchange(f"measured {self._pass}", self._need_to_publish(measured))
            before, rank_0 = self.pools.counts.tokens, needs[0]
            tokens, reason, ended_early = self._decide(needs)
            requests = self._requests_to_start_over(rank_0, tokens < before, ended_early)
            # If an object of the engine refuses its own size, the start goes on instead of starting over.
            if requests is not None and not self._set_cache_size(before):
                failure = self._start_over(requests)
                continue
            rehearse_again, missed = tokens < before and ended_early, tuple(rank_0.missed.values())
            if tokens > before:
                reason = yield from self._map_on_all_ranks(tokens)  # a size that grows had no reason until now
                if reason:
                    tokens = before  # a rank that has mapped memory unmaps it in _set_cache_size
                else:
                    rehearse_again, missed = True, ()  # phases may be larger with the larger KV cache
            if problem := self._set_cache_size(tokens):
                reason, rehearse_again = problem, False
            self._fewer_requests = rank_0.fewer_requests
            derive = self._derive_next_pass(missed) if rehearse_again else None
            if derive is None:
                break
            failure = self._begin_next(derive)
        self._log_size(reason)
        self._limit_requests(rank_0)
        self._serve()

    def obey(self, order: ranks.Order) -> None:
        """Carry out a message of rank 0, such as the order to shrink the KV cache, as all ranks do in this turn."""
        if self._serving is not None:
            self._serving.obey(order)
        elif isinstance(order, ResumeStart):
            self._runner.obey(order)
        elif isinstance(order, phases.Plant) and self._rehearsal is not None:
            self._rehearsal.plant(order)

    # --- 1. Rehearse ---------------------------------------------------------------------------------------------

    def _begin_rehearsal(self, derive: Callable[[phases.Limits], list[phases.Phase]]) -> None:
        """Begin a rehearsal of the phases that ``derive`` makes from the scheduler's limits.

        :raises Exception: this rank cannot rehearse; the caller must end the rehearsal.
        """
        self._pass += 1
        limits = self._limits_in_force()
        self._rehearsal = Rehearsal(
            *(self.scheduler, self.reservation.gpu, self.board, self._pass, derive, limits),
            leads=self.leads,
            peaks=self._phases,
            bytes_per_token=self.reservation.bytes_per_token,
            margin=self.margin,
        )
        self._rehearsal.begin()
        self._limits = limits

    def _limits_in_force(self) -> phases.Limits:
        """Return the limits of this scheduler's forward passes with its present KV cache size."""
        limits = limits_of(self.scheduler, self._fewer_requests)
        return replace(limits, limits_penalized=True) if self._limits_penalized else limits

    def _begin_next(self, derive: Callable[[phases.Limits], list[phases.Phase]]) -> str:
        """Begin another rehearsal. Return the reason if this rank cannot begin it; empty if it has begun."""
        try:
            self._begin_rehearsal(derive)
        except Exception as error:
            if self._rehearsal is not None:
                self._rehearsal.end()
            return format_error(error)
        return ""

    def run_event_loop(self, run: Callable[[], Any]) -> Any:
        """Run the scheduler's event loop to its end. Begin it again if a rehearsed forward pass fails on all ranks.

        :param run: the engine's event loop.
        """
        while True:
            try:
                return run()
            except Exception as error:
                if not self._survives_exception():
                    raise
                problem = format_error(error)
                log.logger.warning(
                    log.format_line(
                        "kv-sizing",
                        "a rehearsed forward pass failed, so the KV cache does not grow; the server goes on, and "
                        "users' requests are not affected: %s",
                    ),
                    error,
                    exc_info=True,
                )
            # Do this outside of the except clause, because its exception keeps the tensors of the failed frames alive.
            self._fail_rehearsal(problem)

    def _survives_exception(self) -> bool:
        """Return whether the server can go on after an exception in the event loop. It can if a rehearsed forward pass
        has failed on all ranks.

        A rank that failed alone cannot go on, because the other ranks wait for it in a collective. Stages of a pipeline
        run different forward passes, so a stage always fails alone.
        """
        if self._rehearsal is None or not self._rehearsal.is_running or self._limits.stages > 1:
            return False
        self._exceptions += 1
        topic = f"exception {self._exceptions}"
        try:
            self.board.publish(topic, "")
            return None not in self.board.wait_for_all(topic, str, EXCEPTION_WAIT_S)
        except Exception as error:
            log.logger.warning(
                log.format_line(
                    "kv-sizing",
                    "a rehearsed forward pass failed on this rank, and the other ranks cannot be asked whether it "
                    "failed there, too (%s), so this rank ends. To start without a rehearsal, set "
                    "SGLANG_MOE_PATCHES_KV_SIZING=off",
                ),
                error,
            )
            return False

    def _fail_rehearsal(self, problem: str) -> None:
        """Drop the requests of a rehearsal in which a forward pass has raised, and end the rehearsal early.

        :param problem: description of the exception.
        """
        drop_requests(self.scheduler)
        assert self._rehearsal is not None
        self._rehearsal.fail(problem)

    # --- 2. Grow, or shrink --------------------------------------------------------------------------------------

    def _need_to_publish(self, measured: Measured | None) -> RankNeed:
        """Return the memory need that this rank publishes to the other ranks after a rehearsal.

        :param measured: result of this rank's rehearsal; ``None`` if rank 0 did not wait for its end.
        """
        measured = measured or Measured(failure="rank 0 did not wait for the end of this rank's rehearsal")
        try:
            need = self._add_measurements(measured)
        except Exception as error:
            need = RankNeed(failure=measured.failure or format_error(error))
        if not self.leads:
            return need
        fewer = measured.fewer_requests or self._fewer_requests
        limits = self._limits.with_requests(fewer) if fewer else self._limits
        is_limited = limits.has_default_requests or limits.limits_penalized
        return replace(
            need,
            missed=measured.missed,
            fewer_requests=fewer,
            restart_requests=measured.restart_requests,
            can_limit_penalized=self._limits.with_fewer_penalized() is not None,
            request_limits=(limits.batch, limits.penalized) if is_limited else (0, 0),
        )

    def _add_measurements(self, measured: Measured) -> RankNeed:
        """Add a rehearsal's measurements to those of earlier rehearsals, and return the need of this rank."""
        for name, seconds in measured.seconds.items():
            self._seconds[name] = self._seconds.get(name, 0.0) + seconds
        for name, peak in measured.phases.items():
            self._phases[name] = max(self._phases.get(name, 0), peak)
        # Request tables and states were allocated together with the KV cache, and count neither as KV cache nor as
        # need.
        beside_cache = server_facts(self.scheduler.tp_worker.model_runner).fixed_bytes
        mapped = self.pools.backing_bytes(self.pools.counts)
        without_forwards = self.launch.free - beside_cache - mapped
        if not measured.failure:
            self._need = max(self._need, without_forwards - measured.lowest)
            # Keep the first pass's number: a later pass begins with memory that the allocator has kept since then.
            self._bytes_before = self._bytes_before or without_forwards - measured.free
            self._slack_bytes, self._graph_bytes = max(self._slack_bytes, measured.slack), measured.graphs
        lowest = min(without_forwards - self._need, measured.expected)
        not_run = sizing.MIN_FREE_BYTES if measured.stopped else 0
        spare = lowest - self.margin - self.launch.images - not_run
        fits = self.pools.tokens_within(int(mapped + spare))
        return RankNeed(fits, int(without_forwards - lowest), measured.failure, measured.stopped)

    def _decide(self, needs: list[RankNeed | None]) -> tuple[int, str, bool]:
        """Decide on the KV cache size of the server, from the needs of all ranks.

        :param needs: needs of all ranks; ``None`` in the place of a rank that has published none.
        :returns: the size in tokens, the reason for it, and whether little memory was left in the rehearsal of a rank.
            The reason is empty if the size follows from the measured memory. After a failure the last value is False.
        """
        now = self.pools.counts.tokens
        known = [need for need in needs if need is not None]
        first = self.pools.first.tokens
        if len(known) < len(needs):
            return min(now, first), "not every rank has reported its measured memory to rank 0", False
        self.needs = known
        most = min(self.pools.top.tokens, self.reservation.max_tokens or self.pools.top.tokens)
        tokens, reason = sizing.decide(known, now, most, serving.floor_tokens(self.scheduler, self.pools))
        if any(need.failure for need in known):
            # The need with a larger KV cache is not known, so no further pass may make the KV cache larger again.
            return min(tokens, first), reason, False
        return tokens, reason, any(need.stopped for need in known)

    def _requests_to_start_over(self, rank_0: RankNeed, is_smaller: bool, ended_early: bool) -> int | None:
        """Decide whether the first rehearsal starts over with fewer requests. It does so if its requests take so much
        memory that the KV cache would have to shrink. It may also start over if a rank had little memory left.

        There are two cases:

        - ``--max-running-requests`` is not given. The rehearsal then also runs decodes of more requests than the
          largest CUDA graph has. It starts over with fewer concurrent requests.
        - ``--max-running-requests`` is given. The rehearsal starts over with fewer penalized requests, and only if the
          KV cache would have to shrink.

        :param is_smaller: whether the KV cache would have to become smaller than it was in the rehearsal.
        :param ended_early: whether little memory was left in the rehearsal of a rank, and no rehearsal failed.
        :returns: limit of concurrent requests in the new rehearsal; 0 if only the penalized requests get a limit;
            ``None`` if the rehearsal does not start over.
        """
        if self._pass > 1:
            return None
        if rank_0.restart_requests and (is_smaller or ended_early):
            return rank_0.restart_requests
        return 0 if is_smaller and rank_0.can_limit_penalized else None

    def _start_over(self, requests: int) -> str:
        """Forget all measurements, and begin the first rehearsal again with fewer requests. Return the reason if this
        rank cannot, else "".

        :param requests: new limit of concurrent requests; 0 to keep the present limit, and to lower only the number of
            penalized requests in a batch (:attr:`.phases.Limits.penalized`).
        """
        if self.leads:
            limits = self._limits.with_requests(requests) if requests else replace(self._limits, limits_penalized=True)
            penalized = "" if requests else f", and {limits.penalized:,} in a batch with penalties"
            most = f"{limits.batch:,} requests at once{penalized}"
            self.log(f"rehearses again with at most {most}: more requests left too little memory for the KV cache")
        self._has_started_over, self._limits_penalized = True, not requests
        self._fewer_requests = requests
        self._need = self._bytes_before = self._slack_bytes = 0
        self._phases.clear()
        return self._begin_next(phases.derive_phases)

    def _map_on_all_ranks(self, tokens: int) -> Generator[Exchange, Any, str]:
        """Map memory for a number of tokens on this rank, and yield to learn whether the other ranks have done so, too.

        :returns: the reason why not all ranks have mapped the memory; empty if all have.
        """
        problems = yield Exchange(f"mapped {self._pass}", self._try_to_map(tokens))
        if None in problems:
            return "not every rank has reported that it mapped memory for a larger KV cache"
        failures = (
            f"rank {rank} could not map memory for a larger KV cache: {problem}"
            for rank, problem in enumerate(problems)
            if problem
        )
        return next(failures, "")

    def _try_to_map(self, tokens: int) -> str:
        """Map memory for a number of tokens. Return the reason if this rank cannot, else ""."""
        try:
            self.pools.map(self.pools.counts_for(tokens))
        except Exception as error:
            return str(error) or type(error).__name__  # "" would say that there is memory
        return ""

    def _set_cache_size(self, tokens: int) -> str:
        """Set the KV cache size in all objects of the engine, and unmap the memory of all slots after this size.

        :returns: the reason why the engine does not accept the size; empty if it does. The reason is the same on every
            rank, because all ranks have objects of the same kinds.
        """
        counts, problem = self.pools.counts_for(tokens), ""
        try:
            self._set_tokens(counts)
        except Exception as error:
            problem = f"an object of the engine did not accept the new KV cache size: {error}"
            counts = self.pools.counts_for(min(self.pools.first.tokens, self.pools.counts.tokens))
            with suppress(Exception):
                self._set_tokens(counts)
        serving.unmap_or_warn(self.pools, counts)
        return problem

    def _set_tokens(self, counts: TokenCounts) -> None:
        """Set the KV cache size in the allocator, whose slots become free, and in all other objects of the engine."""
        token_count.resize_allocator(self.scheduler.token_to_kv_pool_allocator, counts)
        token_count.set_token_count(self.scheduler, counts)

    def _derive_next_pass(
        self, missed: tuple[phases.PhaseKind, ...]
    ) -> Callable[[phases.Limits], list[phases.Phase]] | None:
        """Return a function that derives the phases of another rehearsal: phases that are larger with the new KV cache
        size, and phases that were not reached (``missed``).

        :returns: ``None``, on all ranks, if there is no such phase, or after :data:`.sizing.MAX_PASSES` rehearsals.
        """
        before, passes = self._limits, self._pass - self._has_started_over
        if passes >= sizing.MAX_PASSES or not phases.derive_second_pass(before, self._limits_in_force(), missed):
            return None
        return lambda limits: phases.derive_second_pass(before, limits, missed)

    def _limit_requests(self, rank_0: RankNeed) -> None:
        """Limit the concurrent requests of the server to the number that was rehearsed.

        There are two exceptions:

        - If the user has set a limit, only batches with a penalized request get a lower limit, and only if the
          rehearsal has started over with fewer penalized requests.
        - If the KV cache keeps its first size and the rehearsal has not started over, nothing is limited.

        :param rank_0: need of rank 0, which contains the limits.
        """
        batch, penalized = rank_0.request_limits
        if not batch or (self.pools.counts == self.pools.first and not self._has_started_over):
            return
        why = "because only so many were rehearsed; set --max-running-requests to choose another limit"
        if self._limits_penalized:
            why = f"because memory for {batch:,} such requests would make the KV cache smaller than the engine's own"
        serving.limit_requests(self.scheduler, batch, penalized)
        self.log(
            f"at most {batch:,} requests run at once, and at most {penalized:,} in a batch in which one has penalties, "
            f"min_p, a logit bias or log-probabilities, {why}"
        )

    def _log_size(self, reason: str) -> None:
        """Log the final KV cache size, and set the metrics.

        :param reason: why the KV cache does not have the size that fits into memory; empty if it has.
        """
        rule, now = self._tokens_by_rule(), self.pools.counts.tokens
        state = "grown" if now > rule else "shrunk" if now < rule else "rule"
        self._set_metrics(state, reason)
        if not self.leads:
            return
        if self.needs and self._seconds:
            self._log_needs()
        size = f"{state} from {rule:,} to {now:,}" if now != rule else f"kept at {now:,}"
        free = f"{format_megabytes(self.margin)} stay free"
        images = f", and {format_megabytes(self.launch.images)} for images" if self.launch.images else ""
        limit = f"; --max-total-tokens {now:,} allows no more" if now == self.reservation.max_tokens else ""
        why = f"; {reason}" if reason else ""
        more_bytes = (now - self.pools.first.tokens) * self.reservation.bytes_per_token
        fraction = sizing.pinned_fraction(self.launch, more_bytes)
        hybrid = server_facts(self.scheduler.tp_worker.model_runner).hybrid == phases.MAMBA
        same = ""
        if fraction and not hybrid and now != rule:
            same = f". The same size without measuring: --mem-fraction-static {fraction:.4f}"
        self.log(f"KV cache {size} tokens; {free}{images}{limit}{why}{same}", warn=bool(reason) or now < rule)
        if self.reservation.fraction_is_given and now < rule and fraction:
            self.log(
                "the given --mem-fraction-static leaves too little memory for the largest forward passes; "
                f"set --mem-fraction-static {fraction:.4f}",
                warn=True,
            )

    def _log_needs(self) -> None:
        """Log the seconds of all rehearsals, and the memory that they have measured."""
        total_s = self._seconds.pop(rehearsal.WHOLE_REHEARSAL, 0.0)
        parts = ", ".join(f"{name} {seconds:.1f} s" for name, seconds in self._seconds.items())
        missed = f"; not reached: {', '.join(self.needs[0].missed)}" if self.needs[0].missed else ""
        early = "; ended early, because little memory was left" if any(need.stopped for need in self.needs) else ""
        self.log(f"rehearsed in {total_s:.0f} s: {parts}{missed}{early}")
        if any(need.failure for need in self.needs):
            return  # the need is not known
        need = format_megabytes(max(need.need for need in self.needs))
        self.log(
            f"needed in addition to weights and KV cache: {need}, on the rank that needs most. "
            f"On rank 0: largest forward passes: {sizing.largest_phases(self._phases)}; "
            f"{format_megabytes(self._bytes_before)} CUDA graphs and buffers, including "
            f"{format_megabytes(self._graph_bytes)} decode graphs; "
            f"{format_megabytes(self._slack_bytes)} allocator slack"
        )

    def _tokens_by_rule(self) -> int:
        """Return the KV cache size of a stock server, in tokens. The KV cache may have begun with more tokens, because
        the rehearsal needed them."""
        return max(0, self.pools.first.tokens - self.reservation.raised_tokens)

    def _set_metrics(self, state: str, reason: str) -> None:
        self.metrics.show(serving.STATE, 1, state=state, reason=reason)
        self.metrics.show(serving.TOKENS, self.pools.counts.tokens)
        self.metrics.show(serving.BY_RULE, self._tokens_by_rule())
        if self.needs:
            self.metrics.show(serving.NEED, max(need.need for need in self.needs))

    # --- 3. Serve ------------------------------------------------------------------------------------------------

    def _serve(self) -> None:
        """Let the scheduler read users' requests, and watch the GPU's free memory from now on."""
        self.orders.read_instead = None
        self._sleeper.undo()
        try:
            memory = serving.FreeMemory(lambda: gpu_memory.read(self.reservation.gpu), self.margin)
            self._serving = serving.Serving(
                *(self.scheduler, self.pools, memory, self.orders, self.board, self.metrics),
                leads=self.leads,
                extra_tokens=self._limits.tokens_beside_prompt(),
            )
            self.orders.on_turn = self._serving.run_turn
        except Exception as error:
            self.log(
                f"free memory is not watched, so the KV cache will not shrink if memory is short: {error}", warn=True
            )
        self._release()


# --- How the steps are run --------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class ResumeStart(ranks.Order):
    """Message of rank 0 with the values of all ranks (:class:`Exchange`). Every rank resumes its start with them.

    :param topic: name under which the ranks have published the values.
    :param values: values in the order of the ranks; ``None`` for a rank that did not publish in time.
    """

    topic: str
    values: list[Any | None]


class StartRunner:
    """Runs the steps of a start on one rank, between the iterations of its event loop.

    :param start: generator of steps, the same on every rank.
    :param leads: whether this is rank 0.
    """

    def __init__(self, start: Start, orders: ranks.Orders, board: ranks.Board, *, leads: bool) -> None:
        self._start, self._orders, self._board, self._leads = start, orders, board, leads
        self._step: Exchange | Rehearsal | None = None

    def run(self, result: Any = None) -> None:
        """Resume the start, and run it up to its next step.

        :param result: result of the start's last step; ``None`` to begin the start.
        """
        self._orders.on_turn = lambda: None
        try:
            step = self._start.send(result)
        except StopIteration:
            return
        self._step = step
        if isinstance(step, Exchange):
            self._publish(step)
        else:
            step.on_end = self.run
            self._orders.read_instead, self._orders.on_turn = step.poll, step.read_turn_memory

    def obey(self, order: ResumeStart) -> None:
        """Resume the start with the values of all ranks, which rank 0 has sent. Every rank does this in the same
        iteration of its event loop.

        If this rank still rehearses, its rehearsal ends without a result, because rank 0 no longer waits for it.
        """
        if isinstance(self._step, Rehearsal):
            # Rank 0 no longer waits for this rank, for example because rank 0 could not begin its own rehearsal. Nobody
            # else ends this rank's rehearsal, and a rehearsal that does not end would swallow users' answers.
            self._step.end()
            self._start.send(None)  # it yields the exchange that this order answers, and this rank publishes no value
        self.run(order.values)

    def _publish(self, step: Exchange) -> None:
        """Publish this rank's value of an exchange for rank 0. Until the exchange ends and the start resumes, this
        rank's scheduler reads no requests of users.
        """
        poll = partial(self._poll, step, time.monotonic() + EXCHANGE_WAIT_S)
        self._orders.read_instead = poll if self._leads else list
        try:
            self._board.publish(step.topic, step.value)
        except Exception as error:
            log.logger.warning(
                log.format_line(
                    "kv-sizing", "this rank could not send its result (%s) to rank 0, so the KV cache does not grow: %s"
                ),
                step.topic,
                error,
            )

    def _poll(self, step: Exchange, deadline: float) -> list[Any]:
        """Return the messages that rank 0's scheduler reads in one turn, in place of users' requests. Rank 0 waits for
        the values of all ranks.

        The list is empty while a rank has not published its value. Once all ranks have published, or after the
        deadline, the list has one message, and the scheduler sends it to all ranks. The message has the values of all
        ranks. Every rank that receives it resumes its start.

        :param deadline: time after which rank 0 no longer waits, by ``time.monotonic``.
        """
        try:
            values = self._board.collect(step.topic, type(step.value))
        except Exception as error:
            log.logger.warning(
                log.format_line(
                    "kv-sizing",
                    "rank 0 could not read the results (%s) of the other ranks, so the KV cache does not grow: %s",
                ),
                step.topic,
                error,
            )
            values = [None] * self._board.ranks
        else:
            if None in values and time.monotonic() <= deadline:
                return []
        values[0] = step.value
        self._orders.read_instead = list  # nothing is read until the ranks have resumed
        return [ranks.Broadcast((ResumeStart(step.topic, values),))]
