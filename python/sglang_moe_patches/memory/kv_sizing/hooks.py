"""The hook points: pools (choose the fraction), event loop (rehearse, monitor), init info (report the fraction)."""

from __future__ import annotations

import functools
import logging
import os
import re
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from sglang_moe_patches.core import engine, gpu_memory, log, patch
from sglang_moe_patches.core.patch import Install, Patcher
from sglang_moe_patches.memory.kv_sizing import (
    coordination,
    eligibility,
    fingerprint,
    images,
    metrics,
    record,
    rehearsal,
    sizing,
)
from sglang_moe_patches.memory.kv_sizing.facts import GIB, draft_kv_bytes, server_facts
from sglang_moe_patches.memory.kv_sizing.launcher import MARK, given_by_the_user
from sglang_moe_patches.memory.kv_sizing.monitor import FreeMemoryMonitor
from sglang_moe_patches.memory.kv_sizing.phases import MAMBA
from sglang_moe_patches.memory.kv_sizing.record import Record

RECORD_LOCK_TIMEOUT_S = 5.0
"""While a server starts; in a turn of the serving loop nothing is waited for."""


@dataclass
class State:
    """State of one scheduler process, from KV-cache sizing to exit.

    :param process: the launch that this process belongs to, the same for all replicas of a server.
    :param leader: it is the world's first rank, which reads, writes and logs.
    :param elsewhere: it is on another machine than the leader, with a file of its own.
    :param launch: memory of all ranks as the start began; ``None``: nothing is sized or recorded.
    :param given: the user set ``--mem-fraction-static``.
    :param rank_reserve: what this rank has beside its weights and its KV cache, in bytes.
    :param draft_runners: the engine's model runners of draft models, which have KV caches of their own.
    """

    path: Path
    process: str = ""
    leader: bool = False
    elsewhere: bool = False
    gpu: int = 0
    key: str = ""
    fingerprint_inputs: Mapping[str, Any] = field(default_factory=dict)
    launch: sizing.LaunchMemory | None = None
    record: Record | None = None
    decision: sizing.Decision = field(default_factory=sizing.Decision)
    given: bool = False
    rank_reserve: int = 0
    draft_runners: list[Any] = field(default_factory=list)

    @property
    def fraction(self) -> float | None:
        """The record's; ``None``: the engine's own, or the given one, is in force."""
        return self.decision.fraction

    @property
    def fraction_in_force(self) -> float:
        assert self.launch is not None
        return self.launch.fraction if self.fraction is None else self.fraction

    @property
    def source(self) -> metrics.Source:
        """Of the fraction in force."""
        if self.fraction is not None:
            return metrics.Source.RECORD
        return metrics.Source.GIVEN if self.given else metrics.Source.DEFAULT

    def log(self, message: str, *arguments: Any, warn: bool = False) -> None:
        """Log on the leader alone."""
        if self.leader:
            level = logging.WARNING if warn else logging.INFO
            log.logger.log(level, log.of("kv-sizing", message), *arguments)

    def update(self, change: Callable[[Record], Record | None], *, wait_s: float = 0.0) -> Record | None:
        """Change this configuration's record; see :func:`record.update`."""
        return record.update(self.path, self.key, change, wait_s=wait_s)


# --- Probing ---------------------------------------------------------------------------------------------------------


