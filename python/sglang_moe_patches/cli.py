"""The command ``sglang-moe-patches``: ``doctor`` examines an engine, ``regress`` compares two servers."""

from __future__ import annotations

import difflib
import io
import json as json_module
import os
import sys
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import util
from pathlib import Path
from typing import Annotated, NoReturn

import typer

from sglang_moe_patches import __version__
from sglang_moe_patches.core import engine, patch
from sglang_moe_patches.lab.predict import engine_query, model_report, room, terminal
from sglang_moe_patches.lab.predict.engine_query import GPUS
from sglang_moe_patches.registry import CHANGES

app = typer.Typer(
    help="""Memory and correctness patches for SGLang's mixture-of-experts layers.

The installed package patches every `sglang serve` of its Python environment. No flag is needed.

SGLANG_MOE_PATCHES = all (default) | none | a comma-separated list of changes: the changes to apply.

SGLANG_MOE_PATCHES_STRICT = 1: end the server's start if a selected change cannot be applied.
""",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)

# Arguments after `--` are server arguments, even if they look like options of this command.
PASS_THROUGH = {"ignore_unknown_options": True, "allow_interspersed_args": False}

REGRESS_EXTRA = ("scipy", "psutil", "httpx", "jinja2")
"""Names of modules that the command ``regress`` needs. The package's extra ``regress`` installs them. A server does not
need them."""


def fail(message: str, code: int = 2) -> NoReturn:
    """Print one line on standard error, and end with a non-zero exit code."""
    typer.echo(f"sglang-moe-patches: {message}", err=True)
    raise typer.Exit(code)


def refuse(message: str, code: int = 2, *, json: bool) -> NoReturn:
    """Report that the command cannot do what was asked, and end with a non-zero exit code.

    :param json: whether to write the message as a JSON object to standard output, instead of one line to standard
        error.
    """
    if json:
        typer.echo(json_module.dumps({"refused": message}))
        raise typer.Exit(code)
    fail(message, code)


DOCTOR_OPTIONS = ("--model", "--gpu", "--json", "--help")


def find_misspelt_option(arguments: list[str]) -> str:
    """Return an error message if an argument is a misspelt option of ``doctor``, else an empty text.

    The message suggests the right spelling.
    """
    for argument in arguments:
        option = argument.split("=")[0]
        near = difflib.get_close_matches(option, DOCTOR_OPTIONS, n=1, cutoff=0.8)
        if option.startswith("--") and option not in DOCTOR_OPTIONS and near:
            return f"there is no option {option}; did you mean {near[0]}?"
    return ""


def require_engine() -> None:
    version = engine.version()
    if version is None:
        fail("SGLang is not installed in this environment; pip install sglang")
    if not engine.has_plugin_framework():
        fail(f"SGLang {version} has no plugin framework ({engine.PLUGIN_MODULE}); install SGLang 0.5.11 or newer")
    if not engine.is_plugin_registered():
        fail("the engine does not find this package; pip install it into the engine's environment")


@contextmanager
def show_progress(text: str) -> Iterator[None]:
    """Show a text with a spinner while the ``with`` block runs. If standard error is not a terminal, show nothing."""
    from rich.console import Console

    with Console(stderr=True).status(text):
        yield


@app.callback(invoke_without_command=True)
def callback(
    version: Annotated[bool, typer.Option("--version", help="Show the version and exit.")] = False,
) -> None:
    if version:
        typer.echo(__version__)
        raise typer.Exit()


