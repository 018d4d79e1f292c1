"""Compute how many rows of MoRI's receive buffer can hold tokens, and where to cut the buffer. All functions are pure
functions of plain values.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import NamedTuple


class Layout(NamedTuple):
    """Sizes of the attention groups in one expert-parallel group, and this rank's place among them. All forward passes
    use the same values.

    :param ranks: number of expert-parallel ranks.
    :param attn_tp: size of attention tensor parallelism. ``attn_tp * attn_cp`` ranks work on the tokens of one
        data-parallel rank.
    :param attn_cp: size of attention context parallelism.
    :param dp_rank: number of the data-parallel rank to which this rank belongs.
    """

    ranks: int
    attn_tp: int = 1
    attn_cp: int = 1
    dp_rank: int = 0

    @property
    def dp_ranks(self) -> int:
        """Number of data-parallel ranks in the expert-parallel group, or 0 if ``attn_tp * attn_cp`` does not divide
        ``ranks``.

        The number is not read from the engine, because the engine reports 1 while some draft models run.
        """
        groups, rest = divmod(self.ranks, self.attn_tp * self.attn_cp)
        return 0 if rest else groups


def find_rows_per_dp_rank(
    counts: Sequence[int] | None,
    local_rows: int | None,
    global_rows: int | None,
    dp_ranks: int,
    *,
    two_batch_overlap: bool = False,
) -> tuple[int, ...] | None:
    """Return the largest number of rows that each data-parallel rank can have in this forward pass.

    ``counts``, ``local_rows`` and ``global_rows`` are values of the engine's module ``dp_attention``. If ``counts`` has
    one number for each data-parallel rank, the result is ``counts``. If ``counts`` is ``None``, the result is
    ``local_rows`` for each rank in two cases:

    - There is only one data-parallel rank.
    - ``global_rows`` is ``dp_ranks * local_rows``. All ranks then run the same CUDA graph, whose size fits the largest
      of their batches. With 4 ranks, 8 local and 32 global rows, for example, the result is ``(8, 8, 8, 8)``.

    :param counts: ``global_num_tokens``: the padded rows of each data-parallel rank, 0 for an idle rank. It is ``None``
        while the engine captures or warms up a CUDA graph, or runs one of two sub-batches (two-batch overlap). If the
        engine gathers nothing between ranks (``--moe-dense-tp-size 1`` with ``--enable-dp-lm-head``), the list has only
        this rank's number.
    :param local_rows: local buffer length: this rank's padded rows.
    :param global_rows: global buffer length: the padded rows of all ranks.
    :param dp_ranks: number of data-parallel ranks.
    :param two_batch_overlap: whether the engine may run a sub-batch now. The second case then does not count, because
        each data-parallel rank splits its own batch, so the sub-batches may have different sizes.
    :returns: one number for each data-parallel rank, or ``None`` if the rows of some rank are unknown.
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


