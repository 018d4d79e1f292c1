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

    Where the engine has all this built in, it offers the input of every MoE layer, also of one that starts without a
    residual: the first layer of a model, a NextN/MTP draft layer. That input *becomes* the residual, the next norm
    updates it in place, and the output is written over it: every answer is wrong. There, and only there, the offer is
    withdrawn: the decoder layer's ``forward`` notes that its input has no residual yet, and the engine's own
    ``moe_output_buffer_ctx`` then gets ``None``. Everything else stays the engine's.

Upstream
    sgl-project/sglang#25379, in releases from 0.5.13; the hole is in all of them up to 0.5.23.

Remove when
    0.5.12.post1 is the oldest supported release no longer, and the engine looks at the residual before it offers.
"""

from __future__ import annotations

import ast
import dis
import functools
import importlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from importlib import util
from types import FunctionType
from typing import TYPE_CHECKING, Any

from sglang_moe_patches import engine
from sglang_moe_patches.patch import CUTEDSL_RUNNER, TRTLLM_RUNNERS, Change, Outcome, Patcher, Status, runner_needed

if TYPE_CHECKING:
    import torch

_RUNNER_MODULE = "sglang.srt.layers.moe.moe_runner.flashinfer_trtllm"
_RUNNER_FUNCTION = "fused_experts_none_to_flashinfer_trtllm_fp4"
_OFFERS = "_moe_patches_offers_output_buffer"

_ENGINE_OFFER = "moe_output_buffer_ctx"
_OFFERING_LAYERS = (
    ("sglang.srt.models.deepseek_v2", "DeepseekV2DecoderLayer"),
    ("sglang.srt.models.glm5_next", "Glm5NextDecoderLayer"),
)

_buffer: ContextVar[torch.Tensor | None] = ContextVar("moe_output_buffer", default=None)
_withheld: ContextVar[bool] = ContextVar("moe_output_buffer_withheld", default=False)


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
        buffer.shape == shape
        and buffer.dtype == dtype
        and buffer.device == device
        and buffer.is_contiguous()
        and buffer.nbytes > 0
        and buffer.untyped_storage().nbytes() == buffer.nbytes
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
        value = getattr(self._torch, name)
        setattr(self, name, value)  # asked once: this runs in every layer
        return value

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


def _with_globals(function: FunctionType, **replaced: Any) -> FunctionType:
    """``function`` with some of its globals replaced; it finds all others in its module at the time of the call.

    The replacements get names of their own in the module, and the function's code is made to ask for those: looking
    a name up costs what it did.
    """
    new = {name: f"_moe_patches_{name}" for name in replaced}
    code = function.__code__.replace(co_names=tuple(new.get(name, name) for name in function.__code__.co_names))
    function.__globals__.update({new[name]: value for name, value in replaced.items()})
    bound = FunctionType(code, function.__globals__, function.__name__, function.__defaults__, function.__closure__)
    bound.__kwdefaults__ = function.__kwdefaults__
    return bound


def _only_a_global(function: FunctionType, name: str) -> bool:
    """Whether ``name`` in the function's code is never an attribute or an import of that name."""
    return all(i.opname == "LOAD_GLOBAL" for i in dis.get_instructions(function) if i.argval == name)


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


# --- Where the engine has a buffer of its own ------------------------------------------------------------------------


def _residual_argument(forward_batch: Any, residual: Any, *args: Any, **kwargs: Any) -> Any:
    """The residual that comes with a layer's input, where it is an argument of the layer."""
    return residual


def _residual_of_stream(forward_batch: Any, *args: Any, **kwargs: Any) -> Any:
    """The residual that comes with a layer's input, where the batch carries it, or ``None``.

    Without a pending contribution the input *is* the residual, or becomes it at the start of the stack.
    """
    stream = forward_batch.residual_stream
    return None if stream is None or stream.pending is None else stream.residual


def _make_offering_forward(
    original: Callable[..., Any], residual_of: Callable[..., Any], is_compiling: Callable[[], bool]
) -> Callable[..., Any]:
    @functools.wraps(original)
    def forward(self: Any, positions: Any, hidden_states: Any, forward_batch: Any, *args: Any, **kwargs: Any) -> Any:
        if is_compiling() or residual_of(forward_batch, *args, **kwargs) is not None:
            return original(self, positions, hidden_states, forward_batch, *args, **kwargs)
        token = _withheld.set(True)
        try:
            return original(self, positions, hidden_states, forward_batch, *args, **kwargs)
        finally:
            _withheld.reset(token)

    return forward


