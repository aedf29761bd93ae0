import json
import pickle

import numpy as np
import pytest
from letters import make_letters

from models import Tokenizer
from train.data_config import DataConfig
from train.rewards.verifiers import MathAnswer, ReasoningGymAnswer, is_same_answer
from train.tasks import Cursor, text_task
from train.tasks.options import gym_names
from train.tasks.sources import FEWER_ENTRIES, NUM_ENTRIES, GymExamples, create_gym

# These have no answer of their own: any that fits the question is right.
WITHOUT_ANSWER = {"boxnet", "graph_color", "propositional_logic", "rubiks_cube", "rush_hour"}


def ids_of(text):
    return make_letters().encode(text)


def first_of(task, prompts):
    return task.show(prompts.token_ids[0, : prompts.lengths[0]].tolist())


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    folder = tmp_path_factory.mktemp("gsm8k")
    rows = [{"question": "?" * (index % 40 + 1), "answer": f"so\n#### {index}"} for index in range(60)]
    (folder / "train.jsonl").write_text("\n".join(map(json.dumps, rows)))
    (folder / "test.jsonl").write_text(json.dumps({"question": "six?", "answer": "#### 6"}))
    (folder / "mine.py").write_text(
        "def short(prompts, completions, solution):\n    return [-len(c) for c in completions]\n"
    )
    return folder


@pytest.fixture(scope="module")
def gsm8k(files):
    rewards = ("answer", f"{files}/mine.py:short=0.125")
    train_file, eval_file = str(files / "train.jsonl"), str(files / "test.jsonl")
    task = text_task(
        DataConfig("gsm8k", train_file=train_file, eval_file=eval_file, instruction="Go.", rewards=rewards),
        make_letters(),
        seed=1,
    )
    yield task
    task.close()


def test_questions_of_a_file_are_drawn_in_epochs_and_scored(gsm8k):
    prompts, entries, cursor = gsm8k.draw(Cursor(), 60)
    assert cursor == Cursor(0, 60)
    # Brackets, forty signs, a space and the instruction.
    assert gsm8k.prompt_width == prompts.token_ids.shape[1] == int(prompts.lengths.max()) == 2 + 40 + 4
    assert sorted(int(entry.columns["answer"]) for entry in entries) == list(range(60))
    first = first_of(gsm8k, prompts)
    assert first == f"<{entries[0].prompt}>" == f"<{entries[0].columns['question']} Go.>"
    right = entries[1].columns["answer"]
    scored = gsm8k.score(entries[:2], [[], ids_of("it is $0"), ids_of(f"\\boxed{{{right}.0}}"), ids_of("none")], 2)
    is_zero = float(entries[0].columns["answer"] == "0")
    lengths = np.array([0, 8, 10 + len(right), 4])
    np.testing.assert_array_equal(scored.rewards.values, np.array([0, is_zero, 1, 0]) - lengths / 8)
    assert scored.rewards.values.dtype == np.float32
    assert scored.rewards.is_exact.tolist() == [False, bool(is_zero), True, False]
    assert scored.details["rewards/short"] == -lengths.mean()


def test_held_out_questions_of_a_file(gsm8k):
    prompts, entries = gsm8k.held_out(5)
    assert [entry.columns["answer"] for entry in entries] == ["6"]
    assert first_of(gsm8k, prompts) == "<six? Go.>"


def test_long_questions_are_passed_over(files):
    config = DataConfig("gsm8k", train_file=str(files / "train.jsonl"), instruction="", max_prompt_length=12)
    task = text_task(config, make_letters(), seed=1)
    prompts, entries, cursor = task.draw(Cursor(), 20)
    task.close()
    # Of lines 0 to 53 those of at most ten signs; each once per epoch.
    fitting = [index for index in range(54) if index % 40 < 10]
    assert {int(entry.columns["answer"]) for entry in entries} == set(fitting)
    assert prompts.token_ids.shape == (20, 12)
    assert cursor == Cursor(0, cursor.position)
    assert 0 < task.num_too_long == cursor.position - 20
    with pytest.raises(ValueError, match="max_prompt_length=12"):
        task.held_out(3)


def test_no_prompt_that_fits_is_an_error_that_names_the_field():
    task = text_task(DataConfig("chain-sum", max_prompt_length=5), make_letters(), seed=1)
    with pytest.raises(ValueError, match="max_prompt_length=5 leaves no prompt"):
        task.draw(Cursor(), 1)


