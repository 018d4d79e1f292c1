"""A plan for people: tables on the terminal, plan.html, and plan.json for scripts."""

from __future__ import annotations

import json
import shlex
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sglang_moe_patches.lab import pages
from sglang_moe_patches.memory.kv_sizing import script
from sglang_moe_patches.memory.kv_sizing.size import MARGIN
from sglang_moe_patches.planning.measure import Rank
from sglang_moe_patches.planning.result import MB, Plan, ServerPlan, Started, Verdict

if TYPE_CHECKING:
    from rich.console import Console

MIB = 1 << 20
FIGURES, PAGE = "plan.json", "plan.html"
PARTS = (
    ("before", "in use before loading", "#c9ced8"),
    ("weights", "weights", "#5b6677"),
    ("cache", "KV cache", "#2f6fde"),
    ("after_cache", "request table, workspaces, graphs", "#7b61c4"),
    ("tensors", "tensors of the largest forward", "#d9822b"),
    ("slack", "kept by PyTorch's allocator beyond them", "#f0c987"),
    ("outside", "taken outside PyTorch while serving", "#b3261e"),
    ("lowest_free", "never used", "#ffffff"),
)
"""Fields of :class:`measure.Rank` that make up a GPU's memory, with their names and colours."""
BELOW = ("before", "weights", "cache")
"""Those that are there before what a forward needs."""
STYLES = {
    Verdict.HELD: ("bold green", "fine"),
    Verdict.DID_NOT_HOLD: ("bold red", "worse"),
    Verdict.COULD_NOT_BE_TRIED: ("bold yellow", "open"),
    Verdict.INCOMPLETE: ("bold yellow", "open"),
}


def mb(value: float) -> str:
    """Decimal megabytes, as everywhere in this project."""
    return f"{value / MB:,.0f} MB"


# --- what is said -----------------------------------------------------------------------------------------------------


def headline(plan: Plan) -> str:
    """The verdict, with what each server's second start had."""
    values = [
        f"{server.server} {server.second.fraction:.4f}, {server.second.tokens:,} tokens"
        for server in plan.servers
        if server.second is not None
    ]
    return f"{plan.verdict}: " + ("; ".join(values) or "no server was sized")


def rule_rows(plan: Plan) -> list[tuple[str, str]]:
    """The engine's reserve, term by term."""
    terms = [(term.name, mb(term.mib * MIB)) for term in plan.rule.terms]
    total = ("set aside in all", mb(plan.rule.reserve_mib * MIB))
    return [*terms, total, ("its fraction", f"{plan.rule.fraction:.3f}")]


def need_rows(server: ServerPlan) -> list[tuple[str, str]]:
    """What was needed in its place, term by term, on the worst GPU of the first start."""
    if server.record is None or not server.record.need:
        return []
    rows = []
    worst = server.first.worst if server.first is not None else None
    if worst is not None:
        names = [name for name, _, _ in PARTS if name not in (*BELOW, "lowest_free")]
        rows = [(label, mb(getattr(worst, name))) for name, label, _ in PARTS if name in names]
    rows.append(("needed in all, by the record", mb(max(server.record.need, server.record.serving_need))))
    rows.append(("margin", mb(MARGIN)))
    return rows


def server_rows(server: ServerPlan) -> list[tuple[str, str]]:
    """One server's figures, as text."""
    said, why = server.judged
    rows = [("verdict", "; ".join([said, *why]))]
    rule = "by hand (the rule leaves none)" if server.first and server.first.given else "by the engine's rule"
    for label, started in ((rule, server.first), ("by the record", server.second)):
        if started is not None:
            rows.append((label, f"{started.fraction:.4f}: {started.tokens:,} tokens{_each(started)}"))
    if server.first and server.second and server.first.tokens and not server.first.given:
        rows.append(("more KV cache", f"{100 * (server.second.tokens / server.first.tokens - 1):+.1f} %"))
    if server.second is not None and server.second.context:
        at_once = server.second.tokens / server.second.context
        rows.append((f"requests of {server.second.context:,} tokens at once", f"{at_once:.1f}{_each(server.second)}"))
    if server.record is not None:
        rows.append(("driven", ", ".join(server.record.driven) or "nothing"))
        rows += [("not driven", each) for each in server.record.left_out]
    found = server.verified
    if found is not None:
        held = "held" if found.held else "DID NOT HOLD"
        free = f"; lowest free {mb(min(found.lowest_free.values()))}" if found.lowest_free else ""
        rows.append(
            ("verification", f"{held}; {found.requests:,} requests answered, {found.retractions} retractions{free}")
        )
    return rows


def _each(server: Started) -> str:
    """What a KV cache is of, where there is one for each data-parallel rank."""
    ranks = script.ranks(server.settings)
    return f" on each of {ranks} data-parallel ranks" if ranks > 1 else ""


def notes(plan: Plan) -> Iterator[str]:
    """What the figures mean, and what they cannot show."""
    if shares := plan.shares():
        yield (
            f"Of the tokens beyond the rule's, {shares['sizing']:,} are what sizing brings to the stock engine, and "
            f"{shares['patches']:,} what the patches do besides."
        )
    if plan.dummy_weights:
        yield "Random weights were served: experts are chosen otherwise than by the model's own."
    for server in plan.servers:
        for name, status, reason in server.second.changes if server.second else ():
            if status == "unsupported":
                yield f"{server.server}: {name} is unsupported: {reason}."
    yield (
        "Not driven by anything: images, output and top log-probabilities, grammars, custom logit processors, weight "
        "updates."
    )
    yield (
        "The engine's terms are what its reserve falls by when one more input is put to its smallest, by its own "
        "resolver. It rounds the fraction to three places."
    )
    yield "Another model, GPU, engine release, or any other server argument needs a plan of its own."


