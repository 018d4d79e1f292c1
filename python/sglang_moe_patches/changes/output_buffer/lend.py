"""Where the engine has no output buffer (releases up to 0.5.12): the decoder layer lends its dead input to the runner.

The runner's own function does the work: it runs with one name of its globals replaced, ``torch``, by a namespace whose
``empty`` knows the offered buffer.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from types import FunctionType
from typing import TYPE_CHECKING, Any

from sglang_moe_patches import engine, handoff, runners
from sglang_moe_patches.handoff import shares_storage
from sglang_moe_patches.patch import Patcher, Plan, with_globals

if TYPE_CHECKING:
    import torch

_RUNNER = "fused_experts_none_to_flashinfer_trtllm_fp4"
_OFFERS = "_moe_patches_offers_output_buffer"


# --- The decisions -------------------------------------------------------------------------------------------------


def may_offer(hidden_states: torch.Tensor, residual: torch.Tensor | None) -> bool:
    """Whether a layer's input is dead once attention has read it.

    :param hidden_states: the layer's input, [tokens, hidden].
    :param residual: the residual passed with it. When it is ``None``, the input *becomes* the residual, which the
        next norm updates in place and everything downstream reads: it must never be offered.
    """
    return residual is not None and not shares_storage(hidden_states, residual)


def takes_output_buffer(experts: Any) -> bool:
    """Whether the runner of a ``FusedMoE`` layer takes the offered buffer: NVFP4 with TRT-LLM, or CuteDSL (where
    cutedsl-sizing takes it)."""
    method = experts.quant_method
    return type(method).__name__ == "ModelOptNvFp4FusedMoEMethod" and bool(
        getattr(method, "enable_flashinfer_trtllm_moe", False) or getattr(method, "_is_cutedsl_v2_standard", False)
    )


# --- The runner ------------------------------------------------------------------------------------------------------


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
        buffer = handoff.take(
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


def _make_runner(original: FunctionType, into_buffer: FunctionType, is_compiling: Callable[[], bool]) -> Any:
    @functools.wraps(original)
    def run(dispatch_output: Any, *args: Any, **kwargs: Any) -> Any:
        if is_compiling():
            return original(dispatch_output, *args, **kwargs)
        buffer = handoff.offered()
        # The shared experts, and the kernel itself, still read the MoE input while the output is being written.
        if buffer is None or shares_storage(buffer, dispatch_output.hidden_states):
            return original(dispatch_output, *args, **kwargs)
        return into_buffer(dispatch_output, *args, **kwargs)

    return run


# --- The layers ------------------------------------------------------------------------------------------------------


def _make_layer_forward(original: Callable[..., Any], is_compiling: Callable[[], bool]) -> Callable[..., Any]:
    @functools.wraps(original)
    def forward(
        self: Any, positions: Any, hidden_states: Any, forward_batch: Any, residual: Any, *args: Any, **kwargs: Any
    ) -> Any:
        if is_compiling() or not getattr(self, _OFFERS, False) or not may_offer(hidden_states, residual):
            return original(self, positions, hidden_states, forward_batch, residual, *args, **kwargs)
        with handoff.moe_output_buffer_ctx(hidden_states):
            return original(self, positions, hidden_states, forward_batch, residual, *args, **kwargs)

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


# --- The plan --------------------------------------------------------------------------------------------------------


def plan() -> Plan:
    """:raises engine.Unsupported: the engine is not what this expects."""
    import torch

    allocator = engine.module("sglang.srt.distributed.device_communicators.pynccl_allocator")
    communicator = engine.module("sglang.srt.layers.communicator")
    fused_moe = engine.module("sglang.srt.layers.moe.fused_moe_triton.layer")
    runner = engine.module("sglang.srt.layers.moe.moe_runner.flashinfer_trtllm")
    deepseek = engine.module("sglang.srt.models.deepseek_v2")

    function = engine.own(runner, _RUNNER)
    engine.require_parameters(function, ["dispatch_output", "quant_info", "runner_config"])
    allocations = [
        call for name in ("empty", "empty_like", "zeros") for call in engine.calls(function, f"torch.{name}")
    ]
    engine.require(
        [{k.arg for k in call.keywords} for call in allocations] == [{"dtype", "device"}],
        f"{_RUNNER} allocates {len(allocations)} tensors, expected its output alone, by torch.empty(..., dtype=, "
        "device=)",
    )
    engine.require(engine.only_a_global(function, "torch"), f"in {_RUNNER}, torch is not only the module's global")
    for name in ("_active_symmetric_memory_context", "is_tensor_in_symmetric_mempool"):
        engine.get(allocator, name)

    layer, attention, model = (
        engine.own(deepseek, name) for name in ("DeepseekV2DecoderLayer", "DeepseekV2AttentionMLA", "DeepseekV2Model")
    )
    engine.require_parameters(
        engine.own(layer, "forward"), ["self", "positions", "hidden_states", "forward_batch", "residual"]
    )
    engine.own(attention, "forward")
    engine.require("forward" in vars(attention), "DeepseekV2AttentionMLA has no forward of its own")
    engine.require_mentions(engine.own(model, "__init__"), "start_layer")
    context = engine.get(communicator, "get_attn_tp_context")()
    engine.get(context, "set_attn_inputs")
    experts = runners.look_at_inplace(fused_moe)
    is_compiling = torch.compiler.is_compiling

    def install(patcher: Patcher) -> None:
        into_buffer = with_globals(function, runner, patcher, torch=_OutputAllocator(torch, allocator))
        patcher.wrap(runner, _RUNNER, lambda original: _make_runner(original, into_buffer, is_compiling))
        patcher.wrap(layer, "forward", lambda original: _make_layer_forward(original, is_compiling))
        patcher.wrap(attention, "forward", lambda original: _make_attention_forward(original, context, is_compiling))
        patcher.wrap(model, "__init__", _make_model_init)
        runners.clear_inplace(experts, patcher)

    return Plan.applied(install)
