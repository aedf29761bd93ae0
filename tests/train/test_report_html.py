import json
import re
from html.parser import HTMLParser

import pytest

from train import report, report_samples
from train.report_html import bucket_labels, write_report
from train.report_samples import MAX_TOKENS, shown_samples

EVIL = "</i><script>alert('x')</script>\" onmouseover=\"y"
ROW = {
    "rewards/mean": 0.5, "support/size_mean": 3.0, "support/one_id_share": 0.5, "support/histogram": [4, 2, 1],
    "ratio/mean": 1.0, "ratio/std": 0.0, "ratio/max_error": 1e-6, "entropy": 0.5, "grad_norm": 1.0, "seconds": 2.0,
}  # fmt: skip


def sample(step, num=3, text=EVIL):
    return {
        "step": step, "prompt": text, "completion": text * num, "reward": 1.0, "exact": True, "finish_reason": "stop",
        "tokens": [text] * num, "token_ids": [7] * num, "logprobs": [-0.7] * num, "sampling_mask": [[3, 7]] * num,
        "mask_tokens": [[text, "b"]] * num,
    }  # fmt: skip


def write(folder, rows, samples=(), config=None):
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "samples.jsonl").write_text("".join(json.dumps(one) + "\n" for one in samples))
    (folder / "config.json").write_text(json.dumps(config or {"preset": EVIL, "iterations": 9, "grpo": {"top_k": 4}}))
    return folder


class Page(HTMLParser):
    """What a browser would make of a page: tags with their attributes, and the text."""

    def __init__(self, text):
        super().__init__()
        self.tags, self.words = [], []
        self.feed(text)

    def handle_starttag(self, tag, attributes):
        self.tags.append((tag, dict(attributes)))

    def handle_data(self, data):
        self.words.append(data)


def page_of(folder):
    path = write_report(folder)
    assert path == folder / "report.html"
    return path.read_text(encoding="utf-8")


def test_a_page_shows_the_run_and_needs_nothing_else(tmp_path):
    rows = [ROW | {"step": step, "eval/greedy": 0.25 * step} for step in range(3)]
    text = page_of(write(tmp_path, rows, [sample(3, text="ab")]))
    page = Page(text)
    words = " ".join(" ".join(page.words).split())
    for part in ("iterations of 9", "0.500", "0.0% \u2192 50.0%", "1.0e-06", "0.1 min", "grpo.top_k", "ended by stop"):
        assert part in words
    assert [dict(found)["data-tip"] for tag, found in page.tags if "data-tip" in found] == [
        "ab \u00b7 p = 0.497 \u00b7 2 ids \u00b7 kept: ab  b"
    ] * 3
    assert sum(tag == "svg" for tag, _ in page.tags) == 9
    outside = {name for _, found in page.tags for name in found} & {"src", "href", "srcset", "action", "xlink:href"}
    assert not outside
    assert not re.search(r"@import|url\(|fetch\(", text)


def test_prompts_completions_and_configs_cannot_break_out(tmp_path):
    rows = [ROW | {"step": 0, f"rewards/{EVIL}": 0.5, f"eval/{EVIL}": 0.5}]
    page = Page(page_of(write(tmp_path, rows, [sample(1)])))
    assert sum(tag == "script" for tag, _ in page.tags) == 1
    assert not any(name.startswith("on") for _, found in page.tags for name in found)
    assert "".join(page.words).count(EVIL) >= 5


@pytest.mark.parametrize("rows", [[], [{"step": 0}], [{"step": 5, "rewards/mean": float("nan"), "loss": float("inf")}]])
def test_pages_of_next_to_nothing(tmp_path, rows):
    assert "<h1>" in page_of(write(tmp_path, rows))


