"""The allocator's switch, and where it is turned."""

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
_HELD = "_moe_patches_held"

Set = Callable[[str], None]


class Switch:
    """While it is on and nobody holds it off, the allocator takes new memory in expandable segments.

    Turning it can fail without harm: from then on the allocator is left as it is.

    :param set_: changes the allocator's settings.
    """

    def __init__(self, set_: Set) -> None:
        self._set = set_
        self._lock = threading.Lock()
        self._on = False
        self._holding = 0

    def turn_on(self) -> None:
        with self._lock:
            self._on = True
            self._apply()

    def turn_off(self) -> None:
        """For good."""
        with self._lock:
            self._apply(OFF)
            self._on = False

    def hold(self) -> None:
        """Off until as many have released it as hold it."""
        with self._lock:
            self._holding += 1
            self._apply()

    def release(self) -> None:
        with self._lock:
            self._holding -= 1
            self._apply()

    @contextmanager
    def held(self) -> Iterator[None]:
        """Off within the ``with`` block."""
        self.hold()
        try:
            yield
        finally:
            self.release()

    def _apply(self, setting: str = "") -> None:
        if not self._on:
            return
        try:
            self._set(setting or (OFF if self._holding else ON))
        except Exception as error:
            self._on = False
            log.logger.warning(log.format_line("activation-segments", "the allocator cannot be set: %s"), error)


# --- The allocator ---------------------------------------------------------------------------------------------------


def setter() -> Set | None:
    """PyTorch's own function that changes the allocator's settings, by the name that is not deprecated if it has it."""
    import torch

    newer = getattr(torch._C, "_accelerator_setAllocatorSettings", None)
    return newer or getattr(torch.cuda.memory, "_set_allocator_settings", None)


def allocator_skip_reason() -> str | None:
    """What PyTorch's allocator of this process lacks for it, or ``None``."""
    import torch

    if torch.version.hip is not None:
        return "this PyTorch is AMD's: not seen"
    if setter() is None:
        return "this PyTorch's allocator cannot be set while it runs"
    if (backend := torch.cuda.get_allocator_backend()) != "native":
        return f"the allocator is {backend}, not PyTorch's own"
    if _driver_maps() is False:
        return "the driver has no virtual memory management"
    return None


def _driver_maps() -> bool | None:
    """Whether the driver maps memory where it is told to; ``None``: there is no driver to ask."""
    value = ctypes.c_int()
    try:
        driver = ctypes.CDLL("libcuda.so.1")
        failed = driver.cuInit(0) or driver.cuDeviceGetAttribute(ctypes.byref(value), _VIRTUAL_MEMORY, 0)
    except (OSError, AttributeError):  # no driver, or what stands in for one
        return None
    return None if failed else bool(value.value)


def expandable() -> bool:
    """Whether what is allocated now comes from an expandable segment: tried."""
    import torch

    # On a stream of its own: the allocator keeps no free block for it that would do.
    with torch.cuda.stream(torch.cuda.Stream(priority=-1)):
        address = (probe := torch.empty(PROBE_BYTES, dtype=torch.uint8, device="cuda")).data_ptr()
    segments = torch.cuda.memory_snapshot()
    del probe
    return any(
        segment.get("is_expandable") and segment["address"] <= address < segment["address"] + segment["total_size"]
        for segment in segments
    )


def everywhere(works: bool) -> bool:
    """Whether it works on all ranks of the server. Each asks, and all get the same answer."""
    import torch

    world = engine.module("sglang.srt.distributed.parallel_state").get_world_group()
    if world.world_size == 1:
        return works
    votes = torch.tensor([works], dtype=torch.int32, device="cpu")
    torch.distributed.all_reduce(votes, torch.distributed.ReduceOp.MIN, group=world.cpu_group)
    return bool(votes.item())


