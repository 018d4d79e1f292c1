"""Tests of ``benchmark/whole/engine_suite.py``, which selects tests of the engine and compares their outcomes."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from common import engine_test_file
from sglang_moe_patches.changes.moe_workspace import column_slices
from sglang_moe_patches.changes.moe_workspace.column_slices import LayerShape, TritonGemm
from whole.engine_suite import find_broken_tests, find_differing_tests, select, skip_reason

CUDA = 'register_cuda_ci(est_time=9, stage="stage-b", runner_config="1-gpu-large")\n'


@pytest.mark.parametrize(
    ("source", "reason"),
    [
        (CUDA, ""),
        ("register_cpu_ci(est_time=9, suite='x')", ""),
        (CUDA + "from test_utils import DEFAULT_MODEL_NAME_FOR_TEST as M", "a model: DEFAULT_MODEL_NAME_FOR_TEST"),
        (CUDA + "x = utils.DEFAULT_AWQ_MOE_MODEL_NAME_FOR_TEST", "a model: DEFAULT_AWQ_MOE_MODEL_NAME_FOR_TEST"),
        (CUDA + "model = AutoModel.from_pretrained(path)", "a model: from_pretrained"),
        (CUDA + "# popen_launch_server, DEFAULT_MODEL_NAME_FOR_TEST", ""),
        (CUDA + "DEFAULT_TIMEOUT_FOR_SERVER_LAUNCH", ""),
        (CUDA.replace("1-gpu-large", "4-gpu-b200"), "4 GPUs"),
        ('register_cuda_ci(est_time=1, suite="weekly-8-gpu-h200", nightly=True)', "8 GPUs"),
        ('register_amd_ci(est_time=1, suite="8-gpu")\n' + CUDA, ""),
    ],
)
def test_files_that_need_a_model_or_more_gpus_are_skipped(source: str, reason: str):
    assert skip_reason(source) == (f"needs {reason}" if reason else "")


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    for path, source in {
        "moe/test_a.py": CUDA,
        "moe/utils.py": CUDA,
        "quant/test_b.py": CUDA + "from_pretrained()",
        "kernels/test_moe_c.py": CUDA + "fused_moe()",
        "kernels/test_d.py": CUDA,
        "vlm/test_moe_e.py": CUDA + "fused_moe()",
    }.items():
        file = tmp_path / "test" / "registered" / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(source)
    return tmp_path


def test_files_about_moe_layers_are_selected(checkout: Path):
    needs = "needs a model: from_pretrained"
    files = {"kernels/test_moe_c.py": "", "moe/test_a.py": "", "quant/test_b.py": needs}
    assert select(checkout) == files
    assert list(select(checkout, ["test_a", "test_b"])) == list(files)[1:]
    with pytest.raises(SystemExit, match="no tests below"):
        select(checkout / "moe")


def side(errors: tuple[str, ...] = (), **outcomes: str) -> dict[str, Any]:
    tests = {name: {"outcome": outcome, "subtests": 2} for name, outcome in outcomes.items()}
    return {"tests": tests, "errors": list(errors)}


def test_differing_and_broken_tests_are_found():
    stock = side(a="passed", b="failed", c="skipped", d="passed")
    assert find_differing_tests(stock, stock) == find_broken_tests(stock, stock) == []
    patched = side(a="failed", b="passed", c="skipped")
    assert find_differing_tests(stock, patched) == ["a", "b", "d"]
    assert find_broken_tests(stock, patched) == ["a", "d"]
    assert (find_differing_tests(stock, side(("ended",))), find_broken_tests(stock, side(("ended",)))) == (
        ["a", "b", "c", "d", ""],
        [""],
    )
    assert find_differing_tests(side(("ended",)), side(("ended",))) == []
    fewer_subtests = side(a="passed")
    fewer_subtests["tests"]["a"]["subtests"] = 1
    assert find_differing_tests(side(a="passed"), fewer_subtests) == ["a"]


@pytest.mark.parametrize(
    ("hidden", "gemm", "width"),
    [
        (1024, TritonGemm(), 256),
        (511, TritonGemm(), 256),
        (128, TritonGemm(), 128),
        (4096, TritonGemm({"BLOCK_SIZE_N": 512}), 512),
        (4096, TritonGemm(columns_per_scale=128, scale_stride_bytes=4), 512),
    ],
    ids=["columns", "a part", "too narrow", "tiles", "scales"],
)
def test_columns_are_as_narrow_as_tiles_and_scales_allow(hidden: int, gemm: TritonGemm, width: int):
    layer = LayerShape(1, 6, hidden, 1024)
    assert column_slices.choose_slice_width(layer, gemm) == hidden
    assert engine_test_file.narrowest_slice_width(layer, gemm) == width


TESTS = """
import unittest
class TestIt(unittest.TestCase):
    def test_passes(self):
        for number in range(3):
            with self.subTest(number=number):
                pass
    def test_fails(self):
        raise ValueError("two words\\nand a line")
    @unittest.skip("no such GPU")
    def test_is_skipped(self):
        pass
"""


def run_file(path: Path) -> dict[str, Any]:
    """Run a test file in its own process, and return its record."""
    result = path.with_suffix(".json")
    command = [sys.executable, "-m", "common.engine_test_file", "stock", str(path), str(result)]
    process = subprocess.run(command, cwd=Path(engine_test_file.__file__).parents[1], capture_output=True, text=True)
    assert process.returncode, process.stderr
    return json.loads(result.read_text())


def test_a_file_runs_in_its_own_process_and_its_outcomes_are_recorded(tmp_path: Path):
    path = tmp_path / "test_it.py"
    path.write_text(TESTS)
    record = run_file(path)
    assert {name: (test["outcome"], test["subtests"], test["said"]) for name, test in record["tests"].items()} == {
        "TestIt::test_passes": ("passed", 3, ""),
        "TestIt::test_fails": ("failed", 0, "ValueError: two words"),
        "TestIt::test_is_skipped": ("skipped", 0, "Skipped: no such GPU"),
    }
    assert (record["exit_code"], record["acted"]) == (1, {})
    path.write_text("import no_such_module")
    assert "no_such_module" in run_file(path)["errors"][0]
