import numpy as np
import pytest

from jaxmask import ragged

V = 11


def int64(*values: int) -> np.ndarray:
    return np.array(values, np.int64)


def test_lists_in_a_row():
    ids, lengths = ragged.flatten([[9, 3, 1], [], [4]], V)
    assert ids.tolist() == [9, 3, 1, 4]
    assert lengths.tolist() == [3, 0, 1]
    ids, lengths = ragged.flatten([], V)
    assert (ids.tolist(), lengths.tolist()) == ([], [])


def test_cells_and_bits():
    ids, lengths = int64(9, 3, 1, 4), int64(3, 0, 1)
    cells, counts, packed = ragged.to_cells(ids, lengths, V, None)
    assert cells.tolist() == [[1, 3, 9], [V, V, V], [4, V, V]]
    assert counts.tolist() == [3, 0, 1]
    assert packed is None
    cells, counts, packed = ragged.to_cells(ids, lengths, V, 2)
    assert cells.tolist() == [[1, 3], [V, V], [4, V]]
    assert packed.tolist() == [[0b00001010, 0b010], [0, 0], [0b00010000, 0]]
    assert (cells.dtype, counts.dtype, packed.dtype) == (np.int32, np.int32, np.uint8)


@pytest.mark.parametrize("width", [2, 3, None])
def test_rows_of_cells(width):
    cells, counts, packed = ragged.to_cells(int64(9, 3, 1, 4), int64(3, 0, 1), V, width)
    ids, offsets = ragged.from_cells(cells, counts, packed, V)
    assert ids.tolist() == [1, 3, 9, 4]
    assert offsets.tolist() == [0, 3, 3, 4]
    assert (ids.dtype, offsets.dtype) == (np.int32, np.int64)


def test_the_first_bad_row_is_named_with_all_its_bad_ids():
    with pytest.raises(ValueError, match=r"^support of row 1 holds ids \[-1, 11\] outside \[0, 11\)\.$"):
        ragged.to_cells(int64(0, 11, -1, 2, 12), int64(1, 3, 1), V, None)
    with pytest.raises(ValueError, match=r"^support of row 2 repeats ids \[3, 5\]\.$"):
        ragged.to_cells(int64(3, 5, 5, 3, 5, 3, 1, 1), int64(1, 1, 4, 2), V, None)
    # The same id in neighbouring rows is no repeat.
    assert ragged.to_cells(int64(3, 3), int64(1, 1), V, None)[0].tolist() == [[3], [3]]


def test_bits_past_the_vocabulary_are_no_ids():
    packed = np.array([[0b1, 0b11111111]], np.uint8)
    ids, offsets = ragged.from_cells(np.array([[0, 8]], np.int32), np.array([4], np.int32), packed, V)
    assert ids.tolist() == [0, 8, 9, 10]
    assert offsets.tolist() == [0, 4]


@pytest.mark.parametrize(("packed", "held"), [(None, 0), (np.array([[0, 0], [0b111, 0]], np.uint8), 3)])
def test_counts_that_nothing_holds(packed, held):
    cells = np.array([[0, 1], [0, 1]], np.int32)
    with pytest.raises(ValueError) as error:
        ragged.from_cells(cells, np.array([2, 4], np.int32), packed, V)
    assert str(error.value) == (f"support of row 1 counts 4 ids, more than its cells hold, but has {held} packed bits.")
