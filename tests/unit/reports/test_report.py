"""The HTML report on whole, broken-off, damaged and hostile runs: parsed with a real HTML parser, not searched by
eye."""

import json
import math
import re
from html.parser import HTMLParser

import pytest

from grpo_lab.evaluation import EvaluationResult, Outcome, write_report
from grpo_lab.evaluation.page import LONGEST_SHOWN, choose_samples
from grpo_lab.evaluation.run_record import read_run
from grpo_lab.visible import visible

VOID = {"meta", "img", "br", "hr", "link", "input"}
ALLOWED = {
    "html", "head", "meta", "title", "style", "body", "main", "header", "section", "h1", "h2", "h3", "h4", "p", "div",
    "span", "b", "small", "ul", "li", "dl", "dt", "dd", "table", "thead", "tbody", "tr", "th", "td", "figure",
    "figcaption", "svg", "path", "line", "text", "circle", "rect", "article", "pre", "details", "summary",
}  # fmt: skip


class Page(HTMLParser):
    """Tags, attributes and text of a page; fails on a tag that is left open or closed twice."""

    def __init__(self, html):
        super().__init__(convert_charrefs=True)
        self.tags, self.attributes, self.texts, self.open, self.in_pre = [], [], [], [], []
        self.feed(html)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        self.attributes += [(tag, name, value) for name, value in attrs]
        if tag not in VOID:
            self.open.append(tag)
        if tag == "pre":
            self.in_pre.append("")

    def handle_startendtag(self, tag, attrs):
        self.tags.append(tag)
        self.attributes += [(tag, name, value) for name, value in attrs]

    def handle_endtag(self, tag):
        assert self.open, tag
        assert self.open.pop() == tag

    def handle_data(self, data):
        if self.open and self.open[-1] == "style":
            return
        self.texts.append(data)
        if self.open and self.open[-1] == "pre":
            self.in_pre[-1] += data

    @property
    def text(self):
        return " ".join(" ".join(self.texts).split())


def outcome(problem, score, text="it is 7\n#### 7", question=None, **changes):
    return Outcome(
        problem=problem, kind="greedy", sample=0, question=question or f"question {problem}?", prompt="p",
        solution="#### 7", completion=text, tokens=12, truncated=False, score=score, answer="7",
    ) if not changes else Outcome(
        **{**outcome(problem, score, text, question).__dict__, **changes}
    )  # fmt: skip


def result(scores, **changes):
    outcomes = tuple(outcome(i, score, **changes) for i, score in enumerate(scores))
    return EvaluationResult(outcomes, {"max_new_tokens": 64}, 2.0)


def whole_run(folder, steps=60):
    folder.mkdir(parents=True, exist_ok=True)
    rows = [
        {
            "step": step, "loss": 0.01 * math.sin(step), "grad_norm": 0.3, "reward": 0.3 + 0.005 * step,
            "kl": 0.001 * step, "entropy": 1.0 - 0.01 * step, "clip_ratio/region_mean": 0.002,
            "completions/clipped_ratio": 0.1, "groups/dead_share": 0.2 + 0.005 * step,
            "completions/mean_length_correct": 60.0, "completions/mean_length_incorrect": 90.0 - 0.1 * step,
            "rewards/accuracy_reward/mean": 0.3, "rewards/think_format_reward/mean": 0.9,
            "update/tokens_computed": 4000.0, "update/tokens_stock": 9000.0,
        }
        for step in range(1, steps + 1)
    ]  # fmt: skip
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    run = {
        "name": "a run", "model": "tiny-qwen2", "template": "r1", "objective": {"name": "dr_grpo", "clip": 0.2},
        "seed": 3, "seconds": 431.7, "settings": {"learning_rate": 1e-5, "beta": 0.0}, "versions": {"trl": "1.16.0"},
    }  # fmt: skip
    (folder / "run.json").write_text(json.dumps(run))
    result([0.0, 0.0, 0.0, 0.0, 0.0, 1.0, 1.0, None]).write(folder / "evaluation/before")
    result([1.0, 1.0, 1.0, 1.0, 0.0, 0.0, 1.0, 1.0]).write(folder / "evaluation/after")
    result([1.0, 0.0, 1.0, 0.0, 0.0, 0.0, 1.0, 1.0]).write(folder / "evaluation/step_30")
    return folder


