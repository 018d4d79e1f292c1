"""Print the report of ``doctor --model``: the verdict first, then tables, then settings to copy."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from sglang_moe_patches.lab.predict import forward, room
from sglang_moe_patches.lab.predict.engine_query import find_gpu
from sglang_moe_patches.lab.predict.model_report import WOULD_SIZE
from sglang_moe_patches.memory.kv_sizing.eligibility import ALWAYS, KV_SIZING

SERVERS = ("stock", "patched")
NARROW_COLUMNS = 72
"""Minimum width of a terminal, in characters, at which the changes are printed as a table. In a narrower terminal, the
changes are printed one per line, because a table would truncate their names."""
SETTING = re.compile(r"SGLANG_\w+=\d+")
"""Pattern for a setting such as ``VARIABLE=number``. If the row of a change names a setting, the report repeats the
setting, ready to copy."""


def show(report: Mapping[str, Any]) -> None:
    from rich.console import Console
    from rich.markup import escape
    from rich.table import Table

    console = Console()

    def print_line(line: str) -> None:
        console.print(line, highlight=False, markup=False, soft_wrap=True)

    server, sizes = report["server"], report["sizes"]
    layout = server["layout"]
    ranks = f"TP={layout['tp']}" + "".join(f", {n.upper()}={layout[n]}" for n in ("ep", "dp") if layout[n] > 1)
    gpu, chunk = find_gpu(report["gpu"]).name, f"{server['tokens']:,}"
    print_line(describe_verdict(report))
    if warning := describe_short_cache(report):
        print_line(warning)
    console.print(f"[bold]{escape(report['model'])}[/] on {gpu}, {ranks}, chunks of {chunk} tokens")
    experts = f"Routed experts: {server['format']}, runner {server['runner'] or 'not known'}"
    console.print(f"{experts} (answers of SGLang {report['engine']})", markup=False)
    console.print(
        f"{sizes['experts']} experts, top-{sizes['top_k']}, hidden {sizes['hidden']}, intermediate "
        f"{_describe_intermediate(sizes)}, separate shared experts: {sizes['shared_experts']}",
        highlight=False,
    )
    if report["room"]:
        memory = Table("GB on each GPU", *SERVERS)
        for line in list_memory(report):
            memory.add_row(*line)
        console.print(memory)
    if report["stock"]:
        terms = Table("MB of a prefill chunk", *SERVERS)
        for line in list_memory_rows(report):
            terms.add_row(*line)
        console.print(terms)
    marks = {True: "yes", False: "no", None: "not known"}
    colours = {True: "green", False: "dim", None: "yellow"}
    changes = Table("change", "acts", "effect on this server, or the reason for no effect")
    for change in report["changes"]:
        acts, words = change["acts"], change["does"] or change["reason"] or change["status"]
        if console.width < NARROW_COLUMNS:
            print_line(f"{change['name']}: {marks[acts]}; {words}")
        changes.add_row(change["name"], f"[{colours[acts]}]{marks[acts]}[/]", escape(words))
    if console.width >= NARROW_COLUMNS:
        console.print(changes)
    for remark in report.get("remarks", ()):
        print_line(remark)
    for name in SERVERS if report["room"] else ():
        if report["room"][name]["need"] and report["room"][name]["highest_fraction"] is None:
            print_line(
                f"The {name} server has too little memory for weights, KV cache and need at any --mem-fraction-static."
            )
    if values := list(list_settings(report)):
        print_line("To copy:")
        for value, words in values:
            print_line(f"  {value}")
            print_line(f"    {words}")
    print_line("Not known:")
    for line in report["unknown"]:
        print_line(f"  - {line}")


def _describe_intermediate(sizes: Mapping[str, Any]) -> str:
    """Format the experts' intermediate size in ``config.json``. If a kernel pads this size, add the padded size."""
    published, padded = sizes["published_intermediate"], sizes["moe_intermediate"]
    return f"{published}" if published == padded else f"{published}, padded to {padded}"


def format_gigabytes(size: float) -> str:
    """Format a number of bytes as GB, without the unit."""
    return f"{size / 1e9:,.1f}"


def round_tokens(tokens: int) -> str:
    """Format a predicted number of tokens, rounded to three digits."""
    return f"{round(tokens, 3 - len(str(tokens))):,}"


