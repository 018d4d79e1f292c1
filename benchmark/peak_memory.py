"""Activation memory of one prefill, stock against patched, with every megabyte named by the code that allocated it.

    python benchmark/peak_memory.py --tp 4 --workspace-mb 1536 --json m.json --markdown m.md --plot m.svg
    python benchmark/peak_memory.py --model deepseek-v3 --tp 2 --symm-mem
    python benchmark/peak_memory.py --model tiny --tokens 256          # no GPU needed; no history there

Two real servers, a few layers of the model's own widths with random NVFP4 weights, and the reference kernels. Both are
asked the same prompts, one at a time; every token and log-probability must be equal, or there is no result (each
server is asked twice: answers that a server itself does not repeat are named in that case). The second
forward of --tokens tokens and those after it are measured (the first also pays for libraries' one-off workspaces), and
of the second one the allocator's history is recorded. Figures are those of one rank, bytes beyond what was allocated
before the forward. --workspace-mb stands for the memory that the vendor's MoE kernel takes while it runs.
"""

from __future__ import annotations

import argparse
import json
import platform
import sys
import tempfile
from collections import defaultdict
from dataclasses import asdict
from pathlib import Path
from typing import Any

import serving
from sglang_moe_patches.regression import observe

MB = 1e6
PROMPTS = 4


def measure(arguments: argparse.Namespace, work: Path) -> dict[str, Any]:
    shape = serving.with_layers(serving.SHAPES[arguments.model], arguments.dense_layers, arguments.moe_layers)
    eager = ["--disable-cuda-graph", "--disable-piecewise-cuda-graph"]
    setup = serving.Setup(
        shape,
        work,
        tp=arguments.tp,
        tokens=arguments.tokens,
        arguments=(*eager, *(["--enable-symm-mem"] if arguments.symm_mem else []), *arguments.server_arguments),
        workspace_mb=arguments.workspace_mb,
        history=True,
    )
    setup.prepare()
    answers: dict[str, list[Any]] = {}
    figures: dict[str, Any] = {}
    states: dict[str, Any] = {}
    names = [*serving.SERVERS, *([serving.CONTROL] if arguments.control else [])]
    for together in [names] if arguments.at_once else [[name] for name in names]:
        with serving.servers(dict.fromkeys(together, setup), at_once=arguments.at_once) as running:
            for name, server in running.items():
                states[name] = serving.state(server)
                answers[name] = [
                    serving.generate(server, serving.prompt(arguments.tokens, seed), arguments.new_tokens)
                    for seed in [*range(PROMPTS)] * 2
                ]
                figures[name] = observe.collect(setup.observed(name))
                print(f"{name}: ready after {server.startup_s:.0f} s, asked {PROMPTS} prompts twice", flush=True)

    def differing(a: list[Any], b: list[Any]) -> list[int]:
        return [seed for seed in range(PROMPTS) if not serving.same(a[seed], b[seed])]

    return {
        "model": arguments.model,
        "shape": asdict(shape),
        "tp": arguments.tp,
        "tokens": arguments.tokens,
        "symm_mem": arguments.symm_mem,
        "workspace_mb": arguments.workspace_mb,
        "server_arguments": setup.command(),
        "machine": machine(),
        "gpu_bytes": gpu_bytes(),
        "engine": states["stock"]["version"],
        "states": states,
        "prompts": PROMPTS,
        "differing": {name: differing(answers["stock"], answers[name]) for name in names},
        "unrepeatable": {name: differing(answers[name][:PROMPTS], answers[name][PROMPTS:]) for name in names},
        "answers": {
            name: [{"tokens": a["tokens"], "logprobs": a["logprobs"]} for a in given] for name, given in answers.items()
        },
        "figures": figures,
    }


def machine() -> str:
    import torch

    if not torch.cuda.is_available():
        return f"{platform.processor() or platform.machine()} CPU, PyTorch {torch.__version__}"
    return f"{torch.cuda.device_count()} x {torch.cuda.get_device_name()}, PyTorch {torch.__version__}"


def gpu_bytes() -> int:
    import torch

    return int(torch.cuda.get_device_properties(0).total_memory) if torch.cuda.is_available() else 0


