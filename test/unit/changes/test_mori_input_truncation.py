"""Tests of the change mori-input-truncation, without an engine. MoRI is an all-to-all backend. Its dispatch returns a
receive buffer of fixed size. The change lets the MoE kernel compute only the first rows of the buffer. No other row can
have received a token.
"""

from __future__ import annotations

import random
import re
import sys
from collections import Counter
from types import SimpleNamespace
from typing import NamedTuple

import mori_kernels as reference
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from sglang_moe_patches.changes import mori_input_truncation
from sglang_moe_patches.changes.mori_input_truncation import policy as policy_module
from sglang_moe_patches.changes.mori_input_truncation.bound import (
    Cut,
    Layout,
    compute_max_received_rows,
    decide_rows,
    find_rows_per_dp_rank,
    round_up_rows,
)
from sglang_moe_patches.changes.mori_input_truncation.hooks import truncate
from sglang_moe_patches.changes.mori_input_truncation.policy import BOUND, LIMIT, Policy
from sglang_moe_patches.core.patch import Plan, Skip, Status, check_environment, plan_for
from share import case_count

CASES = case_count(5_000)


class Dispatched(NamedTuple):
    """Stand-in for the output of a MoRI dispatch, with the fields of the engine's two classes for such outputs."""

    hidden_states: torch.Tensor
    hidden_states_scale: torch.Tensor | None
    topk_ids: torch.Tensor
    topk_weights: torch.Tensor
    num_recv_tokens_per_expert: torch.Tensor
    origin_topk_ids: torch.Tensor
    origin_topk_weights: torch.Tensor
    out_dtype: torch.dtype


def dp_buffer(counts=None, local=None, total=None):
    """Stand-in for the state of the engine's module ``dp_attention`` during a forward pass.

    :param counts: tokens of each data-parallel rank.
    :param local: rows of this rank's buffer.
    :param total: rows of the gathered buffer.
    """
    return SimpleNamespace(_global_num_tokens=counts, _local_dp_buffer_len=local, _global_dp_buffer_len=total)


# --- The variables ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("variable", "text", "value"),
    [
        *((LIMIT, text, int(text or 0)) for text in ("", "0", "1", "4096", " 32 ", "1_000", "+8")),
        # A stock server starts with SGLANG_MORI_RECV_BOUND=true. So a patched server must start with it, too.
        *((BOUND, text, False) for text in ("", "0", "False", "n")),
        *((BOUND, text, True) for text in ("1", "true", "True", "yes", "Y")),
    ],
)
def test_variables_accept_numbers_and_the_engines_words_for_true_and_false(variable, text, value):
    check_environment([mori_input_truncation.CHANGE], {})
    check_environment([mori_input_truncation.CHANGE], {variable.name: text})
    assert variable.read({variable.name: text}) == value
    assert not variable.read({})


@pytest.mark.parametrize(
    ("variable", "text", "expected"),
    [
        *((LIMIT, text, "0 .no limit. or a positive number of rows") for text in ("1e3", "4k", "3.5", "true")),
        *((BOUND, text, f"0 or 1, got '{text}'") for text in ("2", "-1", "on", "enabled")),
    ],
)
def test_other_values_are_refused_by_name_on_servers_with_mori(variable, text, expected, monkeypatch):
    """With an invalid value of a variable, a server with MoRI must not start. The error names the variable. A server
    without MoRI must start nevertheless, because it does not read the variable."""
    change = mori_input_truncation.CHANGE
    check_environment([change], {variable.name: text})
    monkeypatch.setenv(variable.name, text)
    without = SimpleNamespace(moe_a2a_backend="none")
    assert plan_for(change, {change.name}, without) == Plan.not_needed("--moe-a2a-backend is none")
    with pytest.raises(ValueError, match=f"{variable.name}: expected {expected}"):
        plan_for(change, {change.name}, SimpleNamespace(moe_a2a_backend="mori"))


@pytest.mark.parametrize(("ranks", "low_latency", "runs"), [(8, False, False), (16, False, True), (16, True, False)])
def test_internode_kernels_are_detected_from_ranks_and_mode(ranks, low_latency, runs, monkeypatch):
    utils = SimpleNamespace(get_deepep_mode=lambda: SimpleNamespace(enable_low_latency=lambda: low_latency))
    monkeypatch.setitem(sys.modules, "sglang.srt.layers.moe.utils", utils)
    assert policy_module._runs_internode(SimpleNamespace(moe_ep_size=ranks)) == runs