def describe_verdict(report: Mapping[str, Any]) -> str:
    """Return the first line of the report: whether the stock and the patched server start, how much memory stays free,
    and how much they need."""
    rooms = report["room"]
    if not rooms:
        return "Whether the server starts is not known: the engine could not build the model's layers"
    stock, patched = (_describe_start(report, name) for name in SERVERS)
    verdict = f"{stock[0].upper()}{stock[1:]}" if stock == patched else f"Stock {stock}. Patched {patched}"
    if all(rooms[name]["verdict"] == room.DOES_NOT_START for name in SERVERS):
        return f"{verdict}."

    def both(key: str) -> str:
        sizes = [
            format_gigabytes(rooms[name]["need"]["total"] if key == "need" else rooms[name][key]) for name in SERVERS
        ]
        return f"{sizes[0]} GB" if sizes[0] == sizes[1] else f"{sizes[0]} GB stock, {sizes[1]} GB patched"

    numbers = f"Room in addition to weights and KV cache: {both('free')}"
    if all(rooms[name]["need"] for name in SERVERS):
        numbers += f"; need of forward passes and CUDA graphs: about {both('need')}"
    return f"{verdict}. {numbers}."


def describe_short_cache(report: Mapping[str, Any]) -> str:
    """Return a warning if the KV cache has fewer tokens than the longest request; empty if it has enough tokens, or if
    its size is not known."""
    rooms, fit = report["room"], report["fit"]
    tokens = rooms["patched"]["tokens"] if rooms else None
    if not tokens or tokens >= fit["context"]:
        return ""
    return (
        f"The KV cache has {tokens:,} tokens, fewer than the longest request ({fit['context']:,} tokens); to allow "
        "only shorter requests, set --context-length"
    )


def _describe_start(report: Mapping[str, Any], name: str) -> str:
    """Return a clause that says whether the stock or the patched server starts, such as "starts".

    :param name: "stock" or "patched".
    """
    found = report["room"][name]
    fit = report["stock_fit"] if name == "stock" else report["fit"]
    if found["verdict"] == room.STARTS:
        fraction = fit["begins_with"]
        return f"starts, and kv-sizing begins with --mem-fraction-static {fraction:.3f}" if fraction else "starts"
    if found["verdict"] == room.NOT_KNOWN:
        return f"starts; whether enough memory stays free is not known ({found['unknown']})"
    *others, last = (_name_place(report, name, place) for place in found["short_of"] or [room.MIXED_LOAD])
    places = f"{', in '.join(others)} and in {last}" if others else last
    if found["verdict"] == room.LITTLE_ROOM:
        return f"starts, but with too little room: expect out-of-memory in {places}"
    source = "given" if fit["given"] else "engine's"
    weights = f"{format_gigabytes(fit['weights'])} GB of weights"
    if fit["loading"]:
        weights += f" and about {format_gigabytes(fit['loading'])} GB still allocated after loading them"
    if not fit["loads"] and fit["layout"]:
        least, memory = format_gigabytes(fit["least_memory"]), format_gigabytes(fit["memory"])
        return (
            f"does not start: loading the weights takes about {least} GB at its peak, more than the {memory} GB that "
            "are free on each GPU"
        )
    if found["short_of"]:
        room_left, graphs = format_gigabytes(found["free"]), format_gigabytes(found["need"]["graphs"])
        return (
            f"does not start: {places} takes about {graphs} GB, but the {source} --mem-fraction-static "
            f"{fit['fraction']:.3f} leaves only {room_left} GB in addition to weights and KV cache"
        )
    if fit["starts"]:
        return (
            f"does not start: {weights} leave too little memory for a KV cache and for the need of forward passes and "
            "CUDA graphs"
        )
    if (least := fit["least_fraction"]) is None:
        memory = format_gigabytes(fit["memory"])
        return f"does not start: {weights} are too much for {memory} GB of free memory on each GPU"
    allowed = format_gigabytes(fit["memory"] * fit["fraction"])
    fraction = f"the {source} --mem-fraction-static {fit['fraction']:.3f}"
    if least > fit["fraction"] or not fit["refusal"]:
        return (
            f"does not start: {fraction} allows only {allowed} GB, too little for a KV cache in addition to {weights}; "
            f"set at least {least:.2f}"
        )
    return (
        f"does not start: {fraction} allows {allowed} GB for {weights} and for a KV cache, but the engine makes no KV "
        f"cache. The engine's error: {fit['refusal']}"
    )


def _name_place(report: Mapping[str, Any], name: str, place: str) -> str:
    """Return a phrase for a situation in which memory runs out, such as "a mixed load".

    :param name: "stock" or "patched".
    :param place: name of the situation in :mod:`.room`, such as :data:`.room.MIXED_LOAD`.
    """
    found = report["room"][name]
    tokens = report["server"]["tokens"]
    return {
        room.GRAPHS: "the capture of CUDA graphs",
        room.PREFILL: f"a prefill of {tokens:,} tokens",
        room.SAMPLING: f"a decode of {found['requests']:,} requests",
        room.PENALTIES: f"a decode of {found['penalized']:,} requests with penalties",
        room.MIXED_LOAD: "a mixed load",
    }[place]


