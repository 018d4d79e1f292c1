"""The engine's own GSM8K evaluation, with each question's answer kept.

Runs as a process of its own (``python -m sglang_moe_patches.regression.gsm8k``), because it imports the engine.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from sglang_moe_patches.servers.keeper import Kept


class DataError(ValueError):
    """The questions cannot be used; the message names the file, the line and what is wrong."""


class EvaluationFailed(RuntimeError):
    """Not every question was answered; the message carries the end of the client's output."""


@dataclass(frozen=True)
class Evaluation:
    """How both servers are asked.

    :param data_path: GSM8K's test.jsonl; ``None`` lets the engine download it.
    :param questions: how many of the first questions.
    :param shots: worked examples in front of each.
    :param max_new_tokens: longest answer, in tokens.
    :param parallel: requests in flight at once.
    """

    data_path: Path | None
    questions: int
    shots: int
    max_new_tokens: int
    parallel: int


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
            good = isinstance(question, str) and re.search(r"\d", answer.rsplit("####", 1)[1])
        except (ValueError, KeyError, TypeError, IndexError, AttributeError):
            good = False
        if not good:
            raise DataError(f'{path}:{number}: not a GSM8K line: {{"question": "...", "answer": "... #### NUMBER"}}')
    if len(lines) < max(count, shots):
        raise DataError(f"{path}: has {len(lines)} questions, {max(count, shots)} are asked for (--num-questions)")


def evaluate(
    url: str,
    environment: dict[str, str],
    evaluation: Evaluation,
    work: Path,
    while_waiting: Callable[[], None] = lambda: None,
) -> dict[str, Any]:
    """Ask the server at ``url``, at temperature 0.

    :param environment: of the client's process.
    :param work: folder for what the client writes.
    :param while_waiting: called a few times a second; what it raises ends the evaluation.
    :returns: ``answers`` (each: question, text, label, predicted, tokens), ``latency_s`` and the sums ``input_tokens``
        and ``output_tokens``.
    :raises EvaluationFailed: not every question was answered.
    """
    result, log_path = work / "answers.json", work / "evaluation.log"
    result.unlink(missing_ok=True)
    data = None if evaluation.data_path is None else str(evaluation.data_path.resolve())
    asked = json.dumps({**asdict(evaluation), "data_path": data})
    command = [sys.executable, "-W", "ignore", "-m", __name__, "--url", url, "--result", str(result.resolve())]
    with log_path.open("wb") as log:
        # Standard error carries the engine's progress bar.
        client = Kept([*command, "--evaluation", asked], environment, log, join_error=False, cwd=str(work))
    try:
        while client.exit_code() is None:
            while_waiting()
            time.sleep(0.2)
    finally:
        client.end()
    if client.exit_code() or not result.exists():
        raise EvaluationFailed(f"the evaluation of {url} failed: {log_path.read_text(errors='replace')[-2000:]}")
    found: dict[str, Any] = json.loads(result.read_text(encoding="utf-8"))
    return found


def _main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--url", required=True)
    parser.add_argument("--result", required=True, type=Path)
    parser.add_argument("--evaluation", required=True, type=json.loads, help="the fields of Evaluation, as JSON")
    options = parser.parse_args()
    evaluation = Evaluation(**options.evaluation)

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
            data_path=evaluation.data_path,
            num_questions=evaluation.questions,
            num_shots=evaluation.shots,
            max_new_tokens=evaluation.max_new_tokens,
            parallel=evaluation.parallel,
            temperature=0,
            return_logprob=True,  # the way to learn the token ids through the engine's own client
            logprob_start_len=None,
        )
    )
    answers = []
    input_tokens = output_tokens = 0
    for line, state in zip(lines[: evaluation.questions], states, strict=True):
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
        ),
        encoding="utf-8",
    )


if __name__ == "__main__":
    _main()