def test_the_change_is_not_needed_without_mori_or_without_a_variable(monkeypatch):
    monkeypatch.delenv(LIMIT.name, raising=False)
    monkeypatch.delenv(BOUND.name, raising=False)
    skip = mori_input_truncation.CHANGE.skip
    assert skip(SimpleNamespace(moe_a2a_backend="deepep")) == Skip("--moe-a2a-backend is deepep")
    server = SimpleNamespace(moe_a2a_backend="mori")
    plan = Plan.skipped(skip(server))
    assert plan.status is Status.OFF
    assert "neither" in plan.reason
    for name in (LIMIT.name, BOUND.name):
        monkeypatch.setenv(name, "1")
        assert skip(server) is None
        monkeypatch.delenv(name)


# --- The bound -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("sent", "counts", "layout", "bound"),
    [
        (8, [8, 4, 0, 2], Layout(4), 14),
        (0, [8, 0, 0, 2], Layout(4, dp_rank=1), 10),
        # Two data-parallel ranks have four attention-TP ranks each. The ranks send either a quarter of their batch or
        # all of it. The number of rows that this rank sends shows which.
        (4, [16, 8], Layout(8, attn_tp=4), 24),
        (16, [16, 8], Layout(8, attn_tp=4), 96),
        (5, [16, 8], Layout(8, attn_tp=4), 96),
        # A rank without rows does not know whether the other ranks send a share of their batch, so it assumes whole
        # batches.
        (0, [16, 0], Layout(8, attn_tp=4, dp_rank=1), 64),
        # Context parallelism may split a batch unevenly.
        (4, [8, 8], Layout(4, attn_cp=2), 32),
        # All ranks have the same batch, because there is one data-parallel rank.
        (4, [32], Layout(8, attn_tp=8), 32),
        (32, [32], Layout(8, attn_tp=8), 256),
        (4, None, Layout(8, attn_tp=8), 40),
        (4, None, Layout(1), 4),
        # No bound can be proved.
        (8, None, Layout(4), None),
        (4, None, Layout(4, attn_cp=4), None),
        (8, [8], Layout(4), None),
        (9, [8, 8, 8, 8], Layout(4), None),
        (1, [1, 1], Layout(6, attn_tp=4), None),
    ],
)
def test_the_bound_counts_every_row_that_the_ranks_may_send(sent, counts, layout, bound):
    assert compute_max_received_rows(sent, counts, layout, 10_000) == bound
    assert compute_max_received_rows(sent, counts, layout, 7) == (None if bound is None else min(bound, 7))


@pytest.mark.parametrize(
    ("arguments", "overlap", "rows"),
    [
        (([3, 0, 5], 0, 8, 3), False, (3, 0, 5)),
        (([3, 0, 5], 0, 8, 3), True, (3, 0, 5)),  # the counts are of the whole batch, although two-batch overlap is on
        (([3], 3, 3, 3), False, None),  # without gathering, only this rank's count is known
        (([3], 3, 3, 1), False, (3,)),
        ((None, 4, 12, 3), False, (4, 4, 4)),  # a graph is captured that all ranks replay together
        ((None, 4, 4, 3), False, None),  # a graph is captured that each rank replays by itself
        ((None, 4, None, 3), False, None),
        ((None, 4, 12, 3), True, None),  # it may be a sub-batch of two-batch overlap
        ((None, 0, 0, 3), False, None),  # an empty sub-batch
        ((None, 4, None, 1), True, (4,)),
        ((None, None, None, 1), False, None),
    ],
)
def test_rows_of_other_ranks_are_known_only_from_counts_or_a_common_graph(arguments, overlap, rows):
    assert find_rows_per_dp_rank(*arguments, two_batch_overlap=overlap) == rows


@given(st.integers(1, 1 << 20))
def test_rounding_up_costs_less_than_a_sixteenth_and_keeps_the_power_of_two(rows):
    up = round_up_rows(rows)
    assert rows <= up <= 1.0625 * rows
    assert (up - 1).bit_length() == (rows - 1).bit_length()


def test_rounded_numbers_of_rows_have_few_values():
    assert len({round_up_rows(rows) for rows in range(1, 32_769)}) <= 32 + 16 * 10


@given(st.none() | st.integers(0, 5_000), st.integers(0, 10_000), st.integers(1, 5_000), st.booleans())
def test_rows_are_never_below_a_bound_nor_beyond_the_buffer(bound, limit, buffer_rows, recv_bound):
    bound = None if bound is None else min(bound, buffer_rows)
    rows, needs_assertion, is_raised = decide_rows(bound, limit, buffer_rows, recv_bound=recv_bound)
    assert 1 <= rows <= buffer_rows
    if not (limit or recv_bound):
        assert (rows, needs_assertion, is_raised) == Cut(buffer_rows, False, False)
    elif bound is None:
        assert rows == min(limit or buffer_rows, buffer_rows)
        assert needs_assertion == (rows < buffer_rows)
        assert not is_raised
    else:
        assert max(bound, 1) <= rows <= max(1, 1.0625 * bound)
        assert not needs_assertion
        assert is_raised == (0 < limit < bound)
        assert rows <= max(limit, bound, 1) or not limit