def compute_max_received_rows(sent: int, counts: Sequence[int] | None, layout: Layout, buffer_rows: int) -> int | None:
    """Return the largest number of rows that this rank can receive in one MoRI dispatch.

    MoRI sends a row to each destination rank at most once. This rank therefore receives at most as many rows as all
    expert-parallel ranks send, itself included. Padding rows count, because the router decides on the device whether
    they are sent.

    If ``counts`` is known, the bound is ``senders * sum(counts)``, where ``senders`` is the number of ranks that may
    send the same row:

    - ``senders`` is 1 if the engine has scattered the rows over the attention-TP ranks (``ScatterMode.SCATTERED``).
      This rank recognizes it by its own rows: it has sent exactly ``1 / attn_tp`` of its data-parallel rank's rows. All
      ranks run the same model, so the other ranks have scattered their rows, too.
    - Otherwise ``senders`` is ``attn_tp * attn_cp``. This larger value is also used in two cases in which this rank
      cannot see whether rows are scattered. In the first case this rank is idle, so it has sent 0 of 0 rows. In the
      second case context parallelism is on, so the engine may split rows unevenly, or only in prefill.

    An example: two data-parallel ranks have 8 rows each, and ``attn_tp`` is 2. If this rank has sent 4 rows, the rows
    are scattered, and the bound is 1 * 16 rows. If this rank has sent 8 rows, the bound is 2 * 16 rows.

    If ``counts`` is unknown, there is a bound only with one data-parallel rank and without context parallelism. Every
    rank then has the same batch, and sends the whole batch or an even share of the batch. Even shares differ by at most
    one row, so all ranks together send at most ``ranks * (sent + 1)`` rows.

    :param sent: number of rows that this rank has sent. The CPU knows it from the shape of a tensor.
    :param counts: largest number of rows of each data-parallel rank (:func:`find_rows_per_dp_rank`), or ``None`` if
        unknown.
    :param layout: distribution of the attention over the ranks.
    :param buffer_rows: rows of the receive buffer. More rows cannot arrive.
    :returns: ``None`` if no bound can be proven. For example, this rank has sent more rows than its count, because the
        counts belong to another forward pass.
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
    """Round a number of rows up by less than 1/16 of the number.

    The result is a multiple of 1/32 of the next power of two. For example, 520 rows lie below 1,024, so they are
    rounded up to a multiple of 32: 544 rows. The MoE kernel then computes only a few different numbers of rows, so the
    allocator can reuse memory, and caches by shape are hit. AITER chooses its kernel by the same power of two
    (``get_padded_M``, up to 1,024 rows), so rounding does not change the kernel.
    """
    step = max(1, (1 << max(rows - 1, 0).bit_length()) // 32)
    return -(-rows // step) * step


class Cut(NamedTuple):
    """Decision about one forward pass: how many rows of the receive buffer the MoE kernel computes.

    :param rows: rows of the receive buffer that the MoE kernel computes.
    :param needs_assertion: whether more rows may arrive. The device must then check the number of received rows.
    :param is_limit_raised: whether the user's limit was raised, because more rows can arrive.
    """

    rows: int
    needs_assertion: bool
    is_limit_raised: bool


def decide_rows(bound: int | None, limit: int, buffer_rows: int, *, recv_bound: bool = False) -> Cut:
    """Return how many rows of the receive buffer the MoE kernel computes.

    :param bound: largest number of rows that can arrive (:func:`compute_max_received_rows`), or ``None`` if unknown.
    :param limit: the user's limit in rows, or 0 for no limit.
    :param buffer_rows: rows of the receive buffer.
    :param recv_bound: whether to cut to ``bound`` even if the user set no limit.
    :returns: the decision. Its number of rows is never above ``buffer_rows``, and follows from the first case that
        holds:

        1. no limit and no ``recv_bound``: ``buffer_rows``
        2. ``bound`` unknown: the limit, or ``buffer_rows`` without a limit
        3. limit below ``bound``: ``bound``, but at least one row
        4. else: ``bound`` rounded up (:func:`round_up_rows`), but at least one row, and at most the limit if there is
           one. For example, a bound of 520 rows and a limit of 530 rows give 530 rows.
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


# Cached, because all layers of a forward pass, and most forward passes, have the same arguments.
@functools.lru_cache(maxsize=1024)
def decide_cut(
    sent: int, counts: tuple[int, ...] | None, layout: Layout, buffer_rows: int, limit: int, recv_bound: bool
) -> tuple[int | None, Cut]:
    """Decide how many rows of the receive buffer the MoE kernel computes in one forward pass.

    :returns: the bound (:func:`compute_max_received_rows`), and the cut (:func:`decide_rows`).
    """
    bound = compute_max_received_rows(sent, counts, layout, buffer_rows)
    return bound, decide_rows(bound, limit, buffer_rows, recv_bound=recv_bound)
