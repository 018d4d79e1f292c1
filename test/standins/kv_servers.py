"""Stand-ins for kv-sizing's unit tests: limits of a server, pools, a model runner, and one rank's scheduler."""

from __future__ import annotations

import random
from copy import copy
from types import SimpleNamespace
from typing import Any

import numpy
import torch
import zmq
from sglang_moe_patches.core.gpu_memory import Memory
from sglang_moe_patches.memory.kv_sizing import phases, ranks, rehearsal
from sglang_moe_patches.memory.kv_sizing.phases import SIZES, Batch, Limits

GB = 1_000_000_000
LIMITS = Limits(chunk=1024, input_tokens=10_000, cache_tokens=50_000, requests=300, captured=64, vocabulary=5000)
SMALL = Limits(chunk=64, input_tokens=300, cache_tokens=5000, requests=3, captured=0, vocabulary=5000)


def find_phase(limits, kind):
    """Return the largest phase of a kind, or ``None`` if the rehearsal has no phase of this kind."""
    return next((phase for phase in reversed(phases.derive_phases(limits)) if phase.kind is kind), None)


def largest_batch(phase):
    """Return a batch that meets the phase's bound (:class:`phases.Bound`). The batch is larger than any bound."""
    return Batch(phase.bound.modes[0], **dict.fromkeys(SIZES, 10**9), graph=bool(phase.bound.graph))


def make_pool(name, *bases, **has):
    """Make a stand-in for an engine pool. kv-sizing recognizes pools by their class names.

    :param name: name of the class.
    :param has: attributes of the pool.
    """
    return type(name, bases or (object,), has)()


ROWS = {"req_to_token": torch.zeros(3, 0, dtype=torch.int32), "free_slots": [1, 2]}
PLAIN_TABLE = make_pool("ReqToTokenPool", **ROWS)
CONFIG = SimpleNamespace(context_len=1000, vocab_size=5000)


def make_runner(pool, table=PLAIN_TABLE, **more):
    """Make a stand-in for a model runner with these pools."""
    has = {"token_to_kv_pool": pool, "req_to_token_pool": table, "model_config": CONFIG, "max_total_num_tokens": 900}
    return SimpleNamespace(**{**has, **more})


class FlushCacheReqOutput:
    """Stand-in for the engine's answer to a flush. kv-sizing recognizes it by its class name."""

    def __init__(self, success):
        self.success = success


class Outbox:
    def __init__(self):
        self.sent = []

    def send_output(self, output, recv_obj=None):
        self.sent.append(output)


def read_inbox(scheduler, limit=10_000):
    """Return the requests that one turn of the event loop reads, as in the engine up to 0.5.12.post1.

    :param limit: largest number of requests, as ``SGLANG_SCHEDULER_MAX_RECV_PER_POLL`` sets it.
    """
    read: list[object] = []
    while len(read) < limit:
        try:
            read.append(scheduler.recv_from_tokenizer.recv_pyobj(zmq.NOBLOCK))
        except zmq.ZMQError:
            break
    return read