@app.command(context_settings=PASS_THROUGH)
def doctor(
    server_args: Annotated[
        list[str] | None, typer.Argument(metavar="[-- SERVER_ARGS...]", help="Server arguments, after `--`.")
    ] = None,
    model: Annotated[
        str | None,
        typer.Option(
            help="Folder with config.json, path of this file, or Hugging Face name. For a name, config.json comes from "
            "the local cache or from a built-in list."
        ),
    ] = None,
    gpu: Annotated[
        str | None,
        typer.Option(
            help="With --model: GPU on which the server would run. This machine does not need one. Values: "
            f"{', '.join(GPUS)}. h100:94GB is an h100 with 94 GB of memory. Default: h200."
        ),
    ] = None,
    json: Annotated[bool, typer.Option("--json", help="Machine-readable output.")] = False,
) -> None:
    """Show the engine, the GPU, each change's status in a server without flags, and the variables in force.

    Exit code: 1 if a selected change cannot be applied to this engine; 2 if the
    value of an environment variable prevents every server from starting.

    With --model, show instead whether a server of that model starts, whether its
    memory suffices, and which changes act in it.
    Example: sglang-moe-patches doctor --model Qwen/Qwen3-30B-A3B-FP8 --gpu h100
    -- --tp 2 --chunked-prefill-size 16384

    --model needs only config.json: no weights, no GPU. The installed engine says
    which MoE runner and weight format it would choose on the GPU of --gpu. The
    first line compares two amounts of memory: what weights and KV cache leave
    free, and what CUDA graphs and forward passes need. The last lines are
    settings to copy. docs/commands/models.md explains the other lines.

    Exit code with --model: 1 if the server does not start; 2 if there is no
    config.json, the model has no routed experts, a variable or an option is
    misspelt, or the engine refuses the model or the arguments.
    """
    if misspelt := find_misspelt_option(server_args or []):
        refuse(misspelt, json=json)
    if model is not None:
        advise(model, server_args or [], gpu or "h200", json)
        return
    if server_args:
        refuse("SERVER_ARGS need --model: give --model before the `--`", json=json)
    if gpu is not None:
        typer.echo("sglang-moe-patches: --gpu has no effect without --model", err=True)
    from sglang_moe_patches.lab import doctor

    require_engine()
    try:
        with show_progress("importing the engine and checking the functions that each change wraps: about 10 s"):
            report = doctor.examine()
    except ValueError as error:
        refuse(str(error), json=json)
    except doctor.EngineUnusable as error:
        refuse(str(error), 1, json=json)
    if json:
        typer.echo(json_module.dumps(report, indent=2))
    else:
        doctor.show(report)
    statuses = {status for change in report["changes"] for status in (change["status"], change["engine"]["status"])}
    raise typer.Exit(patch.Status.UNSUPPORTED in statuses)


def advise(model: str, server_args: list[str], gpu: str, json: bool) -> None:
    """Run ``doctor --model``: examine a server of a model, print the report, and exit."""
    doing = f"SGLang {engine.version()} resolves the arguments and builds layers without allocating memory: about 10 s"
    try:
        patch.check_environment(CHANGES)
        with show_progress(doing):
            report = model_report.examine(model, server_args, gpu)
    except engine_query.Refused as error:
        refuse(f"the engine refuses this server: {error}", json=json)
    except engine_query.CannotAsk as error:
        refuse(f"the engine could not examine this server without a GPU: {error}", json=json)
    except ValueError as error:  # no config.json, or a wrong argument or variable
        refuse(str(error), json=json)
    if json:
        typer.echo(json_module.dumps(report, indent=2))
    else:
        terminal.show(report)
    raise typer.Exit(bool(report["room"]) and report["room"]["patched"]["verdict"] == room.DOES_NOT_START)


