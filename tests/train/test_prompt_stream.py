import itertools
import logging
import subprocess
import sys

import numpy as np
import pytest

from train.data import MAX_PASSED_OVER, Cursor, Example, PromptStream, epoch_order


class Numbered:
    """Questions "0", "1", ...; each as many tokens long as it says."""

    def __init__(self, num):
        self.num = num

    def __len__(self):
        return self.num

    def __getitem__(self, index):
        return Example(str(index), {"index": index})


def stream_of(num, max_length=10**6, seed=3, **options):
    return PromptStream(
        Numbered(num), lambda example: [0] * int(example.question), max_length=max_length, seed=seed, **options
    )


def take(stream, cursor, num):
    taken, cursor = stream.take(cursor, num)
    return [one.example.columns["index"] for one in taken], cursor


def test_a_resumed_stream_goes_on_where_the_unbroken_one_does():
    """P69: the prompts of steps 3 and 4 after a resume are those of the unbroken run."""
    unbroken, cursor, cursors = [], Cursor(), []
    stream = stream_of(10)
    for _ in range(5):
        cursors.append(cursor)
        drawn, cursor = take(stream, cursor, 4)
        unbroken.append(drawn)
    resumed = stream_of(10)
    again, cursor = take(resumed, cursors[3], 4)
    assert [again, take(resumed, cursor, 4)[0]] == unbroken[3:]
    # No prompt comes again before the epoch's end, which lies within the third step.
    assert sorted(list(itertools.chain(*unbroken))[:10]) == list(range(10))


def test_the_second_epoch_has_its_own_order_also_after_a_resume():
    """P68: the key of the shuffle is a function of the epoch, not of when the process started."""
    stream = stream_of(50)
    first, cursor = take(stream, Cursor(), 50)
    second, end = take(stream, cursor, 50)
    assert cursor == Cursor(0, 50)
    assert end == Cursor(1, 50)
    assert sorted(first) == sorted(second) == list(range(50))
    assert first != second
    assert take(stream_of(50), cursor, 50)[0] == second
    assert take(stream_of(50), Cursor(1, 0), 50)[0] == second
    assert take(stream_of(50, seed=4), Cursor(), 50)[0] != first


def test_orders_are_the_same_in_every_process_and_version():
    """Raw words of PCG64 seeded by SeedSequence, which NumPy keeps; sorted here by hand."""
    words = np.random.PCG64(np.random.SeedSequence([7, 2])).random_raw(6)
    assert epoch_order(6, 7, 2).tolist() == sorted(range(6), key=lambda i: words[i])
    code = "from train.data import epoch_order; print(epoch_order(6, 7, 2).tolist())"
    said = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=100)
    assert said.stdout.strip() == str(epoch_order(6, 7, 2).tolist())


def test_orders_are_uniform():
    """Each of the 24 orders of 4 examples as often as the others: chi-square, 23 degrees, 0.1 % at 49.7."""
    counts = {}
    for epoch in range(2400):
        order = tuple(epoch_order(4, 0, epoch).tolist())
        counts[order] = counts.get(order, 0) + 1
    assert len(counts) == 24
    assert sum((count - 100) ** 2 / 100 for count in counts.values()) < 49.7


def test_data_can_keep_their_order():
    stream = stream_of(3, is_shuffled=False)
    assert take(stream, Cursor(), 7) == ([0, 1, 2, 0, 1, 2, 0], Cursor(2, 1))


def test_long_prompts_are_passed_over_and_counted(caplog):
    stream = stream_of(10, max_length=4)
    with caplog.at_level(logging.WARNING):
        drawn, cursor = take(stream, Cursor(), 10)
    assert sorted(drawn[:5]) == sorted(drawn[5:]) == [0, 1, 2, 3, 4]
    assert cursor.epoch == 1
    assert stream.num_too_long == 5 + cursor.position - 5
    assert [record.getMessage() for record in caplog.records] == [
        "prompts of more than max_prompt_length=4 tokens are passed over"
    ]


def test_examples_left_out_never_come():
    stream = stream_of(10, is_left_out=lambda example: example.columns["index"] % 2 == 0)
    assert set(take(stream, Cursor(), 30)[0]) == {1, 3, 5, 7, 9}
    assert stream.num_too_long == 0


@pytest.mark.parametrize(("num", "tried"), [(3, 3), (10**6, MAX_PASSED_OVER)])
def test_no_prompt_that_fits_is_an_error(num, tried):
    stream = PromptStream(Numbered(num), lambda example: [0, 0], max_length=1, seed=0)
    with pytest.raises(ValueError, match=f"max_prompt_length=1 leaves no prompt among {tried} in a row"):
        stream.take(Cursor(), 1)


def test_no_examples_are_an_error():
    with pytest.raises(ValueError, match="no examples"):
        stream_of(0)
