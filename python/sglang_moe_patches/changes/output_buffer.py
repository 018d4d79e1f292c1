"""output-buffer: the routed experts write into the layer's own dead input instead of a fresh tensor.

Why
    Every MoE layer allocates a hidden-size output while the layer's input, dead since attention read it, is still
    referenced by the model's loop. At a 16K-token prefill of Kimi-K2.5 each of those tensors is 235 MB, and the
    attention inputs (another one, and the q/kv latents) stay referenced until the next layer replaces them.

How
    The decoder layer offers its input in a ``ContextVar``; the NVFP4 TRT-LLM runner takes it where it would have
    allocated its output, if it fits. The runner's own function does the work: it runs with one name of its globals
    replaced, ``torch``, by a namespace whose ``empty`` knows the offered buffer. The attention inputs are dropped when
    ``self_attn`` returns. Both TRT-LLM runners are marked as not mutating their input, which they never did.

Upstream
    sgl-project/sglang#25379, in releases from 0.5.13.

Remove when
    0.5.12.post1 is the oldest supported release no longer.
"""

from __future__ import annotations

import builtins
import functools
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from types import FunctionType
from typing import TYPE_CHECKING, Any

from sglang_moe_patches import engine
from sglang_moe_patches.patch import CUTEDSL_RUNNER, TRTLLM_RUNNERS, Change, Outcome, Patcher, Status, runner_needed

if TYPE_CHECKING:
    import torch

_RUNNER_MODULE = "sglang.srt.layers.moe.moe_runner.flashinfer_trtllm"
_RUNNER_FUNCTION = "fused_experts_none_to_flashinfer_trtllm_fp4"
_OFFERS = "_moe_patches_offers_output_buffer"

_buffer: ContextVar[torch.Tensor | None] = ContextVar("moe_output_buffer", default=None)


# --- The decisions -------------------------------------------------------------------------------------------------


