"""A plan for people: a table on the terminal, plan.html, and plan.json for scripts."""

from __future__ import annotations

import json
import shlex
from collections.abc import Iterable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sglang_moe_patches import pages
from sglang_moe_patches.planning import need
from sglang_moe_patches.planning.measure import Measured, PhaseNeed, Rank
from sglang_moe_patches.planning.result import MB, Plan, Recommendation, ServerPlan

if TYPE_CHECKING:
    from rich.console import Console

MIB = 1 << 20
NOT_MEASURED = "not measured"
WRITTEN = ("plan.json", "plan.html")
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


def mb(value: float) -> str:
    """Decimal megabytes, as everywhere in this project."""
    return f"{value / MB:,.0f} MB"


# --- what is said -----------------------------------------------------------------------------------------------------


def verdict(plan: Plan) -> str:
    """The headline."""
    best = [server.recommendations[0] for server in plan.servers]
    if any(value.fraction is None for value in best):
        return "No value was found that leaves the margin free"
    values = ", ".join(f"{v.fraction:.3f} {s.server}" for s, v in zip(plan.servers, best, strict=True))
    if plan.held is False:
        return f"NOT VERIFIED: a planned value did not hold ({values})"
    return f"--mem-fraction-static {values}" + ("" if plan.held is None else ", verified")


def rule_rows(plan: Plan) -> list[tuple[str, str]]:
    """The engine's reserve, term by term."""
    terms = [(term.name, mb(term.mib * MIB)) for term in plan.rule.terms]
    return [
        *terms,
        ("set aside in all", mb(plan.rule.reserve_mib * MIB)),
        ("its fraction", f"{plan.rule.fraction:.3f}"),
    ]


def server_rows(server: ServerPlan) -> list[tuple[str, str]]:
    """One server's figures, as text."""
    first = server.default
    rows = [
        ("fraction by the engine", f"{first.fraction:.3f}"),
        ("KV cache then", f"{first.cache_tokens:,} tokens{_each(first)}"),
        ("lowest free memory then", NOT_MEASURED if first.lowest_free is None else mb(first.lowest_free)),
    ]
    if first.ranks:
        kept = first.worst.tensors + first.worst.slack
        rows.append(
            ("taken by PyTorch's allocator then", f"{mb(kept)}, {mb(first.worst.slack)} never a tensor (slack)")
        )
    for value in server.recommendations:
        rows += _value_rows(value, first)
    return rows


def _each(server: Measured) -> str:
    """What a KV cache is of, where there is one for each data-parallel rank."""
    ranks = int(server.settings.get("dp_size") or 1)
    return f" on each of {ranks} data-parallel ranks" if ranks > 1 else ""


def _value_rows(value: Recommendation, first: Measured) -> list[tuple[str, str]]:
    label = "with prompt log-probabilities" if value.logprobs else "without prompt log-probabilities"
    if value.fraction is None:
        why = f"none found, none above {value.ceiling:.3f} fits" if value.ceiling else "not known: it was not driven"
        return [(f"fraction {label}", why)]
    gain = f" ({100 * (value.tokens / first.cache_tokens - 1):+.1f} %)" if first.cache_tokens else ""
    rows = [
        (f"fraction {label}", f"{value.fraction:.3f}"),
        ("KV cache", f"{value.tokens:,} tokens{_each(first)}{gain}"),
        (f"requests of {first.context:,} tokens at once", f"{value.requests_at_context:.1f}{_each(first)}"),
    ]
    if value.ceiling - value.fraction > need.TOLERANCE + need.STEP / 2:
        rows.insert(1, ("not known more closely", f"none above {value.ceiling:.3f} fits; more servers would tell"))
    found = value.verified
    if found is not None:
        what = "held" if found.held else f"DID NOT HOLD: {'; '.join(found.reasons)}"
        if f"{found.fraction:.3f}" != f"{value.fraction:.3f}":
            what += f" with {found.fraction:.3f}, which leaves less"
        if found.lowest_free:
            what += f"; lowest free {mb(min(found.lowest_free.values()))}"
        rows.append(("verification", what))
        if found.not_seen:
            rows.append(("not brought about by it", ", ".join(found.not_seen)))
    return rows


def phase_rows(server: ServerPlan) -> list[PhaseNeed]:
    """What each phase needed in the first of the servers in which it was seen; where it was in none, in the first."""
    found: dict[str, PhaseNeed] = {}
    for trial in server.trials:
        for phase in trial.phases:
            if phase.name not in found or (phase.seen and not found[phase.name].seen):
                found[phase.name] = phase
    return list(found.values())


def missing(plan: Plan) -> list[str]:
    """What was not driven on some server, each once."""
    lines = [line for server in plan.servers for trial in server.trials for line in trial.not_driven]
    return list(dict.fromkeys(lines))


