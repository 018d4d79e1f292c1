"""fp4-weights: lay out FP4 experts in the memory into which they were loaded, and free scales that no code reads.

Why
    After a layer is loaded, the engine *lays out* its experts: it converts them to the layout that a kernel reads.

    * NVFP4 for TRT-LLM: to lay out one layer, the engine allocates thousands of tensors, and more than a second copy of
      the layer.
    * MXFP4 for ``triton_kernels``: to lay out one layer, the engine needs temporary memory of nearly six times the
      layer's weights. Holes remain in the allocator: reserved memory that no later tensor fits into. The loaded scales
      stay allocated although no code reads them (gpt-oss).
    * Marlin, which calls the conversion *repack*: the engine repacks a layer's experts into a list, and then stacks the
      list, while the loaded experts are still allocated. MXFP4's unpacked scales stay allocated although no code reads
      them (DeepSeek-V4).
    * NVFP4: ``create_weights`` allocates swizzled block scales that neither TRT-LLM nor Marlin reads. With Marlin these
      scales stay allocated.

Hook points
    * ``prepare_static_weights_for_trtllm_fp4_moe``, in ``quantization.utils`` and in every module that imported it by
      name. :mod:`.shuffle` replaces it by a function that shuffles its arguments in place. The engine's
      ``align_fp4_moe_weights_for_flashinfer_trtllm`` then copies each result into its parameter. This copy takes no
      time, because the result already is the parameter's memory. If the engine pads the intermediate size first, it
      makes padded copies of the weights. These copies are then shuffled in place, and become the parameters.
    * ``swizzle_blockscale``, while ``ModelOptNvFp4FusedMoEMethod.create_weights`` runs for a TRT-LLM backend. The
      function then returns a placeholder (:func:`_make_placeholder`). Releases from 0.5.13 on create no block scales.
    * ``create_moe_runner``, in which the engine decides whether Marlin runs a layer. If Marlin runs it, placeholders
      replace the layer's swizzled scales.
    * ``_swizzle_mxfp4`` and ``Mxfp4MoEMethod.create_weights``: ``create_weights`` allocates memory that is large enough
      for the laid-out experts. :mod:`.in_parts` then lays out a few experts at a time in this memory.
    * ``process_weights_after_loading`` of MXFP4's quantization methods. Afterwards placeholders replace the scales that
      the method's ``apply`` never reads (:mod:`.unread`). A placeholder accepts a weight update, as the stock engine's
      parameter does. On Hopper, zeros are put after the remaining scales (:func:`append_zeros_to_scales`).
    * ``prepare_moe_mxfp4_layer_for_marlin``, ``prepare_moe_nvfp4_layer_for_marlin`` and ``gptq_marlin_repack``:
      :mod:`.repack` writes each repacked expert over the loaded expert.

Skipped
    Servers with runners other than TRT-LLM's, Marlin's and ``triton_kernel``. The NVFP4 part is skipped without
    FlashInfer.

Costs
    No time in a forward pass. Before and after each layer is laid out, the allocator's unused segments are returned to
    the driver.

Upstream
    * The shuffle for TRT-LLM: from 0.5.13 on, sglang preallocates the outputs. The memory is then not fragmented, but
      this is slower and still makes a second copy of the layer. TensorRT-LLM#16125 reports the same temporary memory.
    * NVFP4's unread block scales: with TRT-LLM, sglang frees them after loading from 0.5.12 on, and creates none from
      0.5.13 on. With Marlin it keeps them in all releases (#38092, open).
    * Marlin: 0.5.17 deletes DeepSeek-V4's scales after the repack, 0.5.13 does not. #31898 (open) stacks the experts
      without a list, in addition to the loaded experts.
    * ``triton_kernels``: 0.5.23 pads the scales that are read on Hopper (#36456), 0.5.17 does not. vllm#41268 and
      vllm#45179 report the same holes in vLLM.

Remove when
    the engine lays out experts with little extra memory, repacks for Marlin without a list, allocates no unread block
    scales for NVFP4, and deletes MXFP4's scales with ``triton_kernels``.
"""

from __future__ import annotations

