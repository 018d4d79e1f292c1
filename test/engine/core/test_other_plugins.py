"""Tests of a server that also runs another plugin. If that plugin has patched a function or class, the changes do not
patch this function or class.

This module plays the other plugin. It patches the engine as plugins do: through the engine's hook registry, or by
setting attributes.
"""

from __future__ import annotations

import functools
import importlib
import inspect
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from conftest import installed, without_buffer
from harness import TensorRecorder, make_norms_out_of_place
from sglang_moe_patches import plugin
from sglang_moe_patches.changes import output_buffer
from sglang_moe_patches.core import engine as engine_code
from sglang_moe_patches.core import patch, runners
from sglang_moe_patches.core.dead_input import channel, probe
from sglang_moe_patches.core.patch import Patcher, Status
from sglang_moe_patches.core.variables import STRICT
from sglang_moe_patches.registry import CHANGES
from snapshot import PACKAGES, Snapshot, find_differences, restore, take_snapshot

pytestmark = [pytest.mark.every_release, pytest.mark.usefixtures("engine")]
PROMPTS = [[11, 7, 300, 42] * 9, list(range(40, 140))]
HOOK_POINT_IN_IMPORTING_MODULE = "compressed_tensors_w4a4_nvfp4_moe.prepare_static_weights_for_trtllm_fp4_moe"
"""Hook point of fp4-weights, as "module.function". The module does not define the function, but imports it from another
module. fp4-weights patches the function in both modules. If another plugin has patched the function in the importing
module, fp4-weights leaves that module alone, but may still patch the function in the defining module."""
LOADING = "model_runner.ModelRunner.load_model"
"""Name of the engine's method that loads a model. moe-workspace wraps this method to inspect the loaded model. The
inspection looks for modules that may read the experts' input on another CUDA stream. If another plugin has patched the
method, moe-workspace does not wrap the method, and assumes that every model has such a module."""
OFFERING = {
    *("DeepseekV2DecoderLayer", "DeepseekV2Model", probe.INITIALIZE),
    channel.ENGINE_OFFER,
    runners.POOL_QUERY,
}
"""Names of the functions and classes that offer dead inputs. If another plugin has patched one of them, a change may
still act, but without the offers of one model family, or without any offers."""
INACTIVE = {Status.UNSUPPORTED, Status.NATIVE, Status.NOT_NEEDED, Status.OFF}
HookPoint = tuple[Any, str]


class Recorder(Patcher):
    """Patcher that records which attributes of the engine and FlashInfer it replaces. It does not record attributes
    that it adds.
    """

    def __init__(self) -> None:
        super().__init__()
        self.hook_points: dict[tuple[int, str], HookPoint] = {}

    @property
    def touched(self) -> list[str]:
        return [dotted(*hook_point) for hook_point in self.hook_points.values()]

    def replace(self, owner: Any, name: str, new: Any) -> None:
        if dotted(owner).partition(".")[0] in PACKAGES:
            self.hook_points[id(owner), name] = (owner, name)
        super().replace(owner, name, new)


def hook_points_of(change: patch.Change) -> list[HookPoint]:
    """Return the attributes that a change replaces on this engine, as pairs of a module or class and a name."""
    plan = patch.probe(change)
    if plan.install is None:
        return []
    recorder = Recorder()
    plan.install(recorder)
    recorder.undo()
    return list(recorder.hook_points.values())


def dotted(owner: Any, name: str = "") -> str:
    place = f"{owner.__module__}.{owner.__qualname__}" if isinstance(owner, type) else owner.__name__
    return f"{place}.{name}" if name else place


# --- Patches of the other plugin -------------------------------------------------------------------------------------


def hook(target: str, new: Any, kind: str) -> None:
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    HookRegistry.register(target, new, HookType[kind])
    try:
        HookRegistry.apply_hooks()
    finally:
        del HookRegistry._hooks[target]
        HookRegistry._patched.discard(target)


def wrap(owner: Any, name: str) -> None:
    """Patch an attribute as most plugins do: assign a wrapper that calls the original."""
    original = getattr(owner, name)

    @functools.wraps(original)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        return original(*args, **kwargs)

    setattr(owner, name, wrapper)


def replace(owner: Any, name: str) -> None:
    """Patch an attribute: assign a function with the same signature, but without the attribute ``__wrapped__``, which
    would refer to the original.
    """
    original = getattr(owner, name)

    def replacement(*args: Any, **kwargs: Any) -> Any:
        return original(*args, **kwargs)

    replacement.__signature__ = inspect.signature(original)  # type: ignore[attr-defined]
    setattr(owner, name, replacement)


def hook_with(around: Any, owner: Any, name: str) -> None:
    hook(dotted(owner, name), around, "AROUND")


def hook_around(owner: Any, name: str) -> None:
    hook_with(lambda original, *args, **kwargs: original(*args, **kwargs), owner, name)


def hook_instead(owner: Any, name: str) -> None:
    original = getattr(owner, name)
    hook(dotted(owner, name), lambda *args, **kwargs: original(*args, **kwargs), "REPLACE")


