"""Serve stock and patched, evaluate both, compare, report."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from sglang_moe_patches import engine, patch
from sglang_moe_patches.observers import events
from sglang_moe_patches.regression import gsm8k, report
from sglang_moe_patches.regression.compare import Answer, Comparison, Run, compare, smallest_sample
from sglang_moe_patches.regression.gsm8k import Evaluation
from sglang_moe_patches.servers import gpu, refusals
from sglang_moe_patches.servers.folders import keep, logs_in, scratch
from sglang_moe_patches.servers.interrupts import Interrupts
from sglang_moe_patches.servers.keeper import StillRunning
from sglang_moe_patches.servers.refusals import Refusal
from sglang_moe_patches.servers.server import ServerFailed, shown_starting
from sglang_moe_patches.servers.subject import PATCHED, STOCK, PortInUse, Subject
from sglang_moe_patches.variables import OBSERVE

if TYPE_CHECKING:
    from rich.console import Console

__all__ = ["Addresses", "CannotRun", "Criterion", "Evaluation", "PatchedFailed", "Subject", "check", "run"]


class CannotRun(RuntimeError):
    """A run could not be made. The message says what to change, or carries the end of the server's log."""


class PatchedFailed(RuntimeError):
    """The patched server failed to start or to answer where the stock server did not: that is worse."""


@dataclass(frozen=True)
class Addresses:
    """Two servers that run already."""

    stock: str
    patched: str


@dataclass(frozen=True)
class Criterion:
    """When patched is called worse; see :func:`compare.compare`."""

    require_identical: bool
    alpha: float


SERVE_YOURSELF = "start both servers yourself and give --baseline-url and --patched-url"
REFUSED: dict[str, Refusal] = {
    **refusals.of_every_command(
        "regress",
        same="answers are",
        instead=SERVE_YOURSELF,
        of_a_pair=f"put a router before each pair, {SERVE_YOURSELF}",
    ),
    "--skip-tokenizer-init": Refusal("the questions are text", "leave it out"),
}
"""Server arguments that are refused, by name."""


