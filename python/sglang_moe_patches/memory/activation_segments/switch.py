"""Switch PyTorch's allocator between ordinary and expandable segments.

The start of the scheduler's event loop turns expandable segments on. Graph captures and separate memory pools suspend
them.
"""

from __future__ import annotations

import ctypes
import functools
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

from sglang_moe_patches.core import engine, log
from sglang_moe_patches.core.patch import Install, Patcher, around

ON, OFF = "expandable_segments:True", "expandable_segments:False"
PROBE_BYTES = 2 << 20
_VIRTUAL_MEMORY = 102  # CU_DEVICE_ATTRIBUTE_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED
_SUSPENDED = "_moe_patches_suspended"

Set = Callable[[str], None]


class Switch:
    """Object that switches PyTorch's allocator between ordinary and expandable segments.

    The switch is off at first. While the switch is on and not suspended, new memory comes from expandable segments. At
    all other times, new memory comes from ordinary segments.

    If a call of ``set_`` fails, a warning is logged, and the allocator keeps its last setting until :meth:`turn_on` is
    called.

    :param set_: function that changes the allocator's settings.
    """

    def __init__(self, set_: Set) -> None:
        self._set = set_
        self._lock = threading.Lock()
        self._on = False
        self._suspensions = 0

    def turn_on(self) -> None:
        """Use expandable segments from now on, unless the switch is suspended."""
        with self._lock:
            self._on = True
            self._apply()

    def turn_off(self) -> None:
        """Use ordinary segments from now on. A later call of :meth:`resume` does not turn expandable segments on."""
        with self._lock:
            self._apply(OFF)
            self._on = False

    def suspend(self) -> None:
        """Use ordinary segments until :meth:`resume` is called.

        Suspensions may be nested. After two calls of this method, the second call of :meth:`resume` ends the
        suspension.
        """
        with self._lock:
            self._suspensions += 1
            self._apply()

    def resume(self) -> None:
        """End one suspension. If this was the last one, use expandable segments again, unless the switch is off."""
        with self._lock:
            self._suspensions -= 1
            self._apply()

    @contextmanager
    def suspension(self) -> Iterator[None]:
        """Context manager that suspends the switch: within it, memory comes from ordinary segments."""
        self.suspend()
        try:
            yield
        finally:
            self.resume()

    def _apply(self, setting: str = "") -> None:
        """Set the allocator to expandable or ordinary segments. If the switch is off, leave the allocator unchanged.

        :param setting: :data:`ON` for expandable segments, or :data:`OFF` for ordinary segments. If it is empty, the
            allocator is set to ordinary segments while the switch is suspended, else to expandable segments.
        """
        if not self._on:
            return
        try:
            self._set(setting or (OFF if self._suspensions else ON))
        except Exception as error:
            self._on = False
            log.logger.warning(
                log.format_line(
                    "activation-segments",
                    "PyTorch's allocator refused a setting (%s) and keeps its last setting. If a graph capture fails, "
                    "restart with SGLANG_MOE_PATCHES_SEGMENTS=off",
                ),
                error,
            )


# --- The allocator ---------------------------------------------------------------------------------------------------


def find_settings_function() -> Set | None:
    """Return PyTorch's function that changes the allocator's settings, or ``None`` if this PyTorch has none.

    In newer PyTorch releases the function has two names, and the older name is deprecated. The newer name is therefore
    preferred.
    """
    import torch

    newer = getattr(torch._C, "_accelerator_setAllocatorSettings", None)
    return newer or getattr(torch.cuda.memory, "_set_allocator_settings", None)


def find_allocator_skip_reason() -> str | None:
    """Return why this process's allocator cannot switch to expandable segments, or ``None`` if it can."""
    import torch

    if torch.version.hip is not None:
        return "this PyTorch is built for AMD GPUs, which have not been tested"
    if find_settings_function() is None:
        return "the settings of this PyTorch's allocator cannot be changed in a running process"
    if (backend := torch.cuda.get_allocator_backend()) != "native":
        return f"the allocator is {backend}, not PyTorch's own"
    if _driver_supports_mapping() is False:
        return "the CUDA driver has no virtual memory management"
    return None


def _driver_supports_mapping() -> bool | None:
    """Return whether the CUDA driver can map memory in pieces (virtual memory management), or ``None`` if no driver
    answers.
    """
    value = ctypes.c_int()
    try:
        driver = ctypes.CDLL("libcuda.so.1")
        failed = driver.cuInit(0) or driver.cuDeviceGetAttribute(ctypes.byref(value), _VIRTUAL_MEMORY, 0)
    except (OSError, AttributeError):  # no driver, or only a stub of the driver library
        return None
    return None if failed else bool(value.value)


def allocates_expandable() -> bool:
    """Allocate a tensor, and return whether the allocator put it into an expandable segment."""
    import torch

    # A new stream has no free block that the allocator could reuse.
    with torch.cuda.stream(torch.cuda.Stream(priority=-1)):
        address = (probe := torch.empty(PROBE_BYTES, dtype=torch.uint8, device="cuda")).data_ptr()
    segments = torch.cuda.memory_snapshot()
    del probe
    return any(
        segment.get("is_expandable") and segment["address"] <= address < segment["address"] + segment["total_size"]
        for segment in segments
    )


