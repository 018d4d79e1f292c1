"""Which MoE runners a server uses, and which of them leave their input alone."""

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
"""Values of ``--moe-runner-backend`` for the TRT-LLM kernels, which never write into their input. The last one, in
releases from 0.5.13, has kernels of its own for LoRA adapters alone."""
CUTEDSL = "flashinfer_cutedsl"
OUT_OF_PLACE = ("triton", "marlin", "cutlass", "flashinfer_cutlass")
"""Runners that leave their input alone if ``inplace`` is off: Triton, and those that never ask. The engine leaves it on
for all of them."""


def skip_unless_runner(*runners: str) -> Callable[[Any], Skip | None]:
    """The ``skip`` of a change that only these ``--moe-runner-backend`` reach, be it for the draft model alone.

    ``auto`` may still become one of them.
    """

    def skip(server_args: Any) -> Skip | None:
        backends = [str(server_args.moe_runner_backend)]
        if getattr(server_args, "speculative_algorithm", None):
            backends.append(str(getattr(server_args, "speculative_moe_runner_backend", None) or backends[0]))
        return None if {*runners, "auto"} & set(backends) else Skip(f"--moe-runner-backend is {backends[0]}")

    return skip


def runner_of(experts: Any) -> str | None:
    """The runner of a ``FusedMoE`` layer, by its name for ``--moe-runner-backend``; ``None`` where it is not known.

    Its quantization method has it, or the method's scheme or kernel. Some methods have none and call the kernel that
    the server asks for.
    """
    from sglang.srt.layers.moe import get_moe_runner_backend

    method, scheme = getattr(experts, "quant_method", None), getattr(experts, "scheme", None)
    for holder in (method, scheme, getattr(scheme, "kernel", None)):
        runner = getattr(holder, "runner", None)
        if runner is not None:  # of a method that is not the engine's it may be anything
            backend = getattr(getattr(runner, "runner_backend", None), "value", None)
            return None if backend is None else str(backend)
    if type(method).__name__ not in ("Fp8MoEMethod", "ModelOptNvFp4FusedMoEMethod"):
        return None
    asked = str(get_moe_runner_backend().value)
    return asked if asked in (*TRTLLM, "cutlass", "flashinfer_cutlass") else None


def may_take_dead_input(experts: Any, runner: str | None) -> bool:
    """Whether the runner of a ``FusedMoE`` layer may take what is on offer; one that is not known may.

    :param runner: as :func:`runner_of` has it. Of TRT-LLM's, the one for NVFP4 takes it.
    """
    if runner in TRTLLM:
        return is_nvfp4(experts)
    return runner is None or runner in (CUTEDSL, "triton", "marlin")


def is_nvfp4(experts: Any) -> bool:
    """Whether the weights of a ``FusedMoE`` layer are NVFP4, by the classes of its method or scheme."""
    return any("nvfp4" in kind.__name__.lower() for kind in type(quantization_of(experts)).__mro__)


def quantization_of(experts: Any) -> Any:
    """What knows the format of a ``FusedMoE`` layer's weights: the scheme of its quantization method, or the method."""
    return getattr(experts, "scheme", None) or getattr(experts, "quant_method", None)


def layers_of(model: Any) -> list[Any]:
    """The ``FusedMoE`` layers of a model."""
    experts = engine.module("sglang.srt.layers.moe.fused_moe_triton.layer").FusedMoE
    return [module for module in model.modules() if isinstance(module, experts)]


def preserves_input(experts: Any) -> bool:
    """Whether the runner of a ``FusedMoE`` layer does not write into its input, or does not once it is told so.

    Others write into it, or free it as DeepGEMM does, even then, or are not known.
    """
    import torch

    if type(experts.quant_method).__name__ == "KTEPWrapperMethod":  # some experts run on the CPU at the same time
        return False
    runner = runner_of(experts)
    if runner == "triton" and torch.version.hip:  # not tried there
        return False
    return experts.use_flashinfer_trtllm_moe or runner in OUT_OF_PLACE


def serves_lora() -> bool:
    """Whether this server may run LoRA adapters: they have runners of their own, which honour ``inplace``."""
    return bool(server_setting("get_lora", "enable_lora") or server_setting("get_lora", "lora_paths"))


def server_setting(context: str, name: str) -> Any:
    """A setting of this server; ``None``: this release has none of that name.

    :param context: the function of ``runtime_context`` that has it, in releases that keep settings there.
    """
    try:
        from sglang.srt import runtime_context

        settings = getattr(runtime_context, context)()
    except (ImportError, AttributeError):
        from sglang.srt.server_args import get_global_server_args

        settings = get_global_server_args()
    return getattr(settings, name, None)


def plan_without_flashinfer() -> Plan | None:
    """The plan of a change about FlashInfer's kernels where there is no FlashInfer (AMD, CPU); else ``None``."""
    if engine.has_module("flashinfer"):
        return None
    return Plan.not_needed("FlashInfer is not installed, so none of its kernels runs")


