"""One FlashInfer wrapper for CuteDSL that all layers with the same configuration share, instead of one wrapper for each
layer.
"""

from __future__ import annotations

import ast
import functools
import sys
from collections.abc import Callable, Mapping
from types import FunctionType
from typing import TYPE_CHECKING, Any
from weakref import WeakValueDictionary

from sglang_moe_patches.changes.cutedsl_sizing.launcher import (
    Pools,
    extend_server_args,
    is_sized_by_engine,
    read_forward_limits,
)
from sglang_moe_patches.changes.cutedsl_sizing.tokens import (
    compute_max_forward_tokens,
    compute_wrapper_tokens,
    split_tokens,
)
from sglang_moe_patches.core import engine, log, runners
from sglang_moe_patches.core.dead_input import channel
from sglang_moe_patches.core.patch import Patcher, Plan, Status, around, replace_globals

if TYPE_CHECKING:
    import torch

_TOKEN_ARGUMENTS = ("x", "x_sf", "token_selected_experts", "token_final_scales", "per_token_scale")

#: Names of modules that may contain ``get_is_capture_mode``. Each engine release has one of these modules.
_CAPTURE_MODULES = (
    "sglang.srt.model_executor.runner_utils.capture_mode",
    "sglang.srt.model_executor.cuda_graph_runner",
)


class SharedMoE:
    """Replacement for FlashInfer's ``CuteDslMoEWrapper``. Several layers share one replacement.

    Layers can share a replacement if their wrappers would have the same arguments, and if the layers run one after
    another.

    :param wrapper: FlashInfer's wrapper, with its buffers for CUDA graphs.
    :param ranks: number of data-parallel ranks whose tokens are computed together. Only log messages use it.
    :param is_capturing: function that returns whether the engine captures CUDA graphs now, or runs the warm-up before a
        capture.
    """

    def __init__(self, wrapper: Any, ranks: int, is_capturing: Callable[[], bool]) -> None:
        self._wrapper = wrapper
        self._ranks = ranks
        self._is_capturing = is_capturing
        self._warned = False
        # The output is written into the offered buffer or a new tensor. FlashInfer's own output buffer, which would be
        # four fifths of the memory of all buffers, is not needed.
        wrapper._moe_output = None

    def __getattr__(self, name: str) -> Any:
        return getattr(self._wrapper, name)

    def run(self, **arguments: Any) -> torch.Tensor:
        """Run a layer's experts, with the same keyword arguments as the method ``run`` of FlashInfer's wrapper.

        :returns: a tensor [tokens, hidden]. The tensor is the buffer that the decoder layer offers, or a new tensor.
        :raises ValueError: CUDA graphs are captured, and the buffers are too small for the tokens.
        """
        wrapper = self._wrapper
        ids = arguments["token_selected_experts"]
        tokens = ids.shape[0]
        output = _allocate_output((tokens, wrapper.hidden_size), wrapper.output_dtype, ids.device)
        if tokens <= wrapper.max_num_tokens:
            return self._run_into(output, arguments)
        self._report_larger_forward(tokens)
        by_token = {name: arguments[name] for name in _TOKEN_ARGUMENTS if arguments.get(name) is not None}
        for rows in split_tokens(tokens, wrapper.max_num_tokens):
            self._run_into(output[rows], {**arguments, **{name: value[rows] for name, value in by_token.items()}})
        return output

    def _run_into(self, output: torch.Tensor, arguments: Mapping[str, Any]) -> torch.Tensor:
        """Run the experts on at most ``max_num_tokens`` tokens, and write the result into ``output``."""
        # FlashInfer's `run` has no parameter for its output, and writes into the attribute `_moe_output`.
        self._wrapper._moe_output = output
        try:
            self._wrapper.run(**arguments)
        finally:
            self._wrapper._moe_output = None
        return output

    def _report_larger_forward(self, tokens: int) -> None:
        """Log a warning, once, that a forward pass has more tokens than fit into the buffers and runs in slices.

        :raises ValueError: CUDA graphs are captured. A forward pass in a CUDA graph cannot run in slices.
        """
        size = self._wrapper.max_num_tokens
        flag = f"--max-prefill-tokens {-(-tokens // self._ranks)}"
        if self._is_capturing():
            message = f"a CUDA graph of {tokens} tokens does not fit into CuteDSL's buffers for {size} tokens"
            raise ValueError(log.format_line("cutedsl-sizing", f"{message}; set {flag} or lower --cuda-graph-max-bs"))
        if not self._warned:
            self._warned = True
            message = (
                f"a forward pass has {tokens} tokens, but CuteDSL's buffers have room for {size}: it runs in slices, "
            )
            message += f"slower but with the same result. Start the server with {flag} to avoid this."
            log.logger.warning(log.format_line("cutedsl-sizing", message))


