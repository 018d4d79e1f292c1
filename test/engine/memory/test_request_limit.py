"""Check on each release that kv-sizing recognizes the engine's penalized requests and batches."""

from __future__ import annotations

from array import array
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from sglang_moe_patches.core import engine as engine_code
from sglang_moe_patches.memory.kv_sizing import serving

VOCABULARY = 100
PENALTIES = ({"presence_penalty": 0.5}, {"frequency_penalty": 0.5}, {"repetition_penalty": 1.1}, {"min_new_tokens": 2})
REMAINING = ({"min_p": 0.05}, {"logit_bias": {"7": -1.0}})
"""Sampling parameters whose tensors stay in a batch until the batch is empty, even if no request with the parameter
runs any more."""


def request_of(**sampling: Any) -> Any:
    """Make an engine request with these sampling parameters. Its prompt has one token."""
    schedule = engine_code.import_module("sglang.srt.managers.schedule_batch")
    params = engine_code.import_module("sglang.srt.sampling.sampling_params").SamplingParams(
        max_new_tokens=5, **sampling
    )
    params.normalize(SimpleNamespace(eos_token_id=1, additional_stop_token_ids=None))
    request = schedule.Req("a name", "", array("q", [7]), params, vocab_size=VOCABULARY)
    request.tokenizer = SimpleNamespace(eos_token_id=1, additional_stop_token_ids=None)
    return request


def batch_of(*requests: Any) -> Any:
    """Make an engine batch, with the attributes that sampling reads in a scheduler's running batch."""
    batch = engine_code.import_module("sglang.srt.managers.schedule_batch").ScheduleBatch(reqs=list(requests))
    batch.device, batch.return_logprob = "cpu", any(each.return_logprob for each in requests)
    kind = engine_code.import_module("sglang.srt.sampling.sampling_batch_info").SamplingBatchInfo
    batch.sampling_info = kind.from_schedule_batch(batch, VOCABULARY)
    return batch


@pytest.mark.every_release
@pytest.mark.parametrize(
    "sampling", [{}, {"temperature": 0.7, "top_p": 0.9, "top_k": 20}, *PENALTIES, *REMAINING], ids=str
)
def test_a_batch_is_penalized_if_one_of_its_requests_is(sampling: dict[str, Any], engine):
    penalized = sampling in (*PENALTIES, *REMAINING)
    asks = request_of(**sampling)
    batch = batch_of(request_of(), asks)
    assert serving.is_penalized(asks) == serving.batch_is_penalized(batch) == penalized
    batch.reqs = batch.reqs[:1]
    batch.sampling_info.filter_batch([0], torch.tensor([0]))
    if sampling in REMAINING:
        assert serving.batch_is_penalized(batch), "its numbers are still there"
        batch.reqs = []
    assert not serving.batch_is_penalized(batch)
