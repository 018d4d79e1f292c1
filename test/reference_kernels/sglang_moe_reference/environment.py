"""Environment in which the engine runs without a Blackwell GPU, or without any GPU. An environment variable enables it.

- :func:`variables` returns the environment variables of a new process. Without a GPU, they include a stub CUDA driver.
- :func:`install` runs in each engine process when it loads plugins. It replaces FlashInfer's kernels by plain PyTorch,
  and disables the check for Blackwell. On the CPU it also selects attention code that runs on CPUs. Besides, it makes
  the fused addition and norm work in place, as on GPUs. Otherwise tests on the CPU would not find code that reads a
  tensor after the norm has overwritten it.
"""

from __future__ import annotations

import functools
import multiprocessing
import os
import sys
from collections.abc import Callable, Mapping
from importlib import util
from types import FunctionType
from typing import Any

from sglang_moe_patches.core import machine
from sglang_moe_patches.core.log import logger
from sglang_moe_patches.core.variables import Variable, WrongValue, parse_zero_or_one
from sglang_moe_patches.lab import without_gpu
from sglang_moe_patches.lab.without_gpu import UnusableEnvironment


def whole_number(text: str) -> int:
    """Parse the text of an environment variable as an integer of at least 0."""
    if not text.isascii() or not text.isdigit():
        raise ValueError(f"expected a whole number from 0 on, got {text!r}")
    return int(text)


PLUGIN_NAME = "moe_reference"
"""The name of this distribution's entry point."""
KERNELS = Variable(
    "SGLANG_MOE_REFERENCE_KERNELS", "1: plain PyTorch in the place of FlashInfer's kernels", parse_zero_or_one, "0"
)
SWITCH = KERNELS.name
WORKSPACE_MB = Variable(
    "SGLANG_MOE_REFERENCE_WORKSPACE_MB",
    "MiB that each run of the reference kernels allocates besides: a stand-in for the vendor's workspace",
    whole_number,
    "0",
)

WARNING = (
    "sglang-moe-reference: REFERENCE KERNELS are active (%s=1): plain PyTorch replaces FlashInfer's NVFP4 kernels. "
    "Answers are meant for comparing servers with one another, speed means nothing. Never serve users like this."
)

CPU_SERVER_ARGUMENTS = {
    "--device": "cpu",
    "--attention-backend": "torch_native",
    "--disable-overlap-schedule": None,
    "--disable-cuda-graph": None,
    "--disable-radix-cache": None,
    "--sleep-on-idle": None,
    "--max-total-tokens": "65536",
}
"""Flags that the engine needs on a CPU, with their values. :func:`server_arguments` adds the flags that are not set."""

MATRIX_PRODUCTS = (
    "torch.matmul",
    "torch.bmm",
    "torch.nn.functional.linear",
    "torch.nn.functional.scaled_dot_product_attention",
)
"""Matrix products whose rounding depends on the batch, because BLAS adds in another order if a call has more rows."""


# --- Before the interpreter starts -----------------------------------------------------------------------------------

CPU_VARIABLES = {
    # The kernels are small. OpenMP threads would only wait for each other, because the server has several processes.
    "OMP_NUM_THREADS": "1",
    # The engine would compile small functions at the first request. This takes 40 s and is of no use here.
    "TORCHDYNAMO_DISABLE": "1",
    # Do not use Intel's matrix tiles (AMX). Some virtual machines announce AMX, but kill a process that uses it. AMX
    # also adds in another order than the vector instructions, which all these processors have.
    "ONEDNN_MAX_CPU_ISA": "AVX512_CORE_BF16",
}
"""Environment variables of a server without a GPU. A value that the user has set takes precedence."""


