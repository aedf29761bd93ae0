"""Figures of an audit against the same figures worked out the plain way, and what one pass in blocks makes of them."""

import base64
import json
import math

import numpy as np
import pytest

from jaxmask.audit.check import Open
from jaxmask.audit.checks import CHECKS
from jaxmask.audit.encodings import Weights, digits
from jaxmask.audit.histogram import Shares, added, quantile
from jaxmask.audit.measures import Measures
from jaxmask.audit.statistics import CLIP, MAX_STRETCHES, SIZE_LIMITS
from tests.audit_blocks import block
from tests.rollout_files import good_rows


def measured(*blocks, vocab_size=None):
    measures = Measures()
    for given in blocks:
        is_open = Open.of(given)
        for check in CHECKS:
            is_open.apply(check, given)
        measures.add(given, is_open)
    return measures.statistics(vocab_size)


def of_good(row, **more):
    return {
        "token_ids": row.token_ids,
        "supports": row.supports,
        "logprobs": row.logprobs,
        "full_logprobs": row.full_logprobs,
        "setting": {"temperature": row.temperature},
        **more,
    }


def test_figures_are_those_of_all_tokens_however_they_are_cut():
    rows = good_rows(num_prompts=4)
    whole = measured(block(*map(of_good, rows)))
    cut = measured(*(block(of_good(row)) for row in rows))
    sizes = np.array([len(ids) for row in rows for ids in row.supports])
    mass = np.exp([full - kept for row in rows for full, kept in zip(row.full_logprobs, row.logprobs, strict=True)])
    of_rows = [math.fsum(row.full_logprobs) - math.fsum(row.logprobs) for row in rows]
    for one in (whole, cut):
        assert (one.num_rows, one.num_tokens, one.num_trained, one.num_ids) == (8, len(sizes), len(sizes), sizes.sum())
        assert one.sizes.mean == pytest.approx(sizes.mean())
        assert one.sizes.largest == sizes.max()
        assert one.sizes.median == np.quantile(sizes, 0.5, method="inverted_cdf")
        assert one.sizes.p90 == np.quantile(sizes, 0.9, method="inverted_cdf")
        assert one.sizes.p99 == np.quantile(sizes, 0.99, method="inverted_cdf")
        assert one.sizes.one_id_share == (sizes == 1).mean()
        below = [int((sizes <= limit).sum()) for limit in SIZE_LIMITS[: len(one.sizes.histogram)]]
        assert np.cumsum(one.sizes.histogram).tolist() == below
        kept = one.kept_mass
        assert (kept.num, kept.num_rows, sum(kept.histogram)) == (len(mass), 8, len(mass))
        assert kept.mean == pytest.approx(mass.mean())
        assert kept.least == pytest.approx(mass.min())
        assert kept.clipped_share == (mass < 1 - CLIP).mean()
        assert kept.mean_log == pytest.approx(np.log(mass).mean())
        assert kept.mismatch_kl == pytest.approx((mass - 1 - np.log(mass)).mean())
        assert kept.mean_log_of_row == pytest.approx(np.mean(of_rows))
        assert kept.least_of_row == pytest.approx(math.exp(min(of_rows)))
        for name, share in (("p1", 0.01), ("p10", 0.1), ("median", 0.5), ("p90", 0.9)):
            expected = np.quantile(mass, share, method="inverted_cdf")
            assert getattr(kept, name) == pytest.approx(expected, abs=1 / Shares.NUM_BINS)
        assert one.stretches[0].mean_size == np.mean([len(row.supports[0]) for row in rows])


def test_the_full_ratio_is_the_kept_mass():
    """Logits give it too: sum over the support of the vocabulary's softmax at the row's temperature."""
    row = good_rows()[0]
    by_logits = measured(block(of_good(row, logits=row.logits, full_logprobs=None)))
    by_logprobs = measured(block(of_good(row)))
    assert by_logits.kept_mass.mean == pytest.approx(by_logprobs.kept_mass.mean, abs=1e-6)
    z = row.logits.astype(np.float64) / row.temperature
    p = np.exp(z - np.logaddexp.reduce(z, axis=1)[:, None])
    expected = [p[place, ids].sum() for place, ids in enumerate(row.supports)]
    assert by_logits.kept_mass.mean == pytest.approx(np.mean(expected), abs=1e-9)


