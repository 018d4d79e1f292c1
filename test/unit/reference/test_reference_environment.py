"""The reference environment beside an engine that has nothing of ours but what the plugin itself needs."""

import ast
import sys
from pathlib import Path

import pytest
from sglang_moe_patches import reference
from sglang_moe_patches.reference import environment

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
    monkeypatch.setattr(environment, "has_gpu", lambda: False)
    monkeypatch.setattr(environment, "stub_libcuda", lambda folder: Path("/stub/libcuda.so.1"))
    assert environment.variables({})["ONEDNN_MAX_CPU_ISA"] == "AVX512_CORE_BF16"  # what comes above it are tiles
    given = {"ONEDNN_MAX_CPU_ISA": "AVX2", "OMP_NUM_THREADS": "3", "TORCHDYNAMO_DISABLE": "0"}
    assert environment.variables(given).items() >= given.items()
