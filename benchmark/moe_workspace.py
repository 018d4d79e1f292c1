"""The Triton runner's second GEMM and sum in columns, against the engine as it is: time, memory, and the same bits.

    python benchmark/moe_workspace.py --json moe-workspace.json               # the grid of docs/moe-workspace.md
    python benchmark/moe_workspace.py --models kimi-k2.5 --layouts tp4 --tokens 16384,4096
    python benchmark/moe_workspace.py --widths 512,1024,2048                      # other widths than the rule's own

One process, no server, no checkpoint: the engine's own ``FusedMoE`` layer with random weights at one rank's widths, its
own quantization method, through ``run_moe_core``, in place as the Triton runner works by default. Each cell compares
stock, stock again (what stock differs from itself is nobody's doing) and columns, in turn, by CUDA events; every run
starts from an idle GPU, so that the host's time to start slices counts. The peak is what one call allocates beyond
what was allocated before it.
"""

from __future__ import annotations

import gc
import itertools
import os
import random
import socket
import statistics
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from common import machine, output, timing
from common.shapes import MODELS, Layout, Rank
from sglang_moe_patches.changes.moe_workspace import columns, promise, triton
from sglang_moe_patches.changes.moe_workspace.promise import Promise
from sglang_moe_patches.patch import Patcher

STARTED = time.monotonic()
LAYOUTS = {"tp1": Layout(), "tp4": Layout(tp=4), "tp8": Layout(tp=8)}
#: Their shared expert runs as one more routed one.
FUSED = ("deepseek-v3-fused", "glm-4.5")
GRID = ("kimi-k2.5", "deepseek-v3-fused", "glm-4.5", "qwen3-235b", "qwen3-30b", "minimax-m2", "mixtral-8x7b")
WEIGHTS = ("bf16", "fp8")
TOKENS = (1, 64, 512, 1024, 2048, 4096, 8192, 16384, 32768)
MB = 1e6


# --- The engine, for one rank ----------------------------------------------------------------------------------------


class Engine:
    """What the engine's processes set up before a model is built, for one rank."""

    def __init__(self) -> None:
        warnings.filterwarnings("ignore")
        os.environ.setdefault("SGLANG_JIT_DEEPGEMM_PRECOMPILE", "0")
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")  # one process: nobody to talk to
        self.cuda = torch.cuda.is_available()
        self.device = torch.device("cuda" if self.cuda else "cpu")
        self.dtype = torch.bfloat16 if self.cuda else torch.float16
        from sglang.srt import server_args as module
        from sglang.srt.distributed import parallel_state
        from sglang.srt.layers import dp_attention
        from sglang.srt.layers.moe import initialize_moe_config

        try:
            self.args = module.ServerArgs(model_path="dummy")
        except Exception:
            names = module.ServerArgs.__dataclass_fields__
            self.args = SimpleNamespace(**dict.fromkeys(names), enable_deterministic_inference=False)
        for name, value in {
            "moe_a2a_backend": "none",
            "moe_runner_backend": "triton",
            "ep_num_redundant_experts": 0,
            "enable_fused_moe_sum_all_reduce": False,
            "device": self.device.type,
        }.items():
            setattr(self.args, name, value)
        module.set_global_server_args_for_scheduler(self.args)
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        parallel_state.init_distributed_environment(
            world_size=1,
            rank=0,
            local_rank=0,
            distributed_init_method=f"tcp://127.0.0.1:{port}",
            backend="nccl" if self.cuda else "gloo",
        )
        parallel_state.initialize_model_parallel()
        try:
            dp_attention.initialize_dp_attention(self.args, SimpleNamespace(hidden_size=0, dtype=self.dtype))
        except Exception as error:
            print(f"note: data-parallel attention is not set up: {error}", flush=True)
        initialize_moe_config(self.args)

    def layer(self, rank: Rank, weights: str) -> Any:
        """The engine's layer with random weights."""
        from sglang.srt.layers.moe.fused_moe_triton.layer import FusedMoE

        quantization = None
        if weights == "fp8":
            from sglang.srt.layers.quantization.fp8 import Fp8Config

            quantization = Fp8Config(
                is_checkpoint_fp8_serialized=True, activation_scheme="dynamic", weight_block_size=[128, 128]
            )
        before = torch.get_default_dtype()
        torch.set_default_dtype(self.dtype)
        try:
            with self.device:
                layer = FusedMoE(
                    num_experts=rank.experts,
                    hidden_size=rank.hidden,
                    intermediate_size=rank.intermediate,
                    layer_id=0,
                    top_k=rank.top_k,
                    params_dtype=self.dtype,
                    quant_config=quantization,
                    routed_scaling_factor=2.5,
                    prefix="experts",
                )
        finally:
            torch.set_default_dtype(before)
        generator = torch.Generator(self.device).manual_seed(0)
        with torch.no_grad():
            for weight, fan_in in ((layer.w13_weight, rank.hidden), (layer.w2_weight, rank.intermediate)):
                for expert in weight.data:
                    drawn = torch.randn(expert.shape, device=self.device, dtype=torch.float32, generator=generator)
                    expert.copy_((drawn * (100 if weights == "fp8" else 1) * fan_in**-0.5).to(expert.dtype))
            for name in ("w13_weight_scale_inv", "w2_weight_scale_inv"):
                if hasattr(layer, name):
                    data = getattr(layer, name).data
                    data.copy_((0.5 + torch.rand(data.shape, device=self.device, generator=generator)) / 100)
        if quantization is not None:
            layer.quant_method.process_weights_after_loading(layer)
        return layer