def probe() -> Install:
    """Find the hook points.

    :returns: what wraps them.

    :raises engine.Unsupported: the engine is not as expected.
    """
    runner = engine.own(engine.module("sglang.srt.model_executor.model_runner"), "ModelRunner")
    name = "init_memory_pool" if hasattr(runner, "init_memory_pool") else "alloc_memory_pool"
    owner = runner
    if not hasattr(owner, "_profile_available_bytes"):
        owner = engine.own(engine.module("sglang.srt.mem_cache.kv_cache_configurator"), "KVCacheConfigurator")
    profile = engine.own(owner, "_profile_available_bytes")
    engine.require_mentions(profile, "mem_fraction_static", "pre_model_load_memory")
    engine.own(runner, name)
    in_context = engine.mentions(profile, "get_schedule")
    if in_context:
        context = engine.module("sglang.srt.runtime_context")
        engine.require_parameters(engine.own(engine.own(context, "RuntimeContext"), "override"), ("self", "source"))
    scheduler = engine.own(engine.module("sglang.srt.managers.scheduler"), "Scheduler")
    engine.require_mentions(engine.own(scheduler, "run_event_loop"), "dispatch_event_loop")
    engine.require_mentions(engine.own(scheduler, "get_init_info"), "max_total_num_tokens")
    engine.own(scheduler, "process_input_requests")
    engine.own(scheduler, "is_fully_idle")
    if engine.has_module(rehearsal.RECEIVER):
        receiver = engine.own(engine.module(rehearsal.RECEIVER), "SchedulerRequestReceiver")
        engine.require_mentions(engine.own(receiver, "_pull_raw_reqs"), "recv_from_tokenizer")
    else:
        engine.require_mentions(engine.own(scheduler, "recv_requests"), "recv_from_tokenizer", "recv_pyobj")

    def install(patcher: Patcher) -> None:
        state = State(eligibility.record_path(os.environ))
        patcher.wrap(runner, name, lambda original: _make_init_memory_pool(original, state, in_context))
        patcher.wrap(scheduler, "get_init_info", lambda original: _make_init_info(original, state))
        patcher.wrap(scheduler, "run_event_loop", lambda original: _make_run_event_loop(original, state))

    return install


# --- Sizing ----------------------------------------------------------------------------------------------------------


def _make_init_memory_pool(original: Callable[..., Any], state: State, in_context: bool) -> Callable[..., Any]:
    @functools.wraps(original)
    def init_memory_pool(self: Any, *args: Any, **kwargs: Any) -> Any:
        if not eligibility.KV_SIZING.read():
            return original(self, *args, **kwargs)
        is_draft = getattr(self, "is_draft_worker", False)
        if is_draft:
            state.draft_runners.append(self)
        if is_draft or state.launch is not None:
            return original(self, *args, **kwargs)
        given = args[0] if args and isinstance(args[0], int | float) else kwargs.get("pre_model_load_memory")
        inputs = gather(state, self, given if given is not None else self.pre_model_load_memory)
        apply(sizing.decide_sizing(inputs), inputs, state, self, in_context)
        before = _free_before_pools(state, self)
        result = original(self, *args, **kwargs)
        state.rank_reserve = _rank_reserve(state, self, before)
        if state.fraction is not None:
            assert state.launch is not None
            assert state.record is not None
            state.log(
                "%.4f instead of %.4f: %s tokens instead of %s; %s MB of margin%s, measured %s ago%s",
                state.fraction,
                state.launch.fraction,
                f"{int(self.max_total_num_tokens):,}",
                f"{state.record.rule_tokens:,}",
                f"{state.decision.margin / 1e6:,.0f}",
                f", {state.launch.images / 1e6:,.0f} MB the engine's for images" if state.launch.images else "",
                record.age(state.record, time.time()),
                "; rehearses once more" if state.decision.rehearse else "",
            )
        return result

    return init_memory_pool


def _free_before_pools(state: State, runner: Any) -> int:
    """Free bytes, as the engine finds them when it sizes its pools.

    :returns: 0 where it is not known, or the rank has no more beside its KV cache than the fraction sets aside.
    """
    import torch

    stages = int(eligibility.arguments_of(runner.server_args).get("pp_size") or 1)
    if state.launch is None or (stages == 1 and not state.launch.max_tokens):
        return 0
    try:
        torch.cuda.empty_cache()
        return gpu_memory.read(state.gpu).free
    except Exception:
        return 0


def _rank_reserve(state: State, runner: Any, before: int) -> int:
    """:param before: free memory in bytes before the pools were made; 0: not known, or it does not matter."""
    reserve = int(state.decision.reserve)
    if before:
        # A stage with less to hold than another has more left, and so has a KV cache that the user limits.
        with suppress(Exception):
            return max(reserve, before - server_facts(runner).kv_bytes)
    return reserve


