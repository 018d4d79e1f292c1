"""Stand-in for the compiled kernel of the engine's ``gptq_marlin_repack``, which needs a GPU."""

from __future__ import annotations

import sys
from types import SimpleNamespace

import pytest
import torch
from torch.multiprocessing.reductions import StorageWeakRef


def replace_kernel(monkeypatch):
    """Replace the kernel of the engine's ``gptq_marlin_repack`` with a simple one that runs on the CPU. It reverses
    each row of weights.

    :returns: a list to which each call of the kernel appends a number: how many outputs of earlier calls are still
        allocated when the call begins.
    """
    from sglang.srt.layers.quantization import marlin_utils_fp4

    try:
        from sglang.jit_kernel.gptq_marlin_repack import gptq_marlin_repack
    except ImportError:
        from sglang.kernels.ops.quantization.gptq_marlin_repack import gptq_marlin_repack

    results: list[StorageWeakRef] = []
    alive: list[int] = []

    def kernel(b_q_weight, perm, out, size_k, size_n, num_bits):
        assert b_q_weight.shape == (size_k * num_bits // 32, size_n)
        assert b_q_weight.is_contiguous()
        alive.append(sum(not result.expired() for result in results))
        results.append(StorageWeakRef(out.untyped_storage()))
        out.copy_(b_q_weight.flip(1).reshape(out.shape))

    home = sys.modules[gptq_marlin_repack.__module__]
    compiled = SimpleNamespace(gptq_marlin_repack=kernel)
    monkeypatch.setattr(home, "_jit_gptq_marlin_repack_module", lambda: compiled)
    monkeypatch.setattr(marlin_utils_fp4, "gptq_marlin_repack", gptq_marlin_repack, raising=False)
    monkeypatch.setattr(marlin_utils_fp4, "marlin_make_workspace", lambda *args: torch.zeros(1, dtype=torch.int))
    return alive


def simulate_nvfp4_on_hopper(monkeypatch):
    """Make the engine run NVFP4 experts on Marlin, as on a Hopper GPU. Return the list of :func:`replace_kernel`.

    The test is skipped if the release cannot run NVFP4 experts on Marlin.
    """
    from sglang.srt.layers.quantization import modelopt_quant

    if not hasattr(modelopt_quant, "prepare_moe_nvfp4_layer_for_marlin"):
        pytest.skip("this release runs no NVFP4 experts by Marlin")
    monkeypatch.setattr(modelopt_quant, "is_cuda", lambda: True)
    monkeypatch.setattr(modelopt_quant, "get_device_capability", lambda *args: (9, 0))
    return replace_kernel(monkeypatch)
