"""Serve stock and patched, evaluate both, compare, report."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from rich.console import Console

from sglang_moe_patches.core import engine, patch
from sglang_moe_patches.core.machine import has_gpu
from sglang_moe_patches.core.variables import OBSERVE
from sglang_moe_patches.lab.observers import events
from sglang_moe_patches.lab.regress import bound, gsm8k, report
from sglang_moe_patches.lab.regress.compare import MAX_DROP, Answer, Comparison, Run, compare, smallest_sample
from sglang_moe_patches.lab.regress.gsm8k import Evaluation
from sglang_moe_patches.lab.servers import gpu, interrupts, refusals
from sglang_moe_patches.lab.servers.folders import keep, logs_in, scratch
from sglang_moe_patches.lab.servers.server import ServerFailed, show_progress, show_starting
from sglang_moe_patches.lab.servers.spec import PATCHED, STOCK, PortInUse, ServerSpec
from sglang_moe_patches.lab.servers.supervisor import StillRunning

__all__ = ["Addresses", "CannotRun", "Criterion", "Evaluation", "PatchedFailed", "ServerSpec", "check", "enough", "run"]


class CannotRun(RuntimeError):
    """A run could not be made. The message says what to change, or carries the end of the server's log."""


class PatchedFailed(RuntimeError):
    """The patched server failed to start or to answer where the stock server did not: that is worse."""


@dataclass(frozen=True)
class Addresses:
    stock: str
    patched: str


@dataclass(frozen=True)
class Criterion:
    """When patched is called worse, and when no worse; see :func:`compare.compare`."""

    require_identical: bool
    alpha: float
    max_drop: float = MAX_DROP

    @property
    def fewest(self) -> int:
        """Questions with which there can be a verdict by accuracy."""
        return max(smallest_sample(self.alpha), bound.fewest(self.max_drop / 100, self.alpha))


def enough(data_path: Path | None, criterion: Criterion) -> int:
    """How many questions to ask where nobody says: as many as show that patched is no worse by more than may be lost.

    :param data_path: with the questions; ``None``: all of GSM8K's are there.
    :raises CannotRun: there are fewer, or the file cannot be used.
    """
    try:
        there = gsm8k.GSM8K if data_path is None else gsm8k.count_questions(data_path)
    except ValueError as error:
        raise CannotRun(str(error)) from None
    needed = bound.questions_for(criterion.max_drop / 100, criterion.alpha)
    assert needed is not None  # expected to lose as many as it gains
    if needed <= there or criterion.require_identical:
        return min(needed, there)
    raise CannotRun(
        f"--max-drop {criterion.max_drop:g} needs {needed:,} questions at --alpha {criterion.alpha:g} if both servers "
        f"are equally good and answer {100 * bound.CHURN:g} % otherwise, and there are {there:,}; allow a larger "
        f"--max-drop, or ask all (--num-questions {there}) and risk that it is inconclusive"
    )


def check(
    subject: ServerSpec | Addresses,
    evaluation: Evaluation,
    criterion: Criterion,
    environment: Mapping[str, str],
    output: Path,
) -> None:
    """Find out what is wrong before a minute is spent on starting a server.

    :raises CannotRun: one line that names the argument and what to give instead.
    """
    try:
        if evaluation.data_path is not None:
            gsm8k.check_questions(evaluation.data_path, evaluation.questions, evaluation.shots)
        refusals.check_output(output)
        if isinstance(subject, ServerSpec):
            subject.check(environment)
        else:
            refusals.check_address("--baseline-url", subject.stock)
            refusals.check_address("--patched-url", subject.patched)
    except ValueError as error:
        raise CannotRun(str(error)) from None
    if not criterion.require_identical and evaluation.questions < criterion.fewest:
        raise CannotRun(
            f"{evaluation.questions} questions cannot show a drop in accuracy to be below --max-drop "
            f"{criterion.max_drop:g} at --alpha {criterion.alpha:g}, however alike the answers; ask at least "
            f"{criterion.fewest} (--num-questions), or compare answers one by one (--require-identical)"
        )
    if isinstance(subject, ServerSpec) and not subject.names_device and not has_gpu():
        raise CannotRun("this machine has no NVIDIA GPU; name the device to serve on (-- --device ...)")