# --- Tables ----------------------------------------------------------------------------------------------------------


def busiest(figures: dict[str, Any]) -> dict[str, Any]:
    """What is alive when that routed kernel starts which finds most; of equals the last."""
    moments: list[dict[str, Any]] = figures["history"]["alive"]
    return max(reversed(moments), key=lambda moment: moment["bytes"])


def by_code(blocks: list[dict[str, Any]], least: float = 0.05 * MB) -> list[tuple[float, int, str]]:
    """(bytes, blocks, code) by the innermost line of engine code, largest first; small ones together."""
    sums: dict[str, list[float]] = defaultdict(lambda: [0, 0])
    for block in blocks:
        model_line = next((c for c in block["code"] if c.startswith("deepseek_v2.py")), "")
        code = block["code"][0] if block["code"] else "outside the engine"
        if model_line and model_line != code:
            code += f" <- {model_line}"
        sums[code][0] += block["bytes"]
        sums[code][1] += 1
    rows = [(size, int(count), code) for code, (size, count) in sums.items()]
    small = [row for row in rows if 0 <= row[0] < least]
    rows = sorted((row for row in rows if row not in small), reverse=True)
    if small:
        rows.append((sum(row[0] for row in small), sum(row[1] for row in small), "smaller ones"))
    return rows


def in_mb(value: float | None) -> str:
    return "-" if value is None else f"{value / MB:,.1f}"


def tables(result: dict[str, Any]) -> str:
    stock, patched = (result["figures"][name] for name in serving.SERVERS)
    shape = result["shape"]
    lines = [
        f"{result['machine']}, SGLang {result['engine']}, {result['model']} widths (hidden {shape['hidden']}, "
        f"{shape['experts']} experts, {shape['dense_layers']} dense + {shape['moe_layers']} MoE layers), "
        f"TP={result['tp']}, {result['tokens']:,} tokens, kernel workspace {result['workspace_mb']} MiB"
        f"{', --enable-symm-mem' if result['symm_mem'] else ''}. Answers equal: "
        f"{result['prompts']} of {result['prompts']}.",
        "",
        "| MB, one rank | stock | patched | difference |",
        "| --- | --: | --: | --: |",
    ]
    for title, key in (
        ("live when the routed kernel starts", "live_at_kernel_bytes"),
        ("peak of the forward", "peak_forward_bytes"),
    ):
        a, b = stock[key], patched[key]
        difference = "-" if a is None or b is None else f"{(b - a) / MB:+,.1f}"
        lines.append(f"| {title} | {in_mb(a)} | {in_mb(b)} | {difference} |")
    lines += ["", gained(result)] if stock["peak_forward_bytes"] else []
    for name, figures in (("stock", stock), ("patched", patched)):
        if "history" not in figures:
            continue
        for title, moment in (
            ("alive when the routed kernel starts", busiest(figures)),
            ("alive at the peak", figures["history"]["at_peak"]),
        ):
            total, blocks = moment["bytes"], moment["blocks"]
            if released := sum(block["bytes"] for block in blocks) - total:
                blocks = [*blocks, {"bytes": -released, "code": ["released: memory from before the forward"]}]
            lines += [
                "",
                f"{name}, {title}: {in_mb(total)} MB",
                "",
                "| MB | tensors | allocated by |",
                "| --: | --: | --- |",
            ]
            lines += [f"| {in_mb(size)} | {count} | `{code}` |" for size, count, code in by_code(blocks)]
    return "\n".join(lines) + "\n"


