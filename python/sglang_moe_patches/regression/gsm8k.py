"""The engine's own GSM8K evaluation, with each question's answer kept.

Runs as a process of its own (``python -m sglang_moe_patches.regression.gsm8k``), because it imports the engine.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from pathlib import Path
from typing import Any


class DataError(ValueError):
    """The questions cannot be used; the message names the file, the line and what is wrong."""


def check_questions(path: Path, count: int, shots: int) -> None:
    """Read ``path`` as GSM8K's JSON lines: ``question`` and ``answer``, which ends in ``#### NUMBER``.

    :raises DataError: the file is missing, malformed, or has fewer than ``count`` questions.
    """
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except FileNotFoundError:
        raise DataError(f"{path}: no such file; --data-path takes GSM8K's test.jsonl") from None
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"{path}: {error}") from None
    for number, line in enumerate(lines, 1):
        try:
            item = json.loads(line)
            question, answer = item["question"], item["answer"]
            good = isinstance(question, str) and isinstance(answer, str) and answer.rsplit("####", 1)[1].strip()
        except (ValueError, KeyError, TypeError, IndexError):
            good = False
        if not good:
            raise DataError(f'{path}:{number}: not a GSM8K line: {{"question": "...", "answer": "... #### NUMBER"}}')
    if len(lines) < max(count, shots):
        raise DataError(f"{path}: has {len(lines)} questions, {max(count, shots)} are asked for (--num-questions)")


def evaluate(
    url: str,
    environment: dict[str, str],
    *,
    data_path: Path | None,
    questions: int,
    shots: int,
    max_new_tokens: int,
    parallel: int,
    work: Path,
) -> dict[str, Any]:
    """Ask the server at ``url`` the first ``questions`` questions, at temperature 0.

    :returns: ``answers`` (each: question, text, label, predicted, tokens), ``latency_s`` and the sums ``input_tokens``
        and ``output_tokens``.
    :raises RuntimeError: the evaluation failed; the message carries the end of its output.
    """
    result = work / "answers.json"
    result.unlink(missing_ok=True)
    command = [sys.executable, "-W", "ignore", "-m", __name__, "--url", url, "--result", str(result)]
    command += ["--num-questions", str(questions), "--num-shots", str(shots), "--parallel", str(parallel)]
    command += ["--max-new-tokens", str(max_new_tokens)]
    if data_path is not None:
        command += ["--data-path", str(data_path.resolve())]
    with (work / "evaluation.log").open("w+b") as log:
        # Standard error carries the engine's progress bar.
        done = subprocess.run(command, env=environment, cwd=work, stdout=log, check=False)
        log.seek(0)
        tail = log.read().decode(errors="replace")[-2000:]
    if done.returncode or not result.exists():
        raise RuntimeError(f"the evaluation of {url} failed: {tail}")
    return json.loads(result.read_text())


def _main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--url", required=True)
    parser.add_argument("--result", required=True, type=Path)
    parser.add_argument("--data-path")
    parser.add_argument("--num-questions", type=int, required=True)
    parser.add_argument("--num-shots", type=int, required=True)
    parser.add_argument("--max-new-tokens", type=int, required=True)
    parser.add_argument("--parallel", type=int, required=True)
    options = parser.parse_args()

    from sglang.test import few_shot_gsm8k

    host, port = options.url.rsplit(":", 1)
    lines: list[Any] = []
    states: list[Any] = []
    # The engine's evaluation returns its totals alone. It reads the questions with the first of these functions and
    # hands every state to the second one.
    read_jsonl = few_shot_gsm8k.read_jsonl

    def keep_lines(name: str) -> list[Any]:
        lines[:] = read_jsonl(name)
        return lines

    few_shot_gsm8k.read_jsonl = keep_lines
    if hasattr(few_shot_gsm8k, "normalize_base_url"):  # takes "http://host" for a host name in newer releases
        few_shot_gsm8k.normalize_base_url = lambda host, port: options.url
    few_shot_gsm8k.dump_state_text = lambda name, all_states: states.extend(all_states)
    totals = few_shot_gsm8k.run_eval(
        argparse.Namespace(
            host=host,
            port=int(port),
            data_path=options.data_path,
            num_questions=options.num_questions,
            num_shots=options.num_shots,
            max_new_tokens=options.max_new_tokens,
            parallel=options.parallel,
            temperature=0,
            return_logprob=True,  # the way to learn the token ids through the engine's own client
            logprob_start_len=None,
        )
    )
    answers = []
    input_tokens = output_tokens = 0
    for line, state in zip(lines[: options.num_questions], states, strict=True):
        meta = state.get_meta_info("answer")
        predicted = few_shot_gsm8k.get_answer_value(state["answer"])
        input_tokens += meta["prompt_tokens"]
        output_tokens += meta["completion_tokens"]
        answers.append(
            {
                "question": line["question"],
                "text": state["answer"],
                "label": few_shot_gsm8k.get_answer_value(line["answer"]),
                "predicted": None if predicted == few_shot_gsm8k.INVALID else predicted,
                "tokens": [token for _, token, *_ in meta["output_token_logprobs"]],
            }
        )
    options.result.write_text(
        json.dumps(
            {
                "answers": answers,
                "latency_s": totals["latency"],
                "input_tokens": input_tokens,
                "output_tokens": output_tokens,
            }
        )
    )


if __name__ == "__main__":
    _main()