@dataclass
class Batch:
    """Tokens as the dispatcher hands them to the runner; ``restore`` undoes what an in-place runner did."""

    pristine: torch.Tensor
    dispatch: Any

    def restore(self) -> None:
        self.dispatch.hidden_states.copy_(self.pristine)

    def first(self, tokens: int) -> Any:
        routed = self.dispatch.topk_output
        return self.dispatch._replace(
            hidden_states=self.pristine[:tokens].clone(), topk_output=type(routed)(*(t[:tokens] for t in routed))
        )


def batch(engine: Engine, rank: Rank, tokens: int) -> Batch:
    from sglang.srt.layers.moe.token_dispatcher.standard import StandardDispatchOutput
    from sglang.srt.layers.moe.topk import StandardTopKOutput

    generator = torch.Generator(engine.device).manual_seed(1)
    logits = torch.randn(tokens, rank.experts, device=engine.device, generator=generator)
    best = logits.topk(rank.top_k, dim=1)
    pristine = torch.randn(tokens, rank.hidden, device=engine.device, generator=generator).to(engine.dtype)
    routed = StandardTopKOutput(
        topk_weights=torch.softmax(best.values, 1).contiguous(),
        topk_ids=best.indices.to(torch.int32).contiguous(),
        router_logits=logits.to(engine.dtype),
    )
    return Batch(
        pristine,
        StandardDispatchOutput(hidden_states=pristine.clone(), hidden_states_scale=None, topk_output=routed),
    )


# --- Stock and columns -----------------------------------------------------------------------------------------------


class Ways:
    """The engine's sequence and ours, to switch between; and how many slices ours ran."""

    def __init__(self) -> None:
        plan = triton.plan()
        if plan.install is None:
            print(f"moe_workspace: {plan}", file=sys.stderr)
            raise SystemExit(2)
        from sglang.srt.layers.moe.moe_runner.triton_utils import fused_moe

        self._module = fused_moe
        self._stock = fused_moe._fused_moe_kernel_sequence
        plan.install(Patcher())
        self._ours = fused_moe._fused_moe_kernel_sequence
        self.ran: list[list[tuple[int, int]]] = []
        slices = promise.column_ranges

        def seen(promise: Promise, output: Any) -> list[tuple[int, int]]:
            found = slices(promise, output)
            self.ran.append(found)
            return found

        promise.column_ranges = seen
        self.stock()

    def stock(self) -> None:
        self._module._fused_moe_kernel_sequence = self._stock

    def columns(self) -> None:
        self._module._fused_moe_kernel_sequence = self._ours

    @contextmanager
    def width(self, width: int | None) -> Iterator[None]:
        """Columns of ``width``, whatever the rule says; ``None``: by the rule."""
        rule = columns.slice_width
        smallest = columns.SMALLEST_TENSOR_BYTES
        if width:
            columns.slice_width = lambda *_, **__: width
            columns.SMALLEST_TENSOR_BYTES = 1
        try:
            yield
        finally:
            columns.slice_width = rule
            columns.SMALLEST_TENSOR_BYTES = smallest


