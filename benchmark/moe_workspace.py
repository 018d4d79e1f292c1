"""The Triton runner's second GEMM and sum in columns, against the engine as it is: time, memory, and the same bits.

    python benchmark/moe_workspace.py --json moe-workspace.json      # the grid of docs/changes/moe-workspace.md
    python benchmark/moe_workspace.py --models kimi-k2.5 --layouts tp4 --tokens 16384,4096
    python benchmark/moe_workspace.py --slices 2,3,5 --mb 400,800    # other numbers than the rule's own, and the knob
    python benchmark/moe_workspace.py --tune TILES --models kimi-k2.5 --layouts tp4   # the best tiles, into a folder
    python benchmark/moe_workspace.py --tiles TILES --models kimi-k2.5 --layouts tp4  # the engine's choice, and those

One process, no server, no checkpoint: the engine's own ``FusedMoE`` layer with random weights at one rank's widths, its
own quantization method, through ``run_moe_core``, in place as the Triton runner works by default. Each cell compares
stock, stock again (what stock differs from itself is nobody's doing) and columns, in turn, by CUDA events; every run
starts from an idle GPU, so that the host's time to start slices counts. The peak is what one call allocates beyond
what was allocated before it. An interval is that of the median of all rounds' ratios, to 95 %.

The engine chooses its tiles from a file that somebody tuned for the layer and the GPU, or by a rule. ``--tune`` tries
some thirty of them for both GEMMs and writes the best to where ``SGLANG_MOE_CONFIG_DIR`` would have the engine look;
kernels are compiled in processes of their own first. ``--tiles`` measures each layer with them as well.
"""

from __future__ import annotations

import argparse
import gc
import glob
import itertools
import json
import math
import os
import random
import socket
import statistics
import subprocess
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from common import machine, output, timing
from common.shapes import MODELS, Layout, Rank
from sglang_moe_patches.changes.moe_workspace import column_slices, deferred_tensor, triton
from sglang_moe_patches.changes.moe_workspace.deferred_tensor import DeferredTensor
from sglang_moe_patches.core.patch import Patcher

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


@dataclass(frozen=True)
class Variant:
    """Columns by the rule; in so many slices, whatever it says; or with so many MB asked for."""

    slices: int | None = None
    mb: int | None = None