SYMMETRIC_MEMORY_MODULE = "sglang.srt.distributed.device_communicators.pynccl_allocator"
IN_POOL = "is_tensor_in_symmetric_mempool"
"""The engine's function in that module."""
_MAX_ADDRESSES = 4096
"""So many are remembered."""


class SymmetricMemory:
    """NCCL symmetric memory, as the engine has it: what a collective reads from its pool takes a faster way.

    :param module: the engine's, in which it is on or off.
    :param pool: the engine's context in which an output is made that a collective reads.
    """

    def __init__(self, module: Any, pool: Callable[[], AbstractContextManager[Any]] = nullcontext) -> None:
        self._module = module
        self._pool = pool
        self.contains = remember_pool_addresses(lambda tensor: getattr(module, IN_POOL)(tensor))

    @property
    def is_enabled(self) -> bool:
        """Whether the server has it."""
        return bool(self._module.is_symmetric_memory_enabled())

    @property
    def is_active(self) -> bool:
        """Whether what is made now comes from the pool."""
        return self._module._active_symmetric_memory_context is not None

    def output_context(self) -> AbstractContextManager[Any]:
        """Within it, an output comes from the pool where one that is written over its input would lie there."""
        return nullcontext() if self.is_active or not self.is_enabled else self._pool()


def remember_pool_addresses(walk: Callable[[torch.Tensor], bool]) -> Callable[[torch.Tensor], bool]:
    """The engine's question whether a tensor lies in the pool, asked until an address does: it walks a snapshot of the
    pool, too slow for every layer.

    The pool's memory is never given back while the process lives (the engine's own assumption). What is outside may be
    inside later: a rank that went on saying "outside" would take from the pool what the others do not, and the pool
    must be the same on all ranks.
    """
    inside = set[int]()

    @functools.wraps(walk)
    def is_tensor_in_symmetric_mempool(tensor: torch.Tensor) -> bool:
        address = tensor.untyped_storage().data_ptr()
        if address in inside:
            return True
        found = walk(tensor)
        if found:
            if len(inside) == _MAX_ADDRESSES:
                inside.clear()
            inside.add(address)
        return found

    return is_tensor_in_symmetric_mempool


def probe_symmetric_memory() -> SymmetricMemory:
    """The engine's.

    :raises engine.Unsupported: it does not go by the expected names.
    """
    module = engine.module(SYMMETRIC_MEMORY_MODULE)
    for name in ("_active_symmetric_memory_context", "is_symmetric_memory_enabled", IN_POOL):
        engine.get(module, name)
    use = engine.get(module, "use_symmetric_memory")
    engine.require_parameters(use, ["group_coordinator", "disabled"])
    group = engine.get(engine.module("sglang.srt.distributed.parallel_state"), "get_tp_group")
    symmetric = engine.get(engine.module("sglang.srt.layers.dp_attention"), "is_allocation_symmetric")
    return SymmetricMemory(module, lambda: use(group(), disabled=not symmetric()))


def probe_inplace(fused_moe: Any) -> Any:
    """The engine's ``FusedMoE``: its layers tell their runner whether it may write its output over its input.

    :raises engine.Unsupported: they do not tell it by ``use_flashinfer_trtllm_moe`` and ``moe_runner_config``.
    """
    layer = engine.require_unpatched(fused_moe, "FusedMoE")
    engine.require_mentions(
        engine.require_unpatched(layer, "__init__"), "use_flashinfer_trtllm_moe", "moe_runner_config"
    )
    return layer


def is_in_place(experts: Any) -> bool:
    """Whether the runner of a ``FusedMoE`` layer is told, in every forward, to write its output over its input."""
    config = getattr(experts, "moe_runner_config", None)
    return (
        config is not None and bool(config.inplace) and not isinstance(getattr(type(config), "inplace", None), property)
    )


def disable_inplace_while(config: Any, asked: Callable[[], bool]) -> None:
    """Have a runner's configuration say ``inplace`` as it does, but not while ``asked``.

    Forwards in many contexts read one configuration: it cannot be set back and forth.
    """

    def inplace(self: Any) -> bool:
        return vars(self)["inplace"] and not asked()

    def set_inplace(self: Any, value: bool) -> None:
        vars(self)["inplace"] = value

    kind = type(config)
    own = {"__module__": kind.__module__, "__qualname__": kind.__qualname__, "inplace": property(inplace, set_inplace)}
    config.__class__ = type(kind.__name__, (kind,), own)


def clear_inplace(layer: Any, patcher: Patcher) -> None:
    """Mark the TRT-LLM runners of all ``FusedMoE`` layers to come as leaving their input alone, which they do.

    In place is the engine's default, and what it defers the shared experts by.
    """

    @around
    def wrap_init(original: Callable[..., None], self: Any, *args: Any, **kwargs: Any) -> None:
        original(self, *args, **kwargs)
        with best_effort(f"the runner of {type(self).__name__}"):
            if self.use_flashinfer_trtllm_moe:
                self.moe_runner_config.inplace = False

    patcher.wrap(layer, "__init__", wrap_init)
