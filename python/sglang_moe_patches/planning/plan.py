"""The judge of kv-sizing: two starts of each server, one that rehearses and one that its record sizes, and a load of
another kind that the second has to survive. What is needed is found out in one place, in the server itself."""

from __future__ import annotations

import re
import shlex
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sglang_moe_patches.core import engine, machine, patch
from sglang_moe_patches.core.patch import Status
from sglang_moe_patches.core.variables import BY_COMMANDS, PLAN, STRICT
from sglang_moe_patches.lab.observers.events import Event, Watch
from sglang_moe_patches.lab.servers import gpu, refusals
from sglang_moe_patches.lab.servers.client import Client, Unanswered, watched
from sglang_moe_patches.lab.servers.folders import keep, logs_in, scratch
from sglang_moe_patches.lab.servers.interrupts import Interrupts
from sglang_moe_patches.lab.servers.keeper import StillRunning
from sglang_moe_patches.lab.servers.refusals import Refusal
from sglang_moe_patches.lab.servers.server import Server, ServerFailed, shown_starting
from sglang_moe_patches.lab.servers.subject import PATCHED, STOCK, PortInUse, Subject
from sglang_moe_patches.memory.kv_sizing import decide, record, rehearse, script
from sglang_moe_patches.memory.kv_sizing.decide import KV_RECORD, KV_SIZING
from sglang_moe_patches.memory.kv_sizing.record import Record
from sglang_moe_patches.planning import measure, report, rule, verify
from sglang_moe_patches.planning.measure import Verified
from sglang_moe_patches.planning.result import Plan, ServerPlan, Started

if TYPE_CHECKING:
    from rich.console import Console

KV = "kv-sizing"
SAYS = f"sglang-moe-patches: {KV}: "
NOT_THEIRS = (KV, *BY_COMMANDS)
"""Who reads variables that no command to paste has."""
VERIFY_S = 120.0
MOST_TRIES = 4
"""Of a first start, each from half the reserve of the one before."""


class CannotPlan(RuntimeError):
    """Nothing can be planned. The message says what to change."""


class NotTried(RuntimeError):
    """A server could not be tried. The message says why, or carries the end of its log."""


ENDS_A_SERVER = (NotTried, ServerFailed, StillRunning, gpu.MemoryHeld, PortInUse, measure.NotObserved)
"""What leaves a server untried; the messages say what to do."""


@dataclass(frozen=True)
class Goal:
    """What is asked for.

    :param logprobs: whether requests ask for the log-probabilities of whole prompts.
    :param verify_s: seconds of the verification's load; 0: no verification.
    :param dummy_weights: serve random weights, to plan without the checkpoint.
    """

    logprobs: bool = False
    verify_s: float = VERIFY_S
    dummy_weights: bool = False


# --- what is refused --------------------------------------------------------------------------------------------------


def _on(value: str) -> bool:
    return value not in ("", "0", "0.0")


_BY_HAND = "set --mem-fraction-static by hand"
REFUSED: dict[str, Refusal] = {
    **refusals.of_every_command("plan", same="memory is", instead=_BY_HAND),
    "--mem-fraction-static": Refusal("this is what plan finds", "leave it out"),
    "--offload-group-size": Refusal("weights come and go while it serves", _BY_HAND, lambda n: _on(n) and n != "-1"),
    "--enable-hisparse": Refusal("its KV cache lies on the host as well", _BY_HAND),
    "--prefill-only-disable-kv-cache": Refusal("there is no KV cache to enlarge", "nothing is to be planned"),
    "--max-queued-requests": Refusal("the load is longer than the queue would be", "leave it out: memory is the same"),
}
"""Server arguments that are refused by name; what else kv-sizing leaves to the rule is said when they are resolved."""


def check(subject: Subject, environment: Mapping[str, str], output: Path) -> None:
    """Find out what is wrong before a minute is spent on starting a server.

    :raises CannotPlan: one line that names the argument and what to give instead.
    """
    if not machine.has_gpu():
        raise CannotPlan("no NVIDIA GPU here; plan measures on the machine that will serve")
    try:
        refusals.check_output(output)
        subject.check(REFUSED, environment)
    except ValueError as error:
        raise CannotPlan(str(error)) from None


