"""A plugin of the engine's that has data-parallel attention run where there is no GPU.

Padding, gathering, scattering and the order of it all are the engine's. What some releases lack on the CPU is a copy
and two operators that they have for GPUs alone, pinned memory, and what plain attention pads lengths with.
"""

from __future__ import annotations

import math

import wrapt


def register():
    hooks = {
        "layers.dp_attention": copy_rows,
        "distributed.parallel_state": gather_plainly,
        "managers.schedule_batch": pin_nothing,
        "layers.attention.torch_native_backend": pad_lengths,
    }
    for module, hook in hooks.items():
        wrapt.register_post_import_hook(hook, "sglang.srt." + module)


def copy_rows(module):
    if hasattr(module, "memcpy_cpu"):
        return  # from 0.5.2x on it has one

    def memcpy(dst, src, dim, offset, sz, offset_src):
        width = math.prod(src.shape[1:])
        first, count = int(offset) * width, int(sz) * width
        source, target = src.view(-1), dst.view(-1)
        if offset_src:
            target[:count] = source[first : first + count]
        else:
            target[first : first + count] = source[:count]

    module.memcpy_triton = memcpy


def gather_plainly(module):
    """Without an operator that is there for GPUs alone."""
    group = module.GroupCoordinator
    group.all_gather_into_tensor = group._all_gather_into_tensor
    group.reduce_scatter_tensor = group._reduce_scatter_tensor


def pin_nothing(module):
    """Which needs a driver."""
    import torch

    original = torch.tensor
    torch.tensor = lambda *args, pin_memory=False, **kwargs: original(*args, **kwargs)
    torch.Tensor.pin_memory = lambda tensor: tensor


def pad_lengths(module):
    for kind in ("cuda", "cpu"):
        setattr(module.TorchNativeAttnBackend, f"get_{kind}_graph_seq_len_fill_value", lambda backend: 1)
