"""What a model process records of itself."""

from __future__ import annotations

import json

import torch
from sglang_moe_patches.regression.observe import Observer, collect

MIB = 1 << 20


def observer(tmp_path):
    return Observer(str(tmp_path), [("output-buffer", "applied", "")])


def forward(watch, tokens, *outputs, extra_bytes=0):
    """One forward whose kernels start with ``extra_bytes`` more alive than when it began."""
    watch.forward_starts(tokens, cuda=False)
    extra = torch.zeros(extra_bytes, dtype=torch.uint8)
    for make in outputs:
        watch.kernel_starts(make())
    watch.forward_ends()
    return extra


def test_allocations_are_counted_by_object_not_by_address(tmp_path):
    watch = observer(tmp_path)
    # Freed and allocated again, most likely at the same address: still another buffer each time.
    forward(watch, 1, *[lambda: torch.empty(64, 64)] * 5)
    assert watch.figures["output_buffers"] == 5
    one = torch.empty(64, 64)
    watch = observer(tmp_path)
    for _ in range(2):  # the same storage in the next forward counts again, and is one
        forward(watch, 1, *[lambda: one.detach()] * 5)
    assert (watch.figures["output_buffers"], watch.figures["moe_layers"]) == (1, 5)


def test_live_bytes_are_those_of_the_largest_forward(tmp_path):
    watch = observer(tmp_path)
    output = torch.empty(4, 4)
    forward(watch, 10, lambda: output, extra_bytes=4 * MIB)
    forward(watch, 100, lambda: output, extra_bytes=2 * MIB)
    forward(watch, 50, lambda: output, extra_bytes=8 * MIB)
    figures = collect(tmp_path)
    assert figures["tokens"] == 100
    assert 2 * MIB <= figures["live_at_kernel_bytes"] < 3 * MIB
    assert figures["changes"] == [["output-buffer", "applied", ""]]


class Wrapper:
    """Holds buffers as FlashInfer's CuteDslMoEWrapper does."""

    def __init__(self, sort: torch.Tensor) -> None:
        self._moe_sort_buffers = {"a": sort, "size": 3}
        self._gemm1_output = torch.empty(100, dtype=torch.uint8)
        self._moe_output = None
        self.max_num_tokens = 7


def test_what_kernels_hold_between_forwards_counts_shared_storages_once(tmp_path):
    watch, output, sort = observer(tmp_path), torch.empty(4, 4), torch.empty(10, dtype=torch.int32)
    forward(watch, 1, lambda: output)
    assert watch.figures["kernel_buffer_bytes"] is None
    wrappers = [Wrapper(sort), Wrapper(sort)]
    watch.wrappers.update(wrappers)
    forward(watch, 1, lambda: output)
    assert watch.figures["kernel_buffer_bytes"] == 2 * 100 + 40


def test_the_rank_that_used_most_is_reported_and_idle_processes_are_not(tmp_path):
    base = {"peak_forward_bytes": None, "forwards": 3}
    for pid, live, forwards in ((1, 10, 3), (2, 30, 3), (3, 99, 0)):
        (tmp_path / f"{pid}.json").write_text(json.dumps({**base, "live_at_kernel_bytes": live, "forwards": forwards}))
    assert collect(tmp_path)["live_at_kernel_bytes"] == 30
    (tmp_path / "1.json").unlink()
    (tmp_path / "2.json").unlink()
    assert collect(tmp_path) is None
