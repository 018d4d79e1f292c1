"""The start of a server in four steps: reserve addresses, rehearse, resize the KV cache, serve.

A *rehearsal* runs the server's largest forward passes before the first user's request, and measures their memory. One
run of the rehearsal is a *pass*; its parts are *phases*. The *need* is the memory that forward passes, CUDA graphs and
buffers take in addition to weights and KV cache. The *margin* is the memory that stays free. A *turn* is one iteration
of the scheduler's event loop. An *order* is a message of rank 0 that all ranks carry out in the same turn. A
*collective* function must be called by all ranks at the same point, else they wait for one another.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import contextmanager, suppress
from dataclasses import replace
from typing import Any

from sglang_moe_patches.core import engine, gpu_memory, log
from sglang_moe_patches.core.patch import Install, Patcher, around, one_line_error
from sglang_moe_patches.memory.kv_sizing import (
    eligibility,
    phases,
    ranks,
    rehearsal,
    serving,
    sizing,
    token_count,
)
from sglang_moe_patches.memory.kv_sizing.address_space import CudaMemory
from sglang_moe_patches.memory.kv_sizing.phases import Plant
from sglang_moe_patches.memory.kv_sizing.pools import GIB, ElasticPools, Unknown, sized_for
from sglang_moe_patches.memory.kv_sizing.rehearsal import Measured
from sglang_moe_patches.memory.kv_sizing.sizing import LaunchMemory, RankNeed, megabytes
from sglang_moe_patches.memory.kv_sizing.token_count import TokenCounts

IDLE_SLEEP_S = 0.001
"""Seconds that the scheduler sleeps in an idle turn during a rehearsal, with ``--sleep-on-idle``."""
EXCEPTION_WAIT_S = 30.0
"""Seconds that a rank waits for the other ranks if its rehearsed forward pass fails. If they do not all fail in this
time, the server ends."""


def probe() -> Install:
    """Find the engine's functions that make the KV cache and that run the event loop, and check them.

    :returns: the function that patches them.

    :raises engine.Unsupported: the engine is not as expected.
    """
    maker = engine.require_unpatched(engine.module("sglang.srt.model_executor.model_runner"), "ModelRunner")
    if not hasattr(maker, "_init_pools"):
        maker = engine.require_unpatched(
            engine.module("sglang.srt.mem_cache.kv_cache_configurator"), "KVCacheConfigurator"
        )
    profile = engine.require_unpatched(maker, "_profile_available_bytes")
    engine.require_mentions(profile, "mem_fraction_static", "pre_model_load_memory")
    engine.require_parameters(
        engine.require_unpatched(maker, "_resolve_memory_pool_config"), ("self", "pre_model_load_memory")
    )
    engine.require_mentions(engine.require_unpatched(maker, "_init_pools"), "max_running_requests")
    scheduler = engine.require_unpatched(engine.module("sglang.srt.managers.scheduler"), "Scheduler")
    engine.require_mentions(engine.require_unpatched(scheduler, "run_event_loop"), "dispatch_event_loop")
    engine.require_mentions(engine.require_unpatched(scheduler, "get_init_info"), "max_total_num_tokens")
    engine.require_parameters(engine.require_unpatched(scheduler, "get_num_allocatable_reqs"), ("self", "running_bs"))
    for name in ("_add_request_to_queue", "get_new_batch_prefill", "is_fully_idle", "flush_cache"):
        engine.require_unpatched(scheduler, name)
    ranks.require_inbox(scheduler)

    def install(patcher: Patcher) -> None:
        start = ServerStart()  # one object in each scheduler process
        patcher.wrap(maker, "_resolve_memory_pool_config", around(start.reserve))
        patcher.wrap(maker, "_init_pools", around(start.make_pools))
        patcher.wrap(scheduler, "get_init_info", around(start.remember_init_info))
        patcher.wrap(scheduler, "run_event_loop", around(start.run))

    return install


class ShortSleeper:
    """Stand-in for the engine's sleeper of ``--sleep-on-idle`` during a rehearsal.

    In each idle turn the engine's sleeper waits up to a second for a user's request. This would slow the rehearsal
    down, because no user's request is read before the server serves. Without any sleep the ranks of a server would keep
    all processors busy.
    """

    def maybe_sleep(self) -> None:
        """Sleep in an idle turn. The engine calls this method."""
        time.sleep(IDLE_SLEEP_S)


class ServerStart:
    """Start of one scheduler process, from the decision on its KV cache size until it serves.

    Methods that stand in for a function of the engine receive the original function as the first argument.
    """

    pools: ElasticPools
    """KV buffers of this rank. The attribute exists only if ``reserved`` is true."""
    scheduler: Any
    board: ranks.Board
    _limits: phases.Limits
    """Limits of the forward passes in the rehearsal that began last."""

    def __init__(self) -> None:
        self.leads, self.gpu, self.fraction_is_given = False, 0, False
        self.margin = eligibility.KV_MARGIN.read()
        self.reason = "its pools have not been made"
        """Reason why this server keeps the KV cache size of the engine's rule. "": it is measured."""
        self.launch = LaunchMemory()
        self.reserved = False
        """Whether addresses are reserved for a larger KV cache. The value is the same on all ranks."""
        self.bytes_per_token, self._raised_tokens = 0.0, 0
        self.max_tokens = 0
        """``--max-total-tokens``; 0: not given."""
        self.needs: list[RankNeed] = []
        """Needs that all ranks published after the last rehearsal."""
        self._init_info: Any = self  # an object that no pipe sends
        self._releases: list[Callable[[], None]] = []
        """Functions to call when the server serves. They send the held message to the launcher, and undo the pipe's
        patch."""
        self._rehearsal: rehearsal.Rehearsal | None = None
        self._serving: serving.Serving | None = None
        self._pass = self._fewer_requests = self._exceptions = 0
        self._has_started_over = self._limits_penalized = False
        self._sleeper = Patcher()
        """Patch that shortens the sleep of ``--sleep-on-idle`` until the server serves."""
        # The following numbers are maxima over all passes since the start began, or since it started over. A later pass
        # runs only the phases that have become larger. `Measured.expected`, of a phase that did not run, is left out,
        # because this phase runs in the next pass.
        self._need = self._before = self._slack = self._graphs = 0
        self._seconds, self._phases = dict[str, float](), dict[str, int]()

    def log(self, message: str, *, warn: bool = False) -> None:
        """Log a message, only on rank 0."""
        if self.leads:
            (log.logger.warning if warn else log.logger.info)("%s", log.format_line("kv-sizing", message))

    # --- 1. Reserve ----------------------------------------------------------------------------------------------

    def reserve(self, original: Callable[..., Any], maker: Any, pre_model_load_memory: float) -> Any:
        """Let the engine decide on its KV cache size, and reserve addresses for more tokens.

        :param maker: the engine's ``ModelRunner``, or from 0.5.16 on its ``KVCacheConfigurator``.
        """
        if maker.is_draft_worker or self.reserved:
            return original(maker, pre_model_load_memory)
        launches = self._gather(maker, pre_model_load_memory)
        if self.reason:
            config = original(maker, pre_model_load_memory)
            source = "the given --mem-fraction-static" if self.fraction_is_given else "the engine's default fraction"
            self.log(f"using {source} {self.launch.fraction:.4f} because {self.reason}")
            return config
        fraction, raised = None, 0.0
        try:
            fraction = first_fraction(maker, launches, self.margin)
        except Exception as error:
            self.log(f"the KV cache begins with the fraction in force: {one_line_error(error)}", warn=True)
        if fraction is not None:
            source = "given --mem-fraction-static" if self.fraction_is_given else "engine's default fraction"
            too_little = f"the {source} {self.launch.fraction:.4f} leaves too little KV cache to rehearse"
            self.log(f"{too_little}; starting with {fraction:.4f}, the final size is set afterwards", warn=True)
            raised, self.launch = fraction - self.launch.fraction, replace(self.launch, fraction=fraction)
        with _fraction_in_force(maker, fraction):
            config = original(maker, pre_model_load_memory)
        self._reserve(maker, config, raised)
        return config

    def _gather(self, maker: Any, before_gib: float) -> list[LaunchMemory]:
        """Gather the launch memory of all ranks, and set ``reason`` if this server is not measured.

        Collective: every rank must call it, even if the server keeps a given ``--mem-fraction-static``.
        """
        arguments = eligibility.arguments_of(maker.server_args)
        self.leads, self.gpu = ranks.is_rank_0(), int(maker.gpu_id)
        self.fraction_is_given = eligibility.given_by_the_user(maker.server_args)
        vars(maker.server_args).pop(eligibility.MARK, None)  # else /server_info would show it
        if int(arguments.get("nnodes") or 1) > 1 and (apart := _machines_apart()):
            self.reason = apart
            return []
        try:
            self.launch = launch_memory(maker, arguments, before_gib)
        except Exception as error:
            self.launch = LaunchMemory(one_line_error(error))
        launches: list[LaunchMemory] = ranks.all_gather(self.launch, LaunchMemory)
        self.reason = next((launch.failure for launch in launches if launch.failure), "")
        if not self.reason and self.fraction_is_given:
            self.reason = eligibility.given_reason(eligibility.KV_SIZING.read())
        # The engine's fraction is of the free memory before the weights, on the rank with the least.
        before = min((launch.free_before_load for launch in launches if not launch.failure), default=0)
        self.launch = replace(self.launch, free_before_load=before)
        return [replace(launch, free_before_load=before) for launch in launches]

    def _reserve(self, maker: Any, config: Any, raised: float) -> None:
        """Decide for how many tokens addresses are reserved. Collective.

        :param config: the engine's ``MemoryPoolConfig``, with the token counts of its own rule.
        :param raised: difference between the fraction in force and the engine's own, or the given one.
        """
        first = _counts_of(config)
        top, problem = first, ""
        try:
            memory = CudaMemory(self.gpu)
            self.bytes_per_token = bytes_per_token(maker)
            self._raised_tokens = int(raised * self.launch.free_before_load / self.bytes_per_token)
            most = first.tokens + int(self.launch.set_aside / self.bytes_per_token)
            self.max_tokens = int(eligibility.arguments_of(maker.server_args).get("max_total_tokens") or 0)
            top = _counts_of(_configurator(maker).calculate_pool_sizes_from_max_tokens(most, maker.page_size))
        except Exception as error:
            problem = one_line_error(error)
        gathered: list[tuple[str, TokenCounts]] = ranks.all_gather((problem, top), tuple[str, TokenCounts])
        problem = next((text for text, _ in gathered if text), "")
        top = min((counts for _, counts in gathered), key=lambda counts: counts.tokens)
        if self.max_tokens:
            top = first if self.max_tokens <= first.tokens else top
        if not problem and any(addresses < tokens for addresses, tokens in zip(top, first, strict=True)):
            problem = f"there is no address space for {first.tokens:,} tokens"
        if problem:
            self.reason = problem
            self.log(f"the KV cache keeps the engine's size and is not measured because {problem}", warn=True)
            return
        self.pools = ElasticPools(memory, first, top, int(maker.page_size))
        self.reserved = True
        self._hold_pipe()

    def make_pools(self, original: Callable[..., Any], maker: Any, **arguments: Any) -> Any:
        """Let the engine make its KV cache. If this server is measured, the KV cache is over reserved addresses."""
        if not self.reserved or self.reason:
            return original(maker, **arguments)
        pools = self.pools
        attributes = {name: getattr(maker, name) for name in _POOLS if hasattr(maker, name)}
        try:
            with sized_for(maker, arguments, pools.first, pools.top) as sizes:
                built = pools.build(lambda: original(maker, **sizes), lambda made: _parts(maker, made), maker.device)
            if not maker.is_draft_worker:
                token_count.resize_allocator(_parts(maker, built)[2], pools.first)
            return built
        except Exception as error:
            self.reason = str(error) if isinstance(error, Unknown) else one_line_error(error)
            for name, value in attributes.items():
                setattr(maker, name, value)
        return original(maker, **arguments)

    # --- 2. Rehearse ---------------------------------------------------------------------------------------------

    def remember_init_info(self, original: Callable[..., Any], scheduler: Any) -> Any:
        """Remember the scheduler's message to the launcher. It is sent when the final number of tokens is known."""
        self._init_info = original(scheduler)
        return self._init_info

    def _hold_pipe(self) -> None:
        """Hold back the scheduler's message to the launcher until :meth:`_release_init_info` is called.

        The message is the result of ``get_init_info``, and contains the number of tokens. In the engine's
        ``pipe.send(scheduler.get_init_info())`` Python looks up ``send`` before it calls ``get_init_info``. So ``send``
        is patched before that.
        """
        from multiprocessing.connection import Connection

        patcher = Patcher()

        def make_send(send: Callable[..., None]) -> Callable[..., None]:
            def hold(pipe: Any, message: Any) -> None:
                if message is not self._init_info or self.reason:
                    send(pipe, message)
                    return
                patcher.undo()
                self._releases.append(lambda: send(pipe, token_count.init_info(message, self.scheduler)))

            return hold

        patcher.wrap(Connection, "send", make_send)
        self._releases.append(patcher.undo)

    def _release_init_info(self) -> None:
        while self._releases:
            self._releases.pop()()

    def run(self, original: Callable[..., Any], scheduler: Any, *args: Any, **kwargs: Any) -> Any:
        """Run the event loop. Its first turns are the rehearsal; users' requests are read afterwards."""
        self._begin(scheduler)
        while True:
            try:
                return original(scheduler, *args, **kwargs)
            except Exception as error:
                if not self._outlives_exception():
                    raise
                problem = one_line_error(error)
                log.logger.warning(
                    log.format_line("kv-sizing", "a rehearsed forward pass failed: %s"), error, exc_info=True
                )
            # Do this outside of the except clause, because its exception keeps the tensors of the failed frames alive.
            rehearsal.drop_requests(scheduler)
            assert self._rehearsal is not None
            self._rehearsal.fail(problem)

    def _outlives_exception(self) -> bool:
        """Return whether the server can go on after an exception: a rehearsed forward pass has failed on all ranks.

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
            log.logger.warning(log.format_line("kv-sizing", "the other ranks do not answer: %s"), error)
            return False

    def _begin(self, scheduler: Any) -> None:
        """Begin the start, or let the scheduler serve with the engine's KV cache size. Collective if ``reserved``."""
        self.scheduler = scheduler
        arguments = eligibility.arguments_of(scheduler.server_args)
        self.metrics = serving.Metrics(arguments, self.gpu)
        self.orders = ranks.Orders(scheduler, self.obey)
        problem = self.reason
        if self.reserved:
            self.board = ranks.Board(ranks.share_secret())
        if not problem:
            try:
                if getattr(scheduler, "idle_sleeper", None) is not None:
                    self._sleeper.add(scheduler, "idle_sleeper", ShortSleeper())
                self.orders.open()
                self._begin_rehearsal(phases.derive_phases)
            except Exception as error:
                problem = str(error) if isinstance(error, RuntimeError) else one_line_error(error)
        if self.reserved:  # tell all ranks of a failure, because they would wait for the failed rank
            problem = next(filter(None, ranks.all_gather(problem, str)), "")
        if not problem:
            limit_s = rehearsal.timeout_s()
            self.log(f"rehearses the largest forwards before the first request, at most {limit_s:.0f} s")
            self._runner = ranks.StartRunner(self.start_up(), self.orders, self.board, leads=self.leads)
            self._runner.run()
            return
        if self._rehearsal is not None:
            self._rehearsal.end()
        self.orders.close()
        self._sleeper.undo()
        if self.reserved:
            self.log(f"the KV cache keeps the engine's size and is not measured because {problem}", warn=True)
        self._show("rule", problem)
        self._release_init_info()

    def start_up(self) -> ranks.Start:
        """Steps of the start: measure, resize, serve. At each ``yield``, all ranks resume in the same turn.

        All ranks get the same values from an exchange, so they make the same decisions.
        """
        failure = ""
        while True:
            assert self._rehearsal is not None
            measured = Measured(failure=failure) if failure else (yield self._rehearsal)
            needs = yield self._exchange("measured", self._need_from(measured), RankNeed)
            before, rank_0 = self.pools.counts.tokens, needs[0]
            tokens, reason, ended_early = self._decide(needs)
            fewer = self._requests_to_start_over(needs, tokens < before, ended_early)
            if fewer is not None and not self._use(before):
                failure = self._start_over(fewer)
                continue
            again, missed = tokens < before and ended_early, tuple(rank_0.missed.values())
            if tokens > before:
                problems = yield self._exchange("mapped", self._try_to_map(tokens), str)
                if None in problems:
                    reason = "not every rank has reported that it mapped memory"
                elif problem := next(filter(None, problems), ""):
                    reason = f"a rank had no memory to map: {problem}"
                tokens, again, missed = before if reason else tokens, not reason, ()
            if problem := self._use(tokens):
                reason, again = problem, False
            self._fewer_requests = rank_0.fewer_requests
            phases_left = self._derive_next_pass(missed) if again and self._has_passes_left else None
            if phases_left is None:
                break
            failure = self._begin_next(phases_left)
        self._log_size(reason)
        self._limit_requests(rank_0)
        self._serve()

    def obey(self, order: ranks.Order) -> None:
        """Carry out an order of rank 0. This is called between two turns. In a rehearsal, no request runs then."""
        if self._serving is not None:
            self._serving.obey(order)
        elif isinstance(order, ranks.Resume):
            self._runner.obey(order)
        elif isinstance(order, Plant) and self._rehearsal is not None:
            self._rehearsal.plant(order)

    def _exchange(self, topic: str, value: Any, kind: Any) -> ranks.Exchange:
        return ranks.Exchange(f"{topic} {self._pass}", value, kind, rehearsal.ABANDON_AFTER_S)

    def _begin_rehearsal(self, derive: Callable[[phases.Limits], list[phases.Phase]]) -> None:
        """Begin a rehearsal of the phases that ``derive`` makes from the scheduler's limits.

        :raises Exception: this rank cannot rehearse; the caller must end the rehearsal.
        """
        self._pass += 1
        self._rehearsal = rehearsal.Rehearsal(
            *(self.scheduler, self.gpu, self.board, self._pass, derive),
            leads=self.leads,
            peaks=self._phases,
            fewer_requests=self._fewer_requests,
            limits_penalized=self._limits_penalized,
            bytes_per_token=self.bytes_per_token,
            margin=self.margin,
        )
        self._limits = self._rehearsal.begin()

    def _begin_next(self, derive: Callable[[phases.Limits], list[phases.Phase]]) -> str:
        """Begin another rehearsal. Return the reason why this rank cannot; "": it has begun."""
        try:
            self._begin_rehearsal(derive)
        except Exception as error:
            if self._rehearsal is not None:
                self._rehearsal.end()
            return one_line_error(error)
        return ""

    # --- 3. Grow, or shrink --------------------------------------------------------------------------------------

    def _need_from(self, measured: Measured | None) -> RankNeed:
        """Return the need of this rank, as the rank publishes it after a rehearsal.

        :param measured: result of this rank's rehearsal; ``None`` if rank 0 did not wait for its end.
        """
        measured = measured or Measured(failure="rank 0 did not wait for its rehearsal")
        try:
            need = self._rank_need(measured)
        except Exception as error:
            need = RankNeed(failure=measured.failure or one_line_error(error))
        if not self.leads:
            return need
        fewer = measured.fewer_requests or self._fewer_requests
        limits = self._limits.with_requests(fewer) if fewer else self._limits
        is_limited = limits.default_requests or limits.limits_penalized
        need = replace(need, missed=measured.missed, fallback=measured.fallback, fewer_requests=fewer)
        need = replace(need, can_limit_penalized=self._limits.with_fewer_penalized() is not None)
        return replace(need, admitted=(limits.batch, limits.penalized) if is_limited else (0, 0))

    def _rank_need(self, measured: Measured) -> RankNeed:
        for name, seconds in measured.seconds.items():
            self._seconds[name] = self._seconds.get(name, 0.0) + seconds
        for name, peak in measured.phases.items():
            self._phases[name] = max(self._phases.get(name, 0), peak)
        # Request tables and states were allocated together with the KV cache, and count neither as KV cache nor as
        # need.
        beside_cache = rehearsal.server_facts(self.scheduler.tp_worker.model_runner).fixed_bytes
        mapped = self.pools.bytes_behind(self.pools.counts)
        without_forwards = self.launch.free - beside_cache - mapped
        if not measured.failure:
            self._need = max(self._need, without_forwards - measured.lowest)
            # Keep the first pass's number: a later pass begins with memory that the allocator has kept since then.
            self._before = self._before or without_forwards - measured.free
            self._slack, self._graphs = max(self._slack, measured.slack), measured.graphs
        lowest = min(without_forwards - self._need, measured.expected)
        not_run = sizing.MIN_FREE_BYTES if measured.stopped else 0
        spare = lowest - self.margin - self.launch.images - not_run
        fits = self.pools.tokens_within(int(mapped + spare))
        return RankNeed(fits, int(without_forwards - lowest), measured.failure, measured.stopped)

    def _decide(self, needs: list[RankNeed | None]) -> tuple[int, str, bool]:
        """Decide on the number of tokens, from the needs of all ranks.

        :param needs: needs of all ranks; ``None`` in the place of a rank that has published none.
        :returns: three values: the tokens; the reason if they are not the tokens that fit, else ""; whether a rank's
            rehearsal ended early.
        """
        now = self.pools.counts.tokens
        known = [need for need in needs if need is not None]
        if len(known) < len(needs):
            return now, "not every rank has reported its need", False
        self.needs = known
        most = min(self.pools.top.tokens, self.max_tokens or self.pools.top.tokens)
        tokens, reason = sizing.decide(known, now, most, serving.least_tokens(self.scheduler, self.pools))
        if any(need.failure for need in known):
            tokens = min(tokens, self.pools.first.tokens)  # the need with a larger KV cache is not known
        return tokens, reason, any(need.stopped for need in known)

    def _requests_to_start_over(self, needs: list[RankNeed | None], is_smaller: bool, ended_early: bool) -> int | None:
        """Return the number of requests with which the first rehearsal starts over; ``None``: it does not start over.

        By default the rehearsal tries more concurrent requests than the user asked for. If these would make the KV
        cache smaller than the engine's own, the rehearsal starts over with fewer requests.

        The result 0 means that the number of requests stays, and only the number of penalized requests is limited.
        """
        rank_0 = needs[0]
        if self._pass > 1 or rank_0 is None or any(need is None or need.failure for need in needs):
            return None
        if rank_0.fallback and (is_smaller or ended_early):
            return rank_0.fallback
        return 0 if is_smaller and rank_0.can_limit_penalized else None

    def _start_over(self, requests: int) -> str:
        """Forget all measurements, and begin the first rehearsal again. Return the reason if this rank cannot, or "".

        :param requests: as :meth:`_requests_to_start_over` returns it.
        """
        if self.leads:
            limits = self._limits.with_requests(requests) if requests else replace(self._limits, limits_penalized=True)
            fewer = f"{limits.batch:,}" if requests else f"{limits.penalized:,} penalized ones of {limits.batch:,}"
            self.log(f"rehearses again with {fewer} requests at once: with more, too little memory was left")
        self._has_started_over, self._limits_penalized = True, not requests
        self._fewer_requests = requests
        self._need = self._before = self._slack = 0
        self._phases.clear()
        return self._begin_next(phases.derive_phases)

    def _try_to_map(self, tokens: int) -> str:
        """Map memory for a number of tokens. Return the reason if this rank cannot, or ""."""
        try:
            self.pools.map(self.pools.counts_for(tokens))
        except Exception as error:
            return str(error) or type(error).__name__  # "" would say that there is memory
        return ""

    def _use(self, tokens: int) -> str:
        """Set the KV cache size in all objects of the engine, and unmap the memory of all slots after it.

        :returns: the reason why the engine keeps a smaller size, or "". The reason is the same on every rank, because
            all ranks have objects of the same kinds.
        """
        counts, problem = self.pools.counts_for(tokens), ""
        try:
            self._set_tokens(counts)
        except Exception as error:
            problem = f"an object of the engine does not accept the size: {error}"
            counts = self.pools.counts_for(min(self.pools.first.tokens, self.pools.counts.tokens))
            with suppress(Exception):
                self._set_tokens(counts)
        self.pools.unmap_from(counts)
        return problem

    def _set_tokens(self, counts: TokenCounts) -> None:
        token_count.resize_allocator(self.scheduler.token_to_kv_pool_allocator, counts)
        token_count.set_token_count(self.scheduler, counts)

    @property
    def _has_passes_left(self) -> bool:
        return self._pass - self._has_started_over < sizing.MAX_PASSES

    def _derive_next_pass(
        self, missed: tuple[phases.PhaseKind, ...]
    ) -> Callable[[phases.Limits], list[phases.Phase]] | None:
        """Return a function that derives the phases of another pass. ``None``: no phase has to run again.

        Phases that were not reached (``missed``) run again. So do phases that are larger with the new KV cache size.
        The answer is the same on every rank.
        """
        before, after = self._limits, rehearsal.limits_of(self.scheduler, self._fewer_requests)
        if self._limits_penalized:
            after = replace(after, limits_penalized=True)
        if not phases.derive_second_pass(before, after, missed):
            return None
        return lambda limits: phases.derive_second_pass(before, limits, missed)

    def _limit_requests(self, rank_0: RankNeed) -> None:
        """Let the server admit no more requests at once than were rehearsed.

        The limit applies if the user has set none. It also applies to penalized requests if memory for the user's limit
        would make the KV cache smaller than the engine's own. If the KV cache keeps the engine's size, the server
        admits as many requests as the engine does, unless the rehearsal has started over.
        """
        batch, penalized = rank_0.admitted
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
        rule, now = self._tokens_by_rule(), self.pools.counts.tokens
        state = "grown" if now > rule else "shrunk" if now < rule else "rule"
        self._show(state, reason)
        if not self.leads:
            return
        if self.needs and self._seconds:
            self._log_needs()
        size = f"{state} from {rule:,} to {now:,}" if now != rule else f"kept at {now:,}"
        free = f"{megabytes(self.margin)} stay free"
        images = f", and {megabytes(self.launch.images)} for images" if self.launch.images else ""
        limit = f"; --max-total-tokens {now:,} is used" if self.max_tokens and now == self.max_tokens else ""
        why = f"; {reason}" if reason else ""
        more_bytes = (now - self.pools.first.tokens) * self.bytes_per_token
        fraction = sizing.pinned_fraction(self.launch, more_bytes)
        hybrid = rehearsal.server_facts(self.scheduler.tp_worker.model_runner).hybrid == phases.MAMBA
        same = f". The same size without measuring: --mem-fraction-static {fraction:.4f}"
        pin = same if fraction and not hybrid and now != rule else ""
        self.log(f"KV cache {size} tokens; {free}{images}{limit}{why}{pin}", warn=bool(reason) or now < rule)
        if self.fraction_is_given and now < rule and fraction:
            self.log(f"the given --mem-fraction-static is too high: {fraction:.4f} would be safe", warn=True)

    def _log_needs(self) -> None:
        total_s = self._seconds.pop(rehearsal.ALL, 0.0)
        parts = ", ".join(f"{name} {seconds:.1f} s" for name, seconds in self._seconds.items())
        missed = f"; not reached: {', '.join(self.needs[0].missed)}" if self.needs[0].missed else ""
        early = "; ended early, before memory ran out" if any(need.stopped for need in self.needs) else ""
        self.log(f"rehearsed in {total_s:.0f} s: {parts}{missed}{early}")
        if any(need.failure for need in self.needs):
            return  # the need is not known
        need = megabytes(max(need.need for need in self.needs))
        self.log(
            f"needed in addition to weights and KV cache: {need}, on the rank that needs most. "
            f"On rank 0: largest forward passes: {sizing.largest_phases(self._phases)}; "
            f"{megabytes(self._before)} CUDA graphs and buffers, including {megabytes(self._graphs)} decode graphs; "
            f"{megabytes(self._slack)} allocator slack"
        )

    def _tokens_by_rule(self) -> int:
        """Return the KV cache size of a stock server: by the given fraction, or by the engine's own.

        If the rehearsal began with a larger fraction, the KV cache began with more tokens than this.
        """
        return max(0, self.pools.first.tokens - self._raised_tokens)

    def _show(self, state: str, reason: str) -> None:
        self.metrics.show(serving.STATE, 1, state=state, reason=reason)
        if self.reserved:
            self.metrics.show(serving.TOKENS, self.pools.counts.tokens)
            self.metrics.show(serving.BY_RULE, self._tokens_by_rule())
        if self.needs:
            self.metrics.show(serving.NEED, max(need.need for need in self.needs))

    # --- 4. Serve ------------------------------------------------------------------------------------------------

    def _serve(self) -> None:
        """Let the scheduler read users' requests, and watch free memory in each turn from now on."""
        self.orders.read_instead = None
        self._sleeper.undo()
        try:
            memory = serving.FreeMemory(lambda: gpu_memory.read(self.gpu), self.margin)
            self._serving = serving.Serving(
                *(self.scheduler, self.pools, memory, self.orders, self.board, self.metrics),
                leads=self.leads,
                beside=self._limits.beside_prompt(),
            )
            self.orders.on_turn = self._serving.look
        except Exception as error:
            self.log(f"free memory is not watched: {error}", warn=True)
        self._release_init_info()