def test_templates_hear_of_thinking_only_where_it_is_set():
    texts = []
    for options in ((), ("enable_thinking=false",)):
        task = text_task(DataConfig("chain-sum", options), make_letters(), seed=1)
        prompts, _, _ = task.draw(Cursor(), 1)
        texts.append(first_of(task, prompts))
    assert texts[1] == texts[0] + "False"


def test_a_model_without_a_template_is_refused():
    plain = Tokenizer(make_letters()._backend, eos_token_ids=(0,))
    with pytest.raises(ValueError, match="no chat template"):
        text_task(DataConfig("chain-sum"), plain, seed=1)


@pytest.mark.parametrize(
    ("found", "expected", "is_same"),
    [
        ("42", "42", True),
        ("$1,234.00", "1234", True),
        ("\\frac{84}{2}", "42", True),
        ("42 apples", "42", True),
        ("6 \\cdot 7", "42", True),
        ("41", "42", False),
        ("", "42", False),
        ("{" * 50, "42", False),
    ],
)
def test_numbers_are_compared_as_written_and_then_by_math_verify(found, expected, is_same):
    assert is_same_answer(found, expected) is is_same


def marks(name, options, entry, answer):
    columns = {key: [value] for key, value in pickle.loads(pickle.dumps(dict(entry.columns))).items()}
    return ReasoningGymAnswer(name, options)(["q"], [f"it is <answer>\n{answer}\n</answer>."], **columns)[0]


def examples_of(name, options=()):
    return GymExamples(create_gym(name, options, seed=7, size=FEWER_ENTRIES.get(name, NUM_ENTRIES)))


# Not here: what takes over half a second to make or score, see the slow test.
SLOW = {
    *("acre", "advanced_geometry", "arc_agi", "codeio", "figlet_font", "futoshiki", "group_anagrams"),
    *("intermediate_integration", "knight_swap", "puzzle24", "sudoku", "word_ladder", "zebra_puzzles"),
}


def check_own_answers(names):
    wrong = {}
    for name in names:
        entry = examples_of(name, (("datasets", "gcd,chain_sum"),) if name == "composite" else ())[11]
        options = (("datasets", "gcd,chain_sum"),) if name == "composite" else ()
        assert entry.question.strip()
        found = marks(name, options, entry, entry.columns["answer"])
        if (found == 1) == (name in WITHOUT_ANSWER):
            wrong[name] = found
    assert not wrong


def test_every_quick_data_set_gives_full_marks_to_its_own_answer():
    quick = set(gym_names()) - SLOW
    assert len(quick) == 106 - len(SLOW)
    check_own_answers(sorted(quick))


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:unclosed file:ResourceWarning")
def test_every_slow_data_set_gives_full_marks_to_its_own_answer():
    check_own_answers(sorted(SLOW))


def test_data_sets_without_an_answer_give_full_marks_to_one_that_fits():
    for name, key in (("propositional_logic", "example_answer"), ("graph_color", "possible_answer")):
        entry = examples_of(name)[11]
        answer = entry.columns["metadata"][key]
        assert marks(name, (), entry, answer if isinstance(answer, str) else json.dumps(answer)) == 1


@pytest.mark.parametrize("name", ["gsm_symbolic", "countdown"])
def test_reasoning_gym_as_a_task(name):
    task = text_task(DataConfig(f"reasoning-gym:{name}", reward_timeout=60.0), make_letters(), seed=3)
    _, entries, cursor = task.draw(Cursor(), 4)
    answers = [ids_of(f"<answer>{entry.columns['answer']}</answer>") for entry in entries]
    wrong = [ids_of("<answer>9**9**9</answer>" if name == "gsm_symbolic" else "<answer>1+</answer>")] * 4
    scored = task.score(entries, [one for pair in zip(answers, wrong, strict=True) for one in pair], 2)
    assert scored.rewards.is_exact.tolist() == [True, False] * 4
    assert scored.rewards.values[::2].tolist() == [1] * 4
    assert scored.rewards.values[1::2].max() < 0.1
    assert scored.details["rewards/num_failed"] == 0
    held_out = {entry.prompt for entry in task.held_out(4)[1]}
    assert len(held_out) == 4
    drawn = [entry.prompt for entry in task.draw(Cursor(), 20)[1]]
    assert drawn[4:8] == [entry.prompt for entry in task.draw(cursor, 4)[1]]
    assert not held_out & set(drawn)
    task.close()


def test_math_answers_take_numbers_from_texts():
    columns = {"answer": ["1000", "1000", "-3"]}
    assert MathAnswer()(["q"] * 3, ["<answer>1,000</answer>", "so 10 00", "x=-3"], **columns) == [1, 0, 1]
