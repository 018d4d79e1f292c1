"""How many requests a scheduler admits beside a KV cache that was sized."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from sglang_moe_patches.memory.kv_sizing.serving import is_penalized, limit_requests

PLAIN = {
    **{"frequency_penalty": 0.0, "presence_penalty": 0.0, "repetition_penalty": 1.0, "min_new_tokens": 0},
    **{"min_p": 0.0, "logit_bias": None},
}


class Request:
    """In the place of the engine's, which compares as an object does."""

    def __init__(self, return_logprob=False, ended=False, **sampling):
        self.sampling_params, self.return_logprob = SimpleNamespace(**{**PLAIN, **sampling}), return_logprob
        self.ended, self.custom_logit_processor = ended, None

    def finished(self):
        return self.ended


class Scheduler:
    """Has room for 1,000 requests, and keeps those that wait."""

    def __init__(self):
        self.waiting_queue, self.running_batch = [], SimpleNamespace(reqs=[])

    def _add_request_to_queue(self, req, is_retracted=False):
        self.waiting_queue.append((req, is_retracted))

    def get_num_allocatable_reqs(self, running_bs, beam_width=None):
        return (beam_width or 1000) - running_bs


@pytest.mark.parametrize(
    ("asked", "whole_batch"),
    [
        ({}, False),
        ({"temperature": 0.7, "top_p": 0.9, "top_k": 20}, False),
        ({"frequency_penalty": 0.1}, True),
        ({"presence_penalty": -0.1}, True),
        ({"repetition_penalty": 1.05}, True),
        ({"min_new_tokens": 1}, True),
        ({"min_p": 0.05}, True),
        ({"logit_bias": {"7": 1.0}}, True),
        ({"return_logprob": True}, True),
    ],
    ids=str,
)
def test_what_allocates_for_the_vocabulary_is_known_by_its_parameters(asked, whole_batch):
    assert is_penalized(Request(**asked)) is whole_batch


def test_fewer_are_admitted_while_one_with_penalties_has_not_ended():
    scheduler = Scheduler()
    limit_requests(scheduler, requests=900, penalized=256)
    plain, one = Request(), Request(min_p=0.1)
    scheduler._add_request_to_queue(plain)
    assert scheduler.get_num_allocatable_reqs(100) == 800
    assert scheduler.get_num_allocatable_reqs(3, beam_width=5) == 2
    scheduler._add_request_to_queue(one, is_retracted=True)
    assert scheduler.waiting_queue == [(plain, False), (one, True)]
    assert scheduler.get_num_allocatable_reqs(100) == 156
    assert scheduler.get_num_allocatable_reqs(300) < 0
    scheduler.running_batch.reqs = [plain, one]
    one.ended = True
    assert scheduler.get_num_allocatable_reqs(100) == 156, "its batch has tensors for it still, and takes others in"
    scheduler.running_batch.reqs = [plain]
    assert scheduler.get_num_allocatable_reqs(100) == 800


def test_one_that_was_aborted_while_it_waited_counts_no_more():
    scheduler = Scheduler()
    limit_requests(scheduler, requests=900, penalized=256)
    scheduler._add_request_to_queue(Request(presence_penalty=1.0))
    scheduler.waiting_queue.clear()
    assert scheduler.get_num_allocatable_reqs(0) == 900