class Ways:
    """The engine's sequence and ours, to switch between; and how many slices ours ran."""

    def __init__(self) -> None:
        self.plan = triton.plan()
        if self.plan.install is None:
            print(f"moe_workspace: {self.plan}", file=sys.stderr)
            raise SystemExit(2)
        from sglang.srt.layers.moe.moe_runner.triton_utils import fused_moe

        self._module = fused_moe
        self._stock = fused_moe._fused_moe_kernel_sequence
        self._ours: dict[int | None, Any] = {}
        self.ran: list[list[tuple[int, int]]] = []
        slices = deferred_tensor.choose_column_slices

        def seen(deferred: DeferredTensor, output: Any) -> list[tuple[int, int]]:
            found = slices(deferred, output)
            self.ran.append(found)
            return found

        deferred_tensor.choose_column_slices = seen
        self.stock()

    def stock(self) -> None:
        self._module._fused_moe_kernel_sequence = self._stock

    def columns(self, mb: int | None = None) -> None:
        """
        :param mb: what ``SGLANG_MOE_PATCHES_MOE_WORKSPACE_MB`` asks for.
        """
        if mb not in self._ours:
            self.stock()
            name = column_slices.MOE_WORKSPACE_MB.name
            os.environ |= {name: "" if mb is None else str(mb)}
            assert self.plan.install is not None
            self.plan.install(Patcher())
            del os.environ[name]
            self._ours[mb] = self._module._fused_moe_kernel_sequence
        self._module._fused_moe_kernel_sequence = self._ours[mb]

    @contextmanager
    def variant(self, variant: Variant) -> Iterator[None]:
        names = ("slice_width", "MIN_TENSOR_BYTES", "MAX_SLOWDOWN_FRACTION")
        rule = [getattr(column_slices, name) for name in names]
        if variant.slices:

            def width(layer: Any, gemm: Any, max_bytes: int | None = None) -> int:
                step = math.lcm(column_slices.SLICE_ALIGNMENT_COLUMNS, gemm.tiles["BLOCK_SIZE_N"])
                return min(layer.hidden, -(-layer.hidden // (variant.slices * step)) * step)

            for name, value in zip(names, (width, 1, math.inf), strict=True):
                setattr(column_slices, name, value)
        self.columns(variant.mb)
        try:
            yield
        finally:
            for name, value in zip(names, rule, strict=True):
                setattr(column_slices, name, value)
            self.stock()


def once(engine: Engine, given: Batch, run: Callable[[], Any]) -> float:
    """Milliseconds of one call that finds the GPU idle."""
    given.restore()
    if not engine.cuda:
        started = time.perf_counter()
        run()
        return (time.perf_counter() - started) * 1e3
    return timing.idle_ms(run)


def peak(engine: Engine, given: Batch, run: Callable[[], Any]) -> int:
    given.restore()
    return timing.memory_of(run)[0] if engine.cuda else 0


def clean(engine: Engine) -> None:
    gc.collect()
    if engine.cuda:
        torch.cuda.synchronize()
        torch.cuda.empty_cache()


def interval(ratios: list[float]) -> list[float]:
    """Where the median of such ratios lies, to 95 %: between two of them, by the binomial distribution."""
    ordered, below = sorted(ratios), 0
    while sum(math.comb(len(ordered), k) for k in range(below + 1)) / 2 ** len(ordered) <= 0.025:
        below += 1
    below = max(below - 1, 0)
    return [ordered[below], ordered[-1 - below]]


def cell(
    engine: Engine, ways: Ways, layer: Any, rank: Rank, tokens: int, rounds: int, variants: list[Variant]
) -> Iterator[dict[str, Any]]:
    """Figures of one batch, variant by variant."""
    given = batch(engine, rank, tokens)

    def run() -> Any:
        return layer.run_moe_core(dispatch_output=given.dispatch).hidden_states

    ways.stock()
    given.restore()
    expected = run().clone()
    given.restore()
    repeats = bool(torch.equal(expected, run()))
    stock_peak = peak(engine, given, run)
    ran: dict[Variant, list[tuple[int, int]]] = {}
    facts: dict[Variant, dict[str, Any]] = {}

    def measure(variant: Variant | None) -> Callable[[], float]:
        def measured() -> float:
            if variant is None:
                return once(engine, given, run)
            with ways.variant(variant):
                return once(engine, given, run)

        return measured

    for variant in variants:
        with ways.variant(variant):
            ways.ran.clear()
            given.restore()
            same = bool(torch.equal(expected, run()))
            ran[variant] = ways.ran[0] if ways.ran else []
            facts[variant] = {"peak": peak(engine, given, run), "same": same}
    # What cannot be cut so often is left out, and so is what another one is already.
    chosen = {
        variant: f"columns {variant}"
        for index, variant in enumerate(variants)
        if variant == Variant() or ran[variant] not in [ran[other] for other in variants[:index]]
    }
    versions = {timing.STOCK: measure(None), timing.CONTROL: measure(None)}
    samples = timing.in_turn(versions | {name: measure(variant) for variant, name in chosen.items()}, rounds)
    control = [b / a for a, b in zip(samples[timing.STOCK], samples[timing.CONTROL], strict=True)]
    for variant, name in chosen.items():
        ratios = [b / a for a, b in zip(samples[timing.STOCK], samples[name], strict=True)]
        yield {
            "tokens": tokens,
            "tensor_bytes": tokens * rank.top_k * rank.hidden * 2,
            "asked_slices": variant.slices,
            "asked_mb": variant.mb,
            "slices": len(ran[variant]),
            "width": ran[variant][0][1] if ran[variant] else None,
            "stock_ms": statistics.median(samples[timing.STOCK]),
            "ms": statistics.median(samples[name]),
            "slowdown": statistics.median(ratios),
            "interval": interval(ratios),
            "control": statistics.median(control),
            "control_interval": interval(control),
            "rounds": rounds,
            "stock_peak": stock_peak,
            "stock_repeats": repeats,
        } | facts[variant]


# --- Tiles -----------------------------------------------------------------------------------------------------------


def tile_configurations(weights: str) -> list[dict[str, int]]:
    """What is tried, for both GEMMs; a block of scales is 128 x 128."""
    return [
        {
            "BLOCK_SIZE_M": m,
            "BLOCK_SIZE_N": n,
            "BLOCK_SIZE_K": 128 if weights == "fp8" else 64,
            "GROUP_SIZE_M": group,
            "num_warps": warps,
            "num_stages": stages,
        }
        for m, n, group, warps, stages in itertools.product((64, 128), (128, 256), (1, 32), (4, 8), (3, 4))
    ]


def chosen_tiles(layer: Any, tokens: int) -> dict[str, int]:
    """What the engine has for this layer and batch."""
    from sglang.srt.layers.moe.moe_runner.triton_utils import fused_moe_triton_config

    fp8 = layer.w2_weight.element_size() == 1
    found = fused_moe_triton_config.try_get_optimal_moe_config(
        layer.w13_weight.shape,
        layer.w2_weight.shape,
        layer.top_k,
        "fp8_w8a8" if fp8 else None,
        tokens,
        block_shape=[128, 128] if fp8 else None,
    )
    return dict(found)


def with_tiles(config: dict[str, int] | None) -> Any:
    from sglang.srt.layers.moe.moe_runner.triton_utils import override_config

    return override_config(config)


def tiles_file(layer: Any) -> str:
    """The engine's name for the file of this layer's tiles."""
    from sglang.srt.layers.moe.moe_runner.triton_utils import fused_moe_triton_config

    experts, _, inner = layer.w2_weight.shape
    fp8 = layer.w2_weight.element_size() == 1
    return str(
        fused_moe_triton_config.get_config_file_name(
            experts, inner, "fp8_w8a8" if fp8 else None, [128, 128] if fp8 else [0, 0]
        )
    )


def use_tiles(folder: Path | None) -> None:
    """Have the engine look there; ``None``: where it does by itself."""
    from sglang.srt.layers.moe.moe_runner.triton_utils import fused_moe_triton_config

    fused_moe_triton_config.get_moe_configs.cache_clear()
    os.environ.pop("SGLANG_MOE_CONFIG_DIR", None)
    if folder is not None:
        os.environ["SGLANG_MOE_CONFIG_DIR"] = str(folder)


def compile_tiles(engine: Engine, names: list[tuple[str, str, str]], part: int, of: int) -> None:
    """Compile every ``of``-th kernel, for whoever shares Triton's cache: each layer with few experts."""
    for model, layout, weights in names:
        rank = replace(per_rank(model, layout), experts=16)
        layer = engine.layer(rank, weights)
        given = batch(engine, rank, 64)
        for config in tile_configurations(weights)[part::of]:
            try:
                with with_tiles(config):
                    layer.run_moe_core(dispatch_output=given.dispatch)
            except Exception as error:
                print(f"{config}: {type(error).__name__}", flush=True)


def tune(
    engine: Engine, names: list[tuple[str, str, str]], tokens: tuple[int, ...], folder: Path, processes: int
) -> list[dict[str, Any]]:
    """The best tiles for each layer and batch, written to ``folder``; and what each took."""
    import triton as language

    asked = ["--layers", ",".join(map(":".join, names))]
    workers = [
        subprocess.Popen([sys.executable, __file__, *asked, "--compile", f"{part + 1},{processes}"])
        for part in range(processes)
    ]
    for worker in workers:
        worker.wait()
    print(f"compiled after {time.monotonic() - STARTED:.0f} s", flush=True)
    where = folder / "configs" / f"triton_{language.__version__.replace('.', '_')}"
    where.mkdir(parents=True, exist_ok=True)
    found = []
    for model, layout, weights in names:
        rank = per_rank(model, layout)
        layer = engine.layer(rank, weights)
        best: dict[str, Any] = {}
        for count in tokens:
            given = batch(engine, rank, count)

            def run(given: Batch = given, layer: Any = layer) -> Any:
                return layer.run_moe_core(dispatch_output=given.dispatch).hidden_states

            times = {-1: statistics.median(once(engine, given, run) for _ in range(7))}
            configs = tile_configurations(weights)
            for index, config in enumerate(configs):
                try:
                    with with_tiles(config):
                        once(engine, given, run)
                        times[index] = statistics.median(once(engine, given, run) for _ in range(5))
                except Exception as error:
                    print(f"{config}: {type(error).__name__}", flush=True)
            winner = min((index for index in times if index >= 0), key=times.__getitem__)
            best[str(count)] = configs[winner]
            found.append(
                {"model": model, "layout": layout, "weights": weights, "tokens": count, "tiles": configs[winner]}
                | {"ms": times[winner], "own_ms": times[-1], "tried": len(times) - 1}
            )
            print(found[-1], flush=True)
        (where / tiles_file(layer)).write_text(json.dumps(best, indent=1) + "\n")
        del layer, given, run
        clean(engine)
    return found


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
        slices + asked_for(figure),
        figure.get("tiles", ""),
        f"{figure['stock_ms']:.3f}",
        f"{figure['slowdown']:.3f} [{', '.join(f'{end:.3f}' for end in figure['interval'])}]",
        f"{figure['control']:.3f}",
        "yes" if figure["same"] else ("NO" if figure["stock_repeats"] else "stock does not repeat itself"),
    ]


def asked_for(figure: dict[str, Any]) -> str:
    mb = figure["asked_mb"]
    return f" (asked {mb} MB)" if mb else " (asked)" if figure["asked_slices"] else ""


HEADER = ("layer", "tokens", "stock MB", "MB", "slices", "tiles", "stock ms", "time", "control", "same bits")


def tables(result: output.Result) -> str:
    return output.table(HEADER, map(line, result["figures"]["cells"])) + "\n" + captured(result)


def by_width(cells: list[dict[str, Any]], mb: int | None = None) -> dict[tuple[Any, ...], dict[str, Any] | None]:
    """Of each layer, tiles and batch, the cell that ran as the rule says now.

    ``None``: it stays whole, and is stock; empty: it was not measured.

    :param mb: what ``SGLANG_MOE_PATCHES_MOE_WORKSPACE_MB`` asks for.
    """
    measured: dict[tuple[Any, ...], dict[int, dict[str, Any]]] = {}
    for one in cells:
        key = (one["model"], one["layout"], one["weights"], one["tiles"], one["tokens"])
        measured.setdefault(key, {})[one["width"]] = one
    found = {}
    for key, widths in measured.items():
        model, layout, weights, _, tokens = key
        rank, fp8 = per_rank(model, layout), weights == "fp8"
        shape = column_slices.LayerShape(
            *(tokens, rank.top_k, rank.hidden, rank.intermediate),
            weight_bytes=3 * rank.experts * rank.hidden * rank.intermediate * (1 if fp8 else 2),
        )
        gemm = column_slices.TritonGemm(
            next(iter(widths.values()))["config"],
            fp8,
            **({"columns_per_scale": 128, "scale_stride_bytes": rank.intermediate // 128 * 4} if fp8 else {}),
        )
        width = column_slices.slice_width(shape, gemm, None if mb is None else mb * 10**6)
        found[key] = widths.get(width, {}) if width < rank.hidden else None
    return found


def by_rule(result: output.Result, tokens: int = 16384, settings: tuple[int, ...] = (800, 400)) -> str:
    """What the rule costs and leaves, and what a setting of the knob does: a line for each layer and its tiles."""
    cells = result["figures"]["cells"]
    stock = {
        (one["model"], one["layout"], one["weights"], one["tiles"], one["tokens"]): one["stock_peak"] for one in cells
    }

    def said(one: dict[str, Any] | None, peak: int) -> str:
        if one is None:
            return f"{peak / MB:,.0f}, whole"
        if not one:
            return "not measured"
        low, high = one["interval"]
        return f"{one['peak'] / MB:,.0f}, {one['slices']}: {one['slowdown']:.3f} ({low:.3f}-{high:.3f})"

    columns_of = [
        by_width(cells),
        *(by_width([one for one in cells if one["tokens"] == tokens], mb) for mb in settings),
    ]
    lines = [
        (
            f"{key[0]} TP={key[1][2:]} {key[2].upper()}" + (f", {key[3]}" if key[3] != "default" else ""),
            f"{peak / MB:,.0f}",
            *(said(c[key], peak) for c in columns_of),
        )
        for key, peak in stock.items()
        if key[4] == tokens
    ]
    header = (f"{tokens:,} tokens", "stock, MB", "default", *(f"{mb} MB asked for" for mb in settings))
    cut = [one for one in columns_of[0].values() if one is not None]
    low = [one["interval"][0] for one in cut]
    rows = [
        (
            f"{len(stock)}, of which {len(cut)} cut",
            f"{sum(one['same'] for one in cut)} of {len(cut)}",
            spread([one["slowdown"] for one in cut]),
            f"{max(low):.3f}",
        )
    ]
    together = ("all layers, tiles and batches", "same bits", "time where cut: median (range)", "highest lower end")
    return f"{output.table(header, lines)}\n{output.table(together, rows)}"


def by_default(result: output.Result) -> str:
    """Every batch as the rule has it, a line for each layer; and what it costs at the most."""
    cells = [one for one in result["figures"]["cells"] if one["asked_mb"] is None and one["asked_slices"] is None]
    batches = sorted({one["tokens"] for one in cells})
    layers: dict[str, dict[int, str]] = {}
    for one in cells:
        low, high = one["interval"]
        cut = one["slices"] > 1
        memory = f"{one['stock_peak'] / MB:,.0f} -> {one['peak'] / MB:,.0f}, {one['slices']}" if cut else "whole"
        name = f"{one['model']} TP={one['layout'][2:]} {one['weights'].upper()}"
        layers.setdefault(name, {})[one["tokens"]] = f"{memory}: {one['slowdown']:.3f} ({low:.3f}-{high:.3f})"
    lines = [(name, *(batch.get(tokens, "") for tokens in batches)) for name, batch in layers.items()]

    def together(name: str, some: list[dict[str, Any]]) -> tuple[str, ...]:
        lowest = [one["interval"][0] for one in some]
        same = f"{sum(one['same'] for one in some)} of {len(some)}"
        times = [spread([one[key] for one in some]) for key in ("slowdown", "control")]
        return (name, same, *times, f"{max(lowest):.3f}")

    header = ("MB, slices: time", *(f"{tokens:,} tokens" for tokens in batches))
    rows = [
        together("in slices", [one for one in cells if one["slices"] > 1]),
        together("whole", [one for one in cells if one["slices"] < 2]),
    ]
    of_all = ("layers and batches", "same bits", "time: median (range)", "control", "highest lower end")
    return f"{output.table(header, lines)}\n{output.table(of_all, rows)}"


def tuned(result: output.Result) -> str:
    """The best tiles that were found."""
    header = ("layer", "tiles: M x N x K, group, warps, stages", "tokens", "of", "own, ms", "ms")
    rows = [
        (
            f"{one['model']} {one['layout']} {one['weights']}",
            "{BLOCK_SIZE_M} x {BLOCK_SIZE_N} x {BLOCK_SIZE_K}, {GROUP_SIZE_M}, {num_warps}, {num_stages}".format(
                **one["tiles"]
            ),
            *(f"{one['tokens']:,}", str(one["tried"]), f"{one['own_ms']:.3f}", f"{one['ms']:.3f}"),
        )
        for one in result["figures"]["tuned"]
    ]
    return output.table(header, rows, left=2)


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


def layers(text: str) -> list[tuple[str, str, str]]:
    """``type=`` of an option that names layers."""
    found = []
    for name in text.split(","):
        model, _, rest = name.partition(":")
        layout, _, weights = rest.partition(":")
        if model not in MODELS or layout not in LAYOUTS or weights not in WEIGHTS:
            raise argparse.ArgumentTypeError(f"{name}: expected MODEL:LAYOUT:WEIGHTS")
        found.append((model, layout, weights))
    return found


def profile(engine: Engine, ways: Ways, layer: Any, rank: Rank, tokens: int) -> dict[str, dict[str, float]]:
    """Microseconds of each kernel in a call, stock and in four slices."""
    given = batch(engine, rank, tokens)
    found = {}
    for name, variant in (("stock", None), ("columns", Variant(4))):
        with ways.variant(variant) if variant else nullcontext():
            for _ in range(2):
                layer.run_moe_core(dispatch_output=given.dispatch)
            torch.cuda.synchronize()
            with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profiled:
                layer.run_moe_core(dispatch_output=given.dispatch)
                torch.cuda.synchronize()
        times: dict[str, float] = {}
        for event in profiled.events():
            times[event.name[:60]] = times.get(event.name[:60], 0.0) + event.device_time
        found[name] = {
            kernel: round(us, 1) for kernel, us in sorted(times.items(), key=lambda item: -item[1])[:9] if us
        }
    return found


def parse() -> Any:
    parser = output.parser(__doc__)
    parser.add_argument("--models", type=output.choice_of(MODELS), default=list(GRID), help=", ".join(MODELS))
    parser.add_argument("--layouts", type=output.choice_of(LAYOUTS), default=["tp1", "tp4", "tp8"])
    parser.add_argument("--weights", type=output.choice_of(WEIGHTS), default=list(WEIGHTS))
    parser.add_argument("--layers", type=layers, metavar="MODEL:LAYOUT:WEIGHTS,...", help="these, not all of the above")
    parser.add_argument("--tokens", type=output.numbers, default=TOKENS)
    parser.add_argument("--slices", type=output.numbers, default=(), help="so many, beside the rule's own")
    parser.add_argument("--mb", type=output.numbers, default=(), help="settings of the knob, beside the rule's own")
    parser.add_argument("--tune", type=Path, metavar="FOLDER", help="find the best tiles, and no more")
    parser.add_argument("--processes", type=int, default=12, help="that compile for --tune")
    parser.add_argument("--tiles", type=Path, metavar="FOLDER", help="measure with tiles from there as well")
    parser.add_argument("--compile", type=output.numbers, help=argparse.SUPPRESS)
    parser.add_argument("--profile", action="store_true", help="each kernel's time, whole and in four slices")
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
    names = options.layers or list(itertools.product(options.models, options.layouts, options.weights))
    with torch.inference_mode():
        engine = Engine()
        if options.compile:
            compile_tiles(engine, names, options.compile[0] - 1, options.compile[1])
            return
        print(machine.sentence(machine.conditions()), flush=True)
        if options.tune:
            found = tune(engine, names, options.tokens, options.tune, options.processes)
            result = output.result("moe_workspace", {"tuned": found})
            output.finish(options, result, tuned(result))
            return
        figures = measure(engine, Ways(), names, options)
    result = output.result("moe_workspace", figures)
    output.finish(options, result, tables(result))


def measure(engine: Engine, ways: Ways, names: list[tuple[str, str, str]], options: Any) -> dict[str, Any]:
    """The grid, layer by layer."""
    figures: dict[str, Any] = {"cells": [], "mixed": [], "graphs": [], "kernels": [], "left_out": []}
    variants = [Variant(), *(Variant(slices=n) for n in options.slices), *(Variant(mb=mb) for mb in options.mb)]
    folders = {"default": None} | ({"tuned": options.tiles} if options.tiles else {})
    for model, layout, weights in names:
        name = {"model": model, "layout": layout, "weights": weights}
        if time.monotonic() - STARTED > options.seconds:
            figures["left_out"].append(name | {"reason": "out of time"})
            continue
        try:
            rank = per_rank(model, layout)
            layer = engine.layer(rank, weights)
            for tiles, folder in folders.items():
                if folder is not None and not list(folder.glob(f"configs/*/{glob.escape(tiles_file(layer))}")):
                    continue
                use_tiles(folder)
                for tokens in options.tokens:
                    for found in cell(engine, ways, layer, rank, tokens, options.rounds, variants):
                        figures["cells"].append(name | found | {"tiles": tiles, "config": chosen_tiles(layer, tokens)})
                        print(" | ".join(line(figures["cells"][-1])), flush=True)
                    clean(engine)
                if options.profile:
                    kernels = profile(engine, ways, layer, rank, options.tokens[-1])
                    figures["kernels"].append(name | {"tiles": tiles, "tokens": options.tokens[-1]} | kernels)
                    print(json.dumps(figures["kernels"][-1], indent=1), flush=True)
                use_tiles(None)
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
    return figures


if __name__ == "__main__":
    main()
