"""Lay out MXFP4 experts for ``triton_kernels``, a few experts at a time, in the memory of the loaded experts.

To *lay out* experts means to convert them to the layout that the kernel reads. The engine lays out all experts of a
layer at once. Its temporary tensors take nine times the memory of the first GEMM's weights. After the conversion, the
laid-out weights use only a piece of a temporary tensor's memory. The rest of this memory is a *hole*: no later tensor
fits into it.

With this module, the engine's function lays out one part of the experts after the other. The function converts each
expert separately, so the result has the same bytes. Each part is written over the loaded experts from which it was
made.

A laid-out expert of gpt-oss is 2 % larger than a loaded expert, because its rows are padded. Therefore
:func:`create_with_room` allocates memory with the size of the laid-out weights, and places the loaded weights at the
end of this memory. Laid-out experts are written from the start of this memory on, so they never overtake the loaded
experts. No temporary tensor is as large as the layer's weights, so holes stay small.

To learn the shapes and strides of the whole result, this module runs the engine's function for all experts on the
``meta`` device. If parts cannot give the same result, the engine lays out all experts at once.
"""

from __future__ import annotations

import ast
import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, NamedTuple

import torch
from torch.overrides import TorchFunctionMode

from sglang_moe_patches.changes.fp4_weights import repack
from sglang_moe_patches.changes.fp4_weights.sizes import PARTS
from sglang_moe_patches.core import engine
from sglang_moe_patches.core.patch import around, best_effort

WEIGHTS = repack.WEIGHTS
WARPS = 8
"""Value of ``num_warps`` with which the engine calls its layout function, ``_swizzle_mxfp4``. This value decides the
size of the laid-out scales, but not of the laid-out weights."""
_ALIGNMENT = 512
"""Alignment of memory in PyTorch's allocator, in bytes."""
_HOPPER_SCALES = "HOPPER_SCALE"
"""Name of the layout of scales on Hopper in ``triton_kernels``."""
_SCALE_BYTES_AT_ONCE = 128
"""Number of bytes that ``triton_kernels`` reads at once from a row of swizzled scales. One byte is the scale of 32
weights, so 128 bytes are the scales of a tile of 32 x 128 weights."""


class Layout(NamedTuple):
    """Laid-out weights and scales of a layer's experts for one GEMM. They are computed in parts.

    :param result: return value of the engine's function for all experts. Its tensors have no memory (``meta`` device)
        before :func:`_assign_memory`.
    :param step: number of experts in a part.
    """

    result: Any
    step: int

    @property
    def tensors(self) -> list[Any]:
        """Tensors of the result, as objects of ``triton_kernels``: the weights, then the scales."""
        return _find_tensors(self.result)


def _find_tensors(result: Any) -> list[Any]:
    return [value for value in result if hasattr(value, "storage")]


def _make_meta_copy(tensor: Any) -> Any:
    return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="meta")


