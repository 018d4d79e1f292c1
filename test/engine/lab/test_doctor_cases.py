"""Servers that people start, and what ``doctor --model`` must say of each: one table, asked of the installed engine.

Figures come from public facts: a model's ``config.json``, a GPU's memory, and the formulas in the engine's code.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest
from common import doctor_answers
from conftest import RELEASE
from releases import ALL
from sglang_moe_patches.lab.predict import config, model_report

Report = dict[str, Any]


def public(name: str, **changed: Any) -> dict[str, Any]:
    """A model's ``config.json``."""
    return config.load_model(name)[0] | changed


def row(report: Report, change: str) -> dict[str, Any]:
    return next(each for each in report["changes"] if each["name"] == change)


def expert_bytes(model: dict[str, Any], ranks: int) -> float:
    """A byte a weight: three matrices of each routed expert, of all layers that have some."""
    layers = model["num_hidden_layers"] - model["first_k_dense_replace"]
    return layers * model["n_routed_experts"] * 3 * model["hidden_size"] * model["moe_intermediate_size"] / ranks


R1, V4 = "deepseek-ai/DeepSeek-R1", "deepseek-ai/DeepSeek-V4-Flash"


def does_not_start(report: Report, least: float | None) -> None:
    """For want of memory, with the fraction that would do, in a line that says whose fraction is in force."""
    fit = report["fit"]
    assert not fit["starts"]
    assert fit["least_fraction"] == least
    line = model_report.describe_fit(fit)
    assert line.startswith("Does not start: ")
    if least is not None:
        assert f"the {'given' if fit['given'] else 'engine'}" in line
        assert f"at least about {least}" in line


def a_given_fraction_below_the_weights(report: Report) -> None:
    does_not_start(report, 0.57)
    assert report["fit"]["given"]
    experts = expert_bytes(public(R1), 8)
    assert experts < report["fit"]["weights"] < 1.05 * experts


def a_rule_that_leaves_nothing(report: Report) -> None:
    """1.5 MB are set aside for each token of the chunk, which the rule does not divide by the ranks."""
    fit = report["fit"]
    does_not_start(report, 0.72)
    assert not fit["given"]
    assert fit["memory"] * fit["fraction"] == pytest.approx(75.5e9, rel=0.03)
    assert fit["weights"] == pytest.approx(107.1e9, rel=0.02)


def windows_at_four_fifths(report: Report) -> None:
    """Every other layer of 36 has a window; a rank has one head of 64 columns, keys and values, in 16 bits."""
    fit = report["fit"]
    token_bytes = 2 * 2 * 64 * (18 + 0.8 * 18)
    assert fit["tokens"] == pytest.approx((fit["memory"] * fit["fraction"] - fit["weights"]) / token_bytes, rel=0.001)


def is_not_sized_because(reason: str, *, given: bool = False) -> Callable[[Report], None]:
    def check(report: Report) -> None:
        sizing = row(report, "kv-sizing")
        assert not sizing["acts"]
        assert reason in sizing["reason"]
        assert sizing["reason"].startswith(f"the {'given' if given else 'engine'}")
        assert f"the {'given' if given else 'engine'}" in model_report.describe_fit(report["fit"])

    return check


def fewer_tokens_than_a_request(report: Report) -> None:
    fit = report["fit"]
    assert 0 < fit["tokens"] < fit["context"] == 202_752
    assert "fewer than the longest request has (202,752)" in model_report.describe_fit(fit)


@dataclass(frozen=True)
class Case:
    """A server.

    :param check: of what doctor says.
    :param since: the first release that has the model, or of which it is true.
    :param env: variables beside those that turn every change on.
    """

    model: dict[str, Any]
    flags: str
    check: Callable[[Report], None]
    gpu: str = "h200"
    since: str = ALL[0]
    env: dict[str, str] = field(default_factory=dict)


OFF = {"SGLANG_MOE_PATCHES_KV_SIZING": "off"}
ATTENTION = "--tp 8 --dp 8 --enable-dp-attention"
GLM = public("zai-org/GLM-5.2", quantization_config=public("zai-org/GLM-5.1-FP8")["quantization_config"])
CASES = {
    "a given fraction below the weights": Case(
        public(R1), "--tp 8 --mem-fraction-static 0.5", a_given_fraction_below_the_weights
    ),
    "the same, abbreviated": Case(public(R1), "--tp 8 --mem-fraction 0.5", a_given_fraction_below_the_weights),
    "more than a GPU has": Case(public(R1), "--tp 8", lambda report: does_not_start(report, None), gpu="h100"),
    "a rule that leaves nothing": Case(
        GLM, f"{ATTENTION} --chunked-prefill-size 32768", a_rule_that_leaves_nothing, since="0.5.12.post1", env=OFF
    ),
    "sliding windows": Case(public("openai/gpt-oss-120b"), "--tp 8", windows_at_four_fifths, gpu="h100"),
    "a context that is too long": Case(public("zai-org/GLM-4.7"), ATTENTION, fewer_tokens_than_a_request, env=OFF),
    "a KV cache of another kind": Case(
        public(V4),
        "--tp 4 --moe-runner-backend marlin",
        is_not_sized_because("KV caches of the kind DeepSeekV4TokenToKVPool are not known"),
        since="0.5.12.post1",
    ),
    "prefill alone": Case(
        public(R1),
        "--tp 8 --mem-fraction-static 0.8 --disaggregation-mode prefill",
        is_not_sized_because("of --disaggregation-mode", given=True),
    ),
}


def asked() -> dict[str, Case]:
    """The cases of this release."""
    return {name: case for name, case in CASES.items() if ALL.index(case.since) <= ALL.index(RELEASE)}


@pytest.fixture(scope="module")
def reports() -> dict[str, Report]:
    servers = [
        {"model": name, "config": case.model, "gpu": case.gpu, "flags": case.flags.split(), "env": case.env}
        for name, case in asked().items()
    ]
    return {server["model"]: report for server, report in doctor_answers.ask_each(servers)}


@pytest.mark.long("an engine query for each case, made when the first is looked at")
@pytest.mark.every_release
@pytest.mark.parametrize("name", asked())
def test_doctor_says_of_a_server_what_the_engine_would_do(name: str, reports: dict[str, Report]) -> None:
    report = reports[name]
    assert "refused" not in report, report
    CASES[name].check(report)
