"""Where the engine is told, and asked: its sizing of the KV cache, the begin of its event loop, its word on itself."""

from __future__ import annotations

import functools
import os
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from sglang_moe_patches.core import engine, gpu_memory, patch
from sglang_moe_patches.core.log import logger
from sglang_moe_patches.core.patch import Install, Patcher
from sglang_moe_patches.memory.kv_sizing import decide, images, metric, ranks, record, rehearse, size
from sglang_moe_patches.memory.kv_sizing.facts import GIB, server_facts
from sglang_moe_patches.memory.kv_sizing.launcher import given_by_the_user
from sglang_moe_patches.memory.kv_sizing.record import Record
from sglang_moe_patches.memory.kv_sizing.script import MAMBA
from sglang_moe_patches.memory.kv_sizing.watch import Watch

SAYS = "sglang-moe-patches: kv-sizing: "


@dataclass
class State:
    """Of one process: from its sizing to its end.

    :param launch: who launched it, the same for all replicas of a server.
    :param first: it is the world's first rank, which reads, writes and speaks.
    :param elsewhere: on another machine than that, with a file of its own.
    :param set_aside: what this rank has beside its weights and its KV cache, in bytes.
    :param start: of all ranks; ``None``: this server stays with the rule, and nothing is recorded of it.
    """

    path: Path
    launch: str = ""
    first: bool = False
    elsewhere: bool = False
    gpu: int = 0
    key: str = ""
    made_of: Mapping[str, Any] = field(default_factory=dict)
    start: size.Start | None = None
    known: Record | None = None
    decision: size.Decision = field(default_factory=size.Decision)
    fraction: float | None = None
    set_aside: int = 0

    @property
    def in_force(self) -> float:
        """The fraction, whoever gave it."""
        assert self.start is not None
        return self.start.fraction if self.fraction is None else self.fraction

    @property
    def reserve(self) -> int:
        """What that sets aside, in bytes."""
        assert self.start is not None
        return int(self.start.before * (1 - self.in_force))

    def say(self, message: str, *arguments: Any) -> None:
        if self.first:
            logger.info(SAYS + message, *arguments)

    def warn(self, message: str, *arguments: Any) -> None:
        if self.first:
            logger.warning(SAYS + message, *arguments)


# --- What is there ---------------------------------------------------------------------------------------------------


