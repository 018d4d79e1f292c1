"""The command ``regress``: start and evaluate a stock and a patched server, compare them, and write a report."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from rich.console import Console

from sglang_moe_patches.core import engine, patch
from sglang_moe_patches.core.machine import PLUGIN_NAME, has_gpu
from sglang_moe_patches.core.variables import OBSERVE
from sglang_moe_patches.lab.observers import events
from sglang_moe_patches.lab.regress import bound, gsm8k, report
from sglang_moe_patches.lab.regress.compare import MAX_DROP, Answer, Comparison, Run, compare, min_losses
from sglang_moe_patches.lab.regress.gsm8k import Evaluation
from sglang_moe_patches.lab.servers import gpu, interrupts, refusals
from sglang_moe_patches.lab.servers.folders import logs_in, save_files, scratch
from sglang_moe_patches.lab.servers.server import ServerFailed, show_progress, show_starting
from sglang_moe_patches.lab.servers.spec import PATCHED, STOCK, PortInUse, ServerSpec
from sglang_moe_patches.lab.servers.supervisor import StillRunning

__all__ = [
    "Addresses",
    "CannotRun",
    "Criterion",
    "Evaluation",
    "PatchedFailed",
    "ServerSpec",
    "check",
    "default_questions",
    "run",
]


class CannotRun(RuntimeError):
    """Raised if the comparison cannot be made. The message says what to change, or ends with the server's log."""


class PatchedFailed(RuntimeError):
    """Raised if only the patched server did not start or did not answer all questions. This counts as "worse"."""


@dataclass(frozen=True)
class Addresses:
    """URLs of two servers that are already running.

    :param stock: URL of the server without this package's changes.
    :param patched: URL of the server with the changes.
    """

    stock: str
    patched: str


@dataclass(frozen=True)
class Criterion:
    """Thresholds for the verdicts "worse" and "no worse". :func:`compare.compare` explains them.

    :param require_identical: whether a single differing answer is enough for the verdict "worse".
    :param alpha: significance level of the one-sided tests.
    :param max_drop: allowed drop in accuracy, in percentage points.
    """

    require_identical: bool
    alpha: float
    max_drop: float = MAX_DROP

    @property
    def min_questions(self) -> int:
        """Smallest number of questions with which both verdicts, "no worse" and "worse", are possible. With fewer
        questions, at least one of the two verdicts is impossible, whatever the servers answer."""
        return max(min_losses(self.alpha), bound.min_questions(self.max_drop / 100, self.alpha))


def default_questions(data_path: Path | None, criterion: Criterion) -> int:
    """Return the number of questions that ``regress`` asks by default. If both servers are equally good, this number
    leads to the verdict "no worse" with a probability of 80 %.

    If the criterion requires identical answers, this probability does not matter. A file with fewer questions is then
    allowed, and the number of its questions is returned.

    :param data_path: file with questions; ``None`` to use the test set of GSM8K.
    :raises CannotRun: the file has too few questions or cannot be read.
    """
    try:
        available = gsm8k.GSM8K if data_path is None else gsm8k.count_questions(data_path)
    except ValueError as error:
        raise CannotRun(str(error)) from None
    needed = bound.questions_for(criterion.max_drop / 100, criterion.alpha)
    assert needed is not None  # equally good servers are expected to have as many losses as gains
    if needed <= available or criterion.require_identical:
        return min(needed, available)
    raise CannotRun(
        f"--max-drop {criterion.max_drop:g} at --alpha {criterion.alpha:g} needs {needed:,} questions, but only "
        f"{available:,} are available; allow a larger --max-drop, or ask all (--num-questions {available}) and risk an "
        "inconclusive result (the number assumes equally good servers, of which only one is right on "
        f"{100 * bound.CHURN:g} % of the questions)"
    )


