"""A server's start, in the order in which it happens: reserve, rehearse, grow, serve."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
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
from sglang_moe_patches.memory.kv_sizing.sizing import LaunchMemory, RankNeed, megabytes
from sglang_moe_patches.memory.kv_sizing.token_count import TokenCounts

EXCEPTION_WAIT_S = 30.0
"""Seconds in which all ranks must fail, if one rank's rehearsed forward pass fails; else the server ends."""


@dataclass(frozen=True)
class MapTokens(ranks.Order):
    """Have memory behind so many tokens, and tell whether there was enough."""

    tokens: int


@dataclass(frozen=True)
class UseTokens(ranks.Order):
    """Serve with so many tokens from now on.

    :param reason: why it is not what fits; "" where it is.
    :param again: rehearse once more before that, what is larger with another number of tokens, and what was ``missed``.
    :param fewer_requests: how many run at once from now on, as more would take too much memory; 0: as many as can.
    :param start_over: before that, forget what was measured, which was with more requests, and rehearse it all again.
    :param limits: by which all ranks admit requests: those of the rehearsal that counts, on the first rank.
    """

    tokens: int
    reason: str = ""
    again: bool = False
    missed: tuple[phases.PhaseKind, ...] = ()
    fewer_requests: int = 0
    start_over: bool = False
    limits: phases.Limits = field(kw_only=True)


