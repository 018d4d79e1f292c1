"""Count what each change does in a running server: how often, and in which MoE layers.

Each change declares the functions to count (:class:`sglang_moe_patches.core.patch.Count`). In an observed process
(:mod:`.forwards`) these functions are wrapped. Other processes have no wrappers, so counting costs them nothing.

The engine calls every MoE runner in ``FusedMoE.run_moe_core``. This method is wrapped, too, so that the counter knows
which MoE layer runs. The counter assigns each call of a counted function to this layer.

A CUDA graph runs Python code only when it is captured, so the actions of a replayed graph are not counted.
"""

from __future__ import annotations

import functools
import importlib
import sys
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from sglang_moe_patches.core.patch import ACTIVE, Count, Patcher
from sglang_moe_patches.lab.observers.events import Act, Acts, ChangeStatus, MoeInput
from sglang_moe_patches.registry import CHANGES

LAYER = ("sglang.srt.layers.moe.fused_moe_triton.layer", "FusedMoE", "run_moe_core")
"""Module, class and method of the engine that run the routed experts of a MoE layer."""


def active_counts(statuses: Iterable[ChangeStatus]) -> dict[str, tuple[Count, ...]]:
    """Return the counters (:class:`Count`) of each active change. The key is the change's name.

    If several active changes share an action, only the first of these changes keeps the action's counter.
    """
    by_change = {status.change: status.status for status in statuses}
    counts: dict[str, tuple[Count, ...]] = {}
    for change in CHANGES:
        if by_change.get(change.name) in ACTIVE:
            known = {count.name for earlier in counts.values() for count in earlier}
            counts[change.name] = tuple(count for count in change.counts if count.name not in known)
    return counts


def find_owner(count: Count) -> tuple[Any, str] | None:
    """Find the module or class whose attribute is the counted function.

    The search imports no modules of the engine, because an active change has already imported the modules that it uses.

    :returns: the module or class, and the attribute's name; ``None`` if this release of the engine has no such
        function.
    """
    ours = count.module.startswith(__name__.partition(".")[0])
    owner: Any = importlib.import_module(count.module) if ours else sys.modules.get(count.module)
    *classes, name = count.function.split(".")
    for class_name in classes:
        owner = getattr(owner, class_name, None)
    return (owner, name) if hasattr(owner, name) else None