def subclass(owner: Any, name: str) -> None:
    """Replace the class ``owner`` by a subclass that overrides nothing. If ``owner`` is a module, do nothing."""
    if isinstance(owner, type):
        hook(dotted(owner), type(owner)(owner.__name__, (owner,), {"__module__": __name__}), "REPLACE")


FOREIGN_PATCHES = [wrap, replace, hook_around, hook_instead, subclass]
BY_HOOKS = [hook_around, hook_instead]
"""Functions that patch an attribute through the engine's hook registry. The registry in turn assigns the attribute, as
:func:`wrap` and :func:`replace` do. CI tests every change with ``wrap`` and ``replace``. With the functions of this
list, CI tests only fp4-weights."""


@contextmanager
def another_plugin(
    foreign_patch: Callable[[Any, str], None], *hook_points: HookPoint, stock: Snapshot | None = None
) -> Iterator[None]:
    """Play another plugin while the ``with`` block runs: patch ``hook_points``, and restore the engine afterwards.

    :param foreign_patch: function that patches one attribute, such as :func:`wrap`.
    :param stock: a snapshot of the stock engine. If it is ``None``, a snapshot is taken.
    """
    before = take_snapshot() if stock is None else stock
    try:
        for owner, name in hook_points:
            foreign_patch(owner, name)
        yield
    finally:
        restore(before)


# --- Behaviour of the changes ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("change", "foreign_patch"),
    [
        pytest.param(
            change,
            foreign_patch,
            id=f"{change.name}-{foreign_patch.__name__}",
            marks=[pytest.mark.product] if foreign_patch in BY_HOOKS and change.name != "fp4-weights" else [],
        )
        for change in CHANGES
        for foreign_patch in FOREIGN_PATCHES
    ],
)
def test_a_hook_point_that_another_plugin_patched_is_left_alone(change, foreign_patch):
    """If another plugin has patched a hook point, a change does not patch this hook point. The other plugin patches one
    hook point at a time.

    - If the change needs the hook point, the change does nothing at all.
    - If the hook point only offers dead inputs, the change may act without these offers. The reason in the change's
      status then names the hook point.
    """
    hook_points = hook_points_of(change)
    if foreign_patch is subclass:
        hook_points = [hook_point for hook_point in hook_points if isinstance(hook_point[0], type)]
    if not hook_points:
        pytest.skip(f"{change.name} replaces no class on this engine release")
    taken, stock = [], take_snapshot()
    for owner, name in hook_points:
        with another_plugin(foreign_patch, (owner, name), stock=stock):
            outcome, patcher = patch.probe(change), Recorder()
            if outcome.install is not None:
                outcome.install(patcher)
            patcher.undo()
            if outcome.install is not None and (offering := {owner.__name__, name} & OFFERING):
                # The other plugin's hook patches the defining module. The same function may be imported elsewhere.
                is_left_alone = (
                    any(word in outcome.reason for word in offering) and dotted(owner, name) not in patcher.touched
                )
            else:
                is_left_alone = (
                    outcome.status is Status.UNSUPPORTED and bool(outcome.reason) and outcome.install is None
                )
            if dotted(owner, name).endswith((HOOK_POINT_IN_IMPORTING_MODULE, LOADING)):
                is_left_alone = is_left_alone or dotted(owner, name) not in patcher.touched
            if not is_left_alone:
                taken.append(f"{dotted(owner, name)}: {outcome}; touched {patcher.touched}")
    assert patch.probe(change).install is not None  # the other plugin's patches were undone
    assert taken == []


def layer_of(family: str) -> Any:
    module = importlib.import_module(f"sglang.srt.models.{family}")
    (layer,) = (kind for name, kind in vars(module).items() if name.endswith("DecoderLayer"))
    return layer


def probe_changes(*names: str) -> dict[str, patch.Plan]:
    return {change.name: patch.probe(change) for change in CHANGES if change.name in names}


def test_a_family_that_another_plugin_patches_is_left_out_and_the_changes_apply():
    layer = layer_of("qwen3_moe")
    assert probe.probe_layer(layer).family == "qwen3_moe"
    with another_plugin(replace, (layer, "forward")):
        for name, plan in probe_changes("output-buffer", "deferred-shared-experts", "moe-workspace").items():
            assert plan.install is not None, name
        with pytest.raises(engine_code.Unsupported, match=r"Qwen3MoeDecoderLayer.forward is wrapped or replaced by"):
            probe.probe_layer(layer)
    layer_of_another_plugin = type("Layer", (layer,), {"__module__": "another_plugin"})
    with pytest.raises(engine_code.Unsupported, match=r"Layer has code of another package: another_plugin\.Layer"):
        probe.probe_layer(layer_of_another_plugin)


@pytest.mark.parametrize("foreign_patch", [wrap, replace, subclass], ids=lambda foreign_patch: foreign_patch.__name__)
def test_without_deepseeks_layer_columns_apply_and_shared_experts_are_not_deferred(foreign_patch):
    layer = layer_of("deepseek_v2")
    with another_plugin(foreign_patch, (layer, "forward")):
        plans = probe_changes("output-buffer", "deferred-shared-experts", "moe-workspace")
        assert plans["deferred-shared-experts"].status is Status.UNSUPPORTED
        assert plans["output-buffer"].install is not None
        assert plans["moe-workspace"].status is Status.APPLIED
        assert all("DeepseekV2DecoderLayer" in plan.reason for plan in plans.values())


