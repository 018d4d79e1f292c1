"""A comparison for people: a table on the terminal, report.html, and report.json for scripts."""

from __future__ import annotations

import json
import shlex
from collections.abc import Callable, Sequence
from itertools import takewhile
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from sglang_moe_patches.lab.observers import acted
from sglang_moe_patches.lab.regress import bound, pages
from sglang_moe_patches.lab.regress.compare import INCONCLUSIVE, NO_WORSE, WORSE, Answer, Comparison, Run
from sglang_moe_patches.lab.regress.gsm8k import GSM8K

if TYPE_CHECKING:
    from rich.console import Console

NOT_MEASURED = "not measured"
STYLES = {NO_WORSE: ("bold green", "fine"), WORSE: ("bold red", "worse"), INCONCLUSIVE: ("bold yellow", "open")}
"""Of a verdict, on the terminal and on the page."""


class Row(NamedTuple):
    """One line of the table; ``patched`` is empty where a figure is about both servers."""

    label: str
    stock: str
    patched: str = ""


# --- what is said -----------------------------------------------------------------------------------------------------


def _count(number: int, noun: str) -> str:
    return f"{number:,} {noun}" if number == 1 else f"{number:,} {noun}s"


def points(number: float) -> str:
    """Percentage points of accuracy."""
    return "1 point" if number == 1 else f"{number:g} points"


def _bytes(value: int) -> str:
    """Decimal units, as GPU vendors and this project's documents use them."""
    if value < 10_000:
        return f"{value:,} B"
    # Only from 10,000 on the next unit, so that the two sides of a comparison mostly have the same one.
    units = ["TB", "GB", "MB", "kB"]
    scaled, unit = value / 1000, units.pop()
    while units and scaled >= 9_999.95:
        scaled, unit = scaled / 1000, units.pop()
    return f"{scaled:,.1f} {unit}"


def _accuracy(run: Run) -> str:
    return f"{100 * run.accuracy:.1f} % ({run.correct} of {len(run.answers)})"


def _interval(run: Run) -> tuple[float, float]:
    """95 % interval of the accuracy (Wilson), 0 to 1."""
    from scipy.stats import binomtest

    interval = binomtest(run.correct, len(run.answers)).proportion_ci(0.95, method="wilson")
    return float(interval.low), float(interval.high)


def _largest_drop(comparison: Comparison) -> str:
    if not comparison.accuracy_can_tell:
        return f"not known ({comparison.stock.correct} of {comparison.questions} right)"
    return f"{comparison.largest_drop:.1f} points (one-sided {100 * (1 - comparison.alpha):g} % interval)"


def verdict(comparison: Comparison) -> str:
    """The headline: the most that is true."""
    if comparison.worse:
        return "Patched is WORSE than stock"
    if comparison.conclusive and not comparison.differing:
        less = ""
        if saved := _find_saving(comparison):
            less = f", {100 * (1 - saved.patched / saved.stock):.0f} % less activation memory"
        return f"All {_count(comparison.questions, 'answer')} are identical{less}"
    if comparison.within:
        return f"Patched is no worse than stock by more than {points(comparison.max_drop)}"
    if not comparison.accuracy_can_tell:
        return "INCONCLUSIVE: no drop could have been detected"
    return f"INCONCLUSIVE: patched may be worse than stock by more than {points(comparison.max_drop)}"


def inconclusive(comparison: Comparison) -> str:
    """Why there is no verdict, and what to change, in one line."""
    count, most = comparison.questions, comparison.max_drop
    fewest = bound.fewest(most / 100, comparison.alpha)
    if not comparison.accuracy_can_tell:
        why = (
            f"stock answers {comparison.stock.correct} of {_count(count, 'question')} correctly, too few for a drop of "
            f"more than {points(most)} to be seen at --alpha {comparison.alpha:g}"
        )
        change = "ask more questions (--num-questions), or use a model that can answer them"
    elif count < fewest:
        why = (
            f"{_count(count, 'question')} cannot show a drop to be below {points(most)} at --alpha {comparison.alpha:g}"
        )
        change = f"ask at least {fewest} (--num-questions)"
    else:
        why = (
            f"{comparison.losses} lost and {comparison.gains} gained of {_count(count, 'question')} may be a drop of "
            f"up to {comparison.largest_drop:.1f} points, more than --max-drop {most:g}"
        )
        needed = comparison.questions_needed
        if needed is None:
            change = (
                "more questions (--num-questions) will show no less if they go like these; allow a larger --max-drop"
            )
        else:
            beyond = f", more than the {GSM8K:,} of GSM8K" if needed > GSM8K else ""
            change = (
                f"ask some {needed:,}{beyond} (--num-questions), which show it in {100 * bound.POWER:.0f} of 100 runs "
                "if they go like these, or allow a larger --max-drop"
            )
    return f"{why}; {change}, or make identical answers the test (--require-identical --parallel 1)"


