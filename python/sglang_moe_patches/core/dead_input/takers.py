"""MoE runners that write their output into the buffer that a decoder layer offers.

The engine's own function computes the output. It runs with its global name ``torch`` replaced by a stand-in. The
stand-in's ``empty`` or ``empty_like`` returns the offered buffer where the function allocates its output.
"""

from __future__ import annotations

import ast
import functools
from collections.abc import Callable
from types import FunctionType
from typing import TYPE_CHECKING, Any

from sglang_moe_patches.core import engine, fused_moe_call, runners
from sglang_moe_patches.core.dead_input import channel
from sglang_moe_patches.core.dead_input.channel import shares_storage
from sglang_moe_patches.core.patch import Install, Patcher, replace_globals
from sglang_moe_patches.core.runners import SymmetricMemory

if TYPE_CHECKING:
    import torch

TRTLLM_RUNNER = "fused_experts_none_to_flashinfer_trtllm_fp4"


class OutputTorch:
    """Stand-in for the module ``torch`` inside an engine function. Its ``empty_like`` returns the offered buffer if it
    fits, and otherwise allocates a tensor.

    With NCCL symmetric memory, the output must lie in the engine's pool of this memory, because the next collective
    expects it there. A buffer outside the pool therefore does not fit, and the new tensor comes from the pool.
    """

    def __init__(self, torch_module: Any, symmetric_memory: SymmetricMemory) -> None:
        self._torch, self._symmetric_memory = torch_module, symmetric_memory

    def __getattr__(self, name: str) -> Any:
        value = getattr(self._torch, name)
        setattr(self, name, value)  # cached, because every layer looks up these names
        return value

    def empty_like(self, tensor: torch.Tensor) -> torch.Tensor:
        with self._symmetric_memory.output_context():
            buffer = self._take(tensor.shape, tensor.dtype, tensor.device)
            return self._torch.empty_like(tensor) if buffer is None else buffer

    def _take(self, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> torch.Tensor | None:
        return channel.take_output(
            shape,
            dtype,
            device,
            needs_symmetric_memory=self._symmetric_memory.is_active,
            in_symmetric_memory=self._symmetric_memory.contains,
        )


# --- NVFP4 TRT-LLM, where the engine has no buffer of its own (releases up to 0.5.12) -------------------------------


class TrtllmTorch(OutputTorch):
    """Stand-in for the module ``torch`` in TRT-LLM's runner. Its ``empty`` returns the offered buffer if the buffer
    fits.
    """

    def empty(self, *size: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        buffer = self._take(size, dtype, device)
        return self._torch.empty(*size, dtype=dtype, device=device) if buffer is None else buffer


def make_trtllm_runner(original: FunctionType, into_buffer: FunctionType, is_compiling: Callable[[], bool]) -> Any:
    """Wrap the TRT-LLM runner, so that it writes its output into the offered buffer.

    If no buffer is offered, or the buffer shares memory with the MoE input, ``original`` runs.

    :param original: the engine's runner.
    :param into_buffer: the engine's runner with a :class:`TrtllmTorch` as ``torch``.
    :param is_compiling: function that returns whether ``torch.compile`` traces the call. ``original`` runs then.
    """

    @functools.wraps(original)
    def run(dispatch_output: Any, *args: Any, **kwargs: Any) -> Any:
        if is_compiling():
            return original(dispatch_output, *args, **kwargs)
        buffer = channel.get_offered_buffer()
        # The shared experts and the kernel itself may read the MoE input while the output is written.
        if buffer is None or shares_storage(buffer, dispatch_output.hidden_states):
            return original(dispatch_output, *args, **kwargs)
        return into_buffer(dispatch_output, *args, **kwargs)

    return run


def probe_trtllm() -> Install:
    """Probe the NVFP4 runner of TRT-LLM, and return the installer that makes it take the offered buffer.

    :raises engine.Unsupported: the engine's runner is not as expected.
    """
    import torch

    symmetric_memory = runners.probe_symmetric_memory()
    fused_moe = engine.import_module("sglang.srt.layers.moe.fused_moe_triton.layer")
    runner = engine.import_module("sglang.srt.layers.moe.moe_runner.flashinfer_trtllm")

    function = engine.require_unpatched(runner, TRTLLM_RUNNER)
    engine.require_parameters(function, ["dispatch_output", "quant_info", "runner_config"])
    allocations = [
        call for name in ("empty", "empty_like", "zeros") for call in engine.find_calls(function, f"torch.{name}")
    ]
    engine.require(
        [{k.arg for k in call.keywords} for call in allocations] == [{"dtype", "device"}],
        f"{TRTLLM_RUNNER} allocates {len(allocations)} tensors; expected one, by torch.empty(..., dtype=, device=)",
    )
    engine.require(
        engine.is_only_a_global(function, "torch"),
        f"{TRTLLM_RUNNER} uses torch for something else than its module's global",
    )
    experts = runners.probe_inplace(fused_moe)
    is_compiling = torch.compiler.is_compiling

    def install(patcher: Patcher) -> None:
        into_buffer = replace_globals(function, runner, patcher, torch=TrtllmTorch(torch, symmetric_memory))
        patcher.wrap(runner, TRTLLM_RUNNER, lambda original: make_trtllm_runner(original, into_buffer, is_compiling))
        runners.clear_inplace(experts, patcher)

    return install


# --- Triton, where it is not in place --------------------------------------------------------------------------------


def make_triton_route(into_buffer: Callable[..., Any], symmetric_memory: SymmetricMemory) -> fused_moe_call.Route:
    """Return a route that makes the Triton runner write its output into the offered buffer.

    A route is a function that may replace a call of the engine's fused-MoE function
    (:mod:`sglang_moe_patches.core.fused_moe_call`). This route never replaces a call that works in place or has LoRA
    hooks. It replaces another call by ``into_buffer`` in two cases:

    - A buffer is offered.
    - The server uses NCCL symmetric memory. If no buffer fits, ``into_buffer`` allocates the output in the pool of this
      memory.

    :param into_buffer: copy of the engine's fused-MoE function, in which the global name ``torch`` is an
        :class:`OutputTorch`.
    """

    def route(hidden_states: Any, topk_ids: Any, options: dict[str, Any]) -> Callable[..., Any] | None:
        if options["inplace"] or options.get("hooks"):
            return None
        # The kernels read the MoE input while the output is written, and the shared experts may read it afterwards.
        channel.withdraw_if_shared(hidden_states)
        return into_buffer if channel.get_offered_buffer() is not None or symmetric_memory.is_enabled else None

    return route


def probe_triton() -> Install:
    """Probe the Triton runner, and return the installer that makes its calls take the offered buffer.

    Calls that work in place do not take the buffer.

    :raises engine.Unsupported: the engine's fused-MoE function is not as expected.
    """
    import torch

    module, function = fused_moe_call.probe()
    name, symmetric_memory = function.__name__, runners.probe_symmetric_memory()
    outputs = [ast.unparse(call) for call in engine.find_calls(function, "torch.empty_like")]
    engine.require(
        outputs == ["torch.empty_like(hidden_states)"],
        f"{name} allocates {', '.join(outputs) or 'no output'}; expected torch.empty_like(hidden_states)",
    )
    engine.require(
        engine.is_only_a_global(function, "torch"), f"{name} uses torch for something else than its module's global"
    )

    def install(patcher: Patcher) -> None:
        into_buffer = replace_globals(function, module, patcher, torch=OutputTorch(torch, symmetric_memory))
        fused_moe_call.add_route(patcher, make_triton_route(into_buffer, symmetric_memory))

    return install