def variables(environ: Mapping[str, str] = os.environ) -> dict[str, str]:
    """Return the environment variables with which a new process can use the reference kernels.

    :raises UnusableEnvironment: ``SGLANG_PLUGINS`` does not name the plugin, or
        :func:`sglang_moe_patches.lab.without_gpu.variables` raises this exception.
    """
    allowed = environ.get("SGLANG_PLUGINS", "")
    if allowed and PLUGIN_NAME not in [name.strip() for name in allowed.split(",")]:
        raise UnusableEnvironment(
            f"SGLANG_PLUGINS={allowed} keeps the engine from loading the reference kernels; add {PLUGIN_NAME}"
        )
    on_cpu = {} if machine.has_gpu() else {name: environ.get(name, value) for name, value in CPU_VARIABLES.items()}
    return {SWITCH: "1", **without_gpu.variables(environ), **on_cpu}


def server_arguments(given: list[str]) -> list[str]:
    """Return server arguments with the additional flags that the engine needs on a machine without a GPU."""
    if machine.has_gpu():
        return given
    present = {argument.split("=", 1)[0] for argument in given}
    added = [pair for pair in CPU_SERVER_ARGUMENTS.items() if pair[0] not in present]
    return [*given, *(part for pair in added for part in pair if part is not None)]


# --- In each engine process ------------------------------------------------------------------------------------------


def register() -> None:
    """Entry point ``sglang.srt.plugins``: install the reference kernels if a variable enables them.

    :raises SystemExit: a variable has an invalid value. The engine swallows an ``Exception``, and would start without
        the kernels.
    """
    try:
        WORKSPACE_MB.read()
        if KERNELS.read():
            install()
    except WrongValue as error:
        raise SystemExit(f"sglang-moe-reference: {error}") from None


def install() -> None:
    """Replace FlashInfer's kernels in this process, now or as soon as their modules are imported."""
    import wrapt
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    from sglang_moe_reference import cutedsl
    from sglang_moe_reference import flashinfer_kernels as kernels

    if multiprocessing.parent_process() is None:  # only one process of a server prints the line
        logger.warning(WARNING, SWITCH)
    for target, kernel in {
        "flashinfer.fp4_quantize": kernels.fp4_quantize,
        "flashinfer.nvfp4_quantize": kernels.nvfp4_quantize,
        "flashinfer.nvfp4_block_scale_interleave": kernels.nvfp4_block_scale_interleave,
        "flashinfer.fused_moe.trtllm_fp4_block_scale_moe": kernels.trtllm_fp4_block_scale_moe,
        "flashinfer.fused_moe.trtllm_fp4_block_scale_routed_moe": kernels.trtllm_fp4_block_scale_routed_moe,
        **(cutedsl.kernels() if util.find_spec("cutlass") else {}),
    }.items():
        # The engine's own registry also finds the names that engine modules have imported already.
        HookRegistry.register(target, kernel, HookType.REPLACE)
    on_import: dict[str, Callable[[Any], None]] = {
        "sglang.srt.layers.quantization.modelopt_quant": _lift_blackwell_check
    }
    if os.environ.get("SGLANG_USE_CPU_ENGINE") == "1":
        on_import |= {
            "sglang.srt.models.deepseek_common.attention_backend_handler": _register_attention_path,
            "sglang.srt.models.deepseek_v2": functools.partial(
                _wrap, "DeepseekV2MoE", "__init__", _scale_routed_experts_once
            ),
            "sglang.srt.models.glm4_moe": functools.partial(
                _wrap, "Glm4MoeSparseMoeBlock", "__init__", _scale_routed_experts_once
            ),
            "sglang.srt.models.minimax_m2": _norm_all_heads,
            "sglang.srt.layers.layernorm": functools.partial(_wrap, "RMSNorm", "forward_native", _norm_in_place),
            "sglang.srt.layers.moe.topk": functools.partial(_wrap, "TopK", "forward_native", _leave_routing),
            "sglang.srt.layers.moe.moe_runner.flashinfer_trtllm": _complete_runner,
            "sglang.srt.layers.quantization.fp4_utils": _unwrap_quantizer,
            # The engine's binding of ranks to cores fails if there are more ranks than NUMA nodes. Binding helps only
            # the engine's own CPU kernels.
            "sglang.srt.model_executor.model_runner": _bind_to_no_core,
            "sglang.srt.utils.numa_utils": _bind_to_no_core,
        }
        # The engine's weight preparation always moves tensors to the GPU. Without a GPU, the tensors stay on the CPU.
        HookRegistry.register("torch.Tensor.cuda", lambda tensor, *args, **kwargs: tensor, HookType.REPLACE)
        for target, hook in {
            **dict.fromkeys(MATRIX_PRODUCTS, _in_double),
            "sglang.srt.distributed.parallel_state.GroupCoordinator.__init__": _without_gpu_links,
            **({**cutedsl.ON_ONE_STREAM, cutedsl.INIT: _with_buffers} if util.find_spec("cutlass") else {}),
        }.items():
            HookRegistry.register(target, hook, HookType.AROUND)
    for module, change in on_import.items():
        wrapt.register_post_import_hook(change, module)