def _make_engine_offer(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def moe_output_buffer_ctx(buf: Any) -> Any:
        return original(None if _withheld.get() else buf)

    return moe_output_buffer_ctx


def _offering_layers() -> list[tuple[type, Callable[..., Any] | None]]:
    """The decoder layers that offer their input without looking at the residual, and how to find their residual."""
    found: list[tuple[type, Callable[..., Any] | None]] = []
    for module, name in _OFFERING_LAYERS:
        if util.find_spec(module) is None:
            continue
        layer = getattr(importlib.import_module(module), name, None)
        forward = vars(layer).get("forward") if layer is not None else None
        if layer is None or forward is None or not offers_regardless_of_the_residual(forward):
            continue
        residual_of: Callable[..., Any] | None = None
        if not engine.missing_parameters(forward, ["self", "positions", "hidden_states", "forward_batch", "residual"]):
            residual_of = _residual_argument
        elif not engine.missing_parameters(forward, ["self", "positions", "hidden_states", "forward_batch"]):
            residual_of = _residual_of_stream if _batches_carry_the_residual() else None
        found.append((layer, residual_of))
    return found


def offers_regardless_of_the_residual(forward: Callable[..., Any]) -> bool:
    """Whether a decoder layer's ``forward`` offers its input under a condition that does not look at the residual."""
    for node in ast.walk(ast.parse(engine.source(forward))):
        if isinstance(node, ast.If) and any(
            isinstance(call, ast.Call) and ast.unparse(call.func).endswith(_ENGINE_OFFER)
            for statement in node.body
            for call in ast.walk(statement)
        ):
            return "residual" not in ast.unparse(node.test)
    return engine.mentions(forward, _ENGINE_OFFER)


def _batches_carry_the_residual() -> bool:
    from sglang.srt.model_executor.forward_batch_info import ForwardBatch

    try:
        from sglang.srt.layers.layer_boundary.residual.stream import ResidualStream
    except ImportError:
        return False
    fields = getattr(ForwardBatch, "__dataclass_fields__", {})
    return "residual_stream" in fields and {"pending", "residual"} <= set(getattr(ResidualStream, "__slots__", ()))


def _probe_native() -> Outcome:
    layers = _offering_layers()
    if not layers:
        return Outcome(Status.NATIVE)
    for layer, residual_of in layers:
        if residual_of is None:
            return Outcome(
                Status.UNSUPPORTED,
                f"the engine's own output buffer overwrites the residual where {layer.__name__} starts without one, "
                "and where that residual is kept is not known here",
            )
        module = importlib.import_module(layer.__module__)
        if hasattr(module, _ENGINE_OFFER):
            return Outcome(Status.UNSUPPORTED, f"{module.__name__} no longer looks {_ENGINE_OFFER} up when called")
    return Outcome(Status.HARDENED)


def _install_native(patcher: Patcher) -> None:
    import torch
    from sglang.srt.layers.moe.moe_runner import base

    patcher.wrap(base, _ENGINE_OFFER, _make_engine_offer)
    for layer, residual_of in _offering_layers():
        assert residual_of is not None  # the probe has seen to that
        patcher.wrap(
            layer,
            "forward",
            functools.partial(
                _make_offering_forward, residual_of=residual_of, is_compiling=torch.compiler.is_compiling
            ),
        )


# --- The change ------------------------------------------------------------------------------------------------------


def _is_native() -> bool:
    from sglang.srt.layers.moe.moe_runner import base

    return hasattr(base, _ENGINE_OFFER)


def _probe() -> Outcome:
    if _is_native():
        return _probe_native()

    from sglang.srt.distributed.device_communicators import pynccl_allocator
    from sglang.srt.layers import communicator
    from sglang.srt.layers.moe.fused_moe_triton import layer as fused_moe
    from sglang.srt.layers.moe.moe_runner import flashinfer_trtllm as runner
    from sglang.srt.models import deepseek_v2

    function = getattr(runner, _RUNNER_FUNCTION, None)
    if function is None:
        return Outcome(Status.UNSUPPORTED, f"{_RUNNER_MODULE} has no {_RUNNER_FUNCTION}")
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
        None if _only_a_global(function, "torch") else f"in {_RUNNER_FUNCTION}, torch is not only the module's global",
    ):
        if reason is not None:
            return Outcome(Status.UNSUPPORTED, reason)
    return Outcome(Status.APPLIED)


def _install(patcher: Patcher) -> None:
    if _is_native():
        _install_native(patcher)
        return

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
