"""Servers of real layer shapes for the benchmarks: stock and patched, with the same random weights."""

from __future__ import annotations

import argparse
import hashlib
import json
import random
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sglang_moe_patches.core.machine import has_gpu
from sglang_moe_patches.core.patch import SELECT_VARIABLE
from sglang_moe_patches.core.variables import OBSERVE
from sglang_moe_patches.lab.servers.server import Server
from sglang_moe_reference import environment, model

from common import forwards, plugins, processes, weights
from common.weights import Served

#: The engine turns NVLink multicast on with --enable-symm-mem. Where the machine has it off, it stays off.
MULTICAST_VARIABLES = ("NCCL_NVLS_ENABLE", "TORCH_SYMM_MEM_DISABLE_MULTICAST", "NVSHMEM_DISABLE_NVLS")
#: Neither CUDA graphs nor piecewise ones.
EAGER = ("--disable-cuda-graph", "--disable-piecewise-cuda-graph")
SERVERS = ("stock", "patched")
QUESTIONS = 8
"""Prompts that are asked one after the other, so that a server without noise repeats its answers."""
RUNNER_ARGUMENTS = {
    "flashinfer_trtllm_routed": ("--quantization", "modelopt_fp4", "--moe-runner-backend", "flashinfer_trtllm_routed"),
    "triton": ("--moe-runner-backend", "triton"),
    # The engine finds the INT4 experts in config.json, and Marlin for them. The shared experts are not quantized: they
    # cannot be routed ones.
    "marlin": ("--disable-shared-experts-fusion",),
}


@dataclass(frozen=True)
class Setup:
    """How servers are started.

    :param work: a folder for the model, logs and observations; must not exist.
    :param tokens: the longest prompt, and the chunk size of the prefill.
    :param workspace_mb: MiB that the reference kernel takes while it runs, as the vendor kernel does for its workspace.
    :param observe: have the servers record their memory; costs time in every forward.
    :param timed: have the servers write what each forward took and did (:mod:`common.forwards`); likewise.
    :param changes: ``SGLANG_MOE_PATCHES`` of a patched server.
    """

    served: Served
    work: Path
    tp: int = 1
    tokens: int = 16384
    arguments: tuple[str, ...] = ()
    workspace_mb: int = 0
    observe: bool = True
    timed: bool = False
    variables: tuple[tuple[str, str], ...] = ()
    changes: str = "all"

    def command(self) -> list[str]:
        given = ["--model-path", str(self.work / "model"), *RUNNER_ARGUMENTS[self.served.runner]]
        given += ["--tp", str(self.tp), "--disable-radix-cache"]
        given += ["--chunked-prefill-size", str(self.tokens), "--max-prefill-tokens", str(self.tokens)]
        given += ["--grammar-backend", "none", "--skip-server-warmup", "--random-seed", "1", *self.arguments]
        if has_gpu():
            given += ["--attention-backend", "triton", "--sampling-backend", "pytorch"]
            # Neither of them touches what is measured; both can use NVLink multicast.
            given += ["--disable-custom-all-reduce", "--enforce-disable-flashinfer-allreduce-fusion"]
        if "--max-total-tokens" not in given and "--mem-fraction-static" not in given:
            # Some GB of KV cache on a GPU: the engine gives its size in hundredths of a GiB.
            capacity = 1_000_000 if has_gpu() else self.tokens + 4096
            given += ["--max-total-tokens", str(capacity), "--mem-fraction-static", "0.95"]
        return environment.server_arguments(given)

    def environment(self, name: str) -> dict[str, str]:
        own = processes.variables(self.work / "plugin", Path(__file__).parents[1])
        own |= environment.variables(own) | {
            SELECT_VARIABLE: "none" if name.startswith("stock") else self.changes,
            **dict(self.variables),
            weights.VARIABLES_KEPT: json.dumps({k: own[k] for k in MULTICAST_VARIABLES if k in own}),
            # Servers start at once on the same GPUs; and with symmetric memory each compiles an allocator there.
            "SGLANG_ENABLE_TP_MEMORY_INBALANCE_CHECK": "0",
            "TMPDIR": str(self.temporary(name)),
            # Some models are routed by code that PyTorch compiles; it chooses kernels by their time, and those round
            # otherwise. Servers that choose by themselves give different answers, stock ones as well.
            "TORCHINDUCTOR_CACHE_DIR": str(self.work / "compiled"),
        }
        if self.workspace_mb:
            own[environment.WORKSPACE_MB.name] = str(self.workspace_mb)
        if self.observe:
            own[OBSERVE.name] = str(self.observed(name))
        if self.timed:
            own[forwards.VARIABLE] = str(self.forwards_file(name))
        return own

    def observed(self, name: str) -> Path:
        return self.work / f"observed-{name}"

    def forwards_file(self, name: str) -> Path:
        return self.work / f"{name}.jsonl"

    def temporary(self, name: str) -> Path:
        return self.work / f"tmp-{name}"

    def prepare(self) -> None:
        weights.write_model(self.work / "model", self.served)
        plugins.write(self.work / "plugin", "benchmark_weights", "common.weights:register")
        if self.timed:
            plugins.write(self.work / "plugin", "benchmark_forwards", "common.forwards:register")

    def server(self, name: str) -> Server:
        """``name`` starts with ``stock`` or ``patched``."""
        self.observed(name).mkdir()
        self.temporary(name).mkdir()
        log, progress = self.work / f"{name}.log", processes.print_progress(name, 10)
        return Server(name, self.command(), self.environment(name), log, timeout=400, progress=progress)