def test_an_evaluation_after_the_last_iteration_is_no_iteration(tmp_path):
    rows = [{"step": 0, "rewards/mean": 0.25, "eval/greedy": 0.5}, {"step": 1, "rewards/mean": 0.75}]
    write(tmp_path, [*rows, {"step": 2, "eval/greedy": 1.0}], config={"iterations": 2})
    text = " ".join(re.sub(r"<[^>]*>", " ", page_of(tmp_path)).split())
    assert "2 iterations of 2" in text
    assert "0.500 reward" in text
    assert "50.0% \u2192 100.0% held out, greedy" in text


def test_missing_and_damaged_files_say_less(tmp_path):
    assert "There are no metrics yet." in page_of(tmp_path)
    write(tmp_path, [ROW | {"step": 0}], [sample(1)])
    (tmp_path / "config.json").write_text("{")
    with (tmp_path / "samples.jsonl").open("a") as file:
        file.write('{"step": 2}\n[1]\n{"step": 2, "tokens": ["\\ud800"], "logprobs": [NaN], "reward": NaN}\n{"st')
    text = page_of(tmp_path)
    assert "after iteration 2" in text
    assert "Configuration" not in text


def test_samples_are_few_and_short():
    by_step = {step: [sample(step, num=2000 if step == 90 else 2)] * 7 for step in range(0, 100, 10)}
    found = shown_samples(by_step)
    assert list(found) == [0, 20, 40, 70, 90]
    assert all(len(of_one) == report_samples.MAX_PER_STEP for of_one in found.values())
    assert len(found[90][0].tokens) == MAX_TOKENS
    assert found[90][0].num_cut == 2000 - MAX_TOKENS


def test_tokens_are_shaded_by_the_size_of_their_support_and_underlined_by_their_probability():
    one = sample(0, num=5, text="a") | {
        "sampling_mask": [[1], [1, 2], [1, 2, 3, 4], list(range(5)), list(range(100))],
        "logprobs": [0.0, -0.05, -0.7, -1.7, -9.0],
        "mask_tokens": [["a"], ["a", "b"], ["a"] * 4, ["a"] * 5, ["a"] * 8],
    }
    tokens = shown_samples({0: [one]})[0][0].tokens
    assert [token.shade for token in tokens] == [0, 1, 2, 3, 7]
    assert [token.line for token in tokens] == [0, 0, 2, 3, 4]
    assert tokens[0].tip == "a \u00b7 p = 1 \u00b7 1 id: no choice"
    assert tokens[4].tip.endswith("a  a \u2026")


def test_buckets_are_named_by_what_they_hold():
    assert bucket_labels(4) == ["1", "2", "3\u20134", "5\u20138"]
    assert bucket_labels(1) == ["1"]


@pytest.mark.slow
def test_curves_are_drawn_of_rows_that_lack_things(tmp_path):
    rows = [ROW | {"step": 0}, {"step": 1, "rewards/mean": float("nan")}, {"step": 2}]
    report.plot_curves(rows, tmp_path / "curves.png", "run")
    assert (tmp_path / "curves.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.slow
def test_a_page_of_a_long_run_stays_small(tmp_path):
    rows = [ROW | {"step": step, "loss": step % 7 / 7} for step in range(20_000)]
    write(tmp_path, rows, [sample(step, num=2000, text=" long token") for step in range(0, 20_000, 400)])
    assert write_report(tmp_path).stat().st_size < 1.5e6


@pytest.mark.parametrize(
    ("staleness", "words"), [(0.0, "same weights, so it should be 1"), (1.0, "an older policy drew")]
)
def test_a_curve_of_ratios_says_whose_they_are(staleness, words, tmp_path, monkeypatch):
    titles, finish = [], report._finish
    monkeypatch.setattr(
        report, "_finish", lambda axes, title, **kept: titles.append(title) or finish(axes, title, **kept)
    )
    report.plot_curves([{"step": 0, **ROW, "staleness/mean": staleness}], tmp_path / "curves.png", "run")
    assert f"ratio on the first pass: {words}" in titles
