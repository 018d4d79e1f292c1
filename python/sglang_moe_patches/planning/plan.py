"""Serve, drive the largest forwards, and find the highest ``--mem-fraction-static`` that leaves the margin free."""

from __future__ import annotations

import re
import shlex
import shutil
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sglang_moe_patches import engine, patch
from sglang_moe_patches.changes.kv_sizing import script
from sglang_moe_patches.changes.kv_sizing.script import PhaseKind
from sglang_moe_patches.observers.events import Event, Ready, Watch, of_kind
from sglang_moe_patches.planning import load, measure, need, report, rule, verify
from sglang_moe_patches.planning.measure import START_UP, Measured, Verified
from sglang_moe_patches.planning.result import MB, Plan, Recommendation, ServerPlan
from sglang_moe_patches.reference import environment as machine
from sglang_moe_patches.servers import gpu, refusals
from sglang_moe_patches.servers.client import Client, Unanswered, watched
from sglang_moe_patches.servers.folders import keep, logs_in, scratch
from sglang_moe_patches.servers.interrupts import Interrupts
from sglang_moe_patches.servers.keeper import StillRunning
from sglang_moe_patches.servers.refusals import Refusal
from sglang_moe_patches.servers.server import Server, ServerFailed, shown_starting
from sglang_moe_patches.servers.subject import PATCHED, STOCK, PortInUse, Subject
from sglang_moe_patches.variables import PLAN

if TYPE_CHECKING:
    from rich.console import Console


class CannotPlan(RuntimeError):
    """A plan could not be made. The message says what to change, or carries the end of the server's log."""


class TooLow(CannotPlan):
    """With that fraction the weights alone leave nothing for a KV cache."""


ENDS_A_PLAN = (StillRunning, gpu.MemoryHeld, PortInUse, measure.NotObserved)
"""What else a server can bring about that no plan survives; the messages say what to do."""


@dataclass(frozen=True)
class Goal:
    """What is asked for.

    :param margin: bytes that must stay free at the worst moment.
    :param logprobs: whether to plan for prompt log-probabilities, too.
    :param verify_s: seconds of the verification's load; 0: no verification.
    """

    margin: int
    logprobs: bool = True
    verify_s: float = 0.0

    @property
    def kinds(self) -> tuple[bool, ...]:
        """Of values: without prompt log-probabilities, and with."""
        return (False, True) if self.logprobs else (False,)


# --- what is refused --------------------------------------------------------------------------------------------------


def _on(value: str) -> bool:
    return value not in ("", "0", "0.0")


_OTHER_POOLS = "plan knows one KV cache and what comes after it; set --mem-fraction-static by hand"
REFUSED: dict[str, Refusal] = {
    **refusals.of_every_command("plan", same="memory is", instead="set --mem-fraction-static by hand"),
    "--mem-fraction-static": Refusal("this is what plan finds", "leave it out"),
    "--enable-memory-saver": Refusal("memory comes and goes while it serves", _OTHER_POOLS),
    "--cpu-offload-gb": Refusal("weights come and go while it serves", _OTHER_POOLS, _on),
    "--offload-group-size": Refusal(
        "weights come and go while it serves", _OTHER_POOLS, lambda n: _on(n) and n != "-1"
    ),
    **dict.fromkeys(
        ("--enable-lora", "--lora-paths"), Refusal("adapters that are not loaded yet need memory, too", _OTHER_POOLS)
    ),
    "--enable-pdmux": Refusal("prefill and decode run at the same time", _OTHER_POOLS),
    "--enable-hisparse": Refusal("its KV cache lies on the host as well", _OTHER_POOLS),
    "--prefill-only-disable-kv-cache": Refusal("there is no KV cache to enlarge", "nothing is to be planned"),
    "--max-queued-requests": Refusal("the load is longer than the queue would be", "leave it out: memory is the same"),
}
"""Server arguments that are refused, by name."""
POST_CAPTURE = "SGLANG_ENABLE_POST_CAPTURE_KV_SIZING"


