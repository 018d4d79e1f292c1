"""mori-input-truncation on the engine's own ``MoriEPMoE``, ``MoriEPDispatcher`` and batch padding (up to 0.5.12.post1).

Every rank is a thread with its own layer. AITER's kernel and MoRI's transport are the reference ones.
"""

from __future__ import annotations

import random
import threading
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any

import mori_kernels as reference
import pytest
import torch
from conftest import installed
from harness import padded_tokens
from sglang_moe_patches.changes import mori_input_truncation as mori
from sglang_moe_patches.changes.mori_input_truncation import hooks
from sglang_moe_patches.changes.mori_input_truncation.policy import BOUND, LIMIT
from sglang_moe_patches.core import log
from sglang_moe_patches.core.patch import Status, probe
from share import cases

pytestmark = pytest.mark.every_release

RANKS, EXPERTS, TOP_K, HIDDEN, INTERMEDIATE, PER_RANK = 4, 8, 2, 128, 8, 16
BUFFER = RANKS * PER_RANK
CASES = cases(5_000)
here = threading.local()


@pytest.fixture(autouse=True)
def _in_the_layer():
    if hooks.layer_class().__name__ != "MoriEPMoE":
        pytest.skip("this engine release has no layer of its own for MoRI (test_mori_runner.py)")


class Group:
    """The engine caches MoRI operations by group: ranks in one process must not share it."""

    def __init__(self, real: Any) -> None:
        self.cpu_group, self.device_group = real.cpu_group, real.device_group


