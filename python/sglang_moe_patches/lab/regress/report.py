"""Present a comparison: a table on the terminal, report.html for people, and report.json for scripts."""

from __future__ import annotations

import json
import shlex
from collections.abc import Callable, Sequence
from itertools import takewhile
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from sglang_moe_patches.lab.observers import counting
from sglang_moe_patches.lab.regress import bound, pages
from sglang_moe_patches.lab.regress.compare import INCONCLUSIVE, NO_WORSE, WORSE, Answer, Comparison, Run
from sglang_moe_patches.lab.regress.gsm8k import GSM8K

if TYPE_CHECKING:
    from rich.console import Console

NOT_MEASURED = "not measured"
STYLES = {NO_WORSE: ("bold green", "fine"), WORSE: ("bold red", "worse"), INCONCLUSIVE: ("bold yellow", "open")}
"""Style of the verdict on the terminal, and its CSS class in report.html. The key is the exit code of ``regress``."""


class Row(NamedTuple):
    """Row of the table of figures. If ``patched`` is empty, ``stock`` is a figure about both servers together.

    :param label: first cell of the row, which names the figure.
    :param stock: figure of the stock server, with its unit.
    :param patched: figure of the patched server, with its unit.
    """

    label: str
    stock: str
    patched: str = ""


# --- Texts ------------------------------------------------------------------------------------------------------------


def _format_count(number: int, noun: str) -> str:
    return f"{number:,} {noun}" if number == 1 else f"{number:,} {noun}s"


def format_points(number: float) -> str:
    """Format a number of percentage points of accuracy."""
    return "1 point" if number == 1 else f"{number:g} points"


def _format_bytes(value: int) -> str:
    """Format bytes in decimal units, as GPU vendors and this project's pages do."""
    if value < 10_000:
        return f"{value:,} B"
    # The next unit begins at 10,000, so that two compared figures mostly have the same unit.
    units = ["TB", "GB", "MB", "kB"]
    scaled, unit = value / 1000, units.pop()
    while units and scaled >= 9_999.95:
        scaled, unit = scaled / 1000, units.pop()
    return f"{scaled:,.1f} {unit}"


def _format_accuracy(run: Run) -> str:
    return f"{100 * run.accuracy:.1f} % ({run.correct} of {len(run.answers)})"


def _accuracy_interval(run: Run) -> tuple[float, float]:
    """Return the ends of Wilson's 95 % confidence interval of the accuracy, 0 to 1."""
    from scipy.stats import binomtest

    interval = binomtest(run.correct, len(run.answers)).proportion_ci(0.95, method="wilson")
    return float(interval.low), float(interval.high)


def _format_largest_drop(comparison: Comparison) -> str:
    if not comparison.accuracy_can_tell:
        return f"not known (stock is right on only {comparison.stock.correct} of {comparison.questions})"
    return f"{comparison.largest_drop:.1f} points (one-sided {100 * (1 - comparison.alpha):g} % interval)"


def make_headline(comparison: Comparison) -> str:
    """Return the headline of the report: the strongest statement that the comparison supports."""
    if comparison.worse:
        return "Patched is WORSE than stock"
    if comparison.conclusive and not comparison.differing:
        less = ""
        if saved := _find_saving(comparison):
            less = f", {100 * (1 - saved.patched / saved.stock):.0f} % less activation memory"
        return f"All {_format_count(comparison.questions, 'answer')} are identical{less}"
    if comparison.is_within_max_drop:
        return f"Patched is no worse than stock by more than {format_points(comparison.max_drop)}"
    if not comparison.accuracy_can_tell:
        return "INCONCLUSIVE: this run could not have detected a drop"
    return f"INCONCLUSIVE: patched may be worse than stock by more than {format_points(comparison.max_drop)}"