# --- the command ------------------------------------------------------------------------------------------------------


def run(
    subject: Subject,
    goal: Goal,
    *,
    servers: Sequence[str] = (PATCHED,),
    environment: dict[str, str],
    output: Path,
    console: Console,
    gpu_memory_mib: float | None = None,
) -> Plan:
    """Start each server twice, verify, print what was found, and write plan.json after each part.

    :param servers: ``STOCK``, ``PATCHED`` or both.
    :param environment: of the servers.
    :param gpu_memory_mib: told to the engine's resolver; ``None``: it asks the GPU.
    :raises CannotPlan: no server can be started; an earlier plan stays as it is.
    :raises KeyboardInterrupt: a signal has come. All servers are ended; what was found is written.
    """
    check(subject, environment, output)
    if goal.dummy_weights:
        subject = replace(subject, arguments=(*subject.arguments, "--load-format", "dummy"))
    with Interrupts() as interrupts, scratch(keep_in=output) as logs:
        console.print("Asking the engine what it sets aside by its rule")
        try:
            ruled = rule.resolve(subject.given, environment, gpu_memory_mib, interrupts.check)
        except rule.NotResolved as error:
            interrupts.check()  # Ctrl-C in a terminal ends the resolver, too
            raise CannotPlan(str(error)) from None
        interrupts.check()
        reason = decide.stands_back(True, ruled.resolved, environment) or decide.only_watched(ruled.resolved)
        if reason:
            raise CannotPlan(f"kv-sizing leaves this server to the engine's rule: {reason}; {_BY_HAND}")
        made = Plan(
            engine=engine.version() or "unknown",
            model=subject.model,
            arguments=subject.arguments,
            rule=ruled,
            servers=tuple(ServerPlan(name, failure="not tried yet") for name in servers),
            dummy_weights=goal.dummy_weights,
        )
        writer = report.Writer(output)

        def finished(part: ServerPlan) -> None:
            nonlocal made
            made = replace(made, servers=tuple(part if each.server == part.server else each for each in made.servers))
            writer.write(made)

        session = Session(subject, goal, environment, logs, console, interrupts.check, len(servers), ruled.fraction)
        try:
            for name in servers:
                session.plan(name, finished)
        finally:
            left = [path for path in sorted(logs.iterdir()) if path.suffix in (".json", ".jsonl")]
            recorded = {path.name: path.read_bytes() for path in left}
            keep({**logs_in(logs), **recorded}, output)
    report.print_table(made, console)
    if problem := writer.page(made):
        console.print(f"plan.html could not be written: {problem}", markup=False)
    return made


class Clock:
    """How long it will take: known once one server has started.

    :param starts: server starts in all.
    :param verify_s: of each second one.
    """

    def __init__(self, starts: int, verify_s: float) -> None:
        self.left, self.verify_s, self.each = starts, verify_s, 0.0

    def said_first(self) -> str:
        verifying = f", and {self.left // 2} times {self.verify_s:.0f} s of verification" if self.verify_s else ""
        return (
            f"{self.left} server starts, each as long as yours takes and at most {rehearse.LIMIT_S / 60:.0f} min of "
            f"rehearsal{verifying}; how long that is will be known after the first"
        )

    def started(self, seconds: float) -> str:
        """What is left now that one start has taken so long."""
        self.left, self.each = self.left - 1, max(self.each, seconds)
        verifications = self.left // 2 + 1  # that of a server that has just started is to come
        return f"about {max(1, round((self.left * self.each + verifications * self.verify_s) / 60))} min left"


