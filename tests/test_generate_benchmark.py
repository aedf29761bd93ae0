"""The pure parts of the generation benchmark: what masks weigh, cases in plain values, rivals in another process."""

import json
import sys
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).parents[1] / "benchmarks"
SUPPORTS = [[3], [5, 256, 257], [1000, 31_999]]
# A rival that anyone can run; what it prints must not reach the answers.
RIVAL = """
class Rival:
    def __init__(self, folder, max_length, step=1):
        self.folder, self.step = folder, step
        print("printed")

    def run(self, case):
        return {"token_ids": [[self.step] * case.max_new_tokens for _ in case.prompts], "logprobs": []}

    def token_logprobs(self, token_ids):
        if not token_ids:
            raise ValueError("no tokens")
        return [-1.0 for _ in token_ids[1:]]
"""


@pytest.fixture(scope="module")
def benchmarks():
    """Scripts find each other in their own folder."""
    patch = pytest.MonkeyPatch()
    patch.syspath_prepend(str(BENCHMARKS))
    yield patch
    patch.undo()


@pytest.fixture
def worker(benchmarks, tmp_path, monkeypatch):
    import worker

    (tmp_path / "rival_plain.py").write_text(RIVAL)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    made = worker.Worker(sys.executable, "rival_plain", "a folder", 9, step=4)
    yield made
    made.close()


def test_mask_bytes(benchmarks):
    import mask_bytes

    # Empty lists of CPython weigh 56 bytes and a pointer 8; an integer above 256, 28.
    assert mask_bytes.nested_lists(SUPPORTS) == (56 + 3 * 8) + (3 * 56 + 6 * 8) + 3 * 28
    assert mask_bytes.json_text(SUPPORTS) == len("[[3],[5,256,257],[1000,31999]]")
    assert mask_bytes.cells(3, 50) == 3 * 51 * 4
    assert mask_bytes.ragged(SUPPORTS) == 6 * 4 + 3 * 8
    assert mask_bytes.packed_bits(3, 17) == 9


def test_cases_survive_json(benchmarks):
    from generate_case import Case

    case = Case(((1, 2), (3, 4), (5, 6)), 7, top_k=9)
    assert Case.from_plain(json.loads(json.dumps(case.to_plain()))) == case
    assert (case.num_rows, case.prompt_length, case.num_tokens) == (3, 2, 21)


def test_a_worker_answers(worker):
    from generate_case import Case

    case = Case(((1, 2), (3, 4)), 3)
    for _ in range(2):
        assert worker.run(case) == {"token_ids": [[4, 4, 4], [4, 4, 4]], "logprobs": []}
    assert worker.token_logprobs([1, 2, 3]) == [-1.0, -1.0]


def test_a_worker_that_fails_says_why(worker):
    with pytest.raises(RuntimeError, match="ValueError: no tokens"):
        worker.token_logprobs([])
