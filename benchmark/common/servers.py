"""Start stock and patched servers with real layer sizes and the same random weights, and send prompts to them."""

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
from common.weights import ServedModel

MULTICAST_VARIABLES = ("NCCL_NVLS_ENABLE", "TORCH_SYMM_MEM_DISABLE_MULTICAST", "NVSHMEM_DISABLE_NVLS")
"""Environment variables that switch NVLink multicast off. With --enable-symm-mem, the engine changes them. The plugin
of :mod:`common.weights` then restores the machine's values."""
EAGER = ("--disable-cuda-graph", "--disable-piecewise-cuda-graph")
"""Server arguments that switch all CUDA graphs off."""
SERVERS = ("stock", "patched")
QUESTIONS = 8
"""Number of prompts for which the answers of servers are compared. The prompts are sent one after the other, so each
batch has one request. A server then gives the same answers again, unless its kernels add numbers in a random order.
"""
RUNNER_ARGUMENTS = {
    "flashinfer_trtllm_routed": ("--quantization", "modelopt_fp4", "--moe-runner-backend", "flashinfer_trtllm_routed"),
    "triton": ("--moe-runner-backend", "triton"),
    # The engine reads INT4 experts from config.json and chooses Marlin for them. The shared experts are not quantized,
    # so they cannot run as routed experts.
    "marlin": ("--disable-shared-experts-fusion",),
}


@dataclass(frozen=True)
class Setup:
    """Model, arguments and environment of a benchmark's servers.

    :param served: model to serve.
    :param work: folder for the model, logs and records. It must not exist.
    :param tp: number of tensor-parallel ranks.
    :param tokens: tokens of the longest prompt and of a prefill chunk.
    :param arguments: further server arguments.
    :param workspace_mb: MiB that the reference kernel allocates while it runs, as the vendor's kernel does.
    :param observe: whether the servers record their memory. This costs time in every forward pass.
    :param timed: whether the servers record each forward pass (:mod:`common.forwards`). This costs time, too.
    :param variables: further environment variables.
    :param changes: ``SGLANG_MOE_PATCHES`` of a patched server.
    """

    served: ServedModel
    work: Path
    tp: int = 1
    tokens: int = 16384
    arguments: tuple[str, ...] = ()
    workspace_mb: int = 0
    observe: bool = True
    timed: bool = False
    variables: tuple[tuple[str, str], ...] = ()
    changes: str = "all"

    def server_arguments(self) -> list[str]:
        """Return the server arguments, with the path of the model, and without host and port."""
        arguments = ["--model-path", str(self.work / "model"), *RUNNER_ARGUMENTS[self.served.runner]]
        arguments += ["--tp", str(self.tp), "--disable-radix-cache"]
        arguments += ["--chunked-prefill-size", str(self.tokens), "--max-prefill-tokens", str(self.tokens)]
        arguments += ["--grammar-backend", "none", "--skip-server-warmup", "--random-seed", "1", *self.arguments]
        if has_gpu():
            arguments += ["--attention-backend", "triton", "--sampling-backend", "pytorch"]
            # Switch off two all-reduce kernels that can use NVLink multicast. They have no effect on the measurements.
            arguments += ["--disable-custom-all-reduce", "--enforce-disable-flashinfer-allreduce-fusion"]
        if "--max-total-tokens" not in arguments and "--mem-fraction-static" not in arguments:
            # On a GPU, choose a KV cache of some GB: the engine reports its size only in hundredths of a GiB.
            capacity = 1_000_000 if has_gpu() else self.tokens + 4096
            arguments += ["--max-total-tokens", str(capacity), "--mem-fraction-static", "0.95"]
        return environment.server_arguments(arguments)

    def environment(self, name: str) -> dict[str, str]:
        """Return the environment variables of a server.

        :param name: name of the server. A stock server's name begins with ``stock``.
        """
        own = processes.variables(self.work / "plugin", Path(__file__).parents[1])
        own |= environment.variables(own) | {
            SELECT_VARIABLE: "none" if name.startswith("stock") else self.changes,
            **dict(self.variables),
            weights.VARIABLES_KEPT: json.dumps({k: own[k] for k in MULTICAST_VARIABLES if k in own}),
            # Servers start at the same time on the same GPUs, so free memory changes during the engine's check.
            "SGLANG_ENABLE_TP_MEMORY_INBALANCE_CHECK": "0",
            # Each server with symmetric memory compiles an allocator in TMPDIR.
            "TMPDIR": str(self.temporary_folder(name)),
            # PyTorch compiles the router of some models, and chooses kernels by their time. Kernels round differently.
            # So servers share the compiled kernels. Otherwise two stock servers could give different answers.
            "TORCHINDUCTOR_CACHE_DIR": str(self.work / "compiled"),
        }
        if self.workspace_mb:
            own[environment.WORKSPACE_MB.name] = str(self.workspace_mb)
        if self.observe:
            own[OBSERVE.name] = str(self.records_folder(name))
        if self.timed:
            own[forwards.VARIABLE] = str(self.forwards_file(name))
        return own

    def records_folder(self, name: str) -> Path:
        """Return the folder for the records of a server's processes."""
        return self.work / f"observed-{name}"

    def forwards_file(self, name: str) -> Path:
        """Return the file to which the plugin :mod:`common.forwards` writes its lines."""
        return self.work / f"{name}.jsonl"

    def temporary_folder(self, name: str) -> Path:
        """Return the folder for a server's temporary files."""
        return self.work / f"tmp-{name}"

    def prepare(self) -> None:
        """Write the model and the plugins, once for all servers."""
        weights.write_model(self.work / "model", self.served)
        plugins.write(self.work / "plugin", "benchmark_weights", "common.weights:register")
        if self.timed:
            plugins.write(self.work / "plugin", "benchmark_forwards", "common.forwards:register")

    def server(self, name: str) -> Server:
        """Create a server without starting it.

        :param name: name that begins with ``stock`` or ``patched``.
        """
        self.records_folder(name).mkdir()
        self.temporary_folder(name).mkdir()
        log, progress = self.work / f"{name}.log", processes.print_progress(name, 10)
        return Server(name, self.server_arguments(), self.environment(name), log, timeout=400, progress=progress)


