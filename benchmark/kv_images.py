"""Images for a server whose KV cache a record sizes: kv-sizing drives none, it keeps the engine's own allowance.

    python benchmark/kv_images.py --json kv-images.json --logs logs -- --mm-attention-backend triton_attn
    python benchmark/kv_images.py --quick                    # a tiny model, CPU, nothing sized: are images answered?

A first start rehearses, the second is sized by its record and gets images of the largest size that the model's
processor lets through: alone, several at once, several in one prompt, and beside long prompts without any. Each has to
be answered. What was free is the driver's word after each forward, so that what the process that prepares images takes
of the GPU is in it.
"""

from __future__ import annotations

import base64
import io
import itertools
import json
import sys
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import plan
from common import held, kinds, machine, output, plugins, processes
from sglang_moe_patches.core.patch import SELECT_VARIABLE
from sglang_moe_patches.lab.reference import environment
from sglang_moe_patches.lab.servers import gpu
from sglang_moe_patches.lab.servers.client import Client
from sglang_moe_patches.lab.servers.server import Server
from sglang_moe_patches.memory.kv_sizing.decide import KV_RECORD, KV_SIZING
from sglang_moe_patches.memory.kv_sizing.script import fraction_in_force
from sglang_moe_patches.planning.plan import SAYS

MB = 1e6
TEXT = 16
"""Tokens of text beside an image, where there is no long prompt."""
PATCH_BYTES = 50_000
"""Of a patch of 16 x 16 pixels while Qwen3-VL's vision model sees it, at most, as counted before the first run: 1,536
numbers of input (float32 and bfloat16: 9,216 bytes), two activations of 1,152 (4,608), queries, keys and values
(6,912), and six times 1,152 in float32 while those are turned (27,648)."""