_POOLS = ("req_to_token_pool", "token_to_kv_pool", "token_to_kv_pool_allocator")
"""Attributes of a ``ModelRunner``, up to 0.5.15: its request table, its KV cache and its allocator."""


def _parts(maker: Any, built: Any) -> tuple[Any, Any, Any]:
    """Return the KV cache, the request table and the allocator that the engine has made."""
    owner = maker if built is None else built
    return owner.token_to_kv_pool, owner.req_to_token_pool, owner.token_to_kv_pool_allocator


def _configurator(maker: Any) -> Any:
    """Return the engine's object that computes the number of KV cache tokens from bytes."""
    return engine.module("sglang.srt.model_executor.pool_configurator").create_memory_pool_configurator(maker)


def bytes_per_token(maker: Any) -> float:
    """Return the bytes of one KV token.

    The engine is asked how many tokens fit into 64 GiB, where its rounding to pages hardly matters.
    """
    enough = 64 * GIB
    return enough / int(_configurator(maker).calculate_pool_sizes(enough, maker.page_size).max_total_num_tokens)


def first_fraction(maker: Any, launches: list[LaunchMemory], margin: int) -> float | None:
    """Return a larger fraction for the rehearsal: with KV cache for two chunks, or for the context if that is less.

    The KV cache does not begin with more, because CUDA graphs are captured in the memory that the fraction leaves free.
    It grows when the need is measured.

    :returns: ``None`` if the engine's own fraction stays: it leaves enough, a larger one would leave too little memory,
        or the model has states (such as Mamba's).
    """
    if getattr(maker, "mambaish_config", None):
        return None
    chunk = int(eligibility.arguments_of(maker.server_args).get("chunked_prefill_size") or 0)
    context = int(maker.model_config.context_len)
    tokens = (min(context, 2 * chunk) if chunk > 0 else context) + 2 * int(maker.page_size)
    return sizing.least_fraction(launches, int(tokens * bytes_per_token(maker)), margin)