def gather(state: State, runner: Any, free_before_load_gib: float) -> sizing.SizingInputs:
    """Collective: every rank calls it at the same point, even on servers that keep the given fraction."""
    arguments = eligibility.arguments_of(runner.server_args)
    fraction = float(runner.mem_fraction_static)
    state.leader, state.gpu = _is_leader(runner), int(runner.gpu_id)
    state.elsewhere = int(arguments.get("node_rank") or 0) > 0
    given = given_by_the_user(runner.server_args)
    vars(runner.server_args).pop(MARK, None)  # else /server_info would show it
    keep = given and eligibility.KV_SIZING.read() != eligibility.ALWAYS
    monitor_only = eligibility.monitor_only_reason(arguments) or ""
    if int(arguments.get("nnodes") or 1) > 1 and not monitor_only:
        monitor_only = _machines_apart() or ""
        # The leader may not be there to log it.
        if monitor_only and state.elsewhere and state.gpu == int(arguments.get("base_gpu_id") or 0):
            message = log.of("kv-sizing", "using the engine's default fraction %.4f because %s")
            log.logger.warning(message, fraction, monitor_only)
    try:
        report = _report(state, runner, free_before_load_gib, fraction, arguments)
    except Exception as error:
        report = sizing.RankReport(f"{type(error).__name__}: {error}")
    reports = [report] if monitor_only else coordination.all_gather(report)
    return sizing.SizingInputs(fraction, given, keep, monitor_only, reports)


def apply(
    outcome: sizing.SizingOutcome, inputs: sizing.SizingInputs, state: State, runner: Any, in_context: bool
) -> None:
    """Log what was decided, keep it for the event loop, and tell the engine its fraction."""
    if outcome.message:
        state.log("%s", outcome.message, warn=outcome.is_warning)
    state.launch, state.record, state.decision = outcome.launch, outcome.record, outcome.decision
    state.given, state.fingerprint_inputs = inputs.given, inputs.reports[0].fingerprint_inputs
    state.key = record.fingerprint(state.fingerprint_inputs)
    if state.fraction is None:
        return
    if state.leader:
        # Before it tries, so that a start that dies before it serves is not repeated for ever. A file that cannot be
        # written, as one that is shipped read-only, keeps no start from being sized.
        try:
            state.update(lambda old: record.with_unserved(old, state.process), wait_s=RECORD_LOCK_TIMEOUT_S)
        except OSError as error:
            state.log("this start is not written down: %s", error)
    runner.mem_fraction_static = state.fraction
    if in_context:
        from sglang.srt.runtime_context import get_context

        get_context().override("sglang-moe-patches: kv-sizing", mem_fraction_static=state.fraction)
    else:
        runner.server_args.mem_fraction_static = state.fraction


def _machines_apart() -> str | None:
    """Why the ranks of several machines do not decide together; ``None``: they do."""
    try:
        together = coordination.all_machines_take_part()
    except Exception as error:
        return f"of --nnodes, whose machines cannot ask one another, {type(error).__name__}: {error}"
    if together:
        return None
    return (
        f"of --nnodes, not all of whose machines have said within {coordination.WAIT_S:.0f} s that they have "
        f"{eligibility.KV_SIZING.name} and this version"
    )


def _is_leader(runner: Any) -> bool:
    from sglang.srt.distributed.parallel_state import get_world_group

    return bool(get_world_group().rank_in_group == 0)


