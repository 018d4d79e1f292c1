"""Run the engine's own GSM8K evaluation against a server, and keep the answer to each question.

The evaluation imports the engine, so it runs in its own process (``python -m sglang_moe_patches.lab.regress.gsm8k``).
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
"""Number of questions in GSM8K's test set, which the engine can download."""


class EvaluationFailed(RuntimeError):
    """Raised if the server did not answer every question. The message ends with the client's last output."""


@dataclass(frozen=True)
class Evaluation:
    """Settings of an evaluation. Both servers are evaluated with the same settings.

    :param data_path: path of GSM8K's test.jsonl; ``None`` to let the engine download it.
    :param questions: number of questions, from the first question on.
    :param shots: number of worked examples in front of each question.
    :param max_new_tokens: maximum length of an answer, in tokens.
    :param parallel: maximum number of concurrent requests.
    """

    data_path: Path | None
    questions: int
    shots: int
    max_new_tokens: int
    parallel: int


def count_questions(path: Path) -> int:
    """Return the number of questions in a file.

    :param path: file with one JSON object per line. The object has the keys ``question`` and ``answer``, and the answer
        ends in ``#### NUMBER``.
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
            raise ValueError(
                f'{path}:{number}: this line does not have the form {{"question": "...", "answer": "... #### NUMBER"}}'
            )
    return len(lines)


def check_questions(path: Path, count: int, shots: int) -> None:
    """Raise an error if a file does not have enough questions.

    :raises ValueError: the file is missing or malformed, or it has fewer questions than ``count`` or ``shots``.
    """
    available = count_questions(path)
    for option, needed in (("--num-questions", count), ("--num-shots", shots)):
        if available < needed:
            raise ValueError(f"{path} has {available} questions, but {option} needs {needed}")


def evaluate(
    url: str,
    environment: dict[str, str],
    evaluation: Evaluation,
    work: Path,
    while_waiting: Callable[[int, float], None] = lambda answered, seconds: None,
) -> dict[str, Any]:
    """Send all questions to the server at ``url``, at temperature 0, and return its answers.

    :param environment: environment of the *client*, the process that sends the questions.
    :param work: folder for the client's files.
    :param while_waiting: function that is called five times a second with the number of answered questions and the
        seconds since the start. The function can raise an exception to end the evaluation.
    :returns: ``answers`` (a list of dictionaries with ``question``, ``text``, ``label``, ``predicted`` and ``tokens``),
        ``latency_s``, and the sums ``input_tokens`` and ``output_tokens``.
    :raises EvaluationFailed: the server did not answer every question.
    """
    result, log_path, answered = work / "answers.json", work / "evaluation.log", work / "answered"
    for path in (result, answered):
        path.unlink(missing_ok=True)
    data = None if evaluation.data_path is None else str(evaluation.data_path.resolve())
    settings = json.dumps({**asdict(evaluation), "data_path": data})
    command = [sys.executable, "-P", "-W", "ignore", "-m", __name__, url, str(result.resolve()), settings]
    started = time.monotonic()
    with log_path.open("wb") as log:
        client = Supervised(command, environment, log, cwd=str(work))
    try:
        ended = False
        while not ended:
            # read the file before the last report, so that the report counts all answers
            ended = client.exit_code() is not None
            while_waiting(answered.stat().st_size if answered.exists() else 0, time.monotonic() - started)
            time.sleep(0 if ended else 0.2)
    finally:
        client.end()
    if client.exit_code() or not result.exists():
        log_end = log_path.read_text(errors="replace")[-2000:]
        raise EvaluationFailed(f"the evaluation of {url} failed. The end of its log:\n{log_end}")
    outcome: dict[str, Any] = json.loads(result.read_text(encoding="utf-8"))
    return outcome


def _main(url: str, result: Path, evaluation: Evaluation) -> None:
    from sglang.test import few_shot_gsm8k

    host, port = url.rsplit(":", 1)
    lines: list[Any] = []
    states: list[Any] = []
    # The engine's evaluation returns only totals. Replace two of its functions to get the single answers: the
    # evaluation reads the questions with ``read_jsonl``, and passes the state of every answer to ``dump_state_text``.
    read_jsonl = few_shot_gsm8k.read_jsonl

    def keep_lines(name: str) -> list[Any]:
        lines[:] = read_jsonl(name)
        return lines

    few_shot_gsm8k.read_jsonl = keep_lines
    if hasattr(few_shot_gsm8k, "normalize_base_url"):  # newer releases take "http://host" for the host name
        few_shot_gsm8k.normalize_base_url = lambda host, port: url
    few_shot_gsm8k.dump_state_text = lambda name, all_states: states.extend(all_states)
    endpoint = few_shot_gsm8k.RuntimeEndpoint

    class CountingEndpoint(endpoint):  # type: ignore[misc, valid-type]
        """Client for an engine server. After each answer, the client appends a byte to the file ``answered``. The size
        of this file tells the parent process how many questions were answered."""

        def generate(self, *args: Any, **kwargs: Any) -> Any:
            answer = super().generate(*args, **kwargs)
            with result.with_name("answered").open("ab") as file:
                file.write(b".")
            return answer

    few_shot_gsm8k.RuntimeEndpoint = CountingEndpoint
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
            return_logprob=True,  # the engine's client returns token ids only together with log-probabilities
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
    outcome = {"answers": answers, "latency_s": totals["latency"]}
    outcome |= {"input_tokens": input_tokens, "output_tokens": output_tokens}
    result.write_text(json.dumps(outcome), encoding="utf-8")


if __name__ == "__main__":
    _main(sys.argv[1], Path(sys.argv[2]), Evaluation(**json.loads(sys.argv[3])))