def agree_on_all_ranks(works: bool) -> bool:
    """Return whether ``works`` is True on all ranks of the server. Every rank must call this function."""
    import torch

    world = engine.import_module("sglang.srt.distributed.parallel_state").get_world_group()
    if world.world_size == 1:
        return works
    votes = torch.tensor([works], dtype=torch.int32, device="cpu")
    torch.distributed.all_reduce(votes, torch.distributed.ReduceOp.MIN, group=world.cpu_group)
    return bool(votes.item())


def turn_on_if_it_works(switch: Switch, agree: Callable[[bool], bool] = bool) -> None:
    """Turn the switch on in a server that has started, if expandable segments work on all ranks.

    If they do not work on one rank, all ranks turn the switch off again. The function never raises an exception.

    :param agree: function that receives whether expandable segments work on this rank, and returns whether they work on
        all ranks.
    """
    import torch

    failed = "another rank cannot use expandable segments"
    try:
        # Return free memory to the driver. The allocator keeps only free blocks of segments that are partly in use.
        torch.cuda.empty_cache()
        switch.turn_on()
        if not (works := allocates_expandable()):
            failed = "the allocator still makes ordinary segments"
        torch.cuda.empty_cache()
    except Exception as error:
        works, failed = False, f"{type(error).__name__}: {error}"
    try:
        works = agree(works)
    except Exception as error:
        works, failed = False, f"the ranks could not exchange their results, {type(error).__name__}: {error}"
    if works:
        log.logger.info(log.format_line("activation-segments", "expandable segments are on from now on"))
        return
    switch.turn_off()
    log.logger.warning(log.format_line("activation-segments", "expandable segments stay off: %s"), failed)


# --- The hook points -------------------------------------------------------------------------------------------------


def probe() -> Install:
    """Probe the hook points, and return an installer that wraps them.

    :raises engine.Unsupported: the engine's or PyTorch's code is not what this change expects.
    """
    import torch

    scheduler = engine.require_unpatched(engine.import_module("sglang.srt.managers.scheduler"), "Scheduler")
    engine.require_mentions(engine.require_unpatched(scheduler, "run_event_loop"), "dispatch_event_loop")
    parallel = engine.import_module("sglang.srt.distributed.parallel_state")
    engine.require_unpatched(parallel, "get_world_group")
    coordinator = engine.require_unpatched(parallel, "GroupCoordinator")
    engine.require_mentions(engine.require_unpatched(coordinator, "graph_capture"), "ca_comm", "capture")
    graph = torch.cuda.CUDAGraph
    for name in ("capture_begin", "capture_end"):
        engine.get(graph, name)
    set_settings = find_settings_function()
    if set_settings is None:
        raise engine.Unsupported("the settings of PyTorch's allocator cannot be changed in a running process")
    switch = Switch(set_settings)

    def install(patcher: Patcher) -> None:
        suspend_during_captures(switch, patcher, graph, coordinator)
        patcher.wrap(scheduler, "run_event_loop", around(functools.partial(_run_event_loop, switch)))

    return install


def suspend_during_captures(switch: Switch, patcher: Patcher, graph: Any, coordinator: Any) -> None:
    """Wrap the functions that need memory from ordinary segments, so that the switch is suspended while they run.

    These functions capture a CUDA graph or use a separate memory pool. ``GroupCoordinator.graph_capture`` surrounds all
    captures of the engine. At its end the engine shares buffers with other processes by CUDA IPC, which works only with
    ordinary segments.

    :param graph: ``torch.cuda.CUDAGraph``.
    :param coordinator: the engine's ``GroupCoordinator``.
    """
    import torch

    patcher.wrap(graph, "capture_begin", around(functools.partial(_begin_capture, switch)))
    patcher.wrap(graph, "capture_end", around(functools.partial(_end_capture, switch)))
    suspension = around(functools.partial(_suspend_within, switch))
    patcher.wrap(coordinator, "graph_capture", suspension)
    for module in (torch.cuda, torch.cuda.memory):
        if hasattr(module, "use_mem_pool"):
            patcher.wrap(module, "use_mem_pool", suspension)


def _run_event_loop(switch: Switch, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Turn expandable segments on if they work on all ranks, and then run the scheduler's event loop."""
    turn_on_if_it_works(switch, agree_on_all_ranks)
    return original(*args, **kwargs)


def _begin_capture(switch: Switch, original: Callable[..., Any], self: Any, *args: Any, **kwargs: Any) -> Any:
    """Suspend the switch, and then begin a graph capture. If the capture fails to begin, resume the switch."""
    switch.suspend()
    try:
        result = original(self, *args, **kwargs)
    except BaseException:
        switch.resume()
        raise
    setattr(self, _SUSPENDED, True)
    return result


def _end_capture(switch: Switch, original: Callable[..., Any], self: Any, *args: Any, **kwargs: Any) -> Any:
    """End a graph capture, and then resume the switch."""
    try:
        return original(self, *args, **kwargs)
    finally:
        if vars(self).pop(_SUSPENDED, False):
            switch.resume()


@contextmanager
def _suspend_within(
    switch: Switch, original: Callable[..., AbstractContextManager[Any]], *args: Any, **kwargs: Any
) -> Iterator[Any]:
    """Context manager that suspends the switch, and enters the context manager that ``original`` returns. At the end of
    the ``with`` block it leaves that context manager, and resumes the switch.
    """
    with switch.suspension(), original(*args, **kwargs) as entered:
        yield entered