def check(subject: Subject, servers: Sequence[str], environment: Mapping[str, str], output: Path) -> None:
    """Find out what is wrong before a minute is spent on starting a server.

    :raises CannotPlan: one line that names the argument and what to give instead.
    """
    for name in servers:
        if name not in (STOCK, PATCHED):
            raise CannotPlan(f"--only {name}: give {STOCK} or {PATCHED}")
        if name == PATCHED and environment.get(patch.SELECT_VARIABLE) == "none":
            off = f"{patch.SELECT_VARIABLE}=none"
            raise CannotPlan(f"--only {name}: with {off} nothing is patched; leave one of the two out")
    if not machine.has_gpu():
        raise CannotPlan("no NVIDIA GPU here; plan measures on the machine that will serve")
    try:
        refusals.check_output(output)
        subject.check(REFUSED, environment)
    except ValueError as error:
        raise CannotPlan(str(error)) from None
    if environment.get(POST_CAPTURE, "").lower() in ("1", "true", "yes", "y"):
        raise CannotPlan(f"{POST_CAPTURE}: there the engine itself sizes the KV cache by what is left; leave it out")


# --- the command ------------------------------------------------------------------------------------------------------


def run(
    subject: Subject,
    goal: Goal,
    *,
    servers: Sequence[str] = (STOCK, PATCHED),
    environment: dict[str, str],
    output: Path,
    console: Console,
    gpu_memory_mib: float | None = None,
) -> Plan:
    """Find the fraction of each server, print it, and write plan.json, plan.html and the servers' logs.

    :param servers: ``STOCK``, ``PATCHED`` or both.
    :param environment: of the servers.
    :param gpu_memory_mib: told to the engine's resolver; ``None``: it asks the GPU.
    :raises CannotPlan: a plan could not be made; logs and records are in ``output`` all the same.
    :raises KeyboardInterrupt: a signal has come. All servers are ended.
    """
    check(subject, servers, environment, output)
    planned = False
    with Interrupts() as interrupts, scratch(keep_in=output) as logs:
        try:
            console.print("Asking the engine what it sets aside by its rule")
            try:
                ruled = rule.resolve(subject.given, environment, gpu_memory_mib, interrupts.check)
            except rule.NotResolved as error:
                interrupts.check()  # Ctrl-C in a terminal ends the resolver, too
                raise CannotPlan(str(error)) from None
            interrupts.check()
            session = Session(subject, goal, environment, logs, console, interrupts.check)
            plans = tuple(session.plan(name) for name in servers)
            found = Plan(engine.version() or "unknown", subject.model, subject.arguments, goal.margin, ruled, plans)
            report.write(found, output)
            planned = True
            report.print_table(found, console)
        except ENDS_A_PLAN as error:
            raise CannotPlan(str(error)) from error
        finally:
            recorded = {path.name: path.read_bytes() for path in sorted(logs.glob("*.jsonl"))}
            if files := {**logs_in(logs), **recorded}:
                if not planned:  # an earlier plan would be taken for what came of the servers whose logs are beside it
                    for name in report.WRITTEN:
                        (output / name).unlink(missing_ok=True)
                keep(files, output)
    return found