# --- Real rows between simulated ranks -------------------------------------------------------------------------------


class Case:
    """Random forward pass on ranks in a random layout. The batches are padded, split among ranks and counted as in the
    engine."""

    def __init__(self, seed: int) -> None:
        draw = random.Random(seed)
        self.attn_tp, self.attn_cp = draw.choice([1, 1, 2, 4]), draw.choice([1, 1, 1, 2])
        self.dp_ranks, self.shards = draw.choice([1, 2, 3, 4]), self.attn_tp * self.attn_cp
        self.ranks = self.dp_ranks * self.shards
        counts = [draw.choice([0, draw.randint(0, 8), 8]) for _ in range(self.dp_ranks)]
        counts = [-(-n // self.shards) * self.shards for n in counts]
        # Kinds of token counts that a rank knows. A rank knows the counts of all ranks, padded alike ("max_len") or
        # separately ("sum_len"), or the size of a graph that all ranks replay ("graph"). With the other kinds, it knows
        # only its own count, or no count.
        self.kind = draw.choice(["max_len", "sum_len", "graph", "own_count", "own_graph", "sub_batch", "nothing"])
        self.two_batch_overlap = self.kind == "sub_batch" or draw.random() < 0.1
        used = list(counts)
        if self.kind == "max_len":
            counts = used = [max(counts)] * self.dp_ranks
        elif self.kind == "graph":
            counts = [max(counts) + self.shards * draw.randint(1, 2)] * self.dp_ranks
        self.counts, scattered = counts, draw.random() < 0.8
        # A batch in a captured graph has padding rows. They go to no rank, or to any rank.
        tp = self.attn_tp if scattered else 1
        used_rows, self.sent = ([n[rank // self.shards] // tp for rank in range(self.ranks)] for n in (used, counts))
        if self.kind == "nothing" and scattered:  # without padding, the shares of ranks differ by one row
            shares = torch.empty(max(counts) + draw.randint(0, 3)).tensor_split(self.attn_tp)
            self.sent = used_rows = [len(shares[rank % self.attn_tp]) for rank in range(self.ranks)]
        experts_per_rank, top_k = draw.randint(1, 3), draw.randint(1, 3)
        favour = torch.ones(self.ranks * experts_per_rank)
        if draw.random() < 0.5:
            favour[: draw.randint(1, len(favour))] += 50
        padding_routes, top_k = draw.random() < 0.5, min(top_k, len(favour))
        generator = torch.Generator().manual_seed(seed)

        def send(rows: int, used: int) -> reference.Sent:
            ids = torch.empty(0, top_k)
            if rows:
                ids = torch.multinomial(favour.expand(rows, -1), top_k, generator=generator)
            if not padding_routes:
                ids[used:] = -1
            return reference.Sent(torch.zeros(rows, 1), ids)

        longest = max(1, *self.sent) + draw.choice([0, 5, 16])
        self.buffer_rows = self.ranks * longest
        network = reference.Network(self.ranks, experts_per_rank, longest, seed=seed)
        received = network.dispatch([send(*rows) for rows in zip(self.sent, used_rows, strict=True)])
        self.arrived = [int(buffer.count) for buffer in received]

    def bound(self, rank: int) -> int | None:
        mine = self.counts[rank // self.shards]
        known = {
            "max_len": (self.counts, mine, sum(self.counts)),
            "sum_len": (self.counts, mine, sum(self.counts)),
            "graph": (None, mine, mine * self.dp_ranks),
            "own_count": ([mine], mine, mine),
            "own_graph": (None, mine, mine),
            "sub_batch": (None, mine, None),
            "nothing": (None, None, None),
        }[self.kind]
        counts = find_rows_per_dp_rank(*known, self.dp_ranks, two_batch_overlap=self.two_batch_overlap)
        layout = Layout(self.ranks, self.attn_tp, self.attn_cp, rank // self.shards)
        return compute_max_received_rows(self.sent[rank], counts, layout, self.buffer_rows)


def test_no_more_rows_arrive_than_the_bound_in_random_layouts():
    cases: Counter[str] = Counter()
    for seed in range(CASES):
        case = Case(seed)
        for rank, arrived in enumerate(case.arrived):
            bound = case.bound(rank)
            assert bound is None or arrived <= bound, (seed, rank)
            cases["not provable" if bound is None else "reached" if arrived == bound > 0 else "below"] += 1
    assert min(cases["not provable"], cases["below"]) > CASES
    assert cases["reached"] > CASES // 10


# --- The wiring ------------------------------------------------------------------------------------------------------


def buffers(sent=4, received=4) -> Dispatched:
    return Dispatched(
        torch.rand(64, 8),
        torch.rand(64, 2),
        torch.zeros(64, 2, dtype=torch.int32),
        torch.rand(64, 2),
        torch.tensor([received], dtype=torch.int32),
        torch.zeros(sent, 2, dtype=torch.int64),
        torch.rand(sent, 2),
        torch.bfloat16,
    )


def test_more_rows_than_an_unprovable_limit_stop_the_forward(caplog):
    policy, state = Policy(Layout(4), 5, True), dp_buffer([4], 4, 4)
    assert len(truncate(buffers(received=5), policy, state).hidden_states) == 5
    with pytest.raises(RuntimeError, match=re.escape(f"more rows than {LIMIT.name} allows (5)")):
        truncate(buffers(received=6), policy, state)
    assert len(caplog.records) == 1
    assert "device-side assertion ends this process" in caplog.text


NO_ASSERTIONS = Policy(Layout(4), 5, False, has_assertions=False)
DYNAMIC_CHUNKS = {"limit": 0, "recv_bound": True, "unreliable_reason": "--enable-dynamic-chunking"}


@pytest.mark.parametrize(
    ("policy", "counts", "sent", "rows", "expected_message"),
    [
        (NO_ASSERTIONS, [4], 4, 64, "is not applied"),  # this PyTorch would not detect an exceeded limit
        (Policy(Layout(4), 0, True), [4], 4, 64, "is unknown"),
        # This argument makes the counts of other ranks unreliable. Only this rank's own count is used.
        (Policy(Layout(4), **DYNAMIC_CHUNKS), [4, 0, 0, 0], 4, 64, "is unknown"),
        (Policy(Layout(4, attn_tp=4), **DYNAMIC_CHUNKS), [4], 1, 4, ""),
        (Policy(Layout(4, attn_tp=4), **DYNAMIC_CHUNKS, has_stale_counts=True), [4], 1, 8, ""),
    ],
)
def test_rows_that_may_be_needed_are_not_cut(caplog, policy, counts, sent, rows, expected_message):
    whole = buffers(sent=sent)
    cut = truncate(whole, policy, dp_buffer(counts, 4, 4))
    assert len(cut.hidden_states) == rows
    assert (cut is whole) == (rows == 64)
    assert expected_message in caplog.text


def test_nothing_is_cut_with_internode_kernels(caplog):
    state = dp_buffer([4], 4, 4)
    received = buffers(received=5)
    assert truncate(received, Policy(Layout(4), 5, True), state) is not received
    assert truncate(received, Policy(Layout(4), 5, True, has_unproven_layout=True), state) is received
    assert caplog.text.count("with MoRI's InterNode kernels, received rows") == 1


def test_no_forward_reads_the_device(monkeypatch):
    """A forward pass never waits for the GPU. If the number of received rows must be compared with the user's limit,
    the GPU itself compares the two numbers.

    The test makes all tensor methods fail that would wait for the GPU, such as ``item``.
    """
    whole = buffers()
    compared = []
    monkeypatch.setattr(torch, "_assert_async", lambda condition, message: compared.append(condition))
    for name in ("item", "tolist", "__bool__", "__int__", "cpu", "numpy", "to"):
        monkeypatch.setattr(torch.Tensor, name, lambda *a, _n=name, **k: pytest.fail(f"Tensor.{_n} would wait"))
    truncate(whole, Policy(Layout(4), 5, False), dp_buffer([4], 4, 4))
    truncate(whole, Policy(Layout(4), 5, True), dp_buffer([4, 4, 4, 4], 4, 16))
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
def test_builds_in_which_a_failed_assertion_ends_the_process_are_detected(hip, macros, works):
    assert policy_module.assertions_end_the_process(hip, macros) == works


# --- The reference kernels -------------------------------------------------------------------------------------------


def test_a_row_is_sent_to_a_rank_once_for_all_its_experts():
    network = reference.Network(ranks=2, experts_per_rank=4, max_rows_per_rank=3)
    ids = torch.tensor([[0, 1], [3, 4], [-1, -1]])
    rows = torch.arange(6.0).view(3, 2)
    nobody = reference.Sent(rows[:0], ids[:0], torch.ones(0, 2))
    received = network.dispatch([reference.Sent(rows, ids, torch.ones(3, 2)), nobody])
    assert [int(r.count) for r in received] == [2, 1]
    assert received[0].rows.shape == (6, 2)
    assert received[0].rows[2:].isnan().all()
    assert received[0].weights[2:].isnan().all()
    assert (received[1].ids[1:] == 4).all()  # rows that were not received have ids that look valid
    combined = network.combine([r.rows for r in received], received)
    assert torch.equal(combined[0][:2], torch.stack([rows[0], 2 * rows[1]]))
    assert combined[0][2].isnan().all()
    network.combine([received[0].rows[:1], received[1].rows], received)
    assert network.lost_rows == 1