def _lift_blackwell_check(module: Any) -> None:
    import wrapt

    class Blackwell(wrapt.ObjectProxy):
        is_blackwell = True

    # Replace the function in this module alone, because in other modules its result chooses kernels.
    if hasattr(module, "get_platform"):
        get_platform = module.get_platform
        module.get_platform = lambda: Blackwell(get_platform())
    else:
        module.is_blackwell_supported = lambda *args, **kwargs: True
    module.ModelOptFp4Config.get_min_capability = classmethod(lambda cls: 0)


def _complete_runner(module: Any) -> None:
    from sglang_moe_reference import flashinfer_kernels

    # Without a GPU, the engine assumes that FlashInfer is missing, and does not import its quantizer here.
    if module.fp4_quantize is None:
        module.fp4_quantize = flashinfer_kernels.fp4_quantize
    # Some releases pack ids and weights for the routed kernel in Triton. They also have a PyTorch version.
    if hasattr(module, "PackTopkIds"):
        module.PackTopkIds.execute = module.PackTopkIds.vanilla


def _bind_to_no_core(module: Any) -> None:
    runner = getattr(module, "ModelRunner", None)
    if runner is not None and hasattr(runner, "init_threads_binding"):
        runner.init_threads_binding = lambda runner: setattr(runner, "local_omp_cpuid", "")
    elif hasattr(module, "init_threads_binding"):  # releases with a function that chooses the cores
        module.init_threads_binding = lambda **place: ""


def _unwrap_quantizer(module: Any) -> None:
    from sglang_moe_reference import flashinfer_kernels

    # From 0.5.12 on, the engine registers the quantizer as an operator, and only for GPUs.
    if getattr(module, "fp4_quantize", None) is not None:
        module.fp4_quantize = flashinfer_kernels.fp4_quantize


def _with_buffers(original: Any, self: Any, *args: Any, **kwargs: Any) -> None:
    from sglang_moe_reference import cutedsl

    # CUDA graphs are the default on a GPU. The wrapper then has buffers, and refuses a batch that is too large for
    # them. The engine's attention on the CPU disables graphs, but the buffers must be tested.
    cutedsl.ON_ONE_STREAM[cutedsl.INIT](original, self, *args, **{**kwargs, "use_cuda_graph": True})


def _scale_routed_experts_once(original: Any, self: Any, *args: Any, **kwargs: Any) -> None:
    original(self, *args, **kwargs)
    # NVFP4 layers have this factor in their routing weights. Without a GPU the layer would multiply by it a second
    # time.
    if self.experts.should_fuse_routed_scaling_factor_in_topk:
        self.routed_scaling_factor = 1.0


