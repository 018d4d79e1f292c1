"""Column slices in Marlin: run the engine's own function ``fused_marlin_moe`` with replaced globals.

The engine allocates one tensor for the outputs of both GEMMs, as wide as the wider output. This module allocates the
first GEMM's output as a separate tensor, which is freed after the activation has read it. The second GEMM's output is
deferred: the sum over the top-k runs the engine's GEMM and this package's sum for one column slice after the other.

Marlin packs its weights in tiles of 16 rows and 64 columns. Packing moves columns only within a tile, so a column slice
of whole tiles has the same columns before and after packing. The GEMM needs contiguous weights and scales. The weights
and scales of a slice are not contiguous, so they are copied before the slice's GEMM. The same kernel launch also sums
the previous slice over the top-k. All kernels run on the caller's stream, and no tensor outlives the call.
"""

from __future__ import annotations

import ast
import functools
import inspect
import logging
from collections.abc import Callable
from contextvars import ContextVar
from dataclasses import dataclass
from types import FunctionType, ModuleType
from typing import Any, ClassVar

from sglang_moe_patches.changes.moe_workspace import column_slices, streams, triton
from sglang_moe_patches.changes.moe_workspace.column_slices import LayerShape, MarlinGemm
from sglang_moe_patches.core import engine, log, runners
from sglang_moe_patches.core.dead_input import channel, takers
from sglang_moe_patches.core.engine import require
from sglang_moe_patches.core.patch import Patcher, Plan, replace_globals

