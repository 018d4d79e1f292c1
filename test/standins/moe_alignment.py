"""Stand-in in plain Python for the engine's ``moe_align_block_size``."""

from __future__ import annotations


def align(topk_ids, block, experts):
    """Sort rows by expert, and pad the rows of each expert to whole blocks. The expert -1 stands for experts on another
    rank.

    :returns: the sorted row numbers, and the expert of each block.
    """
    order, owners = [], []
    flat = topk_ids.reshape(-1).tolist()
    for expert in range(-1, experts):
        rows = [row for row, owner in enumerate(flat) if owner == expert]
        rows += [len(flat)] * (-len(rows) % block)
        order += rows
        owners += [expert] * (len(rows) // block)
    return order, owners