def _report(
    state: State, runner: Any, free_before_load_gib: float, fraction: float, arguments: Mapping[str, Any]
) -> sizing.RankReport:
    """What this rank knows: its memory, and the record of its configuration."""
    state.process = record.current_launch(is_replica=int(arguments.get("dp_size") or 1) > 1)
    kept = 0
    if getattr(runner, "is_multimodal", False):
        try:
            kept = images.allowance(runner, arguments, fraction, free_before_load_gib)
        except images.NoAllowance as error:
            return sizing.RankReport(str(error))
    total = gpu_memory.read(int(runner.gpu_id)).total
    limit = int(arguments.get("max_total_tokens") or 0)
    launch = sizing.LaunchMemory(int(free_before_load_gib * GIB), total, fraction, kept, limit)
    inputs = _fingerprint_inputs(runner, arguments, launch)
    found, unreadable, nearest = None, "", ""
    try:
        known = record.read(state.path)
        if own := known.get(record.fingerprint(inputs)):
            found = record.without_living(own, record.is_alive)
        else:
            nearest = fingerprint.nearest(inputs, known)
    except record.Unreadable as error:
        unreadable = f"{state.path} {error}"
    return sizing.RankReport("", launch, inputs, found, unreadable, nearest)


def _fingerprint_inputs(runner: Any, arguments: Mapping[str, Any], launch: sizing.LaunchMemory) -> dict[str, Any]:
    """What the fingerprint of this server is made of."""
    import torch

    from sglang_moe_patches import __version__

    return {
        "package": __version__,
        "margin": launch.margin,
        "engine": engine.version(),
        "torch": torch.__version__,
        "driver": gpu_memory.driver(),
        "device": gpu_memory.device(int(runner.gpu_id)),
        "bytes": launch.total,
        "devices": int(arguments.get("tp_size") or 1) * int(arguments.get("pp_size") or 1),
        "model": str(arguments.get("model_path")),
        "config": record.fingerprint(fingerprint.model_configuration(runner.model_config.hf_config)),
        "arguments": fingerprint.lasting_arguments(arguments, fingerprint.defaults_of(runner.server_args)),
        "variables": fingerprint.variables_of(os.environ),
        "changes": fingerprint.changes_of(patch.in_force()),
    }


# --- Serving ---------------------------------------------------------------------------------------------------------


def _make_init_info(original: Callable[..., Any], state: State) -> Callable[..., Any]:
    @functools.wraps(original)
    def get_init_info(self: Any) -> Any:
        info = original(self)
        # The launcher's own arguments have the fraction that it was told: this is the one in force.
        return info if state.fraction is None else {**info, "mem_fraction_static": state.fraction}

    return get_init_info


def _make_run_event_loop(original: Callable[..., Any], state: State) -> Callable[..., Any]:
    @functools.wraps(original)
    def run_event_loop(self: Any, *args: Any, **kwargs: Any) -> Any:
        serving = Serving(state, self)
        serving.begin()
        try:
            result = original(self, *args, **kwargs)
        except BaseException as error:
            serving.end(ran_out=is_out_of_memory(error))
            raise
        serving.end()
        return result

    return run_event_loop


OUT_OF_MEMORY = re.compile(
    r"out[ _]of[ _]memory|OutOfMemory|_STATUS_ALLOC_FAILED|cudaErrorMemoryAllocation|Failed to cuda ?(calloc|malloc)",
    re.IGNORECASE,
)
"""As PyTorch, its accelerator errors, cuBLAS, cuDNN, Triton, NCCL and the driver's own names say it."""


def is_out_of_memory(error: BaseException | None) -> bool:
    """Whether an exception, or one that it came from, is about GPU memory."""
    while error is not None:
        if OUT_OF_MEMORY.search(f"{type(error).__name__}: {error}"):
            return True
        error = error.__cause__ or error.__context__
    return False