def explain_inconclusive(comparison: Comparison) -> str:
    """Return a line that says why the run has no verdict, and what to change."""
    count, most = comparison.questions, comparison.max_drop
    fewest = bound.min_questions(most / 100, comparison.alpha)
    if not comparison.accuracy_can_tell:
        why = (
            f"the stock server answers only {comparison.stock.correct} of {_format_count(count, 'question')} "
            f"correctly, too few to show a drop of more than {format_points(most)} at --alpha {comparison.alpha:g}"
        )
        change = "ask more questions (--num-questions), or use a model that can answer them"
    elif count < fewest:
        drop = format_points(most)
        why = (
            f"{_format_count(count, 'question')} cannot show that accuracy drops by less than {drop} at --alpha "
            f"{comparison.alpha:g}"
        )
        change = f"ask at least {fewest} (--num-questions)"
    else:
        why = (
            f"{comparison.losses} lost and {comparison.gains} gained of {_format_count(count, 'question')} do not "
            f"rule out a drop of {comparison.largest_drop:.1f} points, more than --max-drop {most:g}"
        )
        needed = comparison.questions_needed
        if needed is None:
            change = "more questions (--num-questions) with such results will not help; allow a larger --max-drop"
        else:
            beyond = f", more than the {GSM8K:,} of GSM8K" if needed > GSM8K else ""
            change = (
                f"ask about {needed:,} questions{beyond} (--num-questions): with such results "
                f"{100 * bound.POWER:.0f} of 100 runs have a verdict; or allow a larger --max-drop"
            )
    return f"{why}; {change}, or require identical answers (--require-identical --parallel 1)"


def make_summary(comparison: Comparison) -> tuple[str, ...]:
    """Return the sentences below the report's headline."""
    if comparison.worse:
        return comparison.reasons
    if not comparison.conclusive:
        why = explain_inconclusive(comparison)
        return (f"{why[0].upper()}{why[1:]}.",)
    if not comparison.differing:
        within = (
            f"; accuracy is no worse by more than {format_points(comparison.max_drop)}"
            if comparison.is_within_max_drop
            else ""
        )
        return (f"Every answer of the patched server equals the stock server's answer, token for token{within}.",)
    return (
        f"{len(comparison.differing)} of {_format_count(comparison.questions, 'answer')} differ; accuracy is "
        f"{100 * comparison.stock.accuracy:.1f} % stock and {100 * comparison.patched.accuracy:.1f} % patched.",
    )


def _memory_pair(comparison: Comparison, name: str) -> tuple[int, int] | None:
    """Return a memory figure of the stock server, and the same figure of the patched server.

    :param name: attribute of :class:`~sglang_moe_patches.lab.observers.events.Memory`.
    :returns: ``None`` if the figure was not measured, or if the largest forward passes had different numbers of tokens.
    """
    stock, patched = comparison.stock.memory, comparison.patched.memory
    if stock is None or patched is None or stock.tokens != patched.tokens:
        return None
    before, after = getattr(stock, name), getattr(patched, name)
    return None if before is None or after is None else (before, after)


class Saving(NamedTuple):
    """Activation memory of the largest forward pass in both servers, in bytes.

    :param moment: phrase that says when in the forward pass the memory was measured, such as "at the peak".
    """

    moment: str
    stock: int
    patched: int


def _find_saving(comparison: Comparison) -> Saving | None:
    """Return the activation memory of both servers at the first of two moments at which the patched server saves at
    least 0.5 %. The moments are the peak of a forward pass, and then the start of a MoE kernel. A moment at which the
    memory was not measured is skipped.

    :returns: ``None`` if there is no such moment.
    """
    for moment, name in (
        ("at the peak of one forward pass", "peak_forward_bytes"),
        ("live when the MoE kernel starts", "live_at_kernel_bytes"),
    ):
        before, after = _memory_pair(comparison, name) or (0, 0)
        if before and 200 * (before - after) >= before:
            return Saving(moment, before, after)
    return None


def list_overview(comparison: Comparison) -> list[tuple[str, str]]:
    """Return the rows (name, value) of the first table: the compared servers, and a summary of the result."""
    stock, patched = comparison.stock, comparison.patched
    command = patched.command
    model = command[command.index("--model-path") + 1] if "--model-path" in command else ""
    memory = next((run.memory for run in (patched, stock) if run.memory is not None and run.memory.device), None)
    if memory is None:
        machine = "not known"
    else:
        machine = "CPU: its speed says nothing about a GPU" if memory.device == "cpu" else memory.gpu or "GPU"
    releases = " and ".join(dict.fromkeys((stock.engine, patched.engine)))
    saved = f"{NOT_MEASURED}, or no saving"
    if found := _find_saving(comparison):
        saved = f"{_format_bytes(found.stock)} stock, {_format_bytes(found.patched)} patched, {found.moment}"
    differing = f"answers to {len(comparison.differing)} differ" if comparison.differing else "all answers identical"
    answers = f"{_format_count(comparison.questions, 'question')}, {differing}"
    return [
        ("Model", model or f"the model that {stock.command[0]} and {patched.command[0]} serve"),
        ("Machine", f"{machine}; SGLang {releases}"),
        ("Memory", saved),
        ("Answers", f"{answers}; right: {stock.correct} stock, {patched.correct} patched"),
    ]