class Session:
    """Starts servers one after the other, and measures each."""

    def __init__(
        self,
        subject: Subject,
        goal: Goal,
        environment: dict[str, str],
        logs: Path,
        console: Console,
        interrupt: Callable[[], None],
    ) -> None:
        self.subject, self.goal, self.environment = subject, goal, environment
        self.logs, self.console, self.interrupt = logs, console, interrupt
        self.started = 0
        self.log = logs / "none"
        """Of the last server."""
        self.before = gpu.used_mib()

    def plan(self, name: str) -> ServerPlan:
        """Search, and verify if asked for.

        :raises CannotPlan: a server did not start or died of something else than want of memory.
        """
        margin, given, measured = self.goal.margin, self.subject.given, partial(self.measure, name)
        trials = search(measured, self.goal)
        found = []
        for logprobs in self.goal.kinds:
            value = recommend(trials, margin, logprobs, given)
            came = self._verification(name, value, trials)
            while came is not None and came.ran_out:  # in a server of its own: it was not known from the search
                failed = Measured(name, came.fraction, trials[0].before_load, ran_out="verification", verified=came)
                trials = search(measured, self.goal, [*trials, replace(failed, logprobs_driven=logprobs)])
                lower = recommend(trials, margin, logprobs, given)
                if lower.fraction is None:
                    break
                value, came = lower, self._verification(name, lower, trials)
            found.append(after(value, came, trials, margin, given))
        return ServerPlan(name, tuple(trials), tuple(found), tuple(knobs(trials)))

    @contextmanager
    def serving(self, name: str, fraction: float | None) -> Iterator[tuple[Server, Watch]]:
        """A server with that fraction, or with the engine's own."""
        if self.started:
            gpu.wait_until_free(self.before, self.interrupt, ended="last", following=f"next ({name})")
        self.started += 1
        more = [] if fraction is None else ["--mem-fraction-static", f"{fraction:.3f}"]
        with scratch() as folder:
            child = {**self.environment, PLAN.name: str(folder)}
            self.log = self.logs / f"{self.started}-{name}.log"
            server = self.subject.server(name, child, self.log, *more)
            watch = Watch(folder)
            try:
                with shown_starting(server, self.console, self.interrupt):
                    server.__enter__()
                yield server, watch
            finally:
                server.stop()
                for recorded in folder.glob("*.jsonl"):
                    shutil.copy(recorded, self.logs / f"{self.log.stem}-{recorded.name}")

    def measure(self, name: str, fraction: float | None, logprobs: bool) -> Measured:
        """Start a server, verify a fraction that may be the one to recommend, drive it, and say what it needed."""
        said = f"{name}, --mem-fraction-static {'by the engine' if fraction is None else f'{fraction:.3f}'}"
        try:
            with self.serving(name, fraction) as (server, watch):
                self.console.print(f"{said}: ready after {server.startup_s:.0f} s")
                found = self._drive(server, watch, logprobs, verified=bool(self.goal.verify_s and fraction))
                self.console.print(f"{said}: {_left(found)}")
                return found
        except ServerFailed as error:
            log = self.log.read_text(errors="replace")
            if fraction is not None and TOO_LOW in log:
                self.console.print(f"{said}: no memory for a KV cache")
                raise TooLow(str(error)) from error
            if not out_of_memory(log):
                raise CannotPlan(str(error)) from error
            if fraction is None:
                raise CannotPlan(
                    f"the {name} server runs out of memory at start-up with the engine's own fraction. {error}"
                ) from error
            self.console.print(f"{said}: out of memory at start-up")
            return Measured(name, fraction, 1, ran_out=START_UP)

    def _drive(self, server: Server, watch: Watch, logprobs: bool, *, verified: bool) -> Measured:
        """:param verified: verify before anything else. A user's server sees no load before its own, and what the
        allocator keeps depends on the order in which sizes come.
        """
        name = server.name
        client, watching = Client(server.url), partial(self._check, server)
        info, processes, ready = _introduced(server, client, watch, watching)
        rank, first = next((rank, event.server) for rank, event in ready.items())
        everyone = [event.server for events in processes.values() for event in of_kind(events, Ready)]
        if hybrid := next((facts.hybrid for facts in everyone if facts.hybrid), ""):
            raise CannotPlan(f"the model has {hybrid} pools beside its KV cache; {_OTHER_POOLS}")
        limits = script.configuration(info, first)
        derived = script.derive(limits, logprobs=logprobs)
        driver = load.Driver(client, watch, set(ready), limits, watching)
        found = Measured(
            server=name,
            fraction=float(info["mem_fraction_static"]),
            before_load=measure.before_load(processes),
            cache_tokens=limits.cache_tokens,
            cache_bytes=max(event.server.kv_bytes for event in ready.values()),
            page=limits.page,
            context=limits.context,
            requests=limits.requests,
            table_bytes=first.table_bytes,
            table_requests=first.table_requests,
            allocator=first.allocator,
            settings=_settings(info),
            logprob_switch=first.logprob_switch,
            changes=measure.changes(processes[rank]),
        )
        if verified:
            came = self._verify(server, watch, processes, limits, found.fraction, logprobs)
            found = replace(found, verified=came)
            if came.ran_out:
                return replace(found, ran_out="verification", logprobs_driven=logprobs)
        needs: list[measure.PhaseNeed] = []
        missing = list(derived.not_driven)
        missing += ["images: they are not sent"] if any(event.server.images for event in ready.values()) else []
        for phase in derived.phases:
            if phase.kind is PhaseKind.LOGPROBS:
                found = replace(found, lowest_free=self._lowest(processes, ready), ranks=_ranks(processes, ready))
            try:
                with self.console.status(f"{name}: {phase.name}"):
                    outcome = driver.drive(phase)
            except ServerFailed:
                if not out_of_memory(server.log_text()):
                    raise
                needs.append(measure.PhaseNeed(phase.kind, phase.name, False, "out of memory"))
                found = replace(found, ran_out=phase.name, logprobs_driven=logprobs)
                return replace(found, phases=tuple(needs), not_driven=tuple(missing))
            except load.Stuck as error:
                raise CannotPlan(f"the {name} server: {error}. {server.log_tail()}") from error
            measure.add(processes, outcome.events)
            if reason := measure.failure(processes):
                raise CannotPlan(f"the {name} server: {reason}")
            needs.append(
                measure.phase_need(phase.kind, phase.name, phase.bound.met, outcome.seen, outcome.events, processes)
            )
            if not outcome.seen:
                said = f" ({outcome.said})" if outcome.said else ""
                missing.append(f"{phase.name}: seen at most {needs[-1].largest or 'nothing'}{said}")
            self.console.print(f"{name}: {phase.name}: {'seen' if outcome.seen else 'not seen at its bound'}")
        lowest = self._lowest(processes, ready)
        if not logprobs:
            found = replace(found, lowest_free=lowest, ranks=_ranks(processes, ready))
        elif any(need.seen for need in needs if need.kind is PhaseKind.LOGPROBS):
            found = replace(found, logprobs_free=lowest, logprobs_driven=True)
        return replace(found, phases=tuple(needs), not_driven=tuple(missing))

    def _check(self, server: Server) -> None:
        """While it is waited for.

        :raises KeyboardInterrupt: a signal has come.
        :raises ServerFailed: the server has ended.
        """
        self.interrupt()
        server.check()

    def _lowest(self, processes: Mapping[str, Sequence[Event]], ranks: Iterable[str]) -> int | None:
        found = [measure.lowest_free(processes[rank]) for rank in ranks]
        return None if None in found else min(free for free in found if free is not None)

    def _verification(self, name: str, value: Recommendation, trials: Sequence[Measured]) -> Verified | None:
        """What came of verifying the value, or a higher one that held; in a server of its own if there was neither."""
        if value.fraction is None or not self.goal.verify_s:
            return None
        for each in sorted(trials, key=lambda each: each.fraction):
            above, came = each.fraction - value.fraction, each.verified
            if came is None or each.logprobs_driven != value.logprobs or above < -need.STEP / 2:
                continue
            if came.held or above < need.STEP / 2:
                return came
        return self.verify(name, value.fraction, value.logprobs)

    def verify(self, name: str, fraction: float, logprobs: bool) -> Verified:
        """Start a server with the fraction and drive a load of another kind.

        :raises CannotPlan: it ended for want of something else than memory.
        """
        try:
            with self.serving(name, fraction) as (server, watch):
                watching = partial(self._check, server)
                info, processes, ready = _introduced(server, Client(server.url), watch, watching)
                limits = script.configuration(info, next(iter(ready.values())).server)
                return self._verify(server, watch, processes, limits, fraction, logprobs)
        except ServerFailed as error:
            log = self.log.read_text(errors="replace")
            if TOO_LOW in log:
                return Verified(False, fraction, ("the server has no memory for a KV cache with it",))
            if not out_of_memory(log):
                raise CannotPlan(str(error)) from error
            return Verified(False, fraction, ("the server ran out of memory at start-up",), ran_out=True)

    def _verify(
        self,
        server: Server,
        watch: Watch,
        processes: dict[str, list[Event]],
        limits: script.Configuration,
        fraction: float,
        logprobs: bool,
    ) -> Verified:
        self.console.print(f"{server.name}: verifying for {self.goal.verify_s:.0f} s")
        try:
            with self.console.status(f"{server.name}: verifying"):
                came = verify.verify(
                    server,
                    watch,
                    processes,
                    limits,
                    fraction,
                    self.goal.verify_s,
                    logprobs=logprobs,
                    watching=partial(self._check, server),
                )
        except ServerFailed as error:
            if not out_of_memory(server.log_text()):
                raise CannotPlan(str(error)) from error
            came = Verified(False, fraction, ("the server ran out of memory",), ran_out=True)
        said = "held" if came.held else "; ".join(came.reasons)
        self.console.print(f"{server.name}: verification: {said}", markup=False)  # it has the server's own words
        return came


