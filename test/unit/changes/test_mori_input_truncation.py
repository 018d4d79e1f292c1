"""The decisions of mori-input-truncation, as functions of plain values, and its wiring without an engine."""

from __future__ import annotations

import logging
import random
import re
from collections import Counter
from types import SimpleNamespace
from typing import Any, NamedTuple

import mori_kernels as reference
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from sglang_moe_patches.changes import mori_input_truncation
from sglang_moe_patches.changes.mori_input_truncation import hooks
from sglang_moe_patches.changes.mori_input_truncation import policy as policy_module
from sglang_moe_patches.changes.mori_input_truncation.bound import (
    Cut,
    Layout,
    decide_rows,
    max_received_rows,
    rounded,
    rows_per_dp_rank,
)
from sglang_moe_patches.changes.mori_input_truncation.hooks import truncate
from sglang_moe_patches.changes.mori_input_truncation.policy import BOUND, LIMIT, Policy
from sglang_moe_patches.core import log
from sglang_moe_patches.core.patch import Plan, Status, check_environment
from share import cases

HIDDEN, CASES = 3, cases(5_000)


@pytest.fixture(autouse=True)
def _nothing_said_yet(monkeypatch):
    monkeypatch.setattr(log, "_logged", set())


class Dispatched(NamedTuple):
    """The fields of the engine's two dispatch outputs."""

    hidden_states: torch.Tensor
    hidden_states_scale: torch.Tensor | None
    topk_ids: torch.Tensor
    topk_weights: torch.Tensor
    num_recv_tokens_per_expert: torch.Tensor
    origin_topk_ids: torch.Tensor
    origin_topk_weights: torch.Tensor
    out_dtype: torch.dtype


def announced(global_num_tokens=None, local=None, total=None):
    """What ``dp_attention`` holds during a forward."""
    return SimpleNamespace(
        _global_num_tokens=global_num_tokens, _local_dp_buffer_len=local, _global_dp_buffer_len=total
    )


# --- The variables ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("variable", "text", "value"),
    [
        *((LIMIT, text, int(text or 0)) for text in ("", "0", "1", "4096", " 32 ", "1_000", "+8")),
        # As the engine reads it: a server that starts with SGLANG_MORI_RECV_BOUND=true must start with us, too.
        *((BOUND, text, False) for text in ("", "0", "False", "n")),
        *((BOUND, text, True) for text in ("1", "true", "True", "yes", "Y")),
    ],
)
def test_values_that_are_taken(variable, text, value):
    check_environment([mori_input_truncation.CHANGE], {})
    check_environment([mori_input_truncation.CHANGE], {variable.name: text})
    assert variable.read({variable.name: text}) == value
    assert not variable.read({})


@pytest.mark.parametrize(
    ("variable", "text", "expected"),
    [
        *((LIMIT, text, "0 .no limit. or a positive number of rows") for text in ("-1", "1e3", "4k", "3.5", "true")),
        *((BOUND, text, f"0 or 1, got '{text}'") for text in ("2", "-1", "on", "enabled")),
    ],
)
def test_any_other_value_is_refused_by_its_name(variable, text, expected):
    with pytest.raises(ValueError, match=f"{variable.name}: expected {expected}"):
        check_environment([mori_input_truncation.CHANGE], {variable.name: text})


def test_not_needed_without_mori_or_without_a_variable(monkeypatch):
    monkeypatch.delenv(LIMIT.name, raising=False)
    monkeypatch.delenv(BOUND.name, raising=False)
    assert "--moe-a2a-backend is deepep" in mori_input_truncation.CHANGE.skip_reason(
        SimpleNamespace(moe_a2a_backend="deepep")
    )
    server = SimpleNamespace(moe_a2a_backend="mori")
    reason = mori_input_truncation.CHANGE.skip_reason(server)
    assert Plan.skipped(reason).status is Status.OFF
    assert "neither" in reason
    for name in (LIMIT.name, BOUND.name):
        monkeypatch.setenv(name, "1")
        assert mori_input_truncation.CHANGE.skip_reason(server) is None
        monkeypatch.delenv(name)


# --- The bound -------------------------------------------------------------------------------------------------------


