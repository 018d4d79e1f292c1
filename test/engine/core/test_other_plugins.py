"""Beside another plugin of the engine's: what it has wrapped, replaced or subclassed is left to it, with a reason.

The other plugin is this module, and it works as plugins do: through the engine's own hook registry, or by setting an
attribute.
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
from harness import Keeper, norms_out_of_place
from sglang_moe_patches import plugin
from sglang_moe_patches.changes import output_buffer
from sglang_moe_patches.core import engine as engine_code
from sglang_moe_patches.core import patch, runners
from sglang_moe_patches.core.dead_input import channel, probe
from sglang_moe_patches.core.patch import Patcher, Status
from sglang_moe_patches.core.variables import STRICT
from sglang_moe_patches.registry import CHANGES
from snapshot import PACKAGES, Contents, contents, differences, put_back

pytestmark = [pytest.mark.every_release, pytest.mark.usefixtures("engine")]
PROMPTS = [[11, 7, 300, 42] * 9, list(range(40, 140))]
BY_NAME = "compressed_tensors_w4a4_nvfp4_moe.prepare_static_weights_for_trtllm_fp4_moe"
"""A second name for a function of the engine's: the change may go on under the first one, and leave this to whoever has
replaced it."""
LOADING = "model_runner.ModelRunner.load_model"
"""Where moe-workspace looks at a model; where it cannot, it writes late in any model."""
OFFERING = {
    *("DeepseekV2DecoderLayer", "DeepseekV2Model", probe.INITIALIZE),
    channel.ENGINE_OFFER,
    runners.IN_POOL,
}
"""What offers dead inputs: a change may do without that of one family, or without any."""
LEFT_ALONE = {Status.UNSUPPORTED, Status.NATIVE, Status.NOT_NEEDED, Status.OFF}
HookPoint = tuple[Any, str]


class Recorder(Patcher):
    """Remembers what it replaced of the engine's. What is only added, the engine does not have; PyTorch is nobody's."""

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
    """What the change's plan replaces on this engine: (module or class, attribute)."""
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


# --- What the other plugin does --------------------------------------------------------------------------------------


def hook(target: str, new: Any, kind: str) -> None:
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    HookRegistry.register(target, new, HookType[kind])
    try:
        HookRegistry.apply_hooks()
    finally:
        del HookRegistry._hooks[target]
        HookRegistry._patched.discard(target)


def wraps(owner: Any, name: str) -> None:
    """By hand, as most do."""
    original = getattr(owner, name)

    @functools.wraps(original)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        return original(*args, **kwargs)

    setattr(owner, name, wrapper)


def replaces(owner: Any, name: str) -> None:
    """By hand, with a function that takes the same and says nothing of the one before."""
    original = getattr(owner, name)

    def replacement(*args: Any, **kwargs: Any) -> Any:
        return original(*args, **kwargs)

    replacement.__signature__ = inspect.signature(original)  # type: ignore[attr-defined]
    setattr(owner, name, replacement)


def hook_with(around: Any, owner: Any, name: str) -> None:
    hook(dotted(owner, name), around, "AROUND")


def hooks_around(owner: Any, name: str) -> None:
    hook_with(lambda original, *args, **kwargs: original(*args, **kwargs), owner, name)


def hooks_instead(owner: Any, name: str) -> None:
    original = getattr(owner, name)
    hook(dotted(owner, name), lambda *args, **kwargs: original(*args, **kwargs), "REPLACE")


def subclasses(owner: Any, name: str) -> None:
    """The class by one that inherits everything. What belongs to a module has no class."""
    if isinstance(owner, type):
        hook(dotted(owner), type(owner)(owner.__name__, (owner,), {"__module__": __name__}), "REPLACE")


TAKEOVERS = [wraps, replaces, hooks_around, hooks_instead, subclasses]
BY_HOOKS = [hooks_around, hooks_instead]
"""They end in the same assignment as the others: for one change with two hook points that is seen every time."""


