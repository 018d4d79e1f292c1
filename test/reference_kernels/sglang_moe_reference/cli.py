"""``sglang-moe-reference``: run the engine on the reference kernels, and write tiny models for it."""

from __future__ import annotations

import functools
import os
import sys
from pathlib import Path
from typing import Annotated, Any, NoReturn

import typer
from sglang_moe_patches import cli

from sglang_moe_reference import environment
from sglang_moe_reference.families import FAMILIES, OF_FAMILY, ModelSpec

app = typer.Typer(
    help="""Run SGLang without a Blackwell GPU, or without any: plain PyTorch replaces FlashInfer's NVFP4 kernels.

Slow; for comparing servers only. Without a GPU this puts a stub CUDA driver ("no device") on LD_LIBRARY_PATH, built
once into a cache folder, and sets the variables that make the engine run on the CPU. The engine itself is not modified.
""",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def fail(message: str, code: int = 2) -> NoReturn:
    """Print an error message of one line, and end with a non-zero exit code."""
    typer.echo(f"sglang-moe-reference: {message}", err=True)
    raise typer.Exit(code)


def child_environment() -> dict[str, str]:
    """Return this process's environment with the variables that an engine process needs."""
    cli.require_engine()
    try:
        return {**os.environ, **environment.variables()}
    except environment.UnusableEnvironment as error:
        fail(str(error))


@app.command(context_settings=cli.PASS_THROUGH)
def exec(command: Annotated[list[str], typer.Argument(metavar="-- COMMAND...", help="After `--`.")]) -> None:
    """Run any command in an environment in which the engine works without a Blackwell GPU.

    Example: sglang-moe-reference exec -- python my_script_with_sgl_Engine.py
    """
    variables = child_environment()
    try:
        os.execvpe(command[0], command, variables)
    except FileNotFoundError:
        fail(f"no such command: {command[0]}", 127)


@app.command(context_settings=cli.PASS_THROUGH)
def serve(
    server_args: Annotated[
        list[str], typer.Argument(metavar="-- SERVER_ARGS...", help="Arguments of sglang.launch_server, after `--`.")
    ],
) -> None:
    """Start `python -m sglang.launch_server`.

    Example: sglang-moe-reference serve -- --model-path ./tiny --quantization modelopt_fp4
    --moe-runner-backend flashinfer_trtllm_routed

    Without a GPU, the flags that the engine needs on a CPU are added (--device cpu, ...), unless they are set.
    """
    arguments = environment.server_arguments(server_args)
    os.execve(sys.executable, [sys.executable, "-m", "sglang.launch_server", *arguments], child_environment())


@app.command(context_settings=cli.PASS_THROUGH)
@functools.wraps(cli.regress)
def regress(**given: Any) -> None:
    if given["model"] is not None:
        given["server_args"] = environment.server_arguments(given["server_args"] or [])
    os.environ.update(child_environment())
    cli.regress(**given)


@app.command("make-model")
def make_model(
    directory: Annotated[Path, typer.Argument(help="Where to write the checkpoint; must be new or empty.")],
    family: Annotated[str, typer.Option(help=f"Architecture: {', '.join(FAMILIES)}.")] = "deepseek-v3",
    bf16: Annotated[bool, typer.Option("--bf16", help="Routed experts in bfloat16 instead of NVFP4.")] = False,
    layers: Annotated[int, typer.Option(help="Decoder layers.")] = 4,
    dense_layers: Annotated[
        int | None,
        typer.Option(
            help="First layers without experts (first_k_dense_replace). Default: 1 where the family has them."
        ),
    ] = None,
    experts: Annotated[int, typer.Option(help="Routed experts per MoE layer.")] = 8,
    top_k: Annotated[int, typer.Option(help="Routed experts per token.")] = 2,
    hidden: Annotated[int, typer.Option(help="Hidden size, a multiple of 128.")] = 256,
    moe_intermediate: Annotated[int, typer.Option(help="Intermediate size of an expert, a multiple of 128.")] = 128,
    nextn: Annotated[bool, typer.Option("--nextn", help="Add a NextN (MTP) draft layer (deepseek-v3).")] = False,
    seed: Annotated[int, typer.Option(help="Seed of the random weights.")] = 0,
) -> None:
    """Write a tiny checkpoint with random weights that the stock engine can load. Its experts are NVFP4 unless --bf16
    is given."""
    from sglang_moe_reference.model import make_model as write

    try:
        spec = ModelSpec(
            family=family,
            layers=layers,
            dense_layers=OF_FAMILY if dense_layers is None else dense_layers,
            experts=experts,
            top_k=top_k,
            hidden=hidden,
            moe_intermediate=moe_intermediate,
            nextn=nextn,
            seed=seed,
        )
        write(directory, spec, quantized=not bf16)
    except (ValueError, OSError) as error:
        fail(f"make-model: {error}")
    typer.echo(f"{directory}: {sum(f.stat().st_size for f in directory.iterdir()) / 2**20:.1f} MiB")


def main() -> None:
    cli.main(app)


if __name__ == "__main__":
    main()
