"""Tests of ``lab/regress/report.py``, the report of ``regress``: a table on the terminal and an HTML page."""

import dataclasses
import io
import json
import re
from html.parser import HTMLParser
from pathlib import Path

import pytest
from growing_server import insert
from rich.console import Console
from sglang_moe_patches.lab.regress import report
from sglang_moe_patches.lab.regress.compare import Answer, Comparison, Memory, Run, compare

HOSTILE = "</pre><script>alert('x')</script><img src=http://evil.example/a.png onerror=alert(1)> {{ 7*7 }} & \"quoted\""
VOID = {"meta", "link", "img", "br", "hr", "input"}


def answers(count: int, right: int) -> tuple[Answer, ...]:
    return tuple(Answer(f"q{i}", f"so {i}", 7, 7 if i < right else None, (i, i + 1)) for i in range(count))


def run(name: str, count: int = 20, right: int = 18, **changes) -> Run:
    buffers = 3 if name == "stock" else 1
    values = {
        "engine": "0.5.12.post1",
        "command": ("python", "-m", "sglang.launch_server", "--model-path", "a b"),
        "answers": answers(count, right),
        "startup_s": 21.25,
        "latency_s": 10.0,
        "input_tokens": 12345,
        "output_tokens": 678,
        "memory": Memory("cpu", None, 1_358_400_000 if name == "stock" else 819_500_000, 16384, 40, 3, buffers),
        "changes": (("output-buffer", "applied", ""), ("deferred-shared-experts", "native", "the engine has it")),
    }
    return Run(name=name, **{**values, **changes})


def compare_identical_answers(**changes) -> Comparison:
    return compare(run("stock", **changes), run("patched", **changes), require_identical=True)


def compare_one_difference(text: str = HOSTILE, question: str = "q3", tokens: tuple[int, ...] = (3, 99)) -> Comparison:
    stock, patched = (
        dataclasses.replace(one, answers=tuple(dataclasses.replace(a, question=question) for a in one.answers))
        for one in (run("stock"), run("patched"))
    )
    changed = list(patched.answers)
    changed[3] = dataclasses.replace(changed[3], text=text, tokens=tokens, predicted=None)
    return compare(stock, dataclasses.replace(patched, answers=tuple(changed)), require_identical=True)


class Page(HTMLParser):
    """HTML parser that checks that tags nest, and collects all tags and the text."""

    def __init__(self, html: str) -> None:
        super().__init__(convert_charrefs=True)
        self.tags: list[tuple[str, dict]] = []
        self.open: list[str] = []
        self.text = ""
        self.feed(html)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.text += data


def render_table(comparison: Comparison) -> str:
    text = io.StringIO()
    report.print_table(comparison, Console(file=text, width=120))
    return text.getvalue()


def find_line(table: str, label: str) -> str:
    return next(text for text in table.splitlines() if label in text)


GPU_MEMORY = Memory("cuda", 3_027_700_000, None, 16384, 40, reserved_bytes=5_000_000_000, slack_bytes=2_000_000_000)
"""Memory figures of a server on a GPU with the Triton runner. The number of output buffers is missing, because the
observer does not observe this runner's kernels."""


def test_the_table_has_every_figure():
    table = render_table(compare_identical_answers())
    for label, stock, patched in (
        ("Accuracy", "90.0 % (18 of 20)", "90.0 % (18 of 20)"),
        ("Input throughput", "1,234.5 token/s", "1,234.5 token/s"),
        ("Output throughput", "67.8 token/s", "67.8 token/s"),
        ("Activations alive when the MoE kernel starts", "1,358.4 MB", "819.5 MB"),
        ("MoE output buffers per forward pass", " 3 ", " 1 "),
        ("MoE layers", " 3 ", " 3 "),
        ("McNemar", "p = 1 (0 lost, 0 gained)", ""),
        ("Upper bound of the drop in accuracy", "13.9 points (one-sided 95 % interval)", ""),
        ("Answers with a different text", "0 of 20", ""),
        ("Token for token identical", "yes", ""),
    ):
        text = find_line(table, label)
        assert stock in text
        assert patched in text.replace(stock, "", 1)