MODULE = "sglang.srt.layers.moe.fused_moe_triton.fused_marlin_moe"
NAME = "fused_marlin_moe"
GEMM = "moe_wna16_marlin_gemm"
SUM = "moe_sum_reduce"
#: Names of the first parameters of the engine's operator.
_PARAMETERS = ("hidden_states", "w1", "w2", "w1_scale", "w2_scale", "gating_output", "topk_weights", "topk_ids")
#: Names of the first parameters of the engine's GEMM. This module replaces the values of some of these parameters. The
#: GEMM's other parameters are passed on unchanged.
_GEMM_PARAMETERS = ("a", "c_or_none", "b_q_weight", "b_bias_or_none", "b_scales")
#: Source texts in the engine's function that use the tensor for both outputs, the first output or the second output.
#: This module supports only these uses.
_BOTH, _FIRST, _SECOND = "intermediate_cache13", "intermediate_cache1", "intermediate_cache3"
_ROWS = ("M * topk_ids.shape[1]", "M * topk")
_EXPECTED_USES = {
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


# --- Stand-ins for tensors -------------------------------------------------------------------------------------------


@dataclass(slots=True, eq=False)
class MarlinCall:
    """State of one call of Marlin's fused-MoE function that runs in column slices.

    :param rows: rows of the outputs of both GEMMs: tokens x top-k.
    :param gate_columns: columns of the first GEMM's output.
    :param slices: ``(start, stop)`` of each column slice of the second GEMM's output.
    :param first: the first GEMM's output, or ``None`` before the first GEMM and from the second GEMM on.
    :param gemm: arguments of the second GEMM: the activations, the positional arguments after the output, and the
        keyword arguments.
    :param is_zeroed: whether the engine clears the second GEMM's output, because the GEMM does not write some rows.
    """

    rows: int
    gate_columns: int
    slices: list[tuple[int, int]]
    first: Any = None
    gemm: tuple[Any, tuple[Any, ...], dict[str, Any]] | None = None
    is_zeroed: bool = False


_current_call: ContextVar[MarlinCall] = ContextVar("marlin_call")


@dataclass(slots=True, eq=False)
class _BothOutputs:
    """Stand-in without memory for the one tensor that the engine allocates for the outputs of both GEMMs.

    The engine indexes this tensor twice (``tensor[:elements]``): first for the first GEMM's output, then for the second
    GEMM's output. The stand-in returns a :class:`_FirstOutput`, then a :class:`DeferredOutput`.

    :param call: call of the engine's Marlin function to which the tensor belongs.
    :param allocate_elements: function that receives a number of elements, and allocates a one-dimensional tensor with
        so many elements.
    :param is_first_sliced: whether the engine has already indexed the tensor for the first GEMM's output.
    """

    call: MarlinCall
    allocate_elements: Callable[[int], Any]
    is_first_sliced: bool = False

    def __getitem__(self, part: slice) -> _FirstOutput | DeferredOutput:
        call = self.call
        if self.is_first_sliced:
            assert part.stop == call.rows * call.slices[-1][1]
            return DeferredOutput(call, self.allocate_elements)
        self.is_first_sliced = True
        assert part.stop == call.rows * call.gate_columns
        return _FirstOutput(call, self.allocate_elements)


@dataclass(slots=True, eq=False)
class _FirstOutput:
    """Stand-in for the output of the first GEMM until that GEMM runs.

    The output is allocated when the first GEMM runs. Only the :class:`MarlinCall` refers to this memory, so it can be
    freed before the second GEMM.

    :param call: call of the engine's Marlin function to which the output belongs.
    :param allocate_elements: function that allocates the output, as for :class:`_BothOutputs`.
    """

    call: MarlinCall
    allocate_elements: Callable[[int], Any]

    def allocate(self) -> Any:
        call = self.call
        call.first = self.allocate_elements(call.rows * call.gate_columns).view(call.rows, call.gate_columns)
        return call.first

    def view(self, *shape: int) -> Any:
        assert shape == (-1, self.call.gate_columns)
        return self if self.call.first is None else self.call.first


@dataclass(slots=True, eq=False)
class DeferredOutput:
    """Stand-in without memory for the output of the second GEMM, [tokens, top-k, hidden].

    The sum over the top-k later computes this output in column slices.

    :param call: call of the engine's Marlin function to which the output belongs.
    :param allocate_elements: function that allocates the slices, as for :class:`_BothOutputs`.
    :cvar dtype: always ``None``. The engine has special sums for some dtypes. For ``None`` it calls its general sum.
    """

    call: MarlinCall
    allocate_elements: Callable[[int], Any]
    dtype: ClassVar[None] = None

    def view(self, *shape: int) -> DeferredOutput:
        assert shape[-1] == self.call.slices[-1][1]
        return self

    def zero_(self) -> DeferredOutput:
        self.call.is_zeroed = True
        return self


class _MarlinTorch(takers.OutputTorch):
    """Stand-in for the module ``torch`` inside Marlin's function.

    Where the engine allocates one tensor for the outputs of both GEMMs, this object returns :class:`_BothOutputs`,
    which has no memory.

    :param sum_slices: function that computes a :class:`DeferredOutput` in slices, sums it over the top-k, multiplies
        the sum by a factor, and writes it into a tensor.
    """

    def __init__(
        self, torch_module: Any, symmetric_memory: runners.SymmetricMemory, sum_slices: Callable[..., Any]
    ) -> None:
        super().__init__(torch_module, symmetric_memory)
        self._sum = sum_slices

    def sum(self, expert_outputs: DeferredOutput, dim: int, out: Any) -> Any:
        assert dim == 1
        return self._sum(expert_outputs, out, 1.0)

    def empty(self, size: Any, **options: Any) -> Any:
        if len(size) != 1:
            return self._torch.empty(size, **options)
        return _BothOutputs(_current_call.get(), lambda length: self._torch.empty(length, **options))

    def zeros(self, size: Any, **options: Any) -> Any:
        if not isinstance(size, tuple):  # the workspace is allocated as usual
            return self._torch.zeros(size, **options)
        call = _current_call.get()
        call.is_zeroed = True
        return _BothOutputs(call, lambda length: self._torch.zeros(length, **options))

    def empty_like(self, tensor: Any) -> Any:
        buffer = self._take(tensor.shape, tensor.dtype, tensor.device)
        return self._torch.empty_like(tensor) if buffer is None else buffer


# --- Choosing the slices ---------------------------------------------------------------------------------------------


def choose_column_slices(arguments: dict[str, Any], max_bytes: int | None) -> list[tuple[int, int]]:
    """Return the column slices in which the second GEMM and its sum run: one slice if the expert outputs are not cut.

    :param arguments: the arguments of the engine's function, by name.
    :param max_bytes: memory limit of the runner in bytes, if the user set one.
    """
    sizes = describe(arguments)
    hidden = arguments["hidden_states"].shape[1]
    if isinstance(sizes, str):
        message = log.format_line("moe-workspace", "Marlin's [tokens, top-k, hidden] tensor stays uncut, because %s")
        log.log_once(logging.INFO, f"marlin {sizes}", message, sizes)
        return [(0, hidden)]
    return column_slices.split_columns(hidden, column_slices.choose_packed_slice_width(*sizes, max_bytes))


def describe(arguments: dict[str, Any]) -> tuple[LayerShape, MarlinGemm] | str:
    """Return the layer's shape and the properties of its second GEMM, which decide how wide the slices are.

    If the expert outputs cannot be cut, return the reason as a text instead.
    """
    # While the GPU is idle, CPU time before the first kernel delays the layer. Therefore no text is formatted
    # needlessly.
    hidden_states, w1 = arguments["hidden_states"], arguments["w1"]
    w2, scale = arguments["w2"], arguments["w2_scale"]
    tokens, hidden = hidden_states.shape
    if (reason := find_column_skip_reason(arguments, hidden, w2, scale)) is not None:
        return reason
    second_bytes = w2.nbytes + scale.nbytes
    layer = LayerShape(
        *(tokens, arguments["topk_ids"].shape[1], hidden, 16 * w2.shape[1], hidden_states.itemsize),
        gate_columns=_compute_gate_columns(w1, arguments),
        weight_bytes=w1.nbytes + arguments["w1_scale"].nbytes + second_bytes,
        local_row_fraction=triton.estimate_local_row_fraction(arguments["expert_map"] is not None),
    )
    buffer = channel.get_offered_buffer()
    output_fits = buffer is not None and channel.fits(
        buffer, hidden_states.shape, hidden_states.dtype, hidden_states.device
    )
    return layer, MarlinGemm(second_bytes // hidden, output_fits)


def find_column_skip_reason(arguments: dict[str, Any], hidden: int, w2: Any, scale: Any) -> str | None:
    """Return why a call's second GEMM cannot be computed in column slices, or ``None`` if it can."""
    bias = arguments.get("w2_bias")
    if arguments.get("no_combine"):
        return "the caller wants the expert outputs before they are summed (no_combine)"
    if arguments["inplace"] and streams.has_concurrent_reader:
        return "the layer writes its output over its input, which another stream may still read"
    if _has_elements(arguments["g_idx2"]) or _has_elements(arguments["sort_indices2"]):
        return "the layer reorders its activations (act-order)"
    if _has_elements(arguments["w2_zeros"]):
        return "the zero points of the weights are packed"
    if hidden % column_slices.MARLIN_TILE_COLUMNS:
        return f"Marlin's tiles do not divide {hidden} columns"
    if w2.shape[2] != hidden * (arguments["num_bits"] // 2):
        return f"the weights of the second GEMM have the unexpected shape {tuple(w2.shape)}"
    if scale.ndim != 3 or scale.shape[2] != hidden or not (scale.is_contiguous() and w2.is_contiguous()):
        return f"the weight scales of the second GEMM have the unexpected shape {tuple(scale.shape)}"
    if bias is not None and bias.shape != (len(w2), hidden):
        return "the bias of the second GEMM does not have one element for each column"
    return None


def _has_elements(tensor: Any) -> bool:
    return tensor is not None and tensor.numel() > 0


def _compute_gate_columns(w1: Any, arguments: dict[str, Any]) -> int:
    return int(w1.shape[2]) // (arguments["num_bits"] // 2)


# --- Running the slices ----------------------------------------------------------------------------------------------


def run_gemm_and_sum(
    deferred: DeferredOutput,
    output: Any,
    scale: float,
    *,
    gemm: Callable[..., Any],
    sum_and_copy: Callable[..., None],
) -> Any:
    """Compute the second GEMM's output and sum it over the top-k, one column slice after the other.

    :param deferred: stand-in for the second GEMM's output, with the arguments of the GEMM.
    :param output: tensor [tokens, hidden]. The sums are written into this tensor, which is returned.
    :param scale: factor of the sum.
    :param gemm: the engine's GEMM.
    :param sum_and_copy: this package's kernel. It sums a slice into the output's columns, and copies the next slice's
        weights and scales into contiguous memory.
    """
    call = deferred.call
    assert call.gemm is not None
    activations, (weights, bias, scales, *rest), kwargs = call.gemm
    call.gemm = None
    tokens, hidden = output.shape
    words = weights.shape[2] // hidden
    max_width = call.slices[0][1]
    scratch = deferred.allocate_elements(call.rows * max_width)
    own_weights, own_scales = (tensor.new_empty(tensor.numel() // hidden * max_width) for tensor in (weights, scales))
    to_sum = scratch.view(tokens, -1, max_width)[:0], output[:0, :max_width], scale
    for start, stop in call.slices:
        width = stop - start
        copies = []
        for tensor, memory, words_per_column in ((weights, own_weights, words), (scales, own_scales, 1)):
            shape = (*tensor.shape[:2], width * words_per_column)
            target = memory[: shape[0] * shape[1] * shape[2]].view(shape)
            copies.append((tensor, start * words_per_column, stop * words_per_column, target))
        sum_and_copy(*to_sum, copies)
        expert_outputs = scratch[: call.rows * width].view(call.rows, width)
        if call.is_zeroed:
            expert_outputs.zero_()
        gemm(
            activations,
            expert_outputs,
            copies[0][-1],
            None if bias is None else bias[:, start:stop].contiguous(),
            copies[1][-1],
            *rest,
            **kwargs | {"size_n": width},
        )
        to_sum = expert_outputs.view(tokens, -1, width), output[:, start:stop], scale
    sum_and_copy(*to_sum, ())
    return output


def install(patcher: Patcher, module: ModuleType, function: FunctionType) -> None:
    """Wrap Marlin's operator ``fused_marlin_moe`` in the module in which its callers look it up.

    :param module: the engine's module with the operator.
    :param function: the function that the operator runs (:func:`find_function`).
    """
    import torch

    from sglang_moe_patches.changes.moe_workspace.kernels.sum_and_copy import sum_and_copy

    def gemm(activations: Any, output: Any, *args: Any, **kwargs: Any) -> Any:
        if isinstance(output, DeferredOutput):
            output.call.first = None
            output.call.gemm = activations, args, kwargs
        else:
            getattr(module, GEMM)(activations, output.allocate(), *args, **kwargs)
        return output

    def sum_slices(expert_outputs: DeferredOutput, output: Any, scale: float) -> Any:
        return run_gemm_and_sum(expert_outputs, output, scale, gemm=getattr(module, GEMM), sum_and_copy=sum_and_copy)

    stand_in = _MarlinTorch(torch, runners.probe_symmetric_memory(), sum_slices)
    by_columns = replace_globals(function, module, patcher, torch=stand_in, **{GEMM: gemm, SUM: sum_slices})
    names, defaults = engine.list_parameters(function), function.__defaults__ or ()
    default_arguments = dict(zip(names[-len(defaults) :], defaults, strict=True))
    is_compiling = torch.compiler.is_compiling
    max_bytes = column_slices.read_max_bytes()
    min_bytes, topk_index = column_slices.compute_min_packed_tensor_bytes(max_bytes), _PARAMETERS.index("topk_ids")

    def wrap_operator(original: Callable[..., Any]) -> Callable[..., Any]:
        # The wrapper has no named parameters, because Python would pack them again in every call.
        def fused_marlin_moe(*args: Any, **kwargs: Any) -> Any:
            if is_compiling():
                return original(*args, **kwargs)
            hidden_states = args[0] if args else kwargs["hidden_states"]
            topk_ids = args[topk_index] if len(args) > topk_index else kwargs["topk_ids"]
            top_k = topk_ids.shape[1]
            if top_k * hidden_states.nbytes < min_bytes:
                return original(*args, **kwargs)
            arguments = default_arguments | dict(zip(names, args, strict=False)) | kwargs
            channel.withdraw_if_shared(hidden_states)
            slices = choose_column_slices(arguments, max_bytes)
            if len(slices) < 2:
                return original(*args, **kwargs)
            column_slices.report_slices("Marlin", top_k * hidden_states.nbytes, len(slices))
            call = MarlinCall(hidden_states.shape[0] * top_k, _compute_gate_columns(arguments["w1"], arguments), slices)
            token = _current_call.set(call)
            try:
                return by_columns(**arguments)
            finally:
                _current_call.reset(token)

        fused_marlin_moe.__wrapped__ = original  # type: ignore[attr-defined]
        return fused_marlin_moe

    patcher.wrap(module, NAME, wrap_operator)


# --- Probing the engine ----------------------------------------------------------------------------------------------


def find_function(module: ModuleType) -> FunctionType:
    """Return the Python function that Marlin's operator ``fused_marlin_moe`` runs.

    In newer releases the wrapper of the operator refers to the function. In older releases no object refers to the
    function, so it is defined again from the module's source, with the operator's default values.

    :raises engine.Unsupported: the operator is not the engine's own.
    """
    import torch

    called = engine.get(module, NAME)
    if called is getattr(torch.ops.sglang, NAME, None):
        function = engine.load_definition(module, NAME)
        arguments = getattr(torch.ops.sglang, NAME).default._schema.arguments
        function.__defaults__ = tuple(a.default_value for a in arguments if a.has_default_value())
    else:
        engine.require_unpatched(module, NAME)
        function = inspect.unwrap(called)
    require(getattr(function, "__globals__", None) is vars(module), f"{NAME} is not the engine's own operator")
    return function


def plan() -> Plan:
    """Return the plan for Marlin: how to install the column slices, or why they are not needed.

    :raises engine.Unsupported: the code of the engine's Marlin function, GEMM or sum is not as expected.
    """
    module = engine.import_module(MODULE)
    if not getattr(module, "_is_cuda", True):
        return Plan.not_needed("Marlin runs only with CUDA")
    require(engine.has_module("triton"), "Triton is not installed")
    function = find_function(module)
    engine.require_parameters(function, _PARAMETERS)
    gemm = engine.require_unpatched(module, GEMM)
    engine.require_parameters(gemm, _GEMM_PARAMETERS)
    engine.get(module, SUM)
    for name in ("torch", GEMM, SUM):
        require(
            engine.is_only_a_global(function, name), f"{NAME} uses {name} for something else than its module's global"
        )
    for name, expected in _EXPECTED_USES.items():
        uses = {use for use in engine.find_uses(function, name) if not use.startswith(f"{GEMM}(")}
        require(uses <= expected, f"{NAME} uses {name} in an unexpected way: {', '.join(sorted(uses - expected))}")
    allocations = [call for name in ("empty", "zeros") for call in engine.find_calls(function, f"torch.{name}")]
    sizes = [ast.unparse(call.args[0]) for call in allocations]
    joint_sizes = [size for size in sizes if size.endswith(",)")]
    require(
        len(joint_sizes) == 1 and all("max(" in size and size.endswith("K),)") for size in joint_sizes),
        f"{NAME} allocates tensors of unexpected sizes: {', '.join(sizes)}",
    )
    outputs = [ast.unparse(call.args[1]) for call in engine.find_calls(function, GEMM)]
    require(
        outputs == [_FIRST, _SECOND],
        f"{NAME} lets {GEMM} write into {', '.join(outputs)}; expected {_FIRST}, {_SECOND}",
    )
    runners.probe_symmetric_memory()
    return Plan.applied(functools.partial(install, module=module, function=function))
