"""What identifies a configuration, and what of a server's arguments and variables does not."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from types import SimpleNamespace

import pytest
from sglang_moe_patches.core.patch import Plan, Status
from sglang_moe_patches.memory.kv_sizing import eligibility, fingerprint, record
from sglang_moe_patches.memory.kv_sizing.fingerprint import lasting_arguments, variables_of
from sglang_moe_patches.memory.kv_sizing.record import Record
from transformers import PretrainedConfig


def key(**arguments):
    return record.fingerprint({"arguments": lasting_arguments({"device": "cuda", "tp_size": 8, **arguments})})


NO_MATTER = {
    **{"decode_log_interval": 7, "download_dir": "/d", "enable_cache_report": True, "tokenizer_path": "/t"},
    **{"port": 5, "host": "a", "log_level": "error", "log_requests": True, "enable_metrics": True},
    **{"mem_fraction_static": 0.9, "skip_server_warmup": True, "weight_version": "7", "enable_trace": True},
    **{"extra_metric_labels": {"pod": "a-7"}, "otlp_traces_endpoint": "10.0.0.1:4317"},
    **{"export_metrics_to_file": True, "export_metrics_to_file_dir": "/d"},
    **{"enable_metrics_for_all_schedulers": True, "enable_request_time_stats_logging": True},
    **{"log_requests_format": "json", "uvicorn_access_log_exclude_prefixes": ["/health"]},
}


def test_what_a_restart_may_have_otherwise_is_no_other_configuration():
    assert lasting_arguments({"tp_size": 8, "some_new_flag": False, **NO_MATTER}) == {"tp_size": 8}
    assert len({key(), key(chunked_prefill_size=8192), key(tp_size=4), key(some_new_flag=True)}) == 4


def test_what_a_release_has_by_itself_is_not_said():
    @dataclass
    class Arguments:
        model_path: str
        tp_size: int = 1
        page_size: int | None = None

    struct = type("Struct", (), {"__struct_fields__": ("a", "b"), "__struct_defaults__": (5,)})
    given = Arguments("m", 2, 64)
    assert fingerprint.defaults_of(given) == {"tp_size": 1, "page_size": None}
    assert fingerprint.defaults_of(struct()) == {"b": 5}
    assert lasting_arguments(vars(given), fingerprint.defaults_of(given)) == {"tp_size": 2, "page_size": 64}
    assert lasting_arguments({"tp_size": 1}, fingerprint.defaults_of(given)) == {}


def test_no_secret_gets_into_a_file():
    kept = {"max_total_tokens": 5, "swa_full_tokens_ratio": 0.7}
    assert lasting_arguments(kept | dict.fromkeys(("api_key", "ssl_keyfile", "some_password", "hf_token"), "x")) == kept


def test_nested_arguments_lists_and_sets_count():
    class Backend(Enum):
        FULL = "full"
        DISABLED = "disabled"

    @dataclass
    class Phase:
        backend: Backend | str = "full"
        max_bs: int = 64

    @dataclass
    class Graphs:
        decode: Phase

    same = key(cuda_graph_config=Graphs(Phase()))
    assert same == key(cuda_graph_config={"decode": {"backend": "full", "max_bs": 64}})
    assert same == key(cuda_graph_config=Graphs(Phase(Backend.FULL)))
    phases = Phase(max_bs=128), Phase(Backend.DISABLED)
    values = [1, 2], [1, 3], {"a", "b"}, {"a", "c"}
    others = {key(cuda_graph_config=Graphs(phase)) for phase in phases} | {key(cuda_graph_bs=each) for each in values}
    assert len({same, key(), *others}) == 2 + len(phases) + len(values)
    assert key(some={"a", "b"}) == key(some={"b", "a"}) == key(some=["a", "b"])


SERVICE = {
    "SGLANG_SERVICE_HOST": "10.0.0.1",
    "SGLANG_ROUTER_SERVICE_PORT_HTTP": "80",
    "SGLANG_PORT_30000_TCP_ADDR": "10.0.0.1",
    "SGLANG_PORT": "tcp://10.0.0.1:30000",
}


@pytest.mark.parametrize(
    "others",
    [
        pytest.param(SERVICE, id="what an orchestrator injects"),
        pytest.param({"SGLANG_AUTH_TOKEN": "x"}, id="a secret"),
        pytest.param({"HOME": "/"}, id="what is nobody's here"),
        pytest.param({"SGLANG_MOE_PATCHES_OBSERVE": "/tmp"}, id="of a command"),
        pytest.param({eligibility.KV_SIZING.name: "auto"}, id="of this change"),
    ],
)
def test_what_an_orchestrator_injects_does_not_count(others):
    counts = {"SGLANG_MOE_PATCHES_SEGMENTS": "on", "SGLANG_X": "1"}
    assert variables_of(others | counts) == counts


def test_a_model_is_its_configuration_wherever_it_lies():
    configs = [PretrainedConfig(name_or_path=path, n=n) for path, n in (("/a", 1), ("/b", 1), ("/a", 2))]
    same, moved, another = (
        record.fingerprint({"model": number, "config": fingerprint.model_configuration(config)})
        for number, config in enumerate(configs)
    )
    assert same == moved != another
    # A draft that the model contains lies where the model does.
    drafts = ("/a", "/a"), ("/b", "/b"), ("/a", "/c")
    same, moved, another = (key(model_path=model, speculative_draft_model_path=draft) for model, draft in drafts)
    assert same == moved != another


@pytest.mark.parametrize("nested", [False, True], ids=["the model's own settings", "those of its language model"])
def test_a_configuration_that_the_engine_put_into_its_own_settings_counts_without_itself(nested):
    """As 0.5.17 and 0.5.18 do while they load a quantized checkpoint."""

    def config(path, bits):
        made = PretrainedConfig(name_or_path=path)
        quantized = made
        if nested:
            quantized = made.text_config = PretrainedConfig(name_or_path=path)
        quantized.quantization_config = {"bits": bits, "hf_config": made}
        return record.fingerprint({"config": fingerprint.model_configuration(made)})

    assert config("/a", 4) == config("/b", 4) != config("/a", 8)


def test_a_configuration_with_a_value_that_json_cannot_have_is_refused():
    with pytest.raises(TypeError, match="SimpleNamespace in the model's configuration has no JSON"):
        fingerprint.model_configuration(PretrainedConfig(kept=SimpleNamespace(n=1)))


def test_the_nearest_record_is_named_by_what_differs():
    inputs = {"torch": "2.11", "model": "a", "arguments": {"tp_size": 2, "page_size": 1}}
    known = {
        "x": Record(fingerprint_inputs={**inputs, "model": "b", "arguments": {"tp_size": 4}}),
        "y": Record(fingerprint_inputs={**inputs, "torch": "2.12"}),
    }
    assert fingerprint.nearest(inputs, known) == "the nearest record differs in torch"
    assert fingerprint.nearest(inputs, {"x": known["x"]}).endswith("arguments.page_size, arguments.tp_size")
    assert fingerprint.nearest(inputs, {}) == ""


def test_the_changes_that_patch_the_engine_count_and_why_others_do_not_is_no_matter():
    plans = {status.value: Plan(status) for status in Status}
    assert set(fingerprint.changes_of(plans)) == {"applied", "hardened"}