def run(
    subject: ServerSpec | Addresses,
    evaluation: Evaluation,
    criterion: Criterion,
    *,
    environment: dict[str, str],
    output: Path,
    console: Console,
) -> Comparison:
    """Evaluate stock and patched, print the comparison, and write the report with the servers' logs beside it.

    What was found out is never lost: where the report cannot be made, what each server answered is written to
    ``output``, or to a new temporary folder, and said.

    :param environment: of the servers; the client's is made from it.
    :raises CannotRun: a run could not be made.
    :raises PatchedFailed: the stock server answered everything and the patched one did not start or not answer.
    :raises KeyboardInterrupt: a signal has come. All servers are ended.
    """
    check(subject, evaluation, criterion, environment, output)
    runs: list[Run] = []
    with interrupts.catch_signals() as interrupt, scratch(keep_in=output) as logs:
        ask = _Asking(evaluation, environment, interrupt, console, _beforehand(evaluation, criterion))
        try:
            for each in ask.servers(subject, logs) if isinstance(subject, ServerSpec) else ask.addresses(subject):
                runs.append(each)
                # Where we are killed, the next server's supervisor puts it into `output`.
                (logs / f"{each.name}.json").write_bytes(_answers(each))
            comparison = compare(*runs, **asdict(criterion))
            report.print_table(comparison, console)
            report.write(comparison, output)
        except BaseException as error:
            answers = {f"{each.name}.json": _answers(each) for each in runs}
            if answers or isinstance(error, Exception):
                kept = keep({**answers, **logs_in(logs)}, output)
                for name in answers:
                    console.print(f"Kept: {kept / name}", highlight=False, soft_wrap=True)
            raise
        keep(logs_in(logs), output)
    return comparison


def _answers(found: Run) -> bytes:
    return json.dumps(asdict(found)).encode()


def _beforehand(evaluation: Evaluation, criterion: Criterion) -> str:
    asked = f"{evaluation.questions:,} questions to each server, one server after the other"
    if criterion.require_identical:
        return f"{asked}; any answer that differs is worse."
    churn = bound.CHURN / 2
    chance = bound.shown(evaluation.questions, criterion.max_drop / 100, criterion.alpha, churn, churn)
    return (
        f"{asked}. If both are equally good and answer {100 * bound.CHURN:g} % otherwise, so many show that patched is "
        f"no worse by more than {report.points(criterion.max_drop)} in {100 * chance:.0f} of 100 runs."
    )


def evaluate_url(name: str, url: str, environment: dict[str, str], evaluation: Evaluation) -> Run:
    """Evaluate a server that runs already.

    :raises CannotRun: no engine answers at ``url``; nobody was asked anything.
    :raises gsm8k.EvaluationFailed: it did not answer everything.
    """
    ask = _Asking(evaluation, environment, lambda: None, Console(quiet=True))
    return ask.at(name, url, _release(url))