def look() -> Install:
    """How the seams are wrapped.

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
    if engine.has_module(rehearse.RECEIVER):
        receiver = engine.own(engine.module(rehearse.RECEIVER), "SchedulerRequestReceiver")
        engine.require_mentions(engine.own(receiver, "_pull_raw_reqs"), "recv_from_tokenizer")
    else:
        engine.require_mentions(engine.own(scheduler, "recv_requests"), "recv_from_tokenizer", "recv_pyobj")

    def install(patcher: Patcher) -> None:
        state = State(decide.record_path(os.environ))
        patcher.wrap(runner, name, lambda original: _make_pool(original, state, in_context))
        patcher.wrap(scheduler, "get_init_info", lambda original: _make_init_info(original, state))
        patcher.wrap(scheduler, "run_event_loop", lambda original: _make_run_event_loop(original, state))

    return install


# --- Sizing ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Told:
    """What a rank knows before its pools are made; ``failure``: why it does not."""

    failure: str = ""
    start: size.Start | None = None
    key: str = ""
    made_of: Mapping[str, Any] = field(default_factory=dict)
    known: Record | None = None
    unreadable: str = ""


def _make_pool(original: Callable[..., Any], state: State, in_context: bool) -> Callable[..., Any]:
    @functools.wraps(original)
    def make_pool(self: Any, *args: Any, **kwargs: Any) -> Any:
        if not decide.KV_SIZING.read() or getattr(self, "is_draft_worker", False) or state.start is not None:
            return original(self, *args, **kwargs)
        given = args[0] if args and isinstance(args[0], int | float) else kwargs.get("pre_model_load_memory")
        _size(state, self, given if given is not None else self.pre_model_load_memory, in_context)
        before = _free(state) if state.start is not None and _stages(self) > 1 else 0
        result = original(self, *args, **kwargs)
        if state.start is not None:
            state.set_aside = _set_aside(state, self, before)
        if state.fraction is not None:
            assert state.start is not None
            assert state.known is not None
            state.say(
                "%.4f instead of the rule's %.4f: %s tokens instead of %s; %s MB of margin%s, measured %s ago%s",
                state.fraction,
                state.start.fraction,
                f"{int(self.max_total_num_tokens):,}",
                f"{state.known.rule_tokens:,}",
                f"{state.decision.margin / 1e6:,.0f}",
                f", {state.start.images / 1e6:,.0f} MB the engine's for images" if state.start.images else "",
                record.age(state.known, time.time()),
                "; rehearses once more" if state.decision.rehearse else "",
            )
        return result

    return make_pool


def _stages(runner: Any) -> int:
    """Of the pipeline."""
    return int(decide.arguments_of(runner.server_args).get("pp_size") or 1)


def _free(state: State) -> int:
    """Bytes, as the engine finds them when it sizes its pools; 0: not known."""
    import torch

    try:
        torch.cuda.empty_cache()
        return gpu_memory.read(state.gpu).free
    except Exception:
        return 0


def _set_aside(state: State, runner: Any, before: int) -> int:
    """:param before: free memory in bytes before a stage's pools were made; 0: not known, or there is no pipeline."""
    if before:
        # A stage with less to hold than another has more left, which a larger KV cache may take.
        with suppress(Exception):
            return max(state.reserve, before - server_facts(runner).kv_bytes)
    return state.reserve


def _size(state: State, runner: Any, before_gib: float, in_context: bool) -> None:
    """Decide with all ranks, and tell the engine."""
    arguments = decide.arguments_of(runner.server_args)
    fraction = float(runner.mem_fraction_static)
    state.first, state.gpu = _is_first(runner), int(runner.gpu_id)
    state.elsewhere = int(arguments.get("node_rank") or 0) > 0
    given = given_by_the_user(runner.server_args)
    stands = given and decide.KV_SIZING.read() != decide.GIVEN
    watched = decide.only_watched(arguments)
    if int(arguments.get("nnodes") or 1) > 1 and not watched:
        watched = _apart(not stands)
        # The first rank may not be there to say so.
        if watched and not stands and state.elsewhere and state.gpu == int(arguments.get("base_gpu_id") or 0):
            logger.warning("%sthe engine's rule, %.4f: %s", SAYS, fraction, watched)
    if stands:
        state.say("--mem-fraction-static %.4f is given and stands", fraction)
        return
    try:
        told = _look_around(state, runner, before_gib, fraction, arguments)
    except Exception as error:
        told = Told(f"{type(error).__name__}: {error}")
    everybody: list[Told] = [told] if watched else ranks.agree(told)
    failure = next((each.failure for each in everybody if each.failure), "")
    if not failure and (differ := [part for part in everybody[0].made_of if _differ_in(part, everybody)]):
        failure = f"the ranks differ in: {', '.join(differ)}"
    if failure:
        state.warn("the engine's rule, %.4f: %s", fraction, failure)
        return
    starts = [each.start for each in everybody if each.start is not None]
    first = everybody[0]
    # The engine divides by what the rank with the least has.
    state.start = replace(starts[0], before=min(each.before for each in starts))
    state.key, state.made_of = first.key, first.made_of
    # Each machine has seen its own servers run.
    state.known = first.known and record.with_served(first.known, [each.known for each in everybody if each.known])
    if watched:
        state.decision = size.Decision(why=watched, watch=True, reserve=state.start.reserve)
    else:
        state.decision = size.decide(state.start, state.known, first.unreadable)
    if state.decision.fraction is None:
        say = state.warn if first.unreadable else state.say
        also = "; this start rehearses" if state.decision.rehearse else ""
        if state.decision.watch:
            also = "; what stays free while it serves is recorded" + _seen(state.known)
        whose = "--mem-fraction-static is given" if given else "the engine's rule"
        say("%s, %.4f: %s%s", whose, fraction, state.decision.why, also)
        return
    state.fraction = state.decision.fraction
    runner.mem_fraction_static = state.fraction
    if in_context:
        from sglang.srt.runtime_context import get_context

        get_context().override("sglang-moe-patches: kv-sizing", mem_fraction_static=state.fraction)
    else:
        runner.server_args.mem_fraction_static = state.fraction


