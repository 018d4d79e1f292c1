"""Facts about the engine's MoE runners: the runner that a layer uses, and whether the runner overwrites its input.

A *runner* computes the routed experts of a ``FusedMoE`` layer. ``--moe-runner-backend`` selects it.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any

from sglang_moe_patches.core import engine
from sglang_moe_patches.core.patch import Patcher, Plan, Skip, around, best_effort

if TYPE_CHECKING:
    import torch

TRTLLM = ("flashinfer_trtllm", "flashinfer_trtllm_routed", "experimental_sgl_trtllm")
"""Values of ``--moe-runner-backend`` for TRT-LLM's kernels, which never write into their input. The value
``experimental_sgl_trtllm`` exists from 0.5.13 on. It has its own kernels for LoRA adapters. Without adapters, it uses
the same kernels as the other values."""
CUTEDSL = "flashinfer_cutedsl"
MARLIN = ("marlin", "lora_marlin")
"""Values of the engine's ``MoeRunnerBackend`` for layers that run on Marlin. Only newer releases have the value
"lora_marlin"."""
TRITON_KERNELS = "triton_kernel"
"""Value of ``--moe-runner-backend`` for OpenAI's ``triton_kernels``, the kernels made for gpt-oss."""
OUT_OF_PLACE = ("triton", "marlin", "cutlass", "flashinfer_cutlass")
"""Runners that do not write into their input if ``inplace`` is off. ``inplace`` is an attribute of a runner's
configuration. It permits the runner to write its output over its input. The engine switches ``inplace`` on for all
runners. Of the runners in this tuple, Triton alone reads ``inplace``. The others never write into their input."""


def skip_unless_runner(*runners: str) -> Callable[[Any], Skip | None]:
    """Return the ``skip`` function of a change that acts only with these values of ``--moe-runner-backend``.

    The returned function reads the server's value, and with speculative decoding also the draft model's value. If one
    of these values is in ``runners`` or is ``auto``, the change is not skipped. The engine may still resolve ``auto``
    to one of ``runners``.
    """

    def skip(server_args: Any) -> Skip | None:
        backends = [str(server_args.moe_runner_backend)]
        if getattr(server_args, "speculative_algorithm", None):
            backends.append(str(getattr(server_args, "speculative_moe_runner_backend", None) or backends[0]))
        return None if {*runners, "auto"} & set(backends) else Skip(f"--moe-runner-backend is {backends[0]}")

    return skip


def find_runner(experts: Any) -> str | None:
    """Return a ``FusedMoE`` layer's runner as a value of ``--moe-runner-backend``, or ``None`` if it is not known.

    The attribute ``runner`` of the layer's quantization method, scheme or kernel names the runner. Some methods have no
    such attribute. They call the kernel that ``--moe-runner-backend`` selects. NVFP4 methods of some releases have the
    attribute, but call another kernel (:func:`_find_directly_called_runner`).
    """
    method, scheme = getattr(experts, "quant_method", None), getattr(experts, "scheme", None)
    for holder in (method, scheme):
        if (kernel := _find_directly_called_runner(holder)) is not None:
            return kernel or None
    for holder in (method, scheme, getattr(scheme, "kernel", None)):
        runner = getattr(holder, "runner", None)
        if runner is not None:  # another package's method may have an attribute ``runner`` of any type
            backend = getattr(getattr(runner, "runner_backend", None), "value", None)
            return None if backend is None else str(backend)
    if type(method).__name__ not in ("Fp8MoEMethod", "ModelOptNvFp4FusedMoEMethod"):
        return None
    from sglang.srt.layers.moe import get_moe_runner_backend

    selected = str(get_moe_runner_backend().value)
    return selected if selected in (*TRTLLM, "cutlass", "flashinfer_cutlass") else None