@contextmanager
def another_plugin(
    takeover: Callable[[Any, str], None], *hook_points: HookPoint, stock: Contents | None = None
) -> Iterator[None]:
    """:param stock: what the engine holds without it, where that is known."""
    before = contents() if stock is None else stock
    try:
        for owner, name in hook_points:
            takeover(owner, name)
        yield
    finally:
        put_back(before)


# --- What we then do -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("change", "takeover"),
    [
        pytest.param(
            change,
            takeover,
            id=f"{change.name}-{takeover.__name__}",
            marks=[pytest.mark.product] if takeover in BY_HOOKS and change.name != "fp4-weights" else [],
        )
        for change in CHANGES
        for takeover in TAKEOVERS
    ],
)
def test_a_hook_point_that_another_plugin_patched_is_left_alone(change, takeover):
    """One hook point after another: a single one is enough for the change to do nothing at all, rather than half of it.
    Where dead inputs are offered, what the change does without is named."""
    hook_points = hook_points_of(change)
    if takeover is subclasses:
        hook_points = [hook_point for hook_point in hook_points if isinstance(hook_point[0], type)]
    if not hook_points:
        pytest.skip(f"{change.name} replaces nothing of the kind on this engine release")
    taken, stock = [], contents()
    for owner, name in hook_points:
        with another_plugin(takeover, (owner, name), stock=stock):
            outcome, patcher = patch.probe(change), Recorder()
            if outcome.install is not None:
                outcome.install(patcher)
            patcher.undo()
            if outcome.install is not None and (offering := {owner.__name__, name} & OFFERING):
                # A hook stands where the function is defined, whichever module has it.
                left = any(word in outcome.reason for word in offering) and dotted(owner, name) not in patcher.touched
            else:
                left = outcome.status is Status.UNSUPPORTED and bool(outcome.reason) and outcome.install is None
            if dotted(owner, name).endswith((BY_NAME, LOADING)):
                left = left or dotted(owner, name) not in patcher.touched
            if not left:
                taken.append(f"{dotted(owner, name)}: {outcome}; touched {patcher.touched}")
    assert patch.probe(change).install is not None  # what the other plugin did is undone
    assert taken == []


def layer_of(family: str) -> Any:
    module = importlib.import_module(f"sglang.srt.models.{family}")
    (layer,) = (kind for name, kind in vars(module).items() if name.endswith("DecoderLayer"))
    return layer


def plans(*names: str) -> dict[str, patch.Plan]:
    return {change.name: patch.probe(change) for change in CHANGES if change.name in names}


def test_a_family_that_another_plugin_patches_is_left_out_and_the_changes_apply():
    layer = layer_of("qwen3_moe")
    assert probe.probe_layer(layer).family == "qwen3_moe"
    with another_plugin(replaces, (layer, "forward")):
        for name, plan in plans("output-buffer", "deferred-shared-experts", "moe-workspace").items():
            assert plan.install is not None, name
        with pytest.raises(engine_code.Unsupported, match=r"Qwen3MoeDecoderLayer.forward is wrapped or replaced by"):
            probe.probe_layer(layer)
    somebody_elses = type("Layer", (layer,), {"__module__": "another_plugin"})
    with pytest.raises(engine_code.Unsupported, match=r"Layer is another_plugin\.Layer"):
        probe.probe_layer(somebody_elses)


@pytest.mark.parametrize("takeover", [wraps, replaces, subclasses], ids=lambda takeover: takeover.__name__)
def test_without_deepseeks_layer_columns_apply_and_shared_experts_are_not_deferred(takeover):
    layer = layer_of("deepseek_v2")
    with another_plugin(takeover, (layer, "forward")):
        found = plans("output-buffer", "deferred-shared-experts", "moe-workspace")
        assert found["deferred-shared-experts"].status is Status.UNSUPPORTED
        assert found["output-buffer"].install is not None
        assert found["moe-workspace"].status is Status.APPLIED
        assert all("DeepseekV2DecoderLayer" in plan.reason for plan in found.values())