def shares_storage(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether writing into one of the tensors may show in the other."""
    return a.untyped_storage().data_ptr() == b.untyped_storage().data_ptr()


def may_offer(hidden_states: torch.Tensor, residual: torch.Tensor | None) -> bool:
    """Whether a layer's input is dead once attention has read it.

    :param hidden_states: the layer's input, [tokens, hidden].
    :param residual: the residual passed with it. When it is ``None``, the input *becomes* the residual, which the
        next norm updates in place and everything downstream reads: it must never be offered.
    """
    return residual is not None and not shares_storage(hidden_states, residual)


def fits(
    buffer: torch.Tensor,
    shape: tuple[int, ...],
    dtype: torch.dtype,
    device: torch.device,
    *,
    needs_symmetric_memory: bool = False,
    in_symmetric_memory: Callable[[torch.Tensor], bool] = lambda tensor: False,
) -> bool:
    """Whether ``buffer`` can stand in for a fresh tensor of this shape, dtype and device.

    It must be contiguous and own the whole of its storage (what a view's base holds beside the view belongs to somebody
    else), have at least one token, and lie in the NCCL symmetric-memory pool where a fresh tensor would.
    """
    return (
        tuple(buffer.shape) == shape
        and buffer.dtype == dtype
        and buffer.device == device
        and buffer.is_contiguous()
        and buffer.numel() > 0
        and buffer.untyped_storage().nbytes() == buffer.numel() * buffer.element_size()
        and (not needs_symmetric_memory or in_symmetric_memory(buffer))
    )


# --- From the decoder layer to the runner --------------------------------------------------------------------------


@contextmanager
def moe_output_buffer_ctx(buffer: torch.Tensor | None) -> Iterator[None]:
    """Offer ``buffer`` as the output of the next routed-experts kernel run in this context.

    :param buffer: [tokens, hidden]; nobody may read its present contents any more. ``None`` withdraws an offer.
    """
    token = _buffer.set(buffer)
    try:
        yield
    finally:
        _buffer.reset(token)


def withdraw_if_shared(moe_input: torch.Tensor) -> None:
    """Withdraw the offer if writing into it would show in ``moe_input``, which the shared experts may still read."""
    buffer = _buffer.get()
    if buffer is not None and shares_storage(buffer, moe_input):
        _buffer.set(None)


def take(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device, **conditions: Any) -> torch.Tensor | None:
    """The offered buffer as a new tensor, if it fits; a second call in the same offer gets ``None``.

    :param conditions: the keyword arguments of :func:`fits`.
    """
    buffer = _buffer.get()
    if buffer is None or not fits(buffer, shape, dtype, device, **conditions):
        return None
    # One offer serves one kernel: a second one in the same layer must not overwrite the first one's output.
    _buffer.set(None)
    # A new tensor on the same storage. The engine marks tensor *objects* (_sglang_needs_allreduce_fusion), and the
    # mark of the layer below must not travel into this layer's output.
    return buffer.detach()


class _OutputAllocator:
    """Stands in for the name ``torch`` inside the runner: ``empty`` may answer with the offered buffer."""

    def __init__(self, torch_module: Any, symmetric_memory: Any) -> None:
        self._torch = torch_module
        self._symmetric_memory = symmetric_memory
        self._pool_addresses: set[int] = set()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._torch, name)

    def empty(self, *size: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        buffer = take(
            size,
            dtype,
            device,
            needs_symmetric_memory=self._symmetric_memory._active_symmetric_memory_context is not None,
            in_symmetric_memory=self._in_pool,
        )
        return self._torch.empty(*size, dtype=dtype, device=device) if buffer is None else buffer

    def _in_pool(self, tensor: torch.Tensor) -> bool:
        # The engine walks a snapshot of the pool, too slow for every layer. Its memory is never given back while the
        # process lives (the engine's own assumption), so an address seen in the pool stays there.
        address = tensor.untyped_storage().data_ptr()
        if address in self._pool_addresses:
            return True
        if self._symmetric_memory.is_tensor_in_symmetric_mempool(tensor):
            self._pool_addresses.add(address)
            return True
        return False


class _GlobalsWith(dict):
    """The live globals of a module, with some names replaced, for one function to run in.

    CPython looks a global up by ``__getitem__`` when the mapping is not exactly a ``dict``, so that a name which is not
    replaced is found in the module at the time of the call, as in the module's own functions.
    """

    def __init__(self, module_globals: Mapping[str, Any], **replaced: Any) -> None:
        super().__init__(replaced, __builtins__=builtins)
        self._module_globals = module_globals

    def __missing__(self, name: str) -> Any:
        return self._module_globals[name]


def _with_globals(function: FunctionType, **replaced: Any) -> FunctionType:
    view = _GlobalsWith(function.__globals__, **replaced)
    bound = FunctionType(function.__code__, view, function.__name__, function.__defaults__, function.__closure__)
    bound.__kwdefaults__ = function.__kwdefaults__
    return bound


def _make_runner(original: FunctionType, torch_module: Any, symmetric_memory: Any) -> Callable[..., Any]:
    is_compiling = torch_module.compiler.is_compiling
    into_buffer = _with_globals(original, torch=_OutputAllocator(torch_module, symmetric_memory))

    @functools.wraps(original)
    def run(dispatch_output: Any, *args: Any, **kwargs: Any) -> Any:
        if is_compiling():
            return original(dispatch_output, *args, **kwargs)
        buffer = _buffer.get()
        # The shared experts, and the kernel itself, still read the MoE input while the output is being written.
        if buffer is None or shares_storage(buffer, dispatch_output.hidden_states):
            return original(dispatch_output, *args, **kwargs)
        return into_buffer(dispatch_output, *args, **kwargs)

    return run


def _make_layer_forward(original: Callable[..., Any], is_compiling: Callable[[], bool]) -> Callable[..., Any]:
    @functools.wraps(original)
    def forward(
        self: Any, positions: Any, hidden_states: Any, forward_batch: Any, residual: Any, *args: Any, **kwargs: Any
    ) -> Any:
        if is_compiling() or not getattr(self, _OFFERS, False) or not may_offer(hidden_states, residual):
            return original(self, positions, hidden_states, forward_batch, residual, *args, **kwargs)
        token = _buffer.set(hidden_states)
        try:
            return original(self, positions, hidden_states, forward_batch, residual, *args, **kwargs)
        finally:
            _buffer.reset(token)

    return forward


def _make_attention_forward(
    original: Callable[..., Any], context: Any, is_compiling: Callable[[], bool]
) -> Callable[..., Any]:
    @functools.wraps(original)
    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        output = original(self, *args, **kwargs)
        if not is_compiling():
            context.set_attn_inputs(None)
        return output

    return forward


# --- What is decided once, when a layer is built --------------------------------------------------------------------


def takes_output_buffer(experts: Any) -> bool:
    """Whether the runner of a ``FusedMoE`` layer takes the offered buffer: NVFP4 with TRT-LLM, or CuteDSL (where
    cutedsl-sizing takes it)."""
    method = experts.quant_method
    return type(method).__name__ == "ModelOptNvFp4FusedMoEMethod" and bool(
        getattr(method, "enable_flashinfer_trtllm_moe", False) or getattr(method, "_is_cutedsl_v2_standard", False)
    )


def _make_experts_init(original: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(original)
    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:
        original(self, *args, **kwargs)
        if self.use_flashinfer_trtllm_moe:
            self.moe_runner_config.inplace = False

    return __init__


def _make_model_init(original: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(original)
    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:
        original(self, *args, **kwargs)
        # The first layer of a pipeline stage is left out: its input is not ours to write into (the caller's
        # input_embeds; the buffers in which another stage's output arrives, still being sent on or reused).
        for layer in self.layers[self.start_layer + 1 : self.end_layer]:
            experts = getattr(layer.mlp, "experts", None)
            if experts is not None and takes_output_buffer(experts):
                setattr(layer, _OFFERS, True)

    return __init__


# --- The change ------------------------------------------------------------------------------------------------------


def _probe() -> Outcome:
    from sglang.srt.distributed.device_communicators import pynccl_allocator
    from sglang.srt.layers import communicator
    from sglang.srt.layers.moe.fused_moe_triton import layer as fused_moe
    from sglang.srt.layers.moe.moe_runner import flashinfer_trtllm as runner
    from sglang.srt.models import deepseek_v2

    function = getattr(runner, _RUNNER_FUNCTION, None)
    if function is None:
        return Outcome(Status.UNSUPPORTED, f"{_RUNNER_MODULE} has no {_RUNNER_FUNCTION}")
    if any("moe_output_buffer" in name for name in (*vars(runner), *vars(deepseek_v2))):
        return Outcome(Status.NATIVE)
    allocations = [
        call for name in ("empty", "empty_like", "zeros") for call in engine.calls(function, f"torch.{name}")
    ]
    keywords = [{k.arg for k in call.keywords} for call in allocations]
    if keywords != [{"dtype", "device"}]:
        return Outcome(
            Status.UNSUPPORTED,
            f"{_RUNNER_FUNCTION} allocates {len(allocations)} tensors, expected its output alone, by "
            "torch.empty(..., dtype=, device=)",
        )
    layer, attention = deepseek_v2.DeepseekV2DecoderLayer, deepseek_v2.DeepseekV2AttentionMLA
    context = communicator.get_attn_tp_context()
    for reason in (
        engine.missing_parameters(function, ["dispatch_output", "quant_info", "runner_config"]),
        engine.missing_parameters(layer.forward, ["self", "positions", "hidden_states", "forward_batch", "residual"]),
        None if hasattr(context, "set_attn_inputs") else "the attention context has no set_attn_inputs",
        None if "forward" in vars(attention) else "DeepseekV2AttentionMLA has no forward of its own",
        None
        if engine.mentions(deepseek_v2.DeepseekV2Model.__init__, "start_layer")
        else "DeepseekV2Model does not set start_layer",
        None
        if engine.mentions(fused_moe.FusedMoE.__init__, "use_flashinfer_trtllm_moe")
        else "FusedMoE does not set use_flashinfer_trtllm_moe",
        *(
            None if hasattr(pynccl_allocator, name) else f"{pynccl_allocator.__name__} has no {name}"
            for name in ("_active_symmetric_memory_context", "is_tensor_in_symmetric_mempool")
        ),
        None if _globals_view_works() else "this Python does not look globals up through a dict subclass",
    ):
        if reason is not None:
            return Outcome(Status.UNSUPPORTED, reason)
    return Outcome(Status.APPLIED)


def _globals_view_works() -> bool:
    def replaced_and_live() -> Any:
        return sys, Outcome

    return _with_globals(replaced_and_live, sys="replaced")() == ("replaced", Outcome)  # type: ignore[arg-type]


def _install(patcher: Patcher) -> None:
    import torch
    from sglang.srt.distributed.device_communicators import pynccl_allocator
    from sglang.srt.layers import communicator
    from sglang.srt.layers.moe.fused_moe_triton import layer as fused_moe
    from sglang.srt.layers.moe.moe_runner import flashinfer_trtllm as runner
    from sglang.srt.models import deepseek_v2

    patcher.wrap(runner, _RUNNER_FUNCTION, lambda original: _make_runner(original, torch, pynccl_allocator))
    patcher.wrap(
        deepseek_v2.DeepseekV2DecoderLayer,
        "forward",
        lambda original: _make_layer_forward(original, torch.compiler.is_compiling),
    )
    patcher.wrap(
        deepseek_v2.DeepseekV2AttentionMLA,
        "forward",
        lambda original: _make_attention_forward(
            original, communicator.get_attn_tp_context(), torch.compiler.is_compiling
        ),
    )
    patcher.wrap(deepseek_v2.DeepseekV2Model, "__init__", _make_model_init)
    patcher.wrap(fused_moe.FusedMoE, "__init__", _make_experts_init)


CHANGE = Change(
    name="output-buffer",
    summary="the routed experts write into the decoder layer's dead input",
    probe=_probe,
    install=_install,
    needed=runner_needed(*TRTLLM_RUNNERS, CUTEDSL_RUNNER),
)
