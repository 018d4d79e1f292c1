"""The checkpoint that the benchmarks' servers read from nowhere: the same tensors as a checkpoint on disk."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from common import servers, timing, weights
from common.shapes import TINY
from sglang_moe_patches.reference import model

SERVED = weights.Served(TINY)


def test_it_has_the_tensors_of_a_checkpoint_on_disk(tmp_path):
    config = json.loads((weights.write_model(tmp_path / "model", SERVED) / "config.json").read_text())
    spec = model.ModelSpec(4, 1, TINY.experts, TINY.top_k, TINY.hidden, TINY.moe_intermediate)
    written = model.checkpoint_weights(spec)
    made = dict(weights.tensors(config, torch.device("cpu")))
    assert {name: (t.shape, t.dtype) for name, t in made.items()} == {
        name: (t.shape, t.dtype) for name, t in written.items()
    }


def test_every_expert_has_its_own_weights_and_each_process_the_same(tmp_path):
    config = weights.config(SERVED)
    first, again = (dict(weights.tensors(config, torch.device("cpu"))) for _ in range(2))
    assert all(torch.equal(tensor.float(), again[name].float()) for name, tensor in first.items())
    gates = [name for name in first if name.endswith("gate_proj.weight") and ".experts." in name]
    assert len({first[name].numpy().tobytes() for name in gates}) == len(gates) == TINY.experts * SERVED.moe_layers


def test_servers_differ_in_the_changes_alone(tmp_path, monkeypatch):
    monkeypatch.setenv("SGLANG_MOE_PATCHES", "output-buffer")  # the caller's own choice is not theirs
    setup = servers.Setup(SERVED, tmp_path)
    stock, again, patched = (setup.environment(name) for name in ("stock", timing.CONTROL, "patched"))
    differing = {name for name in stock if stock[name] != patched[name]}
    assert differing == {"SGLANG_MOE_PATCHES", "SGLANG_MOE_PATCHES_OBSERVE", "TMPDIR"}
    assert (stock["SGLANG_MOE_PATCHES"], again["SGLANG_MOE_PATCHES"]) == ("none", "none")
    assert patched["SGLANG_MOE_PATCHES"] == "all"


def test_servers_find_the_weights_as_a_plugin(tmp_path, monkeypatch):
    from importlib.metadata import entry_points

    setup = servers.Setup(SERVED, tmp_path / "work")
    setup.prepare()
    folders = setup.environment("stock")["PYTHONPATH"].split(":")
    assert str(Path(weights.__file__).parents[1]) in folders  # pytest has put it on this process's path anyway
    for folder in reversed(folders):
        monkeypatch.syspath_prepend(folder)
    (found,) = [e for e in entry_points(group="sglang.srt.plugins") if e.name == "benchmark_weights"]
    assert found.load() is weights.register