def check(
    subject: ServerSpec | Addresses,
    evaluation: Evaluation,
    criterion: Criterion,
    environment: Mapping[str, str],
    output: Path,
) -> None:
    """Check all arguments before a server starts, because a start takes minutes.

    :raises CannotRun: an argument is wrong. The message is one line that names the argument and a better value.
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
    if not criterion.require_identical and evaluation.questions < criterion.min_questions:
        raise CannotRun(
            f"{evaluation.questions} questions are too few to show that accuracy drops by less than --max-drop "
            f"{criterion.max_drop:g} (at --alpha {criterion.alpha:g}), even if all answers are equal; ask at least "
            f"{criterion.min_questions} (--num-questions), or require identical answers (--require-identical)"
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
    """Evaluate both servers, print the comparison, and write the report and the servers' logs to ``output``.

    Answers are never lost. If the report cannot be written, each server's answers are written to ``output``, or else to
    a new temporary folder. Their paths are printed.

    :param environment: environment of the servers. The client's environment is derived from it.
    :raises CannotRun: the comparison cannot be made.
    :raises PatchedFailed: only the patched server did not start or did not answer.
    :raises KeyboardInterrupt: a signal arrived. All servers have ended.
    """
    check(subject, evaluation, criterion, environment, output)
    runs: list[Run] = []
    with interrupts.catch_signals() as interrupt, scratch(keep_in=output) as logs:
        evaluator = _Evaluator(evaluation, environment, interrupt, console, _announcement(evaluation, criterion))
        if isinstance(subject, ServerSpec):
            finished_runs = evaluator.start_servers(subject, logs)
        else:
            finished_runs = evaluator.ask_addresses(subject)
        try:
            for finished in finished_runs:
                runs.append(finished)
                # If this process is killed, the next server's supervisor copies this file to `output`.
                (logs / f"{finished.name}.json").write_bytes(_to_json(finished))
            comparison = compare(*runs, **asdict(criterion))
            report.print_table(comparison, console)
            report.write(comparison, output)
        except BaseException as error:
            answers = {f"{finished.name}.json": _to_json(finished) for finished in runs}
            if answers or isinstance(error, Exception):
                kept = save_files({**answers, **logs_in(logs)}, output)
                for name in answers:
                    console.print(f"Answers kept in {kept / name}", highlight=False, soft_wrap=True)
            raise
        save_files(logs_in(logs), output)
    return comparison


def _to_json(run: Run) -> bytes:
    return json.dumps(asdict(run)).encode()


def _announcement(evaluation: Evaluation, criterion: Criterion) -> str:
    """Return the line that is printed before the first question. It says how many questions there are, and what they
    can show."""
    questions = f"{evaluation.questions:,} questions to each server, one server after the other"
    if criterion.require_identical:
        return f'{questions}; the verdict is "worse" if any answer differs.'
    churn = bound.CHURN / 2
    chance = bound.pass_probability(evaluation.questions, criterion.max_drop / 100, criterion.alpha, churn, churn)
    return (
        f"{questions}. If the servers are equally good and exactly one of them is right on {100 * bound.CHURN:g} % of "
        f"the questions, {100 * chance:.0f} of 100 such runs show that the patched server is no worse by more than "
        f"{report.format_points(criterion.max_drop)}."
    )


def evaluate_url(name: str, url: str, environment: dict[str, str], evaluation: Evaluation) -> Run:
    """Send all questions to a server that is already running, and return its answers.

    :raises CannotRun: no engine answers at ``url``. No question was sent.
    :raises gsm8k.EvaluationFailed: the server did not answer every question.
    """
    evaluator = _Evaluator(evaluation, environment, lambda: None, Console(quiet=True))
    return evaluator.ask_address(name, url, _engine_release(url))


@dataclass(frozen=True)
class _Evaluator:
    """Object that sends the same questions to several servers, with the same settings.

    :param evaluation: questions and settings of the evaluation.
    :param environment: environment of the servers to start. The client's environment is derived from it.
    :param interrupt: function that is called several times a second while the evaluator waits. The function can raise
        an exception to end the run.
    :param console: console for progress lines.
    :param announcement: line to print before the first server is evaluated.
    """

    evaluation: Evaluation
    environment: dict[str, str]
    interrupt: Callable[[], None]
    console: Console
    announcement: str = ""

    def ask_addresses(self, subject: Addresses) -> Iterator[Run]:
        """Evaluate two servers that are already running: first the stock server, then the patched server. Raises the
        errors of :func:`run`."""
        urls = {STOCK: subject.stock.rstrip("/"), PATCHED: subject.patched.rstrip("/")}
        releases = {name: _engine_release(url) for name, url in urls.items()}
        self.console.print(self.announcement, highlight=False)
        for name, url in urls.items():
            try:
                finished = self.ask_address(name, url, releases[name])
            except gsm8k.EvaluationFailed as error:
                raise _failure_type(name)(str(error)) from error
            yield finished

    def ask_address(self, name: str, url: str, release: str) -> Run:
        with scratch() as work:
            return self._ask(name, url, work, (url,), release)

    def start_servers(self, subject: ServerSpec, logs: Path) -> Iterator[Run]:
        """Start, evaluate and end the stock server, then the patched server. Raises the errors of :func:`run`.

        The servers run one after the other. Two servers at once would not fit on a GPU, and would slow each other down.

        :param logs: folder for the servers' logs.
        """
        self.console.print(self.announcement, highlight=False)
        before = gpu.read_used_mib()
        try:
            yield from self._start_server(STOCK, subject, logs)
            gpu.wait_until_free(before, self.interrupt)
            yield from self._start_server(PATCHED, subject, logs)
        except (StillRunning, gpu.MemoryInUse, PortInUse) as error:
            raise CannotRun(str(error)) from error

    def _start_server(self, name: str, subject: ServerSpec, logs: Path) -> Iterator[Run]:
        with scratch() as work:
            records = work / "observed"
            records.mkdir()
            environment = {**self.environment, OBSERVE.name: str(records)}
            server = subject.server(name, environment, logs / f"{name}.log")
            try:
                with ExitStack() as stack:
                    with show_starting(server, self.console, self.interrupt):
                        stack.enter_context(server)
                    if events.collect(records) is None:
                        raise CannotRun(
                            f"the {name} server did not load this package's plugin, so a comparison would show "
                            "nothing. Check that sglang-moe-patches is installed in the server's environment. If "
                            f"SGLANG_PLUGINS is set, it must contain {PLUGIN_NAME}; its value is "
                            f"{environment.get('SGLANG_PLUGINS', '')!r}. "
                            f"{server.log_tail()}"
                        )
                    ready = f"{name}: ready after {server.startup_s:.0f} s"
                    self.console.print(f"{ready}; asking {self.evaluation.questions} questions")
                    release = engine.version() or "unknown"
                    finished = self._ask(name, server.url, work, tuple(server.command), release)
                    server.check()
                    process = events.collect(records)
                    assert process is not None  # the records existed before the evaluation
                    # The run is complete before the server ends: a failure to end it loses no answers.
                    yield replace(
                        finished,
                        startup_s=server.startup_s,
                        memory=process.memory if process.memory.forwards else None,
                        acted=process.acted,
                        not_observed=process.failure,
                        changes=process.changes,
                    )
            except ServerFailed as error:
                raise _failure_type(name)(str(error)) from error
            except gsm8k.EvaluationFailed as error:
                raise _failure_type(name)(f"{error}\n{server.log_tail()}") from error

    def _ask(self, name: str, url: str, work: Path, command: tuple[str, ...], release: str) -> Run:
        # The client imports the engine, but its engine must neither be patched nor observed.
        removed = (OBSERVE.name, patch.SELECT_VARIABLE)
        client = {variable: value for variable, value in self.environment.items() if variable not in removed}
        with show_progress(self.console, f"{name}: asking") as update:

            def watch(answered: int, seconds: float) -> None:
                self.interrupt()
                line = f"{name}: {answered:,} of {self.evaluation.questions:,} answered"
                if answered:
                    left = seconds / answered * (self.evaluation.questions - answered)
                    line += f", about {format_duration(left)} left"
                    if name == STOCK:
                        line += f"; then the patched server, about {format_duration(seconds + left)}"
                update(seconds, line)

            outcome = gsm8k.evaluate(url, client, self.evaluation, work, watch)
        return Run(
            name=name,
            engine=release,
            command=command,
            answers=tuple(Answer(**{**answer, "tokens": tuple(answer["tokens"])}) for answer in outcome["answers"]),
            startup_s=0.0,
            latency_s=outcome["latency_s"],
            input_tokens=outcome["input_tokens"],
            output_tokens=outcome["output_tokens"],
            memory=None,
            changes=(),
        )


def format_duration(seconds: float) -> str:
    """Format a duration in seconds, minutes or hours, with about two digits."""
    if seconds < 100:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 100 * 60 else f"{seconds / 3600:.1f} h"


def _failure_type(name: str) -> type[CannotRun | PatchedFailed]:
    return CannotRun if name == STOCK else PatchedFailed


def _engine_release(url: str) -> str:
    """Ask a running server for its engine's release, and return the release.

    :raises CannotRun: no engine answers at ``url``.
    """
    import httpx

    try:
        info = httpx.get(f"{url}/get_server_info", timeout=30).raise_for_status().json()
    except (httpx.HTTPError, ValueError) as error:
        raise CannotRun(f"no SGLang server answers at {url}: {error}") from None
    return str(info.get("version", "unknown"))
