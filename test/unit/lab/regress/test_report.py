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


def same(**changes) -> Comparison:
    return compare(run("stock", **changes), run("patched", **changes), require_identical=True)


def different(text: str = HOSTILE, question: str = "q3", tokens: tuple[int, ...] = (3, 99)) -> Comparison:
    stock, patched = (
        dataclasses.replace(one, answers=tuple(dataclasses.replace(a, question=question) for a in one.answers))
        for one in (run("stock"), run("patched"))
    )
    changed = list(patched.answers)
    changed[3] = dataclasses.replace(changed[3], text=text, tokens=tokens, predicted=None)
    return compare(stock, dataclasses.replace(patched, answers=tuple(changed)), require_identical=True)


class Page(HTMLParser):
    """Checks that tags nest, and collects them and the text."""

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


def terminal(comparison: Comparison) -> str:
    text = io.StringIO()
    report.print_table(comparison, Console(file=text, width=120))
    return text.getvalue()


def line(table: str, label: str) -> str:
    return next(text for text in table.splitlines() if label in text)


GPU = Memory("cuda", 3_027_700_000, None, 16384, 40, reserved_bytes=5_000_000_000, slack_bytes=2_000_000_000)
"""The Triton runner: nobody saw a kernel start, or an output buffer."""


def test_the_table_has_every_figure():
    table = terminal(same())
    for label, stock, patched in (
        ("Accuracy", "90.0 % (18 of 20)", "90.0 % (18 of 20)"),
        ("Input throughput", "1,234.5 token/s", "1,234.5 token/s"),
        ("Output throughput", "67.8 token/s", "67.8 token/s"),
        ("Live when the MoE kernel starts", "1,358.4 MB", "819.5 MB"),
        ("MoE output buffers per forward", " 3 ", " 1 "),
        ("MoE layers", " 3 ", " 3 "),
        ("McNemar", "p = 1 (0 lost, 0 gained)", ""),
        ("Largest drop that it may be", "13.9 points (one-sided 95 % interval)", ""),
        ("Answers with a different text", "0 of 20", ""),
        ("Token for token identical", "yes", ""),
    ):
        text = line(table, label)
        assert stock in text
        assert patched in text.replace(stock, "", 1)


def test_below_the_table_it_says_what_came_out():
    table = terminal(same())
    assert "All 20 answers are identical, 40 % less activation memory." in table
    assert "Every answer of the patched server is that of the stock one, token for token." in table
    assert "deferred-shared-experts: native (the engine has it)" in table
    table = terminal(different())
    assert "Patched is WORSE than stock." in table
    assert "1 of 20 answers differs although identical answers were required." in table
    assert "no, 1 of 20 differ" in line(table, "Token for token identical")


def unable(**changes) -> Comparison:
    """Identical answers were not required, and too few are right for a drop to show."""
    stock = run("stock", **{"right": 4, **changes})
    return compare(stock, dataclasses.replace(stock, name="patched"), require_identical=False)


def test_a_run_that_could_show_nothing_says_so_and_what_to_change():
    table = terminal(unable())
    assert "INCONCLUSIVE: no drop could have been detected." in table
    assert "no worse" not in table
    assert "not known (4 of 20 right)" in line(table, "Largest drop")
    assert report.inconclusive(unable()) == (
        "stock answers 4 of 20 questions correctly, too few for a drop of more than 3 points to be seen at "
        "--alpha 0.05; ask more questions (--num-questions), or use a model that can answer them, or make identical "
        "answers the test (--require-identical --parallel 1)"
    )
    assert "ask at least 99 (--num-questions)" in report.inconclusive(unable(count=90, right=90))
    assert '<header class="open">' in report.render_html(unable())


def lost(losses: int, gains: int, count: int = 200, **settings) -> Comparison:
    """Of questions that are right but for those."""
    whole = answers(count, count)

    def wrong(name, first, number):
        spoiled = [dataclasses.replace(answer, text="no", predicted=None) for answer in whole[first : first + number]]
        return run(name, answers=(*whole[:first], *spoiled, *whole[first + number :]))

    runs = wrong("stock", 0, gains), wrong("patched", gains, losses)
    return compare(*runs, require_identical=False, **settings)


def test_an_inconclusive_run_says_how_many_questions_it_takes():
    found = lost(5, 4)
    assert report.verdict(found) == "INCONCLUSIVE: patched may be worse than stock by more than 3 points"
    said = report.inconclusive(found)
    assert said.startswith("5 lost and 4 gained of 200 questions may be a drop of up to 3.")
    needed = f"more than --max-drop 3; ask some {found.questions_needed} (--num-questions), which show it in 80 of"
    assert needed in said
    assert "more than the 1,319 of GSM8K" in report.inconclusive(lost(4, 4, 400, max_drop=1.0))
    assert "will show no less if they go like these" in report.inconclusive(lost(4, 0, 120))
    assert f"{found.largest_drop:.1f} points" in line(terminal(found), "Largest drop")
    assert report.verdict(lost(1, 1, 600, max_drop=2.0)) == "Patched is no worse than stock by more than 2 points"