def add_options(parser: argparse.ArgumentParser, **defaults: Any) -> None:
    """Add options for the model and for the lengths of prompts and answers."""
    parser.add_argument(
        "--model", choices=weights.SERVABLE, default="kimi-k2.5", help="model with its layer sizes (%(default)s)"
    )
    parser.add_argument(
        "--shard",
        type=int,
        default=1,
        help="give the model the sizes of one rank of this many tensor-parallel ranks (%(default)s)",
    )
    parser.add_argument("--dense-layers", type=int, default=1, help="number of dense layers (%(default)s)")
    parser.add_argument("--moe-layers", type=int, default=3, help="number of MoE layers (%(default)s)")
    parser.add_argument(
        "--tokens",
        type=int,
        default=16_384,
        help="tokens of the longest prompt, which is prefilled in one forward pass (%(default)s)",
    )
    parser.add_argument("--new-tokens", type=int, default=16, help="tokens of each answer (%(default)s)")
    parser.add_argument("server_arguments", nargs="*", help="further server arguments, after `--`")
    parser.set_defaults(**defaults)


@contextmanager
def run_servers(setups: dict[str, Setup], *, at_once: bool) -> Iterator[dict[str, Server]]:
    """Run several servers at the same time within the block, and end them all after it.

    :param at_once: start all servers at the same time. Otherwise start them one after the other.
    """
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
    """Draw a prompt of random token ids."""
    return random.Random(f"{tokens}/{seed}").choices(range(3, model.vocab_size()), k=tokens)


def answer_all(server: Server, longest: int, new_tokens: int, *, logprobs: bool = False) -> list[dict[str, Any]]:
    """Ask a server for answers to ``QUESTIONS`` random prompts, one after the other.

    :param longest: tokens of the longest prompt. The other prompts are shorter in equal steps.
    :returns: answers of :func:`generate`.
    """
    lengths = [max(1, longest * number // QUESTIONS) for number in range(1, QUESTIONS + 1)]
    return [generate(server, prompt(length, 0), new_tokens, logprobs=logprobs) for length in lengths]


def digests(answers: Sequence[Mapping[str, Any]], part: str = "tokens") -> list[str]:
    """Compute a digest of each answer's tokens.

    :param part: ``tokens``, or ``logprobs`` for a digest of their log-probabilities.
    """
    return [hashlib.sha256(str(answer[part]).encode()).hexdigest()[:16] for answer in answers]


def answer_digests(server: Server, longest: int, new_tokens: int) -> list[str]:
    """Compute the digests of the tokens of all answers of :func:`answer_all`."""
    return digests(answer_all(server, longest, new_tokens))


def equal_answers(
    measured: Mapping[str, Mapping[str, Any]], name: str, part: str = "answers", expected: str = "stock"
) -> str:
    """Count the answers of a server that equal the answers of the server ``expected``, as in "8 of 8".

    :param measured: figures of the servers, by name.
    :param part: key of the digests.
    :returns: "" if one of the servers has no digests, or if both are the same server.
    """
    own, others = (measured.get(server, {}).get(part, []) for server in (name, expected))
    if name == expected or not own or not others:
        return ""
    return f"{sum(answer == other for answer, other in zip(own, others, strict=True))} of {len(others)}"


def first_tokens(answers: Sequence[Mapping[str, Any]]) -> list[tuple[int, float]]:
    """Return the first token of each answer, with its log-probability."""
    return [(answer["tokens"][0], answer["logprobs"][0]) for answer in answers]


def first_difference(measured: Mapping[str, Mapping[str, Any]], name: str) -> str:
    """Describe how a server's :func:`first_tokens` differ from those of the stock server.

    :returns: "" if they are equal or not known.
    """
    own, stock = (measured.get(server, {}).get("first", []) for server in (name, "stock"))
    if name == "stock" or not own or not stock:
        return ""
    pairs = zip(own, stock, strict=True)
    differences = [abs(logprob - other) for (token, logprob), (stock_token, other) in pairs if token == stock_token]
    other_tokens, largest = len(stock) - len(differences), max(differences, default=0.0)
    if not (largest or other_tokens):
        return ""
    return f"; of first tokens {largest:.2g} apart at most, {other_tokens} are other tokens"


def generate(
    server: Server, ids: list[int], new_tokens: int, *, logprobs: bool = True, **fields: Any
) -> dict[str, Any]:
    """Ask a server for one greedy answer.

    :param ids: token ids of the prompt.
    :param logprobs: whether to ask for log-probabilities.
    :param fields: further fields of the request.
    :returns: ``tokens``, ``logprobs``, and ``latency_s`` as measured by the engine.
    """
    import httpx

    server.check()
    response = httpx.post(
        f"{server.url}/generate",
        json={
            "input_ids": ids,
            "sampling_params": {"temperature": 0, "max_new_tokens": new_tokens, "ignore_eos": True},
            "return_logprob": logprobs,
            **fields,
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


def is_same_answer(stock: dict[str, Any], patched: dict[str, Any]) -> bool:
    """Return whether two answers have the same tokens and log-probabilities."""
    return bool(stock["tokens"] == patched["tokens"] and stock["logprobs"] == patched["logprobs"])