def switch_over(switch: Switch, agreed: Callable[[bool], bool] = bool) -> None:
    """Turn it on for a server that has started, if it does what it should; never raises.

    :param agreed: whether it works on all ranks, from whether it works on this one.
    """
    import torch

    failed = "another rank stays with ordinary segments"
    try:
        # What the start has left is given back; what remains of it fits between blocks that stay.
        torch.cuda.empty_cache()
        switch.turn_on()
        if not (works := expandable()):
            failed = "the allocator makes ordinary segments all the same"
        torch.cuda.empty_cache()
    except Exception as error:
        works, failed = False, f"{type(error).__name__}: {error}"
    try:
        works = agreed(works)
    except Exception as error:
        works, failed = False, f"the ranks cannot agree, {type(error).__name__}: {error}"
    if works:
        log.logger.info(log.format_line("activation-segments", "on from here"))
        return
    switch.turn_off()
    log.logger.warning(log.format_line("activation-segments", "off: %s"), failed)


# --- Where it is turned ----------------------------------------------------------------------------------------------


def probe() -> Install:
    """How the hook points are wrapped.

    :raises engine.Unsupported: the engine, or PyTorch, is not as expected.
    """
    import torch

    scheduler = engine.require_unpatched(engine.module("sglang.srt.managers.scheduler"), "Scheduler")
    engine.require_mentions(engine.require_unpatched(scheduler, "run_event_loop"), "dispatch_event_loop")
    parallel = engine.module("sglang.srt.distributed.parallel_state")
    engine.require_unpatched(parallel, "get_world_group")
    coordinator = engine.require_unpatched(parallel, "GroupCoordinator")
    engine.require_mentions(engine.require_unpatched(coordinator, "graph_capture"), "ca_comm", "capture")
    graph = torch.cuda.CUDAGraph
    for name in ("capture_begin", "capture_end"):
        engine.get(graph, name)
    set_settings = setter()
    if set_settings is None:
        raise engine.Unsupported("PyTorch's allocator cannot be set while it runs")
    switch = Switch(set_settings)

    def install(patcher: Patcher) -> None:
        hold_off(switch, patcher, graph, coordinator)
        patcher.wrap(scheduler, "run_event_loop", around(functools.partial(_run_event_loop, switch)))

    return install


def hold_off(switch: Switch, patcher: Patcher, graph: Any, coordinator: Any) -> None:
    """Have it off where memory must be ordinary: while any code captures a graph; in the engine's whole region
    around captures, at the end of which buffers are registered with other processes; in a memory pool of its own.

    :param graph: ``torch.cuda.CUDAGraph``.
    :param coordinator: the engine's ``GroupCoordinator``.
    """
    import torch

    patcher.wrap(graph, "capture_begin", around(functools.partial(_capture_begin, switch)))
    patcher.wrap(graph, "capture_end", around(functools.partial(_capture_end, switch)))
    held = around(functools.partial(_held, switch))
    patcher.wrap(coordinator, "graph_capture", held)
    for module in (torch.cuda, torch.cuda.memory):
        if hasattr(module, "use_mem_pool"):
            patcher.wrap(module, "use_mem_pool", held)


def _run_event_loop(switch: Switch, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    switch_over(switch, everywhere)
    return original(*args, **kwargs)


def _capture_begin(switch: Switch, original: Callable[..., Any], self: Any, *args: Any, **kwargs: Any) -> Any:
    switch.hold()
    try:
        result = original(self, *args, **kwargs)
    except BaseException:
        switch.release()
        raise
    setattr(self, _HELD, True)
    return result


def _capture_end(switch: Switch, original: Callable[..., Any], self: Any, *args: Any, **kwargs: Any) -> Any:
    try:
        return original(self, *args, **kwargs)
    finally:
        if vars(self).pop(_HELD, False):
            switch.release()


@contextmanager
def _held(
    switch: Switch, original: Callable[..., AbstractContextManager[Any]], *args: Any, **kwargs: Any
) -> Iterator[Any]:
    with switch.held(), original(*args, **kwargs) as entered:
        yield entered