def list_rows(comparison: Comparison) -> list[Row]:
    """Return the rows of the table of figures. A memory figure that neither server measured gets no row."""
    stock, patched = comparison.stock, comparison.patched
    count, tokens = comparison.questions, saved_kv_tokens(comparison)
    identical = "yes" if comparison.token_identical else f"no, {comparison.tokens_differ} of {count} differ"

    def both(label: str, figure: Callable[[Run], str]) -> Row:
        return Row(label, figure(stock), figure(patched))

    def memory(label: str, name: str, text: Callable[[Any], str]) -> list[Row]:
        values = [None if run.memory is None else getattr(run.memory, name) for run in (stock, patched)]
        if values == [None, None]:
            return []
        return [Row(label, *(NOT_MEASURED if value is None else text(value) for value in values))]

    return [
        both("Accuracy", _format_accuracy),
        Row(
            "McNemar's exact test",
            f"p = {comparison.p_two_sided:.3g} ({comparison.losses} lost, {comparison.gains} gained)",
        ),
        Row("Upper bound of the drop in accuracy", _format_largest_drop(comparison)),
        Row("Answers with a different text", f"{comparison.texts_differ} of {count}"),
        Row("Token for token identical", identical),
        both("Input throughput", lambda run: f"{run.input_throughput:,.1f} token/s"),
        both("Output throughput", lambda run: f"{run.output_throughput:,.1f} token/s"),
        *memory("Peak memory of one forward pass", "peak_forward_bytes", _format_bytes),
        *memory("Activations alive when the MoE kernel starts", "live_at_kernel_bytes", _format_bytes),
        *memory("Tokens in the largest forward pass", "tokens", "{:,}".format),
        *([Row("KV tokens that fit into the saved memory", f"{tokens:,}")] if tokens else []),
        *memory("MoE output buffers per forward pass", "output_buffers", str),
        *memory("Workspaces of MoE kernels between forward passes", "kernel_buffer_bytes", _format_bytes),
        *memory("Reserved by PyTorch's allocator", "reserved_bytes", _format_bytes),
        *memory("Allocator slack: reserved, never used by a tensor", "slack_bytes", _format_bytes),
        *memory("MoE layers", "moe_layers", str),
        *memory("Observed forward passes", "forwards", "{:,}".format),
    ]


def saved_kv_tokens(comparison: Comparison) -> int | None:
    """Return the number of KV cache tokens that fit into the memory that the patched server saves on one GPU. The saved
    memory is the peak memory of the stock server's largest forward pass minus that of the patched server.

    :returns: ``None`` if the patched server saves nothing, or if a figure is missing.
    """
    memory, peaks = comparison.patched.memory, _memory_pair(comparison, "peak_forward_bytes")
    if memory is None or peaks is None or not memory.cache_token_bytes:
        return None
    return max(0, int((peaks[0] - peaks[1]) / memory.cache_token_bytes)) or None


def _incomplete(comparison: Comparison) -> list[str]:
    return [
        f"The {run.name} server's figures are incomplete: {run.not_observed}."
        for run in (comparison.stock, comparison.patched)
        if run.not_observed
    ]


