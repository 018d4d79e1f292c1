"""Tests of mori-input-truncation on the engine's MoE layers that receive their rows from MoRI. There is one layer per
rank, with stand-ins for AMD's kernels.

The change shortens the kernel's input: it removes the rows that cannot have arrived. The tests build their layers in
two ways:

- Up to 0.5.12.post1 the class ``MoriEPMoE`` removes the rows. The engine's constructor builds the layers.
- In later releases AITER's runner removes the rows, and the layer's constructor needs a GPU. The tests' layers have
  only the attributes that ``run_moe_core`` and the runner need.

Tests that call ``run_moe_core`` get the dispatch outputs from a stand-in for MoRI's network. Tests of the whole forward
pass use the engine's own dispatcher.
"""

from __future__ import annotations

import random
import sys
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from types import ModuleType, SimpleNamespace
from typing import Any

import mori_kernels as reference
import pytest
import torch
from conftest import installed
from harness import pad_tokens
from sglang_moe_patches.changes import mori_input_truncation as mori
from sglang_moe_patches.changes.mori_input_truncation import hooks
from sglang_moe_patches.changes.mori_input_truncation.bound import Layout
from sglang_moe_patches.changes.mori_input_truncation.policy import BOUND, LIMIT, Policy, read_policy
from sglang_moe_patches.core.patch import Status, probe
from share import case_count

pytestmark = pytest.mark.every_release

RANKS, EXPERTS, TOP_K, HIDDEN, INTERMEDIATE, PER_RANK = 4, 8, 2, 128, 8, 16
BUFFER = RANKS * PER_RANK
CASES = case_count(2_000)
here = threading.local()


@pytest.fixture(autouse=True)
def _environment(engine, monkeypatch):
    from sglang.srt.layers import dp_attention

    for name in (LIMIT.name, BOUND.name):
        monkeypatch.delenv(name, raising=False)
    for name in ("_global_num_tokens", "_local_dp_buffer_len", "_global_dp_buffer_len", "_is_extend_in_batch"):
        monkeypatch.setattr(dp_attention._DpGatheredBufferWrapper, name, None, raising=False)


@pytest.fixture
def require_cut_in_layer():
    if hooks.find_layer_class().__name__ != "MoriEPMoE":
        pytest.skip("this engine release has no layer of its own for MoRI")


@pytest.fixture
def require_cut_in_runner():
    if hooks.find_layer_class().__name__ == "MoriEPMoE":
        pytest.skip("this engine release cuts in its layer for MoRI")


class Group:
    """Stand-in for the process group of one rank. The engine caches MoRI operations per group, and ranks in one
    process must not share them.
    """

    def __init__(self, real: Any) -> None:
        self.cpu_group, self.device_group = real.cpu_group, real.device_group


@pytest.fixture
def kernel_calls(monkeypatch):
    """List with one entry for each call of AITER's MoE kernel: the arguments of the call, by name."""
    calls: list[dict[str, Any]] = []

    def fused_moe(hidden_states, *args, **kwargs):
        calls.append({"hidden_states": hidden_states, **kwargs})
        return reference.fused_moe(hidden_states, *args, **kwargs)

    modules: dict[str, Any] = reference.modules(fused_moe)
    for name in ("aiter.ops", "aiter.ops.flydsl", "aiter.ops.flydsl.moe_common"):
        modules[name] = ModuleType(name)
    modules["aiter.ops.flydsl.moe_common"].GateMode = None  # the engine imports it without using it
    for name, module in modules.items():
        monkeypatch.setitem(sys.modules, name, module)
    return calls


