"""GPU tests of the reference kernels in Triton. Their results equal those of the plain PyTorch kernels, and are
deterministic. CUDA graphs can capture the kernels, and their memory stays within its limit.

Without a GPU, a unit test runs the small cases in Triton's interpreter (TRITON_INTERPRET=1).
"""

from __future__ import annotations

import os
from typing import Any

import pytest

torch = pytest.importorskip("torch")
DEVICE = "cpu" if os.environ.get("TRITON_INTERPRET") == "1" else "cuda"
if DEVICE == "cuda" and not torch.cuda.is_available():
    pytest.skip("needs a CUDA device", allow_module_level=True)
pytest.importorskip("triton")
pytest.importorskip("flashinfer", reason="the layout is FlashInfer's: its index helpers are needed")

from nvfp4_moe import batch, call_kernel, layer, run_routed  # noqa: E402
from sglang_moe_reference import flashinfer_kernels as kernels  # noqa: E402
from sglang_moe_reference import nvfp4, nvfp4_triton  # noqa: E402
from sglang_moe_reference.environment import WORKSPACE_MB  # noqa: E402

ON_GPU = pytest.mark.skipif(DEVICE == "cpu", reason="needs a CUDA device")
MIB = 1 << 20

# experts, hidden, intermediate, gated, tokens, top_k
SMALL = [
    (3, 128, 64, True, 5, 2),
    (3, 128, 128, False, 70, 2),  # a block of 64 slots and a rest
    (2, 256, 192, True, 9, 2),  # a product over two strips, and over one and a half
]
GRID = [
    *SMALL,
    (4, 128, 128, False, 70, 3),
    (5, 384, 192, True, 33, 4),
    (2, 640, 320, True, 300, 1),
    (8, 1024, 256, True, 1, 8),
    (8, 1024, 256, True, 700, 8),
    (64, 2048, 512, True, 257, 8),
    (16, 4096, 1536, True, 64, 4),
    (384, 7168, 512, True, 16, 8),  # Kimi-K2.5 at TP=4
    (32, 7168, 2048, True, 128, 8),  # DeepSeek-V3 at EP=8
    (16, 2048, 768, False, 100, 4),
]


def run_plain(monkeypatch, function, *args, **kwargs):
    with monkeypatch.context() as patched:
        patched.setattr(kernels, "_triton", lambda: None)
        return function(*args, **kwargs)


def run_in_triton(**arguments):
    """Call ``run_routed`` so that it uses the Triton kernels on any device."""
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(kernels._Layer, "has_triton_kernels", True)
        return run_routed(**arguments)


def peak_bytes(function):
    """Return the peak of allocated bytes in the second call of a function."""
    function()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    function()
    return torch.cuda.max_memory_allocated() - before


# --- fp4_quantize ----------------------------------------------------------------------------------------------------