def summary(comparison: Comparison) -> tuple[str, ...]:
    """One or more sentences below the headline."""
    if comparison.worse:
        return comparison.reasons
    if not comparison.conclusive:
        why = inconclusive(comparison)
        return (f"{why[0].upper()}{why[1:]}.",)
    if not comparison.differing:
        within = f"; accuracy is no worse by more than {points(comparison.max_drop)}" if comparison.within else ""
        return (f"Every answer of the patched server is that of the stock one, token for token{within}.",)
    return (
        f"{len(comparison.differing)} of {_count(comparison.questions, 'answer')} differ; accuracy is "
        f"{100 * comparison.stock.accuracy:.1f} % stock and {100 * comparison.patched.accuracy:.1f} % patched.",
    )


def _of_same_tokens(comparison: Comparison, name: str) -> tuple[int, int] | None:
    """A figure of stock's and of patched's memory; ``None``: not measured, or in forwards of different tokens."""
    stock, patched = comparison.stock.memory, comparison.patched.memory
    if stock is None or patched is None or stock.tokens != patched.tokens:
        return None
    before, after = getattr(stock, name), getattr(patched, name)
    return None if before is None or after is None else (before, after)


class Saving(NamedTuple):
    """Activation memory of the largest forward, in bytes.

    :param moment: of the forward, at which it was measured.
    """

    moment: str
    stock: int
    patched: int


def _find_saving(comparison: Comparison) -> Saving | None:
    """What patched saves; ``None``: less than half a per cent."""
    for moment, name in (
        ("at the peak of one forward", "peak_forward_bytes"),
        ("live when the MoE kernel starts", "live_at_kernel_bytes"),
    ):
        before, after = _of_same_tokens(comparison, name) or (0, 0)
        if before and 200 * (before - after) >= before:
            return Saving(moment, before, after)
    return None


def overview(comparison: Comparison) -> list[tuple[str, str]]:
    """(name, value) of what was compared, and what came out: for who reads no further."""
    stock, patched = comparison.stock, comparison.patched
    command = patched.command
    model = command[command.index("--model-path") + 1] if "--model-path" in command else ""
    memory = next((run.memory for run in (patched, stock) if run.memory is not None and run.memory.device), None)
    if memory is None:
        machine = "not known"
    else:
        machine = "CPU: its speed says nothing of a GPU's" if memory.device == "cpu" else memory.gpu or "GPU"
    releases = " and ".join(dict.fromkeys((stock.engine, patched.engine)))
    saved = f"{NOT_MEASURED}, or no less"
    if found := _find_saving(comparison):
        saved = f"{_bytes(found.stock)} stock, {_bytes(found.patched)} patched, {found.moment}"
    differing = len(comparison.differing)
    answers = f"{_count(comparison.questions, 'question')}, {f'{differing} differ' if differing else 'all identical'}"
    return [
        ("Model", model or f"that of {stock.command[0]} and {patched.command[0]}"),
        ("Machine", f"{machine}; SGLang {releases}"),
        ("Memory", saved),
        ("Answers", f"{answers}; right: {stock.correct} stock, {patched.correct} patched"),
    ]


def rows(comparison: Comparison) -> list[Row]:
    stock, patched = comparison.stock, comparison.patched
    count, bought = comparison.questions, kv_tokens(comparison)
    identical = "yes" if comparison.token_identical else f"no, {comparison.tokens_differ} of {count} differ"

    def both(label: str, figure: Callable[[Run], str]) -> Row:
        return Row(label, figure(stock), figure(patched))

    def memory(label: str, name: str, text: Callable[[Any], str]) -> list[Row]:
        values = [None if run.memory is None else getattr(run.memory, name) for run in (stock, patched)]
        if values == [None, None]:
            return []
        return [Row(label, *(NOT_MEASURED if value is None else text(value) for value in values))]

    return [
        both("Accuracy", _accuracy),
        Row(
            "McNemar's exact test",
            f"p = {comparison.p_two_sided:.3g} ({comparison.losses} lost, {comparison.gains} gained)",
        ),
        Row("Largest drop that it may be", _largest_drop(comparison)),
        Row("Answers with a different text", f"{comparison.texts_differ} of {count}"),
        Row("Token for token identical", identical),
        both("Input throughput", lambda run: f"{run.input_throughput:,.1f} token/s"),
        both("Output throughput", lambda run: f"{run.output_throughput:,.1f} token/s"),
        *memory("Peak memory of one forward", "peak_forward_bytes", _bytes),
        *memory("Live when the MoE kernel starts", "live_at_kernel_bytes", _bytes),
        *memory("Tokens in the largest forward", "tokens", "{:,}".format),
        *([Row("KV tokens that the difference could hold", f"{bought:,}")] if bought else []),
        *memory("MoE output buffers per forward", "output_buffers", str),
        *memory("Held by the MoE kernels between forwards", "kernel_buffer_bytes", _bytes),
        *memory("Taken by PyTorch's allocator", "reserved_bytes", _bytes),
        *memory("Of that, never a tensor (slack)", "slack_bytes", _bytes),
        *memory("MoE layers", "moe_layers", str),
        *memory("Forwards observed", "forwards", "{:,}".format),
    ]