class Serving:
    """The event loop of one scheduler: a rehearsal where one is due, then the free-memory monitor."""

    def __init__(self, state: State, scheduler: Any) -> None:
        self.state, self.scheduler = state, scheduler
        self._metrics = metrics.Metrics(eligibility.arguments_of(scheduler.server_args), state.gpu)
        self._monitor: FreeMemoryMonitor | None = None
        self._results: coordination.RankResults | None = None
        self._rehearsing = False
        self._collect_until: float | None = None

    def begin(self) -> None:
        """Called on every rank, before the loop."""
        state = self.state
        if state.launch is None:
            self._show_sizing()
            return
        if state.decision.rehearse:
            if problem := self._begin_rehearsal():
                state.decision = replace(state.decision, rehearse=False)
                state.log("no rehearsal: %s", problem, warn=True)
            else:
                limit_s = rehearsal.timeout_s()
                state.log("rehearses the largest forwards before the first request, at most %.0f s", limit_s)
        if not self._rehearsing:
            self._read_requests()

    def _begin_rehearsal(self) -> str:
        """:returns: why no rank has begun one; "": all have."""
        run, problem = None, ""
        try:
            self._results = coordination.RankResults()
            run = rehearsal.Rehearsal(
                self.scheduler, self.state.gpu, self._rehearsed, self._results, leads=self.state.leader
            )
            run.begin()
            if self.state.leader:
                self.state.update(self._with_rehearsal_begun, wait_s=RECORD_LOCK_TIMEOUT_S)
        except Exception as error:
            problem = str(error) if isinstance(error, OSError | RuntimeError) else f"{type(error).__name__}: {error}"
        problem = next(filter(None, coordination.all_gather(problem)), "")
        if problem and run is not None:
            run.end()
        self._rehearsing = not problem
        return problem

    def _read_requests(self) -> None:
        """From here on users' requests are read, and the loop reads the clock once in each turn."""
        state = self.state
        if state.leader and state.fraction is not None:
            # What ends this server from now on was not its size.
            with suppress(OSError):
                state.update(record.with_served_start, wait_s=RECORD_LOCK_TIMEOUT_S)
        self._show_sizing()
        if state.record is not None or state.decision.rehearse or state.decision.monitor:
            try:
                self._monitor = FreeMemoryMonitor(
                    lambda: gpu_memory.read(state.gpu), self._save, show=self._metrics.show_lowest_free
                )
            except Exception as error:
                state.log("free memory is not monitored: %s", error, warn=True)
        if self._monitor is None and self._collect_until is None:
            return
        original = self.scheduler.process_input_requests

        def process_input_requests(*args: Any, **kwargs: Any) -> Any:
            self._collect()
            if self._monitor is not None:
                self._monitor.sample()
            return original(*args, **kwargs)

        self.scheduler.process_input_requests = process_input_requests

    def _show_sizing(self) -> None:
        """On the leader alone, which has the record."""
        state = self.state
        if not state.leader:
            return
        fraction = suggested = None
        if state.launch is not None:
            fraction, suggested = state.fraction_in_force, sizing.suggested_fraction(state.launch, state.record)
        self._metrics.show_sizing(fraction, suggested, state.source, state.decision.reason)

    def _with_rehearsal_begun(self, old: Record) -> Record:
        state, launch = self.state, self.state.launch
        assert launch is not None
        new = replace(old, fingerprint_inputs=state.fingerprint_inputs)
        if not old.need:  # doctor shows it all the same
            new = replace(new, total=launch.total, before=launch.free_before_load, rule_fraction=launch.fraction)
        return record.with_rehearsal_begun(new, state.gpu, state.process)

    def _rehearsed(self, result: rehearsal.RankResult) -> None:
        """Called on every rank, in the same turn of its loop: the stages of a pipeline not at the same time."""
        self._rehearsing = False
        assert self._results is not None
        try:
            self._results.publish(replace(result, reserve=self.state.rank_reserve))
        except Exception as error:
            log.logger.warning(log.of("kv-sizing", "what a rank has measured is lost: %s"), error)
        if self.state.leader:
            self._collect_until = time.monotonic() + rehearsal.ABANDON_AFTER_S
        self._read_requests()
        self._collect()

    def _collect(self) -> None:
        """On the leader, once and then in each turn of the loop: write the record when every rank has published."""
        state, until = self.state, self._collect_until
        if until is None:
            return
        assert self._results is not None
        try:
            results: list[rehearsal.RankResult] | None = self._results.collect()
            if results is None and time.monotonic() < until:
                return
            failures = [f"rank {rank}: {result.failure}" for rank, result in enumerate(results or ()) if result.failure]
            if results is None or failures:
                reason = "; ".join(failures) or "not every rank has published its result"
                state.log("the rehearsal failed, and nothing is recorded: %s", reason, warn=True)
            else:
                self._write(results)
        except Exception as error:
            state.log("what was measured is lost: %s", error, warn=True)
        self._collect_until = None

    def _write(self, results: list[rehearsal.RankResult]) -> None:
        state, runner = self.state, self.scheduler.tp_worker.model_runner
        launch, leader = state.launch, results[0]
        assert launch is not None
        needs = tuple(max(0, result.reserve - result.lowest) for result in results)
        if not max(needs):
            state.log("another process freed memory during the rehearsal; nothing is recorded", warn=True)
            return
        stopped = any(result.stopped for result in results)
        facts = server_facts(runner)
        # What a forward that did not run would have taken is not known: as much again as was left.
        not_run = rehearsal.MIN_FREE_BYTES if stopped else 0
        # All ranks run the same phases, but only the leader knows their names.
        parts = replace(results[needs.index(max(needs))].parts, phase=leader.parts.phase, not_run=not_run)
        new = Record(
            fingerprint_inputs=state.fingerprint_inputs,
            measured=time.time(),
            total=launch.total,
            before=launch.free_before_load,
            rule_fraction=launch.fraction,
            rule_tokens=facts.kv_tokens if state.fraction is None else 0,
            fraction=state.fraction_in_force,
            tokens=facts.kv_tokens,
            kv_bytes=facts.kv_bytes,
            reserve=min(result.reserve for result in results),
            images=launch.images,
            table_bytes=facts.table_bytes,
            draft_kv_bytes=draft_kv_bytes(state.draft_runners, runner),
            requests_grow=facts.hybrid == MAMBA,
            need=max(needs) + not_run,
            ranks=needs,
            parts=parts,
            reached=leader.reached,
            missed=leader.missed,
            skipped=leader.skipped,
            proven=state.fraction is not None and not stopped and not leader.missed,
        )
        became = state.update(
            lambda old: record.with_rehearsal(old, new, state.gpu, state.process, stopped=stopped),
            wait_s=RECORD_LOCK_TIMEOUT_S,
        )
        assert became is not None
        state.record = became
        self._show_sizing()
        hint = "; out of time, and a smaller --context-length takes less" if leader.out_of_time else ""
        state.log(
            "rehearsed in %.0f s: %s MB needed of %s MB set aside%s%s; recorded in %s",
            leader.seconds,
            f"{max(needs) / 1e6:,.0f}",
            f"{state.decision.reserve / 1e6:,.0f}",
            f"{hint}; not reached: {', '.join(became.missed)}" if became.missed else "",
            "; ended early, before memory ran out" if stopped else "",
            state.path,
        )

    def _save(self, lowest: int, ran_out: bool) -> bool:
        def add_serving(old: Record) -> Record:
            served = record.with_serving(old, self.state.rank_reserve, lowest)
            return record.with_out_of_memory(served) if ran_out else served

        try:
            became = self._add(add_serving)
        except record.Busy:
            return False  # it is tried again
        # A rank that monitors already may be here before the leader has written what was rehearsed.
        return became is not None and became.lowest_free_serving is not None

    def _add(self, add: Callable[[Record], Record]) -> Record | None:
        """Add what this rank has seen to the record, unless that was forgotten meanwhile, or nothing was measured."""
        state = self.state

        def added(old: Record) -> Record | None:
            if not (old.need or state.decision.monitor or state.elsewhere):
                return old if old.fingerprint_inputs else None
            assert state.launch is not None
            new = Record(
                state.fingerprint_inputs,
                time.time(),
                total=state.launch.total,
                before=state.launch.free_before_load,
                fraction=state.fraction_in_force,
                reserve=state.rank_reserve,
            )
            return add(old if old.fingerprint_inputs else new)

        return state.update(added)

    def end(self, ran_out: bool = False) -> None:
        """The loop has ended."""
        if ran_out and self._rehearsing:
            with suppress(OSError):
                self._add(record.with_out_of_memory)
        if self._monitor is not None:
            self._monitor.end(ran_out)
            self._monitor = None
