"""The environment of an engine process on a machine without a GPU."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest
from sglang_moe_patches.core import machine
from sglang_moe_patches.lab import without_gpu
from sglang_moe_reference import environment


def test_what_the_user_set_for_the_processor_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "has_gpu", lambda: False)
    monkeypatch.setattr(without_gpu, "stub_libcuda", lambda folder: Path("/stub/libcuda.so.1"))
    assert environment.variables({})["ONEDNN_MAX_CPU_ISA"] == "AVX512_CORE_BF16"  # what comes above it are tiles
    given = {"ONEDNN_MAX_CPU_ISA": "AVX2", "OMP_NUM_THREADS": "3", "TORCHDYNAMO_DISABLE": "0"}
    assert environment.variables(given).items() >= given.items()


def test_with_a_gpu_nothing_is_added(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "has_gpu", lambda: True)
    assert without_gpu.variables({}) == {}


@pytest.mark.parametrize("there", [False, True])
def test_a_system_library_that_the_kernels_load_and_no_package_brings_is_named(tmp_path, monkeypatch, there) -> None:
    monkeypatch.setattr(without_gpu, "_undefined_symbols", lambda library: {"numa_bind", "cuInit", "cublasCreate_v2"})
    monkeypatch.setattr(without_gpu, "_loads", lambda library: there)
    if not there:
        with pytest.raises(without_gpu.UnusableEnvironment, match=r"load libnuma\.so\.1; install libnuma1"):
            without_gpu.stub_libcuda(tmp_path)
        return
    symbols = subprocess.run(
        ["nm", "-D", "--defined-only", without_gpu.stub_libcuda(tmp_path)], capture_output=True, text=True, check=True
    )
    assert "cuInit" in symbols.stdout
    assert "cublas" not in symbols.stdout
