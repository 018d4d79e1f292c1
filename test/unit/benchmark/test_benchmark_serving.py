"""Tests of ``benchmark/memory/serving.py``: the client's command, the servers' environments, the results and the
tables."""

from __future__ import annotations

import json
import sys
from contextlib import nullcontext
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from common import dummy_models, dummy_weights
from common.client import IDLE_TIMEOUT_S, Unanswered
from common.growth import Growth
from memory import serving
from tokenizers import Tokenizer


def options(monkeypatch, *arguments: str):
    """Let the benchmark parse these arguments, and return its options. Nothing is measured: the benchmark sees no GPU,
    and exits with code 2."""
    parsed = []
    monkeypatch.setattr(sys, "argv", ["benchmark/memory/serving.py", *arguments])
    monkeypatch.setattr(serving.output, "parse", lambda parser: parsed.append(parser.parse_args()) or parsed[0])
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(SystemExit) as ended:
        serving.main()
    assert ended.value.code == 2
    return parsed[0]


@pytest.mark.parametrize("lengths", [("--chunk", "8192"), ("--chunk", "32768", "--context", "10240")])
def test_warm_up_prompts_fill_a_chunk_and_fit_into_the_context(monkeypatch, lengths):
    parsed = options(monkeypatch, *lengths)
    for _, tokens in (prompts := serving.warm_up_prompts(parsed)):
        assert tokens + serving.WARM_UP_TOKENS < parsed.context
    assert prompts[0][0] * prompts[0][1] >= parsed.chunk * 15 // 16


def test_the_clients_command_has_the_lengths_of_the_options(monkeypatch, tmp_path):
    parsed = options(monkeypatch, "--input", "3000,9000", "--output", "768", "--prompts", "200")
    command = serving.bench_command(parsed, tmp_path, "http://here", tmp_path / "into")
    flags = dict(pairwise(command))
    assert int(9000 * float(flags["--random-range-ratio"])) == 3000
    assert (flags["--random-input-len"], flags["--num-prompts"]) == ("9000", "200")
    assert json.loads(flags["--extra-request-body"])["sampling_params"]["max_new_tokens"] == 768
    parsed = options(monkeypatch, "--images", "2", "--input", "30000")
    images = serving.bench_command(parsed, tmp_path, "http://here", tmp_path / "into")
    assert images[images.index("--dataset-name") + 1 :][:3] == ["image", "--image-count", "2"]
    assert "--tokenize-prompt" not in images
    assert dict(pairwise(images))["--random-range-ratio"] == "1.0"


@pytest.mark.parametrize(
    ("changed", "missing"),
    [
        ({}, ""),
        # The client counted five tokens too few in a load on an H100 in which no request failed.
        ({"total_output_tokens": 120 * 256 - 5}, ""),
        ({"total_output_tokens": 119 * 256 + 1}, "only 30465 of 30720 new tokens were generated"),
        ({"completed": 119}, "1 requests failed"),
        ({"total_input_vision_tokens": 239 * 880}, "the client left images out"),
    ],
)
def test_an_incomplete_load_is_rejected(monkeypatch, changed, missing):
    parsed = options(monkeypatch, "--images", "2", "--prompts", "120", "--output", "256")
    whole = {"completed": 120, "total_output_tokens": 120 * 256, "total_input_vision_tokens": 240 * 880}
    assert serving.describe_missing(whole | changed, parsed) == missing


def test_the_vision_model_is_not_divided_among_ranks():
    config = dummy_models.config("qwen3.5-397b-fp8", 8, 4, 2048)
    text = config["text_config"]
    sizes = ("num_attention_heads", "num_key_value_heads", "linear_num_value_heads", "moe_intermediate_size")
    assert [text[size] for size in sizes] == [4, 1, 8, 128]
    assert (text["num_hidden_layers"], text["max_position_embeddings"], text["num_experts"]) == (4, 2048, 512)
    assert config["vision_config"] == dummy_models.config("qwen3.5-397b-fp8", 1, 60, 4096)["vision_config"]


