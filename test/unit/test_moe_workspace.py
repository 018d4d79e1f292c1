"""moe-workspace: how wide the slices are, and the engine's own sequence in Triton's interpreter."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from sglang_moe_patches.changes import moe_workspace
from sglang_moe_patches.changes.moe_workspace import columns
from sglang_moe_patches.changes.moe_workspace.columns import ranges, slice_width

sizes = st.fixed_dictionaries(
    {
        "tokens": st.integers(1, 1 << 17),
        "top_k": st.integers(3, 16),
        "hidden": st.integers(16, 1024).map(lambda n: 16 * n),
        "intermediate": st.integers(4, 1024).map(lambda n: 16 * n),
        "itemsize": st.sampled_from([2, 4]),
        "activation_itemsize": st.sampled_from([None, 1]),
        "block_columns": st.sampled_from([16, 32, 64, 128, 256]),
        "scale_columns": st.sampled_from([1, 32, 64, 128]),
        "scale_bytes": st.integers(1, 64).map(lambda n: 4 * n),
    }
)


# --- How wide --------------------------------------------------------------------------------------------------------


@given(sizes)
def test_slices_cut_no_tile_and_no_block_of_scales_and_start_at_16_bytes(given):
    width = slice_width(**given)
    assert 0 < width <= given["hidden"]
    if width < given["hidden"]:
        assert width % given["block_columns"] == 0
        assert width % given["scale_columns"] == 0
        assert width * given["itemsize"] % 16 == 0
        assert width // given["scale_columns"] * given["scale_bytes"] % 16 == 0


def tensor_bytes(given):
    return given["tokens"] * given["top_k"] * given["hidden"] * given["itemsize"]


@given(sizes)
def test_small_tensors_stay_whole(given):
    if tensor_bytes(given) < columns.SMALLEST_TENSOR_BYTES:
        assert slice_width(**given) == given["hidden"]


@given(sizes)
def test_each_slice_saves_what_it_costs(given):
    slices = len(ranges(given["hidden"], slice_width(**given)))
    assert slices == 1 or tensor_bytes(given) / slices**2 >= columns.WORTH_A_SLICE_BYTES


@given(sizes)
def test_more_tokens_never_make_wider_slices(given):
    assert slice_width(**given | {"tokens": 2 * given["tokens"]}) <= slice_width(**given)


@given(st.integers(1, 20000), st.integers(1, 20000))
def test_the_ranges_are_every_column_once_in_order(hidden, width):
    found = ranges(hidden, width)
    assert [column for start, stop in found for column in range(start, stop)] == list(range(hidden))
    assert all(stop - start == width for start, stop in found[:-1])


@pytest.mark.parametrize(
    ("sizes", "peak_mb"),
    [
        # tokens, top-k, hidden, intermediate, bytes of an activation: and the runner's peak that was asked for
        ((16384, 8, 7168, 512, 2), 411),  # Kimi-K2.5, TP=4
        ((16384, 8, 7168, 512, 1), 480),
        ((16384, 9, 7168, 256, 1), 420),  # DeepSeek-V3, TP=8, its shared expert one more routed one
        ((16384, 8, 4096, 384, 2), 380),  # Qwen3-235B, TP=4
    ],
    ids=str,
)
def test_the_peaks_of_models(sizes, peak_mb):
    tokens, top_k, hidden, intermediate, activation = sizes
    scales = {"scale_columns": 128, "scale_bytes": intermediate // 128 * 4} if activation == 1 else {}
    width = slice_width(
        tokens, top_k, hidden, intermediate, 2, activation_itemsize=activation, block_columns=128, **scales
    )
    rows = tokens * top_k
    around_the_activation = rows * 3 * intermediate * 2
    during_the_slices = rows * (intermediate * activation * 1.03125 + width * 2)
    assert max(around_the_activation, during_the_slices) <= peak_mb * 1e6


# --- Who needs it ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("device", "runner", "reason"),
    [
        ("cuda", "triton", None),
        ("cuda", "auto", None),
        ("cuda", "marlin", "--moe-runner-backend is marlin"),
        ("cpu", "triton", "--device is cpu"),
    ],
)
def test_servers_that_never_reach_it(device, runner, reason):
    assert moe_workspace.CHANGE.unneeded(SimpleNamespace(device=device, moe_runner_backend=runner)) == reason


# --- The kernel, and the engine's sequence ---------------------------------------------------------------------------


@pytest.mark.parametrize("capability", [80, 90])
@pytest.mark.parametrize("dtype", ["fp16", "bf16"])
def test_the_sum_compiles_and_moves_16_bytes_at_a_time(capability, dtype, tmp_path, monkeypatch):
    triton = pytest.importorskip("triton")
    if os.environ.get("TRITON_INTERPRET") == "1":
        pytest.skip("interpreted kernels are not compiled")
    from sglang_moe_patches.kernels import moe_sum
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    kernel = moe_sum._moe_sum_kernel
    constants = {"TOP_K": 8, "BLOCK": 1024}
    types = {"scale": "fp32", "columns": "i32", "output_stride": "i32"} | dict.fromkeys(constants, "constexpr")
    aligned = ("experts_output_ptr", "output_ptr", "columns", "output_stride")
    source = ASTSource(
        fn=kernel,
        signature={name: types.get(name, f"*{dtype}") for name in kernel.arg_names},
        constexprs={(kernel.arg_names.index(name),): value for name, value in constants.items()},
        attrs={(kernel.arg_names.index(name),): [["tt.divisibility", 16]] for name in aligned},
    )
    ptx = triton.compile(source, target=GPUTarget("cuda", capability, 32), options={"num_warps": 4}).asm["ptx"]
    assert len(re.findall(r"ld\.global\.v4\.b32", ptx)) == 8
    assert len(re.findall(r"st\.global\.v4\.b32", ptx)) == 1


def test_the_engines_sequence_in_the_interpreter() -> None:
    """On the CPU a server never runs this sequence: here the engine's CUDA branch is taken, its kernels interpreted."""
    pytest.importorskip("triton")
    test = Path(__file__).parents[1] / "gpu" / "test_moe_workspace_cuda.py"
    result = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(test)],
        env={**os.environ, "TRITON_INTERPRET": "1"},
        capture_output=True,
        text=True,
        timeout=850,
        check=False,
    )
    assert result.returncode == 0, result.stdout + result.stderr
    assert "49 passed" in result.stdout, result.stdout  # not skipped