def probe() -> Install:
    """Find where pools are made, and where serving begins.

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
        start = ServerStart()  # one of each scheduler process
        patcher.wrap(maker, "_resolve_memory_pool_config", around(start.reserve))
        patcher.wrap(maker, "_init_pools", around(start.make_pools))
        patcher.wrap(scheduler, "get_init_info", around(start.hold_init_info))
        patcher.wrap(scheduler, "run_event_loop", around(start.rehearse))

    return install


class ServerStart:
    """One scheduler process, from the decision on its pools on.

    What is called in the place of the engine's functions takes the original first.
    """

    pools: ElasticPools
    """Where they are ``reserved``, which is so on all ranks or on none."""
    scheduler: Any
    board: ranks.Board
    _limits: phases.Limits
    """Of the rehearsal that began last."""

    def __init__(self) -> None:
        self.leads, self.gpu, self.given = False, 0, False
        self.margin = eligibility.KV_MARGIN.read()
        self.reason = "its pools have not been made"
        """Why this server is not sized; "": it is."""
        self.launch = LaunchMemory()
        self.reserved = False
        self.bytes_per_token, self._raised_tokens = 0.0, 0
        self.limited = 0
        self.needs: list[RankNeed] = []
        """What all ranks have measured last; known to the first alone."""
        self._init_info: Any = self  # what no pipe sends, until the scheduler has been asked
        self._held: list[Callable[[], None]] = []
        self._rehearsal: rehearsal.Rehearsal | None = None
        self._serving: serving.Serving | None = None
        self._pass = self._fewer_requests = 0
        self._started_over = self._limits_penalized = False
        self._exceptions = 0
        """Exceptions of rehearsed forward passes; the same number on every rank."""
        self._sleeper = Patcher()
        """Switches off the sleep of ``--sleep-on-idle`` until the server serves."""
        self._seen = rehearsal.Measured()
        # Of all passes that count: a later one runs what is larger than it was, and nothing else. What did not run in
        # one (`Measured.expected`) runs in the next.
        self._need = self._before = self._slack = 0
        self._seconds, self._phases = dict[str, float](), dict[str, int]()

    def log(self, message: str, *, warn: bool = False) -> None:
        """Log on the first rank alone."""
        if self.leads:
            (log.logger.warning if warn else log.logger.info)("%s", log.format_line("kv-sizing", message))

    # --- 1. Reserve ----------------------------------------------------------------------------------------------

    def reserve(self, original: Callable[..., Any], maker: Any, pre_model_load_memory: float) -> Any:
        """The engine's decision on its pools: how many tokens there are addresses for."""
        if maker.is_draft_worker or self.reserved:
            return original(maker, pre_model_load_memory)
        launches = self._gather(maker, pre_model_load_memory)
        if self.reason:
            config = original(maker, pre_model_load_memory)
            source = "the given --mem-fraction-static" if self.given else "the engine's default fraction"
            self.log(f"using {source} {self.launch.fraction:.4f} because {self.reason}")
            return config
        fraction, raised = None if self.given else first_fraction(maker, launches, self.margin), 0.0
        if fraction is not None:
            too_little = f"the engine's default fraction {self.launch.fraction:.4f} leaves the KV cache less than"
            self.log(f"{too_little} it is rehearsed with: it begins with {fraction:.4f}", warn=True)
            raised, self.launch = fraction - self.launch.fraction, replace(self.launch, fraction=fraction)
        with _fraction_in_force(maker, fraction):
            config = original(maker, pre_model_load_memory)
        self._reserve(maker, config, raised)
        return config

    def _gather(self, maker: Any, before_gib: float) -> list[LaunchMemory]:
        """What all ranks know; sets the reason. Collective, also where a given fraction is left alone."""
        arguments = eligibility.arguments_of(maker.server_args)
        self.leads, self.gpu = ranks.is_first_rank(), int(maker.gpu_id)
        self.given = eligibility.given_by_the_user(maker.server_args)
        vars(maker.server_args).pop(eligibility.MARK, None)  # else /server_info would show it
        if int(arguments.get("nnodes") or 1) > 1 and (apart := _machines_apart()):
            self.reason = apart
            return []
        try:
            self.launch = launch_memory(maker, arguments, before_gib)
        except Exception as error:
            self.launch = LaunchMemory(one_line_error(error))
        launches: list[LaunchMemory] = ranks.all_gather(self.launch, LaunchMemory)
        self.reason = next((each.failure for each in launches if each.failure), "")
        if not self.reason and self.given:
            self.reason = eligibility.given_reason(eligibility.KV_SIZING.read())
        # The engine divides by the free memory of the rank with the least.
        before = min((each.free_before_load for each in launches if not each.failure), default=0)
        self.launch = replace(self.launch, free_before_load=before)
        return [replace(each, free_before_load=before) for each in launches]

    def _reserve(self, maker: Any, config: Any, raised: float) -> None:
        """Decide on the addresses. Collective.

        :param raised: by how much the fraction in force is above the engine's own.
        """
        first = _counts_of(config)
        top, problem = first, ""
        try:
            memory = CudaMemory(self.gpu)
            self.bytes_per_token = bytes_per_token(maker)
            self._raised_tokens = int(raised * self.launch.free_before_load / self.bytes_per_token)
            most = first.tokens + int(self.launch.set_aside / self.bytes_per_token)
            self.limited = int(eligibility.arguments_of(maker.server_args).get("max_total_tokens") or 0)
            top = _counts_of(_configurator(maker).calculate_pool_sizes_from_max_tokens(most, maker.page_size))
        except Exception as error:
            problem = one_line_error(error)
        told: list[tuple[str, TokenCounts]] = ranks.all_gather((problem, top), tuple[str, TokenCounts])
        problem = next((each for each, _ in told if each), "")
        top = min((each for _, each in told), key=lambda each: each.tokens)
        if self.limited:
            top = first if self.limited <= first.tokens else top
        if not problem and any(addresses < tokens for addresses, tokens in zip(top, first, strict=True)):
            problem = f"there is no address space for {first.tokens:,} tokens"
        if problem:
            self.reason = problem
            self.log(f"no rehearsal because {problem}", warn=True)
            return
        self.pools = ElasticPools(memory, first, top, int(maker.page_size))
        self.reserved = True
        self._hold_pipe()

    def make_pools(self, original: Callable[..., Any], maker: Any, **arguments: Any) -> Any:
        """The engine's making of pools: with buffers of ours, or as without us."""
        if not self.reserved or self.reason:
            return original(maker, **arguments)
        pools = self.pools
        kept = {name: getattr(maker, name) for name in _POOLS if hasattr(maker, name)}
        try:
            with sized_for(maker, arguments, pools.first, pools.top) as told:
                built = pools.build(lambda: original(maker, **told), lambda made: _parts(maker, made), maker.device)
            if not maker.is_draft_worker:
                token_count.resize_allocator(_parts(maker, built)[2], pools.first)
            return built
        except Exception as error:
            self.reason = str(error) if isinstance(error, Unknown) else one_line_error(error)
            for name, value in kept.items():
                setattr(maker, name, value)
        return original(maker, **arguments)

    # --- 2. Rehearse ---------------------------------------------------------------------------------------------

    def hold_init_info(self, original: Callable[..., Any], scheduler: Any) -> Any:
        """What the scheduler tells its launcher: not before the number of tokens is known."""
        self._init_info = original(scheduler)
        return self._init_info

    def _hold_pipe(self) -> None:
        """Have the pipe to the launcher wait with what ``get_init_info`` returns, until :meth:`_release_init_info`.

        ``pipe.send(scheduler.get_init_info())`` looks ``send`` up before it calls the other: it is wrapped before that.
        """
        from multiprocessing.connection import Connection

        patcher = Patcher()

        def make_send(send: Callable[..., None]) -> Callable[..., None]:
            def hold(pipe: Any, told: Any) -> None:
                if told is not self._init_info or self.reason:
                    send(pipe, told)
                    return
                patcher.undo()
                self._held.append(lambda: send(pipe, token_count.init_info(told, self.scheduler)))

            return hold

        patcher.wrap(Connection, "send", make_send)
        self._held.append(patcher.undo)

    def _release_init_info(self) -> None:
        while self._held:
            self._held.pop()()

    def rehearse(self, original: Callable[..., Any], scheduler: Any, *args: Any, **kwargs: Any) -> Any:
        """Run the event loop. Its first turns are the rehearsal, before users' requests are read."""
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
            # Outside of the except clause, whose exception keeps the tensors of its frames.
            rehearsal.drop_requests(scheduler)
            assert self._rehearsal is not None
            self._rehearsal.fail(problem)

    def _outlives_exception(self) -> bool:
        """Return whether all ranks have left their event loops by an exception of a rehearsed forward pass.

        A rank that failed alone cannot go on: the other ranks wait for it in a collective. Stages of a pipeline run
        different forward passes, so one stage fails alone.
        """
        if self._rehearsal is None or not self._rehearsal.is_running or self._limits.stages > 1:
            return False
        self._exceptions += 1
        topic = f"exception {self._exceptions}"
        try:
            self.board.publish(topic, "")
            return self.board.wait_for_all(topic, str, EXCEPTION_WAIT_S) is not None
        except Exception as error:
            log.logger.warning(log.format_line("kv-sizing", "the other ranks do not answer: %s"), error)
            return False

    def _begin(self, scheduler: Any) -> None:
        self.scheduler = scheduler
        arguments = eligibility.arguments_of(scheduler.server_args)
        self.metrics = serving.Metrics(arguments, self.gpu)
        self.orders = ranks.Orders(scheduler, self.obey)
        problem = self.reason
        if self.reserved:
            self.board = ranks.Board(ranks.share_secret())
        if not problem:
            try:
                # The rehearsal waits for nothing that the sleeper would wake up for.
                self._sleeper.add(scheduler, "idle_sleeper", None)
                self.orders.open()
                self._begin_pass(phases.derive_phases)
            except Exception as error:
                problem = str(error) if isinstance(error, RuntimeError) else one_line_error(error)
        if self.reserved:  # else some ranks would wait here for ever
            problem = next(filter(None, ranks.all_gather(problem, str)), "")
        if not problem:
            limit_s = rehearsal.timeout_s()
            self.log(f"rehearses the largest forwards before the first request, at most {limit_s:.0f} s")
            return
        if self._rehearsal is not None:
            self._rehearsal.end()
        self.orders.close()
        self._sleeper.undo()
        if self.reserved:
            self.log(f"no rehearsal because {problem}", warn=True)
        self._show("rule", problem)
        self._release_init_info()

    def _begin_pass(self, derive: Callable[[phases.Limits], list[phases.Phase]]) -> None:
        """:raises Exception: this rank cannot; the caller must end the rehearsal."""
        self._pass += 1
        self._rehearsal = rehearsal.Rehearsal(
            *(self.scheduler, self.gpu, self._measured, self.board, self._pass, derive),
            leads=self.leads,
            peaks=self._phases,
            fewer_requests=self._fewer_requests,
            limits_penalized=self._limits_penalized,
            bytes_per_token=self.bytes_per_token,
            margin=self.margin,
        )
        self._limits = self._rehearsal.begin()
        self.orders.instead, self.orders.each_turn = self._rehearsal.poll, self._rehearsal.look_at_turn

    def _measured(self, seen: rehearsal.Measured) -> None:
        """On every rank, once its cache has been flushed: tell what it needs. A pipeline's stages come here in turn."""
        self._seen = seen
        for name, took in seen.seconds.items():
            self._seconds[name] = self._seconds.get(name, 0.0) + took
        for name, taken in seen.phases.items():
            self._phases[name] = max(self._phases.get(name, 0), taken)
        # Request tables and states were allocated with the pools, too.
        beside_cache = rehearsal.server_facts(self.scheduler.tp_worker.model_runner).fixed_bytes
        mapped = self.pools.bytes_behind(self.pools.counts)
        without_forwards = self.launch.free - beside_cache - mapped
        if not seen.failure:
            self._need = max(self._need, without_forwards - seen.lowest)
            # Later ones begin with what the allocator has kept of the first.
            self._before = self._before or without_forwards - seen.free
            self._slack = max(self._slack, seen.slack)
        lowest = min(without_forwards - self._need, seen.expected)
        not_run = sizing.MIN_FREE_BYTES if seen.stopped else 0
        spare = lowest - self.margin - self.launch.images - not_run
        fits = self.pools.tokens_within(int(mapped + spare))
        self._tell_need(RankNeed(fits, int(without_forwards - lowest), seen.failure, seen.stopped, seen.missed))

    # --- 3. Grow, or shrink --------------------------------------------------------------------------------------

    def _tell_first(
        self, topic: str, told: Any, kind: Any, decide: Callable[[list[Any]], ranks.Order], tokens: int
    ) -> None:
        """Tell the first rank. Users' requests wait until it orders what to do: when all have told, or time is over.

        :param kind: the type of what is told.
        :param decide: makes the order from what all have told.
        :param tokens: for which all ranks have memory, whatever is told or lost.
        """
        deadline, key = time.monotonic() + rehearsal.ABANDON_AFTER_S, f"{topic} {self._pass}"

        def order_when_all_have_told() -> list[Any]:
            try:
                if (all_told := self.board.collect(key, kind)) is not None:
                    order = decide(all_told)
                elif time.monotonic() <= deadline:
                    return []
                else:
                    order = self._order_to_use(tokens, f"not every rank has told what it {topic}")
            except Exception as error:
                order = self._order_to_use(tokens, f"what was {topic} is lost: {one_line_error(error)}")
            self.orders.instead = list  # nothing is read until it is obeyed
            return [ranks.Broadcast((order,))]

        self.orders.instead = order_when_all_have_told if self.leads else list
        self.orders.each_turn = lambda: None
        try:
            self.board.publish(key, told)
        except Exception as error:
            log.logger.warning(log.format_line("kv-sizing", "what a rank has to tell is lost: %s"), error)

    def _tell_need(self, need: RankNeed) -> None:
        self._tell_first("measured", need, RankNeed, self._order_for, self.pools.counts.tokens)

    def _order_for(self, needs: list[RankNeed]) -> ranks.Order:
        self.needs = needs
        now = self.pools.counts.tokens
        most = min(self.pools.top.tokens, self.limited or self.pools.top.tokens)
        tokens, reason = sizing.decide(needs, now, most, serving.least_tokens(self.scheduler, self.pools))
        stopped, failed = any(need.stopped for need in needs), any(need.failure for need in needs)
        if (fewer := self._seen.fallback) and self._pass == 1 and (tokens < now or stopped) and not failed:
            return UseTokens(now, fewer_requests=fewer, start_over=True, limits=self._limits.with_requests(fewer))
        if self._pass == 1 and tokens < now and not failed and (limits := self._limits.with_fewer_penalized()):
            return UseTokens(now, start_over=True, limits=limits)
        if failed:
            tokens = min(tokens, self.pools.first.tokens)  # what a larger cache needs is not known
        if tokens > now:
            return MapTokens(tokens)
        again = tokens < now and stopped and self._passes_left
        return self._order_to_use(tokens, reason, again=again, missed=tuple(needs[0].missed.values()))

    def _order_to_use(
        self, tokens: int, reason: str = "", *, again: bool = False, missed: tuple[phases.PhaseKind, ...] = ()
    ) -> UseTokens:
        """On the first rank, whose rehearsal has found how many requests may run at once."""
        fewer, limits = self._seen.fewer_requests or self._fewer_requests, self._limits
        if fewer:
            limits = limits.with_requests(fewer)
        return UseTokens(tokens, reason, again, missed, fewer, limits=limits)

    def obey(self, order: ranks.Order) -> None:
        """On every rank: an order of the first. Called between two turns, with nothing running while it rehearses."""
        if self._serving is not None:
            self._serving.obey(order)
        elif isinstance(order, MapTokens):
            self._map(order)
        elif isinstance(order, UseTokens):
            self._use(order)
        elif isinstance(order, Plant) and self._rehearsal is not None:
            self._rehearsal.plant(order)

    def _map(self, order: MapTokens) -> None:
        before, problem = self.pools.counts.tokens, ""
        try:
            self.pools.map(self.pools.counts_for(order.tokens))
        except Exception as error:
            problem = str(error) or type(error).__name__  # "" says that there is memory

        def order_to_use(problems: list[str]) -> ranks.Order:
            if first := next(filter(None, problems), ""):
                return self._order_to_use(before, f"a rank had no memory to map: {first}")
            again = self._passes_left
            return self._order_to_use(self.pools.counts.tokens, again=again)

        self._tell_first("mapped", problem, str, order_to_use, before)

    def _use(self, order: UseTokens) -> None:
        if self._rehearsal is not None:  # else a rank whose rehearsal nobody ended would go on swallowing answers
            self._rehearsal.end()
        counts = self.pools.counts_for(order.tokens)
        try:
            self._tell(counts)
        except Exception as error:
            # As on every rank, whose objects are of the same kinds. With the first number all is as it was.
            counts = self.pools.counts_for(min(self.pools.first.tokens, self.pools.counts.tokens))
            with suppress(Exception):
                self._tell(counts)
            order = replace(order, again=False, start_over=False, reason=f"not every count could be told: {error}")
        self.pools.unmap_from(counts)
        self._fewer_requests = order.fewer_requests or self._fewer_requests
        if order.start_over:
            self._start_over(order.limits)
            return
        if order.again and self._rehearse_again(order.missed):
            return
        self._log_sizing(order)
        self._limit_requests(order.limits)
        self._serve()

    def _limit_requests(self, limits: phases.Limits) -> None:
        """Admit no more at once than was rehearsed, where nobody has said how many, and the KV cache was sized or more
        would have cost some of the rule's tokens."""
        is_limited = limits.default_requests or limits.limits_penalized
        if not is_limited or (self.pools.counts == self.pools.first and not self._started_over):
            return
        why = "--max-running-requests sets another number for all"
        if limits.limits_penalized:
            why = f"memory for {limits.batch:,} of them would leave the KV cache less than the engine's own rule does"
        serving.limit_requests(self.scheduler, limits.batch, limits.penalized)
        self.log(
            f"{limits.batch:,} requests run at once, {limits.penalized:,} where one has penalties, min_p, a logit bias "
            f"or log-probabilities; {why}"
        )

    def _tell(self, counts: TokenCounts) -> None:
        token_count.resize_allocator(self.scheduler.token_to_kv_pool_allocator, counts)
        token_count.set_token_count(self.scheduler, counts)

    @property
    def _passes_left(self) -> bool:
        return self._pass - self._started_over < sizing.MAX_PASSES

    def _start_over(self, limits: phases.Limits) -> None:
        """After the first pass, in which the KV cache would have paid for requests that nobody asked for."""
        fewer = (
            f"{limits.penalized:,} penalized ones of {limits.batch:,}"
            if limits.limits_penalized
            else f"{limits.batch:,}"
        )
        self.log(f"rehearses again with {fewer} requests at once: with more, too little memory was left")
        self._started_over, self._limits_penalized = True, limits.limits_penalized
        self._need = self._before = self._slack = 0
        self._phases.clear()
        self._begin_next(phases.derive_phases)

    def _rehearse_again(self, missed: tuple[phases.PhaseKind, ...]) -> bool:
        """Whether something is left to rehearse with this number of tokens, and has begun: the same on every rank."""
        before, after = self._limits, rehearsal.limits_of(self.scheduler, self._fewer_requests)
        if self._limits_penalized:
            after = replace(after, limits_penalized=True)
        if not phases.derive_second_pass(before, after, missed):
            return False
        self._begin_next(lambda limits: phases.derive_second_pass(before, limits, missed))
        return True

    def _begin_next(self, derive: Callable[[phases.Limits], list[phases.Phase]]) -> None:
        try:
            self._begin_pass(derive)
        except Exception as error:
            if self._rehearsal is not None:
                self._rehearsal.end()
            self._tell_need(RankNeed(failure=one_line_error(error)))  # the others wait for it

    def _log_sizing(self, order: UseTokens) -> None:
        rule, now = self._tokens_by_rule(), self.pools.counts.tokens
        state = "grown" if now > rule else "shrunk" if now < rule else "rule"
        self._show(state, order.reason)
        if not self.leads:
            return
        needs = self.needs
        need = megabytes(max((each.need for each in needs), default=0))
        if needs and self._seconds:
            of_all = self._seconds.pop(rehearsal.ALL, 0.0)
            parts = ", ".join(f"{name} {seconds:.1f} s" for name, seconds in self._seconds.items())
            missed = f"; not reached: {', '.join(needs[0].missed)}" if needs[0].missed else ""
            early = "; ended early, before memory ran out" if any(each.stopped for each in needs) else ""
            self.log(f"rehearsed in {of_all:.0f} s: {parts}{missed}{early}")
            self.log(
                f"forwards need {need}; largest: {sizing.largest_phases(self._phases)}; {megabytes(self._before)} went "
                f"into graphs and buffers before, {megabytes(self._seen.graphs)} of it into graphs of decodes; "
                f"the allocator keeps {megabytes(self._slack)} beyond the most tensors"
            )
        kept = f", {megabytes(self.launch.images)} the engine's for images" if self.launch.images else ""
        facts = f"{now:,} KV tokens instead of {rule:,}" if now != rule else f"{now:,} KV tokens, as by the rule"
        more = now - self.pools.first.tokens
        fraction = sizing.pinned_fraction(self.launch, more * self.bytes_per_token)
        hybrid = rehearsal.server_facts(self.scheduler.tp_worker.model_runner).hybrid == phases.MAMBA
        pin = f"; the same as --mem-fraction-static {fraction:.4f}" if fraction and not hybrid and now != rule else ""
        why = f"; {order.reason}" if order.reason else ""
        limit = f"; --max-total-tokens {self.limited:,} is used" if self.limited and now == self.limited else ""
        free = f"{megabytes(self.margin)} of margin stay free"
        warn = bool(order.reason) or now < rule
        self.log(f"{facts}; forwards need {need}, {free}{kept}{limit}{why}{pin}", warn=warn)
        if self.given and now < rule and fraction:
            self.log(f"the given --mem-fraction-static is too high: {fraction:.4f} would be safe", warn=True)

    def _tokens_by_rule(self) -> int:
        """By the fraction that was given or is the engine's own: with a raised one the KV cache begins with more."""
        return max(0, self.pools.first.tokens - self._raised_tokens)

    def _show(self, state: str, reason: str) -> None:
        self.metrics.show(serving.STATE, 1, state=state, reason=reason)
        if self.reserved:
            self.metrics.show(serving.TOKENS, self.pools.counts.tokens)
            self.metrics.show(serving.BY_RULE, self._tokens_by_rule())
        if self.needs:
            self.metrics.show(serving.NEED, max(each.need for each in self.needs))

    # --- 4. Serve ------------------------------------------------------------------------------------------------

    def _serve(self) -> None:
        """From here on users' requests are read, and each turn reads the clock once."""
        self.orders.instead, self.orders.each_turn = None, lambda: None
        self._sleeper.undo()
        try:
            memory = serving.FreeMemory(lambda: gpu_memory.read(self.gpu), self.margin)
            self._serving = serving.Serving(
                *(self.scheduler, self.pools, memory, self.orders, self.board, self.metrics),
                leads=self.leads,
                beside=self._limits.beside_prompt(),
            )
            self.orders.each_turn = self._serving.look
        except Exception as error:
            self.log(f"free memory is not watched: {error}", warn=True)
        self._release_init_info()