def test_verdict_and_reasons_stand_below_the_table():
    table = render_table(compare_identical_answers())
    assert "All 20 answers are identical, 40 % less activation memory." in table
    assert "Every answer of the patched server equals the stock server's answer, token for token." in table
    assert "deferred-shared-experts: native (the engine has it)" in table
    table = render_table(compare_one_difference())
    assert "Patched is WORSE than stock." in table
    assert "1 of 20 answers differs although identical answers were required." in table
    assert "no, 1 of 20 differ" in find_line(table, "Token for token identical")


def compare_too_few_right(**changes) -> Comparison:
    """Return a comparison of two servers with 4 right answers each, too few to show a significant drop. The comparison
    does not require identical answers."""
    stock = run("stock", **{"right": 4, **changes})
    return compare(stock, dataclasses.replace(stock, name="patched"), require_identical=False)


def test_a_run_that_cannot_show_a_drop_says_so_and_what_to_change():
    table = render_table(compare_too_few_right())
    assert "INCONCLUSIVE: this run could not have detected a drop." in table
    assert "no worse" not in table
    assert "not known (stock is right on only 4 of 20)" in find_line(table, "Upper bound of the drop")
    assert report.explain_inconclusive(compare_too_few_right()) == (
        "the stock server answers only 4 of 20 questions correctly, too few to show a drop of more than 3 points at "
        "--alpha 0.05; ask more questions (--num-questions), or use a model that can answer them, or require identical "
        "answers (--require-identical --parallel 1)"
    )
    assert "ask at least 99 (--num-questions)" in report.explain_inconclusive(compare_too_few_right(count=90, right=90))
    assert '<header class="open">' in report.render_html(compare_too_few_right())


def compare_with_losses(losses: int, gains: int, count: int = 200, **settings) -> Comparison:
    """Return a comparison of two servers that answered ``count`` questions. Only the stock server answered ``losses``
    of them correctly, and only the patched server answered ``gains`` correctly. All other answers are right."""
    right = answers(count, count)

    def run_with_wrong_answers(name, first, number):
        wrong = [dataclasses.replace(answer, text="no", predicted=None) for answer in right[first : first + number]]
        return run(name, answers=(*right[:first], *wrong, *right[first + number :]))

    runs = run_with_wrong_answers("stock", 0, gains), run_with_wrong_answers("patched", gains, losses)
    return compare(*runs, require_identical=False, **settings)


def test_an_inconclusive_run_says_how_many_questions_are_needed():
    comparison = compare_with_losses(5, 4)
    assert report.make_headline(comparison) == "INCONCLUSIVE: patched may be worse than stock by more than 3 points"
    reason = report.explain_inconclusive(comparison)
    assert reason.startswith("5 lost and 4 gained of 200 questions do not rule out a drop of 3.")
    questions = comparison.questions_needed
    advice = f"more than --max-drop 3; ask about {questions} questions (--num-questions): with such results 80"
    assert advice in reason
    assert "more than the 1,319 of GSM8K" in report.explain_inconclusive(compare_with_losses(4, 4, 400, max_drop=1.0))
    assert "with such results will not help" in report.explain_inconclusive(compare_with_losses(4, 0, 120))
    assert f"{comparison.largest_drop:.1f} points" in find_line(render_table(comparison), "Upper bound of the drop")
    assert (
        report.make_headline(compare_with_losses(1, 1, 600, max_drop=2.0))
        == "Patched is no worse than stock by more than 2 points"
    )


def compare_memory(**changes) -> Comparison:
    """Return a comparison of two servers with identical answers.

    :param changes: attributes of ``Memory``. Each value is a pair: the stock server's figure and the patched server's
        figure.
    """
    runs = [
        run(name, memory=Memory("cuda", **{field: values[side] for field, values in changes.items()}))
        for side, name in enumerate(("stock", "patched"))
    ]
    return compare(*runs, require_identical=True)


