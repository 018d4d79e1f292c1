"""What lets the engine run without a Blackwell GPU, or without any GPU: only ever active when asked for.

Two halves. :func:`variables` is what must be right *before* an interpreter starts: with no GPU, a stub
``libcuda.so.1`` that answers "no device" to everything, so that the engine's compiled kernels can be imported at all.
:func:`install` is what each engine process does when it loads plugins: FlashInfer's kernels replaced by plain PyTorch,
the check for Blackwell lifted, and on the CPU an attention path that exists there and an add-RMSNorm that works in
place, as it does on GPUs (out of place, aliasing bugs would not show).
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import multiprocessing
import os
import subprocess
import sys
from collections.abc import Callable, Mapping
from importlib import util
from pathlib import Path
from types import FunctionType
from typing import Any

from sglang_moe_patches.core import machine
from sglang_moe_patches.core.log import logger
from sglang_moe_patches.core.variables import REFERENCE_KERNELS

SWITCH = REFERENCE_KERNELS.name

WARNING = (
    "sglang-moe-patches: REFERENCE KERNELS are active (%s=1): plain PyTorch replaces FlashInfer's NVFP4 kernels. "
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
"""Flags that the engine needs on a CPU, with their values; :func:`server_arguments` adds those not given."""

MATRIX_PRODUCTS = (
    "torch.matmul",
    "torch.bmm",
    "torch.nn.functional.linear",
    "torch.nn.functional.scaled_dot_product_attention",
)
"""What a request's answer would depend on: BLAS adds up in another order when more rows share a call."""


class UnusableEnvironment(RuntimeError):
    """The environment for the reference kernels cannot be made; the message says what is missing."""


# --- Before the interpreter starts -----------------------------------------------------------------------------------


def variables(environ: Mapping[str, str] = os.environ) -> dict[str, str]:
    """The environment variables to add so that a process started with them can use the reference kernels.

    :raises UnusableEnvironment: no C compiler for the stub, the engine's kernels or what they load are not installed,
        or ``SGLANG_PLUGINS`` keeps this package's plugin from being loaded.
    """
    allowed = environ.get("SGLANG_PLUGINS", "")
    if allowed and machine.PLUGIN_NAME not in [name.strip() for name in allowed.split(",")]:
        raise UnusableEnvironment(
            f"SGLANG_PLUGINS={allowed} keeps the engine from loading the reference kernels; add {machine.PLUGIN_NAME}"
        )
    added = {SWITCH: "1"}
    if not machine.has_gpu():
        stub = stub_libcuda(machine.cache_folder(environ))
        paths = [str(stub.parent), *filter(None, environ.get("LD_LIBRARY_PATH", "").split(":"))]
        added |= {
            "LD_LIBRARY_PATH": ":".join(dict.fromkeys(paths)),
            "SGLANG_USE_CPU_ENGINE": "1",
            # The kernels are small: with the server's own processes beside them, OpenMP threads wait for one another.
            "OMP_NUM_THREADS": environ.get("OMP_NUM_THREADS", "1"),
            # The engine compiles small functions at the first request: 40 s that buy nothing here.
            "TORCHDYNAMO_DISABLE": environ.get("TORCHDYNAMO_DISABLE", "1"),
            # Some virtual machines announce Intel's tiles (AMX) and kill who uses them with SIGILL; and tiles add up
            # in another order than the vectors that every such processor has.
            "ONEDNN_MAX_CPU_ISA": environ.get("ONEDNN_MAX_CPU_ISA", "AVX512_CORE_BF16"),
        }
    return added


def server_arguments(given: list[str]) -> list[str]:
    """``given`` server arguments, completed with what the engine needs where there is no GPU."""
    if machine.has_gpu():
        return given
    present = {argument.split("=", 1)[0] for argument in given}
    added = [pair for pair in CPU_SERVER_ARGUMENTS.items() if pair[0] not in present]
    return [*given, *(part for pair in added for part in pair if part is not None)]


