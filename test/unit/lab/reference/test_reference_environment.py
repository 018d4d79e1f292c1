"""The reference environment beside an engine that has nothing of ours but what the plugin itself needs."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest
from sglang_moe_patches.core import machine
from sglang_moe_patches.lab import reference
from sglang_moe_patches.lab.reference import environment

# What the engine brings with it, and our own.
ENGINE = {"sglang", "flashinfer", "torch", "triton", "safetensors", "tokenizers"}
OWN = {"wrapt", "sglang_moe_patches"}


@pytest.mark.parametrize("path", sorted(Path(reference.__file__).parent.glob("*.py")), ids=lambda path: path.stem)
def test_no_module_needs_more_than_the_engine_and_wrapt(path: Path) -> None:
    """``exec --reference-kernels`` and ``serve --reference-kernels`` are there without the extras."""
    imported = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            imported |= {name.name.split(".")[0] for name in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            imported.add(node.module.split(".")[0])
    assert imported - set(sys.stdlib_module_names) <= ENGINE | OWN


def test_what_the_user_set_for_the_processor_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "has_gpu", lambda: False)
    monkeypatch.setattr(environment, "stub_libcuda", lambda folder: Path("/stub/libcuda.so.1"))
    assert environment.variables({})["ONEDNN_MAX_CPU_ISA"] == "AVX512_CORE_BF16"  # what comes above it are tiles
    given = {"ONEDNN_MAX_CPU_ISA": "AVX2", "OMP_NUM_THREADS": "3", "TORCHDYNAMO_DISABLE": "0"}
    assert environment.variables(given).items() >= given.items()


@pytest.mark.parametrize("there", [False, True])
def test_a_system_library_that_the_kernels_load_and_no_package_brings_is_named(tmp_path, monkeypatch, there) -> None:
    monkeypatch.setattr(environment, "_undefined_symbols", lambda library: {"numa_bind", "cuInit", "cublasCreate_v2"})
    monkeypatch.setattr(environment, "_loads", lambda library: there)
    if not there:
        with pytest.raises(environment.UnusableEnvironment, match=r"load libnuma\.so\.1; install libnuma1"):
            environment.stub_libcuda(tmp_path)
        return
    symbols = subprocess.run(
        ["nm", "-D", "--defined-only", environment.stub_libcuda(tmp_path)], capture_output=True, text=True, check=True
    )
    assert "cuInit" in symbols.stdout
    assert "cublas" not in symbols.stdout