def ends(layer: Any) -> HookPoint:
    boundary = getattr(layer, "ffn_boundary", None)
    return (type(layer.layer_communicator), "postprocess_layer") if boundary is None else (type(boundary), "finish")


KEPT: dict[str, tuple[Callable[[Any], HookPoint], str, bool]] = {
    "its norm's result": (lambda layer: (type(layer.input_layernorm), "forward"), "result", True),
    "its norm's kernel's result": (lambda layer: (type(layer.input_layernorm), "forward_native"), "result", True),
    "what it projects": (lambda layer: (type(layer.self_attn.qkv_proj), "forward"), "given", True),
    "the result of its experts": (lambda layer: (type(layer.mlp.experts), "forward"), "result", False),
    "the kernels' result": (lambda layer: (type(layer.mlp.experts.quant_method), "apply"), "result", False),
    "what ends it is given": (ends, "given", False),
    "what it ends with": (ends, "result", False),
}
"""Of a layer's parts: one whose method another plugin wraps, what it keeps of it, and whether norms are in place."""


@pytest.mark.parametrize("kept", KEPT)
def test_a_tensor_that_another_plugin_keeps_is_not_overwritten(kept, engine, checkpoint, monkeypatch):
    path = checkpoint(family="qwen3-moe")
    find, keeps, in_place = KEPT[kept]
    owner, method = find(engine.load(path).model.layers[1])
    if not in_place:  # else the next layer's norm writes over it
        norms_out_of_place(monkeypatch)

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
        keeper = Keeper()
        takeover = functools.partial(hook_with, keep)
        with another_plugin(takeover, (owner, method)), installed(change) if change else without_buffer():
            answers.append(engine.generate(engine.load(path), PROMPTS, 1))
        intact.append(keeper.intact())
    assert any(intact[0])
    assert intact[0] == intact[1]
    assert torch.equal(answers[0][1], answers[1][1])


@pytest.fixture
def everything_is_somebody_elses() -> Iterator[None]:
    with another_plugin(hooks_around, *(hook_point for change in CHANGES for hook_point in hook_points_of(change))):
        yield


@pytest.fixture
def fresh_process(monkeypatch) -> None:
    """Nothing was activated in it, and all changes are selected."""
    monkeypatch.setattr(plugin, "_plans", None)
    monkeypatch.delenv(patch.SELECT_VARIABLE)
    monkeypatch.delenv(STRICT.name, raising=False)
    monkeypatch.delenv("SGLANG_MOE_PATCHES_OBSERVE", raising=False)


@pytest.mark.usefixtures("fresh_process")
def test_a_server_with_another_plugin_starts_and_answers_as_without_this_package(engine, checkpoint, request, caplog):
    stock = engine.generate(engine.load(checkpoint()), PROMPTS, 2)
    request.getfixturevalue("everything_is_somebody_elses")
    before = contents()
    plans = plugin.activate(engine.server_args)
    assert {plan.status for plan in plans.values()} <= LEFT_ALONE
    assert plans["output-buffer"].status is Status.UNSUPPORTED
    assert differences(before) == []
    assert caplog.text.count("output-buffer: unsupported, because") == 1
    tokens, logits = engine.generate(engine.load(checkpoint()), PROMPTS, 2)
    assert tokens == stock[0]
    assert torch.equal(logits, stock[1])


@pytest.mark.usefixtures("fresh_process", "everything_is_somebody_elses")
def test_a_strict_server_with_another_plugin_does_not_start(engine, monkeypatch):
    monkeypatch.setitem(os.environ, STRICT.name, "1")
    before = contents()
    with pytest.raises(patch.PatchError, match="output-buffer: unsupported, because"):
        plugin.activate(engine.server_args)
    assert differences(before) == []
