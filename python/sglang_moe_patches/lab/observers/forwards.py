"""Observer of the forward passes of a model process: their memory, and the actions of the changes.

``regress`` and the benchmarks turn the observer on with ``SGLANG_MOE_PATCHES_OBSERVE=FOLDER``. The process writes its
record to ``FOLDER/<pid>.json`` at the start and whenever a figure grows, so the record survives a killed server. An
error of the observer never ends a server. The observer records its first error, and then observes nothing more.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import os
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any
from weakref import WeakSet

from sglang_moe_patches.core import runners
from sglang_moe_patches.core.log import logger
from sglang_moe_patches.core.patch import Patcher, Plan
from sglang_moe_patches.lab.observers import counting, events
from sglang_moe_patches.memory.kv_sizing.pools import hybrid_kind, pool_bytes, pools_of

KERNELS = ("trtllm_fp4_block_scale_moe", "trtllm_fp4_block_scale_routed_moe")
"""Names of FlashInfer's functions that run a MoE kernel and that the observer wraps."""

_MARK = "_moe_patches_forward"
"""Attribute that marks the storage of a MoE output with the number of the last forward pass that wrote into it."""


class Observer:
    """Observer of the model process in which it runs. It updates and writes the process's record.

    :param folder: existing folder for the record.
    :param changes: status of each change in this process.
    """

    def __init__(self, folder: str, changes: tuple[events.ChangeStatus, ...]) -> None:
        self.path = Path(folder) / f"{os.getpid()}.json"
        self.process = events.Process(changes)
        self.memory = self.process.memory
        self.allocated_before = 0
        """Bytes of the tensors that were alive when the current forward pass began."""
        self.baseline: tuple[int, int] | None = None
        """Bytes that PyTorch's allocator had allocated, and bytes that it had reserved, when the first forward pass
        began."""
        self.peak_growth = 0
        """Growth of the allocated bytes from the start of the first forward pass to their peak."""
        self.tokens = 0
        """Tokens of the current forward pass."""
        self.is_measuring = False
        """Whether the memory of the current forward pass is measured. On a GPU, the forward pass must have at least as
        many tokens as each earlier forward pass. On a CPU, where measuring is slow, the forward pass must have more
        tokens than each earlier one."""
        self.kernels = 0
        """Number of MoE kernels that the current forward pass has started."""
        self.buffers = 0
        """Number of distinct output buffers of the current forward pass's MoE kernels."""
        self.unknown_outputs = 0
        """Number of MoE kernels of the current forward pass whose output tensor is not known."""
        self.live = 0
        """Largest number of bytes, so far, that the current forward pass had allocated when a MoE kernel started."""
        self.wrappers: WeakSet[Any] = WeakSet()
        """CuteDSL's wrapper objects that ran a kernel."""
        self.tally: counting.Tally | None = None

    def attempt(self, step: Callable[..., None], *args: Any) -> None:
        """Run one step of the observer. After an error, record and log the error, and skip all later steps."""
        if self.process.failure:
            return
        try:
            step(*args)
        except Exception as error:
            self.process.failure = f"observing the server failed: {type(error).__name__}: {error}"
            logger.warning(
                "sglang-moe-patches: %s; the server continues, but is no longer measured", self.process.failure
            )
            # If the folder was deleted or the disk is full, the log still has the error.
            with contextlib.suppress(Exception):
                self.write()

    def write(self) -> None:
        events.write(self.process, self.path)

    def start_forward(self, tokens: int, cuda: bool) -> None:
        """Begin to observe a forward pass.

        :param cuda: whether the model runs on a GPU.
        """
        import torch

        self.memory.device = "cuda" if cuda else "cpu"
        if cuda and not self.memory.gpu:
            self.memory.gpu = torch.cuda.get_device_name()
        self.memory.forwards += 1
        self.tokens, self.kernels, self.buffers, self.unknown_outputs, self.live = tokens, 0, 0, 0, 0
        if cuda:
            self.allocated_before, self.is_measuring = torch.cuda.memory_allocated(), tokens >= self.memory.tokens
            if self.baseline is None:
                self.baseline = self.allocated_before, torch.cuda.memory_reserved()
            else:  # Memory that is allocated between two forward passes counts, too, because sampling runs then.
                self.peak_growth = max(self.peak_growth, torch.cuda.max_memory_allocated() - self.baseline[0])
            torch.cuda.reset_peak_memory_stats()
        else:
            # Walking the heap is slow, so only a forward pass larger than all earlier ones is measured.
            self.is_measuring = tokens > self.memory.tokens
            self.allocated_before = _tensor_bytes() if self.is_measuring else 0

    def start_kernel(self, output: Any = None) -> None:
        """Observe the start of a MoE kernel.

        :param output: tensor into which the kernel will write; ``None`` if the tensor is not known yet.
        """
        import torch

        self.kernels += 1
        if output is not None:
            self.add_output(output)
        if self.is_measuring:
            allocated = torch.cuda.memory_allocated() if self.memory.device == "cuda" else _tensor_bytes()
            self.live = max(self.live, allocated - self.allocated_before)

    def start_layer(self, layer: Any) -> None:
        """Observe the start of a MoE layer. The layer counts as one kernel, unless the observer wraps the kernels of
        the layer's runner (TRT-LLM and CuteDSL).

        :param layer: the engine's ``FusedMoE``.
        """
        if runners.find_runner(layer) not in (*runners.TRTLLM, runners.CUTEDSL):
            self.start_kernel()
            self.end_kernel(None)

    def end_kernel(self, result: Any) -> None:
        """Observe the return of a kernel whose output tensor was not known when the kernel started.

        :param result: the output tensor, or a list that begins with the output tensor; ``None`` if the layer's output
            tensor is still not known, for example because a later kernel writes it.
        """
        if result is None:
            self.unknown_outputs += 1
        else:
            self.add_output(result[0] if isinstance(result, list | tuple) else result)

    def add_output(self, output: Any) -> None:
        """Count the storage of an output tensor, unless the storage was already counted in this forward pass."""
        # Two allocations of one forward pass may have the same address, so storage objects are compared.
        storage = output.untyped_storage()
        if getattr(storage, _MARK, None) != self.memory.forwards:
            setattr(storage, _MARK, self.memory.forwards)
            self.buffers += 1

    def end_forward(self) -> None:
        """Add the current forward pass to the record. Write the record if it changed, and after every hundred forward
        passes."""
        import torch

        earlier, memory = replace(self.memory), self.memory
        if self.baseline:
            self.peak_growth = max(self.peak_growth, torch.cuda.max_memory_allocated() - self.baseline[0])
            memory.reserved_bytes = max(memory.reserved_bytes or 0, torch.cuda.memory_reserved() - self.baseline[1])
            memory.slack_bytes = max(0, memory.reserved_bytes - self.peak_growth)
        # After the first observed MoE kernel, a forward pass without a MoE kernel does not count, because it replays a
        # CUDA graph and allocates nothing.
        if self.is_measuring and (self.kernels or not memory.moe_layers):
            peak = torch.cuda.max_memory_allocated() - self.allocated_before if memory.device == "cuda" else None
            same = self.tokens == memory.tokens
            memory.live_at_kernel_bytes = _min_known(
                self.live if self.kernels else None, memory.live_at_kernel_bytes if same else None
            )
            memory.peak_forward_bytes = _min_known(peak, memory.peak_forward_bytes if same else None)
            memory.tokens = self.tokens
        if self.kernels:
            memory.moe_layers = max(self.kernels, memory.moe_layers or 0)
            if not self.unknown_outputs:
                memory.output_buffers = max(self.buffers, memory.output_buffers or 0)
            if self.wrappers and (workspace := workspace_bytes(self.wrappers)):
                memory.kernel_buffer_bytes = workspace
        earlier_acts = self.process.acted
        if self.tally is not None:
            self.process.acted = self.tally.acted
        has_new_acts = _without_counts(earlier_acts) != _without_counts(self.process.acted)
        if has_new_acts or memory != replace(earlier, forwards=memory.forwards) or memory.forwards % 100 == 1:
            self.write()


