"""Tests of ``lab/without_gpu.py``, which makes the environment variables and the stub driver with which the engine runs
without a GPU."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest
from sglang_moe_patches.core import machine
from sglang_moe_patches.lab import without_gpu
from sglang_moe_reference import environment


def test_the_users_own_processor_settings_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "has_gpu", lambda: False)
    monkeypatch.setattr(without_gpu, "build_stub_libcuda", lambda folder: Path("/stub/libcuda.so.1"))
    assert environment.variables({})["ONEDNN_MAX_CPU_ISA"] == "AVX512_CORE_BF16"  # the next higher level has AMX
    settings = {"ONEDNN_MAX_CPU_ISA": "AVX2", "OMP_NUM_THREADS": "3", "TORCHDYNAMO_DISABLE": "0"}
    assert environment.variables(settings).items() >= settings.items()


def test_no_variable_is_added_on_a_machine_with_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "has_gpu", lambda: True)
    assert without_gpu.variables({}) == {}


@pytest.mark.parametrize("has_libnuma", [False, True])
def test_a_missing_libnuma_is_named_and_the_stub_has_only_driver_functions(tmp_path, monkeypatch, has_libnuma) -> None:
    monkeypatch.setattr(without_gpu, "_undefined_symbols", lambda library: {"numa_bind", "cuInit", "cublasCreate_v2"})
    monkeypatch.setattr(without_gpu, "_can_load", lambda library: has_libnuma)
    if not has_libnuma:
        with pytest.raises(
            without_gpu.UnusableEnvironment, match=r"need libnuma\.so\.1, which cannot be loaded; install libnuma1"
        ):
            without_gpu.build_stub_libcuda(tmp_path)
        return
    symbols = subprocess.run(
        ["nm", "-D", "--defined-only", without_gpu.build_stub_libcuda(tmp_path)],
        capture_output=True,
        text=True,
        check=True,
    )
    assert "cuInit" in symbols.stdout
    assert "cublas" not in symbols.stdout