def once(engine: Engine, given: Batch, run: Callable[[], Any]) -> float:
    """Milliseconds of one call that finds the GPU idle."""
    given.restore()
    if not engine.cuda:
        started = time.perf_counter()
        run()
        return (time.perf_counter() - started) * 1e3
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda.synchronize()
    start.record()
    run()
    end.record()
    end.synchronize()
    return start.elapsed_time(end)


def peak(engine: Engine, given: Batch, run: Callable[[], Any]) -> int:
    given.restore()
    return timing.memory_of(run)[0] if engine.cuda else 0


def clean(engine: Engine) -> None:
    gc.collect()
    if engine.cuda:
        torch.cuda.synchronize()
        torch.cuda.empty_cache()


def cell(
    engine: Engine, ways: Ways, layer: Any, rank: Rank, tokens: int, rounds: int, widths: tuple[int, ...]
) -> Iterator[dict[str, Any]]:
    """Figures of one batch: the rule's own width first, then the others."""
    given = batch(engine, rank, tokens)

    def run() -> Any:
        return layer.run_moe_core(dispatch_output=given.dispatch).hidden_states

    ways.stock()
    given.restore()
    expected = run().clone()
    given.restore()
    repeats = bool(torch.equal(expected, run()))
    stock_peak = peak(engine, given, run)
    for width in (None, *(w for w in widths if w < rank.hidden)):
        with ways.width(width):
            ways.columns()
            ways.ran.clear()
            given.restore()
            found = run()
            same = bool(torch.equal(expected, found))
            ran = ways.ran[0] if ways.ran else []
            del found
            our_peak = peak(engine, given, run)

            def measure(switch: Callable[[], None]) -> Callable[[], float]:
                def measured() -> float:
                    switch()
                    return once(engine, given, run)

                return measured

            versions = {timing.STOCK: measure(ways.stock), timing.CONTROL: measure(ways.stock)}
            versions["columns"] = measure(ways.columns)
            samples = timing.in_turn(versions, rounds)
            compared = timing.against_stock(samples)
        # "stock over the other" reads as speed; here more is slower, as in the issue's own figures.
        yield {
            "tokens": tokens,
            "tensor_bytes": tokens * rank.top_k * rank.hidden * 2,
            "asked_width": width,
            "slices": len(ran),
            "width": ran[0][1] if ran else None,
            "stock_ms": compared["columns"]["stock"],
            "ms": compared["columns"]["other"],
            "slowdown": 1 / compared["columns"]["ratio"],
            "spread": [1 / compared["columns"]["highest"], 1 / compared["columns"]["lowest"]],
            "control": 1 / compared[timing.CONTROL]["ratio"],
            "control_spread": [1 / compared[timing.CONTROL]["highest"], 1 / compared[timing.CONTROL]["lowest"]],
            "stock_peak": stock_peak,
            "peak": our_peak,
            "same": same,
            "stock_repeats": repeats,
        }


# --- Mixed batches, CUDA graphs --------------------------------------------------------------------------------------