def test_decode_sizes():
    """EP=8, 32 tokens on each rank, a buffer of 8 x 4096 rows."""
    bound = max_received_rows(32, [32] * 8, Layout(ranks=8), 32_768)
    assert bound == 256
    assert decide_rows(bound, 0, 32_768, recv_bound=True).rows <= 1.1 * bound
    assert decide_rows(None, 0, 32_768).rows == 32_768


@pytest.mark.parametrize(
    ("sent", "counts", "layout", "bound"),
    [
        (8, [8, 4, 0, 2], Layout(4), 14),
        (0, [8, 0, 0, 2], Layout(4, dp_rank=1), 10),
        # Two data-parallel ranks of four attention-TP ranks: each sends its share, seen by what this one sent.
        (4, [16, 8], Layout(8, attn_tp=4), 24),
        (16, [16, 8], Layout(8, attn_tp=4), 96),
        (5, [16, 8], Layout(8, attn_tp=4), 96),
        # An idle rank sees nothing of how the others split theirs.
        (0, [16, 0], Layout(8, attn_tp=4, dp_rank=1), 64),
        # Context parallelism may split unevenly.
        (4, [8, 8], Layout(4, attn_cp=2), 32),
        # One data-parallel rank: all hold the same batch.
        (4, [32], Layout(8, attn_tp=8), 32),
        (32, [32], Layout(8, attn_tp=8), 256),
        (4, None, Layout(8, attn_tp=8), 40),
        (4, None, Layout(1), 4),
        # Not provable.
        (8, None, Layout(4), None),
        (4, None, Layout(4, attn_cp=4), None),
        (8, [8], Layout(4), None),
        (9, [8, 8, 8, 8], Layout(4), None),
        (1, [1, 1], Layout(6, attn_tp=4), None),
    ],
)
def test_bound(sent, counts, layout, bound):
    assert max_received_rows(sent, counts, layout, 10_000) == bound
    assert max_received_rows(sent, counts, layout, 7) == (None if bound is None else min(bound, 7))


@pytest.mark.parametrize(
    ("arguments", "overlap", "rows"),
    [
        (([3, 0, 5], 0, 8, 3), False, (3, 0, 5)),
        (([3, 0, 5], 0, 8, 3), True, (3, 0, 5)),  # a whole batch, though sub-batches are possible
        (([3], 3, 3, 3), False, None),  # nothing gathered: its own count alone
        (([3], 3, 3, 1), False, (3,)),
        ((None, 4, 12, 3), False, (4, 4, 4)),  # capture of a graph that all ranks replay together
        ((None, 4, 4, 3), False, None),  # capture of one that each rank picks for itself
        ((None, 4, None, 3), False, None),
        ((None, 4, 12, 3), True, None),  # may be a sub-batch
        ((None, 0, 0, 3), False, None),  # an empty sub-batch
        ((None, 4, None, 1), True, (4,)),
        ((None, None, None, 1), False, None),
    ],
)
def test_what_is_known_of_the_other_ranks(arguments, overlap, rows):
    assert rows_per_dp_rank(*arguments, two_batch_overlap=overlap) == rows


@given(st.integers(1, 1 << 20))
def test_rounding_up_costs_less_than_a_sixteenth_and_keeps_the_power_of_two(rows):
    up = rounded(rows)
    assert rows <= up <= 1.0625 * rows
    assert (up - 1).bit_length() == (rows - 1).bit_length()


def test_few_sizes():
    assert len({rounded(rows) for rows in range(1, 32_769)}) <= 32 + 16 * 10


@given(st.none() | st.integers(0, 5_000), st.integers(0, 10_000), st.integers(1, 5_000), st.booleans())
def test_rows_are_never_below_a_bound_nor_beyond_the_buffer(bound, limit, buffer_rows, recv_bound):
    bound = None if bound is None else min(bound, buffer_rows)
    rows, assert_needed, raised = decide_rows(bound, limit, buffer_rows, recv_bound=recv_bound)
    assert 1 <= rows <= buffer_rows
    if not (limit or recv_bound):
        assert (rows, assert_needed, raised) == Cut(buffer_rows, False, False)
    elif bound is None:
        assert rows == min(limit or buffer_rows, buffer_rows)
        assert assert_needed == (rows < buffer_rows)
        assert not raised
    else:
        assert max(bound, 1) <= rows <= max(1, 1.0625 * bound)
        assert not assert_needed
        assert raised == (0 < limit < bound)
        assert rows <= max(limit, bound, 1) or not limit


