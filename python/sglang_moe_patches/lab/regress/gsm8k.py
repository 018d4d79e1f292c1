"""The engine's own GSM8K evaluation, with each question's answer kept.

Runs as a process of its own (``python -m sglang_moe_patches.lab.regress.gsm8k``), because it imports the engine.
"""

from __future__ import annotations

import json
import re
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from sglang_moe_patches.lab.servers.supervisor import Supervised

GSM8K = 1319
"""Questions of GSM8K's test set, which the engine downloads."""


class EvaluationFailed(RuntimeError):
    """Not every question was answered; the message carries the end of the client's output."""


@dataclass(frozen=True)
class Evaluation:
    """How both servers are asked.

    :param data_path: GSM8K's test.jsonl; ``None`` lets the engine download it.
    :param questions: how many of the first questions.
    :param shots: worked examples in front of each.
    """

    data_path: Path | None
    questions: int
    shots: int
    max_new_tokens: int
    parallel: int


def count_questions(path: Path) -> int:
    """How many questions ``path`` has: GSM8K's JSON lines, ``question`` and ``answer``, which ends in ``#### NUMBER``.

    :raises ValueError: the file is missing or malformed.
    """
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except FileNotFoundError:
        raise ValueError(f"{path}: no such file; --data-path takes GSM8K's test.jsonl") from None
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"{path}: {error}") from None
    for number, line in enumerate(lines, 1):
        try:
            item = json.loads(line)
            question, answer = item["question"], item["answer"]
            good = isinstance(question, str) and re.search(r"\d", answer.rsplit("####", 1)[1])
        except (ValueError, KeyError, TypeError, IndexError, AttributeError):
            good = False
        if not good:
            raise ValueError(f'{path}:{number}: not a GSM8K line: {{"question": "...", "answer": "... #### NUMBER"}}')
    return len(lines)


def check_questions(path: Path, count: int, shots: int) -> None:
    """:raises ValueError: the file is missing, malformed, or has fewer than ``count`` questions."""
    there = count_questions(path)
    if there < max(count, shots):
        raise ValueError(f"{path}: has {there} questions, {max(count, shots)} are asked for (--num-questions)")


def evaluate(
    url: str,
    environment: dict[str, str],
    evaluation: Evaluation,
    work: Path,
    while_waiting: Callable[[int, float], None] = lambda answered, seconds: None,
) -> dict[str, Any]:
    """Ask the server at ``url``, at temperature 0.

    :param environment: of the client's process.
    :param work: folder for what the client writes.
    :param while_waiting: called a few times a second, with the questions answered and the seconds since the start; what
        it raises ends the evaluation.
    :returns: ``answers`` (each: question, text, label, predicted, tokens), ``latency_s`` and the sums ``input_tokens``
        and ``output_tokens``.
    :raises EvaluationFailed: not every question was answered.
    """
    result, log_path, answered = work / "answers.json", work / "evaluation.log", work / "answered"
    for path in (result, answered):
        path.unlink(missing_ok=True)
    data = None if evaluation.data_path is None else str(evaluation.data_path.resolve())
    asked = json.dumps({**asdict(evaluation), "data_path": data})
    command = [sys.executable, "-W", "ignore", "-m", __name__, url, str(result.resolve()), asked]
    started = time.monotonic()
    with log_path.open("wb") as log:
        client = Supervised(command, environment, log, cwd=str(work))
    try:
        ended = False
        while not ended:
            ended = client.exit_code() is not None  # and then one look more: what was answered last
            while_waiting(answered.stat().st_size if answered.exists() else 0, time.monotonic() - started)
            time.sleep(0 if ended else 0.2)
    finally:
        client.end()
    if client.exit_code() or not result.exists():
        raise EvaluationFailed(f"the evaluation of {url} failed: {log_path.read_text(errors='replace')[-2000:]}")
    found: dict[str, Any] = json.loads(result.read_text(encoding="utf-8"))
    return found


def _main(url: str, result: Path, evaluation: Evaluation) -> None:
    from sglang.test import few_shot_gsm8k

    host, port = url.rsplit(":", 1)
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
        few_shot_gsm8k.normalize_base_url = lambda host, port: url
    few_shot_gsm8k.dump_state_text = lambda name, all_states: states.extend(all_states)
    endpoint = few_shot_gsm8k.RuntimeEndpoint

    class Counted(endpoint):  # type: ignore[misc, valid-type]
        """A byte in a file for each answer."""

        def generate(self, *args: Any, **kwargs: Any) -> Any:
            answer = super().generate(*args, **kwargs)
            with result.with_name("answered").open("ab") as file:
                file.write(b".")
            return answer

    few_shot_gsm8k.RuntimeEndpoint = Counted
    totals = few_shot_gsm8k.run_eval(
        SimpleNamespace(
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
    found = {"answers": answers, "latency_s": totals["latency"]}
    found |= {"input_tokens": input_tokens, "output_tokens": output_tokens}
    result.write_text(json.dumps(found), encoding="utf-8")


if __name__ == "__main__":
    _main(sys.argv[1], Path(sys.argv[2]), Evaluation(**json.loads(sys.argv[3])))