_POOLS = ("req_to_token_pool", "token_to_kv_pool", "token_to_kv_pool_allocator")
"""What a model runner has been given before it makes pools, and keeps as attributes up to 0.5.15."""


def _parts(maker: Any, built: Any) -> tuple[Any, Any, Any]:
    """The KV cache, the request table and the allocator that were made."""
    owner = maker if built is None else built
    return owner.token_to_kv_pool, owner.req_to_token_pool, owner.token_to_kv_pool_allocator


def _configurator(maker: Any) -> Any:
    """The engine's arithmetic from bytes to tokens."""
    return engine.module("sglang.srt.model_executor.pool_configurator").create_memory_pool_configurator(maker)


def bytes_per_token(maker: Any) -> float:
    """Of the KV cache, by the engine's arithmetic for as many bytes as make its rounding small."""
    enough = 64 * GIB
    return enough / int(_configurator(maker).calculate_pool_sizes(enough, maker.page_size).max_total_num_tokens)


def first_fraction(maker: Any, launches: list[LaunchMemory], margin: int) -> float | None:
    """The fraction with which the KV cache begins where the engine's own leaves it less than two chunks, or than the
    whole context; ``None``: the engine's own stays.

    What more there is comes when it has been measured: graphs are captured beside what the rule sets aside.
    """
    if getattr(maker, "mambaish_config", None):
        return None
    with suppress(Exception):
        chunk = int(eligibility.arguments_of(maker.server_args).get("chunked_prefill_size") or 0)
        context = int(maker.model_config.context_len)
        tokens = (min(context, 2 * chunk) if chunk > 0 else context) + 2 * int(maker.page_size)
        return sizing.least_fraction(launches, int(tokens * bytes_per_token(maker)), margin)
    return None


