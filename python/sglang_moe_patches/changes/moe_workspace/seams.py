"""Columns in the Triton runner: the engine's own sequence, with the names through which it allocates and computes."""

from __future__ import annotations

import ast
import contextlib
import functools
import inspect
import logging
from collections.abc import Callable
from contextvars import ContextVar
from types import FunctionType, ModuleType
from typing import Any

from sglang_moe_patches import engine, handoff, runners
from sglang_moe_patches.changes.moe_workspace import columns
from sglang_moe_patches.engine import require
from sglang_moe_patches.patch import Patcher, Plan, with_globals

logger = logging.getLogger(__name__)

SEQUENCE_MODULE, SEQUENCE = runners.TRITON_SEQUENCE
COMBINE = "moe_combine_topk"
INVOKE = "invoke_fused_moe_kernel"
SUM = "moe_sum_reduce"

#: How the engine's sequence uses the [tokens, top-k, hidden] tensor: all that the promise below knows, and what is
#: reached only where columns are not used (top-k of 2, LoRA hooks, a deferred sum).
_KNOWN_USES = {
    "intermediate_cache3.view",
    "intermediate_cache3.shape",
    "intermediate_cache3[:, 0]",
    "intermediate_cache3[:, 1]",
    "intermediate_cache3 if _use_intermediate else out_hidden_states.unsqueeze(0)",
    "hooks.after_down(intermediate_cache2, intermediate_cache3, topk_weights, topk_ids)",
    "intermediate_cache3=intermediate_cache3",
    "return intermediate_cache3",
}
#: The parameters of the engine's GEMM that we pass on changed, and where the others are that we look at.
_GEMM_PARAMETERS = ("A", "B", "bias", "C", "A_scale", "B_scale", "B_zp", "topk_weights", "topk_ids")
_CONFIG = 14
#: What quantizes the activations inside the engine's GEMM.
_QUANTIZERS = {
    "scaled_fp8_quant",
    "sglang_per_token_group_quant_fp8",
    "per_token_group_quant_fp8",
    "per_token_quant_int8",
    "sglang_per_token_group_quant_int8",
    "per_token_group_quant_int8",
}
#: Sums of at most this many tokens are compiled by the engine, in an order of their own. Their tensors are small.
_COMPILED_SUM_TOKENS = 32


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


class Activation:
    """The activation's output in a sequence that is in place: it may lie in the layer's dead input.

    :param columns: of that output.
    """

    __slots__ = ("columns", "in_dead_input")

    def __init__(self, columns: int) -> None:
        self.columns, self.in_dead_input = columns, False


_activation: ContextVar[Activation | None] = ContextVar("moe_workspace_activation", default=None)


class _Torch(handoff.OutputTorch):
    """Stands in for the name ``torch`` inside the sequence: three-dimensional tensors are promised.

    The layer's dead input, where it is on offer, becomes the output of a sequence that is not in place. In one that is,
    the activation's output lies in it: at the runner's peak that is the first GEMM's output and this one.
    """

    def empty(self, size: tuple[int, ...], *, device: Any, dtype: Any) -> Any:
        if len(size) == 3:
            return Promise(size, device, dtype)
        activation = _activation.get()
        if activation is not None and size[1] == activation.columns:
            memory = handoff.take_memory(size, dtype, device)
            if memory is not None:
                activation.in_dead_input = True
                return memory
        return self._torch.empty(size, device=device, dtype=dtype)


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


@functools.cache
def _say_once(reason: str) -> None:
    logger.info("moe-workspace: the [tokens, top-k, hidden] tensor stays whole, because %s", reason)


def slices(promise: Promise, output: Any) -> list[tuple[int, int]]:
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
            _say_once(reason)
            return [(0, hidden)]
    activation = _activation.get()
    width = columns.slice_width(
        tokens,
        top_k,
        hidden,
        activations.shape[1],
        promise.dtype.itemsize,
        activation_itemsize=1 if _quantizes(kwargs) else promise.dtype.itemsize,
        activation_elsewhere=activation is not None and activation.in_dead_input,
        block_columns=args[_CONFIG]["BLOCK_SIZE_N"],
        **({"scale_columns": shared, "scale_bytes": scale.stride(1) * scale.itemsize} if shared else {}),
    )
    return columns.ranges(hidden, width)


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
    todo = slices(promise, output)
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

    if _quantizes(kwargs):
        invoke = invoke_quantized
        if activations.dtype == promise.dtype:  # else the engine has quantized them already
            activations = Quantized(activations)
            with contextlib.suppress(_QuantizedNow):
                gemm(*todo[0], None)
    rows = tokens * top_k
    scratch = promise.make((rows * (todo[0][1] - todo[0][0]),))
    for start, stop in todo:
        part = scratch[: rows * (stop - start)].view(tokens, top_k, stop - start)
        gemm(start, stop, part)
        slice_sum(part, output[:, start:stop], scale)