def search(
    measured: Callable[[float | None, bool], Measured], goal: Goal, known: Sequence[Measured] = ()
) -> list[Measured]:
    """Start servers until the fraction is known well enough: without prompt log-probabilities, then with.

    :param measured: starts and drives one, with a fraction or the engine's own, and with or without them.
    :param known: servers that were started before.
    :returns: these and those, in order.
    """
    trials = list(known) or [measured(None, goal.logprobs)]
    for logprobs in goal.kinds:
        tried = 0
        # Not again where the last server said nothing of this need, because it drove no log-probabilities.
        while len(used := _trials(trials, logprobs)) > tried:
            tried, fraction = len(used), need.next_fraction(used, goal.margin)
            if fraction is None:
                break
            try:
                trials.append(_with_base(measured(fraction, logprobs), trials[0]))
            except TooLow:
                break
    return trials


def _with_base(found: Measured, first: Measured) -> Measured:
    """A server that died at start-up has not said how much was free before; the first one did."""
    return found if found.ran_out != START_UP else replace(found, before_load=first.before_load, logprobs_driven=True)


def _trials(trials: Sequence[Measured], logprobs: bool) -> list[need.Trial]:
    """What the servers say of the need with prompt log-probabilities, or without."""
    if logprobs:
        return [each.logprobs_trial for each in trials if each.logprobs_driven]
    # Of a server verified with them, what it needed without is not known.
    return [each.trial for each in trials if not (each.logprobs_driven and each.verified)]


