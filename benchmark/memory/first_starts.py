"""Run the servers of the README's table: each stock and patched, one after the other, in one call on one machine.

    python benchmark memory/first_starts --list
    python benchmark memory/first_starts --results benchmark/results/first-starts
    python benchmark memory/first_starts --rows qwen3-30b,kimi-k2.5 --work work --results results
    python benchmark memory/first_starts --quick  # a tiny model, CPU: does it run?

Every server is a first start with the engine's defaults and random weights. `benchmark/memory/serving.py` runs each
row. The result file of a row also has the commit of this repository. To divide the rows among several GPUs, start this
script several times with different `--rows`. If a row fails, the script continues with the next row.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any, NamedTuple

from common import output

ROOT = Path(__file__).parents[1]
H100_FREE_MIB = 80_943
"""Free memory of an idle H100 in MiB. Its total memory is 81,559 MiB."""
H100_FRACTION = 0.83
"""``--mem-fraction-static`` that SGLang 0.5.12.post1 computes on an H100 for prefill chunks of 8,192 tokens."""


class Row(NamedTuple):
    """One row of the README's table: a model on its GPUs, served stock and patched.

    :param server: model and GPUs, as the table names them.
    :param as_run: part of the model that runs; "whole" if nothing was left out.
    :param load: requests of the load, in words.
    :param arguments: arguments of ``benchmark/memory/serving.py``.
    :param server_arguments: arguments of the server, in addition to those that ``benchmark/memory/serving.py`` gives
        every server.
    :param predicted_tokens: predicted KV cache sizes of the stock and of the patched server, in tokens.
    :param gpus: number of GPUs of the server. On a machine with fewer GPUs, the row is skipped.
    """

    server: str
    as_run: str
    load: str
    arguments: tuple[str, ...]
    server_arguments: tuple[str, ...] = ("--sampling-backend", "flashinfer")
    predicted_tokens: tuple[int | None, int | None] = (None, None)
    gpus: int = 1


def model(name: str, layers: int, *, shard: int = 1, context: int = 65_536) -> tuple[str, ...]:
    """Return arguments of ``benchmark/memory/serving.py`` for a model, with the engine's default limits and prefill
    chunks of 8,192 tokens.
    """
    sizes = ("--shard", str(shard), "--layers", str(layers), "--context", str(context))
    return ("--model", name, *sizes, "--chunk", "8192", "--requests", "0")


def load(requests: int, tokens: str, new_tokens: int) -> tuple[str, ...]:
    return ("--prompts", str(requests), "--input", tokens, "--output", str(new_tokens))


LIKE_AN_H100 = ("--leave-free", str(H100_FREE_MIB))
H100_ARGUMENTS = ("--mem-fraction-static", str(H100_FRACTION), "--sampling-backend", "flashinfer")
QWEN3 = (*model("qwen3-30b", 48, context=40_960), *load(200, "1000,3000", 512))
QWEN3_235B = (*model("qwen3-235b-fp8", 94, context=262_144), "--tp", "4", *load(200, "2000,5000", 256))
QWEN3_235B_ARGUMENTS = ("--fp8-gemm-backend", "triton", "--sampling-backend", "flashinfer")
GPT_OSS = (*model("gpt-oss-120b-mxfp4", 36, context=131_072), *load(100, "1000,3000", 256))

ROWS = {
    "qwen3-30b-h100-memory": Row(
        *("Qwen3-30B-A3B, 1 x H200 with an H100's free memory", "whole", "200 requests"),
        (*QWEN3, *LIKE_AN_H100, "--sweep", "25,50,100"),
        H100_ARGUMENTS,
        (88_745, 159_000),
    ),
    "gpt-oss-120b-h100-memory": Row(
        *("gpt-oss-120b, 1 x H200 with an H100's free memory", "whole", "100 requests"),
        (*GPT_OSS, *LIKE_AN_H100),
        H100_ARGUMENTS,
        (None, 122_879),
    ),
    "qwen3-30b": Row("Qwen3-30B-A3B, 1 x H200", "whole", "200 requests", QWEN3, predicted_tokens=(750_511, 798_000)),
    "gpt-oss-120b": Row(
        *("gpt-oss-120b, 1 x H200", "whole", "100 requests", GPT_OSS), predicted_tokens=(896_039, 1_052_000)
    ),
    "qwen3-next-80b": Row(
        *("Qwen3-Next-80B-A3B, 1 x H200", "one rank of TP=4", "200 requests"),
        (*model("qwen3-next-80b", 48, shard=4, context=262_144), *load(200, "1000,3000", 512)),
        predicted_tokens=(4_046_163, 4_657_000),
    ),
    "qwen3-vl-30b": Row(
        *("Qwen3-VL-30B-A3B, 1 x H200", "whole", "120 requests, two images each"),
        (*model("qwen3-vl-30b", 48, context=262_144), *load(120, "100,2000", 256), "--images", "2"),
        ("--sampling-backend", "flashinfer", "--mm-attention-backend", "triton_attn"),
        (639_684, 676_000),
    ),
    "kimi-k2.5": Row(
        *("Kimi-K2.5 in BF16, 1 x H200", "13 of 61 layers, one rank of TP=8", "200 requests"),
        (*model("kimi-k2.5", 13, shard=8), *load(200, "3000,9000", 768)),
        predicted_tokens=(5_161_292, 5_480_000),
    ),
    "deepseek-r1-recipe": Row(
        *("DeepSeek-R1 in FP8, 1 x H200, published recipe", "one rank of TP=8", "256 requests"),
        (
            *("--model", "deepseek-r1", "--shard", "8", "--layers", "61", "--context", "10240", "--chunk", "32768"),
            *("--requests", "512", *load(256, "2000,6000", 256)),
        ),
        ("--mem-fraction-static", "0.82", "--fp8-gemm-backend", "triton"),
        (466_960, 568_000),
    ),
    "qwen3-235b-fp8": Row(
        *("Qwen3-235B-A22B-FP8, 4 x H200", "whole", "200 requests", QWEN3_235B, QWEN3_235B_ARGUMENTS),
        *((1_522_859, 1_529_000), 4),
    ),
    "qwen3-235b-fp8-dp-attention": Row(
        *("Qwen3-235B-A22B-FP8, 4 x H200, data-parallel attention", "whole", "200 requests", QWEN3_235B),
        (*QWEN3_235B_ARGUMENTS, "--enable-dp-attention", "--dp", "4"),
        gpus=4,
    ),
}
"""Rows of the README's table, by the names of their result files. The most important rows come first, in case that time
runs out.
"""


def command(row: Row, work: Path, result: Path, servers: str) -> list[str]:
    """Return the command that runs ``benchmark/memory/serving.py`` for a row.

    The command keeps the servers' logs in a folder next to the result.
    """
    logs = str(result.with_suffix(""))
    options = ["--work", str(work), "--json", str(result), "--servers", servers, "--logs", logs]
    return [sys.executable, str(ROOT), "memory/serving", *row.arguments, *options, "--", *row.server_arguments]


def work_folder(row: Row, work: Path) -> Path:
    """Return the folder of a row's model and compiled kernels. Rows of the same model share the folder, so they must
    not run at the same time.
    """
    return work / "-".join(row.arguments[:2]).strip("-")


def run(name: str, row: Row, work: Path, results: Path, servers: str) -> int:
    """Run both servers of a row. The output of the run is written to ``NAME.log``, next to the row's result.

    :returns: exit code of ``benchmark/memory/serving.py``.
    """
    started = time.monotonic()
    print(f"{name}: {row.server}, {row.as_run}: started; log: {results / name}.log", flush=True)
    with (results / f"{name}.log").open("w") as log:
        called = command(row, work_folder(row, work), results / f"{name}.json", servers)
        code = subprocess.run(called, stdout=log, stderr=subprocess.STDOUT).returncode
    print(f"{name}: exit code {code} after {time.monotonic() - started:.0f} s", flush=True)
    return code


def choose_rows(options: Any) -> dict[str, Row]:
    """Return the rows of ``--rows`` for which the machine has enough GPUs. Print the names of the other rows."""
    import torch

    if options.quick:
        return {"quick": Row("a tiny model, CPU", "whole", "6 requests", ("--quick",), ())}
    gpus = torch.cuda.device_count()
    for name in options.rows:
        if ROWS[name].gpus > max(1, gpus):
            print(f"{name}: left out: it needs {ROWS[name].gpus} GPUs, and this machine has {gpus}", flush=True)
    return {name: ROWS[name] for name in options.rows if ROWS[name].gpus <= max(1, gpus)}


def main() -> int:
    parser = output.parser(__doc__, quick={"rows": []})
    parser.add_names("--rows", "rows to run", ROWS)
    parser.add_argument(
        "--servers", default="stock,grown", help="servers of each row: --servers of memory/serving (%(default)s)"
    )
    parser.add_argument(
        "--work", type=Path, metavar="FOLDER", help="keep models and compiled kernels in this folder, for later runs"
    )
    parser.add_argument("--results", type=Path, metavar="FOLDER", help="folder of the result files and logs")
    parser.add_argument("--list", action="store_true", help="print the rows and their commands, run nothing")
    options = output.parse(parser)
    with tempfile.TemporaryDirectory(prefix="first-starts-") as scratch:
        work, results = (options.work or Path(scratch)).absolute(), options.results or Path(scratch)
        rows = choose_rows(options).items()
        if options.list:
            for name, row in rows:
                called = command(row, work_folder(row, work), results / f"{name}.json", options.servers)
                print(f"{name}: {' '.join(called[2:])}")
            return 0
        for folder in (work, results):
            folder.mkdir(parents=True, exist_ok=True)
        codes = [run(name, row, work, results, options.servers) for name, row in rows]
    return max(codes, default=0)