def stub_libcuda(folder: Path) -> Path:
    """Build, once, a ``libcuda.so.1`` whose functions all return 100 (``CUDA_ERROR_NO_DEVICE``).

    It defines the ``cu*`` symbols that the engine's compiled kernels import, and nothing else.

    :returns: the library, in a folder of its own below ``folder``.
    :raises UnusableEnvironment: it cannot be built, or the kernels could not be imported even with it.
    """
    if not (libraries := _libraries("sgl_kernel")):
        raise UnusableEnvironment("the engine's kernels (sgl_kernel) are not installed in this environment")
    libraries += _libraries("deep_gemm")  # of some releases it looks for all of the driver when it is imported
    undefined = {name for library in libraries for name in _undefined_symbols(library)}
    # The one library that they load and neither a package index nor every system brings.
    if any(name.startswith("numa_") for name in undefined) and not _loads("libnuma.so.1"):
        raise UnusableEnvironment(
            "the engine's kernels (sgl_kernel) load libnuma.so.1; install libnuma1 (Debian, Ubuntu) or numactl-libs"
        )
    # The driver's functions are cuXxx; the runtime's cudaXxx, cuBLAS's cublasXxx and others start in lower case.
    symbols = sorted(name for name in undefined if name.startswith("cu") and name[2:3].isupper())
    source = "".join(f"int {name}(void) {{ return 100; }}\n" for name in symbols)
    target = folder / f"libcuda-{hashlib.sha256(source.encode()).hexdigest()[:16]}" / "libcuda.so.1"
    if target.exists():
        return target
    target.parent.mkdir(parents=True, exist_ok=True)
    partial = target.with_suffix(f".{os.getpid()}")
    _run(
        ["gcc", "-shared", "-fPIC", "-x", "c", "-", "-o", str(partial), "-Wl,-soname,libcuda.so.1"],
        "building a stub CUDA driver",
        text=source,
    )
    partial.replace(target)  # whole or not at all: several servers may start at once
    return target


def _libraries(package: str) -> list[Path]:
    spec = util.find_spec(package)
    if spec is None or not spec.submodule_search_locations:
        return []
    return sorted(Path(spec.submodule_search_locations[0]).rglob("*.so"))


def _undefined_symbols(library: Path) -> set[str]:
    listing = _run(["nm", "-D", "--undefined-only", str(library)], "reading the engine's kernels")
    return {line.split()[-1].split("@")[0] for line in listing.splitlines() if line.strip()}


def _loads(library: str) -> bool:
    try:
        ctypes.CDLL(library)
    except OSError:
        return False
    return True


def _run(command: list[str], purpose: str, text: str | None = None) -> str:
    try:
        done = subprocess.run(command, input=text, capture_output=True, text=True, check=False)
    except FileNotFoundError:
        raise UnusableEnvironment(f"{purpose} needs {command[0]}; install gcc and binutils") from None
    if done.returncode:
        raise UnusableEnvironment(f"{purpose} failed: {' '.join(command)}: {done.stderr.strip()}")
    return done.stdout


# --- In each engine process ------------------------------------------------------------------------------------------


def install() -> None:
    """Replace FlashInfer's kernels in this process, now or as soon as their modules are imported."""
    import wrapt
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    from sglang_moe_patches.lab.reference import cutedsl
    from sglang_moe_patches.lab.reference import flashinfer_kernels as kernels

    if multiprocessing.parent_process() is None:  # once a server, not once a process
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
            "sglang.srt.models.deepseek_v2": functools.partial(_scale_routed_experts_once, "DeepseekV2MoE"),
            "sglang.srt.models.glm4_moe": functools.partial(_scale_routed_experts_once, "Glm4MoeSparseMoeBlock"),
            "sglang.srt.models.minimax_m2": _norm_all_heads,
            "sglang.srt.layers.layernorm": functools.partial(_wrap_native, "RMSNorm", _norm_in_place),
            "sglang.srt.layers.moe.topk": functools.partial(_wrap_native, "TopK", _leave_routing),
            "sglang.srt.layers.moe.moe_runner.flashinfer_trtllm": _complete_runner,
            "sglang.srt.layers.quantization.fp4_utils": _unwrap_quantizer,
            # Binding ranks to cores refuses more ranks than NUMA nodes, and helps only the engine's own CPU kernels.
            "sglang.srt.model_executor.model_runner": _bind_to_no_core,
            "sglang.srt.utils.numa_utils": _bind_to_no_core,
        }
        # Weight preparation moves tensors "to the GPU" unasked; here they stay.
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

    # In this module alone: elsewhere the same question chooses kernels.
    if hasattr(module, "get_platform"):
        get_platform = module.get_platform
        module.get_platform = lambda: Blackwell(get_platform())
    else:
        module.is_blackwell_supported = lambda *args, **kwargs: True
    module.ModelOptFp4Config.get_min_capability = classmethod(lambda cls: 0)


