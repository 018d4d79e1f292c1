"""Test on two GPUs that collectives keep using NCCL's symmetric memory if the shared experts run last.

Two ranks of the engine's model runner prefill and decode without CUDA graphs, with Kimi-K2.5's widths and random
weights. Symmetric memory is a pool of NCCL. NCCL runs a collective as a symmetric one only if the collective's tensors
lie in this pool. Before each collective that can be symmetric, the engine calls ``debug_check_symmetric_mempool`` with
the collective's tensors. The test replaces this function, and records whether the tensors lie in the pool.
"""

from __future__ import annotations

import json
import os
import socket
import sys
from collections import Counter
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

torch = pytest.importorskip("torch")
RANKS, STEPS = 2, 3
#: Prompts of one decode batch. There are 40, because the engine compiles sums of up to 32 tokens first.
PROMPTS = [[7 + seed, 11, 300, 42] * (5 + seed % 16) for seed in range(40)]
#: Server arguments for a GPU. A trial run on a CPU has no NCCL and leaves them out.
GPU = {
    "device": "cuda",
    "attention_backend": "triton",
    "sampling_backend": "pytorch",
    "enable_symm_mem": True,
    # Custom all-reduce can use NVLink multicast and is not counted.
    "disable_custom_all_reduce": True,
    "enforce_disable_flashinfer_allreduce_fusion": True,
    "mem_fraction_static": 0.3,
}
LAYOUTS: dict[str, dict[str, Any]] = {
    "data-parallel attention": {"dp_size": RANKS, "enable_dp_attention": True},
    "tensor parallelism": {},
}


def variants(engine: Any) -> dict[str, Any]:
    """Return context managers that install three variants: the stock engine, the patched engine, and the patched engine
    without the code that allocates outputs in the pool (``SymmetricMemory.output_context``).
    """
    from sglang_moe_patches.changes import deferred_shared_experts, output_buffer
    from sglang_moe_patches.core import patch, runners

    @contextmanager
    def patched() -> Any:
        patchers = []
        try:
            for change in (output_buffer.CHANGE, deferred_shared_experts.CHANGE):
                plan = patch.probe(change)
                assert plan.install is not None, f"{change.name}: {plan}"
                patchers.append(patch.Patcher())
                plan.install(patchers[-1])
            yield
        finally:
            for patcher in reversed(patchers):
                patcher.undo()

    @contextmanager
    def without_output_context() -> Any:
        with patched(), pytest.MonkeyPatch.context() as undone:
            undone.setattr(runners.SymmetricMemory, "output_context", lambda self: nullcontext())
            undone.setattr(runners.SymmetricMemory, "is_enabled", property(lambda self: False))
            yield

    return {"stock": nullcontext(), "patched": patched(), "without output_context": without_output_context()}


def rank_of_the_engine(rank: int, folder: str, arguments: dict[str, Any]) -> None:
    """Run one rank of the engine in this process. Write its counts of collectives and its answers into ``folder``."""
    from common.in_process import InProcess

    engine = InProcess(Path(folder) / "model", rank=rank, load_format="dummy", quantization=None,
                       moe_runner_backend="triton", disable_shared_experts_fusion=True, tp_size=RANKS,
                       **arguments)  # fmt: skip
    from sglang.srt.distributed import parallel_state
    from sglang.srt.distributed.device_communicators import pynccl_allocator

    seen: Counter[str] = Counter()

    def count_collective(group: Any, tensors: dict[str, Any], operation: str) -> None:
        inside = all(pynccl_allocator.is_tensor_in_symmetric_mempool(tensor) for tensor in tensors.values())
        seen[f"{operation}, {'symmetric' if inside else 'outside the pool'}"] += 1

    for group in {id(g): g for g in (parallel_state.get_tp_group(), parallel_state.get_moe_tp_group())}.values():
        group.debug_check_symmetric_mempool = count_collective
    found = {}
    for name, context in variants(engine).items():
        with context:
            model = engine.load(Path(folder) / "model")
            engine.generate(model, PROMPTS, 1)  # compiles, and fills the pool
            seen.clear()
            tokens, logits = engine.generate(model, PROMPTS, 0)
            prefill = dict(seen)
            tokens, logits = engine.generate(model, PROMPTS, STEPS)
            both = Counter(seen) - Counter(prefill) - Counter(prefill)
        found[name] = {"prefill": prefill, "decodes": dict(both), "tokens": tokens, "bits": sum_bit_patterns(logits),
                       "in place": model.model.layers[-1].mlp.experts.moe_runner_config.inplace}  # fmt: skip
        (Path(folder) / f"rank-{rank}.json").write_text(json.dumps(found))
        if rank == 0:
            shown = {key: value for key, value in found[name].items() if key not in ("tokens", "bits")}
            print(Path(folder).name, name, shown, flush=True)
        del model


def sum_bit_patterns(logits: Any) -> int:
    return int(logits.float().cpu().contiguous().view(torch.int32).long().sum())


def run(folder: Path, **arguments: Any) -> list[dict[str, Any]]:
    """Run all ranks. Return the results of each rank by variant."""
    import torch.multiprocessing as processes
    from common.shapes import MODELS
    from common.weights import ServedModel, write_model

    kimi = MODELS["kimi-k2.5"]
    if arguments["device"] == "cuda":
        kimi = replace(kimi.shard(4), experts=32)
    else:
        kimi = replace(kimi, hidden=256, heads=4, kv_heads=4, experts=8, moe_intermediate=256, intermediate=512)
    write_model(folder / "model", ServedModel(kimi, runner="triton"))
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    processes.spawn(rank_of_the_engine, (str(folder), {"nccl_port": port, **arguments}), nprocs=RANKS)
    return [json.loads((folder / f"rank-{rank}.json").read_text()) for rank in range(RANKS)]


def count_symmetric(counts: dict[str, int]) -> int:
    return sum(number for name, number in counts.items() if name.endswith("symmetric"))


@pytest.mark.skipif(torch.cuda.device_count() < RANKS, reason="needs two GPUs")
@pytest.mark.parametrize("layout", LAYOUTS)
def test_stock_and_patched_have_equally_many_symmetric_collectives(layout, tmp_path, monkeypatch):
    monkeypatch.setenv("SGLANG_MOE_PATCHES", "none")
    monkeypatch.setenv("NCCL_CUMEM_ENABLE", "1")  # the engine's launcher sets it, too
    monkeypatch.setenv("SGLANG_SYMM_MEM_PREALLOC_GB_SIZE", "1")
    monkeypatch.setenv("TMPDIR", str(tmp_path))  # folder in which the engine compiles its allocator
    for found in run(tmp_path / layout.replace(" ", "-"), **GPU, **LAYOUTS[layout]):
        stock, patched, without = (found[name] for name in ("stock", "patched", "without output_context"))
        assert (stock["in place"], patched["in place"]) == (True, False)
        assert count_symmetric(stock["decodes"]) > 0
        assert [patched[key] for key in ("decodes", "prefill")] == [stock[key] for key in ("decodes", "prefill")]
        assert [patched[key] for key in ("tokens", "bits")] == [stock[key] for key in ("tokens", "bits")]
        if LAYOUTS[layout]:  # without the tested code the dead input lies in the pool, and is taken
            assert count_symmetric(without["decodes"]) < count_symmetric(stock["decodes"])


if __name__ == "__main__":  # a trial run on a CPU: no collective uses symmetric memory there
    ranks = run(Path(sys.argv[1]), device="cpu")
    print(SimpleNamespace(same=ranks[0]["stock"]["bits"] == ranks[0]["patched"]["bits"], pid=os.getpid()))