def random_awkward_numbers(rows, columns, seed=0):
    """Return random numbers that are difficult to quantize: all magnitudes, midpoints between two codes, zeros,
    infinities and NaNs.
    """
    generator = torch.Generator(DEVICE).manual_seed(seed)
    x = torch.randn(rows, columns, device=DEVICE, generator=generator)
    x *= torch.exp(6 * torch.randn(rows, columns // 16, device=DEVICE, generator=generator)).repeat_interleave(16, 1)
    exact = torch.tensor([6, 0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5, -6, -0.25, -0.75, -1.25, -1.75, -2.5, -3.5, -5.0])
    x[0, :16] = exact
    x[-1, :16] = 0
    x[-1, 16:32] = -0.0
    return x.bfloat16()


@pytest.mark.parametrize(
    ("rows", "columns", "multiplier"),
    [
        *((1, 32, 1.0), (17, 128, 0.37), (33, 272, 250.0), (5, 1040, 1.0)),
        pytest.param(1000, 7168, 3.0, marks=ON_GPU),
    ],
)
def test_quantize_has_the_bits_of_the_plain_pytorch_function(rows, columns, multiplier):
    x = random_awkward_numbers(rows, columns)
    multiplier = torch.tensor([multiplier], device=DEVICE)
    packed, scale = nvfp4_triton.quantize(x, multiplier)
    expected, expected_scale = nvfp4.quantize(x, multiplier)
    assert torch.equal(scale.view(torch.uint8), expected_scale.view(torch.uint8))
    assert torch.equal(packed, expected)


@ON_GPU
def test_quantize_allocates_only_its_result():
    x, multiplier = torch.randn(4096, 7168, device="cuda").bfloat16(), torch.tensor([1.0], device="cuda")
    of_result = sum(t.nbytes for t in nvfp4_triton.quantize(x, multiplier))
    assert peak_bytes(lambda: nvfp4_triton.quantize(x, multiplier)) <= of_result + MIB


# --- The routed experts ----------------------------------------------------------------------------------------------


def assert_close(got, expected):
    """Check that two results are equal except for rounding.

    Sums in float32 differ slightly. In rare cases, an intermediate value is rounded to a neighbouring NVFP4 code, and
    then differs by at most a fifth. This value is one of many terms of an output element, so the element changes only a
    little.
    """
    got, expected = got.double(), expected.double()
    size = expected.square().mean().sqrt()
    assert size > 1e-3
    error = (got - expected).abs()
    # Results are bfloat16, with steps of 4e-3 to 8e-3 of an element. The interpreter truncates instead of rounding.
    assert error.square().mean().sqrt() < (1.5e-3 if DEVICE == "cuda" else 6e-3) * size
    assert (error > 8.1e-3 * expected.abs() + 1e-3 * size).double().mean() < 2e-3
    assert error.max() < 0.05 * size + 8.1e-3 * expected.abs().max()


@pytest.mark.parametrize(
    ("experts", "hidden", "intermediate", "gated", "tokens", "top_k"), SMALL if DEVICE == "cpu" else GRID
)
def test_routed_experts_equal_the_kernel_in_plain_pytorch(
    monkeypatch, experts, hidden, intermediate, gated, tokens, top_k
):
    arguments = {
        **layer(experts, hidden, intermediate, gated, DEVICE),
        **batch(tokens, experts, hidden, top_k, DEVICE),
    }
    assert_close(run_in_triton(**arguments), run_plain(monkeypatch, run_routed, **arguments))


def test_an_expert_of_another_rank_adds_nothing_to_the_result(monkeypatch):
    arguments = {**layer(4, 128, 64, device=DEVICE), **batch(40, 8, 128, 3, DEVICE)}
    arguments |= {"num_experts": 8, "local_expert_offset": 2, "local_num_experts": 4}
    ids, _ = kernels._unpack_topk(arguments["topk_ids"])
    assert not bool(((ids >= 2) & (ids < 6)).all())
    assert_close(run_in_triton(**arguments), run_plain(monkeypatch, run_routed, **arguments))


def test_a_result_depends_on_the_token_alone():
    tokens, hidden, intermediate = (150, 256, 128) if DEVICE == "cuda" else (12, 128, 64)
    shared = layer(6, hidden, intermediate, device=DEVICE)
    arguments = batch(tokens, 6, hidden, 2, DEVICE)
    whole = run_in_triton(**shared, **arguments)
    order = torch.randperm(tokens, generator=torch.Generator().manual_seed(3)).to(DEVICE)
    for chosen in (order, order[: tokens // 2], order[-1:]):
        part = {k: v[chosen].contiguous() if isinstance(v, torch.Tensor) else v for k, v in arguments.items()}
        assert torch.equal(run_in_triton(**shared, **part), whole[chosen])


def test_the_order_of_a_tokens_experts_does_not_matter():
    shared, arguments = layer(4, 128, 64, device=DEVICE), batch(3, 4, 128, 4, DEVICE)
    for tensor in shared.values():
        if isinstance(tensor, torch.Tensor):
            tensor[1] = tensor[0]
    # The first two terms cancel out, so that terms which are added between them lose their last bits.
    weights = torch.tensor([2.0**20, -(2.0**20), 0.7, 0.3], device=DEVICE).bfloat16().view(torch.int16).int()
    packed = (torch.tensor([0, 1, 2, 3], dtype=torch.int32, device=DEVICE) << 16) | (weights & 0xFFFF)
    given = [packed[list(order)].expand(3, 4).contiguous() for order in ((0, 1, 2, 3), (2, 0, 3, 1), (1, 3, 2, 0))]
    first, *others = [run_in_triton(**shared, **{**arguments, "topk_ids": ids}) for ids in given]
    assert first.abs().max() > 0.01
    assert all(torch.equal(first, other) for other in others)


def test_computing_in_passes_and_strips_gives_the_same_bits(monkeypatch):
    tokens, hidden = (200, 384) if DEVICE == "cuda" else (130, 128)  # the minimum: 128 tokens and 64 columns at a time
    shared, arguments = layer(2, hidden, 64, device=DEVICE), batch(tokens, 2, hidden, 1, DEVICE)
    expected = run_in_triton(**shared, **arguments)
    run = nvfp4_triton.run_experts
    monkeypatch.setattr(nvfp4_triton, "run_experts", lambda *a, **k: run(*a, **k, scratch_bytes=1))
    assert torch.equal(run_in_triton(**shared, **arguments), expected)


@ON_GPU
def test_a_captured_kernel_can_be_replayed_with_another_routing():
    """A CUDA graph of the kernels can be captured, and replayed with another routing. The test covers the kernel with
    the final sum and without it (``do_finalize``).
    """
    shared, first = layer(32, 1024, 256), batch(40, 32, 1024, 4)
    buffers: dict[str, Any] = {k: v.clone() if isinstance(v, torch.Tensor) else v for k, v in first.items()}
    output = torch.empty(40, 1024, dtype=torch.bfloat16, device="cuda")

    def run_both_kernels():
        run_routed(**shared, **buffers, output=output)
        return call_kernel(**shared, **buffers, do_finalize=False)

    run_both_kernels()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        rows, weights, row_of = run_both_kernels()
    for seed in (5, 6):
        other = batch(40, 32, 1024, 4, seed=seed)
        for name, value in other.items():
            if isinstance(value, torch.Tensor):
                buffers[name].copy_(value)
        output.zero_()
        graph.replay()
        expected = run_routed(**shared, **other)
        assert torch.equal(output, expected)
        by_hand = (rows[row_of.long()].view(40, 4, -1).float() * weights.float().unsqueeze(-1)).sum(1)
        # These rows are bfloat16, but the kernel sums float32 rows. Each of the four terms is rounded once more.
        size = expected.float().square().mean().sqrt()
        assert (by_hand - expected.float()).square().mean().sqrt() < 4e-3 * size


@ON_GPU
def test_scratch_is_bounded_and_no_weights_are_decoded():
    shared, arguments = layer(64, 7168, 512), batch(16384, 64, 7168, 8)
    output = torch.empty(16384, 7168, dtype=torch.bfloat16, device="cuda")
    # Memory for index lists: a few int64 per token and expert, and the workspace of their sorts.
    most = nvfp4_triton.SCRATCH_BYTES + 16 * MIB
    assert peak_bytes(lambda: run_routed(**shared, **arguments, output=output)) < most


@ON_GPU
def test_the_kernel_allocates_a_workspace_of_the_given_size(monkeypatch):
    monkeypatch.setenv(WORKSPACE_MB.name, "96")
    shared, arguments, before = layer(4, 256, 64), batch(4, 4, 256, 2), torch.cuda.memory_allocated()
    assert peak_bytes(lambda: run_routed(**shared, **arguments)) >= 96 * MIB
    assert torch.cuda.memory_allocated() - before < 96 * MIB


# --- FlashInfer's own ------------------------------------------------------------------------------------------------


@ON_GPU
@pytest.mark.parametrize("shape", [(128, 4), (256, 448), (1024, 32), (7168, 32), (128, 7), (100, 8)])
def test_interleave_equals_flashinfers_kernel(shape):
    import flashinfer

    scales = torch.randint(0, 256, shape, dtype=torch.uint8, device="cuda")
    theirs = flashinfer.nvfp4_block_scale_interleave(scales)
    assert torch.equal(kernels.nvfp4_block_scale_interleave(scales), theirs.view(torch.uint8).flatten())


@ON_GPU
@pytest.mark.skipif(
    DEVICE == "cuda" and torch.cuda.get_device_capability() < (10, 0),
    reason="FlashInfer's fp4_quantize returns garbage below compute capability 10.0 (no FP4 conversions)",
)
@pytest.mark.parametrize("swizzled", [False, True])
def test_quantize_nearly_equals_flashinfers_kernel(swizzled):
    import flashinfer

    x = torch.randn(512, 2048, device="cuda").bfloat16()
    scale = nvfp4.global_scale_for(x).reshape(1)
    ours, our_scale = kernels.fp4_quantize(x, scale, is_sf_swizzled_layout=swizzled)
    theirs, their_scale = flashinfer.fp4_quantize(x, scale, is_sf_swizzled_layout=swizzled)
    assert torch.equal(our_scale.flatten(), their_scale.view(torch.uint8).flatten())
    # The kernels' reciprocals are approximate, so a value on a boundary may be rounded to the other code.
    assert (ours != theirs.view(torch.uint8).view_as(ours)).double().mean() < 1e-3
