"""Predict what moe-workspace does in the layers of a built model, for ``doctor --model``.

The prediction calls the same functions that decide in a forward pass. They receive tensors without memory (``meta``
tensors).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from sglang_moe_patches.changes.moe_workspace import column_slices, deferred_tensor, marlin, streams, triton
from sglang_moe_patches.changes.moe_workspace.column_slices import LayerShape, MarlinGemm, TritonGemm
from sglang_moe_patches.changes.moe_workspace.deferred_tensor import DeferredTensor, FusedMoeCall, SecondGemm
from sglang_moe_patches.core import runners
from sglang_moe_patches.core.dead_input import channel, probe
from sglang_moe_patches.core.patch import COLUMNS, OUTPUT_IN_DEAD_INPUT, SCRATCH_IN_DEAD_INPUT, BuiltModel, Decision


def decide(built: BuiltModel) -> Decision:
    """Return what moe-workspace does in a built model. The decision for one layer stands for all layers of the model.

    The layer is the first layer on Triton or Marlin that offers its dead input. If no layer offers it, the first layer
    on Triton or Marlin decides. If the model has no layer on these runners, or uses all-to-all, the result is only a
    reason why moe-workspace does nothing.
    """
    from sglang.srt.layers.moe import get_moe_a2a_backend

    if (backend := get_moe_a2a_backend().value) != "none":
        return Decision(
            reason=f"the experts exchange tokens by {backend}, which uses neither the Triton nor the Marlin runner"
        )
    offering, _ = probe.find_offers(built.model)
    # Layers that offer come first, because a model's first layer never offers its input.
    layers = offering + runners.find_layers(built.model)
    decides = {"triton": _decide_triton, "marlin": _decide_marlin}
    for experts in layers:
        if decide_layer := decides.get(str(runners.find_runner(experts))):
            return decide_layer(experts, built, offered=any(experts is each for each in offering))
    others = sorted({runners.find_runner(experts) or "a kernel of their quantization method" for experts in layers})
    return Decision(reason=f"the routed experts run on {', '.join(others)}, and not on Triton or Marlin")


def _decide_triton(experts: Any, built: BuiltModel, *, offered: bool) -> Decision:
    """Return whether a layer on the Triton runner computes in column slices, and how it uses its dead input.

    :param experts: a ``FusedMoE`` layer of the model.
    :param built: the model, with the number of tokens in its largest chunk.
    :param offered: whether the decoder layer around the experts offers its dead input.
    """
    import torch

    first, second = (getattr(experts, name, None) for name in ("w13_weight", "w2_weight"))
    tiles = built.tiles(experts)
    if first is None or second is None or tiles is None:
        return Decision(reason="the shapes or tiles of the experts' weights are not known")
    config, max_bytes = experts.moe_runner_config, column_slices.read_max_bytes()
    tokens, top_k, hidden = built.tokens, config.top_k or built.top_k, second.shape[1]
    itemsize = torch.bfloat16.itemsize
    if top_k * tokens * hidden * itemsize < column_slices.compute_min_tensor_bytes(max_bytes):
        return Decision(reason=_describe_size(tokens, top_k, hidden) + ", too small to cut")
    if not triton.can_run_in_columns(tokens, top_k, hooks=None, defer_sum=False):
        return Decision(reason=f"a top-k of {top_k} has no sum to cut")
    rows, inner = tokens * top_k, second.shape[2]
    inplace = runners.is_in_place(experts)
    is_scratch = offered and inplace and rows * inner <= tokens * hidden

    quantized = second.dtype.itemsize == 1
    scales = [getattr(experts, name, None) for name in ("w2_weight_scale_inv", "w2_weight_scale")]
    scale = next((_copy_to_meta(each) for each in scales if each is not None), None)
    blocks = getattr(getattr(experts.quant_method, "quant_config", None), "weight_block_size", None)
    rest = [None] * (deferred_tensor.CONFIG - deferred_tensor.REST)
    operands = (_make_meta_tensor(rows, inner), _copy_to_meta(second), None, None, scale, None)
    how = {"use_fp8_w8a8": quantized and second.is_floating_point(), "use_int8_w8a8": False, "block_shape": blocks}
    gemm = SecondGemm(*operands, (*rest, tiles), how)
    deferred = DeferredTensor((tokens, top_k, hidden), "meta", torch.bfloat16, gemm)
    call = FusedMoeCall(
        first.shape[1],
        first.nbytes + second.nbytes,
        triton.estimate_local_row_fraction(experts.num_experts != experts.num_local_experts),
        inplace,
        inplace and streams.may_read_concurrently(built.model.modules(), type(experts)),
        max_bytes,
        gemm.activations.data_ptr() if is_scratch else None,
    )
    token = deferred_tensor.current_call.set(call)
    try:
        sizes = deferred_tensor.describe(deferred, _make_meta_tensor(tokens, hidden))
    finally:
        deferred_tensor.current_call.reset(token)
    effect = SCRATCH_IN_DEAD_INPUT if is_scratch else OUTPUT_IN_DEAD_INPUT if offered and not inplace else ""
    return _decide_width(sizes, column_slices.choose_slice_width, max_bytes, cut=effect, uncut=effect)


def _decide_marlin(experts: Any, built: BuiltModel, *, offered: bool) -> Decision:
    """Return whether a layer on the Marlin runner computes in column slices, and how it uses its dead input.

    The functions of :mod:`.marlin` decide this, as in a forward pass. They receive ``meta`` tensors with the packed
    shapes, because the engine has not packed the weights yet.

    :param experts: a ``FusedMoE`` layer of the model.
    :param built: the model, with the number of tokens in its largest chunk.
    :param offered: whether the decoder layer around the experts offers its dead input.
    """
    import torch

    config, max_bytes = experts.moe_runner_config, column_slices.read_max_bytes()
    tokens, top_k, hidden = built.tokens, config.top_k or built.top_k, config.hidden_size
    inner = config.intermediate_size_per_partition
    if 2 * tokens * top_k * hidden < column_slices.compute_min_packed_tensor_bytes(max_bytes):
        return Decision(reason=_describe_size(tokens, top_k, hidden) + ", too small to cut")
    second = {name: each for name, each in experts.named_parameters() if name.startswith("w2_")}
    weights = next(each for name, each in second.items() if name in ("w2_weight", "w2_qweight", "w2_weight_packed"))
    scales = next(
        each for name, each in second.items() if name in ("w2_weight_scale", "w2_scales", "w2_weight_scale_inv")
    )
    local = weights.shape[0]
    bits = 8 * weights.nbytes // (local * hidden * inner)
    name = type(runners.find_quantization(experts)).__name__.lower()
    by_config = getattr(getattr(experts.quant_method, "quant_config", None), "desc_act", False)
    reordered = bool(by_config or getattr(getattr(experts, "scheme", None), "actorder", None))

    def make_packed_tensors(rows: int, columns: int) -> tuple[Any, Any]:
        """Return the weights and scales of a matrix [rows, columns] as Marlin packs them, as ``meta`` tensors."""
        words = _make_meta_tensor(local, rows // 16, columns * (bits // 2), dtype=torch.int32)
        groups = max(1, scales.numel() // (local * hidden))
        return words, _make_meta_tensor(local, max(1, groups * rows // inner), columns, dtype=scales.dtype)

    (w1, w1_scale), (w2, w2_scale) = make_packed_tensors(hidden, 2 * inner), make_packed_tensors(inner, hidden)
    hidden_states = _make_meta_tensor(tokens, hidden)
    arguments = {
        **{"hidden_states": hidden_states, "w1": w1, "w2": w2, "w1_scale": w1_scale, "w2_scale": w2_scale},
        **{
            "topk_ids": _make_meta_tensor(tokens, top_k, dtype=torch.int32),
            "num_bits": bits,
            "inplace": config.inplace,
        },
        **{"g_idx2": weights if reordered else None, "sort_indices2": None},
        "w2_zeros": second.get("w2_qzeros") if "awq" in name else None,
        "expert_map": None if experts.num_experts == experts.num_local_experts else weights,
    }
    with channel.moe_output_buffer_ctx(_make_meta_tensor(tokens, hidden) if offered else None):
        sizes = marlin.describe(arguments)
    # If the tensor is not cut, the engine's own function runs, which does not use the dead input.
    effect = OUTPUT_IN_DEAD_INPUT if offered else ""
    return _decide_width(sizes, column_slices.choose_packed_slice_width, max_bytes, cut=effect, uncut="")


def _decide_width(
    sizes: tuple[LayerShape, TritonGemm | MarlinGemm] | str,
    choose_width: Callable[..., int],
    max_bytes: int | None,
    *,
    cut: str,
    uncut: str,
) -> Decision:
    """Return whether moe-workspace cuts a layer's expert outputs into column slices, or why not.

    :param sizes: the layer's shape and its second GEMM, or the reason why the expert outputs cannot be cut into slices.
    :param choose_width: :func:`.column_slices.choose_slice_width` or :func:`.column_slices.choose_packed_slice_width`.
        The expert outputs are cut if this function returns less than the hidden size.
    :param max_bytes: memory limit of the runner in bytes, or ``None`` if the user set none.
    :param cut: text for :attr:`.Decision.effects` if the expert outputs are cut: how the layer then uses its dead
        input, such as :data:`OUTPUT_IN_DEAD_INPUT`. It is empty if the layer does not use the dead input.
    :param uncut: the same text if the expert outputs are not cut.
    """
    effects = (uncut,) if uncut else ()
    if isinstance(sizes, str):
        return Decision(effects, sizes)
    layer, gemm = sizes
    width = choose_width(layer, gemm, max_bytes)
    if width < layer.hidden:
        return Decision((COLUMNS, cut) if cut else (COLUMNS,), width=width)
    size = _describe_size(layer.tokens, layer.top_k, layer.hidden)
    if max_bytes is not None and gemm.compute_memory(layer).uncut <= max_bytes:
        return Decision(effects, f"{size}, which {column_slices.MOE_WORKSPACE_MB.name} allows")
    if advice := column_slices.advise(layer, gemm, choose_width):
        return Decision(effects, f"{size}, and cutting them costs more than 2 % of the layer's time; {advice}")
    return Decision(effects, f"{size}, and cutting them saves too little")


def _describe_size(tokens: int, top_k: int, hidden: int) -> str:
    """Return a phrase with the size of the expert outputs, in MB, for 16-bit elements."""
    return f"the expert outputs [tokens, top-k, hidden] are {2 * tokens * top_k * hidden / 1e6:,.0f} MB on this server"


def _make_meta_tensor(*shape: int, dtype: Any = None) -> Any:
    """Return a ``meta`` tensor with a given shape and dtype. The default dtype is bfloat16."""
    import torch

    return torch.empty(shape, dtype=dtype or torch.bfloat16, device="meta")


def _copy_to_meta(tensor: Any) -> Any:
    """Return a ``meta`` tensor with the shape, strides and dtype of ``tensor``."""
    import torch

    return torch.empty_strided(tuple(tensor.shape), tensor.stride(), dtype=tensor.dtype, device="meta")