def kv_tokens(comparison: Comparison) -> int | None:
    """How many tokens of KV cache each GPU could have for what the largest forward needs less when patched.

    ``None``: none, or it cannot be told.
    """
    memory, peaks = comparison.patched.memory, _of_same_tokens(comparison, "peak_forward_bytes")
    if memory is None or peaks is None or not memory.cache_token_bytes:
        return None
    return max(0, int((peaks[0] - peaks[1]) / memory.cache_token_bytes)) or None


def _incomplete(comparison: Comparison) -> list[str]:
    return [
        f"The {run.name} server's figures are incomplete: {run.not_observed}."
        for run in (comparison.stock, comparison.patched)
        if run.not_observed
    ]


def notes(comparison: Comparison) -> list[str]:
    """What the figures mean, what they cannot show, and what was not run."""
    drop, level = comparison.detectable_drop, 100 * (1 - comparison.alpha)
    lines = [
        "Both servers got the same questions at temperature 0. McNemar's test looks only at the questions that one "
        "server answers correctly and the other does not. Patched is called worse when it has fewer correct answers "
        f"and the one-sided exact p is below {comparison.alpha:g}"
        + (", or when any answer differs." if comparison.require_identical else "."),
        f"It is called no worse by more than {points(comparison.max_drop)} when the one-sided {level:g} % interval of "
        "the drop in accuracy ends below that: an exact unconditional test by the score statistic, inverted. A smaller "
        "drop goes unseen, as does one in other questions than these.",
    ]
    if not comparison.accuracy_can_tell:
        lines.append(
            f"Stock answers only {comparison.stock.correct} of {_count(comparison.questions, 'question')} correctly, "
            "so accuracy says nothing here (a model with random weights answers none). Whether the answers are "
            "identical does."
        )
    elif drop is not None:
        lines.append(
            f"The smallest drop that this run could call one is {_count(drop, 'question')} lost and none gained: "
            f"{comparison.detectable_drop_points:.1f} percentage points."
        )
    lines.append(
        "Throughput is tokens over the seconds of the whole evaluation, one run each, client included. Stock runs "
        "first and compiles what patched then finds in caches. Enough to see a server that became much slower, too "
        "little for a benchmark."
    )
    measured = [run.memory for run in (comparison.stock, comparison.patched) if run.memory is not None]
    devices = {memory.device for memory in measured}
    if not measured:
        lines.append("Memory was not measured: the servers were running already, or no forward was observed.")
    if any(memory.peak_forward_bytes is not None for memory in measured):
        lines.append(
            "Peak memory of one forward: the largest beyond what was allocated before it, of the forward with the most "
            "tokens. Memory that a CUDA graph holds was allocated before."
        )
    if kv_tokens(comparison):
        lines.append(
            "KV tokens: the difference between the two peaks, as KV cache of one GPU. The engine does not use it by "
            "itself, and larger forwards than those of these questions may need more: "
            "SGLANG_MOE_PATCHES_KV_SIZING=auto has a server measure them when it starts."
        )
    if any(memory.live_at_kernel_bytes is not None for memory in measured):
        lines.append(
            "Live when the MoE kernel starts: bytes of activations alive at that moment, in the forward with the most "
            "tokens."
        )
    elif measured:
        lines.append(
            "Neither a TRT-LLM FP4 nor a CuteDSL kernel ran, so what is live when the MoE kernel starts, and which "
            "buffers it writes into, was not looked at."
        )
    if any(memory.output_buffers is not None for memory in measured):
        lines.append(
            "MoE output buffers: the most distinct allocations that the MoE layers of one forward put their output "
            "into; one per MoE layer means that no layer reuses another's."
        )
    if any(act.captured for act in comparison.patched.acted.acts):
        lines.append(
            "What the changes did is counted by Python, which a CUDA graph runs when it is captured, not when it is "
            "replayed."
        )
    lines += _incomplete(comparison)
    if "cpu" in devices:
        lines.append(
            "Not run: no GPU was used. FlashInfer's NVFP4 kernels were replaced by plain PyTorch, so speed means "
            "nothing for a GPU, and CUDA graphs, GPU kernels and the GPU's peak memory were not exercised."
        )
    lines.append("Not run: any other model, flag, number of GPUs or request mix than those of the two commands below.")
    return lines