# --- Real rows between simulated ranks -------------------------------------------------------------------------------


class Case:
    """A random forward of a random layout, as the engine pads, scatters and announces it."""

    def __init__(self, seed: int) -> None:
        draw = random.Random(seed)
        self.attn_tp, self.attn_cp = draw.choice([1, 1, 2, 4]), draw.choice([1, 1, 1, 2])
        self.dp_ranks = draw.choice([1, 2, 3, 4])
        self.ranks = self.dp_ranks * self.attn_tp * self.attn_cp
        top_k, experts_per_rank = draw.randint(1, 3), draw.randint(1, 3)
        experts = self.ranks * experts_per_rank
        top_k = min(top_k, experts)
        counts = [draw.choice([0, draw.randint(0, 8), 8]) for _ in range(self.dp_ranks)]
        align = self.attn_tp * self.attn_cp
        counts = [-(-n // align) * align for n in counts]
        # How the counts become known: padded alike, each its own, a graph's size, this rank's alone, a sub-batch.
        self.kind = draw.choice(["max_len", "sum_len", "graph", "own_count", "own_graph", "sub_batch", "nothing"])
        self.tbo = self.kind == "sub_batch" or draw.random() < 0.1
        replayed = list(counts)
        if self.kind == "max_len":
            counts = replayed = [max(counts)] * self.dp_ranks
        elif self.kind == "graph":
            counts = [max(counts) + align * draw.randint(1, 2)] * self.dp_ranks
        self.counts, self.scattered = counts, draw.random() < 0.8
        sent_rows = []
        for rank in range(self.ranks):
            rows = replayed[rank // align]
            sent_rows.append(rows // self.attn_tp if self.scattered else rows)
        # The shapes of a captured graph are those of its capture; rows of padding then route nowhere, or anywhere.
        self.shapes = [counts[rank // align] // (self.attn_tp if self.scattered else 1) for rank in range(self.ranks)]
        if self.kind == "nothing" and self.scattered:  # not padded: shares differ by a row
            uneven = max(counts) + draw.randint(0, 3)
            shares = torch.empty(uneven).tensor_split(self.attn_tp)
            self.shapes = sent_rows = [len(shares[rank % self.attn_tp]) for rank in range(self.ranks)]
        padding_routes = draw.random() < 0.5
        skewed = draw.random() < 0.5
        generator = torch.Generator().manual_seed(seed)

        def send(rank: int) -> reference.Sent:
            n = self.shapes[rank]
            favour = torch.ones(experts)
            if skewed:
                favour[: draw.randint(1, experts)] += 50
            ids = torch.multinomial(favour.expand(n, -1), top_k, generator=generator) if n else torch.empty(0, top_k)
            ids = ids.to(torch.int32)
            if not padding_routes:
                ids[sent_rows[rank] :] = -1
            rows = torch.randint(-50, 50, (n, HIDDEN), generator=generator).double()
            return reference.Sent(rows, ids, torch.randint(1, 9, (n, top_k), generator=generator).float())

        self.sent = [send(rank) for rank in range(self.ranks)]
        longest = max(self.shapes) + draw.choice([0, 5, 16])
        self.buffer_rows = max(1, self.ranks * longest)
        self.limit = draw.choice([0, draw.randint(1, 2 * self.buffer_rows), draw.randint(1, 4)])
        self.recv_bound = self.limit == 0 or draw.random() < 0.5
        self.network = reference.Network(self.ranks, experts_per_rank, max(1, longest), self.buffer_rows, seed)
        self.received = self.network.dispatch(self.sent)

    def announced(self, rank: int) -> Any:
        mine = rank // (self.attn_tp * self.attn_cp)
        rows = self.counts[mine]
        return {
            "max_len": announced(self.counts, rows, sum(self.counts)),
            "sum_len": announced(self.counts, rows, sum(self.counts)),
            "graph": announced(None, rows, rows * self.dp_ranks),
            "own_count": announced([rows], rows, rows),
            "own_graph": announced(None, rows, rows),
            "sub_batch": announced(None, rows, None),
            "nothing": announced(),
        }[self.kind]

    def policy(self, rank: int) -> Policy:
        layout = Layout(self.ranks, self.attn_tp, self.attn_cp, rank // (self.attn_tp * self.attn_cp))
        return Policy(layout, self.limit, self.recv_bound, two_batch_overlap=self.tbo)

    def dispatched(self, rank: int) -> Dispatched:
        r, s = self.received[rank], self.sent[rank]
        return Dispatched(r.rows, r.scales, r.ids, r.weights, r.count, s.ids, s.weights, torch.float64)

    def expert_outputs(self, rank: int, dispatched: Dispatched) -> torch.Tensor:
        """Each row times the sum of its local experts' weights: integers, so that any loss or mixture shows."""
        ids, weights = dispatched.topk_ids, dispatched.topk_weights.double()
        factor = ids - rank * self.network.experts_per_rank + 1
        local = (factor >= 1) & (factor <= self.network.experts_per_rank)
        valid = torch.arange(len(ids)) < dispatched.num_recv_tokens_per_expert
        total = torch.where(local, weights * factor, 0).sum(1, keepdim=True)
        return torch.where(valid[:, None], dispatched.hidden_states * total, float("nan"))

    def combined(self, cut) -> list[torch.Tensor]:
        outputs = [self.expert_outputs(rank, cut(rank, self.dispatched(rank))) for rank in range(self.ranks)]
        return self.network.combine(outputs, self.received)


def same(a: list[torch.Tensor], b: list[torch.Tensor]) -> bool:
    return all(torch.equal(x.nan_to_num(-1e9), y.nan_to_num(-1e9)) for x, y in zip(a, b, strict=True))


def test_no_row_is_lost_in_random_layouts():
    seen: Counter[str] = Counter()
    for seed in range(CASES):
        case = Case(seed)
        untruncated = case.combined(lambda rank, dispatched: dispatched)
        stopped = False

        def cut(rank, dispatched, case=case, seed=seed):
            policy = case.policy(rank)
            state = case.announced(rank)
            counts = rows_per_dp_rank(
                state._global_num_tokens,
                state._local_dp_buffer_len,
                state._global_dp_buffer_len,
                case.dp_ranks,
                two_batch_overlap=case.tbo,
            )
            bound = max_received_rows(case.shapes[rank], counts, policy.layout, case.buffer_rows)
            assert bound is None or bound >= int(dispatched.num_recv_tokens_per_expert), (seed, rank)
            seen["provable" if bound is not None else "not provable"] += 1
            result = truncate(dispatched, policy, state)
            seen["cut"] += len(result.hidden_states) < case.buffer_rows
            assert len({len(t) for t in result[:4] if t is not None}) == 1
            return result

        try:
            truncated = case.combined(cut)
        except RuntimeError as error:
            if LIMIT.name not in str(error):
                raise
            received = max(int(case.received[rank].count) for rank in range(case.ranks))
            assert received > case.limit > 0
            stopped = True
        assert stopped or same(truncated, untruncated), seed
        assert case.network.lost_rows == 0
        # The engine's own cut, in the same harness.
        if case.limit:
            lost = not same(case.combined(lambda rank, d, n=case.limit: cut_like_the_engine(d, n)), untruncated)
            assert lost or case.network.lost_rows == 0 or not any(len(s.rows) for s in case.sent)
            seen["lost by the engine"] += lost
            seen["stopped"] += stopped
    assert seen["lost by the engine"] > CASES // 10
    assert seen["provable"] > CASES
    assert seen["not provable"] > CASES
    assert seen["cut"] > CASES
    assert seen["stopped"] > 100


def cut_like_the_engine(dispatched: Dispatched, limit: int) -> Dispatched:
    return dispatched._replace(
        hidden_states=dispatched.hidden_states[:limit],
        topk_ids=dispatched.topk_ids[:limit],
        topk_weights=dispatched.topk_weights[:limit],
    )


# --- The wiring ------------------------------------------------------------------------------------------------------


def buffers(rows=64, sent=4, received=4, scale=True) -> Dispatched:
    return Dispatched(
        torch.rand(rows, 8),
        torch.rand(rows, 2) if scale else None,
        torch.zeros(rows, 2, dtype=torch.int32),
        torch.rand(rows, 2),
        torch.tensor([received], dtype=torch.int32),
        torch.zeros(sent, 2, dtype=torch.int64),
        torch.rand(sent, 2),
        torch.bfloat16,
    )


@pytest.mark.parametrize("scale", [True, False])
def test_all_four_tensors_are_cut_and_nothing_is_copied(scale):
    whole = buffers(scale=scale)
    cut = truncate(whole, Policy(Layout(4), 0, True), announced([4, 4, 4, 4], 4, 16))
    assert type(cut) is Dispatched
    for name in ("hidden_states", "topk_ids", "topk_weights", *(["hidden_states_scale"] if scale else [])):
        assert len(getattr(cut, name)) == 16
        assert getattr(cut, name).data_ptr() == getattr(whole, name).data_ptr()
    assert scale or cut.hidden_states_scale is None
    assert all(a is b for a, b in zip(cut[4:], whole[4:], strict=True))


def test_nothing_to_cut_gives_the_same_object():
    whole = buffers(rows=16)
    assert truncate(whole, Policy(Layout(4), 0, True), announced([4, 4, 4, 4], 4, 16)) is whole
    assert truncate(whole, Policy(Layout(4), 99, False), announced(None, 4, None)) is whole


class Layer:
    """Stands in for ``MoriEPMoE``: as the engine's, it cuts by an attribute."""

    def __init__(self, limit: int = 5) -> None:
        self.mori_moe_max_input_tokens = limit

    def run_moe_core(self, dispatch_output):
        if self.mori_moe_max_input_tokens > 0:
            return cut_like_the_engine(dispatch_output, self.mori_moe_max_input_tokens)
        return dispatch_output


def patched(policy, state):
    class Patched(Layer):
        __init__ = hooks._make_init(Layer.__init__, lambda layer: policy)
        run_moe_core = hooks._make_run_moe_core(Layer.run_moe_core, state)

    return Patched


def test_the_engines_own_cut_is_off_while_ours_is_on():
    layer = patched(Policy(Layout(4), 5, False), announced([4, 4, 4, 4], 4, 16))()
    assert layer.mori_moe_max_input_tokens == 0
    assert len(layer.run_moe_core(buffers()).hidden_states) == 16


def test_without_a_variable_the_layer_is_left_alone():
    layer = patched(Policy(Layout(4), 0, False), announced())(limit=0)
    whole = buffers()
    assert vars(layer) == {"mori_moe_max_input_tokens": 0}
    assert layer.run_moe_core(whole) is whole


def test_a_small_limit_is_raised_with_one_warning(caplog):
    layer = patched(Policy(Layout(4), 5, False), announced([4, 4, 4, 4], 4, 16))()
    with caplog.at_level(logging.WARNING):
        for _ in range(3):
            layer.run_moe_core(buffers())
    assert len(caplog.records) == 1
    assert f"{LIMIT.name}=5 is less than the 16 rows" in caplog.text


def test_an_unprovable_limit_stops_what_exceeds_it(caplog):
    policy, state = Policy(Layout(4), 5, True), announced([4], 4, 4)
    assert len(truncate(buffers(received=5), policy, state).hidden_states) == 5
    with pytest.raises(RuntimeError, match=re.escape(f"more rows than {LIMIT.name} lets the MoE kernel see (5)")):
        truncate(buffers(received=6), policy, state)
    assert len(caplog.records) == 1
    assert "device-side assertion ends this process" in caplog.text


@pytest.mark.parametrize(
    ("policy", "counts", "said"),
    [
        (Policy(Layout(4), 5, False, assertions=False), [4], "is not applied"),  # it would not be seen to be exceeded
        (Policy(Layout(4), 0, True), [4], "is not known"),
        # Counts that the server may get wrong are not used.
        (Policy(Layout(4), 0, True, unreliable="--enable-dynamic-chunking"), [4, 0, 0, 0], "is not known"),
    ],
)
def test_nothing_is_cut_that_may_be_needed(caplog, policy, counts, said):
    whole = buffers(received=50)
    assert truncate(whole, policy, announced(counts, 4, 4)) is whole
    assert said in caplog.text


def test_one_ranks_own_count_is_used_whatever_the_server_gets_wrong():
    one_rank = Policy(Layout(4, attn_tp=4), 0, True, unreliable="--enable-dynamic-chunking")
    assert len(truncate(buffers(sent=1), one_rank, announced([4], 4, 4)).hidden_states) == 4


def test_no_forward_reads_the_device(monkeypatch):
    """Whatever would wait for a GPU is an error: the received count is only ever compared on the device."""
    whole = buffers()
    compared = []
    monkeypatch.setattr(torch, "_assert_async", lambda condition, message: compared.append(condition))
    for name in ("item", "tolist", "__bool__", "__int__", "cpu", "numpy", "to"):
        monkeypatch.setattr(torch.Tensor, name, lambda *a, _n=name, **k: pytest.fail(f"Tensor.{_n} would wait"))
    truncate(whole, Policy(Layout(4), 5, False), announced([4], 4, 4))
    truncate(whole, Policy(Layout(4), 5, True), announced([4, 4, 4, 4], 4, 16))
    monkeypatch.undo()
    assert len(compared) == 1
    assert compared[0].shape == (1,)


ROCM = "#if !defined(C10_USE_ROCM_KERNEL_ASSERT) && defined(USE_ROCM)\n#define CUDA_KERNEL_ASSERT(cond)"


@pytest.mark.parametrize(
    ("hip", "macros", "works"),
    [
        (None, "", True),
        (
            "6.4",
            ROCM + " \\\n  if C10_UNLIKELY (!(cond)) {    \\\n    abort();                     \\\n  }\n#else\n",
            True,
        ),
        ("6.2", ROCM + "\n#define SYCL_KERNEL_ASSERT(cond) abort()\n", False),
        ("6.2", ROCM + "\n#define C10_USE_ROCM_KERNEL_ASSERT\n", True),
        ("6.2", ROCM + "\n/* #undef C10_USE_ROCM_KERNEL_ASSERT */\n", False),
        ("6.2", "", False),
    ],
)
def test_whether_a_failed_assertion_ends_the_process(hip, macros, works):
    assert policy_module.assertions_end_the_process(hip, macros) == works


# --- The reference kernels -------------------------------------------------------------------------------------------


def test_a_row_travels_to_a_rank_once_however_many_of_its_experts_are_there():
    network = reference.Network(ranks=2, experts_per_rank=4, max_rows_per_rank=3)
    ids = torch.tensor([[0, 1], [3, 4], [-1, -1]])
    rows = torch.arange(6.0).view(3, 2)
    nobody = reference.Sent(rows[:0], ids[:0], torch.ones(0, 2))
    received = network.dispatch([reference.Sent(rows, ids, torch.ones(3, 2)), nobody])
    assert [int(r.count) for r in received] == [2, 1]
    assert received[0].rows.shape == (6, 2)
    assert received[0].rows[2:].isnan().all()
    assert received[0].weights[2:].isnan().all()
    assert (received[1].ids[1:] == 4).all()  # valid-looking
    combined = network.combine([r.rows for r in received], received)
    assert torch.equal(combined[0][:2], torch.stack([rows[0], 2 * rows[1]]))
    assert combined[0][2].isnan().all()
    network.combine([received[0].rows[:1], received[1].rows], received)
    assert network.lost_rows == 1


def test_buffers_overflow_loudly():
    sent = reference.Sent(torch.ones(2, 1), torch.zeros(2, 1), torch.ones(2, 1))
    with pytest.raises(RuntimeError, match="sends 2 rows"):
        reference.Network(1, 1, 1).dispatch([sent])
    with pytest.raises(RuntimeError, match="receives 2 rows"):
        reference.Network(1, 1, 2, buffer_rows=1).dispatch([sent])
