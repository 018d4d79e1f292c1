"""Did it act? What each change did, in which MoE layers, and how often.

Each change declares what it counts (:class:`sglang_moe_patches.core.patch.Count`). Our own functions are wrapped for
it, by attribute, in a process that is observed and in no other: a server that nobody observes runs none of this. Which
layer it is, is noted around the engine's ``FusedMoE.run_moe_core``, behind which every runner is.

Under CUDA graphs Python runs at the capture alone, and counts what is captured; what a replayed graph does is not seen.
"""

from __future__ import annotations

import functools
import importlib
import sys
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from sglang_moe_patches.core.patch import ACTIVE, Count, Patcher
from sglang_moe_patches.lab.observers.events import Act, Acted, ChangeStatus, MoeInput
from sglang_moe_patches.registry import CHANGES

LAYER = ("sglang.srt.layers.moe.fused_moe_triton.layer", "FusedMoE", "run_moe_core")
"""Module, class and method."""


def declared(changes: Iterable[ChangeStatus]) -> dict[str, tuple[Count, ...]]:
    """What is counted of each change that is active here; what several share, of the first of them."""
    statuses = {said.change: said.status for said in changes}
    found: dict[str, tuple[Count, ...]] = {}
    for change in CHANGES:
        if statuses.get(change.name) in ACTIVE:
            known = {count.name for counts in found.values() for count in counts}
            found[change.name] = tuple(count for count in change.counts if count.name not in known)
    return found


def owner(count: Count) -> tuple[Any, str] | None:
    """Module or class, and the name there of what is wrapped; ``None`` where this release of the engine has it not.

    What an active change does in the engine, the engine has imported.
    """
    ours = count.module.startswith(__name__.partition(".")[0])
    found: Any = importlib.import_module(count.module) if ours else sys.modules.get(count.module)
    *classes, name = count.function.split(".")
    for each in classes:
        found = getattr(found, each, None)
    return (found, name) if hasattr(found, name) else None


class Tally:
    """Counts what changes do in this process, from :meth:`install` on.

    :param attempt: runs a step of counting; what goes wrong with it must end no server.
    """

    def __init__(self, counts: Iterable[Count], attempt: Callable[..., None] = lambda step, *args: step(*args)) -> None:
        self.counts, self._attempt = tuple(counts), attempt
        self._acts: dict[tuple[str, int | None, bool], Act] = {}
        self._ahead: dict[str, tuple[bool, int]] = {}
        self._layers: set[int] = set()
        self._layer: int | None = None
        self._largest: MoeInput | None = None

    @property
    def acted(self) -> Acted:
        """What was done, in the order in which each was done first."""
        return Acted(tuple(sorted(self._layers)), tuple(self._acts.values()), self._largest)

    def take(self) -> Acted:
        """What was done since the last time that this was asked."""
        found = self.acted
        self._acts, self._layers, self._largest = {}, set(), None
        return found

    def install(self, patcher: Patcher, starts: Callable[[Any], None] = lambda layer: None) -> None:
        """Wrap what is counted, and the layers.

        :param starts: called before the routed experts of a layer run, with the engine's ``FusedMoE``.
        """
        import torch

        is_compiling = torch.compiler.is_compiling
        for count in self.counts:
            if (found := owner(count)) is not None:
                patcher.wrap(*found, functools.partial(self._counted, count, is_compiling))
        module, cls, name = LAYER
        layer = getattr(importlib.import_module(module), cls)
        patcher.wrap(layer, name, functools.partial(self._around_layer, starts, is_compiling))

    def _counted(self, count: Count, is_compiling: Callable[[], bool], original: Callable[..., Any]) -> Any:
        @functools.wraps(original)
        def counted(*args: Any, **kwargs: Any) -> Any:
            result = original(*args, **kwargs)
            if not is_compiling():
                self._attempt(self._add, count, result, args, kwargs)
            return result

        return counted

    def _around_layer(
        self, starts: Callable[[Any], None], is_compiling: Callable[[], bool], original: Callable[..., Any]
    ) -> Any:
        @functools.wraps(original)
        def run_moe_core(layer: Any, *args: Any, **kwargs: Any) -> Any:
            if is_compiling():
                return original(layer, *args, **kwargs)
            self._attempt(self._enter, layer, *args, *kwargs.values())
            self._attempt(starts, layer)
            try:
                return original(layer, *args, **kwargs)
            finally:
                self._layer = None

        return run_moe_core

    def _enter(self, layer: Any, dispatched: Any) -> None:
        self._layer = int(layer.layer_id)
        self._layers.add(self._layer)
        for name, (captured, much) in self._ahead.items():
            self._record(name, captured, much)
        self._ahead = {}
        seen = input_of(dispatched)
        if seen is not None and (self._largest is None or seen.bytes > self._largest.bytes):
            self._largest = seen

    def _add(self, count: Count, result: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if much := int(count.amount(result, *args, **kwargs)):
            if count.before_layer and self._layer is None:
                self._ahead[count.name] = _capturing(), much
            else:
                self._record(count.name, _capturing(), much)

    def _record(self, name: str, captured: bool, much: int) -> None:
        key = (name, self._layer, captured)
        known = self._acts.get(key, Act(*key, 0, 0, 0))
        self._acts[key] = Act(*key, known.times + 1, max(known.most, much), known.total + much)


def _capturing() -> bool:
    import torch

    return bool(torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing())


def input_of(dispatched: Any) -> MoeInput | None:
    """What a layer's routed experts get; ``None`` where the dispatcher hands it over in another form.

    :param dispatched: the engine's dispatch output.
    """
    hidden_states: Any = getattr(dispatched, "hidden_states", None)
    routed: Any = getattr(getattr(dispatched, "topk_output", dispatched), "topk_ids", None)
    if getattr(hidden_states, "ndim", 0) != 2 or getattr(routed, "ndim", 0) != 2:
        return None
    tokens, hidden = hidden_states.shape
    return MoeInput(int(tokens), int(routed.shape[1]), int(hidden), int(hidden_states.itemsize))


# --- What is said of it -----------------------------------------------------------------------------------------------


def sentences(changes: Sequence[ChangeStatus], acted: Acted) -> list[str]:
    """What each active change did, a line each; nothing where nothing was observed."""
    if not (acted.layers or acted.acts):
        return []
    return [f"{name}: {_said(counts, acted)}" for name, counts in declared(changes).items() if counts]


def _said(counts: Iterable[Count], acted: Acted) -> str:
    done = [_done(count, acts, acted) for count in counts if (acts := of_count(acted, count.name))]
    if done:
        return "; ".join(done)
    reasons = [count.skip_reason(*acted.largest) for count in counts] if acted.largest else []
    return f"did nothing{next((f': {reason}' for reason in reasons if reason), '')}"


def of_count(acted: Acted, name: str) -> list[Act]:
    """What was done of one kind, by layer."""
    return sorted((act for act in acted.acts if act.name == name), key=lambda act: (act.layer is not None, act.layer))


def _done(count: Count, acts: Sequence[Act], acted: Acted) -> str:
    layers = {act.layer for act in acts if act.layer is not None}
    times = sum(act.times for act in acts)
    whole = "MoE layer" if len(acted.layers) == 1 else "MoE layers"
    said = [
        f"{count.description} in {len(layers)} of {len(acted.layers)} {whole}"
        if layers
        else f"{count.description} {times} times"
    ]
    if count.unit:
        said.append(f"up to {max(act.most for act in acts):,} {count.unit}")
    if all(act.captured for act in acts):
        said.append("as CUDA graphs were captured")
    return ", ".join(said)