def add_options(parser: argparse.ArgumentParser, **defaults: Any) -> None:
    """Those that say what is served, and how long prompts and answers are."""
    parser.add_argument("--model", choices=weights.SERVABLE, default="kimi-k2.5", help="whose layer shapes")
    parser.add_argument("--shard", type=int, default=1, help="serve the sizes of one rank of so many (%(default)s)")
    parser.add_argument("--dense-layers", type=int, default=1, help="%(default)s")
    parser.add_argument("--moe-layers", type=int, default=3, help="%(default)s")
    parser.add_argument("--tokens", type=int, default=16_384, help="of the longest prompt, prefilled in one forward")
    parser.add_argument("--new-tokens", type=int, default=16, help="of each answer (%(default)s)")
    parser.add_argument("server_arguments", nargs="*", help="after --: more arguments for the servers")
    parser.set_defaults(**defaults)


@contextmanager
def running(setups: dict[str, Setup], *, at_once: bool) -> Iterator[dict[str, Server]]:
    """All these servers at the same time, started one after another or ``at_once``; none is left when it ends."""
    with ExitStack() as stack:
        servers = {name: setup.server(name) for name, setup in setups.items()}
        with ThreadPoolExecutor(len(servers) if at_once else 1) as pool:
            entered = [pool.submit(server.__enter__) for server in servers.values()]
            for server in servers.values():
                stack.callback(server.stop)
        for future in entered:
            future.result()
        yield servers


def prompt(tokens: int, seed: object) -> list[int]:
    """Random token ids."""
    return random.Random(f"{tokens}/{seed}").choices(range(3, model.vocab_size()), k=tokens)


def answer_all(server: Server, longest: int, new_tokens: int, *, logprobs: bool = False) -> list[dict[str, Any]]:
    """Answers to random prompts of many lengths, the longest of so many tokens, as :func:`generate` gives them."""
    lengths = [max(1, longest * number // QUESTIONS) for number in range(1, QUESTIONS + 1)]
    return [generate(server, prompt(length, 0), new_tokens, logprobs=logprobs) for length in lengths]


def digests(answers: Sequence[Mapping[str, Any]], part: str = "tokens") -> list[str]:
    """A digest of each answer's ``tokens``, or of their ``logprobs``."""
    return [hashlib.sha256(str(answer[part]).encode()).hexdigest()[:16] for answer in answers]


def answer_digests(server: Server, longest: int, new_tokens: int) -> list[str]:
    """What :func:`digests` makes of :func:`answer_all`."""
    return digests(answer_all(server, longest, new_tokens))


def equal_answers(
    measured: Mapping[str, Mapping[str, Any]], name: str, part: str = "answers", expected: str = "stock"
) -> str:
    """How many of a server's answers equal those of the server ``expected``; "": one gave none, or both are one."""
    own, stocks = (measured.get(each, {}).get(part, []) for each in (name, expected))
    if name == expected or not own or not stocks:
        return ""
    return f"{sum(mine == stock for mine, stock in zip(own, stocks, strict=True))} of {len(stocks)}"


def first_tokens(answers: Sequence[Mapping[str, Any]]) -> list[tuple[int, float]]:
    """Of each answer its first token, and that token's log-probability."""
    return [(answer["tokens"][0], answer["logprobs"][0]) for answer in answers]


def first_difference(measured: Mapping[str, Mapping[str, Any]], name: str) -> str:
    """How far a server's :func:`first_tokens` are from stock's; "": they are the same, or not known."""
    own, stocks = (measured.get(each, {}).get("first", []) for each in (name, "stock"))
    if name == "stock" or not own or not stocks:
        return ""
    same = [abs(mine[1] - stock[1]) for mine, stock in zip(own, stocks, strict=True) if mine[0] == stock[0]]
    other = len(stocks) - len(same)
    most = max(same, default=0.0)
    return f"; of first tokens {most:.2g} apart at most, {other} are other tokens" if most or other else ""


def generate(server: Server, ids: list[int], new_tokens: int, *, logprobs: bool = True, **more: Any) -> dict[str, Any]:
    """One greedy answer: its tokens, their log-probabilities if asked for, and the engine's own latency in seconds.

    :param more: of the request.
    """
    import httpx

    server.check()
    response = httpx.post(
        f"{server.url}/generate",
        json={
            "input_ids": ids,
            "sampling_params": {"temperature": 0, "max_new_tokens": new_tokens, "ignore_eos": True},
            "return_logprob": logprobs,
            **more,
        },
        timeout=300,
    )
    response.raise_for_status()
    answer = response.json()
    return {
        "tokens": answer["output_ids"],
        "logprobs": [logprob for logprob, _, _ in answer["meta_info"].get("output_token_logprobs", [])],
        "latency_s": answer["meta_info"]["e2e_latency"],
    }


def same(stock: dict[str, Any], patched: dict[str, Any]) -> bool:
    """Whether two answers are equal, token for token and log-probability for log-probability."""
    return bool(stock["tokens"] == patched["tokens"] and stock["logprobs"] == patched["logprobs"])
