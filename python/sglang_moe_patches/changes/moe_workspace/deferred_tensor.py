"""Compute the expert outputs of the Triton runner in column slices, with a stand-in for the tensor of these outputs.

Where the engine allocates the expert outputs, it receives a :class:`DeferredTensor`. When the engine calls its second
GEMM, this stand-in only records the GEMM's arguments (:class:`SecondGemm`). When the engine calls its sum over the
top-k, the GEMM and this package's sum run for each slice (:func:`run_gemm_and_sum`).
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

#: Names of the first parameters of the engine's GEMM.
GEMM_PARAMETERS = ("A", "B", "bias", "C", "A_scale", "B_scale", "B_zp", "topk_weights", "topk_ids")
#: Position of the GEMM's parameter ``config``, the tile configuration.
CONFIG = 14
REST = GEMM_PARAMETERS.index("topk_weights")
"""Position of the GEMM's parameter ``topk_weights``. ``SecondGemm.rest`` has the arguments from this position on."""


# --- Stand-ins for tensors -------------------------------------------------------------------------------------------


class SecondGemm(NamedTuple):
    """Arguments with which the engine called its second GEMM, except the output.

    :param rest: positional arguments from ``topk_weights`` on.
    :param kwargs: keyword arguments.
    """

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
        """The engine's tile configuration for this call."""
        return self.rest[CONFIG - REST]

    def run(self, kernel: Callable[..., None], output: Any, columns: tuple[int, int] | None = None) -> None:
        """Run the engine's GEMM ``kernel``.

        :param output: tensor for the result. It is ``None`` if the kernel only quantizes (:class:`QuantizedOnce`).
        :param columns: ``(start, stop)`` of the hidden columns to compute. The kernel receives views of the weights,
            bias and scales with these columns. If ``columns`` is ``None``, the kernel computes all columns, and the
            weights, bias and scales may have any shape.
        """
        weights, bias, scale = self.weights, self.bias, self.weights_scale
        if columns is not None:
            start, stop = columns
            shared_columns = find_columns_per_scale(scale, weights.shape[1], self.kwargs.get("block_shape"))
            weights, bias = weights[:, start:stop], None if bias is None else bias[:, start:stop]
            scale = scale[:, start // shared_columns : -(-stop // shared_columns)] if shared_columns else scale
        operands = (self.activations, weights, bias, output, self.activations_scale, scale, self.zero_points)
        kernel(*operands, *self.rest, **self.kwargs)


@dataclass(slots=True, eq=False)
class DeferredTensor:
    """Stand-in without memory for the tensor of expert outputs, [tokens, top-k, hidden].

    Each call of the engine's fused-MoE function has its own stand-in, so calls in different threads share no state.

    :param gemm: arguments of the second GEMM, or ``None`` before the engine calls this GEMM.
    :param tensor: real tensor of expert outputs, if the engine returns it without a sum (``no_combine``). Otherwise
        ``None``.
    """

    shape: tuple[int, int, int]
    device: Any
    dtype: Any
    gemm: SecondGemm | None = None
    tensor: Any = None

    def view(self, *shape: int) -> DeferredTensor:
        """Return this object. The engine calls ``view`` only with the shape that this object already has."""
        assert shape == self.shape
        return self

    def unsqueeze(self, dim: int) -> Any:
        """Allocate the real tensor of expert outputs, and return it with one more dimension.

        The engine calls this method only if it does not sum over the top-k (``no_combine``). The engine's function then
        returns the real tensor.
        """
        self.tensor = self.allocate(self.shape)
        return self.tensor.unsqueeze(dim)

    def allocate(self, shape: tuple[int, ...]) -> Any:
        """Allocate a new tensor with the dtype and device of this object."""
        import torch

        return torch.empty(shape, device=self.device, dtype=self.dtype)


class _QuantizationDone(Exception):
    """Exception that ends the engine's GEMM after it has quantized its input."""


class QuantizedOnce:
    """Activations of the second GEMM, which are quantized once for all slices.

    The engine quantizes the activations inside its GEMM. The first call of the GEMM does nothing else, because
    :meth:`quantize` raises ``_QuantizationDone`` to end the call. The 16-bit activations are then freed, before slices
    allocate memory. Later calls of the GEMM compute the slices from the quantized activations.
    """

    __slots__ = ("_activations", "_result", "dtype")

    def __init__(self, activations: Any) -> None:
        self._activations, self._result, self.dtype = activations, None, activations.dtype

    def quantize(self, quantize: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """In the first call, quantize the activations and keep the result. Then raise ``_QuantizationDone``, to end the
        engine's GEMM early. In later calls, return the kept result.
        """
        if self._result is None:
            self._result = quantize(self._activations, *args, **kwargs)
            self._activations = None
            raise _QuantizationDone
        return self._result


@dataclass(slots=True)
class FusedMoeCall:
    """Properties of one call of the engine's fused-MoE function. They decide how the call runs in column slices.

    :param gate_columns: columns of the first GEMM's output.
    :param weight_bytes: bytes of both GEMMs' weights.
    :param local_row_fraction: fraction of the rows whose expert is on this rank.
    :param inplace: whether the output is written over the input.
    :param uses_staging: whether slices are first written to a staging buffer, because another stream may still read
        the input.
    :param max_bytes: memory limit of the runner in bytes, or ``None`` if the user set none.
    :param dead_input_address: address of the dead input if the engine asked for the memory of the activation's output
        and received the dead input, else ``None``. gpt-oss's activation does not use the received memory, and allocates
        its own output. So the dead input is in use only if the second GEMM's input begins at this address.
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


def find_columns_per_scale(scale: Any, hidden: int, block_shape: Any) -> int | None:
    """Return how many columns of the weights share a scale. The result 0 stands for all columns.

    :param scale: scales of the second GEMM's weights: [experts], [experts, hidden, ...] or [experts, blocks of columns,
        ...].
    :param block_shape: columns and rows of a block, for block quantization.
    :returns: ``None`` if the scales have an unknown layout.
    """
    if scale is None or scale.ndim < 2:
        return 0
    if scale.shape[1] == hidden:
        return 1
    if block_shape and block_shape[0] and scale.shape[1] == -(-hidden // block_shape[0]):
        return int(block_shape[0])
    return None


def find_column_skip_reason(
    gemm: SecondGemm, deferred: DeferredTensor, output: Any, shared_columns: int | None
) -> str | None:
    """Return why the second GEMM cannot be computed and summed in column slices, or ``None`` if it can.

    :param shared_columns: the result of :func:`find_columns_per_scale`.
    """
    tokens, _, hidden = deferred.shape
    if gemm.weights.ndim != 3 or gemm.weights.shape[1] != hidden:
        return f"the weights of the second GEMM have the unexpected shape {tuple(gemm.weights.shape)}"
    if gemm.bias is not None and gemm.bias.shape[1:] != (hidden,):
        return "the bias of the second GEMM does not have one element for each column"
    if shared_columns is None:
        return f"the weight scales of the second GEMM have the unexpected shape {tuple(gemm.weights_scale.shape)}"
    if gemm.zero_points is not None:
        return "the zero points of the weights are packed"
    if output.shape != (tokens, hidden) or output.stride(1) != 1 or output.dtype != deferred.dtype:
        return "the output is no [tokens, hidden] tensor with adjacent columns"
    return None


def choose_column_slices(deferred: DeferredTensor, output: Any) -> list[tuple[int, int]]:
    """Return the column slices in which the expert outputs are computed and summed: one slice if they are not cut."""
    sizes = describe(deferred, output)
    hidden = deferred.shape[2]
    if isinstance(sizes, str):
        message = log.format_line("moe-workspace", "Triton's [tokens, top-k, hidden] tensor stays uncut, because %s")
        log.log_once(logging.INFO, f"columns {sizes}", message, sizes)
        return [(0, hidden)]
    return column_slices.split_columns(hidden, column_slices.choose_slice_width(*sizes, current_call.get().max_bytes))


def describe(deferred: DeferredTensor, output: Any) -> tuple[LayerShape, TritonGemm] | str:
    """Return the layer's shape and the properties of its second GEMM, which decide how wide the slices are.

    If the expert outputs cannot be cut, return the reason as a text instead.
    """
    gemm, (tokens, top_k, hidden) = deferred.gemm, deferred.shape
    assert gemm is not None
    scale, call = gemm.weights_scale, current_call.get()
    shared_columns = find_columns_per_scale(scale, hidden, gemm.kwargs.get("block_shape"))
    if (reason := find_column_skip_reason(gemm, deferred, output, shared_columns)) is not None:
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
    scales = (
        {"columns_per_scale": shared_columns, "scale_stride_bytes": scale.stride(1) * scale.itemsize}
        if shared_columns
        else {}
    )
    return layer, TritonGemm(
        gemm.tiles,
        quantizes(gemm.kwargs),
        activation_in_dead_input=gemm.activations.data_ptr() == call.dead_input_address,
        uses_staging=call.uses_staging,
        **scales,
    )


def run_gemm_and_sum(
    deferred: DeferredTensor,
    output: Any,
    scale: float,
    *,
    invoke: Callable[..., None],
    invoke_quantized: Callable[..., None],
    whole_sum: Callable[..., None],
    slice_sum: Callable[..., None],
) -> None:
    """Compute the expert outputs and sum them over the top-k, one column slice after the other.

    :param deferred: stand-in for the expert outputs, with the second GEMM's arguments.
    :param output: tensor [tokens, hidden], into which the sums are written.
    :param scale: factor of the sum.
    :param invoke: the engine's GEMM.
    :param invoke_quantized: copy of the engine's GEMM that accepts :class:`QuantizedOnce` activations.
    :param whole_sum: the engine's sum, which is used if there is only one slice.
    :param slice_sum: this package's sum, which writes columns of the output.
    """
    slices = choose_column_slices(deferred, output)
    tokens, top_k, hidden = deferred.shape
    # ``deferred`` keeps no reference to the GEMM's arguments, so that the activations can be freed.
    gemm, deferred.gemm = deferred.gemm, None
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
            # The name is bound again, so that the 16-bit activations are freed before slices allocate memory.
            gemm = gemm._replace(activations=QuantizedOnce(gemm.activations))
            with contextlib.suppress(_QuantizationDone):
                gemm.run(invoke, None, columns=slices[0])
    rows, width = tokens * top_k, slices[0][1]
    scratch = deferred.allocate((rows * width,))
    # Another stream may read the layer's input until the last GEMM has run. The output lies in the input's memory.
    staging = deferred.allocate((tokens, slices[-1][0])) if current_call.get().uses_staging else None
    for start, stop in slices:
        expert_outputs = scratch[: rows * (stop - start)].view(tokens, top_k, stop - start)
        gemm.run(invoke, expert_outputs, columns=(start, stop))
        target = output if staging is None or stop == hidden else staging
        slice_sum(expert_outputs, target[:, start:stop], scale)
    if staging is not None:
        output[:, : staging.shape[1]].copy_(staging)


def quantizes(kwargs: dict[str, Any]) -> bool:
    """Return whether a GEMM with these keyword arguments quantizes its activations to one byte (FP8 or INT8)."""
    return bool(kwargs["use_fp8_w8a8"] or kwargs["use_int8_w8a8"])
