"""Compute the memory of CuteDSL's MoE buffers on one rank, for three ways to size them.

The script needs no GPU and repeats no formula. FlashInfer's own ``CuteDslMoEWrapper`` allocates its buffers on
PyTorch's meta device, and their bytes are added up. The stock engine's sizes come from its own
``ensure_cutedsl_wrapper`` with the server arguments that it reads.

stock         Each MoE layer has its own buffers, as the installed engine sizes them. Before 0.5.13, the buffers have
              rows for the larger of cuda_graph_max_bs and chunked_prefill_size. With data-parallel attention,
              chunked_prefill_size is first divided by the number of data-parallel ranks. The table calls the buffers
              "too small" if a forward pass of --tokens tokens on each data-parallel rank would end the server.
upstream      Each MoE layer has its own buffers, sized for --tokens tokens times the data-parallel size, as from
              0.5.13 on.
ours          All layers of the process share one set of buffers, for as many tokens as in "upstream". The set has no
              output buffer: the output goes into the dead input that the decoder layer offers, or into a new tensor.

Run it with `sglang-moe-reference exec -- python benchmark changes/cutedsl_memory`. Without a CUDA driver, this makes
the import of the engine's modules possible.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import asdict, dataclass
from types import SimpleNamespace
from typing import Any

import torch
from common import output
from common.shapes import MODELS, NVFP4_MODELS, Layout, Model

SCALES = (
    *("w13_input_scale_quant", "w2_input_scale_quant", "w13_weight_scale_2", "w2_weight_scale_2"),
    *("g1_alphas", "g2_alphas"),
)
LAYOUTS = (
    *(Layout(tp=tp) for tp in (4, 8)),
    *(Layout(tp=tp, ep=ep, dp=4) for tp in (4, 8) for ep in (1, tp)),
    *(Layout(tp=8, ep=ep, dp=8) for ep in (1, 8)),
)


@dataclass(frozen=True)
class Buffers:
    """Bytes of the buffers of one ``CuteDslMoEWrapper``."""

    max_num_tokens: int
    output: int
    gemm1: int
    sorting: int

    @property
    def total(self) -> int:
        return self.output + self.gemm1 + self.sorting

    @classmethod
    def measure(cls, wrapper: Any) -> Buffers:
        """Add up the bytes of the buffers that belong to one wrapper."""
        tensors = {name: value.nbytes for name, value in vars(wrapper).items() if isinstance(value, torch.Tensor)}
        output, gemm1 = tensors.pop("_moe_output", 0), tensors.pop("_gemm1_output") + tensors.pop("_gemm1_output_scale")
        assert not tensors, f"FlashInfer's wrapper has buffers that this script does not know: {sorted(tensors)}"
        return cls(wrapper.max_num_tokens, output, gemm1, sum(t.nbytes for t in wrapper._moe_sort_buffers.values()))


def wrapper_arguments(model: Model, tp: int, ep: int) -> dict[str, Any]:
    """Return the sizes of one rank's MoE layer, as arguments of FlashInfer's wrapper."""
    rank = model.per_rank(Layout(tp, ep))
    return {
        "num_experts": model.experts,
        "top_k": model.top_k,
        "hidden_size": model.hidden,
        "intermediate_size": rank.intermediate,
        "num_local_experts": rank.experts,
    }


def measure_buffers(model: Model, tp: int, ep: int, tokens: int) -> tuple[Buffers, Buffers]:
    """Measure the buffers of a wrapper for ``tokens`` tokens: its own buffers, and buffers that all layers share."""
    from flashinfer import CuteDslMoEWrapper
    from sglang_moe_patches.changes.cutedsl_sizing.wrapper import SharedMoE

    wrapper = CuteDslMoEWrapper(
        **wrapper_arguments(model, tp, ep), use_cuda_graph=True, max_num_tokens=tokens, device="meta"
    )
    upstream = Buffers.measure(wrapper)
    SharedMoE(wrapper, 1, lambda: False)
    return upstream, Buffers.measure(wrapper)


def stock(model: Model, tp: int, dp: int, ep: int, chunked_prefill_size: int, cuda_graph_max_bs: int) -> Buffers:
    """Measure the buffers that the installed engine makes for one layer."""
    from sglang.srt import server_args as engine
    from sglang.srt.layers.moe.moe_runner.flashinfer_cutedsl import ensure_cutedsl_wrapper

    server = SimpleNamespace(
        tp_size=tp,
        dp_size=dp,
        enable_dp_attention=dp > 1,
        enable_dp_lm_head=False,
        schedule_conservativeness=1.0,
        chunked_prefill_size=chunked_prefill_size,
        cuda_graph_max_bs=cuda_graph_max_bs,
        disable_cuda_graph=False,
        # Releases from 0.5.13 on also read these three arguments.
        max_prefill_tokens=engine.ServerArgs.max_prefill_tokens,
        disable_piecewise_cuda_graph=True,
        speculative_algorithm=None,
    )
    server.cutedsl_moe_max_num_tokens = lambda: engine.ServerArgs.cutedsl_moe_max_num_tokens(server)
    engine.logger.disabled = True  # otherwise the engine would log a line for each chunked prefill size
    engine.ServerArgs._handle_data_parallelism(server)
    arguments = wrapper_arguments(model, tp, ep)
    scale = torch.ones(arguments["num_local_experts"], device="meta")
    layer = SimpleNamespace(
        num_experts=model.experts,
        num_local_experts=arguments["num_local_experts"],
        top_k=model.top_k,
        hidden_size=model.hidden,
        intermediate_size_per_partition=arguments["intermediate_size"],
        moe_ep_rank=0,
        moe_runner_config=SimpleNamespace(params_dtype=torch.bfloat16),
        w13_weight=torch.empty(0, device="meta"),
        **dict.fromkeys(SCALES, scale),
    )
    saved = engine.get_global_server_args
    engine.get_global_server_args = lambda: server
    try:
        ensure_cutedsl_wrapper(layer)
    finally:
        engine.get_global_server_args = saved
    return Buffers.measure(layer._cutedsl_wrapper)


def disable_streams() -> None:
    """Make FlashInfer construct its wrappers without a CUDA stream, because the meta device has no streams."""
    from flashinfer import CuteDslMoEWrapper
    from sglang_moe_reference import cutedsl

    make: Callable[..., None] = CuteDslMoEWrapper.__init__
    hook = cutedsl.ON_ONE_STREAM[cutedsl.INIT]
    CuteDslMoEWrapper.__init__ = lambda self, *args, **kwargs: hook(make, self, *args, **kwargs)


def row(name: str, layout: Layout, tokens: int, chunked_prefill_size: int, max_bs: int) -> dict[str, Any]:
    """Compute the bytes of the buffers of one model and layout: "stock", "upstream" and "ours"."""
    model = MODELS[name]
    guess = stock(model, layout.tp, layout.dp, layout.ep, chunked_prefill_size, max_bs)
    upstream, patched = measure_buffers(model, layout.tp, layout.ep, tokens * layout.dp)
    buffers = {"stock": guess, "upstream": upstream, "ours": patched}
    return {
        "model": name,
        **asdict(layout),
        "moe_layers": model.moe_layers,
        **{which: asdict(sizes) | {"total": sizes.total} for which, sizes in buffers.items()},
    }


def make_tables(result: output.Result, tps: Collection[int] = ()) -> str:
    """Make a table of the buffers of all layers, "upstream" and "ours". It has a row per layout and a column per model.

    :param tps: tensor-parallel sizes to show; empty: all sizes.
    """
    rows: dict[tuple[str, ...], dict[str, str]] = {}
    for row in (row for row in result["figures"]["rows"] if not tps or row["tp"] in tps):
        stock, patched, layers = row["stock"], row["ours"], row["moe_layers"]
        guess = f"{stock['max_num_tokens']:,}" + (", too small" * (stock["max_num_tokens"] < patched["max_num_tokens"]))
        ranks = ", ".join(f"{size.upper()}={row[size]}" for size in ("tp", "dp", "ep"))
        layout = (ranks, f"{patched['max_num_tokens']:,}", guess)
        sizes = f"{row['upstream']['total'] * layers / 1e9:.1f} -> {patched['total'] / 1e9:.3f}"
        rows.setdefault(layout, {})[row["model"]] = sizes
    models = dict.fromkeys(model for row in rows.values() for model in row)
    cells = [(*layout, *(row.get(model, "") for model in models)) for layout, row in rows.items()]
    return output.table(("layout", "tokens", "stock's guess", *(f"{model}, GB" for model in models)), cells)


def main() -> None:
    parser = output.parser(__doc__, quick={"models": ["qwen3-235b"]})
    parser.add_argument(
        "--tokens",
        type=int,
        default=16384,
        help="tokens of the largest forward pass on one data-parallel rank (%(default)s)",
    )
    parser.add_argument(
        "--chunked-prefill-size",
        type=int,
        default=16384,
        help="--chunked-prefill-size of the stock server (%(default)s, as on a B200); -1: no chunks",
    )
    parser.add_argument(
        "--cuda-graph-max-bs",
        type=int,
        default=512,
        help="--cuda-graph-max-bs of the stock server (%(default)s, as on a B200)",
    )
    parser.add_names("--models", "models", MODELS, NVFP4_MODELS)
    options = output.parse(parser)
    if options.tokens < 1:
        parser.error("--tokens must be at least 1")
    try:
        for name in options.models:
            for layout in LAYOUTS:
                MODELS[name].per_rank(layout)
    except ValueError as error:
        parser.error(str(error))
    try:
        import flashinfer
        import sglang.srt.layers.moe.moe_runner.flashinfer_cutedsl  # noqa: F401
        from flashinfer import CuteDslMoEWrapper
    except ImportError as error:
        raise SystemExit(f"cutedsl_memory.py: {error}; start it with `sglang-moe-reference exec --`") from None
    from sglang_moe_patches.changes.cutedsl_sizing.wrapper import keeps_buffers

    if not keeps_buffers(CuteDslMoEWrapper):
        raise SystemExit(
            f"cutedsl_memory.py: the wrapper of FlashInfer {flashinfer.__version__} keeps no buffers to add up"
        )
    disable_streams()
    sizes = (options.tokens, options.chunked_prefill_size, options.cuda_graph_max_bs)
    rows = [row(name, layout, *sizes) for name in options.models for layout in LAYOUTS]
    output.finish(options, output.result("cutedsl_memory", {"tokens": options.tokens, "rows": rows}), make_tables)
