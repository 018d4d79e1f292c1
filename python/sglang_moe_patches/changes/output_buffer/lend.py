"""Where the engine has no output buffer (releases up to 0.5.12): the NVFP4 TRT-LLM runner takes the offered one, and
the attention inputs are dropped.

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
from sglang_moe_patches.patch import Install, Patcher, with_globals

if TYPE_CHECKING:
    import torch

_RUNNER = "fused_experts_none_to_flashinfer_trtllm_fp4"


# --- The runner ------------------------------------------------------------------------------------------------------


class _OutputAllocator(handoff.OutputTorch):
    """Stands in for the name ``torch`` inside the runner: ``empty`` may answer with the offered buffer."""

    def empty(self, *size: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        buffer = self._take(size, dtype, device)
        return self._torch.empty(*size, dtype=dtype, device=device) if buffer is None else buffer


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


# --- The attention inputs --------------------------------------------------------------------------------------------


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


# --- Looking ---------------------------------------------------------------------------------------------------------


def attention_inputs() -> Install:
    """Drop what attention has read when it returns, whatever the runner.

    :raises engine.Unsupported: the engine is not what this expects.
    """
    import torch

    communicator = engine.module("sglang.srt.layers.communicator")
    deepseek = engine.module("sglang.srt.models.deepseek_v2")
    attention = engine.own(deepseek, "DeepseekV2AttentionMLA")
    engine.own(attention, "forward")
    engine.require("forward" in vars(attention), "DeepseekV2AttentionMLA has no forward of its own")
    context = engine.get(communicator, "get_attn_tp_context")()
    engine.get(context, "set_attn_inputs")
    is_compiling = torch.compiler.is_compiling

    def install(patcher: Patcher) -> None:
        patcher.wrap(attention, "forward", lambda original: _make_attention_forward(original, context, is_compiling))

    return install


def trtllm() -> Install:
    """The NVFP4 TRT-LLM runner takes the offered buffer.

    :raises engine.Unsupported: the engine is not what this expects.
    """
    import torch

    symmetric_memory = runners.symmetric_memory()
    fused_moe = engine.module("sglang.srt.layers.moe.fused_moe_triton.layer")
    runner = engine.module("sglang.srt.layers.moe.moe_runner.flashinfer_trtllm")

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
    experts = runners.look_at_inplace(fused_moe)
    is_compiling = torch.compiler.is_compiling

    def install(patcher: Patcher) -> None:
        into_buffer = with_globals(function, runner, patcher, torch=_OutputAllocator(torch, symmetric_memory))
        patcher.wrap(runner, _RUNNER, lambda original: _make_runner(original, into_buffer, is_compiling))
        runners.clear_inplace(experts, patcher)

    return install