def _norm_all_heads(module: Any) -> None:
    """Replace MiniMax-M2's norm over all heads of a token by PyTorch. The engine has this norm only in Triton."""
    import torch

    def rms_sumsq_serial(x1: Any, x2: Any) -> Any:
        return torch.cat([x.float().pow(2).sum(-1) for x in (x1, x2)])

    def rms_apply_serial(
        x1: Any, x2: Any, w1: Any, w2: Any, sum_sq: Any, tp_world: int = 1, eps: float = 1e-5
    ) -> tuple[Any, Any]:
        def norm(x: Any, weight: Any, squares: Any) -> Any:
            scale = torch.rsqrt(squares / x.shape[-1] / tp_world + eps)
            return (x.float() * scale[:, None] * weight.float()).to(x.dtype)

        tokens = x1.shape[0]
        return norm(x1, w1, sum_sq[:tokens]), norm(x2, w2, sum_sq[tokens:])

    module.rms_sumsq_serial = rms_sumsq_serial
    module.rms_apply_serial = rms_apply_serial


def _register_attention_path(module: Any) -> None:
    from sglang.srt.models.deepseek_common.attention_forward_methods.forward_methods import AttnForwardMethod

    module.AttentionBackendRegistry.register("torch_native", lambda attention, batch: AttnForwardMethod.MLA)


def _in_double(original: Any, *args: Any, **kwargs: Any) -> Any:
    """Compute a product in float64, and round it to the dtype of the arguments. This rounding hides the order in which
    BLAS adds."""
    import torch

    def widened(value: Any) -> Any:
        narrow = isinstance(value, torch.Tensor) and value.dtype in (torch.bfloat16, torch.float16, torch.float32)
        return value.double() if narrow else value

    dtype = args[0].dtype
    if dtype == torch.float64 or not dtype.is_floating_point or "out" in kwargs:
        return original(*args, **kwargs)
    wide = original(*map(widened, args), **{name: widened(value) for name, value in kwargs.items()})
    return wide.to(dtype)


def _without_gpu_links(original: Any, self: Any, *args: Any, **kwargs: Any) -> None:
    # Several ranks communicate only over gloo.
    original(self, *args, **{**kwargs, "use_pynccl": False, "use_custom_allreduce": False})


def as_its_own(owner: type, function: Callable[..., Any]) -> FunctionType:
    """Wrap ``function`` as a method of the engine's class ``owner``. The wrapper has the globals of ``owner``'s module.

    With these globals, sglang_moe_patches regards the method as the engine's own code. Otherwise it would suspect
    another plugin, and the layer would not offer its dead input.
    """

    def method(*args: Any, **kwargs: Any) -> Any:
        return function(*args, **kwargs)

    assert isinstance(method, FunctionType)
    name = getattr(function, "__name__", "")
    return FunctionType(method.__code__, vars(sys.modules[owner.__module__]), name, closure=method.__closure__)


def _wrap(kind: str, method: str, around: Callable[..., Any], module: Any) -> None:
    owner = getattr(module, kind)
    original = getattr(owner, method)
    wrapper: Any = as_its_own(owner, functools.partial(around, original))
    wrapper.__wrapped__ = original
    setattr(owner, method, wrapper)


def _leave_routing(original: Any, self: Any, *args: Any, **kwargs: Any) -> Any:
    from sglang.srt.layers.moe import get_moe_runner_backend

    # On the CPU the engine always computes the routing itself. A kernel that computes the routing needs the router's
    # logits instead.
    if get_moe_runner_backend().is_flashinfer_trtllm():
        return self.forward_cuda(*args, **kwargs)
    return original(self, *args, **kwargs)


def _norm_in_place(original: Any, self: Any, x: Any, residual: Any = None, *args: Any, **kwargs: Any) -> Any:
    result = original(self, x, residual, *args, **kwargs)
    if residual is None or not (x.is_contiguous() and residual.dtype == result[1].dtype):
        return result
    return x.copy_(result[0]), residual.copy_(result[1])