def png(side: int, number: int) -> str:
    """A square image, another for each number."""
    from PIL import Image

    file = io.BytesIO()
    Image.new("RGB", (side, side), (number % 256, number // 256, 128)).save(file, "png")
    return "data:image/png;base64," + base64.b64encode(file.getvalue()).decode()


def predicted_mb(pixels: int) -> float:
    """What images take that one forward of a request needs, two of the largest at most, in MB."""
    return 2 * pixels / 16**2 * PATCH_BYTES / MB


class Failed(RuntimeError):
    """A prompt was not answered; the message says how."""


def asked(server: Server, ids: list[int], images: list[str]) -> int:
    """The tokens of a prompt that was answered."""
    import httpx

    body = {"input_ids": ids, "sampling_params": {"temperature": 0, "max_new_tokens": 4, "ignore_eos": True}}
    body |= {"image_data": images} if images else {}
    try:
        response = httpx.post(f"{server.url}/generate", json=body, timeout=300, trust_env=False)
    except httpx.HTTPError as error:
        raise Failed(f"{type(error).__name__}: {error}") from None
    if response.status_code != 200:
        raise Failed(f"HTTP {response.status_code}: {response.text[:300]}")
    answer = response.json()
    if len(answer.get("output_ids", ())) != 4:
        raise Failed(str(answer)[:300])
    return int(answer["meta_info"]["prompt_tokens"])


def loads(options: Any) -> dict[str, list[list[int]]]:
    """By its name what is asked at once: the tokens of text of each prompt, with an image between two numbers."""
    one, many, long = [TEXT, TEXT], [TEXT] * (options.images + 1), [options.chunk]
    return {
        "one image": [one],
        f"{options.images} prompts with one": [one] * options.images,
        f"{options.images} in one prompt": [many],
        f"one beside {options.prompts} long prompts": [one, *[long] * options.prompts],
    }


def drive(server: Server, config: dict[str, Any], options: Any, lines: Path) -> list[dict[str, Any]]:
    """Every load, the last the one that fails; what was free is in what the server writes of its forwards."""
    side, numbers = int(options.pixels**0.5), itertools.count()
    found: list[dict[str, Any]] = []
    for name, prompts in loads(options).items():
        before, work = len(held.read(lines)), []
        for counts in prompts:
            images = [png(side, next(numbers)) for _ in counts[1:]]
            work.append((server, kinds.prompt(config, counts, next(numbers)), images))
        began, tokens, failed = time.monotonic(), [0], ""
        with ThreadPoolExecutor(len(work)) as pool:
            try:
                tokens = list(pool.map(lambda each: asked(*each), work))
            except Failed as error:
                failed = str(error)
        seen = held.read(lines)[before:]
        load = {"name": name, "failed": failed, "requests": len(work), "tokens": sum(tokens), "longest": max(tokens)}
        load |= {"images": sum(len(each[2]) for each in work), "seconds": round(time.monotonic() - began, 1)}
        load |= {"lowest_free": min((line.free for line in seen), default=0), "forwards": len(seen)}
        load |= {"reserved": max((line.reserved for line in seen), default=0)}
        load |= {"peak": max((line.peak - line.allocated for line in seen), default=0)}
        print(f"{name}: {load}", flush=True)
        found.append(load)
        if failed:
            break
    return found


def tiny(config: dict[str, Any]) -> dict[str, Any]:
    """The same model at sizes for a CPU."""
    own = {"hidden_size": 128, "num_attention_heads": 2, "num_key_value_heads": 2, "head_dim": 64, "num_experts": 4}
    own |= {"moe_intermediate_size": 64, "intermediate_size": 64, "num_experts_per_tok": 2}
    own |= {"rope_scaling": {"rope_type": "default", "mrope_interleaved": True, "mrope_section": [12, 10, 10]}}
    config["text_config"] |= own
    config["vision_config"] |= {"depth": 3, "hidden_size": 64, "intermediate_size": 64, "num_heads": 2}
    config["vision_config"] |= {"out_hidden_size": 128, "deepstack_visual_indexes": [0, 1, 2]}
    return config


def served(options: Any, work: Path) -> dict[str, Any]:
    """Each start, and what became of the images in the last."""
    config = kinds.config(options.model, options.shard, options.layers, options.context)
    pixels = kinds.PIXELS | {"longest_edge": options.pixels}
    model = kinds.write(work / "model", tiny(config) if options.quick else config, pixels)
    plugins.write(work / "plugin", "benchmark_held", "common.held:register")
    found: dict[str, Any] = {"starts": []}
    used = gpu.used_mib()
    for name in ("only",) if options.quick else ("first", "second"):
        if found["starts"]:  # else it would take what is not given back yet for another's
            gpu.wait_until_free(used, lambda: None, ended="first", following="second")
        lines = work / f"{name}.jsonl"
        own = processes.variables(work / "plugin", Path(__file__).parent)
        own |= environment.variables(own) if options.quick else {}
        own |= {SELECT_VARIABLE: "all", KV_SIZING.name: "auto", KV_RECORD.name: str(work / "records.json")}
        own |= {held.VARIABLE: str(lines)}
        given = environment.server_arguments(["--model-path", str(model), *arguments(options)])
        log, progress = work / f"{name}.log", processes.saying(name, 10)
        with Server(name, given, own, log, timeout=600, progress=progress) as server:
            info = Client(server.url).info()
            start = {"name": name, "startup_s": round(server.startup_s, 1), "fraction": fraction_in_force(info)}
            start |= {"tokens": info["internal_states"][0]["memory_usage"]["token_capacity"]}
            found["starts"].append(start)
            if name != "first":
                found["loads"] = drive(server, config, options, lines)
            start["said"] = [line.partition(SAYS)[2] for line in server.log_text().splitlines() if SAYS in line]
            print(f"{name}: {json.dumps(start, indent=1)}", flush=True)
    return found


def arguments(options: Any) -> list[str]:
    given = plan.server_arguments(options)
    if options.quick:
        for name in ("--attention-backend", "--sampling-backend"):
            at = given.index(name)
            del given[at : at + 2]
    return given


def tables(results: Sequence[output.Result]) -> str:
    """A row for each load."""
    header = ("run", "images", "prompts", "tokens", "seconds", "tensors MB", "predicted at most", "lowest free MB", "")
    rows = []
    for result in results:
        figures = result["figures"]
        for load in figures["loads"]:
            ran = f"{plan.described(figures)}, {figures['pixels']:,} pixels: {load['name']}"
            told = (f"{load['tokens']:,}", f"{load['seconds']:.1f}", f"{load['peak'] / MB:,.0f}")
            predicted, free = predicted_mb(figures["pixels"]), load["lowest_free"] / MB
            counts = (str(load["images"]), str(load["requests"]))
            rows.append((ran, *counts, *told, f"{predicted:,.0f}", f"{free:,.0f}", load["failed"] and "FAILED"))
    return output.table(header, rows)


def main() -> int:
    quick = {"layers": 4, "chunk": 64, "context": 512, "requests": 4, "pixels": 65_536, "images": 2, "prompts": 2}
    parser = output.parser(__doc__, quick=quick, logs=True)
    parser.add_argument("--model", choices=plan.SEEING, default="qwen3-vl-30b")
    parser.add_argument("--shard", type=int, default=1, help="the sizes of one rank of so many, served by one GPU")
    parser.add_argument("--layers", type=int, default=48)
    parser.add_argument("--tp", type=int, default=1)
    parser.add_argument("--context", type=int, default=65_536)
    parser.add_argument("--chunk", type=int, default=16_384)
    parser.add_argument("--requests", type=int, default=64, help="--max-running-requests")
    parser.add_argument("--pixels", type=int, default=kinds.PIXELS["longest_edge"], help="of an image")
    parser.add_argument("--images", type=int, default=3, help="at once, and in one prompt (%(default)s)")
    parser.add_argument("--prompts", type=int, default=16, help="long ones beside an image")
    parser.add_argument("arguments", nargs="*", help="more server arguments, after `--`")
    options = output.parse(parser)
    if not options.quick:
        machine.require_gpu("kv_images", "--quick runs without one")
    described_by = ("model", "shard", "layers", "context", "chunk", "requests", "tp", "pixels", "images", "prompts")
    figures = {name: getattr(options, name) for name in described_by}
    with tempfile.TemporaryDirectory(prefix="kv-images-") as folder:
        work = Path(folder)
        try:
            figures |= served(options, work)
        finally:
            output.keep_logs(options, work)
    found = output.result("kv_images", figures)
    output.finish(options, found, tables([found]))
    return 1 if any(load["failed"] for load in figures["loads"]) else 0


if __name__ == "__main__":
    sys.exit(main())