_TRTLLM_FLAGS = ("enable_flashinfer_trtllm_moe", "use_flashinfer_trtllm")
"""Attributes of NVFP4 methods and schemes that say whether TRT-LLM's kernels run the experts."""
_CUTEDSL_AND_CUTLASS_FLAGS = ("enable_flashinfer_cutedsl_moe", "enable_flashinfer_cutlass_moe")
"""Attributes of NVFP4 methods that say whether FlashInfer's CuteDSL or CUTLASS kernels run the experts."""
_CUTLASS_FP4 = "cutlass_moe_fp4"
"""Name of the engine's function that runs NVFP4 experts if no attribute selects another kernel."""


def _find_directly_called_runner(holder: Any) -> str | None:
    """Return the runner whose kernel an NVFP4 method or scheme calls directly, not through its attribute ``runner``.

    In that case the attribute ``runner`` names a runner that is not used. For example, in 0.5.12.post1 with
    ``--moe-runner-backend auto``, the attribute names TRT-LLM's runner, but the method calls ``cutlass_moe_fp4``.

    :returns: the runner, or "" if ``--moe-runner-backend`` has no name for the kernel. The result is ``None`` if no
        direct call is found. :func:`find_runner` then reads the attribute ``runner``.
    """
    flag = next((name for name in _TRTLLM_FLAGS if hasattr(holder, name)), None)
    apply: Any = getattr(type(holder), "apply_weights", None) or getattr(type(holder), "apply", None)
    if flag is None or not engine.mentions(apply, flag, _CUTLASS_FP4):
        return None
    if getattr(holder, flag):
        return None if engine.mentions(apply, "runner") else ""
    return None if any(getattr(holder, name, False) for name in _CUTEDSL_AND_CUTLASS_FLAGS) else "cutlass"


def may_take_dead_input(experts: Any, runner: str | None) -> bool:
    """Return whether the runner of a ``FusedMoE`` layer may take the layer's dead input.

    TRT-LLM's runners take a dead input only if the weights are NVFP4. The result is true for an unknown runner.

    :param runner: the result of :func:`find_runner`.
    """
    if runner in TRTLLM:
        return is_nvfp4(experts)
    return runner is None or runner in (CUTEDSL, "triton", "marlin")


def is_nvfp4(experts: Any) -> bool:
    """Return whether the weights of a ``FusedMoE`` layer are NVFP4. The class name of its method or scheme decides."""
    return any("nvfp4" in kind.__name__.lower() for kind in type(find_quantization(experts)).__mro__)


def find_quantization(experts: Any) -> Any:
    """Return the scheme or quantization method that defines the format of a ``FusedMoE`` layer's weights."""
    return getattr(experts, "scheme", None) or getattr(experts, "quant_method", None)


def find_layers(model: Any) -> list[Any]:
    """Return the ``FusedMoE`` layers of a model."""
    experts = engine.import_module("sglang.srt.layers.moe.fused_moe_triton.layer").FusedMoE
    return [module for module in model.modules() if isinstance(module, experts)]


def preserves_input(experts: Any) -> bool:
    """Return whether the runner of a ``FusedMoE`` layer leaves its input unchanged if ``inplace`` is off.

    The result is false in these cases:

    - The runner overwrites its input even if ``inplace`` is off.
    - The runner is DeepGEMM, which frees its input.
    - The runner is unknown.
    - The runner is Triton on an AMD GPU. This was not tested.
    - Some experts run on the CPU at the same time (``KTEPWrapperMethod``).
    """
    import torch

    if type(experts.quant_method).__name__ == "KTEPWrapperMethod":  # runs some experts on the CPU at the same time
        return False
    runner = find_runner(experts)
    if runner == "triton" and torch.version.hip:  # not tested on AMD
        return False
    return experts.use_flashinfer_trtllm_moe or runner in OUT_OF_PLACE


def serves_lora() -> bool:
    """Return whether this server may run LoRA adapters. With ``inplace``, a LoRA runner may overwrite the MoE input."""
    return bool(read_server_setting("get_lora", "enable_lora") or read_server_setting("get_lora", "lora_paths"))


