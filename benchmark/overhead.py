"""What the patches cost in time: decode and prefill against stock, and microseconds of host time per MoE layer.

    python benchmark/overhead.py servers --json o.json --markdown o.md      # needs a GPU
    sglang-moe-patches exec --reference-kernels -- python benchmark/overhead.py host       # any machine

`servers` runs stock and patched servers of real widths side by side on the same GPUs, eager and with CUDA graphs
(piecewise ones for prefill too), and asks them in turn, one request at a time, so that both meet the same conditions.
First every answer must be equal, stock against patched, token for token and log-probability for log-probability, in
both modes; else there is no result. The routed kernel is the reference kernel, the same in all: what is compared is the
engine around it. A second stock server shows how much two processes differ that run the same.

`host` times what the output buffer adds to one MoE layer in eager mode: the engine's own runner function with the
arguments of a real decode step, in a decoder layer and an attention that do nothing else, stock and patched in turn.
Quantization before the kernel and the kernel itself return at once: their time is the device's.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import serving
from peak_memory import machine

GRAPH_TOKENS = (64, 256, 1024)
CAPTURED = (
    *("--cuda-graph-bs", "1", "2", "4"),
    *("--piecewise-cuda-graph-tokens", *map(str, GRAPH_TOKENS)),
    *("--piecewise-cuda-graph-max-tokens", str(GRAPH_TOKENS[-1])),
)
EAGER = ("--disable-cuda-graph", "--disable-piecewise-cuda-graph")
MODES = {"eager": EAGER, "captured": CAPTURED}


# --- Servers ---------------------------------------------------------------------------------------------------------


def ratio(stock: list[float], other: list[float]) -> dict[str, float]:
    """Of paired runs: the median of stock over the other (more is faster), and how the pairs spread."""
    pairs = sorted(a / b for a, b in zip(stock, other, strict=True))
    return {
        "stock_s": statistics.median(stock),
        "other_s": statistics.median(other),
        "ratio": statistics.median(pairs),
        "lowest": pairs[0],
        "highest": pairs[-1],
        "pairs": len(pairs),
    }


def in_turn(servers: dict[str, Any], prompt: list[int], new_tokens: int, rounds: int) -> dict[str, Any]:
    """Seconds for each new token: the servers asked in turn, every other round the other way round."""
    seconds: dict[str, list[float]] = {name: [] for name in servers}
    for index in range(rounds + 1):
        for name in list(servers)[:: 1 if index % 2 else -1]:
            latency = serving.generate(servers[name], prompt, new_tokens, logprobs=False)["latency_s"]
            if index:  # the first round warms them
                seconds[name].append(latency / new_tokens)
    return {name: ratio(seconds["stock"], seconds[name]) for name in servers if name != "stock"}


def compare_servers(arguments: argparse.Namespace, work: Path) -> dict[str, Any]:
    shape = serving.with_layers(serving.SHAPES[arguments.model], None, arguments.moe_layers)
    setups = {}
    modes = arguments.modes.split(",")
    for mode in modes:
        setup = serving.Setup(shape, work, arguments.tp, arguments.tokens, MODES[mode], observe=False)
        for name in (*serving.SERVERS, serving.CONTROL):
            setups[f"{name}-{mode}"] = setup
    setup.prepare()
    result: dict[str, Any] = {name: vars(arguments)[name] for name in ("model", "tp", "tokens")}
    result |= {"machine": machine(), "modes": modes}
    with serving.servers(setups, at_once=True) as running:
        result["engine"] = serving.state(running[f"stock-{modes[0]}"])["version"]
        print("servers ready:", {name: round(server.startup_s) for name, server in running.items()}, flush=True)
        # Prompts that fit a captured size, that are padded to one, and that are too long for all.
        lengths = (7, GRAPH_TOKENS[0], GRAPH_TOKENS[1] - 3, GRAPH_TOKENS[2], GRAPH_TOKENS[2] + 50)
        questions = [(length, logprobs) for length in lengths for logprobs in (True, False)]
        result["questions"], result["differing"] = len(questions) * len(modes), []
        answers: dict[str, list[Any]] = {}
        for name, server in running.items():
            # Without log-probabilities: the engine replays no piecewise graph for requests that want them.
            answers[name] = [
                serving.generate(server, serving.prompt(length, 0), 24, logprobs=logprobs)
                for length, logprobs in questions
            ]
        for mode in modes:
            for question, stock, patched in zip(
                questions, answers[f"stock-{mode}"], answers[f"patched-{mode}"], strict=True
            ):
                if not serving.same(stock, patched):
                    result["differing"].append((mode, *question))
        first, last = (answers[f"stock-{mode}"] for mode in (modes[0], modes[-1]))
        result["modes_alike"] = sum(a["tokens"] == b["tokens"] for a, b in zip(first, last, strict=True))
        result["replayed"] = {name: replayed(server.log_text()) for name, server in running.items()}
        if result["differing"]:
            return result
        for mode in modes:
            servers = {name: running[f"{name}-{mode}"] for name in (*serving.SERVERS, serving.CONTROL)}

            result[f"decode-{mode}"] = in_turn(servers, serving.prompt(8, 1), arguments.steps, arguments.rounds)
            result[f"prefill-{mode}"] = in_turn(servers, serving.prompt(arguments.tokens, 1), 1, arguments.rounds)
            print(mode, result[f"decode-{mode}"], result[f"prefill-{mode}"], flush=True)
    return result


def replayed(log: str) -> dict[str, bool]:
    """Whether the engine says that it replayed graphs, for prefill and for decode."""
    lines = [line for line in log.splitlines() if "cuda graph: True" in line]
    return {kind: any(f"{kind.capitalize()} batch" in line for line in lines) for kind in ("prefill", "decode")}


def server_tables(result: dict[str, Any]) -> str:
    lines = [
        f"{result['machine']}, SGLang {result['engine']}, {result['model']} widths, TP={result['tp']}. Answers equal: "
        f"{result['questions'] - len(result['differing'])} of {result['questions']} ({' and '.join(result['modes'])}); "
        f"stock's own in {result['modes'][0]} and {result['modes'][-1]} mode: {result['modes_alike']} of "
        f"{result['questions'] // len(result['modes'])}.",
        "",
        "| one request at a time | stock | | | stock over it: speed, median of pairs | pairs from .. to |",
        "| --- | --: | --- | --: | --: | --: |",
    ]
    for what, unit in (("decode", "ms a step"), ("prefill", f"ms for {result['tokens']:,} tokens")):
        for mode in result["modes"]:
            for name, r in result[f"{what}-{mode}"].items():
                lines.append(
                    f"| {what}, {mode}, {unit} | {r['stock_s'] * 1e3:.3f} | {name} | {r['other_s'] * 1e3:.3f} "
                    f"| {r['ratio']:.4f} | {r['lowest']:.3f} .. {r['highest']:.3f} ({r['pairs']}) |"
                )
    return "\n".join(lines) + "\n"


# --- Host time -------------------------------------------------------------------------------------------------------


def host_time(arguments: argparse.Namespace, work: Path) -> dict[str, Any]:
    import torch

    sys.path.insert(0, str(Path(__file__).parents[1] / "test" / "engine"))
    from harness import InProcess
    from sglang_moe_patches.changes import output_buffer
    from sglang_moe_patches.changes.output_buffer import lend
    from sglang_moe_patches.patch import Patcher, look
    from sglang_moe_patches.reference.model import ModelSpec, make_model

    model_folder = work / "model"
    make_model(model_folder, ModelSpec(layers=2, dense_layers=1))
    gpu: dict[str, Any] = {
        "device": "cuda",
        "attention_backend": "triton",
        "sampling_backend": "pytorch",
        "mem_fraction_static": 0.9,
        "disable_piecewise_cuda_graph": True,
    }
    engine = InProcess(model_folder, **(gpu if torch.cuda.is_available() else {}))

    from sglang.srt.layers.moe.moe_runner import flashinfer_trtllm as runner
    from sglang.srt.models.deepseek_v2 import DeepseekV2AttentionMLA, DeepseekV2DecoderLayer

    change = output_buffer.CHANGE
    plan = look(change)
    if plan.install is None:
        raise SystemExit(f"overhead: {change.name} is {plan} on this engine: nothing of ours to time")
    patches, around = Patcher(), Patcher()
    plan.install(patches)
    model = engine.load(model_folder)
    patches.undo()

    # One real call of the runner, to repeat.
    calls: list[Any] = []
    function = lend._RUNNER
    around.wrap(runner, function, lambda original: lambda *a, **k: calls.append((a, k)) or original(*a, **k))
    engine.generate(model, [[5, 6, 7, 8]], 1)
    around.undo()
    (positional, keywords) = calls[-1]  # the decode step: one token
    quantized = runner.quantize_hidden_states_fp4(positional[0].hidden_states, positional[1].w13_input_scale_quant)

    import flashinfer.fused_moe

    around.replace(runner, "quantize_hidden_states_fp4", lambda *args, **kwargs: quantized)
    around.replace(flashinfer.fused_moe, "trtllm_fp4_block_scale_routed_moe", lambda **kwargs: [kwargs["output"]])

    def skeleton(self: Any, positions: Any, hidden_states: Any, forward_batch: Any, residual: Any) -> Any:
        self.self_attn.forward()
        return getattr(runner, function)(*positional, **keywords)

    around.replace(DeepseekV2DecoderLayer, "forward", skeleton)
    around.replace(DeepseekV2AttentionMLA, "forward", lambda self: None)
    layer = model.model.layers[1]
    hidden_states = torch.empty_like(positional[0].hidden_states)
    residual = torch.empty_like(hidden_states)

    def layers(name: str) -> float:
        """Microseconds of one layer's skeleton."""
        if name == "patched":
            plan.install(patches)
        try:
            for _ in range(20):
                output = layer.forward(None, hidden_states, None, residual).hidden_states
            reused = output.data_ptr() == hidden_states.data_ptr()
            if reused != (name == "patched"):
                raise SystemExit(f"overhead: {name} {'used' if reused else 'did not use'} the layer's input")
            started = time.thread_time()  # processor time: other programs' turns do not count
            for _ in range(arguments.steps):
                layer.forward(None, hidden_states, None, residual)
            return (time.thread_time() - started) / arguments.steps * 1e6
        finally:
            patches.undo()

    stock: list[float] = []
    differences: list[float] = []
    for index in range(arguments.rounds):
        took = {name: layers(name) for name in serving.SERVERS[:: 1 if index % 2 else -1]}
        stock.append(took["stock"])
        differences.append(took["patched"] - took["stock"])
    around.undo()
    low, median, high = statistics.quantiles(differences, n=4)
    return {
        "machine": machine(),
        "stock_us": statistics.median(stock),
        "added_us": median,
        "quartiles": [low, high],
        "rounds": arguments.rounds,
        "steps": arguments.steps,
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["servers", "host"])
    parser.add_argument("--model", choices=serving.SHAPES, default="kimi-k2.5", help="whose layer shapes (servers)")
    parser.add_argument("--tp", type=int, default=1, help="tensor-parallel ranks (servers)")
    parser.add_argument("--modes", default=",".join(MODES), help="of %(default)s (servers)")
    parser.add_argument("--moe-layers", type=int, default=1, help="six servers share the GPUs (default: %(default)s)")
    parser.add_argument("--tokens", type=int, default=8192, help="prefill length (servers; default: %(default)s)")
    parser.add_argument("--rounds", type=int, default=15, help="pairs of runs (default: %(default)s)")
    parser.add_argument("--steps", type=int, default=200, help="decode steps a run (default: %(default)s)")
    parser.add_argument("--json", type=Path, help="write everything measured")
    parser.add_argument("--markdown", type=Path, help="write the table (servers)")
    parser.add_argument("--logs", type=Path, help="folder for the servers' logs")
    arguments = parser.parse_args()
    if unknown := set(arguments.modes.split(",")) - set(MODES):
        parser.error(f"--modes: unknown {', '.join(sorted(unknown))}; known: {', '.join(MODES)}")
    with tempfile.TemporaryDirectory(prefix="overhead-") as folder:
        work = Path(folder) / "work"
        try:
            result = (compare_servers if arguments.what == "servers" else host_time)(arguments, work)
        finally:
            if arguments.logs:
                arguments.logs.mkdir(parents=True, exist_ok=True)
                for log in work.glob("*.log"):
                    (arguments.logs / log.name).write_bytes(log.read_bytes())
    if arguments.json:
        arguments.json.write_text(json.dumps(result, indent=1))
    if result.get("differing"):
        print(f"overhead: answers differ: {result['differing']}: no figures", file=sys.stderr)
        return 1
    if arguments.what == "host":
        print(json.dumps(result, indent=1))
        return 0
    text = server_tables(result)
    print(text)
    if arguments.markdown:
        arguments.markdown.write_text(text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
