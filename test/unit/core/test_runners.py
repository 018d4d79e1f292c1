"""Tests of ``core/runners.py``: the runner of a layer is the one that its quantization method calls."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from sglang_moe_patches.core import runners

TRTLLM = SimpleNamespace(runner_backend=SimpleNamespace(value="flashinfer_trtllm"))
TRITON = SimpleNamespace(runner_backend=SimpleNamespace(value="triton"))


def cutlass_moe_fp4() -> None: ...


class Nvfp4Method:
    """Stand-in for the NVFP4 quantization method of 0.5.12.post1. It calls its runner only if TRT-LLM's kernels were
    selected.
    """

    runner = TRTLLM
    enable_flashinfer_cutedsl_moe = enable_flashinfer_cutlass_moe = False

    def __init__(self, **flags: bool) -> None:
        vars(self).update({"enable_flashinfer_trtllm_moe": False} | flags)

    def apply(self) -> Any:
        return self.runner.run() if self.enable_flashinfer_trtllm_moe else cutlass_moe_fp4()  # type: ignore[attr-defined]


class NewerMethod(Nvfp4Method):
    """Stand-in for the NVFP4 quantization method of 0.5.23. It always calls its runner."""

    def apply(self) -> Any:
        return self.runner.run()


class Scheme:
    """Stand-in for the NVFP4 scheme of compressed tensors (0.5.12.post1). It never calls its runner."""

    runner = TRITON

    def __init__(self, trtllm: bool) -> None:
        self.use_flashinfer_trtllm = trtllm

    def apply_weights(self) -> Any:
        return None if self.use_flashinfer_trtllm else cutlass_moe_fp4()


@pytest.mark.parametrize(
    ("method", "scheme", "runner"),
    [
        (Nvfp4Method(), None, "cutlass"),
        (Nvfp4Method(enable_flashinfer_trtllm_moe=True), None, "flashinfer_trtllm"),
        (Nvfp4Method(enable_flashinfer_cutedsl_moe=True), None, "flashinfer_trtllm"),
        (NewerMethod(), None, "flashinfer_trtllm"),
        (None, Scheme(trtllm=False), "cutlass"),
        (None, Scheme(trtllm=True), None),
        (SimpleNamespace(runner=TRITON), None, "triton"),
        (None, SimpleNamespace(kernel=SimpleNamespace(runner=TRITON)), "triton"),
    ],
)
def test_find_runner_names_the_kernel_that_runs(method: Any, scheme: Any, runner: str | None) -> None:
    assert runners.find_runner(SimpleNamespace(quant_method=method, scheme=scheme)) == runner