def choose_layout(swizzle: Callable[..., Any], weight: Any, scale: Any, *args: Any) -> Layout | None:
    """Return the layout of a layer's experts for one GEMM, or ``None`` if it cannot be computed in parts.

    The engine's function runs on tensors without memory, first for all experts and then for one part of the experts.
    The two results show whether parts give the same tensors as all experts at once.

    :param swizzle: the engine's ``_swizzle_mxfp4``.
    :param weight: packed weights [experts, rows, columns / 2].
    :param scale: scales of the weights [experts, rows, columns / 32].
    """
    experts, loaded = len(weight), (_make_meta_copy(weight), _make_meta_copy(scale))
    step = max(1, experts // PARTS)
    result = swizzle(*loaded, *args)
    part = swizzle(*(tensor[:step] for tensor in loaded), *args)
    of_result, of_part = _find_tensors(result), _find_tensors(part)
    if len(of_result) != len(loaded) or len(of_part) != len(loaded):
        return None
    for whole, piece in zip(of_result, of_part, strict=True):
        whole_data, piece_data = whole.storage.data, piece.storage.data
        equal_layouts = (whole_data.dtype, whole_data.shape[1:], whole_data.stride()) == (
            piece_data.dtype,
            piece_data.shape[1:],
            piece_data.stride(),
        )
        if not equal_layouts or (len(whole_data), len(piece_data)) != (experts, step) or not _is_dense(whole_data):
            return None
        if any(whole_data.untyped_storage()._cdata == tensor.untyped_storage()._cdata for tensor in loaded):
            return None  # a view of the loaded tensor takes no memory
    return Layout(result, step)


def _is_dense(data: Any) -> bool:
    """Return whether the experts of a tensor lie one after the other in memory, without gaps."""
    expert = data[0]
    return bool(data.stride(0) == expert.numel() and data.untyped_storage().nbytes() == data.nbytes)


# --- Room for the result ---------------------------------------------------------------------------------------------


def create_with_room(swizzle: Callable[..., Any], create: Callable[[], Any], layer: Any) -> Any:
    """Create a layer's parameters on the GPU, with extra memory for parameters that get larger when they are laid out.

    The extra bytes lie before the parameter, in the same allocation. The engine's ``create_weights`` runs on the
    ``meta`` device, and this function then allocates each parameter once. If the engine allocated the weights on the
    GPU and this function moved them, a hole would remain: the freed memory shares a segment of the allocator with
    biases, so the segment could not be returned to the driver.

    :param swizzle: the engine's ``_swizzle_mxfp4``.
    :param create: the engine's ``create_weights``. It fills all elements of a parameter with the same number.
    :returns: the result of ``create``.
    :raises engine.Unsupported: ``create`` fills a parameter in another way. The layer then has parameters without
        memory, so the caller must run ``create`` again.
    """
    if torch.get_default_device().type == "meta":
        return create()
    with torch.device("meta"), _FillRecorder() as recorder:
        result = create()
    created = {name: value for name, value in layer._parameters.items() if value is not None and value.is_meta}
    fills = {name: recorder.find_fill(parameter) for name, parameter in created.items()}
    layouts = {
        weight: choose_layout(swizzle, created[weight], created[f"{weight}_scale"], WARPS)
        for weight in WEIGHTS
        if weight in created
    }
    for name, parameter in created.items():
        layout = layouts.get(name.removesuffix("_scale"))
        memory = torch.zeros(parameter.nbytes + _count_extra_bytes(layout, name, parameter), dtype=torch.uint8)
        data = memory[len(memory) - parameter.nbytes :].view(parameter.dtype).view(parameter.shape)
        if fills[name]:
            data.fill_(fills[name])
        new = torch.nn.Parameter(data, requires_grad=False)
        vars(new).update(vars(parameter))
        setattr(layer, name, new)
    return result


class _FillRecorder(TorchFunctionMode):
    """Recorder of the numbers with which ``torch.zeros`` and ``torch.full`` fill new tensors."""

    def __init__(self) -> None:
        super().__init__()
        self._fills: dict[int, Any] = {}

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        result = function(*args, **kwargs)
        if function is torch.zeros:
            self._fills[result.untyped_storage()._cdata] = 0
        elif function is torch.full:
            self._fills[result.untyped_storage()._cdata] = kwargs["fill_value"] if "fill_value" in kwargs else args[1]
        elif function.__name__ != "__get__":  # reading an attribute such as the shape changes no value
            self._fills.clear()
        return result

    def find_fill(self, parameter: Any) -> Any:
        """Return the number that each element of a parameter has.

        :raises engine.Unsupported: the parameter was not created by ``torch.zeros`` or ``torch.full``, or another
            function may have changed it.
        """
        address = parameter.untyped_storage()._cdata
        engine.require(address in self._fills, "create_weights does not only fill parameters with one number")
        return self._fills[address]


def _count_extra_bytes(layout: Layout | None, name: str, parameter: Any) -> int:
    """Return the number of bytes to allocate in addition to a parameter, because the parameter grows when it is laid
    out.

    Laid-out weights are written over the loaded weights, so the memory of the loaded weights needs room for them.
    Laid-out scales are written to new memory, and later move into the memory of the loaded scales. So this memory needs
    room, too.

    :param layout: layout of the weights and scales to which the parameter belongs, or ``None`` for a parameter that is
        not laid out, such as a bias.
    """
    if layout is None:
        return 0
    storage = layout.tensors[0 if name in WEIGHTS else 1].storage
    missing = max(0, storage.data.nbytes + count_bytes_read_behind(storage) - parameter.nbytes)
    return int(-(-missing // _ALIGNMENT) * _ALIGNMENT)


def count_bytes_read_behind(storage: Any) -> int:
    """Return the number of bytes that ``triton_kernels`` reads after the end of laid-out scales.

    On Hopper the kernel reads 128 bytes of a row of scales at once, without a mask. If the length of a row is no
    multiple of 128, the kernel reads memory after the last row. For gpt-oss, whose rows have 2,880 bytes, these are 64
    bytes. On other GPUs the result is 0.

    :param storage: object of ``triton_kernels`` whose ``data`` has the scales [experts, bytes of a row, rows].
    """
    if getattr(getattr(storage, "layout", None), "name", "") != _HOPPER_SCALES:
        return 0
    return int(-storage.data.shape[-2] % _SCALE_BYTES_AT_ONCE * storage.data.stride(-2))


def free_cached_memory() -> None:
    """Return the allocator's unused segments to the driver, so that the next large tensor gets a segment of its own.

    Without this call, the allocator may place the tensor in a larger free block. It then cannot return the rest of the
    block to the driver, as long as the tensor is allocated.
    """
    torch.cuda.empty_cache()


# --- The conversion --------------------------------------------------------------------------------------------------

_shared_storages: ContextVar[list[int] | None] = ContextVar("sglang_moe_patches_shared_storages", default=None)
"""Storages that must not be overwritten while the current layer is laid out, because objects outside the layer refer to
them. ``None`` means that no weights may be overwritten."""


@contextmanager
def allow_overwriting(layer: Any) -> Iterator[None]:
    """Context manager within which laid-out experts may overwrite a layer's loaded weights.

    The engine lays out the layer within this context. Overwriting is safe, because no code reads the loaded weights
    afterwards (:func:`require_last_use`). If an object outside the layer refers to a weight's memory, this memory is
    not overwritten.
    """
    loaded = all(layer._parameters.get(name) is not None for name in WEIGHTS)
    token = _shared_storages.set(repack.find_shared_storages(layer) if loaded else None)
    try:
        yield
    finally:
        _shared_storages.reset(token)


@around
def wrap_swizzle(original: Callable[..., Any], weight: Any, scale: Any, *args: Any, **kwargs: Any) -> Any:
    """Wrap ``_swizzle_mxfp4``, which lays out a layer's experts for one GEMM.

    The wrapper calls the engine's function for a few experts at a time.
    """
    swizzle, layout = functools.partial(original, **kwargs), None
    with best_effort("laying out MXFP4 experts in parts"):
        layout = choose_layout(swizzle, weight, scale, *args)
    if layout is None:
        return original(weight, scale, *args, **kwargs)
    shared = _shared_storages.get()
    may_overwrite = shared is not None and weight.untyped_storage()._cdata not in shared
    _assign_memory(layout, weight if may_overwrite else None, weight.device)
    for begin in range(0, len(weight), layout.step):
        experts = slice(begin, begin + layout.step)
        part = _find_tensors(swizzle(weight[experts], scale[experts], *args))
        for whole, piece in zip(layout.tensors, part, strict=True):
            whole.storage.data[experts].copy_(piece.storage.data)
        del part, piece
    return layout.result


def _assign_memory(layout: Layout, loaded: Any | None, device: Any) -> None:
    """Assign memory to each tensor of a layout. The caller then writes the experts into this memory.

    :param loaded: the loaded weights, or ``None`` if the laid-out weights must not overwrite them.
    """
    for tensor in layout.tensors:
        data, memory = tensor.storage.data, None
        if tensor is layout.tensors[0] and loaded is not None:
            memory = _find_memory(loaded, data)
        if memory is None:
            free_cached_memory()
            memory = torch.empty_strided(data.shape, data.stride(), dtype=data.dtype, device=device)
        tensor.storage.data = memory


def _find_memory(weight: Any, data: Any) -> Any:
    """Return a tensor with the shape and strides of ``data`` in the memory of a loaded weight.

    The result is ``None`` if the tensor does not fit.

    The extra bytes before the weight (:func:`create_with_room`) belong to this memory, too. The returned tensor begins
    with these extra bytes. Laid-out experts are written in order, so they only overwrite loaded experts that were
    already read.
    """
    begin = weight.storage_offset() * weight.element_size()
    if not weight.is_contiguous() or data.dtype != weight.dtype or data.nbytes > begin + weight.nbytes:
        return None
    return weight.data.as_strided(data.shape, data.stride(), 0)


# --- Who reads the loaded weights ------------------------------------------------------------------------------------


def require_last_use(process: Any, swizzle: str) -> None:
    """Check that the engine does not read a layer's loaded weights after it has laid them out.

    :param process: the engine's ``process_weights_after_loading``.
    :param swizzle: name of the engine's function that lays out experts (``_swizzle_mxfp4``).
    :raises engine.Unsupported: the engine may read the loaded weights.
    """
    (definition,) = ast.parse(engine.read_source(process)).body
    engine.require(isinstance(definition, ast.FunctionDef), f"{process.__name__} is no plain function")
    statements = definition.body  # type: ignore[attr-defined]
    places = [place for place, statement in enumerate(statements) if _find_calls(statement, swizzle)]
    engine.require(len(places) == 1, f"{len(places)} statements of {process.__name__} call {swizzle}; expected 1")
    branch = statements[places[0]]
    engine.require(
        isinstance(branch, ast.If) and not any(_find_calls(statement, swizzle) for statement in branch.orelse),
        f"{process.__name__} calls {swizzle} outside of a branch",
    )
    after = [*branch.body, *statements[places[0] + 1 :]]
    calls = [call for statement in after for call in _find_calls(statement, swizzle)]
    read = [
        node.attr
        for statement in after
        for node in ast.walk(statement)
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Load) and node.attr in WEIGHTS
    ]
    laid_out = [ast.unparse(call.args[0]) for call in calls if call.args]
    engine.require(
        read == [*WEIGHTS] and laid_out == [f"layer.{name}" for name in WEIGHTS],
        f"with {swizzle} or later, {process.__name__} reads {', '.join(read) or 'no weights'}; "
        f"expected {swizzle} to read each of {', '.join(WEIGHTS)} once",
    )


def _find_calls(statement: ast.AST, name: str) -> list[ast.Call]:
    return [node for node in ast.walk(statement) if isinstance(node, ast.Call) and ast.unparse(node.func) == name]