@dataclass(frozen=True)
class _Asking:
    """Asks servers the same questions in the same way.

    :param environment: of servers that are started; the client's is made from it.
    :param interrupt: called a few times a second while waiting; raises when it is time to end.
    :param console: where it is said how long it takes.
    :param beforehand: said there once nothing is found to be wrong with what was given.
    """

    evaluation: Evaluation
    environment: dict[str, str]
    interrupt: Callable[[], None]
    console: Console
    beforehand: str = ""

    def addresses(self, subject: Addresses) -> Iterator[Run]:
        """Stock, then patched; see :func:`run`."""
        urls = {STOCK: subject.stock.rstrip("/"), PATCHED: subject.patched.rstrip("/")}
        releases = {name: _release(url) for name, url in urls.items()}
        self.console.print(self.beforehand, highlight=False)
        for name, url in urls.items():
            try:
                found = self.at(name, url, releases[name])
            except gsm8k.EvaluationFailed as error:
                raise _failure(name)(str(error)) from error
            yield found

    def at(self, name: str, url: str, release: str) -> Run:
        with scratch() as work:
            return self._evaluate(name, url, work, (url,), release)

    def servers(self, subject: ServerSpec, logs: Path) -> Iterator[Run]:
        """Start the stock server, evaluate it, end it; then the same for the patched one; see :func:`run`.

        One after the other: on a GPU they would not fit side by side, and on any machine they would slow each other
        down.

        :param logs: folder for the servers' logs.
        """
        self.console.print(self.beforehand, highlight=False)
        before = gpu.used_mib()
        try:
            yield from self._server(STOCK, subject, logs)
            gpu.wait_until_free(before, self.interrupt)
            yield from self._server(PATCHED, subject, logs)
        except (StillRunning, gpu.MemoryHeld, PortInUse) as error:
            raise CannotRun(str(error)) from error

    def _server(self, name: str, subject: ServerSpec, logs: Path) -> Iterator[Run]:
        with scratch() as work:
            observed = work / "observed"
            observed.mkdir()
            child = {**self.environment, OBSERVE.name: str(observed)}
            server = subject.server(name, child, logs / f"{name}.log")
            try:
                with ExitStack() as stack:
                    with show_starting(server, self.console, self.interrupt):
                        stack.enter_context(server)
                    if events.collect(observed) is None:
                        raise CannotRun(
                            f"the {name} server did not load this package's plugin, so nothing would be compared; is "
                            f"{child.get('SGLANG_PLUGINS', '')!r} in SGLANG_PLUGINS right? {server.log_tail()}"
                        )
                    ready = f"{name}: ready after {server.startup_s:.0f} s"
                    self.console.print(f"{ready}; asking {self.evaluation.questions} questions")
                    found = self._evaluate(name, server.url, work, tuple(server.command), engine.version() or "unknown")
                    server.check()
                    process = events.collect(observed)
                    assert process is not None  # it was there before
                    # Before the server is ended: whatever happens then, this run is made.
                    yield replace(
                        found,
                        startup_s=server.startup_s,
                        memory=process.memory if process.memory.forwards else None,
                        acted=process.acted,
                        not_observed=process.failure,
                        changes=process.changes,
                    )
            except ServerFailed as error:
                raise _failure(name)(str(error)) from error
            except gsm8k.EvaluationFailed as error:
                raise _failure(name)(f"{error}\n{server.log_tail()}") from error

    def _evaluate(self, name: str, url: str, work: Path, command: tuple[str, ...], release: str) -> Run:
        # The client is no engine process: it must not observe or patch anything.
        ours = (OBSERVE.name, patch.SELECT_VARIABLE)
        client = {variable: value for variable, value in self.environment.items() if variable not in ours}
        with show_progress(self.console, f"{name}: asking") as tell:

            def watch(answered: int, seconds: float) -> None:
                self.interrupt()
                line = f"{name}: {answered:,} of {self.evaluation.questions:,} answered"
                if answered:
                    left = seconds / answered * (self.evaluation.questions - answered)
                    line += f", about {spoken(left)} left"
                    if name == STOCK:
                        line += f"; then patched, about {spoken(seconds + left)}"
                tell(seconds, line)

            found = gsm8k.evaluate(url, client, self.evaluation, work, watch)
        return Run(
            name=name,
            engine=release,
            command=command,
            answers=tuple(Answer(**{**answer, "tokens": tuple(answer["tokens"])}) for answer in found["answers"]),
            startup_s=0.0,
            latency_s=found["latency_s"],
            input_tokens=found["input_tokens"],
            output_tokens=found["output_tokens"],
            memory=None,
            changes=(),
        )


def spoken(seconds: float) -> str:
    """For people, to two digits at most."""
    if seconds < 100:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 100 * 60 else f"{seconds / 3600:.1f} h"


def _failure(name: str) -> type[CannotRun | PatchedFailed]:
    return CannotRun if name == STOCK else PatchedFailed


def _release(url: str) -> str:
    """The engine's release.

    :raises CannotRun: no engine answers at ``url``.
    """
    import httpx

    try:
        info = httpx.get(f"{url}/get_server_info", timeout=30).raise_for_status().json()
    except (httpx.HTTPError, ValueError) as error:
        raise CannotRun(f"{url}: no SGLang server answers there: {error}") from None
    return str(info.get("version", "unknown"))