import functools
import sys
from contextvars import ContextVar
from typing import Any

from sglang_moe_patches.changes.fp4_weights.unread import find_unread_scales
from sglang_moe_patches.core import engine, runners
from sglang_moe_patches.core.patch import Change, Count, Install, Patcher, Plan, around, best_effort, combine_installs

_UTILS = "sglang.srt.layers.quantization.utils"
_MODELOPT = "sglang.srt.layers.quantization.modelopt_quant"
_COMPRESSED_TENSORS = "sglang.srt.layers.quantization.compressed_tensors.schemes.compressed_tensors_w4a4_nvfp4_moe"
_RUNNER = "sglang.srt.layers.moe.moe_runner.flashinfer_trtllm"

_FUNCTION = "prepare_static_weights_for_trtllm_fp4_moe"
_METHOD = "ModelOptNvFp4FusedMoEMethod"
_MARLIN_UTILS = "sglang.srt.layers.quantization.marlin_utils_fp4"
_PREPARE_FOR_MARLIN = "prepare_moe_nvfp4_layer_for_marlin"
_PREPARE_MXFP4_FOR_MARLIN = "prepare_moe_mxfp4_layer_for_marlin"
_REPACK = "gptq_marlin_repack"
_REPACK_EXPERTS = "_repack_moe_fp4_weight_for_marlin"
_SWIZZLE = "swizzle_blockscale"
_SWIZZLED = ("w13_blockscale_swizzled", "w2_blockscale_swizzled")
_MXFP4_METHODS = (
    ("sglang.srt.layers.quantization.mxfp4", "Mxfp4MoEMethod"),
    ("sglang.srt.layers.quantization.mxfp4_marlin_moe", "Mxfp4MarlinMoEMethod"),
)
"""Modules and names of the engine's quantization methods for MXFP4 experts. ``Mxfp4MoEMethod`` is for gpt-oss and other
models, ``Mxfp4MarlinMoEMethod`` for DeepSeek-V4 on Marlin."""

_SWIZZLE_MXFP4 = "_swizzle_mxfp4"
"""Name of the engine's function that lays out MXFP4 experts for ``triton_kernels``."""

# True while create_weights runs for a backend that reads no swizzled block scales. It is a ContextVar, so that another
# thread that swizzles block scales at the same time gets real scales.
_no_swizzled_scales: ContextVar[bool] = ContextVar("sglang_moe_patches_no_swizzled_scales", default=False)


def _make_placeholder(scale: Any) -> Any:
    """Return a placeholder for scales that no code reads: a tensor of one byte for each expert.

    The placeholder cannot be ``None`` or empty: the engine's weight offloader cannot map zero bytes, and divides the
    first dimension by the number of ranks.
    """
    return scale.detach().new_zeros((scale.shape[0], 1, 1))


def drop_swizzled_scales(layer: Any) -> int:
    """Replace a layer's swizzled block scales by placeholders (:func:`_make_placeholder`), to free their memory.

    Scales that the engine did not create stay ``None``.

    :param layer: a ``FusedMoE`` layer whose weights were created.
    :returns: bytes that were freed.
    """
    import torch

    freed_bytes = 0
    for name in _SWIZZLED:
        scales = layer._parameters.get(name)
        if scales is not None:
            placeholder = torch.nn.Parameter(_make_placeholder(scales), requires_grad=False)
            setattr(layer, name, placeholder)
            freed_bytes += scales.nbytes - placeholder.nbytes
    return freed_bytes


def free_unread_scales(layer: Any) -> int:
    """Free the scales of a layer that its quantization method never reads, and put placeholders in their place.

    :func:`.unread.find_unread_scales` finds these scales.

    :param layer: a ``FusedMoE`` layer whose weights were processed.
    :returns: bytes that were freed. A scale does not count if another object still refers to its storage.
    """
    from torch.multiprocessing.reductions import StorageWeakRef

    freed = []
    for name in find_unread_scales(layer).bytes_of:
        storage = layer._parameters[name].untyped_storage()
        freed.append((StorageWeakRef(storage), storage.nbytes()))
        del storage
        setattr(layer, name, _make_updatable_placeholder(layer._parameters[name]))
    return sum(size for storage, size in freed if storage.expired())


