"""Blocks of rows by hand, for tests of what looks at them."""

import numpy as np

from jaxmask.audit.block import Block
from jaxmask.audit.builder import RowsBuilder
from jaxmask.audit.check import Open
from jaxmask.audit.checks import CHECKS
from jaxmask.audit.completion import Completion
from jaxmask.audit.rows import Setting


def block(*rows, vocab_size=None, eos_token_ids=()):
    """Rows of `Completion`'s arguments; log-probabilities are those of equally likely ids where none are given."""
    builder = RowsBuilder()
    for number, row in enumerate(rows):
        supports = row.get("supports")
        if supports is not None and "logprobs" not in row:
            row = row | {"logprobs": [-float(np.log(max(len(ids or []), 1))) for ids in supports]}
        setting = Setting(**row.get("setting", {}))
        builder.add(Completion(f"row {number}", **{**row, "setting": setting}))
    return Block(builder.build(), vocab_size, eos_token_ids)


def found(given):
    """What the checks of single rows find: (code, row, position)."""
    is_open = Open.of(given)
    marks = [(check.code, is_open.apply(check, given)) for check in CHECKS]
    return [
        (code, int(row), int(position))
        for code, one in marks
        for row, position in zip(one.rows, one.positions, strict=True)
    ]


def details(given, code):
    """What the places of a code say."""
    is_open = Open.of(given)
    marks = {check.code: is_open.apply(check, given) for check in CHECKS}[code]
    return [marks.detail(index) for index in range(len(marks.rows))]