class Tally:
    """Counter of the changes' actions in this process. It begins to count in :meth:`install`.

    :param counts: functions to count.
    :param attempt: function that runs one counting step. It must catch the step's exceptions, because counting must not
        end a server.
    """

    def __init__(self, counts: Iterable[Count], attempt: Callable[..., None] = lambda step, *args: step(*args)) -> None:
        self.counts, self._attempt = tuple(counts), attempt
        self._acts: dict[tuple[str, int | None, bool], Act] = {}
        self._pending: dict[str, tuple[bool, int]] = {}
        """Actions that happened before a MoE layer (:attr:`Count.before_layer`). The actions are counted for the MoE
        layer that runs next. The key is the action's name. The value is a tuple: whether a CUDA graph was being
        captured, and the amount of the action (:attr:`Count.amount`)."""
        self._layers: set[int] = set()
        self._layer: int | None = None
        """Index of the MoE layer that runs now; ``None`` outside of all layers."""
        self._largest: MoeInput | None = None

    @property
    def acted(self) -> Acts:
        """Actions of the changes since the last call of :meth:`drain`, in the order in which they first happened."""
        return Acts(tuple(sorted(self._layers)), tuple(self._acts.values()), self._largest)

    def drain(self) -> Acts:
        """Return the actions of the changes since the last call of this method, and clear them."""
        drained = self.acted
        self._acts, self._layers, self._largest = {}, set(), None
        return drained

    def install(self, patcher: Patcher, on_layer: Callable[[Any], None] = lambda layer: None) -> None:
        """Wrap the counted functions and the engine's MoE layers.

        :param on_layer: function that is called with the engine's ``FusedMoE`` before the routed experts of a layer
            run.
        """
        import torch

        is_compiling = torch.compiler.is_compiling
        for count in self.counts:
            if (owner := find_owner(count)) is not None:
                patcher.wrap(*owner, functools.partial(self._wrap_counted, count, is_compiling))
        module, cls, name = LAYER
        layer = getattr(importlib.import_module(module), cls)
        patcher.wrap(layer, name, functools.partial(self._wrap_layer, on_layer, is_compiling))

    def _wrap_counted(self, count: Count, is_compiling: Callable[[], bool], original: Callable[..., Any]) -> Any:
        @functools.wraps(original)
        def counted(*args: Any, **kwargs: Any) -> Any:
            result = original(*args, **kwargs)
            if not is_compiling():
                self._attempt(self._count_call, count, result, args, kwargs)
            return result

        return counted

    def _wrap_layer(
        self, on_layer: Callable[[Any], None], is_compiling: Callable[[], bool], original: Callable[..., Any]
    ) -> Any:
        @functools.wraps(original)
        def run_moe_core(layer: Any, *args: Any, **kwargs: Any) -> Any:
            if is_compiling():
                return original(layer, *args, **kwargs)
            self._attempt(self._enter_layer, layer, *args, *kwargs.values())
            self._attempt(on_layer, layer)
            try:
                return original(layer, *args, **kwargs)
            finally:
                self._layer = None

        return run_moe_core

    def _enter_layer(self, layer: Any, dispatch_output: Any) -> None:
        self._layer = int(layer.layer_id)
        self._layers.add(self._layer)
        for name, (captured, amount) in self._pending.items():
            self._add(name, captured, amount)
        self._pending = {}
        moe_input = read_input(dispatch_output)
        if moe_input is not None and (
            self._largest is None or moe_input.expert_rows_bytes > self._largest.expert_rows_bytes
        ):
            self._largest = moe_input

    def _count_call(self, count: Count, result: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if amount := int(count.amount(result, *args, **kwargs)):
            if count.before_layer and self._layer is None:
                self._pending[count.name] = _is_capturing(), amount
            else:
                self._add(count.name, _is_capturing(), amount)

    def _add(self, name: str, captured: bool, amount: int) -> None:
        key = (name, self._layer, captured)
        known = self._acts.get(key, Act(*key, 0, 0, 0))
        self._acts[key] = Act(*key, known.times + 1, max(known.most, amount), known.total + amount)


def _is_capturing() -> bool:
    import torch

    return bool(torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing())


def read_input(dispatch_output: Any) -> MoeInput | None:
    """Return the sizes of the input of a layer's routed experts.

    :param dispatch_output: output of the engine's token dispatcher.
    :returns: ``None`` if the output has no matrices ``hidden_states`` and ``topk_ids``.
    """
    hidden_states: Any = getattr(dispatch_output, "hidden_states", None)
    topk_ids: Any = getattr(getattr(dispatch_output, "topk_output", dispatch_output), "topk_ids", None)
    if getattr(hidden_states, "ndim", 0) != 2 or getattr(topk_ids, "ndim", 0) != 2:
        return None
    tokens, hidden = hidden_states.shape
    return MoeInput(int(tokens), int(topk_ids.shape[1]), int(hidden), int(hidden_states.itemsize))


# --- Sentences for a report -------------------------------------------------------------------------------------------


def describe_actions(statuses: Sequence[ChangeStatus], acted: Acts) -> list[str]:
    """Return one sentence for each active change that has counters. The sentence lists the change's actions, or says
    why the change did nothing. The list is empty if nothing was observed."""
    if not (acted.layers or acted.acts):
        return []
    return [f"{name}: {_describe_change(counts, acted)}" for name, counts in active_counts(statuses).items() if counts]


def _describe_change(counts: Iterable[Count], acted: Acts) -> str:
    parts = [_describe_count(count, acts, acted) for count in counts if (acts := select_acts(acted, count.name))]
    if parts:
        return "; ".join(parts)
    reasons = [count.skip_reason(*acted.largest) for count in counts] if acted.largest else []
    return f"did nothing{next((f': {reason}' for reason in reasons if reason), '')}"


def select_acts(acted: Acts, name: str) -> list[Act]:
    """Return the records of one action, sorted by layer.

    :param name: name of the action (:class:`~sglang_moe_patches.core.patch.Count`).
    """
    return sorted((act for act in acted.acts if act.name == name), key=lambda act: (act.layer is not None, act.layer))


def _describe_count(count: Count, acts: Sequence[Act], acted: Acts) -> str:
    layers = {act.layer for act in acts if act.layer is not None}
    times = sum(act.times for act in acts)
    noun = "MoE layer" if len(acted.layers) == 1 else "MoE layers"
    parts = [
        f"{count.description} in {len(layers)} of {len(acted.layers)} {noun}"
        if layers
        else f"{count.description} {times} times"
    ]
    if count.unit:
        parts.append(f"up to {max(act.most for act in acts):,} {count.unit}")
    if all(act.captured for act in acts):
        parts.append("while CUDA graphs were captured")
    return ", ".join(parts)
