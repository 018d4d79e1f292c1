"""Columns in real servers on a GPU, beside what else a server may have on: the answers of the stock server.

Each case starts a stock and a patched server of two layers of a model's widths, random weights, on the Triton runner,
and asks both the same prompts. It counts only if the patched one was seen to run in more than one slice.
"""

from __future__ import annotations

import json
import os
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")
if not torch.cuda.is_available():
    pytest.skip("needs a CUDA device: the engine's Triton runner does not run on the CPU", allow_module_level=True)

import httpx  # noqa: E402
from common import plugins  # noqa: E402
from common.servers import EAGER, Setup, prompt, running  # noqa: E402
from common.shapes import MODELS  # noqa: E402
from common.weights import Served  # noqa: E402
from sglang_moe_patches.changes.moe_workspace.token_slices import MAX_MOE_TOKENS  # noqa: E402
from sglang_moe_patches.regression.server import Server  # noqa: E402

QWEN = MODELS["qwen3-235b"].shard(4)
#: A [tokens, top-k, hidden] tensor of 512 MiB.
TOKENS = 8192
RANK = 8
ATTENTION = {"q_proj": (4096, 2048), "v_proj": (4096, 128)}
SEEN = "SLICES_SEEN"

#: In every process of the servers: a line for each time the runner decides on its slices.
COUNTER = f"""
import functools, json, os
import wrapt

def register():
    wrapt.register_post_import_hook(_count, "sglang_moe_patches.changes.moe_workspace.seams")

def _count(seams):
    original = seams.slices

    @functools.wraps(original)
    def slices(promise, output):
        found = original(promise, output)
        with open(os.environ["{SEEN}"], "a") as lines:
            lines.write(json.dumps([promise.shape[0], len(found)]) + "\\n")
        return found

    seams.slices = slices
"""


@dataclass(frozen=True)
class Case:
    """A kind of server, and how it is asked."""

    arguments: tuple[str, ...] = EAGER
    gpus: int = 1
    tokens: int = TOKENS
    before: str = ""
    """An endpoint to call before the prompts."""
    lora: str = ""
    """Target: ``attention`` or ``experts``."""
    variables: tuple[tuple[str, str], ...] = ()
    whole: bool = False
    """The tensor stays whole, because somebody reads it."""
    replayed: bool = False
    """Prompts are served by graphs: the slices are seen at capture alone."""
    request: dict[str, Any] = field(default_factory=dict)


RECORDER = ("--expert-distribution-recorder-mode", "stat")
#: No multiple of 128, and no divisor of the prompts.
MOST = 5000
CASES = {
    "default graphs": Case((), tokens=4096, replayed=True),
    "EPLB recorder": Case((*EAGER, *RECORDER), before="start_expert_distribution_record"),
    "LoRA on attention": Case(EAGER, lora="attention", request={"lora_path": "adapter"}),
    "LoRA on experts": Case(EAGER, lora="experts", whole=True, request={"lora_path": "adapter"}),
    "token slices": Case(EAGER, variables=((MAX_MOE_TOKENS.name, str(MOST)),)),
    "two ranks": Case((*EAGER, "--tp", "2"), gpus=2),
    "expert parallelism": Case((*EAGER, "--tp", "2", "--ep-size", "2"), gpus=2),
    "data-parallel attention": Case((*EAGER, "--tp", "2", "--dp", "2", "--enable-dp-attention"), gpus=2),
}


