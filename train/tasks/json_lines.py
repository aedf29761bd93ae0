"""Questions and answers as JSON lines, in the manner of GSM8K."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from train.data import Example
from train.rewards.answers import last_number, plain_number

MARK = "####"
# Held out of a file that comes alone: its last tenth, at most so many lines.
MAX_HELD_OUT = 500


def read_examples(file: str | Path) -> list[Example]:
    """The examples of a file: UTF-8, one JSON object per line, empty lines left out.

    "question" is what is asked; "answer" ends in "#### 42", or is the number itself. The columns are the line's fields,
    where "answer" is the number alone, as text, and "solution" what the line has as answer.

    Raises:
      ValueError: a line is something else, or there is none; the message has file and line.
      OSError: the file cannot be read.
    """
    try:
        text = Path(file).read_bytes().decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise ValueError(f"{file}: it is not UTF-8: {error}.") from None
    # Not splitlines: a JSON string may hold U+2028 as it is.
    lines = [(number, line.strip()) for number, line in enumerate(text.split("\n"), start=1)]
    examples = [_example(line, f"{file}:{number}") for number, line in lines if line]
    if not examples:
        raise ValueError(f"{file}: it holds no lines.")
    return examples


def split(training: list[Example], held_out: list[Example] | None) -> tuple[list[Example], list[Example]]:
    """Training examples, none of which asks a held-out question, and held-out ones.

    Args:
      training: of a file.
      held_out: of another file; None: the last tenth of the training examples, at most MAX_HELD_OUT.
    Raises:
      ValueError: no training example is left.
    """
    if held_out is None:
        num = min(max(len(training) // 10, 1), MAX_HELD_OUT)
        training, held_out = training[:-num], training[-num:]
    questions = {example.question for example in held_out}
    training = [example for example in training if example.question not in questions]
    if not training:
        raise ValueError("train_file holds no question that is not held out.")
    return training, held_out


def _example(line: str, where: str) -> Example:
    try:
        fields = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{where}: it is not JSON: {error}.") from None
    if not isinstance(fields, dict):
        raise ValueError(f"{where}: it must be a JSON object, got {line!r:.80}.")
    question = fields.get("question")
    if not isinstance(question, str) or not question.strip():
        raise ValueError(f"{where}: 'question' must be text, got {question!r:.80}.")
    solution = fields.get("answer")
    return Example(question, {**fields, "answer": _number(solution, where), "solution": solution})


def _number(solution: Any, where: str) -> str:
    is_plain = isinstance(solution, (int, float)) and not isinstance(solution, bool)
    text = str(solution) if is_plain else solution
    if isinstance(text, str):
        number = plain_number(text.rpartition(MARK)[2])
        # All of it, so that "3 apples" is not taken for 3.
        if number and plain_number(last_number(number) or "") == number:
            return number
    raise ValueError(f"{where}: 'answer' must be a number, or end in '{MARK} NUMBER', got {solution!r:.80}.")