def _complete_runner(module: Any) -> None:
    from sglang_moe_patches.lab.reference import flashinfer_kernels

    # Without a GPU the engine takes FlashInfer for missing and does not import its quantizer here.
    if module.fp4_quantize is None:
        module.fp4_quantize = flashinfer_kernels.fp4_quantize
    # Some releases pack ids and weights for the routed kernel in Triton; they bring the same in PyTorch.
    if hasattr(module, "PackTopkIds"):
        module.PackTopkIds.execute = module.PackTopkIds.vanilla


def _bind_to_no_core(module: Any) -> None:
    runner = getattr(module, "ModelRunner", None)
    if runner is not None and hasattr(runner, "init_threads_binding"):
        runner.init_threads_binding = lambda runner: setattr(runner, "local_omp_cpuid", "")
    elif hasattr(module, "init_threads_binding"):  # releases in which a function gives the cores
        module.init_threads_binding = lambda **place: ""


def _unwrap_quantizer(module: Any) -> None:
    from sglang_moe_patches.lab.reference import flashinfer_kernels

    # From 0.5.12 on the engine registers the quantizer as an operator, which PyTorch then has for GPUs alone.
    if getattr(module, "fp4_quantize", None) is not None:
        module.fp4_quantize = flashinfer_kernels.fp4_quantize


def _with_buffers(original: Any, self: Any, *args: Any, **kwargs: Any) -> None:
    from sglang_moe_patches.lab.reference import cutedsl

    # With CUDA graphs, the default on a GPU, the wrapper has buffers, and refuses a batch that does not fit. The engine
    # has no graphs here (its attention backend turns them off); what they bring with them must not be lost.
    cutedsl.ON_ONE_STREAM[cutedsl.INIT](original, self, *args, **{**kwargs, "use_cuda_graph": True})


def _scale_routed_experts_once(block: str, module: Any) -> None:
    original = getattr(module, block).__init__

    @functools.wraps(original)
    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:
        original(self, *args, **kwargs)
        # With NVFP4 the factor is in the routing weights. Where there is no GPU the layer multiplies by it once more.
        if self.experts.should_fuse_routed_scaling_factor_in_topk:
            self.routed_scaling_factor = 1.0

    getattr(module, block).__init__ = __init__


def _norm_all_heads(module: Any) -> None:
    """MiniMax-M2's norm over all heads of a token, which the engine has in Triton alone: the same in PyTorch."""
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
    """Add up in float64, so that the order in which BLAS does it is lost in the rounding to the result's dtype."""
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
    # Several ranks talk over gloo alone.
    original(self, *args, **{**kwargs, "use_pynccl": False, "use_custom_allreduce": False})


def as_its_own(owner: type, function: Callable[..., Any]) -> FunctionType:
    """A method that counts as its owner's own code to whoever asks where its globals are.

    Layers of which another plugin has wrapped a method do not offer their dead inputs.
    """

    def method(*args: Any, **kwargs: Any) -> Any:
        return function(*args, **kwargs)

    assert isinstance(method, FunctionType)
    name = getattr(function, "__name__", "")
    return FunctionType(method.__code__, vars(sys.modules[owner.__module__]), name, closure=method.__closure__)


def _wrap_native(kind: str, around: Callable[..., Any], module: Any) -> None:
    owner = getattr(module, kind)
    original = owner.forward_native
    owner.forward_native = as_its_own(owner, functools.partial(around, original))
    owner.forward_native.__wrapped__ = original


def _leave_routing(original: Any, self: Any, *args: Any, **kwargs: Any) -> Any:
    from sglang.srt.layers.moe import get_moe_runner_backend

    # On the CPU the engine always routes by itself; the kernel that does its own routing wants the logits.
    if get_moe_runner_backend().is_flashinfer_trtllm():
        return self.forward_cuda(*args, **kwargs)
    return original(self, *args, **kwargs)


def _norm_in_place(original: Any, self: Any, x: Any, residual: Any = None, *args: Any, **kwargs: Any) -> Any:
    result = original(self, x, residual, *args, **kwargs)
    if residual is None or not (x.is_contiguous() and residual.dtype == result[1].dtype):
        return result
    return x.copy_(result[0]), residual.copy_(result[1])