# --- the terminal -----------------------------------------------------------------------------------------------------


def print_table(plan: Plan, console: Console) -> None:
    """Print the figures and the command to paste."""
    from rich.table import Table
    from rich.text import Text

    def table(title: str, rows: Iterable[tuple[str, str]]) -> None:
        made = Table(title=Text(title), show_header=False)  # nothing here is console markup
        for name, text in rows:
            made.add_row(Text(name), Text(text))
        console.print(made)

    table(f"What SGLang {plan.engine} sets aside by its rule", rule_rows(plan))
    for server in plan.servers:
        if needs := need_rows(server):
            table(f"{server.server}: what was needed", needs)
        table(server.server, server_rows(server))
    for line in notes(plan):
        console.print(Text(line))
    console.print(Text(headline(plan), style=STYLES[plan.verdict][0]))
    for server in plan.servers:
        if server.command:
            console.print(Text(server.command), soft_wrap=True)


# --- the page ---------------------------------------------------------------------------------------------------------


def bars(plan: Plan) -> list[tuple[str, Rank]]:
    """(label, worst rank) of each bar: each start of each server."""
    started = [(server.server, each) for server in plan.servers for each in (server.first, server.second) if each]
    return [(f"{name}\n{each.fraction:.3f}", each.worst) for name, each in started if each.worst is not None]


def plot(rows: Sequence[tuple[str, Rank]], reserve: float) -> str:
    """An SVG element: a GPU's memory, a bar for each start, and below it the part that is not weights or KV cache.

    :param reserve: bytes that the engine sets aside by its rule, marked in the lower plot.
    """
    from matplotlib.figure import Figure

    title = "Memory of the worst GPU"
    with pages.drawing(title):
        figure = Figure(figsize=(9.2, 2.4 + 1.1 * len(rows)), layout="constrained")
        whole, rest = figure.subplots(2)
        _bars(whole, rows, PARTS)
        _bars(rest, rows, [part for part in PARTS if part[0] not in BELOW])
        mark = rest.axvline(reserve / 1e9, color="#1c2430", linestyle="--", linewidth=1)
        whole.set_title("whole", loc="left")
        rest.set_title("without weights and KV cache", loc="left")
        handles, labels = whole.get_legend_handles_labels()
        labels.append("set aside by the engine's rule")
        figure.legend([*handles, mark], labels, loc="outside lower center", ncols=3, frameon=False)
        return pages.svg(figure, title)


def _bars(axes: Any, rows: Sequence[tuple[str, Rank]], parts: Sequence[tuple[str, str, str]]) -> None:
    for index, (part, label, color) in enumerate(parts):
        sizes = [max(0, getattr(rank, part)) / 1e9 for _, rank in rows]
        lefts = [_before(rank, parts[:index]) / 1e9 for _, rank in rows]
        axes.barh(range(len(rows)), sizes, left=lefts, height=0.62, color=color, edgecolor="#1c2430", linewidth=0.4,
                  label=label)  # fmt: skip
    axes.set_yticks(range(len(rows)), [label for label, _ in rows])
    axes.set_ylim(len(rows) - 0.4, -0.6)
    axes.set_xlabel("GB")
    axes.spines[["top", "right"]].set_visible(False)


def _before(rank: Rank, parts: Iterable[tuple[str, str, str]]) -> float:
    """What these parts take in a bar."""
    return sum(max(0, getattr(rank, name)) for name, _, _ in parts)


def render_html(plan: Plan) -> str:
    """The whole page, with nothing to load from elsewhere."""
    from markupsafe import Markup

    shown = bars(plan)
    return pages.render(
        Path(__file__).with_name("plan.html.j2"),
        plan=plan,
        verdict=headline(plan),
        kind=STYLES[plan.verdict][1],
        arguments=shlex.join(plan.arguments),
        plot=Markup(plot(shown, plan.rule.reserve_mib * MIB)) if shown else None,
        rule=rule_rows(plan),
        servers=[(server, server_rows(server), need_rows(server)) for server in plan.servers],
        notes=list(notes(plan)),
    )


# --- files ------------------------------------------------------------------------------------------------------------


def to_dict(plan: Plan) -> dict[str, Any]:
    """For plan.json: everything measured, in bytes where nothing else is said."""
    found = asdict(plan)
    found["rule"]["reserve_mib"] = plan.rule.reserve_mib
    for server, made in zip(plan.servers, found["servers"], strict=True):
        made["verdict"], made["reasons"] = server.judged
    return {**found, "verdict": plan.verdict, "exit_code": plan.exit_code, "shares": plan.shares()}


class Writer:
    """plan.json after each part; a plan that was there before keeps its figures, under its time.

    :param output: the folder, created if need be.
    """

    def __init__(self, output: Path) -> None:
        self.output, self._ours = output, False

    def write(self, plan: Plan) -> None:
        """Write what is known until now, whole or not at all."""
        path = self.output / FIGURES
        if not self._ours and path.exists():
            made = datetime.fromtimestamp(path.stat().st_mtime, UTC)
            path.replace(path.with_name(f"plan-{made:%Y%m%d-%H%M%S}.json"))
        pages.replace({FIGURES: json.dumps(to_dict(plan), indent=2) + "\n"}, self.output)
        self._ours = True

    def page(self, plan: Plan) -> str:
        """Write plan.html; why it could not be, or "": nothing is lost with it."""
        try:
            pages.replace({PAGE: render_html(plan)}, self.output)
        except Exception as error:
            return f"{type(error).__name__}: {error}"
        return ""
