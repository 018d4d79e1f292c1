"""Memory figures of one GPU, from the driver and from PyTorch's allocator in this process.

The functions do not wait for the GPU.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Memory:
    """Memory of one GPU, in bytes.

    :param free: free memory of the GPU, according to the driver.
    :param reserved: memory that PyTorch's allocator has reserved in this process.
    :param allocated: memory of this process's tensors.
    :param peak: largest value of ``allocated`` since :func:`reset_peak`.
    """

    free: int = 0
    reserved: int = 0
    allocated: int = 0
    peak: int = 0


def read(gpu: int) -> Memory:
    """Return the present memory figures of one GPU. All figures are zero if CUDA is unavailable or not initialized."""
    import torch

    if not (torch.cuda.is_available() and torch.cuda.is_initialized()):
        return Memory()
    stats = torch.cuda.memory_stats(gpu)
    return Memory(
        torch.cuda.mem_get_info(gpu)[0],
        reserved=stats.get("reserved_bytes.all.current", 0),
        allocated=stats.get("allocated_bytes.all.current", 0),
        peak=stats.get("allocated_bytes.all.peak", 0),
    )


def reset_peak(gpu: int) -> None:
    """Reset the peak memory of one GPU (``Memory.peak``) to the memory that this process's tensors have now."""
    import torch

    if torch.cuda.is_available() and torch.cuda.is_initialized():
        torch.cuda.reset_peak_memory_stats(gpu)
