"""How many rows of MoRI's receive buffer can hold tokens, and where to cut it: pure functions of plain values."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import NamedTuple


class Layout(NamedTuple):
    """How the ranks of one expert-parallel group share the attention; the same for every forward.

    :param ranks: the expert-parallel size.
    :param attn_tp: attention tensor parallelism. ``attn_tp * attn_cp`` ranks work on one data-parallel rank's tokens.
    :param attn_cp: attention context parallelism.
    :param dp_rank: this rank's data-parallel rank.
    """

    ranks: int
    attn_tp: int = 1
    attn_cp: int = 1
    dp_rank: int = 0

    @property
    def dp_ranks(self) -> int:
        """Data-parallel ranks; 0: the sizes do not divide, and no bound follows.

        Computed, not asked for: the engine reports a data-parallel size of 1 while some draft models run.
        """
        groups, rest = divmod(self.ranks, self.attn_tp * self.attn_cp)
        return 0 if rest else groups


def rows_per_dp_rank(
    counts: Sequence[int] | None,
    local_rows: int | None,
    global_rows: int | None,
    dp_ranks: int,
    *,
    two_batch_overlap: bool = False,
) -> tuple[int, ...] | None:
    """The most rows that each data-parallel rank brings into this forward; ``None``: the CPU does not know.

    :param counts: ``dp_attention``'s ``global_num_tokens``: a padded count for each data-parallel rank, in both of the
        engine's padding modes (``MAX_LEN``: all alike; ``SUM_LEN``: each its own, 0 for an idle rank). This rank's
        alone where the engine gathers nothing between them (``--moe-dense-tp-size 1`` with ``--enable-dp-lm-head``).
    :param local_rows: ``dp_attention``'s local buffer length: this rank's padded rows.
    :param global_rows: ``dp_attention``'s global buffer length.
    :param two_batch_overlap: a sub-batch may be running, for which the engine gives no counts, and each data-parallel
        rank splits its own batch.

    Without counts the engine captures or warms up a graph, or runs a sub-batch. A graph that all data-parallel ranks
    replay together is the one for the largest count among them, with a global length of ``dp_ranks`` times the local
    one: no rank brings more. Another global length means that each rank picks a graph for its own batch.
    """
    if counts is not None:
        return tuple(counts) if len(counts) == dp_ranks and min(counts, default=-1) >= 0 else None
    if local_rows is None or local_rows < 0:
        return None
    if dp_ranks == 1:
        return (local_rows,)
    if not two_batch_overlap and local_rows > 0 and global_rows == local_rows * dp_ranks:
        return (local_rows,) * dp_ranks
    return None


def max_received_rows(sent: int, counts: Sequence[int] | None, layout: Layout, buffer_rows: int) -> int | None:
    """The most rows that this rank can receive in one MoRI dispatch; ``None``: not provable.

    :param sent: rows that this rank has sent (known from a shape).
    :param counts: the most rows of each data-parallel rank, from :func:`rows_per_dp_rank`; ``None``: unknown.
    :param buffer_rows: rows of the receive buffer; what it cannot hold cannot arrive.

    MoRI sends a row to a destination rank once, however many of the row's experts live there. So at most as many rows
    arrive as all ranks of the group send, this one included. (The vendor's own worst-case buffer is that sum for full
    ranks.) Padding rows count: whether they travel depends on how the router marks them. What the ranks send:

    * *Attention TP.* In front of experts behind a dispatcher the engine pads a data-parallel rank's ``n`` rows to a
      multiple of its attention-TP ranks and scatters them (``ScatterMode.SCATTERED``): together they send ``n``. That
      holds where this rank is seen to have sent ``n / attn_tp``, as all ranks run the same model. Else (a model that
      scatters nothing, or an idle rank, 0 of 0) each of them may send all of ``n``.
    * *Context parallelism* may split unevenly, or in prefill only: each rank may send all of ``n``.
    * *More sent than counted*: the counts are not this forward's, and nothing follows from them.
    * *One data-parallel rank* and no counts: every rank holds the same batch and sends all of it or its share of an
      even split, in which shares differ by one row at most: at most ``ranks * (sent + 1)``.
    """
    if layout.dp_ranks == 0 or sent < 0:
        return None
    if counts is None:
        if layout.dp_ranks > 1 or layout.attn_cp > 1:
            return None
        return min(sent if layout.ranks == 1 else layout.ranks * (sent + 1), buffer_rows)
    if len(counts) != layout.dp_ranks or sent > counts[layout.dp_rank]:
        return None
    scattered = (
        layout.attn_cp == 1
        and sent * layout.attn_tp == counts[layout.dp_rank] > 0
        and all(rows % layout.attn_tp == 0 for rows in counts)
    )
    senders = 1 if scattered else layout.attn_tp * layout.attn_cp
    return min(senders * sum(counts), buffer_rows)


def round_up_rows(rows: int) -> int:
    """Add less than 1/16, so that a few sizes serve all batches: for the allocator, and for caches by shape.

    The step is 1/32 of the next power of two, by which AITER looks its kernel up (up to 1,024 rows; its
    ``get_padded_M``): that stays the same.
    """
    step = max(1, (1 << max(rows - 1, 0).bit_length()) // 32)
    return -(-rows // step) * step


class Cut(NamedTuple):
    rows: int
    """How many rows of the receive buffer the MoE kernel is given."""
    assert_needed: bool
    """More rows than that may arrive: the device has to check."""
    raised: bool
    """The user's limit was below what can arrive, and is not followed."""


def decide_rows(bound: int | None, limit: int, buffer_rows: int, *, recv_bound: bool = False) -> Cut:
    """Where to cut the receive buffer.

    :param bound: the most rows that can arrive, from :func:`max_received_rows`.
    :param limit: the user's, in rows; 0: none.
    :param recv_bound: cut to the bound even without a limit.
    :returns: never more than ``buffer_rows``, and never less than a provable bound. A limit between the bound and the
        rounded bound is followed. At least one row: kernels are not launched on nothing.
    """
    if not (limit or recv_bound):
        return Cut(buffer_rows, False, False)
    if bound is None:
        rows = min(limit or buffer_rows, buffer_rows)
        return Cut(rows, rows < buffer_rows, False)
    bound = min(max(bound, 1), buffer_rows)
    rows = min(round_up_rows(bound), buffer_rows)
    if limit:
        rows = max(bound, min(rows, limit))
    return Cut(rows, False, 0 < limit < bound)


@functools.lru_cache(maxsize=1024)  # all layers of a forward, and most forwards, ask the same question
def decide_cut(
    sent: int, counts: tuple[int, ...] | None, layout: Layout, buffer_rows: int, limit: int, recv_bound: bool
) -> tuple[int | None, Cut]:
    """The bound of :func:`max_received_rows`, and the cut of :func:`decide_rows` that follows from it."""
    bound = max_received_rows(sent, counts, layout, buffer_rows)
    return bound, decide_rows(bound, limit, buffer_rows, recv_bound=recv_bound)
