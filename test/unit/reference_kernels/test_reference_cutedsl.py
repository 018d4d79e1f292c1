"""Tests of FlashInfer's CuteDSL wrapper on the CPU. Stand-ins replace its kernels. Its results are compared with those
of a simple dense computation."""

import functools
import importlib
import inspect
import pkgutil
from typing import Any

import pytest
import torch
from sglang_moe_patches.changes.cutedsl_sizing.wrapper import keeps_buffers
from sglang_moe_reference import cutedsl
from sglang_moe_reference import flashinfer_kernels as kernels
from test_reference_kernels import Layer, assert_close, engine_function, routing

pytest.importorskip("flashinfer")
try:
    fused_moe = importlib.import_module("flashinfer.fused_moe.cute_dsl.fused_moe")
except ImportError:
    pytest.skip("this FlashInfer has no CuteDSL kernels here", allow_module_level=True)
from flashinfer.cute_dsl.utils import convert_sf_to_mma_layout

pytestmark = pytest.mark.every_release

KERNELS = cutedsl.kernels()
REAL = {target: pkgutil.resolve_name(target) for target in KERNELS}
GATHER, FINALIZE = (next(target for target in REAL if part in target) for part in ("_gather_", "_finalize_"))


@pytest.fixture(autouse=True)
def stand_ins(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("flashinfer.nvfp4_block_scale_interleave", kernels.nvfp4_block_scale_interleave)
    for target, kernel in KERNELS.items():
        monkeypatch.setattr(target, kernel)
    wrapper = fused_moe.CuteDslMoEWrapper
    make, core = wrapper.__init__, fused_moe._moe_core_impl
    hooks = cutedsl.ON_ONE_STREAM
    monkeypatch.setattr(wrapper, "__init__", lambda self, **arguments: hooks[INIT](make, self, **arguments))
    monkeypatch.setattr(fused_moe, "_moe_core_impl", functools.partial(hooks[CORE], core))


INIT, CORE = cutedsl.ON_ONE_STREAM


def prepare(layer: Layer) -> dict[str, torch.Tensor]:
    """Return the weights and scales of a layer as the wrapper's arguments, prepared by the engine's and FlashInfer's
    functions."""
    interleave = engine_function("moe/moe_runner/flashinfer_cutedsl.py", "interleave_w13_halves")
    w13, w13_scale, w2, w2_scale = layer.stored
    arguments = {}
    for name, weight, scale in (
        ("w1", interleave(w13), interleave(w13_scale.view(torch.uint8))),
        ("w2", w2, w2_scale.view(torch.uint8)),
    ):
        swizzled = kernels.nvfp4_block_scale_interleave(scale)
        arguments[f"{name}_weight"] = weight
        arguments[f"{name}_weight_sf"] = convert_sf_to_mma_layout(
            swizzled, m=weight.shape[1], k=weight.shape[2] * 2, num_groups=layer.experts
        )
    return arguments | {
        "w1_alpha": layer.prepared["output1_scale_gate_scalar"],
        "w2_alpha": layer.prepared["output2_scale_scalar"],
        "fc2_input_scale": torch.tensor([float(layer.dense["multiplier"])]),
    }


def make_wrapper(layer: Layer, top_k: int, max_num_tokens: int = 400, **more: Any) -> Any:
    return fused_moe.CuteDslMoEWrapper(
        **{
            "num_experts": layer.experts,
            "top_k": top_k,
            "hidden_size": layer.hidden,
            "intermediate_size": layer.intermediate,
            "use_cuda_graph": True,
            "max_num_tokens": max_num_tokens,
            "device": "cpu",
            **more,
        }
    )


def run(wrapper: Any, weights: dict[str, torch.Tensor], tokens: Any, ids: torch.Tensor, scales: torch.Tensor) -> Any:
    return wrapper.run(
        x=tokens["hidden_states"],
        x_sf=tokens["hidden_states_scale"].view(torch.uint8),
        token_selected_experts=ids,
        token_final_scales=scales.float(),
        **weights,
    )


SIZES: list[dict[str, Any]] = [{}, {"experts": 3, "hidden": 384, "intermediate": 192, "seed": 5}]


@pytest.mark.parametrize("sizes", SIZES, ids=["even", "uneven"])
@pytest.mark.parametrize("preallocated", [True, False])
# Each of 300 tokens goes to one expert. Some expert then has several tiles of tokens, and the last tile is not full.
@pytest.mark.parametrize(("n", "top_k"), [(33, 3), (300, 1)])
def test_the_result_equals_the_dense_computation(sizes: dict[str, Any], preallocated: bool, n: int, top_k: int) -> None:
    layer = Layer(**sizes)
    tokens, (ids, scales) = layer.tokens(n), routing(n, layer.experts, top_k)
    wrapper = make_wrapper(layer, top_k, use_cuda_graph=preallocated)
    got = run(wrapper, prepare(layer), tokens, ids, scales)
    assert_close(got, layer.expect(tokens, ids, scales))


def test_the_sum_over_experts_may_be_a_separate_step() -> None:
    """The stand-ins must also support FlashInfer's deterministic mode. In this mode one kernel rounds each expert's
    output, and another kernel sums the rounded outputs."""
    if "use_fused_finalize" not in inspect.signature(fused_moe.CuteDslMoEWrapper).parameters:
        pytest.skip("this FlashInfer has no deterministic mode")
    layer = Layer()
    tokens, (ids, scales) = layer.tokens(33), routing(33, layer.experts, 3)
    ids[4, 1] = -1  # padding: the slot has no expert
    wrapper = make_wrapper(layer, 3, use_fused_finalize=False)
    assert_close(run(wrapper, prepare(layer), tokens, ids, scales), layer.expect(tokens, ids, scales))


@pytest.mark.parametrize("tile", [128, 256])
def test_both_tile_sizes_give_the_same_result(tile: int) -> None:
    layer = Layer(experts=2)
    tokens, (ids, scales) = layer.tokens(300), routing(300, 2, 2)
    weights = prepare(layer)
    inputs = {"tokens": tokens, "ids": ids, "scales": scales}
    expected = run(make_wrapper(layer, 2), weights, **inputs)
    wrapper = make_wrapper(layer, 2, tile_size=tile)
    gemm = ((tile, 128), (tile // 128, 1), False)
    wrapper.run = functools.partial(wrapper.run, tactic=(tile, gemm, gemm))
    assert torch.equal(run(wrapper, weights, **inputs), expected)


def test_two_expert_parallel_ranks_compute_their_own_experts() -> None:
    """Each of two ranks must compute only its own four of eight experts. Rank 0 has the expert ids 0 to
    3, and rank 1 has the expert ids 4 to 7."""
    tokens = Layer().tokens(12)
    ids, scales = routing(12, 8, 3)
    ids[4, 1] = -1  # padding: the slot has no expert
    ids[5] = torch.tensor([0, 1, 2])  # token 5 has no expert on the second rank
    for rank in range(2):
        layer = Layer(seed=rank)
        wrapper = make_wrapper(layer, 3, num_experts=8, num_local_experts=4, local_expert_offset=4 * rank)
        got = run(wrapper, prepare(layer), tokens, ids, scales)
        assert_close(got, layer.expect(tokens, ids - 4 * rank, scales))
    assert got[5].eq(0).all()


def test_a_row_does_not_depend_on_its_batch() -> None:
    layer = Layer(experts=8)
    tokens, (ids, scales) = layer.tokens(200), routing(200, 8, 3)
    weights, wrapper = prepare(layer), make_wrapper(layer, 3)
    whole = run(wrapper, weights, tokens, ids, scales).clone()
    for rows in (slice(0, 1), slice(7, 9), slice(63, 130)):
        part = {name: tensor[rows] for name, tensor in tokens.items()}
        assert torch.equal(run(wrapper, weights, part, ids[rows], scales[rows]), whole[rows])


def test_a_batch_without_tokens_has_an_empty_result() -> None:
    layer = Layer()
    assert run(make_wrapper(layer, 2), prepare(layer), layer.tokens(0), *routing(0, 4, 2)).shape == (0, 256)


needs_buffers = pytest.mark.skipif(
    not keeps_buffers(fused_moe.CuteDslMoEWrapper), reason="this FlashInfer's wrapper keeps no buffers"
)


OUTPUTS = {"_gemm1_output": 128, "_gemm1_output_scale": 128, "_moe_output": 1}
SORTED = (
    "tile_idx_to_expert_idx",
    "tile_idx_to_mn_limit",
    "expanded_idx_to_permuted_idx",
    "permuted_idx_to_expanded_idx",
)


@needs_buffers
@pytest.mark.parametrize("name", [*OUTPUTS, *(f"out_{name}" for name in SORTED)])
def test_a_buffer_that_is_too_small_is_an_error(name: str) -> None:
    """If a buffer of the wrapper is too small, the stand-ins must fail instead of allocating a larger buffer."""
    layer = Layer(experts=2)
    weights, wrapper = prepare(layer), make_wrapper(layer, 2)
    owner = vars(wrapper) if name in OUTPUTS else wrapper._moe_sort_buffers
    owner[name] = owner[name][: OUTPUTS.get(name, 1)]
    with pytest.raises((RuntimeError, AssertionError, IndexError)):
        run(wrapper, weights, layer.tokens(300), *routing(300, 2, 2))


def test_an_output_that_is_not_zeroed_changes_the_result(monkeypatch: pytest.MonkeyPatch) -> None:
    layer = Layer()
    tokens, (ids, scales) = layer.tokens(6), routing(6, 4, 2)
    monkeypatch.setattr(FINALIZE, lambda out, **arguments: KERNELS[FINALIZE](out=out.fill_(8), **arguments))
    got = run(make_wrapper(layer, 2), prepare(layer), tokens, ids, scales)
    assert_close(got, 8 + layer.expect(tokens, ids, scales))


@pytest.mark.parametrize("target", KERNELS)
def test_a_stand_in_has_the_parameters_of_flashinfers_function(target: str) -> None:
    """A stand-in has the parameters of FlashInfer's function, with the same names, order and defaults. It may take
    keyword-only parameters as ``**options`` instead."""
    stand_in = inspect.signature(KERNELS[target]).parameters
    for position, (name, parameter) in enumerate(inspect.signature(REAL[target]).parameters.items()):
        if name not in stand_in:
            assert parameter.kind is parameter.KEYWORD_ONLY, name
            assert any(p.kind is p.VAR_KEYWORD for p in stand_in.values()), name
            continue
        assert stand_in[name].default == parameter.default, name
        assert stand_in[name].kind == parameter.kind, name
        if parameter.kind is parameter.POSITIONAL_OR_KEYWORD:
            assert list(stand_in).index(name) == position


REFUSED: list[dict[str, Any]] = [
    *({"ab_dtype": "float8_e4m3fn"}, {"sf_vec_size": 32}, {"c_dtype": "bfloat16"}, {"global_scale": None}),
    *({"gated": False}, {"swiglu_limit": 7.0}, {"a_per_token_scale": torch.ones(3)}),
]


@pytest.mark.parametrize("option", REFUSED, ids=lambda option: next(iter(option)))
def test_unsupported_options_are_refused_by_name(option: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    layer = Layer()
    monkeypatch.setattr(GATHER, lambda **arguments: KERNELS[GATHER](**{**arguments, **option}))
    with pytest.raises(NotImplementedError, match=next(iter(option))):
        run(make_wrapper(layer, 2), prepare(layer), layer.tokens(3), *routing(3, 4, 2))