def _allocate_output(shape: tuple[int, int], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Return the buffer that the decoder layer offers for the output, or a new tensor if no buffer is offered or the
    buffer does not fit.
    """
    import torch

    buffer = None if torch.compiler.is_compiling() else channel.take_output(shape, dtype, device)
    return torch.empty(shape, dtype=dtype, device=device) if buffer is None else buffer


_largest_pools = Pools()
_shared: WeakValueDictionary[tuple, SharedMoE] = WeakValueDictionary()


def _wrap_ensure(
    original: Callable[[Any], None], flashinfer: Any, is_capturing: Callable[[], bool], without_output: Any = None
) -> Any:
    """Wrap the engine's function ``ensure_cutedsl_wrapper``, which constructs a layer's CuteDSL wrapper.

    While the engine's function runs, :func:`_construct_wrapper` replaces FlashInfer's class, so that the layer receives
    a shared wrapper.

    :param without_output: subclass of FlashInfer's class to construct instead (:func:`_make_class_without_output`). If
        it is ``None``, FlashInfer's class itself is constructed.
    """

    @functools.wraps(original)
    def ensure_cutedsl_wrapper(layer: Any) -> None:
        if getattr(layer, "_cutedsl_wrapper", None) is not None:
            return
        real = flashinfer.CuteDslMoEWrapper
        flashinfer.CuteDslMoEWrapper = functools.partial(
            _construct_wrapper, without_output or real, layer, is_capturing
        )
        try:
            original(layer)
        finally:
            flashinfer.CuteDslMoEWrapper = real

    return ensure_cutedsl_wrapper


class _BufferTorch:
    """Stand-in for the module ``torch`` in the code that allocates the buffers of FlashInfer's wrapper.

    The output buffer gets no memory, because :class:`SharedMoE` does not use it. It may be the largest buffer, and it
    would be allocated when the KV cache already occupies the rest of the GPU. The output buffer is the only buffer
    whose dtype is not in ``kept_dtypes``.
    """

    def __init__(self, torch_module: Any, kept_dtypes: set[Any]) -> None:
        self._torch, self._kept_dtypes = torch_module, kept_dtypes

    def __getattr__(self, name: str) -> Any:
        return getattr(self._torch, name)

    def empty(self, size: Any, *, dtype: torch.dtype, device: Any) -> torch.Tensor:
        """Replacement for ``torch.empty``. For the output buffer it returns a ``meta`` tensor, which has no memory. Any
        other buffer is allocated as usual.
        """
        return self._torch.empty(size, dtype=dtype, device=device if dtype in self._kept_dtypes else "meta")


_BUFFERS = "_allocate_buffers"


def _make_class_without_output(real: Any, patcher: Patcher) -> Any:
    """Return a subclass of FlashInfer's wrapper that allocates no memory for its output.

    If FlashInfer's class does not allocate its buffers as expected, return FlashInfer's class unchanged.
    """
    import torch

    allocate = vars(real).get(_BUFFERS)
    if not isinstance(allocate, FunctionType) or not engine.is_only_a_global(allocate, "torch"):
        return real
    allocations = [
        (ast.unparse(call.args[0]), ast.unparse(word.value))
        for call in engine.find_calls(allocate, "torch.empty")
        for word in call.keywords
        if word.arg == "dtype"
    ]
    others = [dtype.removeprefix("torch.") for _, dtype in allocations if dtype.startswith("torch.")]
    outputs = [each for each in allocations if not each[1].startswith("torch.")]
    if outputs != [("(self.max_num_tokens, self.hidden_size)", "self.output_dtype")]:
        return real
    kept_dtypes = {getattr(torch, name) for name in others}
    stand_in = replace_globals(
        allocate, sys.modules[allocate.__module__], patcher, torch=_BufferTorch(torch, kept_dtypes)
    )
    return type(real.__name__, (real,), {"__module__": real.__module__, _BUFFERS: stand_in})


def _construct_wrapper(real: Any, layer: Any, is_capturing: Callable[[], bool], **arguments: Any) -> Any:
    """Return the CuteDSL wrapper for a layer. Layers with the same arguments share one wrapper, unless the server may
    run two layers at the same time.

    The engine calls this function in place of ``CuteDslMoEWrapper(**arguments)``.

    :param real: FlashInfer's class ``CuteDslMoEWrapper``, or its subclass that allocates no output.
    :param layer: the layer that needs the wrapper.
    :param is_capturing: function that returns whether the engine captures CUDA graphs now, as in :class:`SharedMoE`.
    """
    from sglang.srt.server_args import get_global_server_args

    server_args = get_global_server_args()
    dispatcher = getattr(layer, "dispatcher", None)
    # Without data-parallel attention, data-parallel replicas never receive each other's tokens.
    ranks = server_args.dp_size if server_args.enable_dp_attention else 1
    arguments["max_num_tokens"] = compute_wrapper_tokens(
        compute_max_forward_tokens(read_forward_limits(server_args, _largest_pools)),
        ranks,
        getattr(dispatcher, "max_num_tokens", None),
        getattr(dispatcher, "ep_size", 1),
    )
    key = tuple(sorted(arguments.items()))
    # Layers may share a wrapper if they run one after another on the device. Two streams whose work is joined before
    # the next layer are safe. A draft model is safe, too, because it runs on the target model's stream. Sharing is not
    # safe with two-batch overlap, which interleaves two batches, and with multiplexing, which runs prefill and decode
    # on two streams.
    shares = not (server_args.enable_two_batch_overlap or getattr(server_args, "enable_pdmux", False))
    if shares and key in _shared:
        return _shared[key]
    wrapper = real(**arguments)
    if not wrapper.use_cuda_graph:
        return wrapper  # FlashInfer's wrapper then has no buffers and no limit
    shared = SharedMoE(wrapper, ranks, is_capturing)
    if shares:
        message = f"all layers share one set of buffers for {wrapper.max_num_tokens} tokens"
        log.logger.info(log.format_line("cutedsl-sizing", message))
        _shared[key] = shared
    return shared


@around
def _wrap_init_memory_pool(original: Callable[..., None], self: Any, *args: Any, **kwargs: Any) -> None:
    original(self, *args, **kwargs)
    _largest_pools.requests = max(_largest_pools.requests, self.req_to_token_pool.size)
    if not getattr(self.server_args, "prefill_only_disable_kv_cache", False):
        _largest_pools.cache_tokens = max(_largest_pools.cache_tokens, self.max_total_num_tokens)
    _largest_pools.request_tokens = max(_largest_pools.request_tokens, self.model_config.context_len)


def _wrap_apply(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def apply(self: Any, layer: Any, dispatch_output: Any, *args: Any, **kwargs: Any) -> Any:
        # The shared experts read the MoE input after the routed experts have written their output.
        channel.withdraw_if_shared(dispatch_output.hidden_states)
        return original(self, layer, dispatch_output, *args, **kwargs)

    return apply


# --- Probing the engine ----------------------------------------------------------------------------------------------


_ARGUMENTS = (
    "max_prefill_tokens",
    "chunked_prefill_size",
    "disable_radix_cache",
    "max_running_requests",
    "speculative_algorithm",
    "speculative_num_draft_tokens",
    "speculative_num_steps",
    "speculative_eagle_topk",
    "speculative_adaptive",
    "speculative_adaptive_config",
    "enable_multi_layer_eagle",
    "enable_dp_attention",
    "enable_two_batch_overlap",
    "enable_attn_tp_input_scattered",
    "moe_dense_tp_size",
    "moe_a2a_backend",
)
_GRAPH_ARGUMENTS = ("cuda_graph_max_bs", "disable_piecewise_cuda_graph", "piecewise_cuda_graph_max_tokens")


def keeps_buffers(wrapper_class: Any) -> bool:
    """Return whether FlashInfer's wrapper keeps buffers that are allocated for a fixed number of tokens.

    Such a wrapper raises an exception if a forward pass has more tokens.
    """
    return any(engine.mentions(wrapper_class.run, name) for name in ("_moe_output", "max_num_tokens"))


def plan() -> Plan:
    """Return the plan for cutedsl-sizing: how to install the change, or why it is not needed.

    :raises engine.Unsupported: the code of the engine or of FlashInfer's wrapper is not what this module expects.
    """
    if absent := runners.plan_without_flashinfer():
        return absent
    modelopt = engine.import_module("sglang.srt.layers.quantization.modelopt_quant")
    server_args_module = engine.import_module("sglang.srt.server_args")
    server_args = engine.require_unpatched(server_args_module, "ServerArgs")
    flashinfer = engine.import_module("flashinfer")
    if not hasattr(flashinfer, "CuteDslMoEWrapper"):
        return Plan.not_needed("this FlashInfer has no CuteDslMoEWrapper (no CuTe DSL installed)")
    run = engine.require_unpatched(
        engine.require_unpatched(flashinfer, "CuteDslMoEWrapper", "flashinfer"), "run", "flashinfer"
    )
    if not keeps_buffers(flashinfer.CuteDslMoEWrapper):
        return Plan(Status.NATIVE, "this FlashInfer's wrapper has no buffers and accepts forward passes of any size")

    runner = engine.import_module("sglang.srt.layers.moe.moe_runner.flashinfer_cutedsl")
    ensure = engine.require_unpatched(runner, "ensure_cutedsl_wrapper")
    engine.require_parameters(ensure, ["layer"])
    constructions = engine.find_calls(ensure, "CuteDslMoEWrapper")
    keywords = {k.arg for call in constructions for k in call.keywords}
    engine.require(
        len(constructions) == 1 and {"use_cuda_graph", "max_num_tokens"} <= keywords,
        "ensure_cutedsl_wrapper does not construct one CuteDslMoEWrapper with use_cuda_graph and max_num_tokens",
    )
    engine.require_mentions(ensure, "_cutedsl_wrapper")
    engine.require_mentions(run, "_moe_output")
    method = engine.require_unpatched(modelopt, "ModelOptNvFp4FusedMoEMethod")
    engine.require_parameters(engine.require_unpatched(method, "apply"), ["self", "layer", "dispatch_output"])
    model_runner = engine.require_unpatched(
        engine.import_module("sglang.srt.model_executor.model_runner"), "ModelRunner"
    )
    engine.require_unpatched(model_runner, "init_memory_pool")
    capture = engine.import_module(*_CAPTURE_MODULES)
    engine.get(capture, "get_is_capture_mode")
    engine.require_unpatched(server_args, "check_server_args")
    fields = getattr(server_args, "__dataclass_fields__", {})
    for name in (*_ARGUMENTS, *(() if "cuda_graph_config" in fields else _GRAPH_ARGUMENTS)):
        engine.require(name in fields, f"ServerArgs has no {name}")

    def install(patcher: Patcher) -> None:
        extend_server_args(server_args_module, patcher)
        without_output = _make_class_without_output(flashinfer.CuteDslMoEWrapper, patcher)
        patcher.wrap(
            runner,
            "ensure_cutedsl_wrapper",
            lambda original: _wrap_ensure(original, flashinfer, lambda: capture.get_is_capture_mode(), without_output),
        )
        patcher.wrap(method, "apply", _wrap_apply)
        patcher.wrap(model_runner, "init_memory_pool", _wrap_init_memory_pool)

    if is_sized_by_engine(server_args):
        return Plan.hardened(install, "the engine's buffers may be too small, and every layer allocates its own")
    return Plan.applied(install)
