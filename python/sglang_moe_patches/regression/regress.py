"""Serve stock and patched, evaluate both, compare, report."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from sglang_moe_patches import patch
from sglang_moe_patches.regression import gsm8k, observe
from sglang_moe_patches.regression.compare import Answer, Comparison, Memory, Run, compare, smallest_sample
from sglang_moe_patches.regression.server import Server, ServerFailed, port_in_use

OWN_ARGUMENTS = ("--host", "--port", "--model", "--model-path")


class CannotRun(RuntimeError):
    """A run could not be made. The message says what to change, or carries the end of the server's log."""


class PatchedFailed(RuntimeError):
    """The patched server failed to start or to answer where the stock server did not: that is worse."""


@dataclass(frozen=True)
class Evaluation:
    """How both servers are asked.

    :param parallel: requests in flight at once.
    """

    data_path: Path | None
    questions: int
    shots: int
    max_new_tokens: int
    parallel: int


def check(
    evaluation: Evaluation,
    model: str | None,
    server_arguments: list[str],
    port: int | None,
    *,
    require_identical: bool,
    alpha: float,
) -> None:
    """Find out what is wrong before a minute is spent on starting a server.

    :raises CannotRun: one line that names the argument and what to give instead.
    """
    if evaluation.data_path is not None:
        try:
            gsm8k.check_questions(evaluation.data_path, evaluation.questions, evaluation.shots)
        except gsm8k.DataError as error:
            raise CannotRun(str(error)) from None
    if not require_identical and evaluation.questions < smallest_sample(alpha):
        raise CannotRun(
            f"{evaluation.questions} questions cannot show a drop in accuracy at --alpha {alpha:g}; ask at least "
            f"{smallest_sample(alpha)} (--num-questions), or compare answers one by one (--require-identical)"
        )
    for argument in server_arguments:
        if argument.split("=", 1)[0] in OWN_ARGUMENTS:
            raise CannotRun(f"{argument}: give --model and --port before the `--`; the servers listen on 127.0.0.1")
    if port is not None and port_in_use(port):
        raise CannotRun(f"port {port} is in use; choose another --port, or leave it out for a free one")
    if model is None:
        return
    looks_local = model.startswith(("/", ".", "~")) or model.count("/") != 1
    if (looks_local or Path(model).exists()) and not (Path(model).expanduser() / "config.json").is_file():
        raise CannotRun(f"{model}: no model there (no config.json); --model takes a folder or a Hugging Face name")


def evaluate_servers(
    model: str,
    server_arguments: list[str],
    environment: dict[str, str],
    evaluation: Evaluation,
    *,
    engine: str,
    timeout: float,
    port: int | None,
    console: Any,
    logs: Path,
) -> list[Run]:
    """Start the stock server, evaluate it, end it; then the same for the patched one.

    One after the other: on a GPU they would not fit side by side, and on any machine they would slow each other down.

    The servers' logs stay in ``logs``, which the caller keeps.

    :raises CannotRun: the stock server did not start or could not be evaluated.
    :raises PatchedFailed: the stock server answered everything and the patched one did not start or not answer.
    """
    arguments = ["--model-path", str(Path(model).expanduser()) if Path(model).expanduser().exists() else model]
    arguments += server_arguments
    runs = []
    failure: type[RuntimeError]
    for name, failure in (("stock", CannotRun), ("patched", PatchedFailed)):
        with tempfile.TemporaryDirectory(prefix="sglang-moe-patches-") as scratch:
            work = Path(scratch)
            observed = work / "observed"
            observed.mkdir()
            child = {**environment, observe.VARIABLE: str(observed)}
            if name == "stock":
                child[patch.SELECT_VARIABLE] = "none"
            server = Server(name, arguments, child, logs / f"{name}.log", timeout=timeout, port=port)
            with ExitStack() as stack:
                try:
                    with _progress(server, console):
                        stack.enter_context(server)
                except ServerFailed as error:
                    raise failure(str(error)) from error
                console.print(f"{name}: ready after {server.startup_s:.0f} s; asking {evaluation.questions} questions")
                try:
                    found = _evaluate(server.url, child, evaluation, work)
                    server.check()
                except RuntimeError as error:
                    message = str(error) if isinstance(error, ServerFailed) else f"{error}\n{server.log_tail()}"
                    raise failure(message) from error
            figures = observe.collect(observed) or {"changes": ()}
            changes = tuple(tuple(change) for change in figures.pop("changes"))
            if name == "patched" and not changes:
                raise CannotRun(
                    "the patched server did not load this package's plugin, so nothing was compared; "
                    f"is {environment.get('SGLANG_PLUGINS', '')!r} in SGLANG_PLUGINS right? {server.log_tail()}"
                )
            runs.append(
                replace(
                    _run(name, found, engine, tuple(server.command)),
                    startup_s=server.startup_s,
                    memory=Memory(**figures) if figures else None,
                    changes=changes,
                )
            )
    return runs


