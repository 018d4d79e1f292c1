"""Stands in for the engine's resolver: a reserve that is a tenth, and another tenth for a chunk above 2,048 tokens."""

import argparse
from types import SimpleNamespace


def prepare_server_args(argv):
    parser = argparse.ArgumentParser("sglang serve")
    for flag in ("--model-path", "--chunked-prefill-size", "--tp-size", "--mem-fraction-static", "--host", "--port"):
        parser.add_argument(flag)
    for flag in (
        "--attention-backend",
        "--sampling-backend",
        "--moe-runner-backend",
        "--grammar-backend",
        "--load-format",
    ):
        parser.add_argument(flag)
    parser.add_argument("--skip-tokenizer-init", action="store_true")
    for flag in ("--random-seed", "--max-running-requests"):
        parser.add_argument(flag, type=int)
    given = parser.parse_args(argv)
    chunk = int(given.chunked_prefill_size or 4096)
    fraction = float(given.mem_fraction_static or (0.8 if chunk > 2048 else 0.9))
    return SimpleNamespace(device="cuda", mem_fraction_static=fraction, chunked_prefill_size=chunk, tp_size=2)