def test_entropy_is_over_the_supports():
    half, parts = math.log(0.5), [math.log(0.7), math.log(0.2), math.log(0.1)]
    row = {
        "token_ids": [1, 2, 3],
        "supports": [[1, 4], [2, 5, 6], [3]],
        "logprobs": [half, parts[0], 0.0],
        "kept_logprobs": [[half, half], parts, [0.0]],
    }
    expected = (math.log(2) - sum(math.exp(value) * value for value in parts)) / 3
    assert measured(block(row)).entropy == pytest.approx(expected)
    assert measured(block(row | {"kept_logprobs": None})).entropy is None


def test_what_is_at_fault_or_does_not_train_counts_for_nothing():
    good = {"token_ids": [1, 2], "supports": [[1, 3], [2]], "logprobs": [math.log(0.5), 0.0], "full_logprobs": [-1, -1]}
    wide = {"token_ids": [1], "supports": [[*range(2, 50)]], "logprobs": [-1.0], "full_logprobs": [-4.0]}
    context = {**wide, "token_ids": [2], "loss_mask": [False]}
    assert measured(block(good, wide, context)).sizes == measured(block(good)).sizes
    assert measured(block(good, wide, context)).kept_mass == measured(block(good)).kept_mass
    raw = {"token_ids": [1, 2], "supports": [[1], [2, 3]], "logprobs": [-0.5, -0.7], "full_logprobs": [-0.5, -0.7]}
    assert measured(block(good, raw)).kept_mass == measured(block(good)).kept_mass


def test_a_mass_that_is_not_known_is_said_to_be_so():
    bare = {"token_ids": [1], "supports": [[1, 2]]}
    unknown = measured(block(bare))
    assert unknown.kept_mass is None
    assert "full_logprobs" in unknown.mass_note
    assert "at least" not in unknown.mass_note
    top_p = [bare | {"setting": {"top_p": value, "top_k": 0, "min_p": 0.0}} for value in (0.9, 0.8)]
    assert measured(block(*top_p)).mass_note.startswith("at least 0.8, as only top-p filtered; ")
    assert "at least" not in measured(block(*top_p, bare)).mass_note


def test_bytes_are_those_of_the_real_encodings():
    random = np.random.default_rng(0)
    rows = [[random.integers(0, 10**6, random.integers(0, 12)).tolist() for _ in range(5)] for _ in range(3)]
    rows[1][2] = None
    given = block(*({"token_ids": [0] * 5, "supports": supports, "logprobs": [-1.0] * 5} for supports in rows))
    weights = Weights()
    weights.add(given.rows)
    found = {one.name: one.bytes_per_token for one in weights.encodings(7, 11, 10**6)}
    num_ids = sum(len(ids or []) for supports in rows for ids in supports)
    text = sum(len(json.dumps(supports, separators=(",", ":"))) for supports in rows)
    packed = 0
    for supports in rows:
        ids = np.array([token_id for one in supports for token_id in one or []], "<i4")
        packed += len(base64.b64encode(ids.tobytes())) + len(base64.b64encode(np.zeros(6, "<i4").tobytes()))
    assert found["nested lists, JSON"] == text / 15
    assert found["CSR, base64"] == packed / 15
    assert found["CSR, npz"] == (4 * num_ids + 4 * 16) / 15
    assert (found["cells of 7"], found["cells of 11"], found["packed bits"]) == (32.0, 48.0, 125000.0)
    assert weights.encodings(11, 11, None)[-2].bytes_per_token is None


def test_digits_are_those_of_the_decimal():
    values = [0, 9, 10, 99, 100, 151_935, 10**18 - 1, 10**18, -1, -10]
    assert digits(np.array(values)).tolist() == [len(str(value)) for value in values]


def test_histograms():
    assert added(np.array([1, 2]), np.array([5])).tolist() == [6, 2]
    counts = np.array([0, 3, 0, 1])
    assert [quantile(counts, share) for share in (0.5, 0.75, 0.76, 1.0)] == [1, 1, 3, 3]
    shares = Shares()
    shares.add(np.array([]))
    shares.add(np.array([1.0, 0.25, 1.0]))
    assert (shares.num, shares.mean, shares.least) == (3, 0.75, 0.25)
    assert shares.histogram(4).tolist() == [0, 1, 0, 2]
    assert shares.quantile(1.0) == 1.0


def test_positions_fall_into_few_stretches():
    length = 3 * MAX_STRETCHES + 1
    row = {"token_ids": [1] * length, "supports": [[1]] * (length - 1) + [[1, 2, 3]]}
    stretches = measured(block(row)).stretches
    assert len(stretches) == MAX_STRETCHES
    assert [one.start for one in stretches[1:]] == [one.end for one in stretches[:-1]]
    assert sum(one.num for one in stretches) == length
    assert stretches[-1].mean_size == pytest.approx((stretches[-1].num - 1 + 3) / stretches[-1].num)