def mixed(engine: Engine, ways: Ways, layer: Any, rank: Rank, tokens: int) -> dict[str, Any]:
    """Forty batches of mixed sizes: bytes allocated at the peak, and reserved in the end."""
    chosen = random.Random(5)
    sizes = [chosen.choice(range(min(512, tokens // 2), tokens + 1, 16)) for _ in range(40)]
    full = batch(engine, rank, tokens)
    found: dict[str, Any] = {"tokens": tokens, "batches": len(sizes)}
    for name, switch in ((timing.STOCK, ways.stock), ("columns", ways.columns)):
        switch()
        clean(engine)
        allocated, reserved = torch.cuda.memory_allocated(), torch.cuda.memory_reserved()
        torch.cuda.reset_peak_memory_stats()
        for size in sizes:
            layer.run_moe_core(dispatch_output=full.first(size))
        torch.cuda.synchronize()
        found[name] = {
            "allocated": torch.cuda.max_memory_allocated() - allocated,
            "reserved": torch.cuda.max_memory_reserved() - reserved,
        }
    return found


def graph(engine: Engine, ways: Ways, layer: Any, rank: Rank, tokens: int, rounds: int) -> dict[str, Any]:
    """One layer captured: what the graph's pool holds, whether a replay says what eager says, and its time."""
    given = batch(engine, rank, tokens)
    found: dict[str, Any] = {"tokens": tokens}

    def run() -> Any:
        return layer.run_moe_core(dispatch_output=given.dispatch).hidden_states

    graphs: dict[str, Any] = {}
    ways.stock()
    given.restore()
    expected = run().clone()
    for name, switch in ((timing.STOCK, ways.stock), (timing.CONTROL, ways.stock), ("columns", ways.columns)):
        switch()
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            given.restore()
            run()
        torch.cuda.synchronize()
        clean(engine)
        reserved = torch.cuda.memory_reserved()
        graphs[name] = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graphs[name]):
            captured = run()
        pool = torch.cuda.memory_reserved() - reserved
        given.restore()
        graphs[name].replay()
        torch.cuda.synchronize()
        found[name] = {"pool": pool, "same": bool(torch.equal(captured, expected))}
        del captured

    def replay(name: str) -> Callable[[], float]:
        return lambda: once(engine, given, graphs[name].replay)

    samples = timing.in_turn({name: replay(name) for name in graphs}, rounds)
    for name, ratio in timing.against_stock(samples).items():
        found[name] |= {"ms": ratio["other"], "slowdown": 1 / ratio["ratio"]}
        found[timing.STOCK]["ms"] = ratio["stock"]
    return found


# --- Output ----------------------------------------------------------------------------------------------------------


def line(figure: dict[str, Any]) -> list[str]:
    slices = f"{figure['slices']} of {figure['width']}" if figure["slices"] > 1 else "whole"
    return [
        f"{figure['model']} {figure['layout']} {figure['weights']}",
        f"{figure['tokens']:,}",
        f"{figure['stock_peak'] / MB:,.0f}",
        f"{figure['peak'] / MB:,.0f}",
        slices + (f" (asked {figure['asked_width']})" if figure["asked_width"] else ""),
        f"{figure['stock_ms']:.3f}",
        f"{figure['slowdown']:.3f}",
        f"{figure['control']:.3f}",
        "yes" if figure["same"] else ("NO" if figure["stock_repeats"] else "stock does not repeat itself"),
    ]


HEADER = ("layer", "tokens", "stock MB", "MB", "slices", "stock ms", "time", "control", "same bits")


def tables(result: output.Result) -> str:
    return output.table(HEADER, map(line, result["figures"]["cells"])) + "\n" + captured(result)


def in_short(results: list[output.Result], tokens: int = 16384, layout: str = "tp4") -> str:
    """Layer by layer for one number of tokens, a column a GPU; all cells together, a row a GPU.

    :param results: several of one GPU add up.
    """
    gpus: dict[str, list[dict[str, Any]]] = {}
    for result in results:
        gpus.setdefault(result["conditions"]["gpu"].split()[1], []).extend(result["figures"]["cells"])
    layers: dict[str, dict[str, dict[str, Any]]] = {}
    for gpu, cells in gpus.items():
        for one in cells:
            if one["tokens"] == tokens and one["layout"] == layout and one["slices"] > 1:
                name = f"{one['model']} TP={one['layout'][2:]} {one['weights'].upper()}"
                layers.setdefault(name, {})[gpu] = one
    lines = []
    for name, found in layers.items():
        first = next(iter(found.values()))
        times = (f"{found[gpu]['slowdown']:.3f} ({found[gpu]['control']:.3f})" if gpu in found else "" for gpu in gpus)
        lines.append((name, f"{first['stock_peak'] / MB:,.0f}", f"{first['peak'] / MB:,.0f}", *times))
    header = (f"{tokens:,} tokens", "stock, MB", "columns, MB", *(f"time on {gpu} (control)" for gpu in gpus))
    rows = []
    for gpu, cells in gpus.items():
        for kind, some in (
            ("whole", [one for one in cells if one["slices"] < 2]),
            ("in slices", [one for one in cells if one["slices"] > 1]),
        ):
            ours, control = ([one[name] for one in some] for name in ("slowdown", "control"))
            same = sum(one["same"] for one in some)
            rows.append([f"{gpu}, {kind}", f"{same} of {len(some)}", *map(spread, (ours, control))])
    together = ("all layers and batches", "same bits", "time: median (range)", "control")
    return f"{output.table(header, lines)}\n{output.table(together, rows)}"


def spread(values: list[float]) -> str:
    return f"{statistics.median(values):.3f} ({min(values):.3f}-{max(values):.3f})"


def captured(*results: output.Result) -> str:
    """Mixed batches and CUDA graphs, of one GPU or several: what they hold does not depend on it."""
    gpus = [result["conditions"]["gpu"].split()[1] for result in results]
    mixed: dict[tuple[str, ...], list[str]] = {}
    graphs: dict[tuple[str, ...], dict[str, str]] = {}
    for gpu, result in zip(gpus, results, strict=True):
        for row in result["figures"]["mixed"]:
            sizes = [row[name][what] for what in ("allocated", "reserved") for name in ("stock", "columns")]
            cells = (f"{row['model']} {row['layout']} {row['weights']}", *(f"{size / MB:,.0f}" for size in sizes))
            mixed.setdefault(cells, []).append(gpu)
        for row in result["figures"]["graphs"]:
            pools = (f"{row[name]['pool'] / MB:,.0f}" for name in ("stock", "columns"))
            time, control = (f"{row[name]['slowdown']:.4f}" for name in ("columns", timing.CONTROL))
            same = all(row[name]["same"] for name in ("stock", "columns"))
            cells = (f"{row['model']} {row['layout']} {row['weights']}", f"{row['tokens']:,}", *pools)
            graphs.setdefault(cells, {})[gpu] = f"{time} ({control})" + ("" if same else " **NOT EQUAL**")
    parts = []
    if mixed:
        header = ("forty mixed batches, MB", "allocated: stock", "columns", "reserved: stock", "columns", "GPU")
        parts.append(output.table(header, [(*cells, ", ".join(on)) for cells, on in mixed.items()]))
    if graphs:
        titles = (
            "captured layer",
            "tokens",
            "pool, MB: stock",
            "columns",
            *(f"time on {gpu} (control)" for gpu in gpus),
        )
        lines = [(*cells, *(found.get(gpu, "") for gpu in gpus)) for cells, found in graphs.items()]
        parts.append(output.table(titles, lines))
    return "\n".join(parts)


def per_rank(model: str, layout: str) -> Rank:
    known = MODELS[model]
    return (known.fused() if model in FUSED and known.shared_experts else known).per_rank(LAYOUTS[layout])


def parse() -> Any:
    parser = output.parser(__doc__)
    parser.add_argument("--models", type=output.choice_of(MODELS), default=list(GRID), help=", ".join(MODELS))
    parser.add_argument("--layouts", type=output.choice_of(LAYOUTS), default=["tp1", "tp4", "tp8"])
    parser.add_argument("--weights", type=output.choice_of(WEIGHTS), default=list(WEIGHTS))
    parser.add_argument("--tokens", type=output.numbers, default=TOKENS)
    parser.add_argument("--widths", type=output.numbers, default=(), help="columns of a slice, beside the rule's own")
    parser.add_argument("--graphs", type=output.numbers, default=(), help="tokens of layers to capture")
    parser.add_argument("--mixed", type=int, default=0, help="tokens of the largest of forty mixed batches")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--seconds", type=float, default=1e9, help="start no layer after this time")
    return output.parse(parser)


def plot(result: output.Result, path: Path) -> None:
    """The runner's peak with 16,384 tokens, stock and in columns, one pair of bars for each layer at TP=4 and TP=8."""
    pyplot = output.pyplot()
    cells = [c for c in result["figures"]["cells"] if c["tokens"] == 16384 and c["layout"] in ("tp4", "tp8")]
    figure, axes = pyplot.subplots(figsize=(8, 0.34 * len(cells) + 1.4))
    positions = range(len(cells))
    for offset, name, key, color in ((-0.2, "stock", "stock_peak", "#9aa5b1"), (0.2, "in columns", "peak", "#2b6cb0")):
        axes.barh([p + offset for p in positions], [c[key] / 1e6 for c in cells], 0.38, label=name, color=color)
    for position, cell in enumerate(cells):
        axes.text(cell["peak"] / 1e6 + 15, position + 0.3, f"{cell['slowdown']:.2f} of stock's time", fontsize=7)
    axes.set_yticks(
        list(positions), [f"{c['model']} {c['layout'].replace('tp', 'TP=')} {c['weights'].upper()}" for c in cells]
    )
    axes.invert_yaxis()
    axes.set(xlabel="peak of one MoE layer, MB", xlim=(0, 1.14 * max(c["stock_peak"] for c in cells) / 1e6))
    axes.legend(frameon=False, loc="lower right")
    conditions = result["conditions"]
    axes.set_title(f"Triton runner, 16,384 tokens, {conditions['gpu']}, SGLang {conditions['engine']}", fontsize=10)
    figure.tight_layout()
    output.save(figure, path)


def main() -> None:
    options = parse()
    machine.require_gpu("moe_workspace")
    figures: dict[str, Any] = {"cells": [], "mixed": [], "graphs": [], "left_out": []}
    with torch.inference_mode():
        engine, ways = Engine(), Ways()
        print(machine.sentence(machine.conditions()), flush=True)
        for model, layout, weights in itertools.product(options.models, options.layouts, options.weights):
            name = {"model": model, "layout": layout, "weights": weights}
            if time.monotonic() - STARTED > options.seconds:
                figures["left_out"].append(name | {"reason": "out of time"})
                continue
            try:
                rank = per_rank(model, layout)
                layer = engine.layer(rank, weights)
                for tokens in options.tokens:
                    for found in cell(engine, ways, layer, rank, tokens, options.rounds, options.widths):
                        figures["cells"].append(name | found)
                        print(" | ".join(line(figures["cells"][-1])), flush=True)
                    clean(engine)
                if options.mixed:
                    figures["mixed"].append(name | mixed(engine, ways, layer, rank, options.mixed))
                    print(figures["mixed"][-1], flush=True)
                for tokens in options.graphs:
                    figures["graphs"].append(name | graph(engine, ways, layer, rank, tokens, options.rounds))
                    print(figures["graphs"][-1], flush=True)
            except Exception as error:
                reason = f"{type(error).__name__}: {str(error).splitlines()[0][:200] if str(error) else ''}"
                figures["left_out"].append(name | {"reason": reason})
                print(f"{model} {layout} {weights}: left out, {reason}", flush=True)
            finally:
                layer = None
                clean(engine)
    result = output.result("moe_workspace", figures)
    output.finish(options, result, tables(result))


if __name__ == "__main__":
    main()