def find_layer_end(layer: Any) -> HookPoint:
    boundary = getattr(layer, "ffn_boundary", None)
    return (type(layer.layer_communicator), "postprocess_layer") if boundary is None else (type(boundary), "finish")


KEPT_TENSORS: dict[str, tuple[Callable[[Any], HookPoint], str, bool]] = {
    "the norm's result": (lambda layer: (type(layer.input_layernorm), "forward"), "result", True),
    "the norm kernel's result": (lambda layer: (type(layer.input_layernorm), "forward_native"), "result", True),
    "the input of the projection": (lambda layer: (type(layer.self_attn.qkv_proj), "forward"), "given", True),
    "the experts' result": (lambda layer: (type(layer.mlp.experts), "forward"), "result", False),
    "the expert kernels' result": (lambda layer: (type(layer.mlp.experts.quant_method), "apply"), "result", False),
    "the input of the last step": (find_layer_end, "given", False),
    "the result of the last step": (find_layer_end, "result", False),
}
"""Cases in which another plugin keeps a reference to a tensor. A key describes the tensor, such as "the norm's result".
A value is a tuple ``(find, keeps, in_place)``:

- ``find``: function that receives a decoder layer and returns the method that the plugin wraps.
- ``keeps``: ``given`` if the plugin keeps the method's arguments, ``result`` if it keeps the method's result.
- ``in_place``: whether the test keeps the engine's norms, which work in place. It is False if the next layer's norm
  would overwrite the kept tensor. The test then makes all norms write to new tensors.
"""


@pytest.mark.parametrize("kept", KEPT_TENSORS)
def test_a_tensor_that_another_plugin_keeps_is_not_overwritten(kept, engine, checkpoint, monkeypatch):
    path = checkpoint(family="qwen3-moe")
    find, keeps, in_place = KEPT_TENSORS[kept]
    owner, method = find(engine.load(path).model.layers[1])
    if not in_place:  # an in-place norm of the next layer would overwrite the kept tensor
        make_norms_out_of_place(monkeypatch)

    def tensors(arguments: Any) -> Iterator[torch.Tensor]:
        for one in arguments:
            yield from [one] if isinstance(one, torch.Tensor) else tensors(one) if isinstance(one, tuple) else []

    def keep(original: Any, *args: Any, **kwargs: Any) -> Any:
        if keeps == "given":
            for tensor in tensors([*args, *kwargs.values()]):
                keeper(tensor)
        result = original(*args, **kwargs)
        if keeps == "result":
            keeper(next(tensors([result]), None))
        return result

    answers, intact = [], []
    for change in (None, output_buffer.CHANGE):
        keeper = TensorRecorder()
        foreign_patch = functools.partial(hook_with, keep)
        with another_plugin(foreign_patch, (owner, method)), installed(change) if change else without_buffer():
            answers.append(engine.generate(engine.load(path), PROMPTS, 1))
        intact.append(keeper.list_intact())
    assert any(intact[0])
    assert intact[0] == intact[1]
    assert torch.equal(answers[0][1], answers[1][1])


@pytest.fixture
def all_hook_points_patched() -> Iterator[None]:
    with another_plugin(hook_around, *(hook_point for change in CHANGES for hook_point in hook_points_of(change))):
        yield


@pytest.fixture
def fresh_process(monkeypatch) -> None:
    """Make this process look new: no change is applied, and all changes are selected."""
    monkeypatch.setattr(plugin, "_plans", None)
    monkeypatch.delenv(patch.SELECT_VARIABLE)
    monkeypatch.delenv(STRICT.name, raising=False)
    monkeypatch.delenv("SGLANG_MOE_PATCHES_OBSERVE", raising=False)


@pytest.mark.usefixtures("fresh_process")
def test_a_server_with_another_plugin_starts_and_answers_as_without_this_package(engine, checkpoint, request, caplog):
    stock = engine.generate(engine.load(checkpoint()), PROMPTS, 2)
    request.getfixturevalue("all_hook_points_patched")
    before = take_snapshot()
    plans = plugin.activate(engine.server_args)
    assert {plan.status for plan in plans.values()} <= INACTIVE
    assert plans["output-buffer"].status is Status.UNSUPPORTED
    assert find_differences(before) == []
    assert caplog.text.count("output-buffer: unsupported, because") == 1
    tokens, logits = engine.generate(engine.load(checkpoint()), PROMPTS, 2)
    assert tokens == stock[0]
    assert torch.equal(logits, stock[1])


@pytest.mark.usefixtures("fresh_process", "all_hook_points_patched")
def test_a_strict_server_with_another_plugin_does_not_start(engine, monkeypatch):
    monkeypatch.setitem(os.environ, STRICT.name, "1")
    before = take_snapshot()
    with pytest.raises(patch.PatchError, match="output-buffer: unsupported, because"):
        plugin.activate(engine.server_args)
    assert find_differences(before) == []
