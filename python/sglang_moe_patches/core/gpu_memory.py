"""What the driver and PyTorch's allocator say of this process's GPU, without waiting for it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Memory:
    """In bytes.

    :param free: the driver's.
    :param reserved: by this process's allocator; ``allocated``: the tensors in it, and ``peak``: the most of them.
    :param ooms: how often the allocator gave up.
    """

    free: int = 0
    total: int = 0
    reserved: int = 0
    ooms: int = 0
    allocated: int = 0
    peak: int = 0


def read(gpu: int) -> Memory:
    """The memory of one GPU now; zeros where there is none."""
    import torch

    if not (torch.cuda.is_available() and torch.cuda.is_initialized()):
        return Memory()
    free, total = torch.cuda.mem_get_info(gpu)
    counted = torch.cuda.memory_stats(gpu)
    return Memory(
        free,
        total,
        reserved=counted.get("reserved_bytes.all.current", 0),
        ooms=counted.get("num_ooms", 0),
        allocated=counted.get("allocated_bytes.all.current", 0),
        peak=counted.get("allocated_bytes.all.peak", 0),
    )


def reset_peak(gpu: int) -> None:
    """Count the peak of one GPU anew."""
    import torch

    if torch.cuda.is_available() and torch.cuda.is_initialized():
        torch.cuda.reset_peak_memory_stats(gpu)


def device(gpu: int) -> str:
    """The name of a GPU."""
    import torch

    return str(torch.cuda.get_device_name(gpu)) if torch.cuda.is_available() else "none"


def driver() -> str:
    """The driver's version, "" where it is not known."""
    try:
        return Path("/proc/driver/nvidia/version").read_text(encoding="utf-8").splitlines()[0]
    except (OSError, IndexError, UnicodeDecodeError):
        return ""