def recommend(
    trials: Sequence[Measured], margin: int, logprobs: bool, given: Sequence[str], highest: float = need.HIGHEST
) -> Recommendation:
    """The value to set, from the servers that were started.

    :param margin: bytes that must stay free.
    :param given: server arguments with the model.
    :param highest: no higher one, whatever they left free.
    """
    used = _trials(trials, logprobs)
    if not used:
        return Recommendation(logprobs, None, 0.0)
    fraction, ceiling = need.proven(used, margin), min(need.ceiling(used, margin), highest)
    fraction = None if fraction is None else min(fraction, highest)
    if not fraction:
        return Recommendation(logprobs, None, ceiling)
    # Of the servers that said how large a token is, the one nearest to it.
    base = min((t for t in trials if t.cache_tokens), key=lambda t: abs(t.fraction - fraction))
    tokens = need.kv_tokens(base.trial, base.cache_tokens, base.token_bytes, fraction, base.page)
    if not tokens:
        return Recommendation(logprobs, None, ceiling)
    return Recommendation(
        logprobs=logprobs,
        fraction=fraction,
        ceiling=ceiling,
        before_margin=need.down(need.ceiling(used, 0)),
        tokens=tokens,
        requests_at_context=tokens / base.context if base.context else 0.0,
        command=shlex.join(
            ["python", "-m", "sglang.launch_server", *given, "--mem-fraction-static", f"{fraction:.3f}"]
        ),
    )


def after(
    value: Recommendation, verified: Verified | None, trials: Sequence[Measured], margin: int, given: Sequence[str]
) -> Recommendation:
    """The recommendation with its verification, whose load may have needed more than the one that it was planned with.

    If it held and left less than the margin, the value is lowered by what is missing.

    :param margin: bytes that must stay free.
    :param given: server arguments with the model.
    """
    if verified is None or value.fraction is None:
        return value
    free = min(verified.lowest_free.values(), default=0) if verified.held else None
    trial = need.Trial(verified.fraction, trials[-1].before_load, free)
    known = need.down(trial.bound(margin))
    if verified.held and known < value.fraction:
        value = recommend(trials, margin, value.logprobs, given, known)
    before_margin = min(value.before_margin, need.down(trial.bound(0)))
    command = value.command if verified.held else ""
    return replace(value, verified=verified, before_margin=before_margin, command=command)


WORTH = 256 * MB
"""Another knob is named from so many bytes on."""


