"""The reference environment beside an engine that has nothing of ours but what the plugin itself needs."""

import ast
import sys
from pathlib import Path

import pytest
from sglang_moe_patches import reference

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
