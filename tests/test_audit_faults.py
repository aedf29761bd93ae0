"""Every fault, planted in otherwise good rollouts of every form that can express it, is found where it is, alone."""

import functools
import itertools

import pytest

from jaxmask.audit.auditing import Auditor
from jaxmask.audit.checks import CHECKS
from jaxmask.audit.files import read
from jaxmask.audit.finding import Severity
from tests.planted_faults import FAULTS, POSITION, ROW
from tests.rollout_files import VARIANTS, VOCAB_SIZE, good_rows

ERRORS = {check.code for check in CHECKS if check.severity is Severity.ERROR}


@functools.cache
def sets_of_rows(num_prompts):
    """Six rows for each fault, which has some ids to work with where it is planted, and no likely completions."""
    sets = (good_rows(num_prompts, 6 // num_prompts, seed=seed) for seed in itertools.count())
    usable = (rows for rows in sets if len(rows[ROW].supports[POSITION]) > 2 and sum(rows[ROW - 1].logprobs) < -15)
    return [*itertools.islice(usable, len(FAULTS))]


def rows_for(name, number=0):
    # An answer of our server is of one prompt.
    return list(sets_of_rows(1 if name == "answer" else 3)[number])


def audited(tmp_path, name, rows, **options):
    """What was found, and the names of the rows."""
    variant = VARIANTS[name]
    path = tmp_path / f"rollouts{variant.suffix}"
    variant.write(path, rows)
    auditor = Auditor(vocab_size=VOCAB_SIZE, num_shown=1000, **options)
    names = []
    for rows_read in read(path):
        names += rows_read.names
        auditor.add(rows_read)
    return auditor.result([]), names


def planted(tmp_path, name, titles, **options):
    """What is wrongly found, and what is not found, with each fault in six rows of its own."""
    rows, expected = [], {}
    for number, title in enumerate(titles):
        some = rows_for(name, number)
        places = FAULTS[title].plant(some) or FAULTS[title].places
        for row, position in places:
            expected[FAULTS[title].code, len(rows) + row, position] = title
        rows += some
    result, names = audited(tmp_path, name, rows, **options)
    places = {row: number for number, row in enumerate(names)}
    seen = {(one.code, places[place.row], place.position) for one in result.findings for place in one.worst}
    # Every prompt is the same here, and the rows are not of it.
    seen = {one for one in seen if not (name == "answer" and one[0] == "group-supports-differ")}
    assert result.num_rows_at_fault == len({row for code, row, _ in seen if code in ERRORS})
    return seen - set(expected), {key: title for key, title in expected.items() if key not in seen}


@pytest.mark.parametrize("name", VARIANTS)
def test_good_rollouts_pass(tmp_path, name):
    result, names = audited(tmp_path, name, rows_for(name))
    assert (result.is_fit, result.findings, len(names)) == (True, (), 6)


@pytest.mark.parametrize("name", VARIANTS)
def test_planted_faults_are_found(tmp_path, name, request):
    # Types are checked for one variant of each form: it takes longer than all else here.
    if name != VARIANTS[name].form:
        request.getfixturevalue("unchecked")
    fitting = [title for title, fault in FAULTS.items() if fault.fits(name, VARIANTS[name])]
    assert len({FAULTS[title].code for title in fitting}) >= 12
    assert planted(tmp_path, name, [one for one in fitting if not FAULTS[one].options]) == (set(), {})
    for title in fitting:
        if FAULTS[title].options:
            assert planted(tmp_path, name, [title], **dict(FAULTS[title].options)) == (set(), {})
