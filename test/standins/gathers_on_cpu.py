"""Engine plugin that makes data-parallel attention run on the CPU.

Padding, gathering and scattering remain the engine's own. The plugin replaces parts that some releases have only for
GPUs: a copy kernel, two collective operators, pinned memory, and the fill value for padded sequence lengths.
"""

from __future__ import annotations

import math

import wrapt


def register():
    hooks = {
        "layers.dp_attention": copy_rows,
        "distributed.parallel_state": gather_plainly,
        "managers.schedule_batch": ignore_pinning,
        "layers.attention.torch_native_backend": pad_lengths,
    }
    for module, hook in hooks.items():
        wrapt.register_post_import_hook(hook, "sglang.srt." + module)


def copy_rows(module):
    if hasattr(module, "memcpy_cpu"):
        return  # newer releases have a copy function for the CPU

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
    """Replace the collective operators, which exist only for GPUs, with the methods that these operators call."""
    group = module.GroupCoordinator
    group.all_gather_into_tensor = group._all_gather_into_tensor
    group.reduce_scatter_tensor = group._reduce_scatter_tensor


def ignore_pinning(module):
    """Ignore requests for pinned memory. Pinned memory needs a GPU driver."""
    import torch

    original = torch.tensor
    torch.tensor = lambda *args, pin_memory=False, **kwargs: original(*args, **kwargs)
    torch.Tensor.pin_memory = lambda tensor: tensor


def pad_lengths(module):
    for kind in ("cuda", "cpu"):
        setattr(module.TorchNativeAttnBackend, f"get_{kind}_graph_seq_len_fill_value", lambda backend: 1)