NO_SAVING = "not measured, or no saving"


@pytest.mark.parametrize(
    ("comparison", "less", "memory"),
    [
        pytest.param(
            compare_identical_answers(right=0),
            ", 40 % less activation memory",
            "1,358.4 MB stock, 819.5 MB patched, live when the MoE kernel starts",
            id="live",
        ),
        pytest.param(
            compare_memory(peak_forward_bytes=(10**9, 4 * 10**8)),
            ", 60 % less activation memory",
            "1,000.0 MB stock, 400.0 MB patched, at the peak of one forward pass",
            id="peak",
        ),
        pytest.param(compare_identical_answers(memory=None), "", NO_SAVING, id="not measured"),
        pytest.param(
            compare_memory(peak_forward_bytes=(1000, 996)), "", NO_SAVING, id="saves less than half a per cent"
        ),
        pytest.param(compare_memory(peak_forward_bytes=(1000, 2000)), "", NO_SAVING, id="needs more"),
        pytest.param(
            compare_memory(peak_forward_bytes=(1000, 500), tokens=(9, 8)),
            "",
            NO_SAVING,
            id="different numbers of tokens",
        ),
    ],
)
def test_headline_and_overview_state_what_was_compared_and_the_result(comparison, less, memory):
    headline = f"All 20 answers are identical{less}"
    assert report.make_headline(comparison) == headline
    overview = dict(report.list_overview(comparison))
    assert list(overview) == ["Model", "Machine", "Memory", "Answers"]
    assert (overview["Model"], overview["Memory"]) == ("a b", memory)
    assert "SGLang 0.5.12.post1" in overview["Machine"]
    assert overview["Answers"].startswith("20 questions, all answers identical; right: ")
    page = Page(report.render_html(comparison))
    assert page.text.index(headline) < page.text.index(overview["Answers"]) < page.text.index("At a glance")


def test_figures_that_were_not_measured_are_left_out_or_marked():
    assert "MoE output buffers" not in render_table(compare_identical_answers(memory=None))
    assert "Peak memory" not in render_table(compare_identical_answers())
    without_patched_memory = compare(run("stock"), run("patched", memory=None), require_identical=True)
    assert "not measured" in find_line(render_table(without_patched_memory), "MoE output buffers")
    assert "Activation memory" not in report.render_html(without_patched_memory)


def test_a_gpu_run_without_observed_kernels_shows_only_allocator_figures():
    table, page = (
        render_table(compare_identical_answers(memory=GPU_MEMORY)),
        report.render_html(compare_identical_answers(memory=GPU_MEMORY)),
    )
    for label, figure in (
        ("Peak memory of one forward pass", "3,027.7 MB"),
        ("Tokens in the largest forward pass", "16,384"),
        ("Reserved by PyTorch's allocator", "5,000.0 MB"),
        ("Allocator slack", "2,000.0 MB"),
    ):
        assert find_line(table, label).count(figure) == 2
    for label in ("MoE output buffers", "Activations alive when", "MoE layers", "Workspaces of"):
        assert label not in table
    assert "No MoE kernel was observed" in page
    assert [title for title, _ in report._bars(compare_identical_answers(memory=GPU_MEMORY))] == [
        "Accuracy",
        "Activation memory",
    ]


def test_bars_are_proportional_to_their_figures():
    bars = dict(report._bars(compare_memory(peak_forward_bytes=(10**9, 4 * 10**8), output_buffers=(3, 1))))
    assert list(bars) == ["Accuracy", "Activation memory", "MoE output buffers per forward pass"]
    assert bars["Activation memory"] == [("peak of one forward pass", [(70.0, "1,000.0 MB"), (28.0, "400.0 MB")])]
    assert bars["MoE output buffers per forward pass"] == [("", [(70.0, "3"), (pytest.approx(70 / 3), "1")])]
    assert bars["Accuracy"][0][1][0].text == "90.0 % (95 % interval 69.9 to 97.2)"
    page = report.render_html(compare_memory(peak_forward_bytes=(10**9, 4 * 10**8)))
    assert '<span style="width: 28.0%; background: var(--patched)"></span>400.0 MB' in page