def check(
    subject: Subject | Addresses,
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
        if isinstance(subject, Subject):
            subject.check(REFUSED, environment)
        else:
            refusals.check_address("--baseline-url", subject.stock)
            refusals.check_address("--patched-url", subject.patched)
    except ValueError as error:
        raise CannotRun(str(error)) from None
    least = smallest_sample(criterion.alpha)
    if not criterion.require_identical and evaluation.questions < least:
        raise CannotRun(
            f"{evaluation.questions} questions cannot show a drop in accuracy at --alpha {criterion.alpha:g}; ask at "
            f"least {least} (--num-questions), or compare answers one by one (--require-identical)"
        )


def run(
    subject: Subject | Addresses,
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
    with Interrupts() as interrupts, scratch() as logs:
        ask = _Asking(evaluation, environment, interrupts.check)
        try:
            for each in ask.servers(subject, logs, console) if isinstance(subject, Subject) else ask.addresses(subject):
                runs.append(each)
            comparison = compare(*runs, require_identical=criterion.require_identical, alpha=criterion.alpha)
            report.print_table(comparison, console)
            report.write(comparison, output)
        except BaseException as error:
            answers = {f"{each.name}.json": json.dumps(asdict(each)).encode() for each in runs}
            if answers or isinstance(error, Exception):
                kept = keep({**answers, **logs_in(logs)}, output)
                for name in answers:
                    console.print(f"Kept: {kept / name}", highlight=False, soft_wrap=True)
            raise
        keep(logs_in(logs), output)
    return comparison


def evaluate_urls(urls: dict[str, str], environment: dict[str, str], evaluation: Evaluation) -> list[Run]:
    """Evaluate servers that run already.

    :param urls: by the name of the run.
    :raises CannotRun: no engine answers at one of them; nobody was asked anything.
    :raises gsm8k.EvaluationFailed: one did not answer everything.
    """
    return list(_Asking(evaluation, environment).urls(urls))


@dataclass(frozen=True)
class _Asking:
    """Asks servers the same questions in the same way.

    :param environment: of servers that are started; the client's is made from it.
    :param interrupt: called a few times a second while waiting; raises when it is time to end.
    """

    evaluation: Evaluation
    environment: dict[str, str]
    interrupt: Callable[[], None] = lambda: None

    def addresses(self, subject: Addresses) -> Iterator[Run]:
        """Stock, then patched; see :func:`run`."""
        name = STOCK
        try:
            for found in self.urls({STOCK: subject.stock, PATCHED: subject.patched}):
                yield found
                name = PATCHED
        except gsm8k.EvaluationFailed as error:
            raise _failure(name)(str(error)) from error

    def urls(self, urls: dict[str, str]) -> Iterator[Run]:
        """See :func:`evaluate_urls`."""
        bare = {name: url.rstrip("/") for name, url in urls.items()}
        releases = {name: _release(url) for name, url in bare.items()}
        for name, url in bare.items():
            with scratch() as work:
                yield self._evaluate(name, url, work, command=(url,), release=releases[name])

    def servers(self, subject: Subject, logs: Path, console: Console) -> Iterator[Run]:
        """Start the stock server, evaluate it, end it; then the same for the patched one; see :func:`run`.

        One after the other: on a GPU they would not fit side by side, and on any machine they would slow each other
        down.

        :param logs: folder for the servers' logs.
        """
        before = gpu.used_mib()
        try:
            yield from self._server(STOCK, subject, logs, console)
            gpu.wait_until_free(before, self.interrupt)
            yield from self._server(PATCHED, subject, logs, console)
        except (StillRunning, gpu.MemoryHeld, PortInUse) as error:
            raise CannotRun(str(error)) from error

    def _server(self, name: str, subject: Subject, logs: Path, console: Console) -> Iterator[Run]:
        with scratch() as work:
            observed = work / "observed"
            observed.mkdir()
            child = {**self.environment, OBSERVE.name: str(observed)}
            server = subject.server(name, child, logs / f"{name}.log")
            try:
                with ExitStack() as stack:
                    with shown_starting(server, console, self.interrupt):
                        stack.enter_context(server)
                    if events.collect(observed) is None:
                        raise CannotRun(
                            f"the {name} server did not load this package's plugin, so nothing would be compared; is "
                            f"{child.get('SGLANG_PLUGINS', '')!r} in SGLANG_PLUGINS right? {server.log_tail()}"
                        )
                    ready = f"{name}: ready after {server.startup_s:.0f} s"
                    console.print(f"{ready}; asking {self.evaluation.questions} questions")
                    release = engine.version() or "unknown"
                    found = self._evaluate(name, server.url, work, command=tuple(server.command), release=release)
                    server.check()
                    figures = events.collect(observed)
                    # Before the server is ended: whatever happens then, this run is made.
                    yield _with_figures(replace(found, startup_s=server.startup_s), figures)
            except ServerFailed as error:
                raise _failure(name)(str(error)) from error
            except gsm8k.EvaluationFailed as error:
                raise _failure(name)(f"{error}\n{server.log_tail()}") from error

    def _evaluate(self, name: str, url: str, work: Path, *, command: tuple[str, ...], release: str) -> Run:
        # The client is no engine process: it must not observe or patch anything.
        ours = (OBSERVE.name, patch.SELECT_VARIABLE)
        client = {variable: value for variable, value in self.environment.items() if variable not in ours}
        found = gsm8k.evaluate(url, client, self.evaluation, work, self.interrupt)
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


def _failure(name: str) -> type[CannotRun | PatchedFailed]:
    return CannotRun if name == STOCK else PatchedFailed


def _with_figures(found: Run, process: events.Process | None) -> Run:
    """``found`` with what its server observed of itself."""
    if process is None:
        return found
    memory = process.memory if process.memory.forwards else None
    return replace(found, memory=memory, acted=process.acted, not_observed=process.failure, changes=process.changes)


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