def _counts_of(config: Any) -> TokenCounts:
    """Return the token counts of the engine's ``MemoryPoolConfig``."""
    return TokenCounts(
        int(config.max_total_num_tokens),
        int(config.full_max_total_num_tokens or 0),
        int(config.swa_max_total_num_tokens or 0),
    )


def launch_memory(maker: Any, arguments: Any, before_gib: float) -> LaunchMemory:
    """Return this rank's memory before its KV cache is made, or the reason why the server is not measured."""
    import torch

    if getattr(maker, "post_capture_kv_active", False):
        return LaunchMemory("the engine sizes its KV cache after its graphs by itself")
    if torch.cuda.is_available():
        if getattr(torch.cuda.get_device_properties(maker.gpu_id), "is_integrated", False):
            return LaunchMemory("the GPU shares its memory with the host, which has use for what is free")
        torch.cuda.empty_cache()
    fraction = _fraction(maker)
    images = 0
    if getattr(maker, "is_multimodal", False) or maker.model_config.is_multimodal:
        try:
            images = int(eligibility.image_allowance_gib(maker, arguments, fraction, before_gib) * GIB)
        except eligibility.NoAllowance as error:
            return LaunchMemory(str(error))
    return LaunchMemory("", int(before_gib * GIB), gpu_memory.read(int(maker.gpu_id)).free, fraction, images)


