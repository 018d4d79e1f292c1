"""Columns in Marlin: the engine's own ``fused_marlin_moe``, with the names through which it allocates and computes.

Marlin holds one tensor for both GEMMs' outputs, as wide as the wider one. Here the first output is a tensor of its own,
given up when the activation has read it, and the second one is a promise: the sum over the top-k runs the engine's GEMM
and our sum for one range of columns after another. Marlin's weights lie in tiles of 16 rows and 64 columns, whose
rows have the layer's whole width, so that a range of columns is no view: its weights and scales, whose columns change
places within a tile alone, are copied into memory of a range's size ahead of each GEMM, in the launch that sums the
range before. All of it is on the stream of the call, and nothing outlives it.

What the engine has is an operator. The function under it runs with other names to look up.
"""

from __future__ import annotations

import ast
import functools
import inspect
import logging
from collections.abc import Callable
from contextvars import ContextVar
from types import FunctionType, ModuleType
from typing import Any

from sglang_moe_patches.changes.moe_workspace import column_slices, streams, triton
from sglang_moe_patches.core import engine, log, runners
from sglang_moe_patches.core.dead_input import channel, takers
from sglang_moe_patches.core.engine import require
from sglang_moe_patches.core.patch import Patcher, Plan, with_globals

MODULE = "sglang.srt.layers.moe.fused_moe_triton.fused_marlin_moe"
NAME = "fused_marlin_moe"
GEMM = "moe_wna16_marlin_gemm"
SUM = "moe_sum_reduce"
#: Of the operator: those whose places we go by.
_PARAMETERS = ("hidden_states", "w1", "w2", "w1_scale", "w2_scale", "gating_output", "topk_weights", "topk_ids")
#: Of the engine's GEMM: those that we pass on changed, and the one before what we pass on.
_GEMM_PARAMETERS = ("a", "c_or_none", "b_q_weight", "b_bias_or_none", "b_scales")
#: How the engine's function uses the tensor of both outputs, and each of them.
_BOTH, _FIRST, _SECOND = "intermediate_cache13", "intermediate_cache1", "intermediate_cache3"
_ROWS = ("M * topk_ids.shape[1]", "M * topk")
_KNOWN_USES = {
    _BOTH: {f"{_BOTH}[:{rows} * {width}]" for rows in _ROWS for width in ("2 * N", "gemm1_n", "K")},
    _FIRST: {f"{_FIRST}.view"},
    _SECOND: {
        *(f"{_SECOND}.{name}" for name in ("view", "zero_", "dtype", "is_contiguous", "shape")),
        f"torch.sum({_SECOND}, dim=1, out=output)",
        f"moe_topk_sum({_SECOND}, output)",
        f"{SUM}({_SECOND}, output, routed_scaling_factor)",
        f"{SUM}({_SECOND}, output, 1.0)",
        f"return {_SECOND}",
    },
}


# --- What stands in for tensors --------------------------------------------------------------------------------------


class Call:
    """A run of the engine's function in columns.

    :param rows: tokens x top-k.
    :param gate_columns: of the first GEMM's output.
    :param ranges: of the second one's columns.
    """

    __slots__ = ("first", "gate_columns", "gemm", "ranges", "rows", "zeroed")

    def __init__(self, rows: int, gate_columns: int, ranges: list[tuple[int, int]]) -> None:
        self.rows, self.gate_columns, self.ranges = rows, gate_columns, ranges
        self.first: Any = None
        """The first GEMM's output, until the second one begins."""
        self.gemm: tuple[Any, tuple[Any, ...], dict[str, Any]] | None = None
        """What the second GEMM was given: activations, what follows its output, keyword arguments."""
        self.zeroed = False
        """The engine clears the second output, of which the GEMM leaves some rows alone."""


_current: ContextVar[Call] = ContextVar("marlin_call")


class _Both:
    """The one tensor for both outputs, which is never allocated: the first one is asked for first."""

    __slots__ = ("_call", "_halved", "_make")

    def __init__(self, call: Call, make: Callable[[int], Any]) -> None:
        self._call, self._make, self._halved = call, make, False

    def __getitem__(self, part: slice) -> _First | Output:
        call = self._call
        if self._halved:
            assert part.stop == call.rows * call.ranges[-1][1]
            return Output(call, self._make)
        self._halved = True
        assert part.stop == call.rows * call.gate_columns
        return _First(call, self._make)