def _make_updatable_placeholder(scale: Any) -> Any:
    """Return a small placeholder for a freed ``scale``, which accepts weight updates.

    A weight update of the placeholder makes the same checks and raises the same errors as an update of ``scale``. The
    values are discarded.
    """
    import torch

    placeholder = torch.nn.Parameter(_make_placeholder(scale), requires_grad=False)
    vars(placeholder).update(vars(scale))
    loader = getattr(scale, "weight_loader", None)
    if loader is not None:
        shadow = torch.nn.Parameter(torch.empty_like(scale, device="meta"), requires_grad=False)
        vars(shadow).update(vars(scale))

        def weight_loader(_: Any, *args: Any, **kwargs: Any) -> Any:
            return loader(shadow, *args, **kwargs)  # ``shadow`` has a shape but no memory, so the values are discarded

        placeholder.weight_loader = weight_loader
    return placeholder


def append_zeros_to_scales(method: Any) -> None:
    """Move a layer's scales to memory that ends with zeros, because ``triton_kernels`` reads beyond the end of the
    scales.

    Without the zeros, arbitrary bytes follow the scales. If one of these bytes is 255, the kernel reads it as a NaN.
    gpt-oss's SwiGLU clamps the NaN to an ordinary number, so the output is wrong (triton-lang/triton#10772,
    sglang#36456). :func:`.in_parts.count_bytes_read_behind` returns the number of zeros.

    :param method: the quantization method of a layer whose weights were processed. Its swizzled scales [experts, bytes
        of a row, rows] move to new memory, and their values stay the same.
    """
    from sglang_moe_patches.changes.fp4_weights import in_parts

    for config in vars(method).values():
        scales = getattr(config, "weight_scale", None) or getattr(config, "b_mx_scale", None)
        storage: Any = getattr(scales, "storage", None)
        if missing := in_parts.count_bytes_read_behind(storage):
            data = storage.data
            in_parts.free_cached_memory()  # `data` no longer refers to the scales of the previous config
            whole = data.new_zeros(data.untyped_storage().nbytes() + missing)
            moved = whole.as_strided(data.shape, data.stride(), data.storage_offset())
            storage.data = moved.copy_(data)


# --- The wrappers ----------------------------------------------------------------------------------------------------


@around
def _wrap_create_moe_runner(original: Any, self: Any, layer: Any, *args: Any, **kwargs: Any) -> Any:
    from sglang_moe_patches.changes.fp4_weights import in_parts

    result = original(self, layer, *args, **kwargs)
    with best_effort("freeing the swizzled block scales of a layer on Marlin"):
        if self._moe_runner_backend.value in runners.MARLIN:
            drop_swizzled_scales(layer)
            in_parts.free_cached_memory()  # no tensor of the next layer is cut out of this memory
    return result


@around
def _wrap_process_weights(original: Any, self: Any, layer: Any, *args: Any, **kwargs: Any) -> Any:
    from sglang_moe_patches.changes.fp4_weights import in_parts

    in_parts.free_cached_memory()
    with in_parts.allow_overwriting(layer):
        result = original(self, layer, *args, **kwargs)
    with best_effort("freeing a layer's scales that no kernel reads"):
        if getattr(layer, "quant_method", None) is self:
            free_unread_scales(layer)
    with best_effort("appending zeros to a layer's scales"):
        append_zeros_to_scales(self)
    in_parts.free_cached_memory()
    return result


def _wrap_create_mxfp4_weights(swizzle: Any, original: Any, self: Any, layer: Any, *args: Any, **kwargs: Any) -> Any:
    from sglang_moe_patches.changes.fp4_weights import in_parts

    create = functools.partial(original, self, layer, *args, **kwargs)
    with best_effort("allocating MXFP4 experts with room for their layout"):
        if self.use_triton_kernels:
            return in_parts.create_with_room(swizzle, create, layer)
    return create()


@around
def _wrap_prepare(original: Any, *args: Any, **kwargs: Any) -> Any:
    from sglang_moe_patches.changes.fp4_weights import shuffle

    try:
        return shuffle.prepare_static_weights_for_trtllm_fp4_moe(*args, **kwargs)
    except shuffle.NotInPlace:
        return original(*args, **kwargs)