def page_of(folder):
    return Page(write_report(folder).read_text(encoding="utf-8"))


def assert_self_contained(page):
    assert set(page.tags) <= ALLOWED, set(page.tags) - ALLOWED
    for _, name, value in page.attributes:
        assert name not in ("src", "href", "xlink:href", "action", "srcset"), name
        assert not name.startswith("on"), name
        assert "url(" not in (value or "")


# --- a whole run --------------------------------------------------------------------------------------------------


def test_whole_run_shows_everything(tmp_path):
    path = write_report(whole_run(tmp_path / "run"))
    assert path == tmp_path / "run" / "report.html"
    page = Page(path.read_text(encoding="utf-8"))
    assert_self_contained(page)
    assert "not recorded" not in page.text.lower().replace("– : not recorded", "")
    for said in [
        "a run", "tiny-qwen2", "r1", "name dr_grpo clip 0.2", "7 min 12 s", "1e-05", "1.16.0", "Held-out accuracy",
        "Reward", "Lengths of correct and incorrect answers", "Dead groups", "KL to the reference", "Entropy",
        "Clip fraction", "Truncated completions", "Tokens of the update", "optimizer step", "nats per token",
        "tokens per completion", "accuracy_reward", "think_format_reward", "✓ correct", "✗ wrong",
        "14 metrics over the run",
    ]:  # fmt: skip
        assert said in page.text, said
    assert page.tags.count("figure") == page.tags.count("figcaption") == 11
    assert "Notices" not in page.text


def test_working_out_is_one_figure_where_it_was_watched(tmp_path):
    """Accuracy, working out and length stand in one figure with two axes, the first of the page; else there is none."""
    rows = [
        {
            "step": n,
            "rewards/accuracy_reward/mean": n / 30,
            "rewards/worked_out/mean": n / 40,
            "completions/mean_length": n,
        }
        for n in range(1, 31)
    ]
    folder = whole_run(tmp_path / "plain")
    assert "working out" not in page_of(folder).text
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    page = page_of(folder)
    assert_self_contained(page)
    curves = page.text[page.text.index("Curves") :]
    figure = curves[: curves.index("Held-out accuracy")]
    for said in (
        "Accuracy, working out and length",
        "right axis: tokens per completion",
        "right answers",
        "worked out",
        "tokens (right axis)",
    ):
        assert said in figure, said


def test_headline_numbers_are_the_evaluations(tmp_path):
    """Before 2 of 7 scorable; after 6 of 8; of the 7 scorable in both, 4 gained and 1 lost: +42.9 points."""
    page = page_of(whole_run(tmp_path))
    assert "Held-out accuracy before 28.6 %" in page.text
    assert "Held-out accuracy after 75.0 %" in page.text
    assert "Gain, same problems +42.9 points" in page.text
    answers = page.text[page.text.index("Answers before and after") :]
    counts = [
        re.search(rf"(\d+) {name}", answers)[1]
        for name in ("became correct", "became wrong", "still wrong", "stayed correct", "unscorable")
    ]
    assert counts == ["4", "1", "1", "1", "1"]


def test_accuracy_chart_has_before_during_and_after_with_their_limits(tmp_path):
    page = page_of(whole_run(tmp_path))
    bars = [value for tag, name, value in page.attributes if (tag, name) == ("path", "class") and value == "bar"]
    assert len(bars) == 3
    for said in ("step 0: 28.6%", "step 30: 50%", "step 60: 75%"):
        assert f"greedy, {said}" in page.text


def test_result_curves_answers_tables_and_the_settings_folded_at_the_end(tmp_path):
    """A screen and a half of settings stood between the headline and the first curve."""
    html = write_report(whole_run(tmp_path)).read_text(encoding="utf-8")
    order = [
        "Held-out accuracy before", "Is it working?", "<h2>Curves", "<figure", "<h2>Answers", "<h2>Evaluation",
        "<h2>Metrics",
    ]  # fmt: skip
    places = [html.index(f"{name}") for name in [*order, "<h2>Settings"]]
    assert places == sorted(places)
    assert html.rindex("<details", 0, places[-1]) > places[-2]  # in it
    assert html.rindex("</details>") > html.index("learning_rate") > places[-1]