class _First:
    """The first GEMM's output: made when that GEMM runs, and kept by the call alone."""

    __slots__ = ("_call", "_make")

    def __init__(self, call: Call, make: Callable[[int], Any]) -> None:
        self._call, self._make = call, make

    def fill(self) -> Any:
        call = self._call
        call.first = self._make(call.rows * call.gate_columns).view(call.rows, call.gate_columns)
        return call.first

    def view(self, *shape: int) -> Any:
        assert shape == (-1, self._call.gate_columns)
        return self if self._call.first is None else self._call.first


class Output:
    """The second GEMM's output, [tokens, top-k, hidden]: a promise that the sum keeps.

    :param make: memory of so many elements.
    """

    __slots__ = ("call", "make")
    dtype = None
    """``None`` is none of the dtypes for which the engine has a special sum: it takes the general one."""

    def __init__(self, call: Call, make: Callable[[int], Any]) -> None:
        self.call, self.make = call, make

    def view(self, *shape: int) -> Output:
        assert shape[-1] == self.call.ranges[-1][1]
        return self

    def zero_(self) -> Output:
        self.call.zeroed = True
        return self


class _Torch(takers.OutputTorch):
    """Stands in for the name ``torch`` inside the function: its one-dimensional tensor is both outputs.

    :param sum_: sums an :class:`Output` over the top-k, into a tensor, times a factor.
    """

    def __init__(self, torch_module: Any, symmetric_memory: runners.SymmetricMemory, sum_: Callable[..., Any]) -> None:
        super().__init__(torch_module, symmetric_memory)
        self._sum = sum_

    def sum(self, experts_output: Output, dim: int, out: Any) -> Any:
        assert dim == 1
        return self._sum(experts_output, out, 1.0)

    def empty(self, size: Any, **how: Any) -> Any:
        if len(size) != 1:
            return self._torch.empty(size, **how)
        return _Both(_current.get(), lambda length: self._torch.empty(length, **how))

    def zeros(self, size: Any, **how: Any) -> Any:
        if not isinstance(size, tuple):  # the workspace
            return self._torch.zeros(size, **how)
        call = _current.get()
        call.zeroed = True
        return _Both(call, lambda length: self._torch.zeros(length, **how))

    def empty_like(self, tensor: Any) -> Any:
        buffer = self._take(tensor.shape, tensor.dtype, tensor.device)
        return self._torch.empty_like(tensor) if buffer is None else buffer


# --- Which ranges ----------------------------------------------------------------------------------------------------


def column_ranges(given: dict[str, Any], most_bytes: int | None) -> list[tuple[int, int]]:
    """The ranges of columns in which the second GEMM and its sum run; one where they stay whole.

    :param given: the function's arguments, by name.
    :param most_bytes: what the runner may hold, where that was asked for.
    """
    # From an idle GPU the host's time to get here counts: nothing is put into words that nobody reads.
    hidden_states, w1, w2, scale = given["hidden_states"], given["w1"], given["w2"], given["w2_scale"]
    tokens, hidden = hidden_states.shape
    if (reason := _whole_because(given, hidden, w2, scale)) is not None:
        message = "moe-workspace: Marlin's [tokens, top-k, hidden] tensor stays whole, because %s"
        log.once(logging.INFO, f"marlin {reason}", message, reason)
        return column_slices.ranges(hidden, hidden)
    buffer, second_bytes = channel.offered(), w2.nbytes + scale.nbytes
    width = column_slices.packed_slice_width(
        tokens,
        given["topk_ids"].shape[1],
        hidden,
        16 * w2.shape[1],
        hidden_states.itemsize,
        gate_columns=_gate_columns(w1, given),
        column_bytes=second_bytes // hidden,
        weight_bytes=w1.nbytes + given["w1_scale"].nbytes + second_bytes,
        share=triton.share(given["expert_map"] is not None),
        output_elsewhere=buffer is not None
        and channel.fits(buffer, hidden_states.shape, hidden_states.dtype, hidden_states.device),
        most_bytes=most_bytes,
    )
    return column_slices.ranges(hidden, width)