@around
def _wrap_swizzle(original: Any, scale: Any) -> Any:
    return _make_placeholder(scale) if _no_swizzled_scales.get() else original(scale)


@around
def _wrap_create_weights(original: Any, self: Any, *args: Any, **kwargs: Any) -> Any:
    # `process_weights_after_loading` has the same condition. If the condition is false, that function swizzles block
    # scales, and compares their shape with the parameter's shape. A placeholder would have another shape.
    modelopt = sys.modules[_MODELOPT]
    token = _no_swizzled_scales.set(
        bool(getattr(self, "enable_flashinfer_trtllm_moe", False))
        and modelopt.reorder_rows_for_gated_act_gemm is not None
        and modelopt.shuffle_matrix_sf_a is not None
    )
    try:
        return original(self, *args, **kwargs)
    finally:
        _no_swizzled_scales.reset(token)


# --- Probing the engine ----------------------------------------------------------------------------------------------


def _probe_shuffle() -> Install:
    """Return an installer that shuffles NVFP4 experts for TRT-LLM in place.

    :raises engine.Unsupported: the engine does not shuffle weights with the function that the installer wraps.
    """
    from sglang_moe_patches.changes.fp4_weights import shuffle

    utils, runner = engine.import_module(_UTILS), engine.import_module(_RUNNER)
    core = engine.import_module("flashinfer.fused_moe.core")
    for helper, keywords in (
        ("_maybe_get_cached_w3_w1_permute_indices", {"num_elts_per_sf", "is_gated_act_gemm"}),
        ("get_w2_permute_indices_with_cache", {"num_elts_per_sf"}),
    ):
        parameters = set(engine.list_parameters(engine.require_unpatched(core, helper, "flashinfer")))
        engine.require(keywords <= parameters, f"flashinfer's {helper} takes other arguments")
    ours = engine.list_parameters(shuffle.prepare_static_weights_for_trtllm_fp4_moe)
    engine.require_parameters(engine.require_unpatched(utils, _FUNCTION), ours, exactly=True)

    align = engine.require_unpatched(runner, "align_fp4_moe_weights_for_flashinfer_trtllm")
    engine.require(
        not hasattr(runner, _FUNCTION) and engine.mentions(align, _UTILS, _FUNCTION),
        f"align_fp4_moe_weights_for_flashinfer_trtllm no longer looks {_FUNCTION} up in {_UTILS} when called",
    )
    engine.require(
        engine.mentions(align, "copy_or_rebind_param"),
        "align_fp4_moe_weights_for_flashinfer_trtllm no longer writes its results back into the parameters",
    )

    def install(patcher: Patcher) -> None:
        engine_function = getattr(utils, _FUNCTION)
        patcher.wrap(utils, _FUNCTION, _wrap_prepare)
        # Importing `utils` runs the quantization package, and the package imports the function by name.
        by_name = sys.modules.get(_COMPRESSED_TENSORS)
        if by_name is not None and getattr(by_name, _FUNCTION, None) is engine_function:
            patcher.replace(by_name, _FUNCTION, getattr(utils, _FUNCTION))

    return install


def _probe_placeholders() -> Install:
    """Check the engine's code, and return the installer of wrappers that create placeholders instead of swizzled block
    scales for TRT-LLM.

    :raises engine.Unsupported: the engine creates the block scales elsewhere, or may read them.
    """
    modelopt = engine.import_module(_MODELOPT)
    method = engine.require_unpatched(modelopt, _METHOD)
    create_weights = engine.require_unpatched(method, "create_weights")
    engine.require_parameters(create_weights, ["self", "layer"])
    # The engine itself creates no block scales for TRT-LLM.
    if engine.mentions(create_weights, "enable_flashinfer_trtllm_moe"):
        return lambda patcher: None
    engine.require_parameters(engine.require_unpatched(modelopt, _SWIZZLE), ["scale"], exactly=True)
    engine.require_mentions(create_weights, _SWIZZLE)
    engine.require_mentions(
        engine.require_unpatched(method, "process_weights_after_loading"),
        *("enable_flashinfer_trtllm_moe", "reorder_rows_for_gated_act_gemm", "shuffle_matrix_sf_a"),
    )

    def install(patcher: Patcher) -> None:
        patcher.wrap(modelopt, _SWIZZLE, _wrap_swizzle)
        patcher.wrap(method, "create_weights", _wrap_create_weights)

    return install