def test_saved_memory_is_shown_in_tokens_of_kv_cache():
    def memory(peak, tokens=16384, cache=1152.0 * 61):
        return Memory("cuda", peak, None, tokens, 40, None, None, None, cache)

    def compare_memories(stock, patched):
        return compare(run("stock", memory=stock), run("patched", memory=patched), require_identical=False)

    comparison = compare_memories(memory(3_028_000_000), memory(1_168_000_000))
    # The saved 1.86 GB, at 70,272 bytes for each KV token.
    assert "26,468" in find_line(render_table(comparison), "KV tokens that fit into the saved memory")
    assert "SGLANG_MOE_PATCHES_KV_SIZING=auto" in "".join(report.list_notes(comparison))
    for stock, patched in (
        (memory(1_168_000_000), memory(3_028_000_000)),  # nothing saved
        (
            memory(3_028_000_000),
            memory(1_168_000_000, tokens=8192),
        ),  # the patched server's largest forward pass has fewer tokens
        (memory(3_028_000_000), memory(1_168_000_000, cache=None)),
        (memory(None), memory(None)),
        (memory(3_028_000_000), None),
    ):
        assert "KV tokens" not in render_table(compare_memories(stock, patched))
        assert "mem-fraction-static" not in "".join(report.list_notes(compare_memories(stock, patched)))


def test_a_failed_observer_is_reported():
    comparison = compare_identical_answers(not_observed="observing the server failed: KeyError: 'output'")
    sentence = "The stock server's figures are incomplete: observing the server failed: KeyError: 'output'."
    assert sentence in " ".join(render_table(comparison).split())
    assert sentence in report.list_notes(comparison)


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (9_999, "9,999 B"),
        (10_000, "10.0 kB"),
        (9_999_940, "9,999.9 kB"),
        (9_999_960, "10.0 MB"),
        (20_000_000_000_000_000, "20,000.0 TB"),
    ],
)
def test_bytes_are_formatted_in_decimal_units(value, text):
    assert report._format_bytes(value) == text


@pytest.mark.parametrize(
    "comparison",
    [
        compare_identical_answers(),
        compare_one_difference(),
        compare_identical_answers(memory=None),
        compare_identical_answers(count=1, right=0),
        compare_too_few_right(),
    ],
)
def test_the_page_is_complete_and_loads_nothing(comparison):
    html = report.render_html(comparison)
    page = Page(html)
    assert not {tag for tag, _ in page.tags} & {"script", "link", "img", "iframe", "object", "embed", "base"}
    names = {name for _, attributes in page.tags for name in attributes}
    assert not names & {"src", "href", "xlink:href", "data", "action", "srcset"}
    assert not [name for name in names if name.startswith("on")]
    assert not re.search(r"@import|url\(", html)


def test_sections_can_be_inserted_into_a_written_report(tmp_path):
    path = report.write(compare_identical_answers(), tmp_path)
    insert(
        path, {"overview": "<tr><th>KV cache</th></tr>", "sections": "<h2>Second start</h2>", "bars": "<b>KV bar</b>"}
    )
    text = Page(path.read_text()).text
    places = [
        text.index(heading)
        for heading in ("Answers", "KV cache", "At a glance", "KV bar", "Figures", "Second start", "Meaning and limits")
    ]
    assert places == sorted(places)
    with pytest.raises(ValueError, match="no marker 'x'"):
        insert(path, {"x": ""})