def gained(result: dict[str, Any]) -> str:
    """What the lower peak buys, by the engine's own account of its KV cache."""
    stock, patched = (result["figures"][name]["peak_forward_bytes"] for name in serving.SERVERS)
    shape, state = result["shape"], result["states"]["patched"]
    served = shape["dense_layers"] + shape["moe_layers"]
    # The engine counts in GiB with two decimals: enough for a cache of some GB.
    cell = state["kvcache"] * 2**30 / state["token_capacity"] / served
    tokens = (stock - patched) / (cell * shape["layers"])
    fraction = (stock - patched) / result["gpu_bytes"]
    return (
        f"The peak is lower by {in_mb(stock - patched)} MB. At the same memory budget that is {tokens:,.0f} more "
        f"tokens of KV cache for all {shape['layers']} layers ({cell:,.0f} bytes a token and layer, from "
        f"{state['kvcache']} GiB for {state['token_capacity']:,} tokens in {served} layers), or --mem-fraction-static "
        f"higher by {fraction:.4f} on this GPU of {result['gpu_bytes'] / 2**30:.0f} GiB."
    )


def plot(result: dict[str, Any], path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(2, 1, figsize=(9, 5.5), sharex=True, sharey=True, layout="constrained")
    for axis, name in zip(axes, serving.SERVERS, strict=True):
        line = result["figures"][name]["history"]["line"]
        # Allocations, not time: two runs' clocks differ, the sequence of their allocations hardly does.
        steps = [i / len(line) for i in range(len(line))]
        values = [value / MB for _, value in line]
        axis.fill_between(steps, values, step="post", alpha=0.35)
        axis.step(steps, values, where="post", linewidth=0.8)
        axis.axhline(max(values), linestyle=":", linewidth=0.8, color="black")
        axis.set_title(f"{name}: peak {max(values):,.0f} MB", loc="left", fontsize=10)
        axis.set_ylabel("MB beyond the start")
    axes[1].set_xlabel("one forward, from its first allocation to its last")
    figure.suptitle(
        f"{result['model']} widths, TP={result['tp']}, {result['tokens']:,} tokens, SGLang {result['engine']}, "
        f"kernel workspace {result['workspace_mb']} MiB",
        fontsize=10,
    )
    figure.savefig(path)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=serving.SHAPES, default="kimi-k2.5", help="whose layer shapes")
    parser.add_argument("--tp", type=int, default=1, help="tensor-parallel ranks")
    parser.add_argument("--tokens", type=int, default=16384, help="prompt length, prefilled in one forward")
    parser.add_argument("--new-tokens", type=int, default=8, help="tokens of each answer")
    parser.add_argument("--dense-layers", type=int, help="default: 1")
    parser.add_argument("--moe-layers", type=int, help="default: 3")
    parser.add_argument("--workspace-mb", type=int, default=0, help="MiB that the routed kernel takes while it runs")
    parser.add_argument(
        "--symm-mem", action="store_true", help="with NCCL symmetric memory (NVLink multicast as it is)"
    )
    parser.add_argument("--at-once", action="store_true", help="run both servers at the same time; needs the memory")
    parser.add_argument("--control", action="store_true", help="a second stock server too, for its answers")
    parser.add_argument("--json", type=Path, help="write everything measured")
    parser.add_argument("--markdown", type=Path, help="write the tables")
    parser.add_argument("--plot", type=Path, help="draw memory over one forward, stock above patched (needs a GPU)")
    parser.add_argument("--logs", type=Path, help="folder for the servers' logs")
    parser.add_argument("server_arguments", nargs="*", help="after --: more arguments for both servers")
    return parser.parse_args()


def main() -> int:
    arguments = parse()
    with tempfile.TemporaryDirectory(prefix="peak-memory-") as folder:
        work = Path(folder) / "work"
        try:
            result = measure(arguments, work)
        finally:
            if arguments.logs:
                arguments.logs.mkdir(parents=True, exist_ok=True)
                for log in work.glob("*.log"):
                    (arguments.logs / log.name).write_bytes(log.read_bytes())
    if arguments.json:
        arguments.json.write_text(json.dumps(result))
    if result["differing"]["patched"]:
        print(
            f"peak_memory: no figures: these prompts were answered otherwise than by the stock server: "
            f"{result['differing']}; these otherwise by the same server the second time: {result['unrepeatable']}",
            file=sys.stderr,
        )
        return 1
    text = tables(result)
    print(text)
    if arguments.markdown:
        arguments.markdown.write_text(text)
    if arguments.plot:
        plot(result, arguments.plot)
    return 0


if __name__ == "__main__":
    sys.exit(main())