def write_adapter(folder: Path, target: str) -> Path:
    """A LoRA adapter of random weights, large enough to change answers."""
    from safetensors.torch import save_file

    folder.mkdir()
    generator = torch.Generator().manual_seed(0)
    hidden, intermediate = QWEN.hidden, QWEN.moe_intermediate
    shapes = {f"self_attn.{name}": shape for name, shape in ATTENTION.items()}
    if target == "experts":
        sizes = {"gate_proj": (hidden, intermediate), "up_proj": (hidden, intermediate)}
        sizes["down_proj"] = (intermediate, hidden)
        shapes = {f"mlp.experts.{e}.{name}": shape for e in range(QWEN.experts) for name, shape in sizes.items()}
    tensors = {}
    for layer in range(2):
        for name, (columns, rows) in shapes.items():
            prefix = f"base_model.model.model.layers.{layer}.{name}"
            a, b = (torch.randn(*shape, generator=generator) for shape in ((RANK, columns), (rows, RANK)))
            tensors[f"{prefix}.lora_A.weight"] = (a / columns**0.5).bfloat16()
            tensors[f"{prefix}.lora_B.weight"] = b.bfloat16()
    save_file(tensors, folder / "adapter_model.safetensors")
    config = {"peft_type": "LORA", "r": RANK, "lora_alpha": RANK, "bias": "none", "base_model_name_or_path": "",
              "target_modules": sorted({name.rsplit(".", 1)[1] for name in shapes})}  # fmt: skip
    (folder / "adapter_config.json").write_text(json.dumps(config))
    return folder


def ask(server: Server, case: Case) -> list[Any]:
    """Tokens and their log-probabilities, of prompts that are asked one after the other."""

    def one(seed: int) -> Any:
        body = {
            "input_ids": prompt(case.tokens - 16 * seed, seed),
            "sampling_params": {"temperature": 0, "max_new_tokens": 4, "ignore_eos": True},
            "return_logprob": True,
            **case.request,
        }
        answer = httpx.post(f"{server.url}/generate", json=body, timeout=300).raise_for_status().json()
        return answer["output_ids"], answer["meta_info"]["output_token_logprobs"]

    if case.before:
        httpx.post(f"{server.url}/{case.before}", timeout=60).raise_for_status()
    return [one(seed) for seed in range(3)]


def seen(path: Path) -> list[tuple[int, int]]:
    return [tuple(json.loads(line)) for line in path.read_text().splitlines()] if path.exists() else []


@pytest.fixture
def counter(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where the slices are noted that any process of the servers decides on."""
    folder = plugins.write_module(tmp_path / "counter", "slices_counter", COUNTER)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(folder), *filter(None, [os.environ.get("PYTHONPATH")])]))
    return tmp_path / "slices"


@pytest.mark.parametrize("name", CASES)
def test_a_patched_server_answers_as_stock(tmp_path, counter, name):
    case = CASES[name]
    if torch.cuda.device_count() < case.gpus:
        pytest.skip(f"needs {case.gpus} GPUs")
    arguments = [*case.arguments, "--max-running-requests", "8", "--max-total-tokens", str(4 * TOKENS)]
    arguments += ["--mem-fraction-static", "0.9"]
    if case.replayed:
        arguments += ["--piecewise-cuda-graph-tokens", str(case.tokens), "--cuda-graph-max-bs", "2"]
    if case.lora:
        adapter = write_adapter(tmp_path / "adapter", case.lora)
        arguments += ["--enable-lora", "--lora-paths", f"adapter={adapter}", "--max-loras-per-batch", "2"]
    setup = Setup(
        Served(QWEN, moe_layers=2, runner="triton"),
        tmp_path / "servers",
        tokens=TOKENS,
        arguments=tuple(arguments),
        observe=False,
        variables=((SEEN, str(counter)), *case.variables),
    )
    setup.prepare()
    with running({"stock": setup, "patched": setup}, at_once=True) as servers:
        captured = seen(counter)
        with ThreadPoolExecutor(2) as pool:
            stock, patched = pool.map(lambda server: ask(server, case), servers.values())
    decided = seen(counter)
    print(name, "captured", sorted(set(captured)), "decided", sorted(set(decided)))
    assert patched == stock
    if case.whole:
        assert decided == []
        return
    if case.variables:
        assert max(tokens for tokens, _ in decided) <= MOST
    assert max(slices for tokens, slices in decided if tokens >= case.tokens // 2) > 1
    if case.replayed:
        assert decided == captured, "a prompt was not served by a graph"