def memories(**changes) -> Comparison:
    """Stock's and patched's figures, where they differ: (stock's, patched's)."""
    runs = [
        run(name, memory=Memory("cuda", **{field: values[side] for field, values in changes.items()}))
        for side, name in enumerate(("stock", "patched"))
    ]
    return compare(*runs, require_identical=True)


NO_LESS = "not measured, or no less"


@pytest.mark.parametrize(
    ("found", "less", "memory"),
    [
        pytest.param(
            same(right=0),
            ", 40 % less activation memory",
            "1,358.4 MB stock, 819.5 MB patched, live when the MoE kernel starts",
            id="live",
        ),
        pytest.param(
            memories(peak_forward_bytes=(10**9, 4 * 10**8)),
            ", 60 % less activation memory",
            "1,000.0 MB stock, 400.0 MB patched, at the peak of one forward",
            id="peak",
        ),
        pytest.param(same(memory=None), "", NO_LESS, id="not measured"),
        pytest.param(memories(peak_forward_bytes=(1000, 996)), "", NO_LESS, id="less than half a per cent"),
        pytest.param(memories(peak_forward_bytes=(1000, 2000)), "", NO_LESS, id="more"),
        pytest.param(memories(peak_forward_bytes=(1000, 500), tokens=(9, 8)), "", NO_LESS, id="of other tokens"),
    ],
)
def test_the_first_screen_says_what_was_compared_and_the_most_that_is_true(found, less, memory):
    headline = f"All 20 answers are identical{less}"
    assert report.verdict(found) == headline
    told = dict(report.overview(found))
    assert list(told) == ["Model", "Machine", "Memory", "Answers"]
    assert (told["Model"], told["Memory"]) == ("a b", memory)
    assert "SGLang 0.5.12.post1" in told["Machine"]
    assert told["Answers"].startswith("20 questions, all identical; right: ")
    page = Page(report.render_html(found))
    assert page.text.index(headline) < page.text.index(told["Answers"]) < page.text.index("At a glance")


def test_what_was_not_measured_is_left_out_or_said():
    assert "MoE output buffers" not in terminal(same(memory=None))
    assert "Peak memory" not in terminal(same())
    one_sided = compare(run("stock"), run("patched", memory=None), require_identical=True)
    assert "not measured" in line(terminal(one_sided), "MoE output buffers")
    assert "Activation memory" not in report.render_html(one_sided)


def test_a_gpu_without_the_observed_kernels_shows_what_its_allocator_says_alone():
    table, page = terminal(same(memory=GPU)), report.render_html(same(memory=GPU))
    for label, figure in (
        ("Peak memory of one forward", "3,027.7 MB"),
        ("Tokens in the largest forward", "16,384"),
        ("Taken by PyTorch's allocator", "5,000.0 MB"),
        ("Of that, never a tensor (slack)", "2,000.0 MB"),
    ):
        assert line(table, label).count(figure) == 2
    for label in ("MoE output buffers", "Live when", "MoE layers", "Held by"):
        assert label not in table
    assert "Neither a TRT-LLM FP4 nor a CuteDSL kernel ran" in page
    assert [title for title, _ in report._bars(same(memory=GPU))] == ["Accuracy", "Activation memory"]


def test_bars_are_as_long_as_their_figures():
    bars = dict(report._bars(memories(peak_forward_bytes=(10**9, 4 * 10**8), output_buffers=(3, 1))))
    assert list(bars) == ["Accuracy", "Activation memory", "MoE output buffers per forward"]
    assert bars["Activation memory"] == [("peak of one forward", [(70.0, "1,000.0 MB"), (28.0, "400.0 MB")])]
    assert bars["MoE output buffers per forward"] == [("", [(70.0, "3"), (pytest.approx(70 / 3), "1")])]
    assert bars["Accuracy"][0][1][0].text == "90.0 % (95 % interval 69.9 to 97.2)"
    page = report.render_html(memories(peak_forward_bytes=(10**9, 4 * 10**8)))
    assert '<span style="width: 28.0%; background: var(--patched)"></span>400.0 MB' in page


def test_what_is_saved_is_said_in_tokens_of_kv_cache():
    def memory(peak, tokens=16384, cache=1152.0 * 61):
        return Memory("cuda", peak, None, tokens, 40, None, None, None, cache)

    def compared(stock, patched):
        return compare(run("stock", memory=stock), run("patched", memory=patched), require_identical=False)

    comparison = compared(memory(3_028_000_000), memory(1_168_000_000))
    # 1.86 GB at 70,272 bytes a token.
    assert "26,468" in line(terminal(comparison), "KV tokens that the difference could hold")
    assert "SGLANG_MOE_PATCHES_KV_SIZING=auto" in "".join(report.notes(comparison))
    for stock, patched in (
        (memory(1_168_000_000), memory(3_028_000_000)),  # nothing saved
        (memory(3_028_000_000), memory(1_168_000_000, tokens=8192)),  # of another forward
        (memory(3_028_000_000), memory(1_168_000_000, cache=None)),
        (memory(None), memory(None)),
        (memory(3_028_000_000), None),
    ):
        assert "KV tokens" not in terminal(compared(stock, patched))
        assert "mem-fraction-static" not in "".join(report.notes(compared(stock, patched)))