def _differ_in(part: str, everybody: list[Told]) -> bool:
    """Whether the ranks' fingerprints differ in it."""
    return len({record.fingerprint({part: each.made_of[part]}) for each in everybody}) > 1


def _seen(known: Record | None) -> str:
    """What earlier servers had left while they served."""
    if known is None or known.lowest_serving is None:
        return ""
    return f": {known.lowest_serving / 1e6:,.0f} MB until now, at the worst moment seen"


def _launch(replicas: bool) -> str:
    """Whose start this is: a process, and when it began, as process numbers come again.

    :param replicas: it is the process that launched them.
    """
    import psutil

    here = psutil.Process()
    whose = (here.parent() if replicas else None) or here
    return f"{whose.pid}@{whose.create_time():.2f}"


def _apart(takes_part: bool) -> str | None:
    """Why the ranks of several machines do not decide together; ``None``: they do."""
    try:
        together = ranks.all_take_part(takes_part)
    except Exception as error:
        return f"of --nnodes, whose machines cannot ask one another, {type(error).__name__}: {error}"
    if together:
        return None
    return (
        f"of --nnodes, not all of whose machines have said within {ranks.WAIT_S:.0f} s that they have "
        f"{decide.KV_SIZING.name} and this version"
    )


def _is_first(runner: Any) -> bool:
    from sglang.srt.distributed.parallel_state import get_world_group

    return bool(get_world_group().rank_in_group == 0)


def _look_around(state: State, runner: Any, before_gib: float, fraction: float, arguments: Mapping[str, Any]) -> Told:
    state.launch = _launch(int(arguments.get("dp_size") or 1) > 1)
    kept = 0
    if getattr(runner, "is_multimodal", False):
        try:
            kept = images.allowance(runner, arguments, fraction, before_gib)
        except images.NothingKept as error:
            return Told(str(error))
    now = gpu_memory.read(int(runner.gpu_id))
    made_of = _made_of(runner, arguments, now.total)
    key = record.fingerprint(made_of)
    start = size.Start(int(before_gib * GIB), now.total, fraction, kept)
    known, unreadable = None, ""
    try:
        if found := record.read(state.path).get(key):
            known = record.of_others(found, state.launch)
    except record.Unreadable as error:
        unreadable = f"{state.path} {error}"
    return Told("", start, key, made_of, known, unreadable)


def _made_of(runner: Any, arguments: Mapping[str, Any], total: int) -> dict[str, Any]:
    """What the fingerprint of this server is made of."""
    import torch

    from sglang_moe_patches import __version__

    config = runner.model_config.hf_config
    return {
        "package": __version__,
        "engine": engine.version(),
        "torch": torch.__version__,
        "driver": gpu_memory.driver(),
        "device": gpu_memory.device(int(runner.gpu_id)),
        "bytes": total,
        "devices": int(arguments.get("tp_size") or 1) * int(arguments.get("pp_size") or 1),
        "model": str(arguments.get("model_path")),
        "config": record.fingerprint({"config": config.to_json_string(use_diff=False)}),
        "arguments": decide.lasting(arguments, decide.defaults_of(runner.server_args)),
        "variables": decide.variables_of(os.environ),
        "changes": {name: str(plan.status) for name, plan in patch.in_force().items()},
    }