class Scheduler:
    """Stand-in for the scheduler of one rank. It answers each request after one forward pass. The fixture ``scheduler``
    makes this stand-in, and replaces the engine's functions that a rehearsal calls.

    :param reads: whether the rank reads requests from the tokenizer.
    :param free: function that returns the free memory in bytes. Its argument is the number of forward passes so far.
    :param flushes: whether a flush of the cache succeeds.
    """

    def __init__(self, reads=True, free=lambda forwards: 9 * GB, flushes=True, **arguments):
        self.did = SimpleNamespace(forwards=0, phases=[], count=lambda: None)
        self.free, self.flushes, self.server_args = free, flushes, SimpleNamespace(**arguments)
        self.real = SimpleNamespace(recv_pyobj=self._nothing)
        self.recv_from_tokenizer = self.real if reads else None
        self.send_to_tokenizer, self.send_to_detokenizer = Outbox(), Outbox()
        self.enable_metrics, self.forward_ct, self.spec_num_forward_ct, self.max_queued_requests = True, 7, 3, 2
        runner = type("Runner", (), {"forward": lambda runner, batch: self.run(runner)})()
        runner.forward_pass_id = 11
        self.tp_worker = SimpleNamespace(model_runner=runner)
        self.running_batch, self.chunked_req = SimpleNamespace(is_empty=lambda: True), None
        self.waiting_queue: list[object] = []

    @property
    def forwards(self):
        return self.did.forwards

    def read(self):
        return Memory(self.free(self.forwards))

    def _nothing(self, *flags):
        raise zmq.Again()

    def run(self, runner):
        assert not self.enable_metrics
        self.did.forwards += 1
        self.forward_ct += 1
        self.spec_num_forward_ct += 1
        runner.forward_pass_id += 1
        self.did.count()
        random.random(), torch.rand(1), numpy.random.random()
        return SimpleNamespace(can_run_graph=False)

    def is_fully_idle(self):
        return True

    def turn(self):
        """Run one turn of the event loop, and return the requests that the scheduler has read."""
        read = read_inbox(self)
        self.process_input_requests(read)
        return read

    def process_input_requests(self, read):
        for each in read:
            if each == "flush":
                self.send_to_tokenizer.send_output(FlushCacheReqOutput(self.flushes))
            elif each != "abort":
                if each.phase.name:
                    self.did.phases.append(each.phase.name)
                self.tp_worker.model_runner.forward(largest_batch(each.phase))
                answer = SimpleNamespace(rids=[each.name], finished_reasons=[{"type": "length"}])
                self.send_to_detokenizer.send_output(answer)


def snapshot_state(scheduler):
    """Return all state of a scheduler that a rehearsal may change, and the state of the random generators."""
    boxes = scheduler.send_to_tokenizer, scheduler.send_to_detokenizer
    owners = [
        {name: copy(value) if isinstance(value, list) else value for name, value in vars(each).items()}
        for each in (scheduler, scheduler.tp_worker.model_runner, *boxes)
    ]
    numbers = (
        random.getstate(),
        torch.get_rng_state().tolist(),
        numpy.random.get_state(legacy=False)["state"]["key"].tolist(),
    )
    return owners, numbers


class OneRank:
    """Rehearsal on one rank, and the rank's :class:`ranks.Orders`, which call the rehearsal in each turn of the event
    loop. The attribute ``low_reports`` lists this rank's reports that its memory is low.

    :param low: function that returns whether another rank has reported that its memory is low.
    """

    def __init__(self, scheduler, over=print, *, leads=True, low=lambda: False, limits=SMALL, **more):
        self.low_reports: list[str] = []
        is_raised = lambda flag: flag in self.low_reports or low()  # noqa: E731
        board: Any = SimpleNamespace(raise_flag=self.low_reports.append, is_raised=is_raised)
        arguments = (scheduler, 0, board, 1, phases.derive_phases, limits)
        self.run = rehearsal.Rehearsal(*arguments, leads=leads, **{"peaks": {}, **more})
        self.run.on_end = over
        self.orders = ranks.Orders(scheduler, self.run.plant)

    def begin(self):
        self.orders.open()
        self.orders.read_instead, self.orders.on_turn = self.run.poll, self.run.read_turn_memory
        self.run.begin()

    def end(self):
        self.run.end()
        self.orders.close()


def rehearse(scheduler, low=lambda: False, **more):
    """Run a rehearsal to its end, and return its result. Check that the rehearsal restored the scheduler's state."""
    results: list[rehearsal.Measured] = []
    before = snapshot_state(scheduler)
    rank = OneRank(scheduler, results.append, low=low, **more)
    rank.begin()
    for _ in range(3000):
        scheduler.turn()
        if results:
            rank.orders.close()
            assert snapshot_state(scheduler) == before
            return results[0]
    raise AssertionError("it never ends")