class Session:
    """Starts servers one after the other, and judges each.

    :param count: of servers, each to be started twice.
    :param rule: the engine's own fraction.
    """

    def __init__(
        self,
        subject: Subject,
        goal: Goal,
        environment: dict[str, str],
        logs: Path,
        console: Console,
        interrupt: Callable[[], None],
        count: int,
        rule: float,
    ) -> None:
        self.subject, self.goal, self.environment, self.rule = subject, goal, environment, rule
        self.logs, self.console, self.interrupt = logs, console, interrupt
        self.number = 0
        self.log = logs / "none"
        """Of the last server."""
        self.before = gpu.used_mib()
        self.clock = Clock(2 * count, goal.verify_s)
        self.say(self.clock.said_first())

    def say(self, text: str) -> None:
        self.console.print(text, markup=False)  # it may have the server's own words

    def plan(self, name: str, finished: Callable[[ServerPlan], None]) -> None:
        """Both starts of a server. Whatever becomes of one, what was found before it stays.

        :param finished: takes what is known, after each start.
        """
        found = ServerPlan(name)
        records = self.logs / f"{name}.records.json"
        try:
            found = self.first(found, records)
            if not found.failure:
                finished(replace(found, failure="the second start was not tried yet"))
                found = self.second(found, records)
        except ENDS_A_SERVER as error:
            self.interrupt()  # a signal may be what ended it
            found = replace(found, failure=str(error), record=_read(records) or found.record)
        said, why = found.judged
        self.say("; ".join([f"{name}: {said}", *why]))
        finished(found)

    def first(self, found: ServerPlan, records: Path) -> ServerPlan:
        """The start by the engine's rule; where that leaves no KV cache, by a higher fraction."""
        given: float | None = None
        for tries in range(MOST_TRIES, 0, -1):
            try:
                return self.rehearsed(found, records, given)
            except ServerFailed as error:
                log = self.log.read_text(errors="replace")
                if out_of_memory(log):
                    raise NotTried(f"out of memory before anything was sized. {error}") from error
                if not TOO_LOW.search(log):
                    raise
                if tries == 1:
                    raise NotTried(f"no fraction that was tried leaves memory for a KV cache. {error}") from error
                given = 1 - (1 - (given or self.rule)) / 2
                self.say(f"{found.server}: the fraction leaves no memory for a KV cache; from {given:.3f} instead")
        raise AssertionError

    def rehearsed(self, found: ServerPlan, records: Path, given: float | None) -> ServerPlan:
        """:raises ServerFailed: the server has ended."""
        with self.serving(found.server, records, given) as (server, watch):
            asking = Asking(server, watch, self.interrupt)
            self.ready(server, "by the engine's rule" if given is None else "by hand", asking)
            logprobs = None
            if self.goal.logprobs:
                logprobs = verify.prompt_logprobs(server, watch, asking.processes, asking.limits, asking.check)
            started = replace(asking.started(), given=given is not None)
        if logprobs:
            _learn(records, started)
        known = _read(records)
        failure = "" if known is not None and known.need else f"nothing was recorded: {why_not(started)}"
        return replace(found, first=started, record=known, logprobs=logprobs, failure=failure)

    def second(self, found: ServerPlan, records: Path) -> ServerPlan:
        """The start that its record sizes, and the verification."""
        name, ran_out = found.server, ""
        verified: Verified | None = None
        asking: Asking | None = None
        started: Started | None = None
        try:
            with self.serving(name, records) as (server, watch):
                asking = Asking(server, watch, self.interrupt)
                self.ready(server, "by its record", asking)
                if self.goal.verify_s:
                    verified = self.verify(asking, bool(found.logprobs))
                started = asking.started()
        except ServerFailed as error:
            if not out_of_memory(self.log.read_text(errors="replace")):
                raise
            ran_out = "the server ran out of memory " + ("at start-up" if asking is None else "while it was verified")
            self.say(f"{name}: {ran_out}: {error}")
        fraction = asking.fraction if asking is not None else 0.0
        if ran_out:
            verified = Verified(False, fraction, (ran_out,), ran_out=True)
        found = replace(found, second=started, verified=verified, record=_read(records))
        held = started is not None and (verified is None or verified.held)
        return replace(found, command=self.command(found) if held else "")

    @contextmanager
    def serving(self, name: str, records: Path, given: float | None = None) -> Iterator[tuple[Server, Watch]]:
        """A server that sizes itself by these records.

        :param given: the fraction that it starts from; ``None``: the engine's own.
        """
        if self.number:
            gpu.wait_until_free(self.before, self.interrupt, ended="last", following=f"next ({name})")
        self.number += 1
        with scratch() as folder:
            mode, more = ("auto", []) if given is None else (decide.GIVEN, ["--mem-fraction-static", f"{given:.3f}"])
            child = {**self.environment, PLAN.name: str(folder), KV_SIZING.name: mode, KV_RECORD.name: str(records)}
            self.log = self.logs / f"{self.number}-{name}.log"
            selection = {patch.SELECT_VARIABLE: selected(name, self.environment)}
            server = self.subject.server(name, child, self.log, *more, variables=selection)
            watch = Watch(folder)
            try:
                with shown_starting(server, self.console, self.interrupt):
                    server.__enter__()
                yield server, watch
            finally:
                server.stop()
                for recorded in folder.glob("*.jsonl"):
                    shutil.copy(recorded, self.logs / f"{self.log.stem}-{recorded.name}")

    def ready(self, server: Server, how: str, asking: Asking) -> None:
        self.say(
            f"{server.name}, sized {how}: ready after {server.startup_s:.0f} s, {asking.limits.cache_tokens:,} tokens "
            f"at {asking.fraction:.4f}; {self.clock.started(server.startup_s)}"
        )

    def verify(self, asking: Asking, logprobs: bool) -> Verified:
        self.say(f"{asking.server.name}: verifying for {self.goal.verify_s:.0f} s")
        with self.console.status(f"{asking.server.name}: verifying"):
            return verify.verify(
                asking.server,
                asking.watch,
                asking.processes,
                asking.limits,
                asking.fraction,
                self.goal.verify_s,
                logprobs=logprobs,
                watching=asking.check,
            )

    def command(self, found: ServerPlan) -> str:
        """What to paste: with the changes that were there, and none that is silently not."""
        assert found.second is not None
        variables = {patch.SELECT_VARIABLE: "none"}
        if found.server == PATCHED:
            did = (Status.APPLIED, Status.HARDENED, Status.NATIVE)
            there = [name for name, status, _ in found.second.changes if status in did and name != KV]
            variables = {patch.SELECT_VARIABLE: ",".join(there) or "none", STRICT.name: "1"}
            theirs = {
                variable.name for reader, variable in patch.variables(patch_changes()) if reader not in NOT_THEIRS
            }
            kept = {name: value for name, value in self.environment.items() if name in theirs}
            variables = {**kept, **variables}
        given = self.subject.given
        if self.goal.dummy_weights:
            given = given[:-2]
        fraction = ["--mem-fraction-static", f"{found.second.fraction:.4f}"]
        words = [f"{name}={shlex.quote(value)}" for name, value in sorted(variables.items())]
        return " ".join([*words, shlex.join(["python", "-m", "sglang.launch_server", *given, *fraction])])


