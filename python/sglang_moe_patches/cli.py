"""``sglang-moe-patches``: look at an engine, and prove stock and patched equal."""

from __future__ import annotations

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
from sglang_moe_patches.lab.predict import engine_query, model_report
from sglang_moe_patches.lab.predict.engine_query import GPUS
from sglang_moe_patches.registry import CHANGES

app = typer.Typer(
    help="""Memory and correctness patches for SGLang's mixture-of-experts layers.

Installing the package patches every `sglang serve` of its environment; nothing has to be turned on.

SGLANG_MOE_PATCHES = all (default) | none | a comma-separated list of changes: which changes are applied.

SGLANG_MOE_PATCHES_STRICT = 1: a selected change that cannot be applied ends the start-up.
""",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)

# What follows `--` on the command line belongs to the engine, whatever it looks like.
PASS_THROUGH = {"ignore_unknown_options": True, "allow_interspersed_args": False}

REGRESS_EXTRA = ("scipy", "psutil", "httpx", "jinja2")
"""The modules that `regress` needs beyond what serving does: the package's extra."""


def fail(message: str, code: int = 2) -> NoReturn:
    """End with one clear line and a non-zero exit."""
    typer.echo(f"sglang-moe-patches: {message}", err=True)
    raise typer.Exit(code)


def require_engine() -> None:
    version = engine.version()
    if version is None:
        fail("SGLang is not installed in this environment; pip install sglang")
    if not engine.has_plugin_framework():
        fail(f"SGLang {version} has no plugin framework ({engine.PLUGIN_MODULE}); install SGLang 0.5.11 or newer")
    if not engine.is_plugin_registered():
        fail("the engine does not find this package; pip install it into the engine's environment")


@contextmanager
def progress(text: str) -> Iterator[None]:
    """Show what is being done. Nothing is shown where standard error is no terminal."""
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
            help="Folder with config.json, that file, or a Hugging Face name: published models, the local cache."
        ),
    ] = None,
    gpu: Annotated[str, typer.Option(help=f"With --model: {', '.join(GPUS)}; none need be there.")] = "h200",
    json: Annotated[bool, typer.Option("--json", help="Machine-readable output.")] = False,
) -> None:
    """Show the engine, the GPU, each change's status in a server without flags, and the variables in force.

    Exits with 1 if a selected change cannot be applied to this engine, with 2 if a variable has a value with which no
    server starts.

    With --model: what a server of that model would run, without starting one.
    Example: sglang-moe-patches doctor --model Qwen/Qwen3-30B-A3B-FP8 --gpu h100
    -- --tp 2 --chunked-prefill-size 16384

    Reads config.json alone: no weights, no GPU. The installed engine is asked
    which runner and format it would choose on such a GPU. Shown are the changes
    that act, the reason where one does not, the peak of a first prefill chunk,
    stock and patched, term by term, and what is not known. docs/commands/models.md has
    this for models that people serve.

    Says first whether the server starts: weights, what the fraction leaves,
    KV tokens. Exits with 1 where it does not for want of memory; with 2 where
    there is no config.json, the model has no routed experts, a variable is
    misspelt, or the engine refuses the model or the arguments: then with its
    own words.
    """
    if model is not None:
        advise(model, server_args or [], gpu, json)
        return
    if server_args:
        fail("SERVER_ARGS need --model: give --model before the `--`")
    from sglang_moe_patches.lab import doctor

    require_engine()
    try:
        with progress("importing the engine and probing what each change wraps: about 10 s"):
            report = doctor.examine()
    except ValueError as error:
        fail(str(error))
    except doctor.EngineUnusable as error:
        fail(str(error), 1)
    if json:
        typer.echo(json_module.dumps(report, indent=2))
    else:
        doctor.show(report)
    statuses = {status for change in report["changes"] for status in (change["status"], change["engine"]["status"])}
    raise typer.Exit(patch.Status.UNSUPPORTED in statuses)


def advise(model: str, server_args: list[str], gpu: str, json: bool) -> None:
    """``doctor --model``."""
    doing = f"SGLang {engine.version()} resolves the arguments and builds layers without memory: about 10 s"
    try:
        patch.check_environment(CHANGES)
        with progress(doing):
            report = model_report.examine(model, server_args, gpu)
    except engine_query.Refused as error:
        fail(f"the engine refuses this server: {error}")
    except engine_query.CannotAsk as error:
        fail(f"the engine cannot be asked without a GPU: {error}")
    except ValueError as error:  # no config.json, arguments or variables
        fail(str(error))
    if json:
        typer.echo(json_module.dumps(report, indent=2))
    else:
        model_report.show(report)
    raise typer.Exit(report["fit"] is not None and not report["fit"]["starts"])


