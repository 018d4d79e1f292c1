"""Hook points of kv-sizing in the engine: KV cache over reserved addresses, message to the launcher, event loop.

The start itself is :meth:`.start.ServerStart.start_up`. A *rehearsal* runs the server's largest forward passes before
the first user's request, and measures their memory. The *fraction* is ``--mem-fraction-static``, by which the engine's
own rule computes the KV cache size.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

from sglang_moe_patches.core import engine
from sglang_moe_patches.core.patch import Install, Patcher, around, format_error
from sglang_moe_patches.memory.kv_sizing import eligibility, engine_rule, ranks, serving, token_count
from sglang_moe_patches.memory.kv_sizing.address_space import CudaMemory
from sglang_moe_patches.memory.kv_sizing.pools import ElasticPools, Unknown, substitute_counts
from sglang_moe_patches.memory.kv_sizing.sizing import LaunchMemory
from sglang_moe_patches.memory.kv_sizing.start import Reservation, ServerStart, log_on_rank_0
from sglang_moe_patches.memory.kv_sizing.token_count import TokenCounts

POOLS = ("token_to_kv_pool", "req_to_token_pool", "token_to_kv_pool_allocator")
"""Attributes of the engine's object that has the pools: its KV cache, its request table and its allocator."""


def probe() -> Install:
    """Find the engine's functions that make the KV cache and that run the event loop, and check them.

    :returns: the function that patches them.
    :raises engine.Unsupported: the engine is not as expected.
    """
    maker = engine.require_unpatched(engine.import_module("sglang.srt.model_executor.model_runner"), "ModelRunner")
    if not hasattr(maker, "_init_pools"):
        maker = engine.require_unpatched(
            engine.import_module("sglang.srt.mem_cache.kv_cache_configurator"), "KVCacheConfigurator"
        )
    profile = engine.require_unpatched(maker, "_profile_available_bytes")
    engine.require_mentions(profile, "mem_fraction_static", "pre_model_load_memory")
    engine.require_parameters(
        engine.require_unpatched(maker, "_resolve_memory_pool_config"), ("self", "pre_model_load_memory")
    )
    engine.require_mentions(engine.require_unpatched(maker, "_init_pools"), "max_running_requests")
    scheduler = engine.require_unpatched(engine.import_module("sglang.srt.managers.scheduler"), "Scheduler")
    engine.require_mentions(engine.require_unpatched(scheduler, "run_event_loop"), "dispatch_event_loop")
    engine.require_mentions(engine.require_unpatched(scheduler, "get_init_info"), "max_total_num_tokens")
    engine.require_parameters(engine.require_unpatched(scheduler, "get_num_allocatable_reqs"), ("self", "running_bs"))
    for name in ("_add_request_to_queue", "get_new_batch_prefill", "is_fully_idle", "flush_cache"):
        engine.require_unpatched(scheduler, name)
    ranks.require_inbox(scheduler)

    def install(patcher: Patcher) -> None:
        hooks = SchedulerHooks()  # one object in each scheduler process
        patcher.wrap(maker, "_resolve_memory_pool_config", around(hooks.resolve_config))
        patcher.wrap(maker, "_init_pools", around(hooks.make_pools))
        patcher.wrap(scheduler, "get_init_info", around(hooks.remember_init_info))
        patcher.wrap(scheduler, "run_event_loop", around(hooks.run))

    return install