class Asking:
    """A server that is ready, and what its processes record.

    :raises NotTried: it does not answer, or recorded nothing.
    """

    def __init__(self, server: Server, watch: Watch, interrupt: Callable[[], None]) -> None:
        self.server, self.watch, self.interrupt = server, watch, interrupt
        client = Client(server.url)
        try:
            self.info = client.info()
            # With --skip-server-warmup no rank has run a forward when it is ready.
            requests = [[11, 12, 13]] * script.ranks(self.info)
            said = watched(lambda: client.generate(requests, 2), self.check)
        except Unanswered as error:
            said = str(error)
        if said:
            raise NotTried(f"the {server.name} server does not answer: {said}. {server.log_tail()}")
        self.processes: dict[str, list[Event]] = {}
        self.look()
        ranks = sorted(measure.target_ranks(self.processes))
        if not ranks:
            reason = measure.failure(self.processes) or "it recorded nothing of itself"
            raise NotTried(f"the {server.name} server: {reason}. {server.log_tail()}")
        ready = measure.ready(self.processes[ranks[0]])
        assert ready is not None
        self.limits = script.configuration(self.info, ready.server)
        self.fraction = script.fraction_in_force(self.info)

    def look(self) -> None:
        measure.add(self.processes, self.watch.new())

    def check(self) -> None:
        """While it is waited for.

        :raises KeyboardInterrupt: a signal has come.
        :raises ServerFailed: the server has ended.
        """
        self.interrupt()
        self.server.check()

    def started(self) -> Started:
        """What is known of it, until now."""
        server = self.server
        self.look()
        ranks = sorted(measure.target_ranks(self.processes))
        facts = {name: measure.ready(self.processes[name]) for name in ranks}
        found = [
            measure.rank(self.processes[name], ready.server.kv_bytes)
            for name, ready in facts.items()
            if ready is not None
        ]
        return Started(
            fraction=self.fraction,
            tokens=self.limits.cache_tokens,
            startup_s=server.startup_s,
            context=self.limits.context,
            ranks=tuple(sorted(found, key=lambda rank: rank.name)),
            changes=measure.changes(self.processes[ranks[0]]),
            said=tuple(line.partition(SAYS)[2] for line in server.log_text().splitlines() if SAYS in line),
            settings={name: self.info[name] for name in SETTINGS if name in self.info},
        )


