"""Tests of the stand-ins for FlashInfer's TRT-LLM MoE kernels. Their results are compared with those of a simple dense
computation. The engine's own code prepares the weights."""

import ast
import importlib.util
import inspect
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any, ClassVar

import interpreted
import numpy as np
import pytest
import torch
from sglang_moe_reference import flashinfer_kernels as kernels
from sglang_moe_reference import nvfp4

flashinfer = pytest.importorskip("flashinfer")

VALUES = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, 0, -0.5, -1, -1.5, -2, -3, -4, -6])
E4M3 = torch.arange(127, dtype=torch.uint8).view(torch.float8_e4m3fn).double().numpy()
SWIGLU, RELU2 = 3, 6
BFLOAT16_ROUNDOFF = 2.0**-8  # largest relative error of rounding to bfloat16, which has 8 significant bits


@cache
def engine_function(module: str, name: str) -> Callable[..., Any]:
    """Return a function of the installed engine, from a module in ``sglang/srt/layers``.

    Importing the module needs the CUDA driver, but the function itself does not. Its source is therefore compiled
    without the rest of the module.
    """
    spec = importlib.util.find_spec("sglang")
    if spec is None or spec.origin is None:
        pytest.skip("sglang is not installed")
    path = Path(spec.origin).parent / "srt/layers" / module
    functions = [node for node in ast.parse(path.read_text()).body if getattr(node, "name", None) == name]
    namespace: dict[str, Any] = {"torch": torch}
    exec(compile(ast.Module(functions, []), str(path), "exec"), namespace)
    function: Callable[..., Any] = namespace[name]
    return function


@pytest.fixture(autouse=True)
def interleave_on_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(flashinfer, "nvfp4_block_scale_interleave", kernels.nvfp4_block_scale_interleave)


# --- The dense computation -------------------------------------------------------------------------------------------


def dense_decode(packed: torch.Tensor, block_scale: torch.Tensor) -> np.ndarray:
    byte = packed.numpy()
    values = np.stack((VALUES[byte & 15], VALUES[byte >> 4]), -1).reshape(*byte.shape[:-1], -1)
    return values * np.repeat(block_scale.double().numpy(), 16, axis=-1)


def dense_quantize(x: np.ndarray) -> np.ndarray:
    """Round a vector to NVFP4 with a global scale of 1, and return the rounded values. Each value and scale is found by
    a search over all representable numbers."""
    blocks = x.reshape(-1, 16)
    scale = nearest(np.minimum(np.abs(blocks).max(1) / 6, 448.0), E4M3)[:, None]
    scaled = np.clip(blocks / np.where(scale == 0, np.inf, scale), -6, 6)
    return (nearest(scaled.ravel(), VALUES).reshape(blocks.shape) * scale).ravel()


def silu_gate(up: np.ndarray, gate: np.ndarray) -> np.ndarray:
    return gate / (1 + np.exp(-gate)) * up


def nearest(x: np.ndarray, table: np.ndarray) -> np.ndarray:
    """Return the nearest number of ``table`` for each number in ``x``. A tie goes to the number with the even code,
    because ``argmin`` returns the first minimum."""
    even_first = np.concatenate((table[::2], table[1::2]))
    return even_first[np.abs(even_first[None] - x[:, None]).argmin(1)]


