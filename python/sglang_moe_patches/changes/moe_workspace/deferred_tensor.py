"""The [tokens, top-k, hidden] tensor as a promise: computed and summed for a range of columns at a time."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable
from contextvars import ContextVar
from typing import Any

from sglang_moe_patches.changes.moe_workspace import column_slices
from sglang_moe_patches.core import log

#: The parameters of the engine's GEMM that we pass on changed, and where the others are that we look at.
GEMM_PARAMETERS = ("A", "B", "bias", "C", "A_scale", "B_scale", "B_zp", "topk_weights", "topk_ids")
CONFIG = 14


# --- What stands in for tensors --------------------------------------------------------------------------------------


class Promise:
    """A [tokens, top-k, hidden] tensor that the sequence believes to have allocated.

    The second GEMM, told to write it, leaves its arguments here instead; the sum then runs both, a slice at a time.
    Everything is kept on this object: two forwards in flight, in whatever threads, have nothing in common.
    """

    __slots__ = ("device", "dtype", "gemm", "made", "shape")

    def __init__(self, shape: tuple[int, int, int], device: Any, dtype: Any) -> None:
        self.shape, self.device, self.dtype = shape, device, dtype
        self.gemm: tuple[tuple[Any, ...], dict[str, Any]] | None = None
        self.made: Any = None

    def view(self, *shape: int) -> Promise:
        assert shape == self.shape
        return self

    def unsqueeze(self, dim: int) -> Any:
        """The tensor itself after all: without a sum over the top-k (``no_combine``) it is the output."""
        self.made = self.make(self.shape)
        return self.made.unsqueeze(dim)

    def make(self, shape: tuple[int, ...]) -> Any:
        """Memory of this dtype and device."""
        import torch

        return torch.empty(shape, device=self.device, dtype=self.dtype)


class _QuantizedNow(Exception):
    """Ends the engine's GEMM where it has quantized its input."""