def _counts_of(config: Any) -> TokenCounts:
    """:param config: the engine's ``MemoryPoolConfig``."""
    return TokenCounts(
        int(config.max_total_num_tokens),
        int(config.full_max_total_num_tokens or 0),
        int(config.swa_max_total_num_tokens or 0),
    )


def launch_memory(maker: Any, arguments: Any, before_gib: float) -> LaunchMemory:
    """What this rank knows, or why it is not sized."""
    import torch

    if getattr(maker, "post_capture_kv_active", False):
        return LaunchMemory("the engine sizes its KV cache after its graphs by itself")
    if torch.cuda.is_available():
        if getattr(torch.cuda.get_device_properties(maker.gpu_id), "is_integrated", False):
            return LaunchMemory("the GPU shares its memory with the host, which has use for what is free")
        torch.cuda.empty_cache()
    fraction = _fraction(maker)
    kept = 0
    if getattr(maker, "is_multimodal", False) or maker.model_config.is_multimodal:
        try:
            kept = int(eligibility.image_allowance_gib(maker, arguments, fraction, before_gib) * GIB)
        except eligibility.NoAllowance as error:
            return LaunchMemory(str(error))
    return LaunchMemory("", int(before_gib * GIB), gpu_memory.read(int(maker.gpu_id)).free, fraction, kept)


def _fraction(maker: Any) -> float:
    """In force, as the engine reads it."""
    if hasattr(maker, "mem_fraction_static"):
        return float(maker.mem_fraction_static)
    return float(engine.module("sglang.srt.runtime_context").get_schedule().mem_fraction_static)


@contextmanager
def _fraction_in_force(maker: Any, fraction: float | None) -> Any:
    """Have the engine size its pools by another fraction; ``None``: by its own."""
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
    """Why the ranks of several machines do not decide together; "": they do."""
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