@dataclass
class Layer:
    """Layer of random experts in three forms: as in a checkpoint (``stored``), as the engine prepares them for the
    kernel (``prepared``), and as float64 matrices for comparison (``dense``)."""

    experts: int = 4
    hidden: int = 256
    intermediate: int = 128
    gated: bool = True
    seed: int = 0
    stored: tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor] = field(init=False)
    dense: dict[str, np.ndarray] = field(init=False)
    prepared: dict[str, torch.Tensor] = field(init=False)
    multiplier_of_tokens: ClassVar = 448.0

    def __post_init__(self) -> None:
        generator = torch.Generator().manual_seed(self.seed)
        rows = self.intermediate * (2 if self.gated else 1)
        # Blocks of 16 values have different magnitudes, so that wrong block scales change the result.
        w13 = torch.randn(self.experts, rows, self.hidden, generator=generator) / self.hidden**0.5
        w2 = torch.randn(self.experts, self.hidden, self.intermediate, generator=generator) / self.intermediate**0.5
        w13 *= torch.rand(self.experts, rows, self.hidden // 16, generator=generator).repeat_interleave(16, -1) * 3
        w2 *= torch.rand(self.experts, self.hidden, self.intermediate // 16, generator=generator).repeat_interleave(
            16, -1
        )
        w13_packed, w13_scale = nvfp4.quantize(w13, nvfp4.global_scale_for(w13))
        w2_packed, w2_scale = nvfp4.quantize(w2, nvfp4.global_scale_for(w2))
        self.stored = w13_packed, w13_scale, w2_packed, w2_scale
        # Each expert has other scales, so that a scale of another expert changes the result.
        spread = torch.rand(self.experts, generator=generator) + 0.5
        alpha1 = spread / nvfp4.global_scale_for(w13) / 448
        alpha2 = spread.flip(0) / nvfp4.global_scale_for(w2)
        multiplier = 300.0
        self.dense = {
            "w13": dense_decode(w13_packed, w13_scale),
            "w2": dense_decode(w2_packed, w2_scale),
            "alpha1": alpha1.double().numpy(),
            "alpha2": (alpha2 / multiplier).double().numpy(),
            "multiplier": np.array(multiplier),
        }
        self.prepared = self.prepared_weights() | {
            "output1_scale_gate_scalar": alpha1,
            # The engine's ``g1_scale_c``. Without a gate, the kernel applies the first GEMM's scale only before the
            # activation.
            "output1_scale_scalar": alpha1 * multiplier if self.gated else torch.full_like(alpha1, multiplier),
            "output2_scale_scalar": alpha2 / multiplier,
        }

    def prepared_weights(self) -> dict[str, torch.Tensor]:
        """Return the weights as the installed engine's own function prepares them."""
        prepare = engine_function("quantization/utils.py", "prepare_static_weights_for_trtllm_fp4_moe")
        w13, w13_scale, w2, w2_scale = self.stored
        sizes = self.hidden, self.intermediate, self.experts
        names = ("gemm1_weights", "gemm1_weights_scale", "gemm2_weights", "gemm2_weights_scale")
        return dict(zip(names, prepare(w13, w2, w13_scale, w2_scale, *sizes, is_gated=self.gated), strict=True))

    def tokens(self, n: int, seed: int = 1) -> dict[str, torch.Tensor]:
        x = torch.randn(n, self.hidden, generator=torch.Generator().manual_seed(seed)).bfloat16()
        packed, scales = kernels.fp4_quantize(x, torch.tensor(self.multiplier_of_tokens), is_sf_swizzled_layout=False)
        return {"hidden_states": packed, "hidden_states_scale": scales.view(torch.float8_e4m3fn)}

    def expect_one(self, x: np.ndarray, expert: int) -> np.ndarray:
        """Return one expert's output for one token, computed with the dense weights.

        :param x: the token's hidden state, [hidden].
        :returns: float64 [hidden].
        """
        y = self.dense["w13"][expert] @ x * self.dense["alpha1"][expert]
        gated, multiplier = self.gated, self.dense["multiplier"]
        act = silu_gate(y[: self.intermediate], y[self.intermediate :]) if gated else np.maximum(y, 0) ** 2
        act = dense_quantize(act * multiplier) / multiplier
        return multiplier * self.dense["alpha2"][expert] * (self.dense["w2"][expert] @ act)

    def expect(self, tokens: dict[str, torch.Tensor], ids: torch.Tensor, weights: torch.Tensor) -> np.ndarray:
        """Return the layer's output, computed with the dense weights: float64 [tokens, hidden]. Ids of experts outside
        the layer are skipped."""
        x = dense_decode(tokens["hidden_states"], tokens["hidden_states_scale"])
        out = np.zeros((len(x), self.hidden))
        for token in range(len(x)):
            for expert, weight in zip(ids[token].tolist(), weights[token].tolist(), strict=True):
                if 0 <= expert < self.experts:
                    out[token] += weight * self.expect_one(x[token], expert)
        return out

    def call(self, tokens: dict[str, torch.Tensor], **arguments: Any) -> torch.Tensor:
        return self.call_stand_in(tokens, **arguments)[0]

    def call_stand_in(self, tokens: dict[str, torch.Tensor], **arguments: Any) -> list[torch.Tensor]:
        """Call a stand-in with keyword arguments, as the engine does. One of two arguments selects the stand-in:

        - ``routing_logits``: ``trtllm_fp4_block_scale_moe``. It chooses the experts of each token itself.
        - ``topk_ids``: ``trtllm_fp4_block_scale_routed_moe``. The caller has chosen the experts of each token.
        """
        nothing = ("routing_bias", "routed_scaling_factor", "gemm1_bias", "gemm1_alpha", "gemm1_beta")
        named: dict[str, Any] = {
            **dict.fromkeys((*nothing, "gemm1_clamp_limit", "gemm2_bias")),
            **{"n_group": 0, "topk_group": 0, "routing_method_type": 1, "local_expert_offset": 0},
            **dict.fromkeys(("num_experts", "local_num_experts"), self.experts),
            "intermediate_size": self.intermediate,
            "activation_type": SWIGLU if self.gated else RELU2,
            **tokens,
            **self.prepared,
            **arguments,
        }
        if "routing_logits" in named:
            return kernels.trtllm_fp4_block_scale_moe(**named)
        ids = named["topk_ids"]
        named.setdefault("top_k", (ids if isinstance(ids, torch.Tensor) else ids[0]).shape[1])
        return kernels.trtllm_fp4_block_scale_routed_moe(**named)


def skip_without(function: str, parameter: str) -> None:
    if parameter not in kernels._signature_of(function).parameters:
        pytest.skip(f"{function} of this FlashInfer has no {parameter}")


def routing(n: int, experts: int, top_k: int, seed: int = 2) -> tuple[torch.Tensor, torch.Tensor]:
    """Return random expert ids (int32, distinct for each token) and their bfloat16 weights, both [n, top_k]."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.rand(n, experts, generator=generator).argsort(-1)[:, :top_k].int()
    return ids, torch.rand(n, top_k, generator=generator).bfloat16()


def pack(ids: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    return (ids.int() << 16) | weights.bfloat16().view(torch.int16).int()


def assert_close(got: torch.Tensor, expected: np.ndarray) -> None:
    assert got.dtype == torch.bfloat16
    # The result is rounded to bfloat16 (rtol), and float32 sums may cancel (atol).
    np.testing.assert_allclose(
        got.double().numpy(), expected, rtol=BFLOAT16_ROUNDOFF, atol=1e-5 * np.abs(expected).max()
    )


LAYERS: dict[str, dict[str, Any]] = {
    "gated": {},
    "gated-uneven": {"experts": 3, "hidden": 384, "intermediate": 192, "seed": 5},
    "relu2": {"gated": False},
    "relu2-uneven": {"gated": False, "experts": 3, "hidden": 128, "intermediate": 384},
}


@pytest.mark.every_release
class TestRouted:
    @pytest.mark.parametrize("sizes", LAYERS.values(), ids=LAYERS)
    @pytest.mark.parametrize(("n", "top_k"), [(1, 1), (33, 3)])
    def test_the_result_equals_the_dense_computation(self, sizes: dict[str, Any], n: int, top_k: int) -> None:
        layer = Layer(**sizes)
        tokens = layer.tokens(n)
        ids, weights = routing(n, layer.experts, top_k)
        assert_close(layer.call(tokens, topk_ids=pack(ids, weights)), layer.expect(tokens, ids, weights))

    def test_two_expert_parallel_ranks_compute_their_own_experts(self) -> None:
        """Each of two ranks must compute only its own four of eight experts. Rank 0 has the expert ids 0
        to 3, and rank 1 has the expert ids 4 to 7."""
        tokens = Layer().tokens(12)
        ids, weights = routing(12, 8, 3)
        ids[4, 1] = -1  # padding: the slot has no expert
        ids[5] = torch.tensor([0, 1, 2])  # token 5 has no expert on the second rank
        for rank in range(2):
            layer = Layer(seed=rank)
            output = torch.full((12, 256), float("nan"), dtype=torch.bfloat16)
            arguments = {"num_experts": 8, "local_expert_offset": 4 * rank, "output": output}
            assert layer.call(tokens, topk_ids=pack(ids, weights), **arguments) is output
            assert_close(output, layer.expect(tokens, ids - 4 * rank, weights))
        assert output[5].eq(0).all()  # zeros, not the NaN that the buffer had before


def route_by_loops(
    logits: np.ndarray, bias: np.ndarray, top_k: int, method: int, groups: int, keep: int, factor: float
) -> tuple[list[int], list[float]]:
    """Return one token's experts and their weights, computed from sigmoid scores with plain loops. Other routing
    methods are tested in ``test_reference_oracle.py``."""
    experts = range(len(logits))
    sigmoid = 1 / (1 + np.exp(-logits))
    score = sigmoid + bias
    size = len(logits) // groups
    members = [list(experts)[g * size : (g + 1) * size] for g in range(groups)]
    best = sorted(members, key=lambda group: -sum(sorted(score[e] for e in group)[-2:]))[:keep]
    chosen = sorted((e for group in best for e in group), key=lambda e: -score[e])[:top_k]
    total = 1 if method == 8 else sum(sigmoid[c] for c in chosen)
    return chosen, [factor * sigmoid[e] / total for e in chosen]


class TestSelfRouting:
    @pytest.mark.parametrize(
        ("method", "biased", "n_group", "topk_group", "factor"),
        [
            (2, True, None, None, 2.5),
            (2, False, 1, 1, None),
            (2, True, 4, 2, 2.5),
            (2, True, 2, 1, 1.0),
            (6, False, None, None, None),
            (7, True, None, None, None),
            (8, False, None, None, None),
        ],
    )
    def test_the_result_equals_the_dense_computation(
        self, method: int, biased: bool, n_group: int | None, topk_group: int | None, factor: float | None
    ) -> None:
        layer = Layer()  # has four of the eight experts
        n, top_k = 40, 3
        tokens = layer.tokens(n)
        output = torch.full((n, 256), float("nan"), dtype=torch.bfloat16)
        logits = torch.randn(n, 8, generator=torch.Generator().manual_seed(3)) * 2
        # The bias is large enough to change the chosen experts. It must not change their weights.
        bias = torch.randn(8, generator=torch.Generator().manual_seed(4)).bfloat16() if biased else None
        got = layer.call(
            tokens,
            routing_logits=logits,
            routing_bias=bias,
            top_k=top_k,
            n_group=n_group,
            topk_group=topk_group,
            routed_scaling_factor=factor,
            routing_method_type=method,
            num_experts=8,
            local_expert_offset=4,
            output=output,
        )
        assert got is output
        added = np.zeros(8) if bias is None else bias.double().numpy()
        routed = [
            route_by_loops(row, added, top_k, method, n_group or 1, topk_group or 1, factor or 1.0)
            for row in logits.double().numpy()
        ]
        ids = torch.tensor([ids for ids, _ in routed])
        weights = torch.tensor([weights for _, weights in routed], dtype=torch.float64).bfloat16()
        assert_close(got, layer.expect(tokens, ids - 4, weights))

    def test_equal_scores_go_to_the_lower_expert(self) -> None:
        layer = Layer()
        tokens = layer.tokens(3)
        got = layer.call(tokens, routing_logits=torch.zeros(3, 4), top_k=2)
        ids = torch.tensor([[0, 1]] * 3)
        assert_close(got, layer.expect(tokens, ids, torch.full((3, 2), 0.5)))


class TestLeftToBeFinalized:
    """Calls with ``do_finalize=False``, which leave the weighted sum over experts (*finalize*) to a later kernel. From
    0.5.18 on the engine makes such calls while it captures graphs."""

    def finalized(self, rows: torch.Tensor, weights: torch.Tensor, row_of: torch.Tensor) -> np.ndarray:
        """Return the weighted sum over each token's experts, [tokens, hidden].

        :param rows: outputs of single experts, in any order.
        :param weights: weight of each expert of each token, [tokens, top_k].
        :param row_of: number of the row in ``rows`` for each expert of each token, [tokens * top_k]. It is -1 if the
            expert is on another rank.
        """
        of_slots = rows.double()[row_of.long()].masked_fill((row_of < 0).unsqueeze(-1), 0)
        return (of_slots.view(*weights.shape, -1) * weights.double().unsqueeze(-1)).sum(1).numpy()

    @pytest.mark.parametrize("form", ["packed", "tuple of bfloat16", "tuple of float32"])
    def test_finalizing_by_hand_gives_the_finalized_result(self, form: str) -> None:
        layer = Layer(experts=8)
        tokens, (ids, weights) = layer.tokens(33), routing(33, 16, 3)
        given = weights.float() if "float32" in form else weights
        topk = pack(ids, weights) if form == "packed" else (ids, given)
        parallel = {"num_experts": 16, "local_expert_offset": 4, "local_num_experts": 8}
        answer = layer.call_stand_in(tokens, topk_ids=topk, do_finalize=False, **parallel)
        rows, expert_weights, row_of = answer
        assert [tensor.dtype for tensor in answer] == [torch.bfloat16, given.dtype, torch.int32]
        assert torch.equal(expert_weights, given)
        local = ((ids >= 4) & (ids < 12)).flatten()
        assert row_of.shape == (99,)
        assert torch.equal(row_of >= 0, local)
        assert row_of[local].unique().numel() == local.sum()
        assert row_of.max() < len(rows)
        assert not torch.equal(
            row_of[local], row_of[local].sort().values
        )  # not in order, so that ignoring the index gives a wrong sum

        whole = layer.call(tokens, topk_ids=topk, **parallel)
        # Without finalizing, each row is rounded before the sum. With finalizing, only the sum is rounded.
        largest = rows[row_of[local].long()].abs().max().item()
        np.testing.assert_allclose(
            self.finalized(*answer),
            whole.double().numpy(),
            rtol=BFLOAT16_ROUNDOFF,
            atol=3 * BFLOAT16_ROUNDOFF * largest,
        )

    def test_one_expert_with_weight_one_equals_the_finalized_result(self) -> None:
        layer = Layer()
        tokens, (ids, _) = layer.tokens(20), routing(20, 4, 1)
        topk = pack(ids, torch.ones(20, 1))
        rows, _, row_of = layer.call_stand_in(tokens, topk_ids=topk, do_finalize=False)
        assert torch.equal(rows[row_of.long()], layer.call(tokens, topk_ids=topk))

    def test_finalizing_by_hand_works_if_the_kernel_chooses_the_experts(self) -> None:
        layer = Layer(experts=8)
        tokens = layer.tokens(12)
        logits = torch.randn(12, 8, generator=torch.Generator().manual_seed(3)) * 2
        arguments = {"routing_logits": logits, "top_k": 3, "routing_method_type": 2, "routed_scaling_factor": 2.5}
        rows, weights, row_of = layer.call_stand_in(tokens, do_finalize=False, **arguments)
        assert weights.dtype == torch.bfloat16  # although the logits are float32
        whole = layer.call(tokens, **arguments).double().numpy()
        atol = 3 * BFLOAT16_ROUNDOFF * rows.abs().max().item()
        np.testing.assert_allclose(self.finalized(rows, weights, row_of), whole, rtol=BFLOAT16_ROUNDOFF, atol=atol)


class TestBatchInvariance:
    """A token's result has the same bits with any other tokens, at any place in the batch, and with any number of
    threads."""

    @pytest.fixture
    def threads(self) -> Iterator[None]:
        before = torch.get_num_threads()
        yield
        torch.set_num_threads(before)

    @pytest.mark.parametrize("gated", [True, False])
    def test_a_row_has_the_same_bits_with_any_number_of_rows_and_threads(self, gated: bool, threads: None) -> None:
        layer = Layer(experts=4, hidden=512, intermediate=128, gated=gated)
        tokens = layer.tokens(70)
        logits = torch.randn(70, 4, generator=torch.Generator().manual_seed(8))
        arguments: dict[str, Any] = {"top_k": 3, "routing_method_type": 2, "routed_scaling_factor": 2.5}
        together = layer.call(tokens, routing_logits=logits, **arguments)

        def some(rows: torch.Tensor | slice) -> torch.Tensor:
            chosen = {name: tensor[rows] for name, tensor in tokens.items()}
            return layer.call(chosen, routing_logits=logits[rows], **arguments)

        for rows in (slice(0, 1), slice(0, 2), slice(0, 17), slice(3, 8), slice(5, 69), slice(69, 70)):
            assert torch.equal(some(rows), together[rows]), rows
        shuffled = torch.randperm(70, generator=torch.Generator().manual_seed(9))
        assert torch.equal(some(shuffled), together[shuffled])
        torch.set_num_threads(1)
        assert torch.equal(some(slice(0, 70)), together)

    def test_float32_values_before_quantization_have_the_same_bits(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Rounding to FP4 and bfloat16 hides nearly every difference in the last bit. The test therefore compares the
        float32 values before they are quantized."""
        layer = Layer(hidden=1024)
        tokens = layer.tokens(70)
        seen: list[torch.Tensor] = []
        quantize = nvfp4.quantize
        monkeypatch.setattr(nvfp4, "quantize", lambda x, scale: (seen.append(x), quantize(x, scale))[1])

        def intermediate(rows: slice) -> torch.Tensor:
            chosen = {name: tensor[rows] for name, tensor in tokens.items()}
            n = len(chosen["hidden_states"])
            seen.clear()
            layer.call(chosen, topk_ids=pack(torch.zeros(n, 1), torch.ones(n, 1)))
            return seen[0].float()

        together = intermediate(slice(0, 70))
        for n in (1, 2, 3, 5, 8, 17, 33, 64):
            assert torch.equal(intermediate(slice(0, n)), together[:n]), n

    def test_nan_in_padding_rows_does_not_change_other_rows(self) -> None:
        """NaN in the padding rows of a batch must not change the results of the other rows."""
        layer = Layer()
        tokens = layer.tokens(4)
        ids, weights = routing(4, 4, 2)
        right = layer.call(tokens, topk_ids=pack(ids, weights))
        tokens["hidden_states_scale"][2:].view(torch.uint8).fill_(0x7F)
        got = layer.call(tokens, topk_ids=pack(ids, weights))
        assert torch.equal(got[:2], right[:2])
        assert got[2:].isnan().all()


def test_a_batch_without_tokens_has_an_empty_result() -> None:
    layer = Layer()
    tokens, topk = layer.tokens(0), pack(*routing(0, 4, 2))
    for method in (0, 1, 2):
        got = layer.call(tokens, routing_logits=torch.empty(0, 4), top_k=2, routing_method_type=method)
        assert got.shape == (0, 256)
    assert layer.call(tokens, topk_ids=topk).shape == (0, 256)
    answer = layer.call_stand_in(tokens, topk_ids=topk, do_finalize=False)
    assert [tensor.shape for tensor in answer] == [(0, 256), (0, 2), (0,)]


# --- What is refused -------------------------------------------------------------------------------------------------


SERVED = {
    "fp4_quantize": {"input", "global_scale", "is_sf_swizzled_layout", "is_global_scale_inversed", "backend"},
    "nvfp4_quantize": {"a", "a_global_sf", "sfLayout", "backend"},
    "trtllm_fp4_block_scale_moe": {*kernels._OF_LAYER, *kernels._ROUTING, "routing_logits", "num_experts", "top_k"},
    "trtllm_fp4_block_scale_routed_moe": {*kernels._OF_LAYER, *kernels._ROUTING, "topk_ids", "num_experts", "top_k"},
}
OF_ANY = {"local_expert_offset", "do_finalize", "output", "enable_pdl", "tune_max_num_tokens"}


def call_kernel(name: str, gated: bool = True, **more: Any) -> None:
    """Call the stand-in ``name`` with valid arguments. Arguments in ``more`` replace them, or are added."""
    x, multiplier = torch.zeros(2, 32).bfloat16(), torch.tensor(1.0)
    if name == "fp4_quantize":
        kernels.fp4_quantize(**{"input": x, "global_scale": multiplier, **more})
    elif name == "nvfp4_quantize":
        kernels.nvfp4_quantize(x, multiplier, **more)
    else:
        layer = Layer(gated=gated)
        routes = {"routing_logits": torch.randn(2, 4), "top_k": 2}
        route = {"topk_ids": pack(*routing(2, 4, 2))} if "routed" in name else routes
        layer.call(layer.tokens(2), **{**route, **more})


@pytest.mark.every_release
@pytest.mark.parametrize("name", SERVED)
def test_every_unknown_parameter_of_flashinfer_is_refused_by_name(name: str) -> None:
    home = flashinfer.fused_moe if name.startswith("trtllm") else flashinfer
    parameters = inspect.signature(getattr(home, name)).parameters
    for other in parameters.keys() - SERVED[name] - OF_ANY:
        if (default := parameters[other].default) is not inspect.Parameter.empty:
            call_kernel(name, **{other: default})
        with pytest.raises(NotImplementedError, match=other):
            call_kernel(name, **{other: torch.ones(3)})


LOGITS, IDS = (f"trtllm_fp4_block_scale_{name}" for name in ("moe", "routed_moe"))
NOT_DONE: list[tuple[str, dict[str, Any]]] = [
    (IDS, {"activation_type": 5}),
    (LOGITS, {"routing_method_type": 5}),
    (LOGITS, {"routing_method_type": 9}),
    (LOGITS, {"routing_bias": torch.zeros(4)}),  # the default routing method has no bias
    ("fp4_quantize", {"backend": "cutile"}),
    ("fp4_quantize", {"input": torch.zeros(2, 32)}),
    ("nvfp4_quantize", {"sfLayout": 1}),
]
DOES_NOT_FIT: list[dict[str, Any]] = [
    *({"intermediate_size": 64}, {"local_num_experts": 2}, {"output2_scale_scalar": None}, {"top_k": 1}),
    {"topk_ids": (torch.zeros(2, 2).int(), torch.zeros(2, 1))},
    {"topk_ids": (torch.zeros(2, 2).int(), torch.zeros(2, 2).half())},
    {"output": torch.empty(1, 256, dtype=torch.bfloat16)},
    {"output": torch.empty(2, 257, dtype=torch.bfloat16)},
    {"output": torch.empty(2, 256)},
    {"output": torch.empty(256, 2, dtype=torch.bfloat16).T},
    {"output": torch.empty(2, 512, dtype=torch.bfloat16)[:, :256]},
]


@pytest.mark.parametrize(("kernel", "given"), NOT_DONE)
def test_unsupported_parameters_are_refused_by_name(kernel: str, given: dict[str, Any]) -> None:
    with pytest.raises(NotImplementedError, match=list(given)[-1]):
        call_kernel(kernel, **given)


@pytest.mark.parametrize("given", DOES_NOT_FIT)
def test_inconsistent_arguments_are_refused(given: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="output must be" if "output" in given else "must be|given"):
        call_kernel(IDS, **given)


class TestInterleave:
    @pytest.mark.parametrize("shape", [(256, 12), (3, 128, 8), (130, 6), (2, 1, 1)])
    def test_every_byte_has_the_position_of_the_swizzled_layout(self, shape: tuple[int, ...]) -> None:
        generator = torch.Generator().manual_seed(0)
        scales = torch.randint(1, 256, shape, dtype=torch.uint8, generator=generator)
        got = kernels.nvfp4_block_scale_interleave(scales)
        rows, cols = -(-shape[-2] // 128) * 128, -(-shape[-1] // 4) * 4
        expected = torch.zeros(scales.numel() // (shape[-2] * shape[-1]), rows * cols, dtype=torch.uint8)
        for batch, matrix in enumerate(scales.reshape(-1, *shape[-2:]).tolist()):
            for r, row in enumerate(matrix):
                for c, value in enumerate(row):
                    tile = (r // 128) * (cols // 4) + c // 4
                    expected[batch, tile * 512 + (r % 32) * 16 + (r % 128) // 32 * 4 + c % 4] = value
        assert torch.equal(got, expected.flatten())


class TestQuantize:
    @pytest.mark.parametrize("layout", [0, 2])
    def test_both_layouts_of_block_scales_have_the_same_values(self, layout: int) -> None:
        x = torch.randn(130, 96).bfloat16()
        multiplier = nvfp4.global_scale_for(x)
        expected, expected_scale = nvfp4.quantize(x, multiplier)
        linear = expected_scale.view(torch.uint8)
        for packed, scale in (
            kernels.fp4_quantize(x, multiplier, is_sf_swizzled_layout=layout == 0),
            kernels.nvfp4_quantize(x, multiplier, layout),
        ):
            assert torch.equal(packed, expected)
            if layout == 0:
                assert scale.shape == (256, 8)
                assert torch.equal(scale.flatten(), kernels.nvfp4_block_scale_interleave(linear))
            else:
                assert torch.equal(scale, linear)

    @pytest.mark.parametrize(
        ("given", "multiplier"),
        [({}, 1.0), ({"global_scale": torch.tensor([0.25]), "is_global_scale_inversed": True}, 4.0)],
    )
    def test_the_global_scale_is_one_by_default_and_may_be_given_inverted(
        self, given: dict[str, Any], multiplier: float
    ) -> None:
        for name in given:
            skip_without("flashinfer.fp4_quantize", name)
        x = torch.randn(4, 32).bfloat16()
        got, expected = kernels.fp4_quantize(x, **given), kernels.fp4_quantize(x, torch.tensor(multiplier))
        assert all(torch.equal(a, b) for a, b in zip(got, expected, strict=True))


def test_the_triton_kernels_work_in_the_interpreter() -> None:
    pytest.importorskip("triton")
    ran, said = interpreted.run_tests(["test_reference_kernels_cuda.py"], timeout=600)
    assert ran == 11, said  # no test was skipped
