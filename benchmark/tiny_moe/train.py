"""Train the tiny model on the word problems of ``problems.py``.

    python benchmark tiny_moe/train --output trained.safetensors

Training takes a few minutes on one GPU. Prompts have the format of the engine's ``sglang.test.few_shot_gsm8k``: solved
problems, one after the other. Only the answers count in the loss. The target after an answer is the end token, although
another problem follows. The script writes bfloat16 weights. ``export.py`` quantizes them, and ``make accuracy``
measures both models. Training ends early on purpose: a fully trained model is so sure of its answers that a small error
in the engine would not change them.
"""

from __future__ import annotations

import argparse
import math
import multiprocessing
import os
import time
from functools import partial
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from sglang_moe_reference.model import EOS_ID, ModelSpec, tokenizer_json

from tiny_moe.network import Model, to_checkpoint
from tiny_moe.problems import problems

SPEC = ModelSpec(layers=4, dense_layers=1, experts=16, top_k=2, hidden=256, moe_intermediate=128, heads=2)
IGNORED = -100
"""Target of a token that does not count in the loss."""


def encode(count: int, test: bool, seed: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Encode ``count`` problems as tokens.

    :param test: whether to encode test problems.
    :returns: tokens (int16) and targets (int16) of all problems, one after the other, and the length of each problem. A
        target is the next token, or ``IGNORED``.
    """
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_str(tokenizer_json())
    source = problems(seed, test=test)
    chosen = [next(source) for _ in range(count)]
    # Question and answer are encoded separately, because a prompt ends with "Answer:". No token crosses that border.
    questions = tokenizer.encode_batch([f"Question: {problem.question}\nAnswer:" for problem in chosen])
    answers = tokenizer.encode_batch([f" {problem.answer}" for problem in chosen])
    end = tokenizer.encode("\n\n").ids
    tokens, targets, lengths = [], [], []
    for question, answer in zip(questions, answers, strict=True):
        tokens += [*question.ids, *answer.ids, *end]
        targets += [IGNORED] * (len(question.ids) - 1) + answer.ids + [EOS_ID] + [IGNORED] * len(end)
        lengths.append(len(question.ids) + len(answer.ids) + len(end))
    return np.array(tokens, np.int16), np.array(targets, np.int16), np.array(lengths)


class Corpus:
    """Encoded problems on a device."""

    def __init__(self, count: int, seed: int, device: str) -> None:
        workers = max(1, (os.cpu_count() or 2) - 1)
        with multiprocessing.get_context("spawn").Pool(workers) as pool:
            # Encode always 64 parts, so that a seed gives the same corpus with any number of workers.
            parts = pool.map(partial(encode, count // 64, False), [seed * 1000 + part for part in range(64)])
        self.tokens, self.targets = (torch.from_numpy(np.concatenate([p[i] for p in parts])).to(device) for i in (0, 1))
        lengths = np.concatenate([p[2] for p in parts])
        self.starts = torch.from_numpy(np.concatenate(([0], np.cumsum(lengths)[:-1]))).to(device)

    def rows(self, count: int, length: int, generator: torch.Generator) -> tuple[torch.Tensor, torch.Tensor]:
        """Draw rows of consecutive problems. Each row begins with a whole problem.

        :returns: tokens and targets, [count, length].
        """
        usable = int((self.starts < len(self.tokens) - length).sum())
        chosen = torch.randint(0, usable, (count,), generator=generator).to(self.starts.device)
        at = self.starts[chosen].unsqueeze(1) + torch.arange(length, device=self.starts.device)
        return self.tokens[at].long(), self.targets[at].long()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, required=True, help="file for the bfloat16 weights")
    parser.add_argument("--steps", type=int, default=4000, help="optimizer steps (%(default)s)")
    parser.add_argument("--problems", type=int, default=400_000, help="number of training problems (%(default)s)")
    parser.add_argument("--rows", type=int, default=48, help="rows per step (%(default)s)")
    parser.add_argument("--length", type=int, default=768, help="tokens per row (%(default)s)")
    parser.add_argument("--rate", type=float, default=2e-3, help="peak learning rate (%(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="seed of weights and problems (%(default)s)")
    parser.add_argument(
        "--device", default="cuda" if torch.cuda.is_available() else "cpu", help="PyTorch device (%(default)s)"
    )
    options = parser.parse_args()

    started = time.monotonic()
    torch.manual_seed(options.seed)
    torch.set_float32_matmul_precision("high")
    model = Model(SPEC)
    print(f"{sum(p.numel() for p in model.parameters()) / 1e6:.1f} M parameters", flush=True)
    corpus = Corpus(options.problems, options.seed, options.device)
    print(f"{len(corpus.tokens) / 1e6:.1f} M tokens after {time.monotonic() - started:.0f} s", flush=True)
    model.to(options.device)
    if options.device == "cuda":
        for layer in model.layers:
            layer.compile()

    matrices = [p for p in model.parameters() if p.dim() > 1]
    vectors = [p for p in model.parameters() if p.dim() <= 1]
    optimizer = torch.optim.AdamW(
        [{"params": matrices, "weight_decay": 0.1}, {"params": vectors, "weight_decay": 0.0}],
        lr=options.rate,
        betas=(0.9, 0.95),
        fused=True,
    )
    generator = torch.Generator().manual_seed(options.seed)
    interval = max(1, min(200, options.steps // 8))
    clock = time.monotonic()
    for step in range(options.steps):
        progress = step / options.steps
        warm = min(1.0, (step + 1) / 200)
        for group in optimizer.param_groups:
            group["lr"] = options.rate * warm * (0.02 + 0.98 * 0.5 * (1 + math.cos(math.pi * progress)))
        ids, targets = corpus.rows(options.rows, options.length, generator)
        with torch.autocast(options.device, torch.bfloat16):
            logits = model(ids)
        loss = F.cross_entropy(logits.float().flatten(0, 1), targets.flatten(), ignore_index=IGNORED)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        if progress < 0.8:
            model.balance(1e-3)
        if (step + 1) % interval == 0:
            load = torch.stack([layer.load for layer in model.moe_layers]) / model.moe_layers[0].load.sum()
            value = loss.item()
            now = time.monotonic()
            print(
                f"step {step + 1:5d}  loss {value:.4f}  {interval / (now - clock):.1f} step/s  "
                f"least and most used expert {100 * load.min():.1f} {100 * load.max():.1f} %",
                flush=True,
            )
            clock = now
    save_file(to_checkpoint(model), str(options.output), metadata={"format": "pt"})
    print(f"{options.output}: after {time.monotonic() - started:.0f} s", flush=True)