@app.command(context_settings=PASS_THROUGH)
def regress(
    server_args: Annotated[
        list[str] | None,
        typer.Argument(metavar="[-- SERVER_ARGS...]", help="Server arguments for both servers, after `--`."),
    ] = None,
    model: Annotated[str | None, typer.Option(help="Checkpoint folder or Hugging Face name.")] = None,
    data_path: Annotated[
        Path | None, typer.Option(help="GSM8K's test.jsonl; without it the engine downloads the file.")
    ] = None,
    num_questions: Annotated[
        int | None,
        typer.Option(min=1, help="How many of the first questions to ask. Default: as many as --max-drop needs."),
    ] = None,
    num_shots: Annotated[int, typer.Option(min=0, help="Worked examples in front of each question.")] = 5,
    max_new_tokens: Annotated[int, typer.Option(min=1, help="Longest answer, in tokens.")] = 512,
    parallel: Annotated[int, typer.Option(min=1, help="Requests in flight at once.")] = 64,
    output: Annotated[Path, typer.Option(help="Folder for report.json, report.html and the logs.")] = Path(
        "regress-report"
    ),
    max_drop: Annotated[
        float,
        typer.Option(
            min=0.1, max=90, help="Points of accuracy that may be lost: no worse means, by no more than that."
        ),
    ] = 3.0,
    alpha: Annotated[
        float, typer.Option(min=1e-6, max=0.5, help="Significance level of the one-sided tests: of worse, of no worse.")
    ] = 0.05,
    require_identical: Annotated[
        bool,
        typer.Option("--require-identical", help="Call it worse when any answer differs; on a GPU, add --parallel 1."),
    ] = False,
    baseline_url: Annotated[str | None, typer.Option(help="A stock server that already runs.")] = None,
    patched_url: Annotated[str | None, typer.Option(help="A patched server that already runs.")] = None,
    startup_timeout: Annotated[float, typer.Option(min=1, help="Seconds a server may take to get ready.")] = 1800,
    port: Annotated[int | None, typer.Option(help="Port of the servers on 127.0.0.1. Default: a free one.")] = None,
) -> None:
    """Serve a model stock and patched, evaluate both on GSM8K, and compare.

    Example: sglang-moe-patches regress --model nvidia/Kimi-K2.5-NVFP4
    --data-path test.jsonl -- --tp 4 --quantization modelopt_fp4
    --moe-runner-backend flashinfer_trtllm_routed

    Starts the stock server (SGLANG_MOE_PATCHES=none), runs the engine's own
    GSM8K evaluation at temperature 0, ends it, does the same with the patched
    server, and reports accuracy with McNemar's exact test and the interval of
    its drop, the questions whose answers differ, throughput and memory side by
    side.

    Refused as server arguments, because one command on this machine is not the
    whole server: --nnodes above 1, --use-ray, --disaggregation-mode,
    --checkpoint-engine-wait-weights-before-ready. Start both servers yourself
    and give --baseline-url and --patched-url.

    Refused because both servers listen on 127.0.0.1 alone and are asked over
    plain HTTP: --ssl-*, --api-key, --admin-api-key, --grpc-mode, --host, --port,
    --model, --model-path (give --model and --port before the `--`).

    Refused because there is nothing to ask or to compare: --is-embedding,
    --encoder-only, --skip-tokenizer-init; and --delete-ckpt-after-loading,
    because the second server needs the checkpoint, too.

    Ctrl-C or another signal ends the servers, and so does the end of this
    process, however it comes.

    Exit code: 0 no worse by more than --max-drop; 1 worse, or only the patched
    server failed; 2 a run could not be made, or it is inconclusive: neither is
    shown, and how many questions it takes is said.
    """
    if missing := [name for name in REGRESS_EXTRA if util.find_spec(name) is None]:
        fail(f"regress needs {', '.join(missing)}: pip install '.[regress]' in a clone of sglang-moe-patches")
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
        fail(f"worse: the patched server failed where the stock one answered. {error}", 1)
    except KeyboardInterrupt:
        fail("interrupted; the servers are stopped and no report was written", 130)
    typer.echo(f"Report: {output / 'report.html'}")
    if not comparison.conclusive:
        fail(f"inconclusive: {report.explain_inconclusive(comparison)}", comparison.exit_code)
    raise typer.Exit(comparison.exit_code)


def main(app: typer.Typer = app) -> None:
    """Run a command line; what nobody foresaw ends with 2."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")  # a terminal that has no such letter ends no command
    try:
        app()
    except Exception:  # exit code 1 means something else here: a change that cannot be applied, or a worse server
        traceback.print_exc()
        sys.exit(2)


if __name__ == "__main__":
    main()