def test_mxfp4_weights_are_drawn_at_their_creation_and_keep_the_size_of_activations():
    values = torch.tensor(
        [0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6]
    )  # values of the 16 codes of E2M1, the 4-bit format

    class Method:
        def create_moe_runner(self, layer, columns):
            for name, width in (("w13_weight", columns), ("w13_weight_scale", columns // 16)):
                empty = torch.zeros(2, 64, width, dtype=torch.uint8)
                layer.register_parameter(name, torch.nn.Parameter(empty, requires_grad=False))

    dummy_weights._wrap_mxfp4(SimpleNamespace(Mxfp4MoEMethod=Method))
    layers = [torch.nn.Module() for _ in range(2)]
    for number, layer in enumerate(layers):
        layer.layer_id = number
        Method().create_moe_runner(layer=layer, columns=1440)
    packed, scales = layers[0].w13_weight, layers[0].w13_weight_scale
    drawn = torch.stack((values[packed.long() & 15], values[packed.long() >> 4]), -1).flatten(-2)
    drawn *= torch.exp2(scales.float() - 127).repeat_interleave(32, -1)
    assert 2**-0.5 < float(drawn.std()) * 2880**0.5 < 2**0.5
    assert abs(float(drawn.mean())) < 1e-3
    assert not torch.equal(packed, layers[1].w13_weight)


def test_loaded_bytes_are_those_of_the_largest_rank_without_the_draft_model():
    lines = [f"[TP{rank}] {dummy_weights._LOADED.format(size)}" for rank, size in enumerate((5, 12, 7))]
    draft = ["[TP0] Memory pool end.", dummy_weights._LOADED.format(99)]
    assert dummy_weights.allocated_after_loading("\n".join(["begin", *lines, *draft])) == 12
    assert dummy_weights.allocated_after_loading("begin") is None


def test_a_server_is_named_by_its_kind_or_by_its_changes(monkeypatch):
    parsed = options(monkeypatch, "--servers", "stock,kv-sizing+moe-workspace,fp4-weights")
    kinds = [serving.kind_of(name) for name in parsed.servers]
    assert [(kind.changes, kind.grows, kind.loaded) for kind in kinds] == [
        ("none", False, True),
        ("kv-sizing,moe-workspace", True, False),
        ("fp4-weights", False, False),
    ]


@pytest.mark.parametrize("name", ["stck", "stock+fp4-weights", "fp4-weights+"])
def test_the_error_names_an_unknown_server(monkeypatch, capsys, name):
    monkeypatch.setattr(sys, "argv", ["benchmark/memory/serving.py", "--servers", name])
    with pytest.raises(SystemExit):
        serving.main()
    assert f"{name}: unknown; known: stock, " in capsys.readouterr().err


def test_answers_are_compared_with_stock_and_with_stock_zeros():
    measured = {"stock": {"answers": [1, 2]}, "stock-zeros": {"answers": [1, 3]}, "fp4-weights": {"answers": [1, 3]}}
    alike = [serving._count_equal_answers(measured, name, "answers") for name in measured]
    assert alike == ["", "1 of 2", "1 of 2; 2 of 2 stock-zeros's"]


def test_the_tokenizer_has_a_word_for_each_token():
    tokenizer = Tokenizer.from_str(serving.tokenizer_json(300, {298: "<image>"}))
    assert tokenizer.get_vocab_size() == 300
    assert tokenizer.decode([1, 298, 299]) == "1 <image> 12b"
    assert tokenizer.encode("1<image>12b ?").ids == [1, 298, 299, 0]


def test_a_run_adds_to_an_earlier_result_only_with_the_same_options(tmp_path):
    path = tmp_path / "found.json"
    assert serving.load_servers(path, {"model": "m", "servers": {}}) == {}
    path.write_text(json.dumps({"figures": {"model": "m", "input": [1, 2], "servers": {"stock": {"tokens": 1}}}}))
    same = {"model": "m", "input": (1, 2), "servers": {}}
    assert serving.load_servers(path, same) == {"stock": {"tokens": 1}}
    with pytest.raises(SystemExit, match="has other options"):
        serving.load_servers(path, {**same, "model": "n"})


def test_each_server_has_its_own_home_and_all_share_the_compiled_kernels(monkeypatch, tmp_path):
    monkeypatch.setattr(serving, "has_gpu", lambda: True)
    parsed = options(monkeypatch)
    environments = {name: serving.variables(name, parsed, tmp_path) for name in serving.SERVERS}
    assert len({environment["HOME"] for environment in environments.values()}) == len(environments)
    assert len({environment["TRITON_CACHE_DIR"] for environment in environments.values()}) == 1
    growing = {name for name, environment in environments.items() if serving.KV_SIZING.name in environment}
    assert growing == {"grown", "grown-again", "stock-grown"}
    assert {environments[name][serving.KV_SIZING.name] for name in growing} == {"auto"}


def test_the_memory_fraction_is_read_from_the_scheduler():
    assert serving.fraction_in_force({"mem_fraction_static": 0.8}) == 0.8
    info = {"mem_fraction_static": 0.8, "internal_states": [{"mem_fraction_static": 0.9}, {"mem_fraction_static": 0.9}]}
    assert serving.fraction_in_force(info) == 0.9


def test_kv_sizing_is_always_on_with_a_given_fraction(monkeypatch, tmp_path):
    monkeypatch.setattr(serving, "has_gpu", lambda: True)
    parsed = options(monkeypatch, "--", "--mem-fraction-static", "0.8")
    assert serving.variables("grown", parsed, tmp_path)[serving.KV_SIZING.name] == "always"


def server_figures(*, grew: bool = False, **more):
    """Return a server's figures as ``serving.serve`` does. If ``grew`` is True, kv-sizing has enlarged the KV cache."""
    loaded = {"total_throughput": 10.0, "duration": 1.0, "concurrency": 2.0, "median_tpot_ms": 3.0, "retractions": 0}
    started = {"startup_s": 1.0, "tokens": 5, "rehearsed_s": None, "lowest_free": None, "median_ttft_ms": 4.0}
    sizing = Growth(1235, 987, 4_990_000_000)._asdict() if grew else None
    return {**started, **loaded, "said": [], "growth": sizing, **more}


FULL = {"answered": 3, "retractions": 1, "lowest_free": None, "out_of_memory": False, "errors": []}


@pytest.mark.parametrize(
    ("grown", "failure"),
    [
        pytest.param(serving.Failed("no KV cache"), "grown", id="not measured"),
        pytest.param(
            server_figures(overfill=FULL | {"out_of_memory": True}),
            "grown (overfilled: out of memory)",
            id="out of memory",
        ),
        pytest.param(
            server_figures(penalized=FULL | {"errors": ["no answer"]}),
            "grown (with penalties: no answer)",
            id="no answer",
        ),
        pytest.param(
            server_figures(taken=FULL | {"given_back": 0}),
            "grown (memory taken: the server freed no KV cache)",
            id="no KV cache freed",
        ),
        pytest.param(server_figures(overfill=FULL, taken=FULL | {"given_back": 9}), "", id="survives"),
    ],
)
def test_a_failed_server_is_named_and_the_figures_of_other_servers_are_kept(grown, failure, tmp_path, monkeypatch):
    servers = {"stock": server_figures(), "grown": grown, "grown-again": server_figures(grew=True)}

    def serve(name, options, work, model):
        if name == "grown-again":  # the figures of the first server are already written
            assert "stock" in json.loads(path.read_text())["figures"]["servers"]
        if isinstance(servers[name], Exception):
            raise servers[name]
        return servers[name]

    path = tmp_path / "found.json"
    monkeypatch.setattr(serving, "serve", serve)
    monkeypatch.setattr(serving, "write_model", lambda folder, options: folder)
    monkeypatch.setattr(
        sys, "argv", ["memory/serving.py", "--quick", "--json", str(path), "--servers", ",".join(servers)]
    )
    with pytest.raises(SystemExit) if failure else nullcontext() as ended:
        serving.main()
    assert not failure or str(ended.value).partition("survive: ")[2] == failure
    known = {name: found for name, found in servers.items() if isinstance(found, dict)}
    assert json.loads(path.read_text())["figures"]["servers"] == known


def table_of(requests: int = 0, **servers) -> str:
    figures = {**dict.fromkeys(("shard", "layers", "tp", "prompts", "output", "chunk"), 1), "model": "m", "input": [1]}
    figures["requests"] = requests
    return serving.make_tables([{"conditions": {"engine": "1"}, "figures": figures | {"servers": servers}}])


@pytest.mark.parametrize(
    ("name", "grew", "label"),
    [
        ("grown", True, "grown"),
        ("grown", False, "grown (by the rule)"),
        ("grown-again", False, "grown-again (by the rule)"),
        ("patched", False, "patched"),
    ],
)
def test_the_table_marks_a_server_that_kept_the_size_of_the_rule(name, grew, label):
    assert f"| m | {label} | " in table_of(**{name: server_figures(grew=grew)})


def test_the_table_has_the_limit_of_concurrent_requests():
    assert ", at most 5 requests at once |" in table_of(5, grown=server_figures(grew=True))
    assert "at once" not in table_of(0, grown=server_figures(grew=True))  # 0: the engine's own limit


def test_further_loads_have_rows_of_their_own():
    taken = FULL | {"answers": ["a", "c"], "tokens": 4, "given_back": 2_000_000, "lowest_free": 7_000_000}
    ended = FULL | {"errors": ["the grown server ended with exit code -9", "no answer"]}
    loads = {"overfill": FULL | {"out_of_memory": True}, "penalized": ended, "taken": taken}
    table = table_of(grown=server_figures(grew=True, answers=["a", "b"], **loads))
    assert [[cell.strip() for cell in line.split("|")[2:-1]] for line in table.splitlines() if "m, grown" in line] == [
        ["overfilled", "3", "out of memory", "", ""],
        ["with penalties", "3", "the server ended", "", ""],
        ["memory taken", "3", "0", "7", "1 of 2"],
        ["5", "4", "2", "7"],
    ]


def test_questions_flush_the_radix_cache_and_a_file_left_in_the_home_is_an_error(monkeypatch, tmp_path):
    class StartedServer:
        def __init__(self, name, arguments, environment, log, **more):
            self.environment, self.startup_s, self.url, self.name = environment, 1.0, "http://here", name

        def __enter__(self):
            (Path(self.environment["HOME"]) / ".cache" / "sglang-moe-patches").mkdir(parents=True)

        def __exit__(self, *error):
            pass

        def log_text(self):
            return ""

    (tmp_path / "homes/grown-again/.cache/sglang-moe-patches").mkdir(parents=True)  # left by an earlier run
    monkeypatch.setattr(serving, "has_gpu", lambda: True)
    monkeypatch.setattr(serving, "Server", StartedServer)
    monkeypatch.setattr(serving.Client, "metrics", lambda client: "")
    monkeypatch.setattr(serving.Client, "info", lambda client: {"max_total_num_tokens": 5, "mem_fraction_static": 0.8})
    requests, statuses = [], iter([400, 200, 200])  # the server is busy at the first flush

    def post(client, path, body, timeout_s):
        requests.append(path)
        assert timeout_s > IDLE_TIMEOUT_S
        return SimpleNamespace(status_code=next(statuses), text="it has requests")

    def generate(*args, **kwargs):
        requests.append("a question")
        return {"tokens": [1], "logprobs": [-0.5]}

    monkeypatch.setattr(serving.Client, "post", post)
    monkeypatch.setattr(serving.servers, "generate", generate)
    with pytest.raises(Unanswered, match=r"/flush_cache: HTTP 400: it has requests"):
        serving.serve("grown-again", options(monkeypatch), tmp_path, tmp_path)
    with pytest.raises(serving.Failed, match=r"left files in its home folder: \.cache/sglang-moe-patches"):
        serving.serve("grown-again", options(monkeypatch), tmp_path, tmp_path)
    assert requests[:3] == [*["/flush_cache?timeout=60"] * 2, "a question"]
    monkeypatch.setattr(StartedServer, "__enter__", lambda server: None)
    assert serving.serve("grown-again", options(monkeypatch), tmp_path, tmp_path)["tokens"] == 5