class SchedulerHooks:
    """Replacements for functions of the engine in one scheduler process, from the function that makes the pools to the
    event loop.

    A method that replaces a function of the engine receives the original function as its first argument.
    """

    def __init__(self) -> None:
        self.leads, self.gpu, self.fraction_is_given = False, 0, False
        self.margin = eligibility.KV_MARGIN.read()
        self.launch = LaunchMemory()
        self.reason = "the engine has not made its KV cache yet"
        """Reason why this server keeps the KV cache size of the engine's rule; empty if the server is measured."""
        self.reservation: Reservation | None = None
        """KV cache over reserved addresses. Either all ranks have such a KV cache, or no rank has one."""
        self._init_info: Any = self  # an object that no pipe sends
        self._scheduler: Any = None
        self._releases: list[Callable[[], None]] = []
        """Functions to call when the server begins to serve. They send the message with the number of tokens to the
        launcher, and undo the patch of ``Connection.send``."""

    def resolve_config(self, original: Callable[..., Any], maker: Any, pre_model_load_memory: float) -> Any:
        """Let the engine decide on its KV cache size, reserve addresses for more tokens, and return the engine's
        ``MemoryPoolConfig``.

        :param maker: the engine's ``ModelRunner``, or from 0.5.16 on its ``KVCacheConfigurator``.
        """
        if maker.is_draft_worker or self.reservation is not None:
            return original(maker, pre_model_load_memory)
        launches = self._gather_launch_memory(maker, pre_model_load_memory)
        if self.reason:
            source = "given" if self.fraction_is_given else "engine's default"
            fraction_in_use = self.launch.fraction or engine_rule.fraction_in_force(maker)
            log_on_rank_0(
                self.leads, f"using the {source} --mem-fraction-static {fraction_in_use:.4f} because {self.reason}"
            )
            return original(maker, pre_model_load_memory)
        fraction, raised = None, 0.0
        try:
            fraction = engine_rule.find_rehearsal_fraction(maker, launches, self.margin)
        except Exception as error:
            problem = (
                "could not choose a --mem-fraction-static for the rehearsal, so the KV cache starts with the value in "
                "force: " + format_error(error)
            )
            log_on_rank_0(self.leads, problem, warn=True)
        if fraction is not None:
            source = "given" if self.fraction_is_given else "engine's default"
            given = f"the {source} --mem-fraction-static {self.launch.fraction:.4f}"
            too_little = f"{given} leaves too little KV cache for the rehearsal"
            final = f"the rehearsal starts with {fraction:.4f}, and sets the final size"
            log_on_rank_0(self.leads, f"{too_little}; {final}", warn=True)
            raised, self.launch = fraction - self.launch.fraction, replace(self.launch, fraction=fraction)
        # If this fraction leaves no KV cache, the engine raises here, and the server ends as a stock server does.
        with engine_rule.use_fraction(maker, fraction):
            config = original(maker, pre_model_load_memory)
        self._reserve_addresses(maker, config, raised)
        return config

    def _gather_launch_memory(self, maker: Any, before_gib: float) -> list[LaunchMemory]:
        """Gather the memory of all ranks before their pools are made, and set ``reason`` if this server is not
        measured. All ranks must call this method at the same point, even if the server keeps a given
        ``--mem-fraction-static``."""
        arguments = eligibility.arguments_of(maker.server_args)
        self.leads, self.gpu = ranks.is_rank_0(), int(maker.gpu_id)
        self.fraction_is_given = eligibility.is_given_by_the_user(maker.server_args)
        vars(maker.server_args).pop(eligibility.NOT_GIVEN_MARK, None)  # else /server_info would show it
        self.reason = _find_machine_problem() if int(arguments.get("nnodes") or 1) > 1 else ""
        if self.reason:
            return []
        try:
            self.launch = engine_rule.measure_launch_memory(maker, arguments, before_gib)
        except Exception as error:
            self.launch = LaunchMemory(format_error(error))
        launches: list[LaunchMemory] = ranks.all_gather(self.launch, LaunchMemory)
        self.reason = next((launch.failure for launch in launches if launch.failure), "")
        if not self.reason and self.fraction_is_given:
            self.reason = eligibility.kept_fraction_reason(eligibility.KV_SIZING.read())
        # The engine's fraction counts from the free memory before the weights were loaded, on the rank with the least.
        before = min((launch.free_before_load for launch in launches if not launch.failure), default=0)
        self.launch = replace(self.launch, free_before_load=before)
        return [replace(launch, free_before_load=before) for launch in launches]

    def _reserve_addresses(self, maker: Any, config: Any, raised: float) -> None:
        """Decide for how many tokens addresses are reserved, and set ``reservation``; set ``reason`` instead if that
        fails on any rank. All ranks must call this method at the same point.

        :param config: the engine's ``MemoryPoolConfig``, with the token counts of its own rule.
        :param raised: number that was added to the fraction of the user or the engine, because the rehearsal needs a
            larger KV cache; 0 if nothing was added.
        """
        first = engine_rule.counts_of(config)
        top, problem = first, ""
        token_bytes, raised_tokens, max_tokens = 0.0, 0, 0
        try:
            memory = CudaMemory(self.gpu)
            token_bytes = engine_rule.bytes_per_token(maker)
            raised_tokens = int(raised * self.launch.free_before_load / token_bytes)
            most = first.tokens + int(self.launch.set_aside / token_bytes)
            max_tokens = int(eligibility.arguments_of(maker.server_args).get("max_total_tokens") or 0)
            sizes = engine_rule.get_configurator(maker).calculate_pool_sizes_from_max_tokens(most, maker.page_size)
            top = engine_rule.counts_of(sizes)
        except Exception as error:
            problem = format_error(error)
        gathered: list[tuple[str, TokenCounts]] = ranks.all_gather((problem, top), tuple[str, TokenCounts])
        problem = next((text for text, _ in gathered if text), "")
        top = min((counts for _, counts in gathered), key=lambda counts: counts.tokens)
        if max_tokens:
            top = first if max_tokens <= first.tokens else top
        if not problem and any(addresses < tokens for addresses, tokens in zip(top, first, strict=True)):
            problem = f"addresses cannot be reserved for the engine's {first.tokens:,} KV tokens"
        if problem:
            self.reason = problem
            unmeasured = f"the KV cache keeps the engine's size and is not measured because {problem}"
            log_on_rank_0(self.leads, unmeasured, warn=True)
            return
        self.reservation = Reservation(
            pools=ElasticPools(memory, first, top, int(maker.page_size)),
            launch=self.launch,
            gpu=self.gpu,
            leads=self.leads,
            margin=self.margin,
            bytes_per_token=token_bytes,
            raised_tokens=raised_tokens,
            max_tokens=max_tokens,
            fraction_is_given=self.fraction_is_given,
        )
        self._hold_pipe()

    def make_pools(self, original: Callable[..., Any], maker: Any, **arguments: Any) -> Any:
        """Let the engine make its KV cache. If this server is measured, the KV cache is over reserved addresses."""
        if self.reservation is None or self.reason:
            return original(maker, **arguments)
        pools = self.reservation.pools
        before = {name: getattr(maker, name) for name in POOLS if hasattr(maker, name)}
        try:
            with substitute_counts(maker, arguments, pools.first, pools.top) as sizes:
                built = pools.build(lambda: original(maker, **sizes), lambda made: get_pools(maker, made), maker.device)
            if not maker.is_draft_worker:
                token_count.resize_allocator(get_pools(maker, built)[2], pools.first)
            return built
        except Exception as error:
            self.reason = str(error) if isinstance(error, Unknown) else format_error(error)
            for name, value in before.items():
                setattr(maker, name, value)
        return original(maker, **arguments)

    def remember_init_info(self, original: Callable[..., Any], scheduler: Any) -> Any:
        """Remember the scheduler's message to the launcher. It is sent when the final number of tokens is known."""
        self._scheduler, self._init_info = scheduler, original(scheduler)
        return self._init_info

    def _hold_pipe(self) -> None:
        """Hold back the scheduler's message to the launcher until :meth:`_release_init_info` is called.

        The message is the result of ``get_init_info``, and contains the number of tokens. In the engine's
        ``pipe.send(scheduler.get_init_info())`` Python looks up ``send`` before it calls ``get_init_info``. So ``send``
        must be patched before the engine reaches this line.
        """
        from multiprocessing.connection import Connection

        patcher = Patcher()

        def make_send(send: Callable[..., None]) -> Callable[..., None]:
            def hold(pipe: Any, message: Any) -> None:
                if message is not self._init_info or self.reason:
                    send(pipe, message)
                    return
                patcher.undo()
                self._releases.append(lambda: send(pipe, token_count.update_init_info(message, self._scheduler)))

            return hold

        patcher.wrap(Connection, "send", make_send)
        self._releases.append(patcher.undo)

    def _release_init_info(self) -> None:
        while self._releases:
            self._releases.pop()()

    def run(self, original: Callable[..., Any], scheduler: Any, *args: Any, **kwargs: Any) -> Any:
        """Run the event loop. Its first turns are the rehearsal; users' requests are read afterwards."""
        if self.reservation is None:
            metrics = serving.Metrics(eligibility.arguments_of(scheduler.server_args), self.gpu)
            metrics.show(serving.STATE, 1, state="rule", reason=self.reason)
            return original(scheduler, *args, **kwargs)
        start = ServerStart(scheduler, self.reservation, self._release_init_info)
        start.begin(self.reason)
        return start.run_event_loop(partial(original, scheduler, *args, **kwargs))


def get_pools(maker: Any, built: Any) -> tuple[Any, ...]:
    """Return the KV cache, the request table and the allocator that the engine has made.

    :param built: the engine's object with the pools. With ``None`` (up to 0.5.15), the pools are attributes of
        ``maker``.
    """
    return tuple(getattr(maker if built is None else built, name) for name in POOLS)


def _find_machine_problem() -> str:
    """Return the reason why the ranks of several machines cannot decide on a KV cache size together; empty if they can.
    All machines must run this package with kv-sizing on."""
    try:
        together = ranks.all_machines_take_part()
    except Exception as error:
        return f"of --nnodes: the machines could not reach one another, {format_error(error)}"
    if together:
        return ""
    return (
        f"of --nnodes: not all machines were ready to size the KV cache together within {ranks.WAIT_S:.0f} s; each "
        f"machine needs this version of the package, and {eligibility.KV_SIZING.name}=auto or always"
    )