def test_an_observer_that_failed_is_reported():
    comparison = same(not_observed="observing failed: KeyError: 'output'")
    sentence = "The stock server's figures are incomplete: observing failed: KeyError: 'output'."
    assert sentence in " ".join(terminal(comparison).split())
    assert sentence in report.notes(comparison)


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
def test_human_units(value, text):
    assert report._bytes(value) == text


@pytest.mark.parametrize("comparison", [same(), different(), same(memory=None), same(count=1, right=0), unable()])
def test_the_page_is_whole_and_loads_nothing(comparison):
    html = report.render_html(comparison)
    page = Page(html)
    assert not {tag for tag, _ in page.tags} & {"script", "link", "img", "iframe", "object", "embed", "base"}
    names = {name for _, attributes in page.tags for name in attributes}
    assert not names & {"src", "href", "xlink:href", "data", "action", "srcset"}
    assert not [name for name in names if name.startswith("on")]
    assert not re.search(r"@import|url\(", html)


def test_a_written_report_can_be_added_to(tmp_path):
    path = report.write(same(), tmp_path)
    insert(path, {"overview": "<tr><th>KV cache</th></tr>", "sections": "<h2>Second start</h2>"})
    text = Page(path.read_text()).text
    places = [text.index(each) for each in ("Answers", "KV cache", "At a glance", "Second start", "What the figures")]
    assert places == sorted(places)
    with pytest.raises(ValueError, match="no marker 'x'"):
        insert(path, {"x": ""})


def test_hostile_text_is_shown_and_not_run():
    html = report.render_html(different(text=HOSTILE, question=HOSTILE))
    assert "<script" not in html
    assert "<img" not in html
    assert HOSTILE in Page(html).text
    hostile = same(changes=((HOSTILE, HOSTILE, HOSTILE),), command=(HOSTILE,), engine=HOSTILE)
    assert "<script" not in report.render_html(hostile)
    assert "[bold]reason[/oops]" in terminal(same(changes=(("x", "unsupported", "[bold]reason[/oops]"),)))


def test_the_page_shows_differences_commands_and_statuses():
    text = Page(report.render_html(different(text="so, 43"))).text
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
    assert "from token" not in Page(report.render_html(same())).text


def test_tokens_that_differ_below_the_same_text_are_explained():
    text = Page(report.render_html(different(text="so 3", tokens=(3,)))).text
    assert "same text, other tokens" in text
    assert "end of the answer" in text


def test_every_difference_is_there_and_only_the_first_are_unfolded():
    stock = run("stock")
    patched = run("patched", answers=tuple(dataclasses.replace(a, tokens=(5,)) for a in stock.answers))
    page = Page(report.render_html(compare(stock, patched, require_identical=False)))
    folds = [attributes for tag, attributes in page.tags if tag == "details"]
    assert len(folds) == 20
    assert sum("open" in attributes for attributes in folds) == 3


CUDA = Memory("cuda", 3_000_000_000, 1_000_000, 10, 1, 3, 1)


@pytest.mark.parametrize(
    ("comparison", "said", "not_said"),
    [
        (same(), "5 questions lost and none gained: 25.0 percentage points", "says nothing"),
        (same(), "interval of the drop in accuracy ends below", "Memory was not measured"),
        (same(right=2), "accuracy says nothing", "percentage points"),
        (same(), "no GPU was used", "Neither"),
        (same(memory=CUDA), "Peak memory of one forward: the largest", "no GPU was used"),
        (same(memory=None), "Memory was not measured", "Neither"),
    ],
)
def test_notes_say_what_the_run_cannot_show(comparison, said, not_said):
    notes = " ".join(report.notes(comparison))
    assert said in notes
    assert not_said not in notes


def test_what_is_written_is_the_comparison(tmp_path):
    comparison = different(text="a lone \ud800 surrogate")
    path = report.write(comparison, tmp_path / "deep" / "report")
    assert path == tmp_path / "deep" / "report" / "report.html"
    assert "WORSE" in path.read_text(encoding="utf-8")
    data = json.loads((path.parent / "report.json").read_text())
    assert data == json.loads(json.dumps(comparison.to_dict()))
    assert data["runs"]["stock"]["answers"][3]["tokens"] == [3, 4]
    assert sorted(p.name for p in path.parent.iterdir()) == ["report.html", "report.json"]
    report.write(same(), path.parent)
    assert "All 20 answers are identical" in path.read_text(encoding="utf-8")


@pytest.mark.parametrize("at", ["render_html", "write_bytes"])
def test_an_interrupted_write_leaves_the_earlier_report(tmp_path, monkeypatch, at):
    report.write(same(), tmp_path)
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
        report.write(different(), tmp_path)
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before