def list_notes(comparison: Comparison) -> list[str]:
    """Return sentences about the meaning and the limits of the figures, and about tests that were not run."""
    drop, level = comparison.detectable_drop, 100 * (1 - comparison.alpha)
    lines = [
        "Both servers answered the same questions at temperature 0. A question is lost if only the stock server "
        "answers it correctly, and gained if only the patched server does. McNemar's test uses only the lost and the "
        "gained questions. The patched server is worse if it has fewer correct answers "
        f"and the exact one-sided p-value is below {comparison.alpha:g}"
        + (", or if any answer differs." if comparison.require_identical else "."),
        f"The patched server is no worse by more than {format_points(comparison.max_drop)} if the one-sided "
        f"{level:g} % confidence interval of the drop in accuracy ends below this value. The interval inverts "
        "an exact unconditional test by the score statistic. The run does not show a smaller drop, nor a drop on other "
        "questions than these.",
    ]
    if not comparison.accuracy_can_tell:
        lines.append(
            f"The stock server answers only {comparison.stock.correct} of "
            f"{_format_count(comparison.questions, 'question')} correctly, so accuracy says nothing here (a model with "
            "random weights answers none). The comparison of the answers themselves still counts."
        )
    elif drop is not None:
        lines.append(
            f"The smallest drop that is significant in this run is {_format_count(drop, 'question')} lost and none "
            f"gained: {comparison.detectable_drop_points:.1f} percentage points."
        )
    lines.append(
        "Throughput is tokens divided by the seconds of the whole evaluation, client included, in one run of each "
        "server. The stock server runs first and compiles kernels that the patched server then finds in caches. The "
        "figures are no benchmark: they would only show that the patched server is much slower."
    )
    measured = [run.memory for run in (comparison.stock, comparison.patched) if run.memory is not None]
    devices = {memory.device for memory in measured}
    if not measured:
        lines.append("Memory was not measured: the servers were already running, or no forward pass was observed.")
    if any(memory.peak_forward_bytes is not None for memory in measured):
        lines.append(
            "Peak memory of one forward pass: memory that the forward pass with the most tokens allocates in addition "
            "to the memory that was allocated before it. The memory of CUDA graphs is not included, because it was "
            "allocated earlier."
        )
    if saved_kv_tokens(comparison):
        lines.append(
            "KV tokens: the difference between the two peaks, in tokens of one GPU's KV cache. The engine does not use "
            "this memory by itself, and forward passes larger than those of these questions may need more. With "
            "SGLANG_MOE_PATCHES_KV_SIZING=auto a server measures its largest forward passes when it starts."
        )
    if any(memory.live_at_kernel_bytes is not None for memory in measured):
        lines.append(
            "Activations alive when the MoE kernel starts: their bytes at that moment, in the forward pass with the "
            "most tokens."
        )
    elif measured:
        lines.append(
            "No MoE kernel was observed, so the activations at the start of a kernel and its output buffers are not "
            "known."
        )
    if any(memory.output_buffers is not None for memory in measured):
        lines.append(
            "MoE output buffers: the largest number of distinct allocations that the MoE layers of one forward pass "
            "write their output into. One buffer per MoE layer means that no layer reuses another layer's buffer."
        )
    if any(act.captured for act in comparison.patched.acted.acts):
        lines.append(
            "Python code counts what the changes did. This code runs when a CUDA graph is captured, but not when the "
            "graph is replayed, so replays are not counted."
        )
    lines += _incomplete(comparison)
    if "cpu" in devices:
        lines.append(
            "Not tested: CUDA graphs, GPU kernels and the GPU's peak memory, because no GPU was used. Plain PyTorch "
            "replaced FlashInfer's NVFP4 kernels, so the speed says nothing about a GPU."
        )
    lines.append(
        "Not tested: any model, flag, number of GPUs or request mix other than those of the two commands below."
    )
    return lines


# --- Terminal ---------------------------------------------------------------------------------------------------------


def print_table(comparison: Comparison, console: Console) -> None:
    """Print the figures, the status of each change, and the verdict with its reasons."""
    from rich.table import Table
    from rich.text import Text

    # Text, not str: rich would read square brackets in a str as markup.
    table = Table(title=Text(f"{_format_count(comparison.questions, 'question')}, SGLang {comparison.stock.engine}"))
    table.add_column("")
    for run in (comparison.stock, comparison.patched):
        table.add_column(Text(run.name), justify="right")
    for row in list_rows(comparison):
        # A figure about both servers is printed in the patched column, because it compares the patched server with the
        # stock server.
        cells = (row.stock, row.patched) if row.patched else ("", row.stock)
        table.add_row(Text(row.label), *map(Text, cells))
    console.print(table)
    for change, status, reason in comparison.patched.changes:
        console.print(Text(f"{change}: {status}" + (f" ({reason})" if reason else "")))
    for sentence in counting.describe_actions(comparison.patched.changes, comparison.patched.acted):
        console.print(Text(sentence))
    style, _ = STYLES[comparison.exit_code]
    console.print(Text(f"{make_headline(comparison)}.", style=style))
    for sentence in (*make_summary(comparison), *_incomplete(comparison)):
        console.print(Text(sentence))


