"""What the driver and PyTorch's allocator say of this process's GPU, without waiting for it."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Memory:
    """In bytes.

    :param free: the driver's.
    :param reserved: by this process's allocator; ``allocated``: the tensors in it, and ``peak``: the most of them.
    """

    free: int = 0
    reserved: int = 0
    allocated: int = 0
    peak: int = 0


def read(gpu: int) -> Memory:
    """The memory of one GPU now; zeros where there is none."""
    import torch

    if not (torch.cuda.is_available() and torch.cuda.is_initialized()):
        return Memory()
    counted = torch.cuda.memory_stats(gpu)
    return Memory(
        torch.cuda.mem_get_info(gpu)[0],
        reserved=counted.get("reserved_bytes.all.current", 0),
        allocated=counted.get("allocated_bytes.all.current", 0),
        peak=counted.get("allocated_bytes.all.peak", 0),
    )


def reset_peak(gpu: int) -> None:
    """Count the peak of one GPU anew."""
    import torch

    if torch.cuda.is_available() and torch.cuda.is_initialized():
        torch.cuda.reset_peak_memory_stats(gpu)