# --- the terminal -----------------------------------------------------------------------------------------------------


def print_table(comparison: Comparison, console: Console) -> None:
    from rich.table import Table
    from rich.text import Text

    # Nothing here is console markup.
    table = Table(title=Text(f"{_count(comparison.questions, 'question')}, SGLang {comparison.stock.engine}"))
    table.add_column("")
    for run in (comparison.stock, comparison.patched):
        table.add_column(Text(run.name), justify="right")
    for row in rows(comparison):
        # A figure about both stands in the last column: it says what patched is against stock.
        cells = (row.stock, row.patched) if row.patched else ("", row.stock)
        table.add_row(Text(row.label), *map(Text, cells))
    console.print(table)
    for change, status, reason in comparison.patched.changes:
        console.print(Text(f"{change}: {status}" + (f" ({reason})" if reason else "")))
    for sentence in acted.sentences(comparison.patched.changes, comparison.patched.acted):
        console.print(Text(sentence))
    style, _ = STYLES[comparison.exit_code]
    console.print(Text(f"{verdict(comparison)}.", style=style))
    for sentence in (*summary(comparison), *_incomplete(comparison)):
        console.print(Text(sentence))


# --- the page ---------------------------------------------------------------------------------------------------------


class Bar(NamedTuple):
    """:param width: per cent of the figure's; the longest leaves room for its text."""

    width: float
    text: str


def _bars(comparison: Comparison) -> list[tuple[str, list[tuple[str, list[Bar]]]]]:
    """(title, pairs of stock's and patched's bars by their label) of each figure that was measured in both servers.

    Not throughput, of which one run each is no comparison.
    """
    runs = (comparison.stock, comparison.patched)
    accuracies = []
    for run in runs:
        low, high = _interval(run)
        text = f"{100 * run.accuracy:.1f} % (95 % interval {100 * low:.1f} to {100 * high:.1f})"
        accuracies.append(Bar(35 * run.accuracy, text))

    def pairs(text: Callable[[int], str], **labels: str) -> list[tuple[str, list[Bar]]]:
        values = {label: [getattr(run.memory, name, None) for run in runs] for name, label in labels.items()}
        both: dict[str, list[Any]] = {label: each for label, each in values.items() if None not in each}
        most = max((max(each) for each in both.values()), default=0) or 1
        return [(label, [Bar(70 * value / most, text(value)) for value in each]) for label, each in both.items()]

    activations = {"peak_forward_bytes": "peak of one forward", "live_at_kernel_bytes": "live when the kernel starts"}
    found = [
        ("Accuracy", [("", accuracies)]),
        ("Activation memory", pairs(_bytes, **activations)),
        ("MoE output buffers per forward", pairs(str, output_buffers="")),
    ]
    return [(title, bars) for title, bars in found if bars]


def _same_start(one: Sequence[Any], other: Sequence[Any]) -> int:
    """How many items from the start on are the same."""
    return len(list(takewhile(lambda pair: pair[0] == pair[1], zip(one, other, strict=False))))


def _difference(index: int, stock: Answer, patched: Answer) -> dict[str, Any]:
    same = _same_start(stock.text, patched.text)
    token = _same_start(stock.tokens, patched.tokens)
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
    """The whole page, with nothing to load from elsewhere."""
    return pages.render(
        Path(__file__).with_name("report.html.j2"),
        verdict=verdict(comparison),
        summary=summary(comparison),
        kind=STYLES[comparison.exit_code][1],
        comparison=comparison,
        overview=overview(comparison),
        rows=rows(comparison),
        did=acted.sentences(comparison.patched.changes, comparison.patched.acted),
        notes=notes(comparison),
        bars=_bars(comparison),
        differences=[_difference(*difference) for difference in comparison.differing],
        commands=[(run, shlex.join(run.command)) for run in (comparison.stock, comparison.patched)],
    )


def write(comparison: Comparison, directory: Path) -> Path:
    """Write report.json and report.html; see :func:`pages.replace`.

    :returns: the path of report.html.
    """
    contents = {
        "report.json": json.dumps(comparison.to_dict(), indent=2) + "\n",
        "report.html": render_html(comparison),
    }
    pages.replace(contents, directory)
    return directory / "report.html"