def _probe_marlin() -> Install | None:
    """Return an installer that frees the swizzled block scales of layers that run on Marlin.

    :returns: ``None`` if this engine never runs NVFP4 experts on Marlin.
    :raises engine.Unsupported: the engine chooses Marlin in an unknown place, or Marlin may read the block scales.
    """
    method = engine.require_unpatched(engine.import_module(_MODELOPT), _METHOD)
    process = engine.require_unpatched(method, "process_weights_after_loading")
    if not engine.mentions(process, _PREPARE_FOR_MARLIN):
        return None
    create_moe_runner = engine.require_unpatched(method, "create_moe_runner")
    engine.require_parameters(create_moe_runner, ["self", "layer", "moe_runner_config"], exactly=True)
    engine.require(
        engine.sets_attribute(create_moe_runner, "_moe_runner_backend")
        and "_moe_runner_backend" in engine.read_source(process),
        "create_moe_runner does not decide by which kernels a layer runs",
    )
    read = [engine.require_unpatched(engine.import_module(_MARLIN_UTILS), _PREPARE_FOR_MARLIN)]
    if hasattr(method, "get_marlin_quant_info"):
        read.append(engine.require_unpatched(method, "get_marlin_quant_info"))
    for function in read:
        for name in _SWIZZLED:
            engine.require(not engine.mentions(function, name), f"{function.__name__} reads {name}")

    def install(patcher: Patcher) -> None:
        patcher.wrap(method, "create_moe_runner", _wrap_create_moe_runner)

    return install


def _serves_by_marlin_alone() -> bool:
    """Return whether Marlin is the engine's only kernel for NVFP4 experts on this GPU."""
    modelopt = engine.import_module(_MODELOPT)
    if not engine.get(modelopt, "is_cuda")():
        return False
    if hasattr(modelopt, "get_platform"):
        return not modelopt.get_platform().is_blackwell
    return not engine.get(modelopt, "is_blackwell_supported")()


def _probe_unread() -> Install | None:
    """Return an installer that wraps ``process_weights_after_loading`` of the engine's quantization methods for MXFP4.

    During the engine's function, laid-out experts may overwrite the loaded weights. After the function, the wrapper
    frees the scales that no kernel reads (:func:`free_unread_scales`). If the kernel reads beyond the end of the
    remaining scales, the wrapper puts zeros after them (:func:`append_zeros_to_scales`).

    :returns: ``None`` if the engine has no quantization method for MXFP4 experts.
    """
    methods = [
        engine.require_unpatched(engine.import_module(module), name)
        for module, name in _MXFP4_METHODS
        if engine.has_module(module)
    ]
    for method in methods:
        engine.require_parameters(engine.require_unpatched(method, "process_weights_after_loading"), ["self", "layer"])

    def install(patcher: Patcher) -> None:
        for method in methods:
            patcher.wrap(method, "process_weights_after_loading", _wrap_process_weights)

    return install if methods else None