def _whole_because(given: dict[str, Any], hidden: int, w2: Any, scale: Any) -> str | None:
    """Why no range of columns can be had by itself; ``None`` where it can."""
    bias = given.get("w2_bias")
    if given.get("no_combine"):
        return "the tensor itself is asked for"
    if given["inplace"] and streams.beside:
        return "its output is its input, which another stream may still read"
    if _some(given["g_idx2"]) or _some(given["sort_indices2"]):
        return "activations are reordered (act-order)"
    if _some(given["w2_zeros"]):
        return "zero points are packed"
    if hidden % column_slices.MARLIN_TILE:
        return f"Marlin's tiles do not divide {hidden} columns"
    if w2.shape[2] != hidden * (given["num_bits"] // 2):
        return f"the weights are {tuple(w2.shape)}"
    if scale.ndim != 3 or scale.shape[2] != hidden or not (scale.is_contiguous() and w2.is_contiguous()):
        return f"the weights' scales are {tuple(scale.shape)}"
    if bias is not None and bias.shape != (len(w2), hidden):
        return "the bias is not one per column"
    return None


def _some(tensor: Any) -> bool:
    return tensor is not None and tensor.numel() > 0


def _gate_columns(w1: Any, given: dict[str, Any]) -> int:
    return int(w1.shape[2]) // (given["num_bits"] // 2)


# --- Running them ----------------------------------------------------------------------------------------------------


def gemm_and_sum(
    promise: Output,
    output: Any,
    scale: float,
    *,
    gemm: Callable[..., Any],
    sum_and_copy: Callable[..., None],
) -> Any:
    """Compute the promised tensor and sum it over the top-k, range by range.

    :param output: [tokens, hidden]; written, and returned.
    :param scale: factor of the sum.
    :param gemm: the engine's.
    :param sum_and_copy: ours: sums a range into its columns of the output, and copies the next one's weights and scales
        into memory of their own.
    """
    call = promise.call
    assert call.gemm is not None
    activations, (weights, bias, scales, *rest), kwargs = call.gemm
    call.gemm = None
    tokens, hidden = output.shape
    words = weights.shape[2] // hidden
    widest = call.ranges[0][1]
    values = promise.make(call.rows * widest)
    own_weights, own_scales = (tensor.new_empty(tensor.numel() // hidden * widest) for tensor in (weights, scales))
    summed = values.view(tokens, -1, widest)[:0], output[:0, :widest], scale
    for start, stop in call.ranges:
        width = stop - start
        copied = []
        for tensor, memory, of_column in ((weights, own_weights, words), (scales, own_scales, 1)):
            shape = (*tensor.shape[:2], width * of_column)
            target = memory[: shape[0] * shape[1] * shape[2]].view(shape)
            copied.append((tensor, start * of_column, stop * of_column, target))
        sum_and_copy(*summed, copied)
        part = values[: call.rows * width].view(call.rows, width)
        if call.zeroed:
            part.zero_()
        gemm(
            activations,
            part,
            copied[0][-1],
            None if bias is None else bias[:, start:stop].contiguous(),
            copied[1][-1],
            *rest,
            **kwargs | {"size_n": width},
        )
        summed = part.view(tokens, -1, width), output[:, start:stop], scale
    sum_and_copy(*summed, ())
    return output


def install(patcher: Patcher, module: ModuleType, function: FunctionType) -> None:
    """Wrap the engine's operator, where its callers find it.

    :param module: the engine's.
    :param function: what the operator runs.
    """
    import torch

    from sglang_moe_patches.changes.moe_workspace.kernels.sum_and_copy import sum_and_copy

    def gemm(activations: Any, output: Any, *args: Any, **kwargs: Any) -> Any:
        if isinstance(output, Output):
            output.call.first = None
            output.call.gemm = activations, args, kwargs
        else:
            getattr(module, GEMM)(activations, output.fill(), *args, **kwargs)
        return output

    def sum_(experts_output: Output, output: Any, scale: float) -> Any:
        return gemm_and_sum(
            experts_output,
            output,
            scale,
            gemm=getattr(module, GEMM),
            sum_and_copy=sum_and_copy,
        )

    stand_in = _Torch(torch, runners.symmetric_memory(), sum_)
    by_columns = with_globals(function, module, patcher, torch=stand_in, **{GEMM: gemm, SUM: sum_})
    names, defaults = engine.parameters(function), function.__defaults__ or ()
    by_default = dict(zip(names[-len(defaults) :], defaults, strict=True))
    is_compiling = torch.compiler.is_compiling
    most_bytes = column_slices.most_bytes()
    smallest, place = column_slices.smallest_packed_tensor(most_bytes), _PARAMETERS.index("topk_ids")

    def make(original: Callable[..., Any]) -> Callable[..., Any]:
        # Arguments that it named would be put together anew at every call.
        def fused_marlin_moe(*args: Any, **kwargs: Any) -> Any:
            if is_compiling():
                return original(*args, **kwargs)
            hidden_states = args[0] if args else kwargs["hidden_states"]
            topk_ids = args[place] if len(args) > place else kwargs["topk_ids"]
            top_k = topk_ids.shape[1]
            if top_k * hidden_states.nbytes < smallest:
                return original(*args, **kwargs)
            given = by_default | dict(zip(names, args, strict=False)) | kwargs
            channel.withhold_if_shared(hidden_states)
            ranges = column_ranges(given, most_bytes)
            if len(ranges) < 2:
                return original(*args, **kwargs)
            call = Call(hidden_states.shape[0] * top_k, _gate_columns(given["w1"], given), ranges)
            token = _current.set(call)
            try:
                return by_columns(**given)
            finally:
                _current.reset(token)

        fused_marlin_moe.__wrapped__ = original  # type: ignore[attr-defined]
        return fused_marlin_moe

    patcher.wrap(module, NAME, make)


# --- Looking ---------------------------------------------------------------------------------------------------------


def function_of(module: ModuleType) -> FunctionType:
    """What the engine's operator runs: in late releases it is in what is called instead; in others nothing can be asked
    for it, and it is made again from the module's code, with the defaults of the operator.

    :raises engine.Unsupported: what goes by the name is not the engine's own.
    """
    import torch

    found = engine.get(module, NAME)
    if found is getattr(torch.ops.sglang, NAME, None):
        function = engine.defined(module, NAME)
        arguments = getattr(torch.ops.sglang, NAME).default._schema.arguments
        function.__defaults__ = tuple(one.default_value for one in arguments if one.has_default_value())
    else:
        engine.own(module, NAME)
        function = inspect.unwrap(found)
    require(getattr(function, "__globals__", None) is vars(module), f"{NAME} is not the engine's own operator")
    return function


def plan() -> Plan:
    """Look at Marlin's function, its GEMM and its sum."""
    module = engine.module(MODULE)
    if not getattr(module, "_is_cuda", True):
        return Plan.not_needed("there is no Marlin without CUDA")
    require(engine.has_module("triton"), "there is no Triton")
    function = function_of(module)
    engine.require_parameters(function, _PARAMETERS)
    gemm = engine.own(module, GEMM)
    engine.require_parameters(gemm, _GEMM_PARAMETERS)
    engine.get(module, SUM)
    for name in ("torch", GEMM, SUM):
        require(engine.only_a_global(function, name), f"in {NAME}, {name} is not only a global of its module")
    for name, known in _KNOWN_USES.items():
        uses = {use for use in engine.uses(function, name) if not use.startswith(f"{GEMM}(")}
        require(uses <= known, f"{NAME} has another use for {name}: {', '.join(sorted(uses - known))}")
    made = [call for name in ("empty", "zeros") for call in engine.calls(function, f"torch.{name}")]
    sizes = [ast.unparse(call.args[0]) for call in made]
    both = [size for size in sizes if size.endswith(",)")]
    require(
        len(both) == 1 and all("max(" in size and size.endswith("K),)") for size in both),
        f"{NAME} allocates {', '.join(sizes)}",
    )
    outputs = [ast.unparse(call.args[1]) for call in engine.calls(function, GEMM)]
    require(outputs == [_FIRST, _SECOND], f"{NAME} has {GEMM} write {', '.join(outputs)}")
    runners.symmetric_memory()
    return Plan.applied(functools.partial(install, module=module, function=function))