def read_server_setting(context: str, name: str) -> Any:
    """Return a setting of this server, or ``None`` if this release has no setting of that name.

    :param context: name of the function in ``sglang.srt.runtime_context`` that returns the settings. Releases without
        that module keep all settings in the global ``ServerArgs``.
    """
    try:
        from sglang.srt import runtime_context

        settings = getattr(runtime_context, context)()
    except (ImportError, AttributeError):
        from sglang.srt.server_args import get_global_server_args

        settings = get_global_server_args()
    return getattr(settings, name, None)


def plan_without_flashinfer() -> Plan | None:
    """Return the plan of a change to FlashInfer's kernels if FlashInfer is not installed (AMD, CPU), else ``None``.

    The status of this plan is *not needed*.
    """
    if engine.has_module("flashinfer"):
        return None
    return Plan.not_needed("FlashInfer is not installed, so none of its kernels runs")


SYMMETRIC_MEMORY_MODULE = "sglang.srt.distributed.device_communicators.pynccl_allocator"
POOL_QUERY = "is_tensor_in_symmetric_mempool"
"""Name of the engine's function that returns whether a tensor lies in the engine's pool of NCCL symmetric memory. The
module :data:`SYMMETRIC_MEMORY_MODULE` defines the function."""
_MAX_ADDRESSES = 4096
"""Largest number of tensor addresses that the cache of :func:`cache_pool_addresses` stores."""


class SymmetricMemory:
    """The engine's pool of NCCL symmetric memory. A collective is faster if its input lies in this pool.

    The method ``contains`` returns whether a tensor lies in the pool.

    :param module: the engine's module that manages the pool.
    :param pool: function that returns the engine's context manager for allocations. Inside it, new tensors come from
        the pool, unless the engine's ``is_allocation_symmetric`` returns false.
    """

    def __init__(self, module: Any, pool: Callable[[], AbstractContextManager[Any]] = nullcontext) -> None:
        self._module = module
        self._pool = pool
        self.contains = cache_pool_addresses(lambda tensor: getattr(module, POOL_QUERY)(tensor))

    @property
    def is_enabled(self) -> bool:
        """Return whether the server uses NCCL symmetric memory."""
        return bool(self._module.is_symmetric_memory_enabled())

    @property
    def is_active(self) -> bool:
        """Return whether a tensor that is allocated now comes from the pool of NCCL symmetric memory."""
        return self._module._active_symmetric_memory_context is not None

    def output_context(self) -> AbstractContextManager[Any]:
        """Return a context manager in which a runner's output is to be allocated.

        If the server uses NCCL symmetric memory, the output then comes from the pool of this memory. A stock runner
        that works in place needs no such context: it writes its output over its input, which may already lie in the
        pool.
        """
        return nullcontext() if self.is_active or not self.is_enabled else self._pool()


def cache_pool_addresses(search_pool: Callable[[torch.Tensor], bool]) -> Callable[[torch.Tensor], bool]:
    """Return a faster version of the engine's function that searches the pool of NCCL symmetric memory for a tensor.

    The engine's function searches a snapshot of the pool, which is too slow for every layer. The faster version caches
    the addresses that lie in the pool. A cached address stays in the pool, because the pool never frees memory while
    the process lives.

    An address outside the pool is not cached, because the pool may grow and contain the address later. A rank with an
    outdated result would allocate from the pool, although the other ranks do not. All ranks must allocate alike.

    :param search_pool: the engine's function, which returns whether a tensor lies in the pool.
    """
    inside = set[int]()

    @functools.wraps(search_pool)
    def is_tensor_in_symmetric_mempool(tensor: torch.Tensor) -> bool:
        address = tensor.untyped_storage().data_ptr()
        if address in inside:
            return True
        is_inside = search_pool(tensor)
        if is_inside:
            if len(inside) == _MAX_ADDRESSES:
                inside.clear()
            inside.add(address)
        return is_inside

    return is_tensor_in_symmetric_mempool