@pytest.fixture
def make_layers(engine, monkeypatch, kernel_calls) -> Iterator[Callable[..., list[Any]]]:
    """Function that returns a new layer for each rank, constructed with the patches that are installed at the call."""
    if hooks.find_layer_class().__name__ != "MoriEPMoE":
        yield lambda: [layer_with_runner(rank) for rank in range(RANKS)]
        return
    from sglang.srt.distributed import parallel_state
    from sglang.srt.layers import dp_attention
    from sglang.srt.layers.moe import initialize_moe_config
    from sglang.srt.layers.moe.ep_moe import layer as layer_module
    from sglang.srt.layers.moe.fused_moe_triton import layer as fused_moe
    from sglang.srt.layers.moe.token_dispatcher import moriep

    settings = {"moe_a2a_backend": "mori", "deepep_mode": "normal", "moe_runner_backend": "triton"}
    before = {name: getattr(engine.server_args, name) for name in settings}
    monkeypatch.setenv("SGLANG_MORI_NUM_MAX_DISPATCH_TOKENS_PER_RANK", str(PER_RANK))
    reference.forget_networks()
    moriep.init_mori_op.cache_clear()
    enums = {"QuantType": reference.QuantType, "ActivationType": reference.ActivationType}
    kernels = {"_is_hip": True, "fused_moe": sys.modules["aiter.fused_moe"].fused_moe, **enums}
    for module, names in ((layer_module, kernels), (moriep, enums | {"get_hip_quant": reference.get_hip_quant})):
        for name, value in {"_use_aiter": True, **names}.items():
            monkeypatch.setattr(module, name, value, raising=False)
    # The engine creates the expert mask on the current GPU.
    monkeypatch.setattr(torch.cuda, "current_device", lambda: "cpu")
    groups = [Group(parallel_state.get_tp_group()) for _ in range(RANKS)]
    for module in (fused_moe, moriep):
        monkeypatch.setattr(module, "get_moe_expert_parallel_world_size", lambda: RANKS)
        monkeypatch.setattr(module, "get_moe_expert_parallel_rank", lambda: here.rank)
    monkeypatch.setattr(fused_moe, "get_tp_group", lambda: groups[here.rank])
    monkeypatch.setattr(dp_attention, "get_attention_tp_size", lambda: 1)
    monkeypatch.setattr(dp_attention, "get_attention_dp_rank", lambda: here.rank)
    monkeypatch.setattr(dp_attention, "_ATTN_DP_SIZE", RANKS)

    def make(mode: str = "normal", dispatch_dtype: torch.dtype | None = None) -> list[Any]:
        for name, value in (settings | {"deepep_mode": mode}).items():
            setattr(engine.server_args, name, value)
        initialize_moe_config(engine.server_args)

        def layer(rank: int) -> Any:
            here.rank = rank
            sizes = {"num_experts": EXPERTS, "top_k": TOP_K, "hidden_size": HIDDEN, "intermediate_size": INTERMEDIATE}
            made = layer_module.MoriEPMoE(**sizes, layer_id=0, params_dtype=torch.bfloat16)
            generator = torch.Generator().manual_seed(rank)
            for weight in (made.w13_weight, made.w2_weight):
                weight.data.copy_(torch.randn(weight.shape, generator=generator))
            if dispatch_dtype is not None:
                made.dispatcher.set_quant_config({"weight_dtype": dispatch_dtype})
            return made

        return [layer(rank) for rank in range(RANKS)]

    yield make
    monkeypatch.undo()
    for name, value in before.items():
        setattr(engine.server_args, name, value)
    initialize_moe_config(engine.server_args)


def layer_with_runner(rank: int) -> Any:
    """Return MoRI's layer with AITER's runner (releases from 0.5.13 on). Every second rank has the layer for MoRI's
    second version, EPv2.
    """
    from sglang.srt.layers.moe.ep_moe import layer as layer_module
    from sglang.srt.layers.moe.moe_runner import MoeRunner, MoeRunnerConfig
    from sglang.srt.layers.moe.moe_runner.aiter import AiterMoeQuantInfo
    from sglang.srt.layers.moe.utils import MoeRunnerBackend

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
    layer = object.__new__((layer_module.DeepEPMoE, layer_module.FusedMoE)[rank % 2])
    torch.nn.Module.__init__(layer)
    layer.deprecate_flag = True
    layer.quant_method = SimpleNamespace(apply=lambda layer, dispatch_output: runner.run(dispatch_output, weights))
    return layer