# --- Serving ---------------------------------------------------------------------------------------------------------


def _make_init_info(original: Callable[..., Any], state: State) -> Callable[..., Any]:
    @functools.wraps(original)
    def get_init_info(self: Any) -> Any:
        info = original(self)
        # What the launcher was told stands in its own arguments: this is what is in force.
        return info if state.fraction is None else {**info, "mem_fraction_static": state.fraction}

    return get_init_info


def _make_run_event_loop(original: Callable[..., Any], state: State) -> Callable[..., Any]:
    @functools.wraps(original)
    def run_event_loop(self: Any, *args: Any, **kwargs: Any) -> Any:
        if state.start is None:
            return original(self, *args, **kwargs)
        serving = Serving(state, self)
        serving.begin()
        try:
            return original(self, *args, **kwargs)
        except BaseException as error:
            serving.end(ran_out=type(error).__name__ == "OutOfMemoryError")
            raise
        finally:
            serving.end()

    return run_event_loop


class Serving:
    """A scheduler's event loop: a rehearsal where there is to be one, and then the watch."""

    def __init__(self, state: State, scheduler: Any) -> None:
        self.state, self.scheduler = state, scheduler
        self._watch: Watch | None = None
        self._notes: ranks.Notes | None = None
        self._rehearsing = False

    def begin(self) -> None:
        """Called on every rank, in front of the loop."""
        if not self.state.decision.rehearse:
            self._begin_to_watch()
            return
        state, problem = self.state, ""
        rehearsal: rehearse.Rehearsal | None = None
        try:
            self._notes = ranks.Notes()
            rehearsal = rehearse.Rehearsal(self.scheduler, state.gpu, self._rehearsed, self._notes, leads=state.first)
            rehearsal.begin()
            if state.first:
                record.change(
                    state.path,
                    state.key,
                    lambda old: record.begun(replace(old, made_of=state.made_of), state.gpu, state.launch),
                )
        except Exception as error:
            problem = str(error) if isinstance(error, OSError | RuntimeError) else f"{type(error).__name__}: {error}"
        problem = next(filter(None, ranks.agree(problem)), "")
        if problem:
            if rehearsal is not None:
                rehearsal.end()
            state.warn("no rehearsal: %s", problem)
            if state.known is not None:
                self._begin_to_watch()
            return
        self._rehearsing = True
        state.say("rehearses the largest forwards before the first request, at most %.0f s", rehearse.LIMIT_S)

    def _rehearsed(self, result: rehearse.Result) -> None:
        """Called on every rank, in the same turn of its loop: the stages of a pipeline not at the same time."""
        self._rehearsing = False
        assert self._notes is not None
        try:
            self._notes.leave(replace(result, set_aside=self.state.set_aside))
        except Exception as error:
            logger.warning("%swhat a rank has measured is lost: %s", SAYS, error)
        self._begin_to_watch()
        if self.state.first:
            self._wait_for_all(time.monotonic() + rehearse.ENDING_S)

    def _wait_for_all(self, until: float) -> None:
        """Look now, and in each turn of the loop, until every rank has left what it saw."""
        if self._look_for_all(until):
            return
        original = self.scheduler.process_input_requests

        def process_input_requests(*args: Any, **kwargs: Any) -> Any:
            if self._look_for_all(until):
                self.scheduler.process_input_requests = original
            return original(*args, **kwargs)

        self.scheduler.process_input_requests = process_input_requests

    def _look_for_all(self, until: float) -> bool:
        """Whether no more is waited for."""
        state = self.state
        assert self._notes is not None
        try:
            results: list[rehearse.Result] | None = self._notes.everybodys()
            if results is None and time.monotonic() < until:
                return False
            failures = [f"rank {rank}: {each.failure}" for rank, each in enumerate(results or ()) if each.failure]
            if results is None or failures:
                why = "; ".join(failures) or "not every rank has said what it saw"
                state.warn("the rehearsal failed, and nothing is recorded: %s", why)
            else:
                self._write(results)
        except Exception as error:
            state.warn("what was measured is lost: %s", error)
        return True

    def _write(self, results: list[rehearse.Result]) -> None:
        state, runner = self.state, self.scheduler.tp_worker.model_runner
        start, first = state.start, results[0]
        assert start is not None
        needs = tuple(max(0, each.set_aside - each.lowest) for each in results)
        if not max(needs):
            state.warn("more memory was free than was set aside, so nothing is recorded: others gave it back")
            return
        stopped = any(each.stopped for each in results)
        facts = server_facts(runner)
        new = Record(
            made_of=state.made_of,
            measured=time.time(),
            total=start.total,
            before=start.before,
            rule_fraction=start.fraction,
            rule_tokens=facts.kv_tokens if state.fraction is None else 0,
            fraction=state.in_force,
            tokens=facts.kv_tokens,
            kv_bytes=facts.kv_bytes,
            table_bytes=facts.table_bytes,
            requests_follow=facts.hybrid == MAMBA,
            # What a forward that did not run would have taken is not known: as much again as was left.
            need=max(needs) + (rehearse.LEAST_FREE if stopped else 0),
            ranks=needs,
            driven=first.driven,
            missed=first.missed,
            left_out=first.left_out,
            proven=state.fraction is not None and not stopped and not first.missed,
        )
        became = record.change(
            state.path, state.key, lambda old: record.rehearsed(old, new, state.gpu, stopped=stopped)
        )
        assert became is not None
        state.say(
            "rehearsed in %.0f s: %s MB needed of %s MB set aside%s%s; recorded in %s",
            first.seconds,
            f"{max(needs) / 1e6:,.0f}",
            f"{state.reserve / 1e6:,.0f}",
            f"; not brought about: {', '.join(became.missed)}" if became.missed else "",
            "; ended early, before memory ran out" if stopped else "",
            state.path,
        )

    def _begin_to_watch(self) -> None:
        """From here on the loop's every turn looks at the clock."""
        state = self.state
        if state.known is None and not (state.decision.rehearse or state.decision.watch):
            return
        try:
            show = metric.of(decide.arguments_of(self.scheduler.server_args), state.gpu)
            self._watch = watch = Watch(lambda: gpu_memory.read(state.gpu), self._save, show=show)
        except Exception as error:
            state.warn("free memory is not watched: %s", error)
            return
        original = self.scheduler.process_input_requests

        def process_input_requests(*args: Any, **kwargs: Any) -> Any:
            watch.look()
            return original(*args, **kwargs)

        self.scheduler.process_input_requests = process_input_requests

    def _save(self, lowest: int, ran_out: bool) -> bool:
        def seen(old: Record) -> Record:
            served = record.served(old, self.state.set_aside, lowest)
            return record.ran_out(served) if ran_out else served

        became = self._add(seen)
        # A rank that watches already may be there before the first has written what was rehearsed.
        return became is not None and became.lowest_serving is not None

    def _add(self, seen: Callable[[Record], Record]) -> Record | None:
        """Add what this rank has seen to the record, unless that was forgotten meanwhile, or nothing was measured."""
        state = self.state

        def added(old: Record) -> Record | None:
            if not (old.need or state.decision.watch or state.elsewhere):
                return old if old.made_of else None
            assert state.start is not None
            new = Record(
                state.made_of, time.time(), total=state.start.total, before=state.start.before, fraction=state.in_force
            )
            return seen(old if old.made_of else new)

        return record.change(state.path, state.key, added)

    def end(self, ran_out: bool = False) -> None:
        """The loop has ended."""
        if ran_out and self._rehearsing:
            with suppress(OSError):
                self._add(record.ran_out)
        if self._watch is not None:
            self._watch.end(ran_out)
            self._watch = None
