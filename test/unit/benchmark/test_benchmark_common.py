"""What the benchmarks share."""

from __future__ import annotations

import argparse
import importlib
import json

import pytest
from common import machine, output, plugins, timing
from common.shapes import MODELS, TINY, Layout, Model, Rank


@pytest.mark.parametrize(
    ("model", "module", "config"),
    [
        ("deepseek-v3", "deepseek_v3", "DeepseekV3Config"),
        ("minimax-m2", "minimax_m2", "MiniMaxM2Config"),
        ("mixtral-8x7b", "mixtral", "MixtralConfig"),
    ],
)
def test_a_shape_is_the_models_own(model, module, config):
    """These three are the defaults of their configuration in transformers; minimax_m2 only in newer ones."""
    defaults = pytest.importorskip(f"transformers.models.{module}.configuration_{module}")
    theirs = getattr(defaults, config)()
    ours = MODELS[model]
    names = {
        "hidden": ("hidden_size",),
        "layers": ("num_hidden_layers",),
        "heads": ("num_attention_heads",),
        "kv_heads": ("num_key_value_heads",),
        "top_k": ("num_experts_per_tok",),
        "experts": ("n_routed_experts", "num_local_experts"),
        "moe_intermediate": ("moe_intermediate_size", "intermediate_size"),
        "dense_layers": ("first_k_dense_replace",),
        "shared_experts": ("n_shared_experts",),
        "q_lora_rank": ("q_lora_rank",),
    }
    for ours_name, candidates in names.items():
        expected = next((getattr(theirs, name) for name in candidates if hasattr(theirs, name)), None)
        if expected is not None:
            assert getattr(ours, ours_name) == expected, ours_name
    if ours.groups != (1, 1):
        assert ours.groups == (theirs.n_group, theirs.topk_group)


def test_a_fused_shared_expert_is_one_more_that_every_token_chooses():
    apart, fused = MODELS["deepseek-v3"], MODELS["deepseek-v3-fused"]
    assert (fused.experts, fused.top_k, fused.shared_experts) == (257, 9, 0)
    assert (fused.hidden, fused.moe_layers) == (apart.hidden, apart.moe_layers) == (7168, 58)


def test_ranks_share_a_layer_by_experts_or_by_columns():
    kimi = MODELS["kimi-k2.5"]
    assert kimi.per_rank(Layout()) == Rank(384, 8, 7168, 2048)
    assert kimi.per_rank(Layout(tp=4)) == Rank(384, 8, 7168, 512)
    assert kimi.per_rank(Layout(tp=8, ep=8)) == Rank(48, 8, 7168, 2048)
    assert kimi.per_rank(Layout(tp=8, ep=2)) == Rank(192, 8, 7168, 512)
    with pytest.raises(ValueError, match="do not divide"):
        TINY.per_rank(Layout(tp=16, ep=16))
    with pytest.raises(ValueError, match="ep must divide tp"):
        Layout(tp=4, ep=3)


def test_every_model_names_where_its_figures_are_from():
    assert all("/" in model.source for model in MODELS.values())
    assert all(isinstance(model, Model) and model.experts >= model.top_k for model in MODELS.values())


def test_versions_run_in_turn_and_every_other_round_backwards():
    order = []

    def version(name, times):
        def run():
            order.append(name)
            return times[order.count(name) - 1]

        return run

    stock, patched = [9.0, 4.0, 2.0, 6.0], [9.0, 2.0, 2.0, 2.0]
    samples = timing.in_turn({"stock": version("stock", stock), "patched": version("patched", patched)}, 3)
    assert order == ["patched", "stock", "stock", "patched", "patched", "stock", "stock", "patched"]
    assert samples == {"stock": stock[1:], "patched": patched[1:]}
    assert timing.against_stock(samples) == {
        "patched": {"stock": 4.0, "other": 2.0, "ratio": 2.0, "lowest": 1.0, "highest": 3.0, "pairs": 3}
    }


def test_the_engine_finds_a_written_plugin_and_runs_it(tmp_path, monkeypatch):
    from importlib.metadata import entry_points

    plugins.write_module(tmp_path / "it", "a_benchmarks_own", "def register():\n    return 'here'\n")
    monkeypatch.syspath_prepend(tmp_path / "it")
    importlib.invalidate_caches()
    (found,) = [e for e in entry_points(group="sglang.srt.plugins") if e.name == "a_benchmarks_own"]
    assert found.load()() == "here"


def test_what_a_benchmark_found_is_kept_with_its_conditions(tmp_path, capsys):
    parser = output.parser("What it does.", logs=True)
    file, page, logs = tmp_path / "r.json", tmp_path / "r.md", tmp_path / "logs"
    options = output.parse(parser, ["--json", str(file), "--markdown", str(page), "--logs", str(logs)])
    found = output.result("this", {"ms": 3}, {"engine": "0.0"})
    table = output.table(("model", "ms"), [("kimi", "3")])
    output.finish(options, found, table)
    assert capsys.readouterr().out.strip() == page.read_text().strip() == table.strip()
    kept = json.loads(file.read_text())
    assert kept["figures"] == {"ms": 3}
    assert kept["conditions"]["engine"] == "0.0"
    assert {"date", "machine", "torch", "python"} <= set(kept["conditions"])
    (tmp_path / "work" / "patched").mkdir(parents=True)
    (tmp_path / "work" / "patched" / "server.log").write_text("ready")
    output.keep_logs(options, tmp_path / "work")
    assert [path.read_text() for path in logs.iterdir()] == ["ready"]


def test_the_command_says_which_kernels_ran(monkeypatch):
    monkeypatch.setattr("sys.argv", ["/somewhere/benchmark/changes/overhead.py", "host", "--json", "a file"])
    monkeypatch.delenv("SGLANG_MOE_PATCHES_REFERENCE_KERNELS", raising=False)
    assert output.result("overhead", {})["command"] == "python benchmark changes/overhead host --json 'a file'"
    monkeypatch.setenv("SGLANG_MOE_PATCHES_REFERENCE_KERNELS", "1")
    assert output.result("overhead", {})["command"].startswith("sglang-moe-patches exec --reference-kernels -- python ")
    monkeypatch.setattr("sys.argv", ["/somewhere/benchmark/tiny_moe/mutations.py"])
    assert output.result("mutations", {})["command"].endswith(" python benchmark tiny_moe/mutations")


def test_a_quick_run_has_other_defaults_where_nothing_else_is_asked_for(capsys):
    parser = output.parser("What it does.", quick={"rounds": 2, "steps": 3})
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--steps", type=int, default=200)
    assert output.parse(parser, []).rounds == 15
    quick = output.parse(parser, ["--quick", "--steps", "7"])
    assert (quick.rounds, quick.steps) == (2, 7)
    assert "rounds 2, steps 3" in parser.format_help()


def test_an_unknown_name_is_named_with_those_that_are_known():
    assert output.choice_of(MODELS)("glm-4.5,mixtral-8x7b") == ["glm-4.5", "mixtral-8x7b"]
    with pytest.raises(argparse.ArgumentTypeError, match=r"nobody: unknown; known: kimi-k2\.5, deepseek-v3"):
        output.choice_of(MODELS)("kimi-k2.5,nobody")


def test_without_a_gpu_there_is_one_line(capsys, monkeypatch):
    import torch

    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(SystemExit) as ended:
        machine.require_gpu("this.py", "--check works without one")
    assert ended.value.code == 2
    assert capsys.readouterr().err == "this.py: needs a GPU, and PyTorch sees none here; --check works without one\n"