def evaluate_urls(urls: dict[str, str], environment: dict[str, str], evaluation: Evaluation) -> list[Run]:
    """Evaluate two servers that run already.

    :param urls: ``{"stock": url, "patched": url}``.
    """
    import httpx

    runs = []
    for name, url in urls.items():
        try:
            info = httpx.get(f"{url.rstrip('/')}/get_server_info", timeout=30).raise_for_status().json()
        except (httpx.HTTPError, ValueError) as error:
            raise CannotRun(f"{url}: no SGLang server answers there: {error}") from None
        with tempfile.TemporaryDirectory(prefix="sglang-moe-patches-") as scratch:
            try:
                found = _evaluate(url.rstrip("/"), environment, evaluation, Path(scratch))
            except RuntimeError as error:
                raise (CannotRun if name == "stock" else PatchedFailed)(str(error)) from error
        runs.append(_run(name, found, str(info.get("version", "unknown")), (url,)))
    return runs


def finish(runs: list[Run], *, require_identical: bool, alpha: float, output: Path, logs: Path | None) -> Comparison:
    """Compare, and write the report with the servers' logs beside it."""
    from sglang_moe_patches.regression import report

    comparison = compare(runs[0], runs[1], require_identical=require_identical, alpha=alpha)
    report.write(comparison, output)
    if logs:
        keep_logs(logs, output)
    return comparison


def keep_logs(logs: Path, output: Path) -> None:
    """Copy the servers' logs beside the report, or where it would have been."""
    for log in sorted(logs.glob("*.log")):
        output.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(log, output / log.name)


def _evaluate(url: str, environment: dict[str, str], evaluation: Evaluation, work: Path) -> dict[str, Any]:
    return gsm8k.evaluate(
        url,
        # The client is no engine process: it must not observe or patch anything.
        {k: v for k, v in environment.items() if k not in (observe.VARIABLE, patch.SELECT_VARIABLE)},
        data_path=evaluation.data_path,
        questions=evaluation.questions,
        shots=evaluation.shots,
        max_new_tokens=evaluation.max_new_tokens,
        parallel=evaluation.parallel,
        work=work,
    )


def _run(name: str, found: dict[str, Any], engine: str, command: tuple[str, ...]) -> Run:
    return Run(
        name=name,
        engine=engine,
        command=command,
        answers=tuple(Answer(**{**answer, "tokens": tuple(answer["tokens"])}) for answer in found["answers"]),
        startup_s=0.0,
        latency_s=found["latency_s"],
        input_tokens=found["input_tokens"],
        output_tokens=found["output_tokens"],
        memory=None,
        changes=(),
    )


@contextmanager
def _progress(server: Server, console: Any) -> Iterator[None]:
    """Show how long the server has been starting, and the last line of its log, until it is ready."""
    with console.status(f"{server.name}: starting") as status:

        def show(seconds: float, line: str) -> None:
            status.update(f"{server.name}: starting, {seconds:.0f} s  [dim]{line[:100].replace('[', '(')}[/]")
            if os.environ.get("CI") and int(seconds * 2) % 60 == 0:
                console.print(f"{server.name}: starting, {seconds:.0f} s")

        server.progress = show
        yield