def _quantizes(kwargs: dict[str, Any]) -> bool:
    """Whether the GEMM's activations have one byte."""
    return bool(kwargs["use_fp8_w8a8"] or kwargs["use_int8_w8a8"])


# --- Putting them into the sequence ----------------------------------------------------------------------------------


def install(patcher: Patcher, module: ModuleType, kernels: ModuleType) -> None:
    """Wrap the engine's sequence.

    :param module: the engine's, with the sequence.
    :param kernels: the engine's, with the GEMM.
    """
    import torch

    from sglang_moe_patches.kernels.moe_sum import moe_sum

    def quantizer(name: str) -> Callable[..., Any]:
        def quantize(activations: Any, *args: Any, **kwargs: Any) -> Any:
            original = getattr(kernels, name)
            if isinstance(activations, Quantized):
                return activations.by(original, args, kwargs)
            return original(activations, *args, **kwargs)

        return quantize

    gemm = getattr(kernels, INVOKE)
    invoke_quantized = with_globals(
        gemm, kernels, patcher, **{name: quantizer(name) for name in sorted(_QUANTIZERS & set(gemm.__code__.co_names))}
    )

    def invoke(activations: Any, weights: Any, bias: Any, output: Any, *args: Any, **kwargs: Any) -> None:
        if isinstance(output, Promise):
            output.gemm = ((activations, weights, bias, None, *args), kwargs)
        else:
            getattr(module, INVOKE)(activations, weights, bias, output, *args, **kwargs)

    def sum_(experts_output: Any, output: Any, scale: float) -> None:
        whole_sum = getattr(module, SUM)
        if isinstance(experts_output, Promise):
            gemm_and_sum(
                experts_output,
                output,
                scale,
                invoke=getattr(module, INVOKE),
                invoke_quantized=invoke_quantized,
                whole_sum=whole_sum,
                slice_sum=moe_sum,
            )
        else:
            whole_sum(experts_output, output, scale)

    original: FunctionType = engine.own(module, SEQUENCE)
    unchanged = getattr(module, SEQUENCE)  # another change of ours may be around it
    stand_ins = {"torch": _Torch(torch, runners.symmetric_memory()), INVOKE: invoke}
    if SUM in original.__code__.co_names:
        by_columns = with_globals(original, module, patcher, **stand_ins, **{SUM: sum_})
    else:
        combine = with_globals(getattr(module, COMBINE), module, patcher, **{SUM: sum_})
        by_columns = with_globals(original, module, patcher, **stand_ins, **{COMBINE: combine})
    is_compiling = torch.compiler.is_compiling

    def with_columns(hidden_states: Any, w1: Any, *args: Any, **kwargs: Any) -> Any:
        handoff.withdraw_if_shared(hidden_states)
        token = _activation.set(Activation(w1.shape[1] // 2) if kwargs["inplace"] else None)
        try:
            output = by_columns(hidden_states, w1, *args, **kwargs)
        finally:
            _activation.reset(token)
        return output.made if isinstance(output, Promise) else output

    def choose(hidden_states: Any, topk_ids: Any, hooks: Any, defer_sum: Any) -> Callable[..., Any]:
        if (
            topk_ids.shape[1] * hidden_states.nbytes < columns.SMALLEST_TENSOR_BYTES
            or is_compiling()
            or not acts(topk_ids.shape[0], topk_ids.shape[1], hooks, defer_sum)
        ):
            return unchanged
        return with_columns

    patcher.replace(
        module, SEQUENCE, _passing_on(original, choose, ("hidden_states", "topk_ids", "hooks", "defer_sum"))
    )


def acts(tokens: int, top_k: int, hooks: Any, defer_sum: Any) -> bool:
    """Whether a sequence with a large tensor may run in columns.

    LoRA's hooks and whoever sums later read the tensor. A top-k of 1 or 2 has no sum, or a plain addition.
    """
    return tokens > _COMPILED_SUM_TOKENS and top_k > 2 and not hooks and not defer_sum


def _passing_on(
    function: FunctionType, choose: Callable[..., Callable[..., Any]], looked_at: tuple[str, ...]
) -> FunctionType:
    """A function with the parameters of ``function``, which passes them on to the function that ``choose`` returns.

    Its code is written out for these parameters: taking some 25 keyword arguments as ``**kwargs``, and handing them on,
    would take longer than everything else that a small batch costs here.

    :param looked_at: parameters that ``choose`` gets; ``None`` for one that ``function`` does not have.
    """
    parameters = inspect.signature(function).parameters
    positional = [name for name, p in parameters.items() if p.kind is p.POSITIONAL_OR_KEYWORD]
    keywords = [name for name in parameters if name not in positional]
    arguments = ", ".join([*positional, *(f"{name}={name}" for name in keywords)])
    chosen = ", ".join(name if name in parameters else "None" for name in looked_at)
    made = eval(
        f"lambda {', '.join([*positional, '*', *keywords])}: choose({chosen})({arguments})",
        {"__name__": __name__, "choose": choose},
    )
    made.__defaults__, made.__kwdefaults__ = function.__defaults__, function.__kwdefaults__
    functools.update_wrapper(made, function)
    return made


# --- Looking ---------------------------------------------------------------------------------------------------------


def _uses(function: Callable[..., Any], name: str) -> set[str]:
    """What the source of ``function`` does with a local variable: the expressions and statements right around it."""
    tree = ast.parse(engine.source(function))
    return {
        ast.unparse(parent)
        for parent in ast.walk(tree)
        for child in ast.iter_child_nodes(parent)
        if isinstance(child, ast.Name) and child.id == name and isinstance(child.ctx, ast.Load)
    }


def _require_globals(function: Any, *names: str) -> None:
    for name in names:
        require(
            name in function.__code__.co_names and engine.only_a_global(function, name),
            f"in {function.__name__}, {name} is not a global of its module and nothing else",
        )


def plan() -> Plan:
    """Look at the sequence, its GEMM and its sum."""
    module = engine.module(SEQUENCE_MODULE)
    if getattr(module, "_is_hip", False):
        return Plan.not_needed("AMD's sums over the top-k have not been tried")
    require(engine.has_module("triton"), "there is no Triton")
    sequence, gemm = engine.own(module, SEQUENCE), engine.own(module, INVOKE)
    kernels = engine.module(gemm.__module__)
    require(engine.own(kernels, INVOKE) is gemm, f"{INVOKE} is not what {gemm.__module__} has")
    engine.require_parameters(sequence, ("hidden_states", "w1", "w2", "topk_weights", "topk_ids"))
    require("inplace" in engine.parameters(sequence), f"{SEQUENCE} takes no inplace")
    engine.require_parameters(gemm, _GEMM_PARAMETERS)
    require(engine.parameters(gemm)[_CONFIG] == "config", f"parameter {_CONFIG} of {INVOKE} is not its config")
    kinds = {p.kind for p in inspect.signature(sequence).parameters.values()}
    require(
        kinds <= {inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY} and len(kinds) == 2,
        f"{SEQUENCE} does not take positional arguments and then keyword arguments",
    )
    quantizers = {name for name in gemm.__code__.co_names if "quant" in name}
    require(quantizers <= _QUANTIZERS, f"{INVOKE} quantizes by {', '.join(sorted(quantizers - _QUANTIZERS))}")
    _require_globals(gemm, *quantizers)

    summing = sequence if SUM in sequence.__code__.co_names else engine.own(module, COMBINE)
    _require_globals(sequence, "torch", INVOKE, *([] if summing is sequence else [COMBINE]))
    _require_globals(summing, SUM)
    uses = _uses(sequence, "intermediate_cache3") | _uses(summing, "intermediate_cache3")
    require(uses <= _KNOWN_USES, f"{SEQUENCE} has another use for its tensor: {', '.join(sorted(uses - _KNOWN_USES))}")
    allocated = [ast.unparse(call.args[0]) for call in engine.calls(sequence, "torch.empty")]
    require("(total_tokens, N // 2)" in allocated, f"{SEQUENCE} allocates {', '.join(allocated)}")
    promised = [size for size in allocated if size == "(num_tokens, topk, w2.shape[1])"]
    require(
        len(promised) == 2 and len({size for size in allocated if size.count(",") > 1}) == 1,
        f"{SEQUENCE} allocates {', '.join(allocated)}",
    )
    runners.symmetric_memory()
    return Plan.applied(functools.partial(install, module=module, kernels=kernels))