def _probe_layout() -> Install | None:
    """Return an installer that lays out MXFP4 experts for ``triton_kernels`` a few at a time.

    :returns: ``None`` if the engine has no function that lays out MXFP4 experts.
    :raises engine.Unsupported: the engine's function, or the code that calls it, is not as expected.
    """
    from sglang_moe_patches.changes.fp4_weights import in_parts

    name, method_name = _MXFP4_METHODS[0]
    mxfp4 = engine.import_module(name) if engine.has_module(name) else None
    if mxfp4 is None or not hasattr(mxfp4, _SWIZZLE_MXFP4):
        return None
    swizzle = engine.require_unpatched(mxfp4, _SWIZZLE_MXFP4)
    engine.require_parameters(swizzle, ["quant_tensor", "scale", "num_warps"], exactly=True)
    method = engine.require_unpatched(mxfp4, method_name)
    engine.require(
        engine.sets_attribute(method.__init__, "use_triton_kernels"), f"{method_name} has no use_triton_kernels"
    )
    create_weights = engine.require_unpatched(method, "create_weights")
    engine.require_parameters(create_weights, ["self", "layer"])
    in_parts.require_last_use(engine.require_unpatched(method, "process_weights_after_loading"), _SWIZZLE_MXFP4)

    def install(patcher: Patcher) -> None:
        patcher.wrap(mxfp4, _SWIZZLE_MXFP4, in_parts.wrap_swizzle)
        patcher.wrap(method, "create_weights", around(functools.partial(_wrap_create_mxfp4_weights, swizzle)))

    return install


def _probe_repack() -> Install | None:
    """Return an installer that repacks FP4 experts for Marlin in place.

    :returns: ``None`` if the engine has no function that repacks expert by expert and then calls ``torch.stack``.
    :raises engine.Unsupported: the engine may read the loaded weights after the repack.
    """
    from sglang_moe_patches.changes.fp4_weights import repack

    utils = engine.import_module(_MARLIN_UTILS) if engine.has_module(_MARLIN_UTILS) else None
    if utils is None or not hasattr(utils, _REPACK):  # without CUDA, the module does not have the function
        return None
    engine.require_unpatched(utils, _REPACK)
    helper = engine.require_unpatched(utils, _REPACK_EXPERTS) if hasattr(utils, _REPACK_EXPERTS) else None
    hook_points: list[tuple[Any, str]] = []
    for name in (_PREPARE_FOR_MARLIN, _PREPARE_MXFP4_FOR_MARLIN):
        if not hasattr(utils, name):
            continue
        prepare = engine.require_unpatched(utils, name)
        if engine.mentions(helper or prepare, _REPACK, "stack"):
            repack.require_last_use(prepare, helper)
            importers = (utils, sys.modules.get(_MODELOPT))
            hook_points += [
                (owner, name) for owner in importers if hasattr(owner, name) and engine.require_unpatched(owner, name)
            ]

    def install(patcher: Patcher) -> None:
        patcher.wrap(utils, _REPACK, repack.wrap_kernel)
        for owner, name in hook_points:
            patcher.wrap(owner, name, repack.wrap_prepare)

    return install if hook_points else None


def _plan() -> Plan:
    unread, layout, repack, nvfp4 = _probe_unread(), _probe_layout(), _probe_repack(), _plan_nvfp4()
    if unread is None and repack is None:
        return nvfp4
    return Plan.applied(combine_installs(unread, layout, repack, nvfp4.install))


def _plan_nvfp4() -> Plan:
    if absent := runners.plan_without_flashinfer():
        return absent
    marlin = _probe_marlin()
    if _serves_by_marlin_alone():
        if marlin is None:
            return Plan.not_needed("this release serves NVFP4 experts on Blackwell alone")
        return Plan.applied(marlin)
    return Plan.applied(combine_installs(_probe_shuffle(), _probe_placeholders(), marlin))


def _get_freed_bytes(result: int, *args: Any, **kwargs: Any) -> int:
    return int(result)


CHANGE = Change(
    name="fp4-weights",
    summary="FP4 experts are laid out with little extra memory; scales that nothing reads are freed",
    plan=_plan,
    skip=runners.skip_unless_runner(*runners.TRTLLM, *runners.MARLIN, runners.TRITON_KERNELS),
    counts=(
        Count(
            "shuffled",
            "shuffled a layer's weights in place",
            "sglang_moe_patches.changes.fp4_weights.shuffle",
            _FUNCTION,
        ),
        Count(
            "freed swizzled",
            "freed block scales that Marlin never reads,",
            __name__,
            "drop_swizzled_scales",
            amount=_get_freed_bytes,
            unit="bytes",
        ),
        Count(
            "freed unread",
            "freed scales that no kernel reads,",
            __name__,
            "free_unread_scales",
            amount=_get_freed_bytes,
            unit="bytes",
        ),
    ),
)