def notes(plan: Plan) -> list[str]:
    """What the figures mean, and what they cannot show."""
    lines = [
        f"The margin is {mb(plan.margin)}: so much stays free on every GPU at the worst moment that was driven. It has "
        "to cover what was not driven.",
        "The engine's terms are what its reserve falls by when one more input is put to its smallest, by its own "
        "resolver. It rounds the fraction to three places.",
        "Tensors are those beyond what was allocated before the first forward. The KV cache cannot have what the "
        "allocator keeps beyond them, or what other libraries take, either: that is counted.",
        "Without prompt log-probabilities, a request that asks for those of a long prompt can end the server.",
    ]
    lines += [f"Not driven: {line}." for line in missing(plan)]
    if plan.held is None:
        lines.append("Not verified: --verify starts a server with the value and drives a load of another kind.")
    lines.append("Another model, GPU, engine release, or any other server argument needs a plan of its own.")
    return lines


# --- the terminal -----------------------------------------------------------------------------------------------------


def print_table(plan: Plan, console: Console) -> None:
    """Print the figures and the command to paste."""
    from rich.table import Table
    from rich.text import Text

    def table(title: str, *columns: str) -> Table:
        made = Table(title=Text(title))  # nothing here is console markup
        made.add_column("")
        for column in columns:
            made.add_column(Text(column), justify="right")
        return made

    reserve = table(f"What SGLang {plan.engine} sets aside by its rule", "")
    for name, text in rule_rows(plan):
        reserve.add_row(Text(name), Text(text))
    console.print(reserve)
    for server in plan.servers:
        needs = table(f"{server.server}: what was needed", "tensors", "free memory fell by", "lowest free", "GPU")
        for phase in phase_rows(server):
            shown = (mb(phase.tensors), mb(phase.grown), mb(phase.lowest_free), phase.rank)
            cells = shown if phase.seen else ("not seen", "", "", phase.largest)
            needs.add_row(Text(phase.name), *map(Text, cells))
        console.print(needs)
        values = table(server.server, "")
        for name, text in server_rows(server):
            values.add_row(Text(name), Text(text))
        console.print(values)
        for knob in server.knobs:
            console.print(Text(f"{server.server}: {knob}"))
    for line in missing(plan):
        console.print(Text(f"Not driven: {line}."))
    style = {0: "bold green", 1: "bold red", 2: "bold yellow"}[plan.exit_code]
    console.print(Text(f"{verdict(plan)}; margin {mb(plan.margin)}.", style=style))
    for server in plan.servers:
        if command := server.recommendations[0].command:
            console.print(Text(f"{server.server}: {command}"), soft_wrap=True)


# --- the page ---------------------------------------------------------------------------------------------------------


def bars(plan: Plan) -> list[tuple[str, Rank]]:
    """(label, worst rank) of each bar: a server with the engine's fraction, and the last one that was measured."""
    found = []
    for server in plan.servers:
        measured = [trial for trial in server.trials if trial.ranks]
        for trial in dict.fromkeys(map(id, measured[:1] + measured[-1:])):
            one = next(each for each in measured if id(each) == trial)
            found.append((f"{server.server}\n{one.fraction:.3f}", one.worst))
    return found


def plot(shown: Iterable[tuple[str, Rank]], reserve: float) -> str:
    """An SVG element: a GPU's memory, a bar for each server, and below it the part that is not weights or KV cache.

    :param reserve: bytes that the engine sets aside by its rule, marked in the lower plot.
    """
    from matplotlib.figure import Figure

    title = "Memory of the worst GPU"
    rows = list(shown)
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


BELOW = ("before", "weights", "cache")
"""Fields of :class:`measure.Rank` that are there before what a forward needs."""


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
        verdict=verdict(plan),
        kind={0: "fine", 1: "worse", 2: "open"}[plan.exit_code],
        arguments=shlex.join(plan.arguments),
        plot=Markup(plot(shown, plan.rule.reserve_mib * MIB)) if shown else None,
        rule=rule_rows(plan),
        servers=[(server, server_rows(server), phase_rows(server)) for server in plan.servers],
        notes=notes(plan),
        mb=mb,
    )


def to_dict(plan: Plan) -> dict[str, Any]:
    """For plan.json: everything measured, in bytes where nothing else is said."""
    found = asdict(plan)
    found["verdict"], found["exit_code"], found["not_driven"] = verdict(plan), plan.exit_code, missing(plan)
    found["rule"]["reserve_mib"] = plan.rule.reserve_mib
    return found


def write(plan: Plan, directory: Path) -> Path:
    """Write plan.json and plan.html.

    :param directory: created if need be; an earlier plan there is replaced.
    :returns: the path of plan.html.
    """
    figures, page = WRITTEN
    pages.replace({figures: json.dumps(to_dict(plan), indent=2) + "\n"}, directory)
    # The page last: one that cannot be drawn loses no figure.
    pages.replace({page: render_html(plan)}, directory)
    return directory / page