@pytest.fixture
def set_limit(monkeypatch):
    """Function that sets the user's limit on the rows that the MoE kernel computes, in the layers of all ranks.

    The function's argument ``attn_tp`` chooses the code that applies the limit:

    - ``None``: the engine applies the limit.
    - A number: this package applies the limit, by the layer's :class:`Policy`. The number is the size of attention
      tensor parallelism in this policy.

    Up to 0.5.12.post1, the engine reads the limit only when it constructs a layer. The function therefore also sets the
    layer's attribute that contains the limit.
    """

    def set_limit(layers: list[Any], limit: int, attn_tp: int | None = None, **policy: Any) -> None:
        monkeypatch.setenv(LIMIT.name, str(limit))
        for rank, layer in enumerate(layers):
            if hasattr(layer, hooks._ENGINE_LIMIT):
                setattr(layer, hooks._ENGINE_LIMIT, limit if attn_tp is None else 0)
            vars(layer).pop(hooks._POLICY, None)
            if attn_tp is not None:
                layout = Layout(RANKS, attn_tp, dp_rank=rank // attn_tp)
                setattr(
                    layer, hooks._POLICY, Policy(**{"layout": layout, "recv_bound": True, **policy, "limit": limit})
                )

    return set_limit


def set_counts(counts: list[int], local: int) -> None:
    """Set the token counts of all ranks. The engine's layers read these counts in a forward pass."""
    from sglang.srt.layers import dp_attention

    dp_attention.set_dp_buffer_len(sum(counts), local, True, counts)


def output_types() -> list[Any]:
    from sglang.srt.layers.moe.token_dispatcher import moriep

    return [moriep.MoriEPNormalDispatchOutput, moriep.MoriEPLLDispatchOutput]


def random_inputs(padded: list[int], attn_tp: int, seed: int, *, skewed: bool = False) -> list[reference.Sent]:
    """Return random rows and their routing for each rank to send."""
    generator = torch.Generator().manual_seed(seed)
    favour = torch.ones(EXPERTS)
    if skewed:
        favour[:TOP_K] += 100

    def sent(rows: int) -> reference.Sent:
        ids = torch.multinomial(favour.expand(rows, -1), TOP_K, generator=generator) if rows else torch.zeros(0, TOP_K)
        hidden = torch.randn(rows, HIDDEN, generator=generator).bfloat16()
        return reference.Sent(hidden, ids.to(torch.int32), torch.rand(rows, TOP_K, generator=generator))

    return [sent(padded[rank // attn_tp] // attn_tp) for rank in range(RANKS)]


class Exchange:
    """Exchange of rows between all ranks in one forward pass: the rows that each rank sends and receives, and the
    combined results. The rows travel over ``reference.Network``, a stand-in for MoRI's network.
    """

    def __init__(
        self, sent: list[reference.Sent], kind: Any, kernel_calls: list[dict[str, Any]], seed: int = 0
    ) -> None:
        self.network = reference.Network(RANKS, EXPERTS // RANKS, PER_RANK, seed=seed)
        self.received, self.sent, self.kind, self.kernel_calls = self.network.dispatch(sent), sent, kind, kernel_calls

    def make_dispatch_output(self, rank: int) -> Any:
        """Return the dispatcher's output on a rank. In releases whose output has a field ``recv_cap``, the engine's own
        function sets the field from the user's limit.
        """
        buffer, mine = self.received[rank], self.sent[rank]
        arrived = (buffer.rows, None, buffer.ids, buffer.weights, buffer.count)
        output = self.kind(*arrived, mine.ids, mine.weights, torch.bfloat16)
        if hooks._RECV_CAP not in self.kind._fields:
            return output
        from sglang.srt.layers.moe.token_dispatcher import moriep

        limits = {"_manual_recv_cap": LIMIT.read(), "_trim_recv": False, "_get_physical_recv_rows": lambda: BUFFER}
        cap = moriep._MoriEPDispatcherImplBase._select_recv_cap(SimpleNamespace(**limits))
        return output._replace(**{hooks._RECV_CAP: cap})

    def run(self, layers: list[Any]) -> tuple[list[torch.Tensor], list[int]]:
        """Run the layers of all ranks. Return each rank's combined rows, and the number of rows that each rank's kernel
        received.
        """
        self.kernel_calls.clear()
        outputs = [
            layer.run_moe_core(self.make_dispatch_output(rank)).hidden_states for rank, layer in enumerate(layers)
        ]
        combined = self.network.combine(outputs, self.received)
        return [rows.nan_to_num(-1e9) for rows in combined], [len(call["hidden_states"]) for call in self.kernel_calls]


def equal(a: list[torch.Tensor], b: list[torch.Tensor]) -> bool:
    return all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


def test_the_change_supports_this_engine():
    assert probe(mori.CHANGE).status is Status.HARDENED


# --- The engine's own forward, and its constructor -------------------------------------------------------------------


def forward(layers: list[Any], sent: list[reference.Sent]) -> list[torch.Tensor]:
    """Run ``MoriEPMoE.forward`` on all ranks at once, each rank in a thread. Return each rank's output."""
    results: list[Any] = [None] * RANKS
    for network in reference.list_networks():
        network.generator.manual_seed(0)

    def play(rank: int) -> None:
        here.rank, mine = rank, sent[rank]
        with torch.no_grad():
            results[rank] = layers[rank](mine.rows, SimpleNamespace(topk_ids=mine.ids, topk_weights=mine.weights))

    threads = [threading.Thread(target=play, args=(rank,)) for rank in range(RANKS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return results


@pytest.mark.usefixtures("require_cut_in_layer")
@pytest.mark.parametrize("mode", ["normal", "low_latency"])
@pytest.mark.parametrize("dtype", [None, torch.float8_e4m3fn, torch.float4_e2m1fn_x2])
def test_the_engines_forward_gives_equal_results_with_a_quarter_of_the_rows(
    make_layers, kernel_calls, monkeypatch, mode, dtype
):
    """If the change is switched on, the MoE kernel computes a quarter of the receive buffer's rows, and the engine's
    forward pass gives the same results. The test covers normal and low-latency dispatch, with BF16, FP8 and FP4 rows.
    """
    padded = pad_tokens(monkeypatch, [4, 2, 4, 3], 1, extend=False)
    assert padded == [4, 4, 4, 4]
    sent = random_inputs(padded, 1, seed=1)
    stock = forward(make_layers(mode, dtype), sent)
    assert [len(call["hidden_states"]) for call in kernel_calls] == [BUFFER] * RANKS
    assert all(output.isfinite().all() for output in stock)
    kernel_calls.clear()
    monkeypatch.setenv(BOUND.name, "1")
    with installed(mori.CHANGE):
        assert equal(forward(make_layers(mode, dtype), sent), stock)
    names = ("hidden_states", "topk_ids", "topk_weight", *(["a1_scale"] if dtype is not None else []))
    assert [[len(call[name]) for name in names] for call in kernel_calls] == [[16] * len(names)] * RANKS
    assert all((call["a1_scale"] is None) == (dtype is None) for call in kernel_calls)


@pytest.mark.usefixtures("require_cut_in_layer")
@pytest.mark.parametrize("value", [None, "0"])
def test_unset_or_zero_variables_change_nothing(make_layers, kernel_calls, monkeypatch, value):
    exchange = Exchange(random_inputs([4] * 4, 1, seed=2), output_types()[0], kernel_calls)
    dispatched = exchange.make_dispatch_output(0)
    for name in (LIMIT.name, BOUND.name) if value else ():
        monkeypatch.setenv(name, value)
    with installed(mori.CHANGE):
        layer = make_layers()[0]
        layer.run_moe_core(dispatched)
    assert (getattr(layer, hooks._ENGINE_LIMIT), hasattr(layer, hooks._POLICY)) == (0, False)
    (call,) = kernel_calls
    assert call["hidden_states"] is dispatched.hidden_states
    assert call["topk_ids"] is dispatched.topk_ids
    assert call["topk_weight"] is dispatched.topk_weights
    assert call["num_local_tokens"] is dispatched.num_recv_tokens_per_expert


@pytest.mark.usefixtures("require_cut_in_layer")
def test_the_engines_own_cut_is_off_in_layers_with_a_limit(make_layers, monkeypatch):
    monkeypatch.setenv(LIMIT.name, "3")
    assert [getattr(layer, hooks._ENGINE_LIMIT) for layer in make_layers()] == [3] * RANKS
    with installed(mori.CHANGE):
        layers = make_layers()
    assert [getattr(layer, hooks._ENGINE_LIMIT) for layer in layers] == [0] * RANKS
    assert [getattr(layer, hooks._POLICY).layout for layer in layers] == [
        Layout(RANKS, dp_rank=r) for r in range(RANKS)
    ]


@pytest.mark.usefixtures("require_cut_in_runner")
def test_every_mori_layer_of_the_engine_uses_the_wrapped_class(monkeypatch):
    """All of the engine's layer classes for MoRI have the methods that the change wraps. In newer releases this
    includes the class for EPv2, the second version of MoRI's dispatch.

    The change reads each layer's settings (its policy) from the state of the engine.
    """
    from sglang.srt.environ import envs
    from sglang.srt.layers.moe import utils
    from sglang.srt.layers.moe.ep_moe import layer as layer_module

    monkeypatch.setenv(LIMIT.name, "7")
    monkeypatch.setenv(BOUND.name, "1")
    layer = SimpleNamespace(moe_ep_size=1)
    assert read_policy(layer) is None  # a server with another all-to-all backend has no policy
    for module in (utils, layer_module):
        monkeypatch.setattr(module, "get_moe_a2a_backend", lambda: utils.MoeA2ABackend.MORI)
    has_epv2 = hasattr(utils.MoeA2ABackend, "is_mori_epv2")
    if has_epv2:
        monkeypatch.setenv(envs.SGLANG_MORI_EP_V2.name, "0")
    built = [layer_module.get_moe_impl_class(None), layer_module.DeepEPMoE]
    policies = [read_policy(layer), Policy(Layout(1), 7, True)]
    if has_epv2:
        monkeypatch.setenv(envs.SGLANG_MORI_EP_V2.name, "1")
        built += [layer_module.get_moe_impl_class(None), layer_module.FusedMoE]
        policies += [read_policy(layer), Policy(Layout(1), 7, False, raise_only=True)]
    assert built[::2] == built[1::2]
    assert policies[::2] == policies[1::2]
    assert all(issubclass(one, hooks.find_layer_class()) for one in built)


# --- What a limit does -----------------------------------------------------------------------------------------------


@pytest.mark.compatibility
def test_a_small_limit_loses_tokens_with_the_engines_cut_and_none_with_ours(
    make_layers, kernel_calls, set_limit, caplog
):
    layers = make_layers()
    for kind in output_types():
        set_counts([8] * 4, 8)
        exchange = Exchange(random_inputs([8] * 4, 1, seed=3, skewed=True), kind, kernel_calls)
        set_limit(layers, 0)
        whole, rows = exchange.run(layers)
        assert rows == [BUFFER] * RANKS
        set_limit(layers, 3)
        engines, rows = exchange.run(layers)
        assert rows == [3] * RANKS
        assert exchange.network.lost_rows > 0
        assert not equal(engines, whole)
        exchange.network.lost_rows = 0
        with installed(mori.CHANGE):
            set_limit(layers, 3, attn_tp=1)
            ours, rows = exchange.run(layers)
        assert equal(ours, whole)
        assert rows == [32] * RANKS
        assert exchange.network.lost_rows == 0
    assert caplog.text.count(f"{LIMIT.name}=3 is less than the 32 rows") == 1


def test_a_provable_bound_cuts_without_a_limit_and_an_exceeded_limit_stops_the_forward(
    make_layers, kernel_calls, set_limit
):
    layers = make_layers()
    exchange = Exchange(random_inputs([4, 2, 4, 3], 1, seed=1), output_types()[0], kernel_calls)
    set_limit(layers, 0)
    whole, _ = exchange.run(layers)
    with installed(mori.CHANGE):
        set_counts([4, 4, 4, 4], 4)
        set_limit(layers, 0, attn_tp=1)
        ours, rows = exchange.run(layers)
        assert equal(ours, whole)
        assert rows == [16] * RANKS
        set_counts([4], 4)  # the other ranks' counts are unknown, so the device checks the user's limit
        set_limit(layers, 2, attn_tp=1)
        with pytest.raises(RuntimeError, match=f"more rows than {LIMIT.name}"):
            exchange.run(layers)
        set_limit(layers, 40, attn_tp=1)
        ours, rows = exchange.run(layers)
        assert equal(ours, whole)
        assert rows == [40] * RANKS


def test_captured_shapes_are_valid_for_every_replay(make_layers, kernel_calls, set_limit):
    """While the engine captures a CUDA graph, it announces the padded batch size, but not the ranks' counts of tokens.
    The change chooses a number of rows for the captured graph. This number must suffice for every replay of the graph.
    """
    from sglang.srt.layers import dp_attention

    layers = make_layers()
    dp_attention.set_dp_buffer_len(8 * RANKS, 8, True)
    with installed(mori.CHANGE):
        set_limit(layers, 0, attn_tp=1)
        for seed, skewed in enumerate([False, True]):
            exchange = Exchange(random_inputs([8] * 4, 1, seed, skewed=skewed), output_types()[0], kernel_calls)
            assert exchange.run(layers)[1] == [8 * RANKS] * RANKS
            assert max(int(received.count) for received in exchange.received) <= 8 * RANKS


@pytest.mark.usefixtures("require_cut_in_runner")
@pytest.mark.parametrize(("limit", "rows"), [(3, 32), (40, 40), (2 * BUFFER, BUFFER)])
def test_with_epv2_a_small_limit_is_raised_and_nothing_is_cut(make_layers, kernel_calls, set_limit, limit, rows):
    layers, kind = make_layers(), output_types()[0]
    set_counts([8] * 4, 8)
    exchange = Exchange(random_inputs([8] * 4, 1, seed=3), kind, kernel_calls)
    whole, _ = exchange.run(layers)
    with installed(mori.CHANGE):
        set_limit(layers, limit, attn_tp=1, recv_bound=False, raise_only=True)
        ours, seen = exchange.run(layers)
    assert equal(ours, whole)
    assert seen == [rows if hooks._RECV_CAP in kind._fields else BUFFER] * RANKS


def test_no_row_is_lost_in_random_forwards(make_layers, kernel_calls, set_limit, monkeypatch):
    """The MoE kernel computes every received row in random forward passes. If the user's limit does not permit this,
    the forward pass raises an error.

    These facts are random:

    - The ranks have different numbers of tokens, some of them none, padded as in the engine.
    - The size of attention tensor parallelism is 1, 2 or 4.
    - The user's limit is at most twice the receive buffer, or there is no limit.
    - The token counts of the other ranks are known or unknown.
    """
    seen: Counter[str] = Counter()
    layers, forwards = make_layers(), []
    for seed in range(CASES):
        draw = random.Random(seed)
        attn_tp = draw.choice([1, 2, 4])
        counts = [draw.choice([0, draw.randint(0, PER_RANK), PER_RANK // 2]) for _ in range(RANKS // attn_tp)]
        if not sum(counts):
            counts[0] = 1
        padded = [-(-count // attn_tp) * attn_tp for count in counts]
        if hasattr(layers[0], hooks._ENGINE_LIMIT):  # later releases prepare a forward pass in another way
            padded = pad_tokens(monkeypatch, counts, attn_tp, extend=draw.random() < 0.5)
        sent = random_inputs(padded, attn_tp, seed, skewed=draw.random() < 0.5)
        exchange = Exchange(sent, draw.choice(output_types()), kernel_calls, seed)
        set_limit(layers, 0)
        whole, rows = exchange.run(layers)
        assert rows == [BUFFER] * RANKS
        limit = draw.choice([0, draw.randint(1, 2 * BUFFER), draw.randint(1, 8)])
        if seed % 4 == 0:
            set_limit(layers, limit)
            seen["lost by the engine's cut"] += not equal(exchange.run(layers)[0], whole)
        known = draw.random() >= 0.2  # without counts, nothing is known about the other ranks
        forwards.append((exchange, whole, limit, attn_tp, padded if known else padded[:1] * 5))
    with installed(mori.CHANGE):
        for seed, (exchange, whole, limit, attn_tp, counts) in enumerate(forwards):
            exchange.network.lost_rows = 0
            set_counts(counts, counts[0])
            set_limit(layers, limit, attn_tp)
            try:
                ours, rows = exchange.run(layers)
            except RuntimeError as error:
                if LIMIT.name not in str(error):
                    raise
                seen["stopped"] += 1
            else:
                assert equal(ours, whole), seed
                seen["cut"] += max(rows) < BUFFER
            assert exchange.network.lost_rows == 0
    assert seen["cut"] > CASES // 2
    assert seen["lost by the engine's cut"] > CASES // 40
    assert seen["stopped"] > CASES // 50
