"""mori-input-truncation where AITER's runner cuts (releases from 0.5.13 on): the engine's layer, runner and dispatcher.

What the dispatcher hands over is made by the reference network; from ``run_moe_core`` on everything is the engine's,
down to AITER's kernel, which is the reference one. Every rank's layer runs in turn.
"""

from __future__ import annotations

import random
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from types import ModuleType, SimpleNamespace
from typing import Any

import mori_kernels as reference
import pytest
import torch
from conftest import installed
from sglang_moe_patches.changes import mori_input_truncation as mori
from sglang_moe_patches.changes.mori_input_truncation import hooks
from sglang_moe_patches.changes.mori_input_truncation.bound import Layout
from sglang_moe_patches.changes.mori_input_truncation.policy import BOUND, LIMIT, Policy, read_policy
from sglang_moe_patches.core import log
from sglang_moe_patches.core.patch import Status, probe
from share import cases

pytestmark = pytest.mark.every_release

RANKS, EXPERTS, TOP_K, HIDDEN, INTERMEDIATE, PER_RANK = 4, 8, 2, 128, 8, 16
BUFFER = RANKS * PER_RANK
CASES = cases(1_000)


@pytest.fixture(autouse=True)
def _in_the_runner(engine):
    if hooks.layer_class().__name__ == "MoriEPMoE":
        pytest.skip("this engine release cuts in its layer for MoRI (test_mori.py)")


@pytest.fixture
def rows_seen() -> list[int]:
    """The rows that AITER's kernel was given, call by call."""
    return []


