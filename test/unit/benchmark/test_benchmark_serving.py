"""The checkpoint that the benchmarks' servers read from nowhere: the same tensors as a checkpoint on disk."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import torch
from common import served, servers, timing, weights
from common.shapes import TINY, TINY_MODELS
from sglang_moe_patches.lab.reference import model

SERVED = weights.Served(TINY)


@pytest.mark.parametrize("name", TINY_MODELS)
@pytest.mark.parametrize("runner", ["flashinfer_trtllm_routed", "triton"])
def test_it_has_the_tensors_of_a_checkpoint_on_disk(tmp_path, name, runner):
    served = weights.Served(TINY_MODELS[name], runner=runner)
    config = json.loads((weights.write_model(tmp_path / "model", served) / "config.json").read_text())
    spec = model.ModelSpec(
        family=TINY_MODELS[name].family, layers=served.layers, moe_intermediate=TINY.moe_intermediate
    )
    written = model.checkpoint_weights(spec, quantized=runner != "triton")
    made = dict(weights.tensors(config, torch.device("cpu")))
    assert {name: (t.shape, t.dtype) for name, t in made.items()} == {
        name: (t.shape, t.dtype) for name, t in written.items()
    }


def gate_and_up(made: dict[str, torch.Tensor]) -> dict[str, tuple[torch.dtype, tuple[int, ...]]]:
    """What one expert's first two projections consist of, by name."""
    expert = {name.rsplit("experts.7.")[-1]: t for name, t in made.items() if "layers.3.mlp.experts.7." in name}
    return {name: (t.dtype, tuple(t.shape)) for name, t in expert.items() if "down" not in name}


def test_int4_experts_are_packed_as_the_engine_reads_them():
    """Kimi-K2.5's layout, compressed-tensors': [out, in / 8] int32, scales by groups of 32 of the inputs."""
    config = weights.config(weights.Served(TINY, runner="marlin"))
    made = dict(weights.tensors(config, torch.device("cpu")))
    assert gate_and_up(made) == {
        f"{part}_proj.{kind}": (dtype, shape)
        for part in ("gate", "up")
        for kind, dtype, shape in (
            ("weight_packed", torch.int32, (256, 32)),
            ("weight_scale", torch.bfloat16, (256, 8)),
            ("weight_shape", torch.int32, (2,)),
        )
    }
    kept = [name.removeprefix("re:") for name in config["quantization_config"]["ignore"]]
    for path in ("model.layers.0.mlp.gate_up_proj", "model.layers.1.mlp.shared_experts.down_proj", "lm_head"):
        assert any(re.match(name, path) for name in kept)
    assert not any(re.match(name, "model.layers.1.mlp.experts.0.gate_proj") for name in kept)


def test_fp8_experts_have_a_scale_for_each_block():
    """As DeepSeek-V3's checkpoint: e4m3 weights, float32 scales of 128 x 128 blocks, everything else as it is."""
    config = weights.config(weights.Served(TINY, runner="triton", fp8=True))
    made = dict(weights.tensors(config, torch.device("cpu")))
    assert gate_and_up(made) == {
        f"{part}_proj.{kind}": (dtype, shape)
        for part in ("gate", "up")
        for kind, dtype, shape in (
            ("weight", torch.float8_e4m3fn, (256, 256)),
            ("weight_scale_inv", torch.float32, (2, 2)),
        )
    }
    assert {t.dtype for name, t in made.items() if ".experts." not in name} == {torch.bfloat16, torch.float32}
    with pytest.raises(ValueError, match="marlin has int4 experts"):
        weights.Served(TINY, runner="marlin", fp8=True)


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


@pytest.mark.parametrize(
    ("shard", "tp", "arguments", "label"),
    [
        (1, 1, ["--attention-backend", "triton"], "qwen3-30b, 48 layers, 0.5.17"),
        (
            4,
            2,
            ["--dp", "2", "--enable-dp-attention"],
            "TP=8's sizes, 48 layers, 2 GPUs with data-parallel attention, KV",
        ),
        (
            1,
            1,
            ["--dp", "2", "--attention-backend", "flashinfer"],
            "2 replicas, KV tokens of each, attention by flashinfer",
        ),
        (2, 1, ["--pp-size", "2"], "qwen3-30b, TP=2's sizes, 48 layers, 2 pipeline stages, 0.5.17"),
    ],
)
def test_a_run_is_called_by_what_sets_its_kv_tokens_apart(shard, tp, arguments, label):
    figures = {"model": "qwen3-30b", "layers": 48, "shard": shard, "tp": tp, "arguments": arguments}
    assert label in served.run_label({"figures": figures, "conditions": {"engine": "0.5.17"}})