def _fraction(maker: Any) -> float:
    """Return the ``--mem-fraction-static`` in force, as the engine reads it."""
    if hasattr(maker, "mem_fraction_static"):
        return float(maker.mem_fraction_static)
    return float(engine.module("sglang.srt.runtime_context").get_schedule().mem_fraction_static)


@contextmanager
def _fraction_in_force(maker: Any, fraction: float | None) -> Any:
    """Let the engine size its KV cache by another fraction; ``None``: by its own."""
    if fraction is None:
        yield
        return
    before = _fraction(maker)

    def put(value: float) -> None:
        if hasattr(maker, "mem_fraction_static"):
            maker.mem_fraction_static = maker.server_args.mem_fraction_static = value
        else:
            context = engine.module("sglang.srt.runtime_context").get_context()
            context.override("sglang-moe-patches: kv-sizing", mem_fraction_static=value)

    put(fraction)
    try:
        yield
    finally:
        put(before)


def _machines_apart() -> str:
    """Return the reason why the ranks of several machines cannot decide together; "": they can."""
    try:
        together = ranks.all_machines_take_part()
    except Exception as error:
        return f"of --nnodes, whose machines cannot ask one another, {one_line_error(error)}"
    if together:
        return ""
    return (
        f"of --nnodes, not all of whose machines have said within {ranks.WAIT_S:.0f} s that they have "
        f"{eligibility.KV_SIZING.name} and this version"
    )
