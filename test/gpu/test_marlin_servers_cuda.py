"""GPU test of INT4 experts on Marlin: the shipped arithmetic model, quantized like Kimi-K2.5's checkpoint.

Two stock servers and a patched server answer the same 200 questions, one question at a time. Marlin adds some of its
sums in random order, so the second stock server shows how much stock differs from itself. The model is too narrow for
column slices to pay. The patched server is therefore forced to use them for every tensor, in prefills and in the CUDA
graph of decodes.
"""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")
if not torch.cuda.is_available():
    pytest.skip("needs a CUDA device: Marlin does not run on the CPU", allow_module_level=True)

from common import forwards, plugins, processes  # noqa: E402
from common.weights import INT4_GROUP, int4_config  # noqa: E402
from sglang_moe_patches.core.patch import SELECT_VARIABLE  # noqa: E402
from sglang_moe_patches.lab.regress import gsm8k  # noqa: E402
from sglang_moe_patches.lab.servers.server import Server  # noqa: E402
from sglang_moe_reference import environment  # noqa: E402
from sglang_moe_reference.model import write_checkpoint  # noqa: E402
from tiny_moe.export import QUESTIONS, load_shipped_bf16  # noqa: E402
from tiny_moe.mutations import SHIPPED  # noqa: E402
from tiny_moe.train import SPEC  # noqa: E402

BENCHMARK = Path(__file__).parents[2] / "benchmark"
QUESTION_COUNT, MIN_CORRECT_FRACTION = 200, 0.85
SERVER_ARGUMENTS = (
    *("--attention-backend", "triton", "--sampling-backend", "pytorch", "--grammar-backend", "none"),
    *("--disable-shared-experts-fusion", "--cuda-graph-max-bs", "1", "--disable-piecewise-cuda-graph"),
    *("--disable-radix-cache", "--random-seed", "1", "--mem-fraction-static", "0.2"),
    *("--max-total-tokens", "16384"),
)
FORCE_COLUMN_SLICES = """
def register():
    from sglang_moe_patches.changes.moe_workspace import column_slices
    column_slices.choose_packed_slice_width = lambda *args, **kwargs: column_slices.MARLIN_TILE_COLUMNS
    column_slices.compute_min_packed_tensor_bytes = lambda max_bytes: 1
"""


def quantize_int4(weight: Any) -> dict[str, Any]:
    """Quantize a projection of an expert to Kimi-K2.5's INT4 format. The largest value of a group becomes 7 or -7.

    :param weight: [out, in].
    :returns: three tensors:

        - ``weight_packed``, int32 [out, in / 8]: eight values, each with 8 added; the first is in the lowest bits.
        - ``weight_scale``, bfloat16 [out, in / ``INT4_GROUP``].
        - ``weight_shape``, int32 [2].
    """
    groups = weight.float().unflatten(1, (-1, INT4_GROUP))
    scale = (groups.abs().amax(2, keepdim=True) / 7).clamp(min=1e-8).bfloat16()
    nibbles = ((groups / scale.float()).round().clamp(-8, 7) + 8).flatten(1).to(torch.int64).unflatten(1, (-1, 8))
    packed = (nibbles << torch.arange(0, 32, 4, device=weight.device)).sum(2)
    return {
        "weight_packed": torch.where(packed >= 2**31, packed - 2**32, packed).to(torch.int32),
        "weight_scale": scale.squeeze(2),
        "weight_shape": torch.tensor(weight.shape, dtype=torch.int32),
    }


def write_int4(folder: Path) -> Path:
    weights: dict[str, Any] = {}
    for name, tensor in load_shipped_bf16(SHIPPED).items():
        parts = quantize_int4(tensor) if ".mlp.experts." in name else {}
        weights |= {f"{name.removesuffix('.weight')}.{part}": made for part, made in parts.items()} or {name: tensor}
    write_checkpoint(folder, SPEC, weights, quantized=False)
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"quantization_config": int4_config()}))
    return folder


def test_200_questions_have_the_answers_of_the_stock_server(tmp_path):
    model = write_int4(tmp_path / "model")
    plugin = plugins.write(tmp_path / "plugin", "benchmark_forwards", "common.forwards:register")
    forcing_plugin = plugins.write_module(tmp_path / "forced", "forced_columns", FORCE_COLUMN_SLICES)
    arguments = environment.server_arguments(["--model-path", str(model), *SERVER_ARGUMENTS])
    evaluation = gsm8k.Evaluation(SHIPPED / QUESTIONS, QUESTION_COUNT, 1, 128, 1)
    servers = {}
    with ExitStack() as stack:
        for name, select in (("stock", "none"), ("stock-again", "none"), ("patched", "all")):
            variables = {
                **processes.variables(plugin, *([forcing_plugin] if name == "patched" else []), BENCHMARK),
                **{**environment.variables(), SELECT_VARIABLE: select},
                forwards.VARIABLE: str(tmp_path / f"{name}.jsonl"),
            }
            server = Server(name, arguments, variables, tmp_path / f"{name}.log", timeout=900)
            servers[name] = stack.enter_context(server), variables

        def ask(name: str) -> list[dict[str, Any]]:
            server, variables = servers[name]
            (tmp_path / f"asked-{name}").mkdir()
            found: list[dict[str, Any]] = gsm8k.evaluate(server.url, variables, evaluation, tmp_path / f"asked-{name}")[
                "answers"
            ]
            return found

        with ThreadPoolExecutor(len(servers)) as pool:  # each server gets one request at a time
            answers = dict(zip(servers, pool.map(ask, servers), strict=True))
    acted = {name: forwards.read(tmp_path / f"{name}.jsonl") for name in servers}
    right = {name: sum(one["predicted"] == one["label"] for one in given) for name, given in answers.items()}
    differ = {
        name: sum(a["text"] != b["text"] for a, b in zip(answers["stock"], given, strict=True))
        for name, given in answers.items()
    }
    print(f"right of {QUESTION_COUNT}: {right}; answers that differ from the stock server's: {differ}")
    for name in ("stock", "stock-again"):
        assert acted[name], name
        assert all(one.is_untouched for one in acted[name]), name
    moe_layers = SPEC.layers - SPEC.dense_layers
    captured = [one.slices for one in acted["patched"] if one.tokens is None]
    prefills = [one.slices for one in acted["patched"] if one.tokens and not one.decode]
    replays = [one for one in acted["patched"] if one.decode]
    assert captured
    assert all(set(each) == {2} and len(each) % moe_layers == 0 for each in captured)
    assert len(prefills) >= QUESTION_COUNT
    assert all(each == [2] * moe_layers for each in prefills)
    assert len(replays) > QUESTION_COUNT
    assert all(one.is_untouched for one in replays)
    assert min(right.values()) >= MIN_CORRECT_FRACTION * QUESTION_COUNT
    assert differ["patched"] <= differ["stock-again"] + QUESTION_COUNT // 50