@pytest.fixture
def layers(engine, monkeypatch, rows_seen) -> Iterator[list[Any]]:
    from sglang.srt.layers.moe.ep_moe import layer as layer_module
    from sglang.srt.layers.moe.moe_runner import MoeRunner, MoeRunnerConfig
    from sglang.srt.layers.moe.moe_runner.aiter import AiterMoeQuantInfo
    from sglang.srt.layers.moe.utils import MoeRunnerBackend

    for name in (LIMIT.name, BOUND.name):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(log, "_logged", set())
    modules: dict[str, Any] = reference.modules()
    for name in ("aiter.ops", "aiter.ops.flydsl", "aiter.ops.flydsl.moe_common"):
        modules[name] = ModuleType(name)
    modules["aiter.ops.flydsl.moe_common"].GateMode = None  # imported, and not used here
    for name, module in modules.items():
        monkeypatch.setitem(sys.modules, name, module)

    def kernel(hidden_states, *args, **kwargs):
        rows_seen.append(len(hidden_states))
        return reference.fused_moe(hidden_states, *args, **kwargs)

    modules["aiter.fused_moe"].fused_moe = kernel
    modules["aiter"].fused_moe = modules["aiter.fused_moe"]

    def layer(rank: int) -> Any:
        config = MoeRunnerConfig(num_experts=EXPERTS, num_local_experts=EXPERTS // RANKS, top_k=TOP_K)
        runner = MoeRunner(MoeRunnerBackend.AITER, config)
        runner.fused_func = None
        generator = torch.Generator().manual_seed(rank)
        mask = torch.zeros(EXPERTS, dtype=torch.int32)
        mask[rank * EXPERTS // RANKS : (rank + 1) * EXPERTS // RANKS] = 1
        weights = AiterMoeQuantInfo(
            w13_weight=torch.randn(EXPERTS // RANKS, 2 * INTERMEDIATE, HIDDEN, generator=generator).bfloat16(),
            w2_weight=torch.randn(EXPERTS // RANKS, HIDDEN, INTERMEDIATE, generator=generator).bfloat16(),
            expert_mask=mask,
        )
        # Its __init__ wants a GPU; what it decides is given here. With EPv2 the engine builds a plain FusedMoE.
        made = object.__new__((layer_module.DeepEPMoE, layer_module.FusedMoE)[rank % 2])
        torch.nn.Module.__init__(made)
        made.deprecate_flag = True
        made.quant_method = SimpleNamespace(apply=lambda layer, dispatch_output: runner.run(dispatch_output, weights))
        return made

    yield [layer(rank) for rank in range(RANKS)]
    announce([], None)


def announce(counts: list[int] | None, local: int | None) -> None:
    """What the engine puts down before a forward."""
    from sglang.srt.layers import dp_attention

    dp_attention.set_dp_buffer_len(sum(counts) if counts else None, local, True, counts)


def manual_cap(kind: Any, limit: int) -> dict[str, int]:
    """What the engine's dispatcher adds to its output for a limit of the user's, where it is the one who decides."""
    from sglang.srt.layers.moe.token_dispatcher import moriep

    if hooks._RECV_CAP not in kind._fields:
        return {}
    impl = SimpleNamespace(_manual_recv_cap=limit, _trim_recv=False, _get_physical_recv_rows=lambda: BUFFER)
    return {hooks._RECV_CAP: moriep._MoriEPDispatcherImplBase._select_recv_cap(impl)}


Core = Callable[[list[Any], int], tuple[list[torch.Tensor], list[int]]]


def exchange(padded: list[int], attn_tp: int, seed: int, kind: Any, rows_seen: list[int]) -> tuple[Any, Core]:
    """A network after a dispatch, and what the ranks get back when their layers work on it with a limit."""
    generator = torch.Generator().manual_seed(seed)
    sent = []
    for rank in range(RANKS):
        rows = padded[rank // attn_tp] // attn_tp
        favour = torch.ones(EXPERTS)
        if seed % 2:
            favour[:TOP_K] += 100
        ids = torch.multinomial(favour.expand(rows, -1), TOP_K, generator=generator) if rows else torch.zeros(0, TOP_K)
        hidden = torch.randn(rows, HIDDEN, generator=generator).bfloat16()
        sent.append(reference.Sent(hidden, ids.to(torch.int32), torch.rand(rows, TOP_K, generator=generator)))
    network = reference.Network(RANKS, EXPERTS // RANKS, PER_RANK, seed=seed)
    received = network.dispatch(sent)

    def run(layers: list[Any], limit: int) -> tuple[list[torch.Tensor], list[int]]:
        rows_seen.clear()
        outputs = []
        for layer, buffer, mine in zip(layers, received, sent, strict=True):
            fields = dict(
                hidden_states=buffer.rows,
                hidden_states_scale=None,
                topk_ids=buffer.ids,
                topk_weights=buffer.weights,
                num_recv_tokens_per_expert=buffer.count,
                origin_topk_ids=mine.ids,
                origin_topk_weights=mine.weights,
                out_dtype=torch.bfloat16,
                **manual_cap(kind, limit),
            )
            outputs.append(layer.run_moe_core(kind(**fields)).hidden_states)
        combined = network.combine(outputs, received)
        return [rows.nan_to_num(-1e9) for rows in combined], list(rows_seen)

    return network, run


def equal(a: list[torch.Tensor], b: list[torch.Tensor]) -> bool:
    return all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


def kinds() -> list[Any]:
    from sglang.srt.layers.moe.token_dispatcher import moriep

    return [moriep.MoriEPNormalDispatchOutput, moriep.MoriEPLLDispatchOutput]


def with_policy(layers: list[Any], attn_tp: int = 1, **more: Any) -> None:
    for rank, layer in enumerate(layers):
        layout = Layout(ranks=RANKS, attn_tp=attn_tp, dp_rank=rank // attn_tp)
        setattr(layer, hooks._POLICY, Policy(**{"layout": layout, "limit": 0, "recv_bound": True, **more}))


def test_the_change_supports_this_engine(engine):
    assert probe(mori.CHANGE).status is Status.HARDENED


@pytest.mark.compatibility
def test_a_small_limit_loses_tokens_with_the_engines_cut_and_none_with_ours(layers, rows_seen, monkeypatch, caplog):
    for kind in kinds():
        announce([8] * 4, 8)
        network, run = exchange([8] * 4, 1, 3, kind, rows_seen)
        whole, rows = run(layers, 0)
        assert rows == [BUFFER] * RANKS
        monkeypatch.setenv(LIMIT.name, "3")
        engines, rows = run(layers, 3)
        assert rows == [3] * RANKS
        assert network.lost_rows > 0
        assert not equal(engines, whole)
        network.lost_rows = 0
        with installed(mori.CHANGE):
            with_policy(layers, limit=3)
            ours, rows = run(layers, 3)
        for layer in layers:
            delattr(layer, hooks._POLICY)
        monkeypatch.delenv(LIMIT.name)
        assert equal(ours, whole)
        assert rows == [32] * RANKS
        assert network.lost_rows == 0
    assert caplog.text.count(f"{LIMIT.name}=3 is less than the 32 rows") == 1


def test_the_provable_bound_alone_cuts_and_an_unprovable_limit_stops(layers, rows_seen, monkeypatch):
    kind = kinds()[0]
    _, run = exchange([4, 2, 4, 3], 1, 1, kind, rows_seen)
    whole, _ = run(layers, 0)
    with installed(mori.CHANGE):
        announce([4, 4, 4, 4], 4)
        with_policy(layers)
        ours, rows = run(layers, 0)
        assert equal(ours, whole)
        assert rows == [16] * RANKS
        announce([4], 4)  # nothing known of the others: the user's limit, checked on the device
        monkeypatch.setenv(LIMIT.name, "2")
        with_policy(layers, limit=2)
        with pytest.raises(RuntimeError, match=f"more rows than {LIMIT.name}"):
            run(layers, 2)
        with_policy(layers, limit=40)
        ours, rows = run(layers, 40)
        assert equal(ours, whole)
        assert rows == [40] * RANKS


def test_a_layer_decides_its_policy_by_the_engines_own_state(engine, monkeypatch):
    from sglang.srt.layers.moe import utils

    monkeypatch.setenv(LIMIT.name, "7")
    layer = SimpleNamespace(moe_ep_size=1)
    assert read_policy(layer) is None  # another all-to-all backend
    monkeypatch.setattr(utils, "get_moe_a2a_backend", lambda: utils.MoeA2ABackend.MORI)
    policy = read_policy(layer)
    assert (policy.layout, policy.limit, policy.recv_bound) == (Layout(1), 7, False)
    assert policy.unreliable is None


def backends(monkeypatch) -> Iterator[tuple[type, Policy]]:
    """With MoRI, and with its EPv2 where there is one: the layer that the engine builds, and its policy."""
    from sglang.srt.environ import envs
    from sglang.srt.layers.moe import utils
    from sglang.srt.layers.moe.ep_moe import layer as layer_module

    monkeypatch.setenv(LIMIT.name, "7")
    monkeypatch.setenv(BOUND.name, "1")
    for module in (utils, layer_module):
        monkeypatch.setattr(module, "get_moe_a2a_backend", lambda: utils.MoeA2ABackend.MORI)
    has_epv2 = hasattr(utils.MoeA2ABackend, "is_mori_epv2")
    for epv2 in ("0", "1") if has_epv2 else ("0",):
        if has_epv2:
            monkeypatch.setenv(envs.SGLANG_MORI_EP_V2.name, epv2)
        yield layer_module.get_moe_impl_class(None), read_policy(SimpleNamespace(moe_ep_size=1))


def test_every_layer_that_the_engine_builds_for_mori_goes_through_the_wrapped_one(engine, monkeypatch):
    from sglang.srt.layers.moe.ep_moe import layer as layer_module

    built = list(backends(monkeypatch))
    assert built[0][0] is layer_module.DeepEPMoE
    assert (built[0][1].recv_bound, built[0][1].raise_only) == (True, False)
    for layer, policy in built[1:]:
        assert layer is layer_module.FusedMoE
        assert (policy.limit, policy.recv_bound, policy.raise_only) == (7, False, True)
    assert all(issubclass(layer, hooks.layer_class()) for layer, _ in built)


def test_with_epv2_a_limit_is_raised_and_nothing_else_is_cut(layers, rows_seen, monkeypatch):
    kind = kinds()[0]
    announce([8] * 4, 8)
    _, run = exchange([8] * 4, 1, 3, kind, rows_seen)
    whole, _ = run(layers, 0)
    in_the_dispatcher = hooks._RECV_CAP in kind._fields
    for limit, expected in ((3, 32), (40, 40), (2 * BUFFER, BUFFER)):
        with installed(mori.CHANGE):
            with_policy(layers, limit=limit, recv_bound=False, raise_only=True)
            ours, rows = run(layers, limit)
        assert equal(ours, whole)
        assert rows == [expected if in_the_dispatcher else BUFFER] * RANKS


def test_no_row_is_lost_in_random_forwards(layers, rows_seen, monkeypatch):
    """Uneven and idle ranks, three layouts, limits up to twice the buffer, with and without counts of the others."""
    seen: Counter[str] = Counter()
    for seed in range(CASES):
        draw = random.Random(seed)
        attn_tp = draw.choice([1, 2, 4])
        counts = [draw.choice([0, draw.randint(0, PER_RANK), PER_RANK // 2]) for _ in range(RANKS // attn_tp)]
        padded = [-(-count // attn_tp) * attn_tp for count in counts]
        if not sum(padded):
            padded[0] = attn_tp
        announce(padded, padded[0])
        limit = draw.choice([0, draw.randint(1, 2 * BUFFER), draw.randint(1, 8)])
        if draw.random() < 0.2:
            announce(padded[:1] * 5, padded[0])
        network, run = exchange(padded, attn_tp, seed, draw.choice(kinds()), rows_seen)
        whole, _ = run(layers, 0)
        monkeypatch.setenv(LIMIT.name, str(limit))
        with installed(mori.CHANGE):
            with_policy(layers, attn_tp, limit=limit)
            try:
                ours, rows = run(layers, limit)
            except RuntimeError as error:
                if LIMIT.name not in str(error):
                    raise
                seen["stopped"] += 1
            else:
                assert equal(ours, whole), seed
                seen["cut"] += max(rows) < BUFFER
        for layer in layers:
            delattr(layer, hooks._POLICY)
        assert network.lost_rows == 0
        if limit:
            seen["lost by the engine's cut"] += not equal(run(layers, limit)[0], whole)
        monkeypatch.delenv(LIMIT.name)
    assert seen["cut"] > CASES // 2
    assert seen["lost by the engine's cut"] > CASES // 10
    assert seen["stopped"] > CASES // 50
