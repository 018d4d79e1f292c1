"""Measure the time that kv-sizing's hooks add to a turn of the scheduler's event loop while a server serves.

    sglang-moe-reference exec -- python benchmark memory/scheduler_turn       # any machine

A turn is one iteration of the event loop, with the engine's own functions. It has three steps: it reads an empty inbox,
processes an empty list of requests, and asks how many requests may join the running batch. The last step runs once, and
once more for each waiting request. No forward pass runs, so the difference to stock is the whole cost of the hooks. The
hooks do not read the GPU's free memory here, because a server reads it only once a second.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from array import array
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from common import output, timing

STATES = {
    "no request has penalties": (False, False),
    "all running requests have penalties": (True, False),
    "one waiting request has penalties": (False, True),
}
"""Measured states of the scheduler. Key: name of the table's row. Value: whether the running requests have penalties,
and whether one waiting request has penalties.
"""


def request_of(penalized: bool) -> Any:
    """Make a request, an object of the engine's ``Req`` class, with or without a presence penalty."""
    from sglang.srt.managers.schedule_batch import Req
    from sglang.srt.sampling.sampling_params import SamplingParams

    sampling = SamplingParams(max_new_tokens=5, presence_penalty=0.5 if penalized else 0.0)
    return Req("a name", "", array("q", [7]), sampling, vocab_size=1000)


def scheduler_of(running: int, waiting: int, state: str) -> Any:
    """Make an object of the engine's ``Scheduler`` class, with only the attributes that a turn without a forward pass
    needs.

    :param running: number of running requests.
    :param waiting: number of waiting requests.
    :param state: key of ``STATES``.
    """
    import torch
    import zmq
    from sglang.srt.managers.schedule_batch import ScheduleBatch
    from sglang.srt.managers.scheduler import Scheduler
    from sglang.srt.sampling.sampling_batch_info import SamplingBatchInfo

    runs_penalized, waits_penalized = STATES[state]
    scheduler: Any = Scheduler.__new__(Scheduler)
    batch = ScheduleBatch(reqs=[request_of(runs_penalized) for _ in range(running)])
    batch.device = torch.device("cpu")
    batch.sampling_info = SamplingBatchInfo.from_schedule_batch(batch, 1000)
    scheduler.running_batch, scheduler.chunked_req, scheduler.waiting_queue = batch, None, []
    scheduler.session_controller = SimpleNamespace(maybe_reap=lambda now: None)
    scheduler._pending_flush = scheduler.external_corpus_manager = None
    scheduler.req_to_token_pool = SimpleNamespace(available_size=lambda: 1000)
    scheduler.recv_from_tokenizer = zmq.Context.instance().socket(zmq.PULL)
    scheduler.recv_from_tokenizer.bind("inproc://" + str(id(scheduler)))
    scheduler._add_request_to_queue = lambda req: scheduler.waiting_queue.append(req)

    def get_new_batch_prefill() -> None:
        for _ in range(1 + waiting):
            scheduler.get_num_allocatable_reqs(running)

    scheduler.get_new_batch_prefill = get_new_batch_prefill
    scheduler.waits = [request_of(waits_penalized and not number) for number in range(waiting)]
    return scheduler


def add_hooks(scheduler: Any) -> None:
    """Add the hooks that a server has after kv-sizing has sized its KV cache."""
    from sglang_moe_patches.core.gpu_memory import Memory
    from sglang_moe_patches.memory.kv_sizing import ranks, serving
    from sglang_moe_patches.memory.kv_sizing.token_count import TokenCounts

    orders = ranks.Orders(scheduler, lambda order: None)
    orders.open()
    memory = serving.FreeMemory(lambda: Memory(free=1 << 40), 1 << 30)
    pools: Any = SimpleNamespace(counts=TokenCounts(100_000), page=1)
    board: Any = SimpleNamespace(is_raised=lambda flag: False)
    metrics = serving.Metrics({}, 0)
    watch = serving.Serving(scheduler, pools, memory, orders, board, metrics, leads=True, extra_tokens=3)
    orders.on_turn = watch.run_turn
    serving.limit_requests(scheduler, 2048, 256)


def turn_us(scheduler: Any, turns: int) -> float:
    """Measure the processor time of one turn, in microseconds."""
    import zmq

    begin = time.thread_time()  # processor time, which does not include the time of other programs
    for _ in range(turns):
        with suppress(zmq.ZMQError):
            scheduler.recv_from_tokenizer.recv_pyobj(zmq.NOBLOCK)
        scheduler.process_input_requests([])
        scheduler.get_new_batch_prefill()
    return (time.thread_time() - begin) / turns * 1e6


def measure(options: argparse.Namespace) -> list[dict[str, Any]]:
    rows = []
    for state in STATES:
        versions: dict[str, Callable[[], float]] = {}
        for name in (timing.STOCK, "patched", timing.CONTROL):
            scheduler = scheduler_of(options.running, options.waiting, state)
            if name == "patched":
                add_hooks(scheduler)
            for request in scheduler.waits:
                scheduler._add_request_to_queue(request)
            versions[name] = partial(turn_us, scheduler, options.turns)
        samples = timing.run_in_turn(versions, options.rounds)
        stock = samples[timing.STOCK]

        def added(name: str, samples: Any = samples, stock: Any = stock) -> list[float]:
            return statistics.quantiles([other - one for one, other in zip(stock, samples[name], strict=True)], n=4)

        rows.append(
            {
                "state": state,
                "stock_us": statistics.median(stock),
                "added_us": added("patched"),
                "control_us": added(timing.CONTROL)[1],
            }
        )
    return rows


def make_tables(result: output.Result) -> str:
    figures = result["figures"]
    requests = f"{figures['running']} running and {figures['waiting']} waiting requests"
    header = (f"{requests}, us per turn", "stock", "added", "quartiles")
    rows = []
    for row in figures["rows"]:
        low, median, high = row["added_us"]
        times = (f"{row['stock_us']:.2f}", f"{median:+.2f}", f"{low:.2f} .. {high:.2f}", f"{row['control_us']:+.2f}")
        rows.append((row["state"], *times))
    return output.table((*header, "stock again"), rows)


def main() -> None:
    parser = output.parser(__doc__, quick={"rounds": 2, "turns": 100})
    parser.add_argument("--running", type=int, default=300, help="running requests (default: %(default)s)")
    parser.add_argument("--waiting", type=int, default=1, help="waiting requests (default: %(default)s)")
    parser.add_argument("--rounds", type=int, default=31, help="measurements of each version (default: %(default)s)")
    parser.add_argument("--turns", type=int, default=5000, help="turns in a measurement (default: %(default)s)")
    options = output.parse(parser)
    from common.in_process import InProcess
    from sglang_moe_reference.model import ModelSpec, make_model

    with tempfile.TemporaryDirectory(prefix="benchmark-") as work:
        make_model(Path(work) / "model", ModelSpec(layers=1, dense_layers=1))
        InProcess(Path(work) / "model")  # sets the engine's global settings
        from sglang.srt.server_args import get_global_server_args

        get_global_server_args().pp_max_micro_batch_size = 4096  # the default with one pipeline stage
        rows = measure(options)
    figures = {"running": options.running, "waiting": options.waiting, "rounds": options.rounds, "rows": rows}
    output.finish(options, output.result("scheduler-turn", figures), make_tables)