@app.command(context_settings=PASS_THROUGH)
def regress(
    server_args: Annotated[
        list[str] | None,
        typer.Argument(metavar="[-- SERVER_ARGS...]", help="Server arguments for both servers, after `--`."),
    ] = None,
    model: Annotated[str | None, typer.Option(help="Checkpoint folder or Hugging Face name.")] = None,
    data_path: Annotated[
        Path | None, typer.Option(help="GSM8K's test.jsonl. Default: the engine downloads the file.")
    ] = None,
    num_questions: Annotated[
        int | None,
        typer.Option(min=1, help="Number of questions, from the first one on. Default: as many as --max-drop needs."),
    ] = None,
    num_shots: Annotated[int, typer.Option(min=0, help="Number of worked examples in front of each question.")] = 5,
    max_new_tokens: Annotated[int, typer.Option(min=1, help="Maximum length of an answer, in tokens.")] = 512,
    parallel: Annotated[int, typer.Option(min=1, help="Maximum number of concurrent requests.")] = 64,
    output: Annotated[Path, typer.Option(help="Folder for report.json, report.html and the logs.")] = Path(
        "regress-report"
    ),
    max_drop: Annotated[
        float,
        typer.Option(min=0.1, max=90, help="Allowed drop in accuracy, in percentage points."),
    ] = 3.0,
    alpha: Annotated[
        float,
        typer.Option(
            min=1e-6,
            max=0.5,
            help='Significance level of the two one-sided tests: one for the verdict "worse", one for "no worse".',
        ),
    ] = 0.05,
    require_identical: Annotated[
        bool,
        typer.Option("--require-identical", help="Exit with 1 if any answer differs. On a GPU, add --parallel 1."),
    ] = False,
    baseline_url: Annotated[str | None, typer.Option(help="URL of a running stock server, instead of --model.")] = None,
    patched_url: Annotated[
        str | None, typer.Option(help="URL of a running patched server, instead of --model.")
    ] = None,
    startup_timeout: Annotated[
        float, typer.Option(min=1, help="Maximum time in which a server must become ready, in seconds.")
    ] = 1800,
    port: Annotated[int | None, typer.Option(help="Port of both servers on 127.0.0.1. Default: a free port.")] = None,
) -> None:
    """Compare a stock server and a patched server of a model on GSM8K.

    Example: sglang-moe-patches regress --model nvidia/Kimi-K2.5-NVFP4
    --data-path test.jsonl -- --tp 4 --quantization modelopt_fp4
    --moe-runner-backend flashinfer_trtllm_routed

    regress starts the stock server (SGLANG_MOE_PATCHES=none), runs the engine's
    own GSM8K evaluation at temperature 0, and ends the server. Then regress does
    the same with the patched server. The report compares accuracy, answers,
    throughput and memory.

    regress rejects these server arguments after the `--`:

    --nnodes above 1, --use-ray, --disaggregation-mode,
    --checkpoint-engine-wait-weights-before-ready: one command on this machine
    cannot start such servers. Start both servers yourself, and give
    --baseline-url and --patched-url.

    --ssl-*, --api-key, --admin-api-key, --grpc-mode, --host: both servers listen
    only on 127.0.0.1 and receive requests over plain HTTP.

    --port, --model, --model-path: give --port and --model before the `--`.

    --is-embedding, --encoder-only, --skip-tokenizer-init: a server with one of
    these arguments generates no text.

    --delete-ckpt-after-loading: the second server needs the checkpoint, too.

    The servers end with this process, also after Ctrl-C or another signal.

    Exit code: 0 if the patched server is no worse by more than --max-drop; 1 if
    the patched server is worse, or if only the patched server failed; 2 after an
    error or an inconclusive result. The last line then says what to change.
    """
    if missing := [name for name in REGRESS_EXTRA if util.find_spec(name) is None]:
        modules = ", ".join(missing)
        fail(
            f"regress needs modules that are not installed ({modules}): pip install '.[regress]' in a clone of "
            "sglang-moe-patches"
        )
    from rich.console import Console

    from sglang_moe_patches.lab.regress import regress as regression
    from sglang_moe_patches.lab.regress import report
    from sglang_moe_patches.lab.servers.spec import ServerSpec

    subject: ServerSpec | regression.Addresses
    if model is not None and baseline_url is None and patched_url is None:
        subject = ServerSpec(model, tuple(server_args or ()), startup_timeout, port)
    elif model is None and baseline_url is not None and patched_url is not None:
        subject = regression.Addresses(baseline_url, patched_url)
    else:
        fail("give either --model, or both --baseline-url and --patched-url")
    criterion = regression.Criterion(require_identical, alpha, max_drop)
    require_engine()
    try:
        if num_questions is None:
            num_questions = regression.default_questions(data_path, criterion)
        comparison = regression.run(
            subject,
            regression.Evaluation(data_path, num_questions, num_shots, max_new_tokens, parallel),
            criterion,
            environment=dict(os.environ),
            output=output,
            console=Console(),
        )
    except regression.CannotRun as error:
        fail(str(error))
    except regression.PatchedFailed as error:
        fail(f"worse: the patched server failed, but the stock server answered all questions; {error}", 1)
    except KeyboardInterrupt:
        fail("interrupted; the servers are stopped and no report was written", 130)
    typer.echo(f"Report: {output / 'report.html'}")
    if not comparison.conclusive:
        fail(f"inconclusive: {report.explain_inconclusive(comparison)}", comparison.exit_code)
    raise typer.Exit(comparison.exit_code)


def main(app: typer.Typer = app) -> None:
    """Run the command line. If an unforeseen exception occurs, exit with 2."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")  # a character that the terminal cannot show must not end the command
    try:
        app()
    except Exception:  # Python would exit with 1, which means an unsupported change or a worse server
        traceback.print_exc()
        sys.exit(2)


if __name__ == "__main__":
    main()
