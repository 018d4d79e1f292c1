"""Tests of ``test/tools/family_scan.py``. The scan finds model families whose layers may offer their input tensor for
reuse, because nobody reads it any more (a *dead input*)."""

from __future__ import annotations

import family_scan
import pytest

LAYER = """
class Block:
    def __init__(self, config):
        self.experts = get_moe_impl_class(None)(top_k=2)


class {name}Layer:
    def __init__(self, config):
        self.mlp = Block(config)

    def forward(self, positions, hidden_states, forward_batch, residual):
        hidden_states, residual = self.layer_communicator.prepare_attn(hidden_states, residual, forward_batch)
        hidden_states = self.self_attn(hidden_states)
        hidden_states, residual = self.layer_communicator.prepare_mlp(hidden_states, residual, forward_batch)
        return self.mlp(hidden_states), residual


class {name}Model:
    def __init__(self, config, layer={name}Layer):
        self.layers = make_layers(layer)

    def forward(self, hidden_states, residual, forward_batch):
        for i in range(len(self.layers)):
            layer = self.layers[i]
            hidden_states, residual = layer(None, hidden_states, forward_batch, residual)
        return hidden_states
"""
STAGES = """
class StageLayer(ALayer):
    def __init__(self, config):
        self.mlp = Block(config)

    @classmethod
    def facts(cls):
        return declare_attn({told}), declare_ffn(sparse=True)

    def forward(self, hidden_states, forward_batch):
        hidden_states = self.attn_boundary.prepare(hidden_states, forward_batch)
        hidden_states = self.self_attn(hidden_states)
        hidden_states = self.ffn_boundary.prepare(hidden_states, forward_batch)
        return self.mlp(hidden_states)


class StageModel(AModel):
    def __init__(self, config):
        super().__init__(config, StageLayer)
"""


@pytest.fixture
def scan(tmp_path):
    def scan(**modules: str) -> dict[str, str]:
        for name, source in modules.items():
            (tmp_path / f"{name}.py").write_text(source)
        return family_scan.scan(tmp_path)

    return scan


def test_a_family_offers_if_every_proof_holds_and_otherwise_gives_a_reason(scan):
    source = LAYER.format(name="A")
    attends, binds = "        hidden_states = self.self_attn", "            layer = self"
    assert scan(
        a=source,
        reads_it_again=source.replace("return self.mlp(", "return hidden_states + self.mlp("),
        not_at_first=source.replace("hidden_states, residual = self.layer_communicator.prepare_attn", "x = self.norm"),
        keeps_it=source.replace(attends, f"        self.kept = hidden_states\n{attends}"),
        loop=source.replace(binds, f"            self.seen.append(hidden_states)\n{binds}"),
        two=source.replace("(top_k=2)", "(top_k=2)\n        self.others = FusedMoE(top_k=2)"),
        dense=source.replace("get_moe_impl_class(None)", "MLP"),
    ) == {
        "a": "",
        "reads_it_again": "",  # here ``hidden_states`` is the output of the norm after attention, not the input
        "not_at_first": "ALayer may read its input after the first norm",
        "keeps_it": "ALayer may read attention's input after attention",
        "loop": "AModel may keep its layers' inputs",
        "two": "ALayer has 2 modules of routed experts",
    }


@pytest.mark.parametrize(
    ("told", "plain"),
    [
        ("", True),
        ("read=NORM_READOUT", True),
        ("read=residual.attn_readout", True),  # the model's configuration decides, so it may be a plain sum
        ("read=UNFUSED_NORM_READOUT", False),
        ("update=PostNormAdd(norm)", False),
    ],
)
def test_a_residual_that_is_no_plain_sum_is_refused(scan, told, plain):
    imports = "from sglang.srt.models.a import ALayer, AModel, Block\n"
    found = scan(a=LAYER.format(name="A"), b=imports + STAGES.format(told=told))
    assert found == {"a": "", "b": "" if plain else "the residual of StageLayer may not be a plain sum"}


def test_other_modules_are_scanned_if_one_cannot_be_parsed(scan):
    imports = "from sglang.srt.models.broken import Something\nfrom sglang.srt.models.gone import Another\n"
    found = scan(a=imports + LAYER.format(name="A"), broken="class Something(:\n    get_moe_impl_class")
    assert found == {"a": ""}


@pytest.mark.parametrize(
    ("ours", "theirs"),
    [
        ("from sglang.srt.models.b import Other", "from sglang.srt.models.a import Other"),
        (
            "from sglang.srt.models.b import TABLE\nOther = [TABLE]",
            "from sglang.srt.models.a import Other\nTABLE = {1: Other}",
        ),
        (
            "from sglang.srt.models.b import Base\nclass Other(Base): pass",
            "from sglang.srt.models.a import Other\nclass Base(Other): pass",
        ),
    ],
)
def test_the_scan_ends_although_modules_import_each_other(scan, ours, theirs):
    uses = LAYER.format(name="A").replace("        self.layers", "        self.other = Other()\n        self.layers")
    assert scan(a=f"{ours}\n{uses}", b=theirs) == {"a": ""}
