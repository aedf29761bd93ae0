import json

import pytest

from train.tasks.json_lines import read_examples, split


def line(question="1 + 1?", answer="2 #### 2", **fields):
    return json.dumps({"question": question, "answer": answer, **fields}, ensure_ascii=False)


def write(tmp_path, content):
    path = tmp_path / "data.jsonl"
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return path


def test_lines_become_examples(tmp_path):
    content = (
        "\ufeff" + line("caf\u00e9\u2028?", "so 1 + 1 = 2\n#### 1,002", level=3) + "\r\n\r\n" + line(answer=-2.5) + "\n"
    )
    first, second = read_examples(write(tmp_path, content))
    assert first.question == "caf\u00e9\u2028?"
    assert first.columns == {
        "question": first.question,
        "answer": "1002",
        "solution": "so 1 + 1 = 2\n#### 1,002",
        "level": 3,
    }
    assert second.columns["answer"] == "-2.5"


@pytest.mark.parametrize(
    ("bad", "reason"),
    [
        ("{", "2: it is not JSON"),
        ("[" * 100_000, "2: it is not JSON"),
        ("[1]", "2: it must be a JSON object"),
        (line(question=""), "2: 'question' must be text"),
        ('{"answer": "1"}', "2: 'question' must be text, got None"),
        ('{"question": "?"}', "2: 'answer' must be a number, or end in '#### NUMBER', got None"),
        (line(answer="3 apples"), "2: 'answer' must be a number"),
        (line(answer="x #### "), "2: 'answer' must be a number"),
        (line(answer=True), "2: 'answer' must be a number"),
    ],
)
def test_bad_lines_are_refused_by_their_place(tmp_path, bad, reason):
    path = write(tmp_path, line() + "\n" + bad + "\n")
    with pytest.raises(ValueError) as refused:
        read_examples(path)
    assert f"{path}:{reason}" in str(refused.value)
    assert len(str(refused.value)) < 400


@pytest.mark.parametrize(("content", "reason"), [("", "no lines"), ("\n \r\n", "no lines"), (b"\xff{", "not UTF-8")])
def test_files_of_nothing_are_refused(tmp_path, content, reason):
    with pytest.raises(ValueError, match=reason):
        read_examples(write(tmp_path, content))


def examples(tmp_path, questions):
    return read_examples(write(tmp_path, "\n".join(line(str(question)) for question in questions)))


@pytest.mark.parametrize(("num", "num_held_out"), [(2, 1), (30, 3), (6000, 500)])
def test_the_last_tenth_is_held_out(tmp_path, num, num_held_out):
    training, held_out = split(examples(tmp_path, range(num)), None)
    assert [int(one.question) for one in held_out] == list(range(num - num_held_out, num))
    assert [int(one.question) for one in training] == list(range(num - num_held_out))


def test_held_out_questions_are_not_trained_on(tmp_path):
    both = examples(tmp_path, [1, 2, 3, 2])
    training, held_out = split(both, both[1:2])
    assert [one.question for one in training] == ["1", "3"]
    assert [one.question for one in held_out] == ["2"]
    with pytest.raises(ValueError, match="no question that is not held out"):
        split(both[1:2], None)
