"""The three reports of an audit: what they say, and that nothing in a file can break them."""

import html.parser
import json
import re
from pathlib import Path

import numpy as np
import pytest

from jaxmask.audit import audit
from jaxmask.audit.across import across_checks
from jaxmask.audit.checks import CHECKS
from jaxmask.audit.finding import Finding, Place, Severity
from jaxmask.audit.outcome import Source
from tests.planted_faults import FAULTS
from tests.rollout_files import VARIANTS, VOCAB_SIZE, good_rows

HOSTILE = '<script>alert("&")</script>\x1b[31m\u202e\ud800'


def written(tmp_path, rows, name="rollout"):
    path = tmp_path / f"rollouts{VARIANTS[name].suffix}"
    VARIANTS[name].write(path, rows)
    return path


@pytest.fixture(scope="module")
def clean(tmp_path_factory):
    return audit(written(tmp_path_factory.mktemp("clean"), good_rows()))


@pytest.fixture(scope="module")
def faulty(tmp_path_factory):
    rows = good_rows()
    FAULTS["the drawn id taken out"].plant(rows)
    rows[0].logprobs[2] = 0.5
    return audit(written(tmp_path_factory.mktemp("faulty"), rows), num_shown=1)


def hostile(outcome):
    place = Place(HOSTILE, 3, HOSTILE)
    finding = Finding("sampled-outside", Severity.ERROR, "Title.", "Remedy.", 7, 2, (place,))
    return type(outcome)(
        sources=(Source(HOSTILE, "vllm", 1),),
        findings=(finding,),
        statistics=outcome.statistics,
        vocab_size=None,
        num_rows_at_fault=2,
    )


def test_the_verdict_comes_first(clean, faulty):
    assert clean.to_text().splitlines()[0] == "fit to train on"
    assert faulty.to_text().splitlines()[0] == "NOT fit to train on: 2 kinds of fault in 2 rows of 6"
    assert clean.is_fit
    assert not faulty.is_fit


def test_text_names_the_places_and_what_to_do(faulty):
    lines = faulty.to_text().splitlines()
    start = lines.index("errors")
    assert lines[start + 1] == "  sampled-outside  1 place in 1 row"
    assert lines[start + 2].startswith("    A sampled id lies outside its support. Record the support in the sampler ")
    assert re.fullmatch(
        r"      rollouts\.npz, row 3, position 5: id \d+ is none of \[.*\] \(\d+ ids\)", lines[start + 3]
    )


def test_colours_are_for_terminals_alone(faulty):
    assert "\x1b[1;31mNOT fit" in faulty.to_text(is_coloured=True)
    assert "\x1b" not in faulty.to_text()


def test_figures_of_the_text_are_those_of_the_statistics(clean):
    text, mass = clean.to_text(), clean.statistics.kept_mass
    assert f"mean {mass.mean:.4f}, bias {mass.mean - 1:+.4f}, least {mass.least:.4g}" in text
    assert f"mean {clean.statistics.sizes.mean:.2f}, median {clean.statistics.sizes.median}" in text


def test_json_is_strict_and_holds_everything(clean, faulty):
    for outcome in (clean, faulty):
        text = json.dumps(outcome.to_dict(), allow_nan=False)
        assert json.loads(text) == outcome.to_dict()
    values = faulty.to_dict()
    assert (values["schema"], values["is_fit"], values["num_rows_at_fault"]) == ("jaxmask.audit/1", False, 2)
    found = {one["code"]: one for one in values["findings"]}
    assert found["sampled-outside"]["worst"][0]["position"] == 5
    assert sum(bucket["num"] for bucket in values["statistics"]["sizes"]["histogram"]) == clean.statistics.sizes.num - 1
    assert values["statistics"]["kept_mass"]["clip"] == 0.2


def test_a_whole_row_has_no_position(tmp_path):
    rows = good_rows()
    FAULTS["supports one token late"].plant(rows)
    assert audit(written(tmp_path, rows)).to_dict()["findings"][0]["worst"][0]["position"] is None


class Elements(html.parser.HTMLParser):
    """Counts elements, and what would fetch something."""

    def __init__(self):
        super().__init__()
        self.names, self.open, self.fetched = [], [], []

    def handle_starttag(self, tag, attrs):
        self.names.append(tag)
        self.fetched += [value for name, value in attrs if name in ("src", "href", "action")]
        if tag not in ("meta",):
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.names.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag


def elements(page):
    parser = Elements()
    parser.feed(page)
    assert parser.open == []
    return parser


def test_the_page_is_whole_and_needs_nothing(clean, faulty):
    for outcome, num_findings in ((clean, 0), (faulty, len(faulty.findings))):
        page = outcome.to_html()
        found = elements(page)
        assert found.fetched == []
        assert "script" not in found.names
        assert "url(" not in page
        # Sizes, their sum, by position twice, kept mass, by position, bytes.
        assert found.names.count("svg") == 7
        assert page.count('class="finding') == num_findings
        assert "nan" not in page.lower().replace("finance", "")


def test_pictures_show_the_figures(clean):
    page, sizes = clean.to_html(), clean.statistics.sizes
    assert f"<title>1: {sizes.one_id_share:.2%}</title>" in page
    encodings = {one.name: one.bytes_per_token for one in clean.statistics.encodings}
    assert f"<title>packed bits: {encodings['packed bits']:,.1f}</title>" in page


def test_what_stands_in_files_comes_through_as_text_alone(clean):
    bad = hostile(clean)
    assert elements(bad.to_html()).names.count("script") == 0
    assert "&lt;script&gt;" in bad.to_html()
    for report in (bad.to_text(), bad.to_html()):
        assert not {"\x1b", "\u202e", "\ud800"} & set(report)
    json.loads(json.dumps(bad.to_dict(), allow_nan=False))
    elements(bad._repr_html_())


def test_reports_of_next_to_nothing(tmp_path):
    path = tmp_path / "one.jsonl"
    path.write_text(json.dumps({"token_ids": [], "sampling_mask": [], "logprobs": []}) + "\n")
    outcome = audit(path)
    assert "no support to look at" in outcome.to_text()
    assert elements(outcome.to_html()).names.count("svg") == 1
    json.dumps(outcome.to_dict(), allow_nan=False)


def test_strict_makes_warnings_count(tmp_path):
    rows = good_rows()
    FAULTS["ids not in order"].plant(rows)
    path = written(tmp_path, rows)
    assert audit(path).verdict == "fit to train on, with 1 kind of warning"
    strict = audit(path, is_strict=True)
    assert (strict.is_fit, strict.verdict) == (False, "NOT fit to train on: 1 kind of warning, and --strict")


def test_the_worst_are_shown_first_and_the_rest_counted(tmp_path):
    rows = good_rows()
    for row, value in ((0, 0.1), (2, 0.9), (4, 0.5), (5, 0.7)):
        rows[row].logprobs[1] = value
    rows[1].logprobs[3:5] = [0.2, 0.3]
    found = audit(written(tmp_path, rows, "vllm"), num_shown=3).findings[0]
    assert (found.code, found.count, found.num_rows) == ("logprob-above-zero", 6, 5)
    assert [(place.row, place.position) for place in found.worst] == [
        ("rollouts.jsonl:3", 1),
        ("rollouts.jsonl:6", 1),
        ("rollouts.jsonl:5", 1),
    ]
    assert np.all(np.diff([place.badness for place in found.worst]) < 0)


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"vocab_size": 0}, "vocab_size must be at least 1, got 0"),
        ({"tolerance": float("nan")}, r"tolerance must be in \[0, 1\), got nan"),
        ({"num_shown": -1}, "num_shown must be 0 or more, got -1"),
        ({"eos_token_ids": (300,), "vocab_size": VOCAB_SIZE}, "below vocab_size 300, got 300"),
        ({"form": "none"}, "form must be one of auto, "),
    ],
)
def test_options_are_checked(tmp_path, options, text):
    with pytest.raises(ValueError, match=text):
        audit(written(tmp_path, good_rows(), "vllm"), **options)


def test_the_documentation_lists_every_code():
    page = (Path(__file__).parents[1] / "docs/audit.md").read_text()
    errors, _, warnings = page.partition("## Errors")[2].partition("## Warnings")
    for severity, part in ((Severity.ERROR, errors), (Severity.WARNING, warnings.partition("\n## ")[0])):
        listed = re.findall(r"^\| `([a-z0-9-]+)` \| (.*) \|$", part, re.MULTILINE)
        expected = [(one.code, one.title) for one in (*CHECKS, *across_checks()) if one.severity is severity]
        assert [one for one in listed if one[0] not in {"one-id-only", "logprobs-all-zero"}] == expected


def test_no_file_is_no_audit():
    with pytest.raises(ValueError, match="one file at least"):
        audit([])