class Quantized:
    """Activations that the engine's GEMM quantizes once for all slices, in the way that it chooses.

    They are given up as soon as they are quantized, before the slices' memory is allocated: the first GEMM that asks
    for them ends there.
    """

    __slots__ = ("_activations", "_result", "dtype")

    def __init__(self, activations: Any) -> None:
        self._activations, self._result, self.dtype = activations, None, activations.dtype

    def by(self, quantize: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if self._result is None:
            self._result = quantize(self._activations, *args, **kwargs)
            self._activations = None
            raise _QuantizedNow
        return self._result


class Call:
    """A run of the sequence: what its promise has to know of the rest.

    :param gate_columns: of the first GEMM's output.
    :param weight_bytes: of both GEMMs.
    :param share: of the rows, those whose expert is here.
    :param inplace: the output is the input.
    :param copied: the input is read on another stream, too: no slice but the last is written to it before the end.
    :param most_bytes: what the runner may hold, where that was asked for.
    """

    __slots__ = ("copied", "gate_columns", "in_dead_input", "inplace", "most_bytes", "share", "weight_bytes")

    def __init__(
        self,
        gate_columns: int,
        weight_bytes: int,
        *,
        share: float = 1.0,
        inplace: bool = False,
        copied: bool = False,
        most_bytes: int | None = None,
    ) -> None:
        self.gate_columns, self.weight_bytes, self.share = gate_columns, weight_bytes, share
        self.inplace, self.copied, self.most_bytes = inplace, copied, most_bytes
        self.in_dead_input = False
        """The activation's output lies in the layer's dead input."""


current_call: ContextVar[Call] = ContextVar("moe_workspace_call")


# --- Running slices --------------------------------------------------------------------------------------------------


def scale_columns(scale: Any, hidden: int, block_shape: Any) -> int | None:
    """Columns of the weights that share a scale: 1, a block's, 0 where all share one; ``None``: not known.

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


def column_ranges(promise: Promise, output: Any) -> list[tuple[int, int]]:
    """The ranges of columns in which the promised tensor is computed and summed; one where it stays whole."""
    assert promise.gemm is not None
    args, kwargs = promise.gemm
    activations, weights, bias, _, _, scale, zero_points = args[:7]
    tokens, top_k, hidden = promise.shape
    shared = scale_columns(scale, hidden, kwargs.get("block_shape"))
    for fits, reason in (
        (weights.ndim == 3 and weights.shape[1] == hidden, f"the weights are {tuple(weights.shape)}"),
        (bias is None or bias.shape[1:] == (hidden,), "the bias is not one per column"),
        (shared is not None, f"the weights' scales are {scale is not None and tuple(scale.shape)}"),
        (zero_points is None, "zero points are packed"),
        (
            output.shape == (tokens, hidden) and output.stride(1) == 1 and output.dtype == promise.dtype,
            "the output is no plain [tokens, hidden] tensor",
        ),
    ):
        if not fits:
            message = "moe-workspace: the [tokens, top-k, hidden] tensor stays whole, because %s"
            log.once(logging.INFO, f"columns {reason}", message, reason)
            return [(0, hidden)]
    call = current_call.get()
    width = column_slices.slice_width(
        tokens,
        top_k,
        hidden,
        activations.shape[1],
        promise.dtype.itemsize,
        activation_itemsize=1 if quantizes(kwargs) else promise.dtype.itemsize,
        activation_elsewhere=call.in_dead_input,
        copied=call.copied,
        gate_columns=call.gate_columns,
        weight_bytes=call.weight_bytes,
        share=call.share,
        tiles=args[CONFIG],
        most_bytes=call.most_bytes,
        **({"scale_columns": shared, "scale_bytes": scale.stride(1) * scale.itemsize} if shared else {}),
    )
    return column_slices.ranges(hidden, width)


def gemm_and_sum(
    promise: Promise,
    output: Any,
    scale: float,
    *,
    invoke: Callable[..., None],
    invoke_quantized: Callable[..., None],
    whole_sum: Callable[..., None],
    slice_sum: Callable[..., None],
) -> None:
    """Compute the promised tensor and sum it over the top-k, slice by slice.

    :param output: [tokens, hidden]; written.
    :param scale: factor of the sum.
    :param invoke: the engine's GEMM.
    :param invoke_quantized: the same, which takes :class:`Quantized` activations.
    :param whole_sum: the engine's sum, where there is one slice.
    :param slice_sum: our sum, into columns of the output.
    """
    todo = column_ranges(promise, output)
    assert promise.gemm is not None
    args, kwargs = promise.gemm
    promise.gemm = None
    tokens, top_k, hidden = promise.shape
    activations, weights, bias, _, activations_scale, weights_scale, zero_points, *rest = args
    del args
    if len(todo) == 1:
        whole = promise.make(promise.shape)
        invoke(activations, weights, bias, whole, activations_scale, weights_scale, zero_points, *rest, **kwargs)
        whole_sum(whole, output, scale)
        return
    shared = scale_columns(weights_scale, hidden, kwargs.get("block_shape"))

    def gemm(start: int, stop: int, part: Any) -> None:
        invoke(
            activations,
            weights[:, start:stop],
            None if bias is None else bias[:, start:stop],
            part,
            activations_scale,
            weights_scale[:, start // shared : -(-stop // shared)] if shared else weights_scale,
            zero_points,
            *rest,
            **kwargs,
        )

    if quantizes(kwargs):
        invoke = invoke_quantized
        if activations.dtype == promise.dtype:  # else the engine has quantized them already
            activations = Quantized(activations)
            with contextlib.suppress(_QuantizedNow):
                gemm(*todo[0], None)
    rows = tokens * top_k
    scratch = promise.make((rows * (todo[0][1] - todo[0][0]),))
    # Where the input is read elsewhere, it is written when the last GEMM is done, as the engine does.
    waiting = promise.make((tokens, todo[-1][0])) if current_call.get().copied else None
    for start, stop in todo:
        part = scratch[: rows * (stop - start)].view(tokens, top_k, stop - start)
        gemm(start, stop, part)
        into = output if waiting is None or stop == hidden else waiting
        slice_sum(part, into[:, start:stop], scale)
    if waiting is not None:
        output[:, : waiting.shape[1]].copy_(waiting)


def quantizes(kwargs: dict[str, Any]) -> bool:
    """Whether the GEMM's activations have one byte."""
    return bool(kwargs["use_fp8_w8a8"] or kwargs["use_int8_w8a8"])
