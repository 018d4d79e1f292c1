"""Tests of the random weights and the settings of the servers that the benchmarks start."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import torch
from common import dummy_servers, servers, timing, weights
from common.shapes import TINY, TINY_MODELS
from safetensors.torch import load_file
from sglang_moe_reference import model

SERVED = weights.ServedModel(TINY)


@pytest.mark.parametrize("name", TINY_MODELS)
@pytest.mark.parametrize("runner", ["flashinfer_trtllm_routed", "triton"])
def test_drawn_weights_have_the_tensors_of_a_checkpoint_on_disk(tmp_path, name, runner):
    served = weights.ServedModel(TINY_MODELS[name], runner=runner)
    config = json.loads((weights.write_model(tmp_path / "model", served) / "config.json").read_text())
    family = TINY_MODELS[name].family
    spec = model.ModelSpec(family=family, layers=served.layers, moe_intermediate=TINY.moe_intermediate)
    written = model.checkpoint_weights(spec, quantized=runner != "triton")
    drawn = dict(weights.tensors(config, torch.device("cpu")))
    shapes = [{name: (t.shape, t.dtype) for name, t in tensors.items()} for tensors in (drawn, written)]
    assert shapes[0] == shapes[1]


FORMATS: dict[str, dict[str, tuple[torch.dtype, tuple[int, ...]]]] = {
    # Format of Kimi-K2.5 (compressed-tensors): int32 [outputs, inputs / 8], and a scale for each 32 inputs.
    "marlin": {
        "weight_packed": (torch.int32, (256, 32)),
        "weight_scale": (torch.bfloat16, (256, 8)),
        "weight_shape": (torch.int32, (2,)),
    },
    # Format of DeepSeek-V3 (FP8 in blocks): e4m3 weights, and a float32 scale for each block of 128 x 128.
    "triton": {"weight": (torch.float8_e4m3fn, (256, 256)), "weight_scale_inv": (torch.float32, (2, 2))},
}


@pytest.mark.parametrize("runner", FORMATS)
def test_quantized_experts_have_the_engines_names_dtypes_and_shapes(runner):
    config = weights.config(weights.ServedModel(TINY, runner=runner, fp8=runner == "triton"))
    drawn = dict(weights.tensors(config, torch.device("cpu")))
    expert = "model.layers.3.mlp.experts.7."
    found = {name.removeprefix(expert): (t.dtype, tuple(t.shape)) for name, t in drawn.items() if expert in name}
    assert {name: kind for name, kind in found.items() if "down" not in name} == {
        f"{part}_proj.{name}": kind for part in ("gate", "up") for name, kind in FORMATS[runner].items()
    }
    other_types = {t.dtype for name, t in drawn.items() if ".experts." not in name}
    assert other_types == {torch.bfloat16, torch.float32}


def test_int4_weights_have_mean_zero_and_the_intended_standard_deviation():
    packed = torch.empty(64, 128, dtype=torch.int32)
    weights.draw_int4(packed, weights.named_generator("w", "cpu"))
    values = torch.stack([packed >> shift & 15 for shift in range(0, 32, 4)]).double() - 8
    assert values.min() == -7
    assert abs(float(values.mean())) < 0.1
    assert float(values.std()) * weights.int4_scale(1024) == pytest.approx(1024**-0.5, rel=0.01)


def test_only_routed_experts_are_int4():
    quantization = weights.int4_config()
    ignored = [name.removeprefix("re:") for name in quantization["ignore"]]
    for path in ("model.layers.0.mlp.gate_up_proj", "model.layers.1.mlp.shared_experts.down_proj", "lm_head"):
        assert any(re.match(name, path) for name in ignored)
    assert not any(re.match(name, "model.layers.1.mlp.experts.0.gate_proj") for name in ignored)
    with pytest.raises(ValueError, match="marlin has int4 experts"):
        weights.ServedModel(TINY, runner="marlin", fp8=True)


def test_weights_differ_between_experts_and_seeds_but_not_between_processes(tmp_path):
    served = weights.ServedModel(TINY, moe_layers=1, runner="triton")
    first, second = (
        load_file(weights.write_checkpoint(tmp_path / str(seed), served, seed, "cpu") / "model.safetensors")
        for seed in range(2)
    )
    again = dict(weights.tensors(weights.config(served), torch.device("cpu")))
    torch.testing.assert_close(first, again, rtol=0, atol=0)
    assert list(first) == list(second)
    assert not any(torch.equal(first[name], second[name]) for name in first)
    gates = [name for name in first if name.endswith("gate_proj.weight") and ".experts." in name]
    assert len({first[name].view(torch.uint8).numpy().tobytes() for name in gates}) == len(gates) == TINY.experts


def test_stock_and_patched_servers_differ_only_in_their_changes(tmp_path, monkeypatch):
    monkeypatch.setenv("SGLANG_MOE_PATCHES", "output-buffer")  # the servers ignore the caller's variable
    setup = servers.Setup(SERVED, tmp_path)
    stock, again, patched = (setup.environment(name) for name in ("stock", timing.CONTROL, "patched"))
    differing = {name for name in stock if stock[name] != patched[name]}
    assert differing == {"SGLANG_MOE_PATCHES", "SGLANG_MOE_PATCHES_OBSERVE", "TMPDIR"}
    assert (stock["SGLANG_MOE_PATCHES"], again["SGLANG_MOE_PATCHES"]) == ("none", "none")
    assert patched["SGLANG_MOE_PATCHES"] == "all"


def test_servers_load_the_weights_plugin(tmp_path, monkeypatch):
    from importlib.metadata import entry_points

    setup = servers.Setup(SERVED, tmp_path / "work")
    setup.prepare()
    folders = setup.environment("stock")["PYTHONPATH"].split(":")
    assert str(Path(weights.__file__).parents[1]) in folders  # pytest already added it to this process's path
    for folder in reversed(folders):
        monkeypatch.syspath_prepend(folder)
    (plugin,) = [e for e in entry_points(group="sglang.srt.plugins") if e.name == "benchmark_weights"]
    assert plugin.load() is weights.register


@pytest.mark.parametrize(
    ("shard", "tp", "arguments", "label"),
    [
        (1, 1, "--attention-backend triton", "qwen3-30b, 48 layers, 0.5.17"),
        (4, 2, "--dp 2 --enable-dp-attention", "TP=8's sizes, 48 layers, 2 GPUs with data-parallel attention, KV"),
        (1, 1, "--dp 2 --attention-backend flashinfer", "2 replicas, KV tokens of each, attention by flashinfer"),
        (1, 1, "--speculative-algorithm NGRAM", "qwen3-30b, 48 layers, NGRAM, 0.5.17"),
        (2, 1, "--pp-size 2", "qwen3-30b, TP=2's sizes, 48 layers, 2 pipeline stages, 0.5.17"),
    ],
)
def test_the_label_of_a_run_has_everything_that_changes_its_kv_tokens(shard, tp, arguments, label):
    figures = {"model": "qwen3-30b", "layers": 48, "shard": shard, "tp": tp, "arguments": arguments.split()}
    assert label in dummy_servers.run_label({"figures": figures, "conditions": {"engine": "0.5.17"}})