def _without_counts(acts: events.Acts) -> Any:
    """Return the actions with their numbers of calls and their total amounts set to 0.

    If the changes only repeat earlier actions in a forward pass, the results before and after this pass are equal."""
    return acts.layers, acts.largest, {act._replace(times=0, total=0) for act in acts.acts}


def _min_known(value: int | None, earlier: int | None) -> int | None:
    return value if value is None or earlier is None else min(value, earlier)


def workspace_bytes(wrappers: Iterable[Any]) -> int:
    """Return the bytes of all tensors in the attributes of CuteDSL's wrapper objects. A storage that several tensors
    share counts once."""
    import torch

    storages = {}
    for wrapper in wrappers:
        for value in vars(wrapper).values():
            for tensor in value.values() if isinstance(value, dict) else (value,):
                if isinstance(tensor, torch.Tensor):
                    storages[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
    return sum(storages.values())


def _tensor_bytes() -> int:
    """Return the bytes of all tensors in the process's CPU memory."""
    import torch

    storages = {}
    for candidate in gc.get_objects():
        # issubclass(type()) instead of isinstance(), which would run the code of a lazy proxy's __class__.
        if issubclass(type(candidate), torch.Tensor) and candidate.device.type == "cpu":
            try:
                storage = candidate.untyped_storage()
                storages[storage.data_ptr()] = storage.nbytes()
            except (RuntimeError, NotImplementedError):
                continue  # meta, fake and wrapper tensors have no memory
    return sum(storages.values())


def install(folder: str, plans: Mapping[str, Plan]) -> None:
    """Start to observe this process.

    :param folder: existing folder for the record.
    :param plans: plan of each change, with its status in this process.
    """
    statuses = (events.ChangeStatus(name, str(plan.status), plan.reason) for name, plan in plans.items())
    observer = Observer(folder, tuple(statuses))
    observer.attempt(observer.write)
    observer.attempt(_observe_forwards, observer)
    observer.attempt(_observe_kernels, observer)
    observer.attempt(_observe_changes, observer)


def _observe_forwards(observer: Observer) -> None:
    """Wrap ``ModelRunner.forward``, so that the observer sees every forward pass. A forward pass that runs while a CUDA
    graph is captured, such as a draft model's, is not observed."""
    import torch
    from sglang.srt.model_executor.model_runner import ModelRunner

    original = ModelRunner.forward

    def start(runner: Any, batch: Any) -> None:
        if observer.memory.cache_token_bytes is None:
            observer.memory.cache_token_bytes = cache_token_bytes(runner)
        observer.start_forward(0 if batch.input_ids is None else batch.input_ids.shape[0], runner.device == "cuda")

    @functools.wraps(original)
    def run(self: Any, forward_batch: Any, *args: Any, **kwargs: Any) -> Any:
        if torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing():
            return original(self, forward_batch, *args, **kwargs)
        observer.attempt(start, self, forward_batch)
        result = original(self, forward_batch, *args, **kwargs)
        observer.attempt(observer.end_forward)
        return result

    ModelRunner.forward = run


def cache_token_bytes(runner: Any) -> float | None:
    """Return the bytes of one token in this rank's KV cache; ``None`` if the model has KV caches of several kinds."""
    pool, table = pools_of(runner)
    if hybrid_kind(pool, table) or not pool_bytes(pool) or getattr(runner, "is_draft_worker", False):
        return None
    return pool_bytes(pool) / int(runner.max_total_num_tokens)


def _observe_changes(observer: Observer) -> None:
    counts = [count for counts in counting.active_counts(observer.process.changes).values() for count in counts]
    observer.tally = counting.Tally(counts, observer.attempt)
    observer.tally.install(Patcher(), observer.start_layer)


def _observe_kernels(observer: Observer) -> None:
    try:
        import flashinfer
        import flashinfer.fused_moe
    except ImportError:  # on AMD GPUs, FlashInfer has no kernels
        return
    for module in (flashinfer, flashinfer.fused_moe):  # both modules of FlashInfer export the kernels
        for name in KERNELS:
            if hasattr(module, name):
                kernel = getattr(module, name)
                setattr(module, name, _wrap_kernel(observer, kernel, lambda *args, output=None, **kwargs: output))

    def output_in(wrapper: Any, *args: Any, **kwargs: Any) -> Any:
        observer.attempt(observer.wrappers.add, wrapper)
        return getattr(wrapper, "_moe_output", None)  # up to 0.6.13, FlashInfer keeps the output in the wrapper

    wrapper = getattr(flashinfer.fused_moe, "CuteDslMoEWrapper", None)
    if wrapper is not None:
        wrapper.run = _wrap_kernel(observer, wrapper.run, output_in)


def _wrap_kernel(
    observer: Observer, original: Callable[..., Any], find_output: Callable[..., Any]
) -> Callable[..., Any]:
    """Wrap a function that runs a MoE kernel.

    :param find_output: function that finds the output tensor in the wrapped function's arguments. It returns ``None``
        if the kernel allocates its output.
    """

    @functools.wraps(original)
    def run(*args: Any, **kwargs: Any) -> Any:
        output = find_output(*args, **kwargs)
        observer.attempt(observer.start_kernel, output)
        result = original(*args, **kwargs)
        if output is None:
            observer.attempt(observer.end_kernel, result if kwargs.get("do_finalize", True) else None)
        return result

    return run
