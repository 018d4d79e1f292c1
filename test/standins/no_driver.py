"""Engine plugin for servers on the CPU. It ignores requests to pin memory and to synchronize with a GPU."""

from __future__ import annotations

from types import SimpleNamespace


def register():
    import torch

    for name in ("empty", "tensor", "zeros"):
        setattr(torch, name, without_pinning(getattr(torch, name)))
    torch.Tensor.pin_memory = lambda tensor: tensor
    torch.cuda.synchronize = lambda *device: None
    torch.cuda.cudart = lambda: SimpleNamespace(cudaHostRegister=lambda *memory: 0)


def without_pinning(original):
    return lambda *args, pin_memory=False, **kwargs: original(*args, **kwargs)