# --- Page -------------------------------------------------------------------------------------------------------------


class Bar(NamedTuple):
    """One bar of a chart.

    :param width: length in per cent of the chart's width. The longest bar has 70 %, so that its text fits beside it.
    :param text: figure beside the bar, with its unit.
    """

    width: float
    text: str


def _bars(comparison: Comparison) -> list[tuple[str, list[tuple[str, list[Bar]]]]]:
    """Return charts of the figures that were measured for both servers.

    Throughput has no chart, because one run of each server is no benchmark.

    :returns: a list of (title, [(label, [stock bar, patched bar])]).
    """
    runs = (comparison.stock, comparison.patched)
    accuracies = []
    for run in runs:
        low, high = _accuracy_interval(run)
        text = f"{100 * run.accuracy:.1f} % (95 % interval {100 * low:.1f} to {100 * high:.1f})"
        accuracies.append(Bar(35 * run.accuracy, text))

    def pairs(text: Callable[[int], str], **labels: str) -> list[tuple[str, list[Bar]]]:
        values = {label: [getattr(run.memory, name, None) for run in runs] for name, label in labels.items()}
        complete: dict[str, list[Any]] = {label: pair for label, pair in values.items() if None not in pair}
        most = max((max(pair) for pair in complete.values()), default=0) or 1
        return [(label, [Bar(70 * value / most, text(value)) for value in pair]) for label, pair in complete.items()]

    activations = {
        "peak_forward_bytes": "peak of one forward pass",
        "live_at_kernel_bytes": "alive when the kernel starts",
    }
    charts = [
        ("Accuracy", [("", accuracies)]),
        ("Activation memory", pairs(_format_bytes, **activations)),
        ("MoE output buffers per forward pass", pairs(str, output_buffers="")),
    ]
    return [(title, bars) for title, bars in charts if bars]


def _common_prefix_length(stock: Sequence[Any], patched: Sequence[Any]) -> int:
    return len(list(takewhile(lambda pair: pair[0] == pair[1], zip(stock, patched, strict=False))))


def _difference(index: int, stock: Answer, patched: Answer) -> dict[str, Any]:
    """Return the values for the template of report.html that describe one question with two different answers.

    :param index: index of the question, from 0.
    """
    same = _common_prefix_length(stock.text, patched.text)
    token = _common_prefix_length(stock.tokens, patched.tokens)
    return {
        "number": index + 1,
        "question": stock.question,
        "label": stock.label,
        "same_text": stock.text == patched.text,
        "token": token + 1 if stock.tokens != patched.tokens else None,
        "sides": [
            {
                "answer": answer,
                "head": answer.text[:same],
                "tail": answer.text[same:],
                "tokens": ", ".join(map(str, answer.tokens[token : token + 8])) or "end of the answer",
            }
            for answer in (stock, patched)
        ],
    }


def render_html(comparison: Comparison) -> str:
    """Render report.html. The page loads no other files."""
    return pages.render(
        Path(__file__).with_name("report.html.j2"),
        verdict=make_headline(comparison),
        summary=make_summary(comparison),
        kind=STYLES[comparison.exit_code][1],
        comparison=comparison,
        overview=list_overview(comparison),
        rows=list_rows(comparison),
        acts=counting.describe_actions(comparison.patched.changes, comparison.patched.acted),
        notes=list_notes(comparison),
        bars=_bars(comparison),
        differences=[_difference(*difference) for difference in comparison.differing],
        commands=[(run, shlex.join(run.command)) for run in (comparison.stock, comparison.patched)],
    )


def write(comparison: Comparison, directory: Path) -> Path:
    """Write report.json and report.html. Raises the errors of :func:`pages.replace`.

    :returns: path of report.html.
    """
    contents = {
        "report.json": json.dumps(comparison.to_dict(), indent=2) + "\n",
        "report.html": render_html(comparison),
    }
    pages.replace(contents, directory)
    return directory / "report.html"
