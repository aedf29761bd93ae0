import dataclasses

import numpy as np
import pytest

from jaxmask import Support
from jaxmask.wire import Logprob, to_csr
from serve.outputs import CompletionOutput, RequestOutput, SamplingMask

LISTS = [[3, 5, 9], [2], [], [0, 7]]
MASK = SamplingMask.from_lists(LISTS)
FIELDS = {"index": 0, "text": "", "token_ids": [5, 2, 1, 7]}


def test_a_mask_is_two_arrays_until_lists_are_asked_for():
    assert MASK.ids.tolist() == [3, 5, 9, 2, 0, 7]
    assert MASK.offsets.tolist() == [0, 3, 4, 4, 6]
    assert (MASK.ids.dtype, MASK.offsets.dtype) == (np.int32, np.int64)
    assert MASK.num_bytes == 6 * 4 + 5 * 8
    assert MASK.token_ids == LISTS
    assert list(MASK) == LISTS
    assert {type(token_id) for row in MASK.token_ids for token_id in row} == {int}
    assert MASK.counts.tolist() == [3, 1, 0, 2]
    assert len(MASK) == 4


def test_supports_of_the_library_come_in_as_they_are():
    support = Support.from_lists(LISTS, 11, 2)
    assert support.packed is not None
    ids, offsets = to_csr(support)
    mask = SamplingMask.from_csr(ids, offsets)
    assert mask == MASK
    assert mask.ids is ids
    assert SamplingMask.from_csr([3, 5, 9, 2, 0, 7], [0, 3, 4, 4, 6]) == MASK


@pytest.mark.parametrize("start", [None, 0, 1, 2, 4, 9, -1])
@pytest.mark.parametrize("end", [None, 0, 1, 3, 4, 9, -1])
def test_slices_are_those_of_the_lists(start, end):
    part = MASK[start:end]
    assert part.token_ids == LISTS[start:end]
    assert part.offsets[0] == 0
    assert part.num_bytes == 4 * sum(map(len, LISTS[start:end])) + 8 * (len(LISTS[start:end]) + 1)
    if len(part.ids):
        assert np.shares_memory(part.ids, MASK.ids)


def test_single_tokens():
    assert [MASK[token] for token in range(4)] == LISTS
    assert MASK[-4] == LISTS[0]
    for token in (4, -5):
        with pytest.raises(IndexError):
            MASK[token]
    with pytest.raises(ValueError, match=r"^a slice of a sampling mask must have step 1, got -1\.$"):
        MASK[::-1]


def test_parts_join_to_the_whole():
    for cut in range(5):
        assert SamplingMask.concatenate([MASK[:cut], MASK[cut:]]) == MASK
    assert SamplingMask.concatenate([MASK[:1], MASK[1:3], MASK[3:], MASK[:0]]) == MASK
    assert SamplingMask.concatenate([MASK, MASK]).token_ids == LISTS + LISTS
    none = SamplingMask.concatenate([])
    assert (none.token_ids, len(none), none.ids.dtype, none.offsets.dtype) == ([], 0, np.int32, np.int64)
    assert none == SamplingMask.from_lists([])


def test_masks_are_equal_where_their_supports_are():
    assert SamplingMask.from_lists([[1, 2], [3]]) != SamplingMask.from_lists([[1], [2, 3]])
    assert SamplingMask.from_lists([[1], [2]]) != SamplingMask.from_lists([[1], [3]])
    assert SamplingMask.from_lists([[1]]) != [[1]]


@pytest.mark.parametrize(
    ("ids", "offsets", "message"),
    [
        ([1.5], [0, 1], "ids must be integers, got float64."),
        ([1], [0, 2], "offsets must end at the number of token_ids, 1, got 2."),
        ([1, 2], [0, 2, 1, 2], "offsets must never decrease, got 2 then 1 at row 1."),
        ([1], [], "offsets must start at 0, got []."),
    ],
)
@pytest.mark.usefixtures("unchecked")
def test_rows_that_are_none(ids, offsets, message):
    with pytest.raises(ValueError) as error:
        SamplingMask.from_csr(ids, offsets)
    assert str(error.value) == message


def test_every_token_has_its_mask_and_its_logprobs():
    entries = [{token_id: Logprob(-0.5, 1)} for token_id in FIELDS["token_ids"]]
    output = CompletionOutput(**FIELDS, sampling_mask=MASK, logprobs=entries, finish_reason="length")
    assert output.finished()
    assert not CompletionOutput(**FIELDS).finished()
    assert output == dataclasses.replace(output, sampling_mask=SamplingMask.from_lists(LISTS))
    for field, values in (("sampling_mask", MASK[:3]), ("logprobs", entries[:3])):
        with pytest.raises(ValueError) as error:
            dataclasses.replace(output, **{field: values})
        assert str(error.value) == f"{field} must have one entry for each of the 4 token_ids, got 3."


def test_every_prompt_token_has_its_logprobs():
    fields = {"request_id": "0", "prompt": None, "prompt_token_ids": [4, 5], "outputs": [], "finished": True}
    RequestOutput(**fields, prompt_logprobs=[None, {5: Logprob(-1.0, 3, "x")}])
    with pytest.raises(ValueError, match=r"^prompt_logprobs must have one entry for each of the 2 prompt_token_ids, "):
        RequestOutput(**fields, prompt_logprobs=[None])


def test_records_do_not_change():
    with pytest.raises(dataclasses.FrozenInstanceError):
        CompletionOutput(**FIELDS).text = "other"
    with pytest.raises(dataclasses.FrozenInstanceError):
        MASK.ids = MASK.offsets