def list_memory(report: Mapping[str, Any]) -> list[tuple[str, str, str]]:
    """Return the rows of a table with the parts of a GPU's memory and of the need, in GB."""
    stock, patched = (report["room"][name] for name in SERVERS)

    def row(title: str, first: int, second: int) -> tuple[str, str, str]:
        return title, format_gigabytes(first), format_gigabytes(second)

    rows = [row("free before the weights", stock["memory"], patched["memory"])]
    rows.append(row("weights", stock["weights"], patched["weights"]))
    if stock["loading"] or patched["loading"]:
        rows.append(row("still allocated after loading, about", stock["loading"], patched["loading"]))
    if stock["layout"] or patched["layout"]:
        rows.append(row("peak while loading, about", stock["least_memory"], patched["least_memory"]))
    rows.append(row("KV cache", stock["cache"], patched["cache"]))
    rows.append(row("room: the free memory", stock["free"], patched["free"]))
    needs = stock["need"], patched["need"]
    if all(needs):
        rows.append(row("need, about", *(need["total"] for need in needs)))
        rows.append(row("  buffers and CUDA graphs", *(need["graphs"] for need in needs)))
        for place in needs[0]["forwards"]:
            words = _name_place(report, "patched", place)
            rows.append(row(f"  {words}", *(need["forwards"][place] for need in needs)))
        rows.append(row("  kept by PyTorch's allocator", *(need["held"] for need in needs)))
    return [*rows, ("KV tokens", _describe_tokens(stock), _describe_tokens(patched))]


def _describe_tokens(found: Mapping[str, Any]) -> str:
    """Format the number of tokens in the KV cache; "-" for a server that does not start."""
    if found["verdict"] == room.DOES_NOT_START:
        return "-"
    return "not known" if found["tokens"] is None else f"{found['tokens']:,}"


def list_settings(report: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Yield the settings for the user to copy, each with its effect."""
    rooms = report["room"]
    for name in SERVERS if rooms else ():
        found = rooms[name]
        if (highest := found["highest_fraction"]) is None:
            continue
        tokens = found["tokens_at_highest"]
        reaches = f", with about {round_tokens(tokens)} KV tokens" if tokens else ""
        least = found["least_fraction"]
        yield (
            f"--mem-fraction-static {highest:.2f}",
            f"{name}: highest value that leaves enough room{reaches}; lowest value that lets {name} start: {least:.2f}",
        )
    sizing = next((change for change in report["changes"] if change["name"] == "kv-sizing"), None)
    if rooms and sizing and (tokens := rooms["patched"]["grown_tokens"]) and is_sizable(sizing):
        low, high = map(round_tokens, rooms["patched"]["grown_range"])
        value = ALWAYS if report["fit"]["given"] else "auto"
        words = f"measures the need at each start: about {round_tokens(tokens)} KV tokens ({low} to {high})"
        yield f"{KV_SIZING.name}={value}", words
    for change in report["changes"]:
        for setting in dict.fromkeys(SETTING.findall(f"{change['does']} {change['reason']}")):
            yield setting, f"{change['name']}: the table of changes says what this setting does"


def is_sizable(sizing: Mapping[str, Any]) -> bool:
    """Return whether kv-sizing sizes the server's KV cache, or would size it if kv-sizing's environment variable were
    set.

    :param sizing: kv-sizing's row of the report.
    """
    return bool(sizing["acts"]) or sizing["reason"].endswith(WOULD_SIZE)


def list_memory_rows(report: Mapping[str, Any]) -> list[tuple[str, str, str]]:
    """Return the rows of the table of predicted memory, each with a title and the MB of both servers.

    The rows are the parts of the memory at the MoE runner, their sum, the memory at other places of the model, and the
    peak.
    """
    both = (report["stock"], report["patched"])

    def row(title: str, sizes: Iterable[int]) -> tuple[str, str, str]:
        stock, patched = (f"{size / 1e6:,.1f}" for size in sizes)
        return title, stock, patched

    rows = [
        row(f"  {words}", (one["parts"][part] for one in both))
        for part, words in forward.PARTS.items()
        if any(one["parts"][part] for one in both)
    ]
    rows.append(row(f"at {forward.MOE}", (sum(one["parts"].values()) for one in both)))
    rows += [row(f"at {place}", (one["elsewhere"][place] for one in both)) for place in both[0]["elsewhere"]]
    rows.append(row("peak", (one["peak"] for one in both)))
    return rows