def patch_changes() -> Any:
    """The changes; not imported before they are wanted."""
    from sglang_moe_patches.registry import CHANGES

    return CHANGES


def selected(name: str, environment: Mapping[str, str]) -> str:
    """``SGLANG_MOE_PATCHES`` of a server: the user's choice, or none, and kv-sizing."""
    if name == STOCK:
        return KV
    chosen = environment.get(patch.SELECT_VARIABLE, "").strip() or "all"
    return chosen if chosen == "all" or KV in chosen.split(",") else f"{chosen},{KV}"


def why_not(started: Started) -> str:
    """Why a server recorded nothing, by its own word."""
    status = next(((status, reason) for name, status, reason in started.changes if name == KV), ("missing", ""))
    if status[0] != Status.APPLIED:
        return f"kv-sizing is {status[0]}" + (f": {status[1]}" if status[1] else "")
    return started.said[-1] if started.said else "kv-sizing says nothing in the log; is --log-level above info?"


def _read(records: Path) -> Record | None:
    """The record that a server has made; they share no file."""
    try:
        return next(iter(record.read(records).values()), None)
    except record.Unreadable as error:
        raise NotTried(f"{records.name} {error}") from error


def _learn(records: Path, started: Started) -> None:
    """Add what was driven after the rehearsal to what it found: the next start is sized with both."""
    lowest = min(rank.lowest_free for rank in started.ranks)

    def learned(old: Record) -> Record | None:
        if not old.need:
            return old if old.made_of else None
        reserve = int(old.before * (1 - old.fraction))
        return replace(old, need=max(old.need, reserve - lowest), driven=(*old.driven, "prompt log-probabilities"))

    for key in record.read(records):
        record.change(records, key, learned)


RAN_OUT = re.compile(
    r"OutOfMemoryError|CUDA[\w\] ]*:? out of memory|CUDA_ERROR_OUT_OF_MEMORY|Cuda failure.*out of memory"
    r"|cudaErrorMemoryAllocation|CUBLAS_STATUS_ALLOC_FAILED",
    re.IGNORECASE,
)
"""As PyTorch, Triton, the driver, NCCL and cuBLAS say it."""
TOO_LOW = re.compile(r"try to increase --mem-fraction-static|weights leave no GPU memory for the KV cache")
"""As the engine says it."""


def out_of_memory(log: str) -> bool:
    """Whether a server that died has run out of the GPU's memory, by its log."""
    return RAN_OUT.search(log) is not None


SETTINGS = (
    *("chunked_prefill_size", "max_prefill_tokens", "max_total_tokens", "max_running_requests", "cuda_graph_max_bs"),
    *("disable_cuda_graph", "disable_piecewise_cuda_graph", "disable_overlap_schedule", "enable_mixed_chunk"),
    *("disable_radix_cache", "attention_backend", "moe_runner_backend", "kv_cache_dtype", "tp_size", "dp_size"),
    *("attn_dp_size",),
    *("pp_size", "enable_dp_attention", "speculative_algorithm", "speculative_num_draft_tokens", "page_size"),
)