def test_settings_are_read_one_by_one_with_their_units(tmp_path):
    """Lists of mappings ran together: `name: accuracy, weight: 1, arguments: mode: strict, name: worked_out, …`."""
    rewards = [
        {"name": "accuracy", "weight": 1.0, "arguments": {"mode": "strict"}},
        {"name": "worked_out", "weight": 0},
    ]
    run = {
        "seconds": {"cold_start": 61.0, "reinforcement": 7200},
        "rewards": rewards,
        "parameters": 367680,
        "seed": 10000,
    }
    start = {"data": {"loader": "gsm8k", "arguments": {"n": 5}}, "arguments": {"max_length": 256}}
    (tmp_path / "run.json").write_text(json.dumps({**run, "cold_start": start}))
    text = page_of(tmp_path).text
    for said in (
        "time cold_start 1 min 01 s reinforcement 2 h 00 min", "parameters 367,680", "seed 10000",
        "rewards 1 name: accuracy, weight: 1, arguments: (mode: strict) 2 name: worked_out, weight: 0",
        "data.loader gsm8k data.arguments.n 5 arguments.max_length 256 tokens",
    ):  # fmt: skip
        assert said in text, said


def test_raw_data_is_drawn_under_the_smoothed(tmp_path):
    page = page_of(whole_run(tmp_path))
    drawn = [value for tag, name, value in page.attributes if (tag, name) == ("path", "class")]
    assert drawn.count("raw") == drawn.count("line") - 1  # all but the accuracy's four evaluations
    assert "moving average over 5 logged steps" in page.text


# --- missing and damaged pieces -----------------------------------------------------------------------------------


def test_a_run_that_left_nothing_gives_a_report_that_says_so(tmp_path):
    (tmp_path / "run.json").write_text('{"name": "nothing yet"}')
    page = page_of(tmp_path)
    assert_self_contained(page)
    assert page.text.endswith(
        "Not recorded: Curves (metrics.jsonl); Held-out accuracy (evaluation/before, evaluation/after, "
        "evaluation/step_<n>)."
    )
    assert page.text.count("ot recorded") == 1  # and no card, no frame around nothing


def test_a_plot_that_was_not_recorded_is_a_word_at_the_end_and_no_frame(tmp_path):
    (tmp_path / "metrics.jsonl").write_text('{"step": 1, "reward": 0.5, "groups/dead_share": 0.5, "entropy": 1.0}\n')
    page = page_of(tmp_path)
    assert page.tags.count("figure") == 3
    assert (
        "KL to the reference (kl); Clip fraction (clip_ratio/region_mean, "
        in page.text[page.text.index("Not recorded:") :]
    )


@pytest.mark.parametrize(
    "missing",
    [
        "run.json",
        "metrics.jsonl",
        "evaluation/before",
        "evaluation/after",
        "evaluation/after/outcomes.jsonl",
        "evaluation/before/summary.json",
    ],
)
def test_any_one_piece_may_be_missing(tmp_path, missing):
    target = whole_run(tmp_path) / missing
    if target.is_dir():
        for path in target.iterdir():
            path.unlink()
        target.rmdir()
    else:
        target.unlink()
    page = page_of(tmp_path)
    assert "Not recorded" in page.text
    assert ("Notices" in page.text) == ("/" in missing and missing.count("/") == 2)


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        ('{"step": 61, "rew', "not JSON"),
        ('{"reward": 1.0}', "no usable `step`"),
        ('{"step": "<b>x</b>"}', "no usable `step`"),
        ('{"step": NaN}', "no usable `step`"),
        ('{"step": 1' + "0" * 400 + "}", "no usable `step`"),
        ('{"step": 61, "reward": \xff\xfe}', "the byte 0xff is no UTF-8"),
    ],
    ids=["cut", "stepless", "markup", "nan", "huge", "bytes"],
)
def test_a_corrupted_line_is_reported_with_its_number(tmp_path, line, reason):
    folder = whole_run(tmp_path)
    lines = (folder / "metrics.jsonl").read_text().splitlines()
    (folder / "metrics.jsonl").write_bytes("\n".join([*lines[:41], line, *lines[41:]]).encode("latin-1"))
    page = page_of(folder)
    assert f"metrics.jsonl, line 42: {reason}" in page.text
    assert "<b>" not in page.tags
    assert read_run(folder).last_step == 60