def probe_symmetric_memory() -> SymmetricMemory:
    """Probe the engine's module for NCCL symmetric memory, and return a :class:`SymmetricMemory`.

    :raises engine.Unsupported: a name or a parameter in the engine's modules is not as expected.
    """
    module = engine.import_module(SYMMETRIC_MEMORY_MODULE)
    for name in ("_active_symmetric_memory_context", "is_symmetric_memory_enabled", POOL_QUERY):
        engine.get(module, name)
    use = engine.get(module, "use_symmetric_memory")
    engine.require_parameters(use, ["group_coordinator", "disabled"])
    group = engine.get(engine.import_module("sglang.srt.distributed.parallel_state"), "get_tp_group")
    symmetric = engine.get(engine.import_module("sglang.srt.layers.dp_attention"), "is_allocation_symmetric")
    return SymmetricMemory(module, lambda: use(group(), disabled=not symmetric()))


def probe_inplace(fused_moe: Any) -> Any:
    """Return the engine's class ``FusedMoE``, after a check that its layers keep ``inplace`` in their runner's
    configuration.

    :param fused_moe: the engine's module that defines the class.
    :raises engine.Unsupported: another plugin has patched the class or its constructor, or the constructor does not use
        one of two names. ``moe_runner_config`` is the runner's configuration. ``use_flashinfer_trtllm_moe`` says
        whether TRT-LLM's kernels run the experts.
    """
    layer = engine.require_unpatched(fused_moe, "FusedMoE")
    engine.require_mentions(
        engine.require_unpatched(layer, "__init__"), "use_flashinfer_trtllm_moe", "moe_runner_config"
    )
    return layer


def is_in_place(experts: Any) -> bool:
    """Return whether ``inplace`` is on for the runner of a ``FusedMoE`` layer in every forward pass. Triton then writes
    its output over its input.

    The result is false if :func:`disable_inplace_while` may switch ``inplace`` off for some forward passes.
    """
    config = getattr(experts, "moe_runner_config", None)
    return (
        config is not None and bool(config.inplace) and not isinstance(getattr(type(config), "inplace", None), property)
    )


def disable_inplace_while(config: Any, is_disabled: Callable[[], bool]) -> None:
    """Make the attribute ``config.inplace`` read as false while ``is_disabled`` returns true.

    At other times the attribute reads as its stored value. The stored value does not change, because several forward
    passes may read the attribute at the same time.

    :param config: the configuration of a runner.
    :param is_disabled: function that is called at each read. It returns whether ``inplace`` is off for the forward pass
        that reads the attribute.
    """

    def inplace(self: Any) -> bool:
        return vars(self)["inplace"] and not is_disabled()

    def set_inplace(self: Any, value: bool) -> None:
        vars(self)["inplace"] = value

    kind = type(config)
    namespace = {
        "__module__": kind.__module__,
        "__qualname__": kind.__qualname__,
        "inplace": property(inplace, set_inplace),
    }
    config.__class__ = type(kind.__name__, (kind,), namespace)


def clear_inplace(layer: Any, patcher: Patcher) -> None:
    """Switch ``inplace`` off for the TRT-LLM runner of every ``FusedMoE`` layer that is built from now on.

    TRT-LLM's kernels never write into their input, but the engine leaves ``inplace`` on. The engine runs the shared
    experts after the routed ones only if ``inplace`` is off.
    """

    @around
    def wrap_init(original: Callable[..., None], self: Any, *args: Any, **kwargs: Any) -> None:
        original(self, *args, **kwargs)
        with best_effort(f"switching inplace off in the runner of {type(self).__name__}"):
            if self.use_flashinfer_trtllm_moe:
                self.moe_runner_config.inplace = False

    patcher.wrap(layer, "__init__", wrap_init)
