"""The engine's ``moe_align_block_size`` in plain Python."""

from __future__ import annotations


def align(topk_ids, block, experts):
    """Rows by expert, each expert's filled up to whole blocks; expert -1 is on another rank.

    :returns: the row numbers in order, and each block's expert.
    """
    order, owners = [], []
    flat = topk_ids.reshape(-1).tolist()
    for expert in range(-1, experts):
        rows = [row for row, owner in enumerate(flat) if owner == expert]
        rows += [len(flat)] * (-len(rows) % block)
        order += rows
        owners += [expert] * (len(rows) // block)
    return order, owners