def test_numbers_that_are_none_or_logged_twice_are_named(tmp_path):
    rows = [
        '{"step": 1, "reward": 0.5, "kl": NaN, "entropy": null, "note": "text", "flag": true}',
        '{"step": 2, "reward": 0.25, "kl": Infinity}',
        '{"step": 2, "reward": 0.75, "huge": 1' + "0" * 400 + "}",
    ]
    (tmp_path / "metrics.jsonl").write_text("\n".join(rows))
    record = read_run(tmp_path)
    assert record.metrics == {"reward": [(1, 0.5), (2, 0.75)]}
    said = page_of(tmp_path).text
    assert "kl was NaN, infinite or beyond 1e100 in 2 rows" in said
    assert "huge was NaN, infinite or beyond 1e100 in 1 row" in said
    assert "1 values were logged twice" in said


def test_a_single_step_can_be_drawn(tmp_path):
    (tmp_path / "metrics.jsonl").write_text('{"step": 5, "reward": 0.0, "kl": -0.0}\n')
    page = page_of(tmp_path)
    assert "total, step 5: 0" in page.text
    assert "nan" not in page.text.lower().replace("nanats", "")


@pytest.mark.parametrize(
    ("file", "content", "said"),
    [
        ("note.txt", "mine", "holds nothing of ours"),
        ("curation.json", "{}", "holds a curation that is not finished"),
        ("curation.json", "[1]", "holds a curation that cannot be read"),
        (
            "curation.json",
            '{"finished": true, "report": {"title": "t", "rows": "many"}}',
            "holds a curation that cannot be read",
        ),
        ("outcomes.jsonl", "{}", "holds an evaluation that cannot be read"),
    ],
)
def test_a_folder_of_something_else_keeps_its_report(tmp_path, file, content, said):
    (tmp_path / file).write_text(content)
    (tmp_path / "report.html").write_text("somebody else's")
    with pytest.raises(ValueError, match=said):
        write_report(tmp_path)
    assert (tmp_path / "report.html").read_text() == "somebody else's"


def test_what_an_evaluation_does_not_cover_is_a_notice(tmp_path):
    folder = whole_run(tmp_path)
    kept = result([1.0, 0.0])
    EvaluationResult(
        kept.outcomes, {**kept.settings, "prompts_too_long": 2, "stopped": "after 2 of 9 greedy answers"}
    ).write(folder / "evaluation/after")
    text = page_of(folder).text
    assert "evaluation/after: 2 of 4 problems were left out" in text
    assert "evaluation/after: stopped after 2 of 9 greedy answers" in text


# --- hostile text -------------------------------------------------------------------------------------------------

ATTACKS = [
    "<script>alert(1)</script>",
    "</pre></main></body></html><script src='https://evil.example/x.js'></script>",
    "<img src=x onerror=alert(1)>",
    "\"' onmouseover='alert(1)",
    "{{ 7 * 7 }}{% for x in range(9) %}x{% endfor %}{{ self.__init__.__globals__ }}",
    "&lt;b&gt; &amp; &#60;script&#62;",
    "<!-- <style>body{display:none}</style>",
    "]]><svg onload=alert(1)>",
    "half a tag <scr",
    "\u202egnirts\u2066 \x00\x1b[2J\x85",
    "\ud800 half a pair",
    "𝕬 ﷺ א ב 漢字 🧮",
    "",
]


@pytest.mark.parametrize("attack", ATTACKS)
def test_model_text_is_shown_and_never_becomes_markup(tmp_path, attack):
    result([0.0, 1.0], text=attack, question=f"Q {attack}").write(tmp_path / "evaluation/before")
    result([1.0, 0.0], text=attack, question=f"Q {attack}").write(tmp_path / "evaluation/after")
    page = page_of(tmp_path)
    assert_self_contained(page)
    shown = visible(attack).replace("\ud800", "\ufffd")
    if attack:
        assert page.in_pre.count(shown) == 4  # two problems, two sides
    else:
        assert page.text.count("(empty completion)") == 4


