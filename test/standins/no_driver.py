"""A plugin of the engine's for servers on the CPU that ask the driver to pin memory, or to wait for a GPU."""

from __future__ import annotations

from types import SimpleNamespace


def register():
    import torch

    for name in ("empty", "tensor", "zeros"):
        setattr(torch, name, unpinned(getattr(torch, name)))
    torch.Tensor.pin_memory = lambda tensor: tensor
    torch.cuda.synchronize = lambda *device: None
    torch.cuda.cudart = lambda: SimpleNamespace(cudaHostRegister=lambda *memory: 0)


def unpinned(original):
    return lambda *args, pin_memory=False, **kwargs: original(*args, **kwargs)