@dataclass
class Ranks:
    """The layers of all ranks, and what the engine announces to them."""

    layers: list[Any]
    attn_tp: int

    def everywhere(self, work: Callable[[int, Any], Any]) -> list[Any]:
        """``work(rank, layer)`` on a thread for each rank; an exception is raised here."""
        results: list[Any] = [None] * RANKS

        def play(rank: int) -> None:
            here.rank, here.attn_tp = rank, self.attn_tp
            try:
                with torch.no_grad():
                    results[rank] = work(rank, self.layers[rank])
            except BaseException as error:
                results[rank] = error
                reference.leave()

        threads = [threading.Thread(target=play, args=(rank,)) for rank in range(RANKS)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        failures = [result for result in results if isinstance(result, BaseException)]
        # The others are only told that a rank is gone.
        for failure in sorted(failures, key=lambda failure: isinstance(failure, threading.BrokenBarrierError)):
            raise failure
        return results


@pytest.fixture
def ranks(engine, monkeypatch):
    """Makes the layers of all ranks, by the engine's own constructor, with what is patched right now."""
    from sglang.srt.distributed import parallel_state
    from sglang.srt.layers import dp_attention
    from sglang.srt.layers.moe import initialize_moe_config
    from sglang.srt.layers.moe.ep_moe.layer import MoriEPMoE
    from sglang.srt.layers.moe.fused_moe_triton import layer as fused_moe
    from sglang.srt.layers.moe.token_dispatcher import moriep

    settings = {"moe_a2a_backend": "mori", "deepep_mode": "normal", "moe_runner_backend": "triton"}
    before = {name: getattr(engine.server_args, name) for name in settings}
    monkeypatch.setenv("SGLANG_MORI_NUM_MAX_DISPATCH_TOKENS_PER_RANK", str(PER_RANK))
    for name in (LIMIT.name, BOUND.name):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(log, "_logged", set())
    reference.stand_in(lambda *a: monkeypatch.setattr(*a, raising=False), monkeypatch.setitem)
    reference.forget_networks()
    moriep.init_mori_op.cache_clear()
    groups = [Group(parallel_state.get_tp_group()) for _ in range(RANKS)]
    for module in (fused_moe, moriep):
        monkeypatch.setattr(module, "get_moe_expert_parallel_world_size", lambda: RANKS)
        monkeypatch.setattr(module, "get_moe_expert_parallel_rank", lambda: here.rank)
    monkeypatch.setattr(fused_moe, "get_tp_group", lambda: groups[here.rank])
    monkeypatch.setattr(dp_attention, "get_attention_tp_size", lambda: here.attn_tp)
    monkeypatch.setattr(dp_attention, "get_attention_dp_rank", lambda: here.rank // here.attn_tp)
    monkeypatch.setattr(dp_attention, "_ATTN_DP_SIZE", RANKS)
    wrapper = dp_attention._DpGatheredBufferWrapper
    for name in ("_global_num_tokens", "_local_dp_buffer_len", "_global_dp_buffer_len", "_is_extend_in_batch"):
        monkeypatch.setattr(wrapper, name, None, raising=False)

    def make(attn_tp: int = 1, mode: str = "normal", dispatch_dtype: str | None = None, **environment: int) -> Ranks:
        monkeypatch.setattr(dp_attention, "_ATTN_DP_SIZE", RANKS // attn_tp)
        for name, value in (settings | {"deepep_mode": mode}).items():
            setattr(engine.server_args, name, value)
        initialize_moe_config(engine.server_args)
        with monkeypatch.context() as patch:
            for name, number in environment.items():
                patch.setenv(name, str(number))

            def layer(rank: int) -> Any:
                here.rank, here.attn_tp = rank, attn_tp
                made = MoriEPMoE(
                    num_experts=EXPERTS,
                    top_k=TOP_K,
                    hidden_size=HIDDEN,
                    intermediate_size=INTERMEDIATE,
                    layer_id=0,
                    params_dtype=torch.bfloat16,
                )
                generator = torch.Generator().manual_seed(rank)
                for weight in (made.w13_weight, made.w2_weight):
                    weight.data.copy_(torch.randn(weight.shape, generator=generator))
                if dispatch_dtype is not None:
                    weight_dtype = {"fp8": torch.float8_e4m3fn, "fp4": torch.float4_e2m1fn_x2}[dispatch_dtype]
                    made.dispatcher.set_quant_config({"weight_dtype": weight_dtype})
                return made

            return Ranks([layer(rank) for rank in range(RANKS)], attn_tp)

    yield make
    monkeypatch.undo()
    for name, value in before.items():
        setattr(engine.server_args, name, value)
    initialize_moe_config(engine.server_args)


def announce(monkeypatch: Any, counts: list[int], attn_tp: int, extend: bool) -> list[int]:
    """The engine's own preparation of a forward; gives the padded rows of each data-parallel rank."""
    here.rank, here.attn_tp = 0, attn_tp
    return padded_tokens(monkeypatch, counts, attn_tp, extend)


def routing(rows: int, generator: torch.Generator, skewed: bool) -> tuple[torch.Tensor, torch.Tensor]:
    favour = torch.ones(EXPERTS)
    if skewed:
        favour[:TOP_K] += 100
    ids = torch.multinomial(favour.expand(rows, -1), TOP_K, generator=generator) if rows else torch.zeros(0, TOP_K)
    return ids.to(torch.int32), torch.rand(rows, TOP_K, generator=generator)


def inputs(padded: list[int], attn_tp: int, seed: int, skewed: bool = False) -> list[tuple[torch.Tensor, ...]]:
    """Each rank's share of the rows: hidden states, ids and weights."""
    generator = torch.Generator().manual_seed(seed)
    made = []
    for rank in range(RANKS):
        rows = padded[rank // attn_tp] // attn_tp
        ids, weights = routing(rows, generator, skewed)
        made.append((torch.randn(rows, HIDDEN, generator=generator).bfloat16(), ids, weights))
    return made


def forward(layers: Ranks, given: list[tuple[torch.Tensor, ...]]) -> list[torch.Tensor]:
    """``MoriEPMoE.forward`` on all ranks at once."""
    for network in reference.networks():
        network.generator.manual_seed(0)

    def work(rank: int, layer: Any) -> torch.Tensor:
        hidden, ids, weights = given[rank]
        return layer(hidden, SimpleNamespace(topk_ids=ids, topk_weights=weights))

    return layers.everywhere(work)


@pytest.fixture
def kernel(monkeypatch, ranks):
    """The arguments of every call of AITER's kernel."""
    from sglang.srt.layers.moe.ep_moe import layer

    calls = []

    def recording(**kwargs):
        calls.append(kwargs)
        return reference.fused_moe(**kwargs)

    monkeypatch.setattr(layer, "fused_moe", recording)
    return calls


def equal(a: list[torch.Tensor], b: list[torch.Tensor]) -> bool:
    return all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


def test_the_change_supports_this_engine():
    assert probe(mori.CHANGE).status is Status.HARDENED


@pytest.mark.parametrize("mode", ["normal", "low_latency"])
@pytest.mark.parametrize("dispatch_dtype", [None, "fp8", "fp4"])
def test_the_engines_forward_gives_the_same_with_a_quarter_of_the_rows(
    ranks, kernel, monkeypatch, mode, dispatch_dtype
):
    """Normal and low-latency dispatch, bf16, FP8 and FP4 rows."""
    padded = announce(monkeypatch, [4, 2, 4, 3], attn_tp=1, extend=False)
    assert padded == [4, 4, 4, 4]
    given = inputs(padded, 1, seed=1)
    options = {"mode": mode, "dispatch_dtype": dispatch_dtype}
    stock = forward(ranks(**options), given)
    assert [len(call["hidden_states"]) for call in kernel] == [BUFFER] * RANKS
    assert all(output.isfinite().all() for output in stock)
    kernel.clear()
    with installed(mori.CHANGE):
        assert equal(forward(ranks(**options, **{BOUND.name: 1}), given), stock)
    assert len(kernel) == RANKS
    for call in kernel:
        cut = [call["hidden_states"], call["topk_ids"], call["topk_weight"]]
        if dispatch_dtype is not None:
            cut.append(call["a1_scale"])
        assert [len(tensor) for tensor in cut] == [16] * len(cut)
        assert (call["a1_scale"] is None) == (dispatch_dtype is None)


def test_unset_or_zero_leaves_the_engine_alone(ranks, kernel, monkeypatch):
    from sglang.srt.layers.moe.token_dispatcher.moriep import MoriEPNormalDispatchOutput

    announce(monkeypatch, [4, 4, 4, 4], attn_tp=1, extend=False)
    received = reference.Network(RANKS, EXPERTS // RANKS, PER_RANK).dispatch(
        [reference.Sent(h, i, w) for h, i, w in inputs([4] * 4, 1, seed=2)]
    )[0]
    dispatched = MoriEPNormalDispatchOutput(
        received.rows, None, received.ids, received.weights, received.count, received.ids[:4], None, torch.bfloat16
    )
    for environment in ({}, {LIMIT.name: 0, BOUND.name: 0}):
        with installed(mori.CHANGE):
            layer = ranks(**environment).layers[0]
            assert layer.mori_moe_max_input_tokens == 0
            kernel.clear()
            layer.run_moe_core(dispatched)
        (call,) = kernel
        assert call["hidden_states"] is dispatched.hidden_states
        assert call["topk_ids"] is dispatched.topk_ids
        assert call["topk_weight"] is dispatched.topk_weights
        assert call["num_local_tokens"] is dispatched.num_recv_tokens_per_expert
        assert not hasattr(layer, hooks._POLICY)


@pytest.mark.compatibility
def test_a_small_limit_loses_tokens_with_the_engines_cut_and_none_with_ours(ranks, monkeypatch, caplog):
    padded = announce(monkeypatch, [8, 8, 8, 8], attn_tp=1, extend=True)
    given = inputs(padded, 1, seed=3)
    stock = forward(ranks(), given)
    engines = forward(ranks(**{LIMIT.name: 3}), given)
    assert not equal(engines, stock)
    assert sum(network.lost_rows for network in reference.networks()) > 0
    with installed(mori.CHANGE):
        layers = ranks(**{LIMIT.name: 3})
        assert [layer.mori_moe_max_input_tokens for layer in layers.layers] == [0] * RANKS
        for _ in range(2):
            assert equal(forward(layers, given), stock)
    assert caplog.text.count(f"{LIMIT.name}=3 is less than the 32 rows") == 1


def test_an_unprovable_limit_stops_the_forward(ranks, monkeypatch):
    """Each rank knows its own count alone: ``--moe-dense-tp-size 1 --enable-dp-lm-head``."""
    from sglang.srt.layers import dp_attention

    given = inputs([8] * 4, 1, seed=3)
    stock = forward(ranks(), given)
    dp_attention.set_dp_buffer_len(8, 8, True, [8])
    with installed(mori.CHANGE):
        assert equal(forward(ranks(**{LIMIT.name: 32}), given), stock)
        layers = ranks(**{LIMIT.name: 3})
        with pytest.raises(RuntimeError, match=f"more rows than {LIMIT.name}"):
            forward(layers, given)


def test_capture_sees_static_shapes_that_hold_for_every_replay(ranks, kernel, monkeypatch):
    """What the graph runner announces while it captures: the padded batch, and no counts."""
    from sglang.srt.layers import dp_attention

    with installed(mori.CHANGE):
        layers = ranks(**{BOUND.name: 1})
        dp_attention.set_dp_buffer_len(8 * RANKS, 8, True)
        for seed, skewed in enumerate([False, True]):
            forward(layers, inputs([8] * 4, 1, seed, skewed))
    assert {len(call["hidden_states"]) for call in kernel} == {8 * RANKS}
    assert max(int(call["num_local_tokens"]) for call in kernel) <= 8 * RANKS


def test_no_row_is_lost_in_random_forwards(ranks, monkeypatch):
    """The engine's ``run_moe_core`` and padding, uneven and idle ranks, three layouts, limits to twice the buffer."""
    from sglang.srt.layers import dp_attention
    from sglang.srt.layers.moe.token_dispatcher.moriep import MoriEPLLDispatchOutput, MoriEPNormalDispatchOutput

    seen: Counter[str] = Counter()
    stock = ranks().layers
    with installed(mori.CHANGE):
        ours = {attn_tp: ranks(attn_tp, **{BOUND.name: 1}).layers for attn_tp in (1, 2, 4)}
        for seed in range(CASES):
            draw = random.Random(seed)
            attn_tp = draw.choice([1, 2, 4])
            counts = [draw.choice([0, draw.randint(0, PER_RANK), PER_RANK // 2]) for _ in range(RANKS // attn_tp)]
            if not sum(counts):
                counts[0] = 1
            padded = announce(monkeypatch, counts, attn_tp, extend=draw.random() < 0.5)
            given = inputs(padded, attn_tp, seed, skewed=draw.random() < 0.5)
            limit = draw.choice([0, draw.randint(1, 2 * BUFFER), draw.randint(1, 8)])
            if draw.random() < 0.2:  # nothing known of the others
                dp_attention.set_dp_buffer_len(padded[0], padded[0], True, padded[:1] * 5)
            kind = draw.choice([MoriEPNormalDispatchOutput, MoriEPLLDispatchOutput])
            network = reference.Network(RANKS, EXPERTS // RANKS, PER_RANK, seed=seed)
            received = network.dispatch([reference.Sent(*rows) for rows in given])

            def combined(layers, given=given, kind=kind, network=network, received=received):
                outputs = []
                for layer, buffer, (hidden, ids, weights) in zip(layers, received, given, strict=True):
                    arrived = (buffer.rows, None, buffer.ids, buffer.weights, buffer.count)
                    outputs.append(layer.run_moe_core(kind(*arrived, ids, weights, hidden.dtype)).hidden_states)
                combined = network.combine(outputs, received)
                return [rows.nan_to_num(-1e9) for rows in combined], [len(output) for output in outputs]

            untruncated, whole = combined(stock)
            assert whole == [BUFFER] * RANKS
            for layer in ours[attn_tp]:
                layer._moe_patches_mori_policy = replace(layer._moe_patches_mori_policy, limit=limit)
            try:
                truncated, rows = combined(ours[attn_tp])
            except RuntimeError as error:
                if LIMIT.name not in str(error):
                    raise
                seen["stopped"] += 1
            else:
                assert equal(truncated, untruncated), seed
                seen["cut"] += max(rows) < BUFFER
            assert network.lost_rows == 0
            if limit:
                for layer in stock:
                    layer.mori_moe_max_input_tokens = limit
                seen["lost by the engine's cut"] += not equal(combined(stock)[0], untruncated)
                for layer in stock:
                    layer.mori_moe_max_input_tokens = 0
    assert seen["cut"] > CASES // 2
    assert seen["lost by the engine's cut"] > CASES // 10
    assert seen["stopped"] > CASES // 50