@pytest.mark.parametrize("steps", [8, 30], ids=["dots", "smoothed"])
@pytest.mark.parametrize("attack", ATTACKS[:9])
def test_names_from_the_run_are_escaped_too(tmp_path, attack, steps):
    (tmp_path / "run.json").write_text(
        json.dumps({"name": attack, "model": attack, attack: attack, "settings": {attack: attack}})
    )
    rows = [
        {"step": s, f"rewards/{attack}/mean": s, "rewards/other/mean": 1, "reward": 1, attack: s} for s in range(steps)
    ]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    page = page_of(tmp_path)
    assert_self_contained(page)
    assert " ".join(attack.split()) in page.text


def test_invisible_characters_are_shown_by_hand():
    """A text must not be able to reverse, hide or clear what stands around it."""
    assert visible("a\x00b\x1b[2J\x7f\x85\r\nc\td") == "a␀b␛[2J␡⟨U+0085⟩\nc\td"
    assert visible("\u202egnirts\u2066\u200f") == "⟨U+202E⟩gnirts⟨U+2066⟩⟨U+200F⟩"
    assert visible("𝕬 ﷺ א 漢字 🧮 👩\u200d💻") == "𝕬 ﷺ א 漢字 🧮 👩\u200d💻"
    assert visible("a\u200b\ufeff\U000e0041\ud800") == "a⟨U+200B⟩⟨U+FEFF⟩⟨U+E0041⟩\ufffd"


@pytest.mark.not_fast
def test_the_page_forbids_scripts_and_the_network_itself(tmp_path):
    (tmp_path / "run.json").write_text('{"name": "nothing yet"}')
    policies = [
        value for tag, name, value in page_of(tmp_path).attributes if tag == "meta" and value and "default-src" in value
    ]
    assert policies == ["default-src 'none'; style-src 'unsafe-inline'"]


@pytest.mark.timeout(300)
def test_a_hundred_kilobytes_are_cut_and_the_rest_is_counted(tmp_path):
    result([1.0] * 3, text="é" * 100_000).write(tmp_path / "evaluation/after")
    path = write_report(tmp_path)
    page = Page(path.read_text(encoding="utf-8"))
    assert "é" * LONGEST_SHOWN in page.in_pre
    assert "96,000 more characters" in page.text
    assert path.stat().st_size < 100_000


def test_truncated_answers_are_marked(tmp_path):
    result([0.0], truncated=True).write(tmp_path / "evaluation/after")
    assert "cut off by the limit" in page_of(tmp_path).text


# --- which answers are shown --------------------------------------------------------------------------------------


def test_failures_are_shown_beside_gains_in_the_rows_order():
    before = result([0.0] * 10 + [1.0] * 10)
    after = result([1.0] * 9 + [0.0] * 3 + [1.0] * 8)
    samples, counts, _ = choose_samples(before, after)
    assert dict(counts) == {"became correct": 9, "became wrong": 2, "still wrong": 1, "stayed correct": 8}
    assert [(s.asked.problem, s.kind) for s in samples] == [
        (0, "became correct"), (1, "became correct"), (2, "became correct"), (10, "became wrong"), (11, "became wrong"),
        (9, "still wrong"), (12, "stayed correct"), (13, "stayed correct"),
    ]  # fmt: skip


def test_different_problems_are_not_laid_side_by_side(tmp_path):
    result([0.0, 0.0], question="old").write(tmp_path / "evaluation/before")
    result([1.0, 0.0], question="new").write(tmp_path / "evaluation/after")
    page = page_of(tmp_path)
    assert "were made on different problems" in page.text
    assert "Gain, same problems" not in page.text


def test_one_side_alone_is_shown():
    samples = choose_samples(None, result([1.0] * 6 + [0.0] * 6))[0]
    assert [s.asked.problem for s in samples] == [0, 1, 2, 3, 6, 7, 8, 9]
    assert all(s.before is None for s in samples)
    assert choose_samples(None, None)[0] == []


def test_the_report_says_whether_it_worked(tmp_path):
    rows = [{"step": i, "loss": 0.1, "reward": 0.25 * i, "groups/dead_share": float(i > 2)} for i in range(1, 6)]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    page = page_of(tmp_path)
    assert "Is it working? step 1: healthy (reward 0.25, first 0.25) step 5: all groups are dead" in page.text
    assert "(mean reward 1: too hard, too easy, or the reward cannot read the answers)" in page.text
