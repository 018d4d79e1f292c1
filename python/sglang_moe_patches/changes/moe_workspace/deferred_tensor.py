"""The Triton runner's [tokens, top-k, hidden] tensor, deferred: computed and summed one column slice at a time.

The allocation gives a :class:`DeferredTensor`, the GEMM's call is captured in it (:class:`SecondGemm`), and the sum
runs the engine's GEMM and our sum (:func:`gemm_and_sum`).
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, NamedTuple

from sglang_moe_patches.changes.moe_workspace import column_slices
from sglang_moe_patches.changes.moe_workspace.column_slices import LayerShape, TritonGemm
from sglang_moe_patches.core import log

#: The first parameters of the engine's GEMM, and where its configuration (tiles) is.
GEMM_PARAMETERS = ("A", "B", "bias", "C", "A_scale", "B_scale", "B_zp", "topk_weights", "topk_ids")
CONFIG = 14
REST = GEMM_PARAMETERS.index("topk_weights")
"""From here on :class:`SecondGemm` does not name the parameters."""


# --- What stands in for tensors --------------------------------------------------------------------------------------


class SecondGemm(NamedTuple):
    """Operands of a call of the engine's second GEMM, all but its output."""

    activations: Any
    weights: Any
    bias: Any
    activations_scale: Any
    weights_scale: Any
    zero_points: Any
    rest: tuple[Any, ...]
    kwargs: dict[str, Any]

    @property
    def tiles(self) -> dict[str, int]:
        return self.rest[CONFIG - REST]

    def run(self, kernel: Callable[..., None], output: Any, columns: tuple[int, int] | None = None) -> None:
        """Compute ``output``, or only these columns of the hidden size: on views of weights, bias and scales.

        Without ``columns`` the operands are passed as they are: the tensor may stay whole because they have an
        unexpected shape.
        """
        weights, bias, scale = self.weights, self.bias, self.weights_scale
        if columns is not None:
            start, stop = columns
            group = columns_per_scale(scale, weights.shape[1], self.kwargs.get("block_shape"))
            weights, bias = weights[:, start:stop], None if bias is None else bias[:, start:stop]
            scale = scale[:, start // group : -(-stop // group)] if group else scale
        operands = (self.activations, weights, bias, output, self.activations_scale, scale, self.zero_points)
        kernel(*operands, *self.rest, **self.kwargs)


@dataclass(slots=True, eq=False)
class DeferredTensor:
    """A [tokens, top-k, hidden] tensor that the engine's function believes to have allocated.

    All state is on this object: two forwards in flight, in whatever threads, share nothing.
    """

    shape: tuple[int, int, int]
    device: Any
    dtype: Any
    gemm: SecondGemm | None = None
    tensor: Any = None
    """The tensor itself, where it is the output."""

    def view(self, *shape: int) -> DeferredTensor:
        assert shape == self.shape
        return self

    def unsqueeze(self, dim: int) -> Any:
        """Allocate the tensor after all: without a sum over the top-k (``no_combine``) it is the output."""
        self.tensor = self.allocate(self.shape)
        return self.tensor.unsqueeze(dim)

    def allocate(self, shape: tuple[int, ...]) -> Any:
        """Memory of this dtype and device."""
        import torch

        return torch.empty(shape, device=self.device, dtype=self.dtype)


class _QuantizationDone(Exception):
    """Ends the engine's GEMM where it has quantized its input."""


class QuantizedOnce:
    """Activations that the engine's GEMM quantizes once for all slices, in the way that it chooses.

    The GEMM that quantizes them ends there, so that the 16-bit activations are freed before slices allocate memory.
    """

    __slots__ = ("_activations", "_result", "dtype")

    def __init__(self, activations: Any) -> None:
        self._activations, self._result, self.dtype = activations, None, activations.dtype

    def quantize(self, quantize: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if self._result is None:
            self._result = quantize(self._activations, *args, **kwargs)
            self._activations = None
            raise _QuantizationDone
        return self._result


@dataclass(slots=True)
class FusedMoeCall:
    """A ``fused_moe`` call in column slices: what its deferred tensor needs of the rest.

    :param gate_columns: of the first GEMM's output.
    :param weight_bytes: of both GEMMs.
    :param local_row_fraction: rows with an expert on this rank, of all rows.
    :param inplace: the output lies over the input.
    :param uses_staging: the input is read on another stream, too: slices go to a staging buffer first.
    :param max_bytes: what the runner may hold, where the user set that.
    :param dead_input_address: of the layer's dead input, where the activation was given it for its output. Some
        activations return a tensor of their own instead (gpt-oss's).
    """

    gate_columns: int
    weight_bytes: int
    local_row_fraction: float
    inplace: bool
    uses_staging: bool
    max_bytes: int | None
    dead_input_address: int | None = None


current_call: ContextVar[FusedMoeCall] = ContextVar("moe_workspace_call")


# --- Running slices --------------------------------------------------------------------------------------------------


def columns_per_scale(scale: Any, hidden: int, block_shape: Any) -> int | None:
    """Columns of the weights that share a scale: 1, a block's, 0 where all share one; ``None``: unknown layout.

    :param scale: of the second GEMM's weights: [experts], [experts, hidden, ...] or [experts, blocks of columns, ...].
    :param block_shape: columns and rows of a block, for block quantization.
    """
    if scale is None or scale.ndim < 2:
        return 0
    if scale.shape[1] == hidden:
        return 1
    if block_shape and block_shape[0] and scale.shape[1] == -(-hidden // block_shape[0]):
        return int(block_shape[0])
    return None


def column_skip_reason(gemm: SecondGemm, deferred: DeferredTensor, output: Any, group: int | None) -> str | None:
    """Why columns of this GEMM cannot be computed on views, or summed into views; ``None``: go ahead.

    :param group: what :func:`columns_per_scale` returned.
    """
    tokens, _, hidden = deferred.shape
    if gemm.weights.ndim != 3 or gemm.weights.shape[1] != hidden:
        return f"the weights are {tuple(gemm.weights.shape)}"
    if gemm.bias is not None and gemm.bias.shape[1:] != (hidden,):
        return "the bias is not one per column"
    if group is None:
        return f"the weights' scales are {tuple(gemm.weights_scale.shape)}"
    if gemm.zero_points is not None:
        return "zero points are packed"
    if output.shape != (tokens, hidden) or output.stride(1) != 1 or output.dtype != deferred.dtype:
        return "the output is no plain [tokens, hidden] tensor"
    return None


def choose_column_slices(deferred: DeferredTensor, output: Any) -> list[tuple[int, int]]:
    """The column slices in which the deferred tensor is computed and summed; one if it stays uncut."""
    sizes = describe(deferred, output)
    hidden = deferred.shape[2]
    if isinstance(sizes, str):
        message = log.format_line("moe-workspace", "the [tokens, top-k, hidden] tensor stays uncut, because %s")
        log.once(logging.INFO, f"columns {sizes}", message, sizes)
        return [(0, hidden)]
    return column_slices.split_columns(hidden, column_slices.slice_width(*sizes, current_call.get().max_bytes))


def describe(deferred: DeferredTensor, output: Any) -> tuple[LayerShape, TritonGemm] | str:
    """What the width of slices depends on, or why there can be none."""
    gemm, (tokens, top_k, hidden) = deferred.gemm, deferred.shape
    assert gemm is not None
    scale, call = gemm.weights_scale, current_call.get()
    group = columns_per_scale(scale, hidden, gemm.kwargs.get("block_shape"))
    if (reason := column_skip_reason(gemm, deferred, output, group)) is not None:
        return reason
    layer = LayerShape(
        tokens,
        top_k,
        hidden,
        intermediate=gemm.activations.shape[1],
        itemsize=deferred.dtype.itemsize,
        gate_columns=call.gate_columns,
        weight_bytes=call.weight_bytes,
        local_row_fraction=call.local_row_fraction,
    )
    scales = {"columns_per_scale": group, "scale_stride_bytes": scale.stride(1) * scale.itemsize} if group else {}
    return layer, TritonGemm(
        gemm.tiles,
        quantizes(gemm.kwargs),
        activation_in_dead_input=gemm.activations.data_ptr() == call.dead_input_address,
        uses_staging=call.uses_staging,
        **scales,
    )


def gemm_and_sum(
    deferred: DeferredTensor,
    output: Any,
    scale: float,
    *,
    invoke: Callable[..., None],
    invoke_quantized: Callable[..., None],
    whole_sum: Callable[..., None],
    slice_sum: Callable[..., None],
) -> None:
    """Compute the deferred tensor and sum it over the top-k, slice by slice.

    :param output: [tokens, hidden]; written.
    :param scale: factor of the sum.
    :param invoke: the engine's GEMM.
    :param invoke_quantized: the same, which takes :class:`QuantizedOnce` activations.
    :param whole_sum: the engine's sum, where there is one slice.
    :param slice_sum: our sum, into columns of the output.
    """
    slices = choose_column_slices(deferred, output)
    tokens, top_k, hidden = deferred.shape
    gemm, deferred.gemm = deferred.gemm, None  # so that its activations can be freed
    assert gemm is not None
    if len(slices) == 1:
        whole = deferred.allocate(deferred.shape)
        gemm.run(invoke, whole)
        whole_sum(whole, output, scale)
        return
    column_slices.report_slices("Triton", tokens * top_k * hidden * deferred.dtype.itemsize, len(slices))
    if quantizes(gemm.kwargs):
        invoke = invoke_quantized
        if gemm.activations.dtype == deferred.dtype:  # else the engine has quantized them already
            # Rebound, not kept beside: the 16-bit activations must be free before slices allocate memory.
            gemm = gemm._replace(activations=QuantizedOnce(gemm.activations))
            with contextlib.suppress(_QuantizationDone):
                gemm.run(invoke, None, columns=slices[0])
    rows, width = tokens * top_k, slices[0][1]
    scratch = deferred.allocate((rows * width,))
    # Another stream may read the input, over which the output lies, until the last GEMM has run.
    staging = deferred.allocate((tokens, slices[-1][0])) if current_call.get().uses_staging else None
    for start, stop in slices:
        expert_outputs = scratch[: rows * (stop - start)].view(tokens, top_k, stop - start)
        gemm.run(invoke, expert_outputs, columns=(start, stop))
        target = output if staging is None or stop == hidden else staging
        slice_sum(expert_outputs, target[:, start:stop], scale)
    if staging is not None:
        output[:, : staging.shape[1]].copy_(staging)


def quantizes(kwargs: dict[str, Any]) -> bool:
    """Whether the GEMM's activations have one byte."""
    return bool(kwargs["use_fp8_w8a8"] or kwargs["use_int8_w8a8"])
