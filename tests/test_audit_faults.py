"""Every fault, planted in otherwise good rollouts of every form that can express it, is found where it is, alone."""

import pytest

from jaxmask.audit import audit
from jaxmask.audit.files import read
from tests.planted_faults import FAULTS
from tests.rollout_files import VARIANTS, VOCAB_SIZE, good_rows


def rows_for(name):
    # An answer of our server is of one prompt.
    return good_rows(num_prompts=1, group_size=6) if name == "answer" else good_rows()


def audited(tmp_path, name, rows, **options):
    variant = VARIANTS[name]
    path = tmp_path / f"rollouts{variant.suffix}"
    variant.write(path, rows)
    result = audit(path, vocab_size=VOCAB_SIZE, num_shown=100, **options)
    return result, [row for block in read(path) for row in block.names]


@pytest.mark.parametrize("name", VARIANTS)
def test_good_rollouts_pass(tmp_path, name):
    result, names = audited(tmp_path, name, rows_for(name))
    assert (result.is_fit, result.findings, len(names)) == (True, (), 6)


@pytest.mark.parametrize("name", VARIANTS)
def test_planted_faults_are_found(tmp_path, name):
    wrong = {}
    for title, fault in FAULTS.items():
        if not fault.fits(name, VARIANTS[name]):
            continue
        rows = rows_for(name)
        fault.plant(rows)
        result, names = audited(tmp_path, name, rows, **dict(fault.options))
        seen = [(one.code, place.row, place.position) for one in result.findings for place in one.worst]
        expected = [(fault.code, names[row], position) for row, position in fault.places]
        if sorted(seen) != sorted(expected):
            wrong[title] = {"seen": seen, "expected": expected}
    assert not wrong
