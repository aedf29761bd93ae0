"""What the supports of a rollout weigh, per token, in our forms and as the nested lists of Python and JSON.

CPython keeps one object for each integer up to 256; every occurrence of a larger one is an object of its own, as
`tolist` and JSON make them.
"""

import json
import sys
from collections.abc import Sequence

MAX_SHARED_INT = 256
ID_BYTES = COUNT_BYTES = OFFSET_BYTES = 4


def nested_lists(supports: Sequence[Sequence[int]]) -> int:
    """Bytes of a list of lists of integers: both levels of lists, and the integers that are not shared."""
    lists = sys.getsizeof([None] * len(supports)) + sum(sys.getsizeof([None] * len(ids)) for ids in supports)
    return lists + sum(sys.getsizeof(token_id) for ids in supports for token_id in ids if token_id > MAX_SHARED_INT)


def json_text(supports: Sequence[Sequence[int]]) -> int:
    """Bytes of the same lists as JSON without spaces."""
    return len(json.dumps([list(ids) for ids in supports], separators=(",", ":")))


def cells(num_tokens: int, width: int) -> int:
    """Bytes of `Support` without bits: W ids and a count for each token."""
    return num_tokens * (ID_BYTES * width + COUNT_BYTES)


def ragged(supports: Sequence[Sequence[int]]) -> int:
    """Bytes of `RaggedSupport` where its pool is full: the kept ids, and for each token an offset and a count."""
    return ID_BYTES * sum(map(len, supports)) + len(supports) * (OFFSET_BYTES + COUNT_BYTES)


def packed_bits(num_tokens: int, vocab_size: int) -> int:
    """Bytes of one bit for each id of the vocabulary."""
    return num_tokens * -(-vocab_size // 8)