def knobs(trials: Sequence[Measured]) -> Iterator[str]:
    """Other settings that bind, each with what it would give."""
    first, last = trials[0], next((t for t in reversed(trials) if t.ranks), trials[0])
    limit = first.settings.get("max_total_tokens") if first.settings else None
    if limit and first.token_bytes and first.cache_tokens >= limit - first.page:
        more = (first.lowest_free or 0) / first.token_bytes
        yield (
            f"--max-total-tokens {limit}: holds the KV cache there whatever the fraction; leave it out: "
            f"{more:,.0f} tokens more fit in what was free at the worst moment"
        )
    if last.table_bytes >= WORTH and last.table_requests:
        each = last.table_bytes / last.table_requests
        yield (
            f"--max-running-requests: the request table has {last.table_requests:,} rows of {each / MB:,.2f} MB, "
            f"{last.table_bytes / MB:,.0f} MB in all; fewer requests give the rest back"
        )
    needs = {need.kind: need for trial in trials for need in trial.phases if need.seen}
    plain = needs.get(PhaseKind.PREFILL)
    behind = max(
        (needs[kind].tensors for kind in (PhaseKind.BEHIND_PREFIX, PhaseKind.SHARED_PREFIX) if kind in needs), default=0
    )
    if plain and behind - plain.tensors >= WORTH:
        yield (
            f"SGLANG_MAX_KV_CHUNK_CAPACITY: a chunk behind a long prefix needs {(behind - plain.tensors) / MB:,.0f} MB "
            "more than one without; where the model is MLA, a smaller value (131072 by default) takes less of it"
        )
    asked = needs.get(PhaseKind.LOGPROBS)
    most = max((need.tensors for kind, need in needs.items() if kind is not PhaseKind.LOGPROBS), default=0)
    if asked and asked.tensors - most >= WORTH and first.logprob_switch:
        yield (
            f"{first.logprob_switch}=1: prompt log-probabilities need {(asked.tensors - most) / MB:,.0f} MB more "
            "than all else; computed in chunks they need a part of it, and a plan with that variable says how much"
        )


RAN_OUT = re.compile(
    r"OutOfMemoryError|CUDA[\w\] ]*:? out of memory|CUDA_ERROR_OUT_OF_MEMORY|Cuda failure.*out of memory"
    r"|cudaErrorMemoryAllocation|CUBLAS_STATUS_ALLOC_FAILED",
    re.IGNORECASE,
)
"""As PyTorch, Triton, the driver, NCCL and cuBLAS say it."""
TOO_LOW = "Not enough memory. Please try to increase --mem-fraction-static"
"""As the engine says it, in every release."""


def out_of_memory(log: str) -> bool:
    """Whether a server that died has run out of the GPU's memory, by its log."""
    return RAN_OUT.search(log) is not None


def _ranks(processes: Mapping[str, Sequence[Event]], ready: Mapping[str, Ready]) -> tuple[measure.Rank, ...]:
    found = (measure.rank(processes[name], event.server.kv_bytes) for name, event in ready.items())
    return tuple(sorted(found, key=lambda rank: rank.name))


SETTINGS = (
    *("chunked_prefill_size", "max_prefill_tokens", "max_total_tokens", "max_running_requests", "cuda_graph_max_bs"),
    *("disable_cuda_graph", "disable_piecewise_cuda_graph", "disable_overlap_schedule", "enable_mixed_chunk"),
    *("disable_radix_cache", "attention_backend", "moe_runner_backend", "kv_cache_dtype", "tp_size", "dp_size"),
    *("pp_size", "enable_dp_attention", "speculative_algorithm", "speculative_num_draft_tokens", "page_size"),
)


def _left(found: Measured) -> str:
    """What a server left free, for the reader who waits."""
    free = found.logprobs_free if found.logprobs_driven else found.lowest_free
    if free is not None:
        return f"lowest free memory {free / MB:,.0f} MB"
    return f"not enough memory for {found.ran_out}" if found.ran_out else "the allocator had to give memory back"


def _settings(info: Mapping[str, Any]) -> dict[str, Any]:
    return {name: info[name] for name in SETTINGS if name in info}


def _introduced(
    server: Server, client: Client, watch: Watch, watching: Callable[[], None]
) -> tuple[Mapping[str, Any], dict[str, list[Event]], dict[str, Ready]]:
    """What the server resolved, what its processes recorded, and what those that run the model said when it was ready.

    Once each data-parallel rank has run a forward: with ``--skip-server-warmup`` none has when it is ready.

    :raises ServerFailed: it has ended.
    :raises CannotPlan: it does not answer, or recorded nothing.
    """
    try:
        info = client.info()
        said = watched(lambda: client.generate([[11, 12, 13]] * int(info.get("dp_size") or 1), 2), watching)
    except Unanswered as error:
        deadline = time.monotonic() + load.ENDING_S
        while time.monotonic() < deadline:
            server.check()
            time.sleep(0.5)
        said = str(error)
    if said:
        raise CannotPlan(f"the {server.name} server does not answer: {said}. {server.log_tail()}")
    processes = watch.new()
    ready = {name: event for name, events in sorted(processes.items()) if (event := measure.ready(events)) is not None}
    if not ready:
        reason = measure.failure(processes) or "it recorded nothing of itself"
        raise CannotPlan(f"the {server.name} server: {reason}. {server.log_tail()}")
    return info, processes, ready