def test_hostile_text_is_shown_but_not_executed():
    html = report.render_html(compare_one_difference(text=HOSTILE, question=HOSTILE))
    assert "<script" not in html
    assert "<img" not in html
    assert HOSTILE in Page(html).text
    hostile = compare_identical_answers(changes=((HOSTILE, HOSTILE, HOSTILE),), command=(HOSTILE,), engine=HOSTILE)
    assert "<script" not in report.render_html(hostile)
    assert "[bold]reason[/oops]" in render_table(
        compare_identical_answers(changes=(("x", "unsupported", "[bold]reason[/oops]"),))
    )


def test_the_page_shows_differences_commands_and_statuses():
    text = Page(report.render_html(compare_one_difference(text="so, 43"))).text
    for part in (
        "Question 4, from token 2 on",
        "so 3",
        "so, 43",
        "token ids from there: 99",
        "token ids from there: 4",
    ):
        assert part in text
    assert text.count("--model-path 'a b'") == 2
    assert text.count("the engine has it") == 2
    assert "from token" not in Page(report.render_html(compare_identical_answers())).text


def test_different_tokens_with_the_same_text_are_marked():
    text = Page(report.render_html(compare_one_difference(text="so 3", tokens=(3,)))).text
    assert "same text, other tokens" in text
    assert "end of the answer" in text


def test_the_page_lists_all_differences_and_unfolds_the_first_three():
    stock = run("stock")
    patched = run("patched", answers=tuple(dataclasses.replace(a, tokens=(5,)) for a in stock.answers))
    page = Page(report.render_html(compare(stock, patched, require_identical=False)))
    folds = [attributes for tag, attributes in page.tags if tag == "details"]
    assert len(folds) == 20
    assert sum("open" in attributes for attributes in folds) == 3


CUDA = Memory("cuda", 3_000_000_000, 1_000_000, 10, 1, 3, 1)


@pytest.mark.parametrize(
    ("comparison", "present", "absent"),
    [
        (
            compare_identical_answers(),
            "5 questions lost and none gained: 25.0 percentage points",
            "accuracy says nothing",
        ),
        (compare_identical_answers(), "interval of the drop in accuracy ends below", "Memory was not measured"),
        (compare_identical_answers(right=2), "accuracy says nothing", "percentage points"),
        (compare_identical_answers(), "no GPU was used", "Neither"),
        (compare_identical_answers(memory=CUDA), "Peak memory of one forward pass: memory that", "no GPU was used"),
        (compare_identical_answers(memory=None), "Memory was not measured", "Neither"),
    ],
)
def test_notes_state_the_limits_of_the_run(comparison, present, absent):
    notes = " ".join(report.list_notes(comparison))
    assert present in notes
    assert absent not in notes


def test_the_written_report_has_the_comparison(tmp_path):
    comparison = compare_one_difference(text="a lone \ud800 surrogate")
    path = report.write(comparison, tmp_path / "deep" / "report")
    assert path == tmp_path / "deep" / "report" / "report.html"
    assert "WORSE" in path.read_text(encoding="utf-8")
    data = json.loads((path.parent / "report.json").read_text())
    assert data == json.loads(json.dumps(comparison.to_dict()))
    assert data["runs"]["stock"]["answers"][3]["tokens"] == [3, 4]
    assert sorted(p.name for p in path.parent.iterdir()) == ["report.html", "report.json"]
    report.write(compare_identical_answers(), path.parent)
    assert "All 20 answers are identical" in path.read_text(encoding="utf-8")


@pytest.mark.parametrize("at", ["render_html", "write_bytes"])
def test_an_interrupted_write_leaves_the_earlier_report(tmp_path, monkeypatch, at):
    report.write(compare_identical_answers(), tmp_path)
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    write_bytes = Path.write_bytes

    def interrupted(*args):
        raise KeyboardInterrupt

    def half(self, data):
        write_bytes(self, data[: len(data) // 2])
        if "html" in self.name:
            raise KeyboardInterrupt

    if at == "render_html":
        monkeypatch.setattr(report, "render_html", interrupted)
    else:
        monkeypatch.setattr(Path, "write_bytes", half)
    with pytest.raises(KeyboardInterrupt):
        report.write(compare_one_difference(), tmp_path)
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before
