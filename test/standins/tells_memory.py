"""Engine plugin that runs kv-sizing on the CPU: it stands in for the GPU's driver.

It reports the free memory before and after loading and in forward passes, less the memory that is mapped for the KV
cache. It shortens rehearsals, and makes kv-sizing treat the server as a server on a GPU. All other code is the
engine's. The KV cache lies at reserved addresses, and code that touches an unmapped byte ends the process. Variables:

``GAIN``                      bytes by which the KV cache can grow; below 0 it must shrink
``GIVEN``                     value of ``--mem-fraction-static``, if the user set it
``BYTES_PER_REQUEST``         bytes that sampling allocates for each request of a forward pass
``BYTES_ABOVE_256_REQUESTS``  additional bytes that sampling allocates for more than 256 requests
``STEPS``                     folder in which each rank writes a file of its rehearsed forward passes
``FAILS``                     rank whose driver does not answer in the rehearsal
``MAP_FAILS``                 rank that has no memory to grow
``SHORT``                     file with a number of bytes; once it exists, another process has allocated these bytes
``TURN_S``                    file with a number of seconds; once it exists, each turn takes that much longer
``MERGES``                    file with the size of each merged batch, if one of its parts has tensors for penalties
``RAISES``                    ``REQUESTS RANK``: forward passes of so many requests raise on one rank or ``all``
``HOLDS``                     if set, the second rehearsed forward pass lasts until the process ends
``SLEEPS``                    if set, the log has a line for each sleep of an idle scheduler
``TUNES``                     file with a line for each mapping of memory, and for each tuning of kernels by the engine
"""

from __future__ import annotations

import ctypes
import math
import mmap
import os
import sys
import time
from pathlib import Path

import wrapt

GIB = 1 << 30
BEFORE = 100 * GIB  # 107 GB, free before the weights are loaded: the whole GPU
CACHE = int(os.environ.get("CACHE", "100000000"))  # bytes that the engine's rule leaves to the KV cache
GAIN = int(os.environ.get("GAIN", "300000000"))
fraction = [float(os.environ.get("GIVEN", "0"))]
mapped = [0]
reads = [0]
sampled = {"now": 0, "most": 0}  # peak bytes of sampling: since the last reset, and ever


def register():
    package = "sglang_moe_patches.memory.kv_sizing."
    hooks = {
        package + "eligibility": allow_on_cpu,
        "sglang_moe_patches.core.gpu_memory": replace_driver,
        package + "hooks": use_host_memory,
    }
    hooks[package + "engine_rule"] = note_fraction
    hooks |= {
        package + "phases": shorten_rehearsal,
        package + "rehearsal": prepare_rehearsal,
        package + "ranks": shorten_waits,
    }
    hooks[package + "serving"] = sample_often
    for module in ("utils.common", "server_args", "arg_groups.memory_hook"):
        hooks["sglang.srt." + module] = replace_gpu_queries
    hooks["sglang.srt.batch_invariant_ops"] = lambda ops: setattr(ops, "enable_batch_invariant_mode", int)  # for GPUs
    for module in ("model_executor.model_runner", "distributed.bootstrap"):
        hooks["sglang.srt." + module] = report_free_memory(lambda: BEFORE / GIB)
    for module in ("model_executor.model_runner_kv_cache_mixin", "mem_cache.kv_cache_configurator"):
        hooks["sglang.srt." + module] = report_before_pools
    hooks["sglang.srt.managers.scheduler"] = count_every_step
    if "SLEEPS" in os.environ:
        hooks["sglang.srt.managers.scheduler"] = note_sleeps
    for module, hook in hooks.items():
        wrapt.register_post_import_hook(hook, module)
    if "MERGES" in os.environ:
        wrapt.register_post_import_hook(note_merges, "sglang.srt.sampling.sampling_batch_info")
    if "TUNES" in os.environ:
        for module in ("model_runner", "runner.base_runner"):
            wrapt.register_post_import_hook(note_tuning, "sglang.srt.model_executor." + module)


def rank():
    import torch

    return str(torch.distributed.get_rank())


def bytes_before_pools():
    """Return the free bytes before the engine makes its pools: the bytes that the engine's rule reserves, and the bytes
    for the KV cache."""
    return int(BEFORE * (1 - fraction[0])) + CACHE


def margin_bytes():
    from sglang_moe_patches.memory.kv_sizing.eligibility import KV_MARGIN

    return KV_MARGIN.read()


def forward_bytes():
    return int(BEFORE * (1 - fraction[0])) - margin_bytes() - GAIN


def shorten_rehearsal(phases):
    phases.GROWING_PROMPTS, phases.VARIED_PROMPTS = 3, 6


def sample_often(serving):
    serving.SAMPLE_INTERVAL_S = 0.05
    if "TURN_S" in os.environ:
        look = serving.Serving.run_turn

        def run_late_turn(watch):
            late = Path(os.environ["TURN_S"])
            time.sleep(float(late.read_text() or 0) if late.exists() else 0)
            look(watch)

        serving.Serving.run_turn = run_late_turn


def prepare_rehearsal(rehearsal):
    rehearsal.REHEARSAL_TIMEOUT_S = 3600  # seconds, enough for any machine
    rehearsal.MIN_FREE_BYTES = margin_bytes() // 2
    if "BYTES_PER_REQUEST" in os.environ:
        count_sampling_bytes(rehearsal)
    if "STEPS" in os.environ:
        record_forwards(rehearsal)
    if "HOLDS" in os.environ:
        hold_forwards(rehearsal)
    if "RAISES" in os.environ:
        raise_in_forwards(rehearsal)


def count_sampling_bytes(rehearsal):
    facts_of = rehearsal.batch_facts

    def batch_facts(batch):
        facts = facts_of(batch)
        extra_bytes = int(os.environ.get("BYTES_ABOVE_256_REQUESTS", "0")) if facts.requests > 256 else 0
        sampled["now"] = max(sampled["now"], int(os.environ["BYTES_PER_REQUEST"]) * facts.requests + extra_bytes)
        sampled["most"] = max(sampled.values())
        return facts

    rehearsal.batch_facts = batch_facts
    rehearsal.gpu_memory.reset_peak = lambda gpu: sampled.update(now=0)
    begin = rehearsal.Rehearsal.begin

    def begin_with_zero(rehearsal):  # the flush before the rehearsal has emptied the allocator
        sampled.update(now=0, most=0)
        begin(rehearsal)

    rehearsal.Rehearsal.begin = begin_with_zero


def record_forwards(rehearsal):
    begin = rehearsal.Rehearsal.begin

    def begin_and_watch_forwards(rehearsal):
        begin(rehearsal)
        file = Path(os.environ["STEPS"], rank())
        watched = rehearsal.runner.forward

        def forward(batch, *args, **kwargs):
            mode, tokens = batch.forward_mode.name, len(batch.input_ids)
            with file.open("a") as steps:
                print(mode, tokens, batch.batch_size, sum(batch.global_num_tokens_cpu or [tokens]), file=steps)
            return watched(batch, *args, **kwargs)

        rehearsal.runner.forward = forward

    rehearsal.Rehearsal.begin = begin_and_watch_forwards


def raise_in_forwards(rehearsal):
    requests, where = os.environ["RAISES"].split()

    def fail(batch):
        if batch.batch_size == int(requests) and where in ("all", rank()):
            raise AssertionError("no such forward pass")

    after_each_forward(rehearsal, fail)


def hold_forwards(rehearsal):
    done = []

    def hold(batch):
        done.append(batch)
        while len(done) > 1:
            if len(done) == 2:
                print("a forward pass is held", file=sys.stderr, flush=True)
                done.append(batch)
            time.sleep(0.1)

    after_each_forward(rehearsal, hold)


def after_each_forward(rehearsal, do):
    """Call the function ``do`` after each rehearsed forward pass. Its argument is the batch of the forward pass."""
    begin = rehearsal.Rehearsal.begin

    def begin_and_watch_forwards(rehearsal):
        begin(rehearsal)
        watched = rehearsal.runner.forward

        def forward(batch, *args, **kwargs):
            result = watched(batch, *args, **kwargs)
            do(batch)
            return result

        rehearsal.runner.forward = forward

    rehearsal.Rehearsal.begin = begin_and_watch_forwards


def note_sleeps(module):
    count_every_step(module)
    wrapt.wrap_function_wrapper(module, "IdleSleeper.maybe_sleep", note_sleep)


def note_sleep(wrapped, instance, args, kwargs):
    print("a scheduler sleeps", file=sys.stderr, flush=True)
    return wrapped(*args, **kwargs)


def note(text):
    if "TUNES" in os.environ:
        with Path(os.environ["TUNES"]).open("a") as notes:
            print(text, file=notes)


def note_tuning(module):
    """Write a line into the file ``TUNES`` at the step of a start at which the engine tunes kernels on a GPU.

    On a CPU, the engine tunes no kernels. Later releases call their function ``warmup`` nevertheless, so the line is
    written at this call. Up to 0.5.13, the engine does not call its tuning function on a CPU. The line is then written
    at the next step of the start, the capture of graphs.
    """
    for kind, name in (("ModelRunner", "init_device_graphs"), ("BaseRunner", "warmup")):
        if hasattr(getattr(module, kind, None), name):
            wrapt.wrap_function_wrapper(module, f"{kind}.{name}", note_tuning_step)


def note_tuning_step(wrapped, instance, args, kwargs):
    note("tunes")
    return wrapped(*args, **kwargs)


def note_merges(module):
    wrapt.wrap_function_wrapper(module, "SamplingBatchInfo.merge_batch", note_merge)


def note_merge(wrapped, instance, args, kwargs):
    both = [instance, *args, *kwargs.values()]
    if any(each.penalizer_orchestrator.is_required for each in both):
        with Path(os.environ["MERGES"]).open("a") as file:
            file.write(f"{sum(map(len, both))}\n")
    return wrapped(*args, **kwargs)


def shorten_waits(ranks):
    ranks.WAIT_S = 15


def count_every_step(module):
    """Make the engine count slow decode steps, too. Some releases do not count steps that take more than two
    seconds."""
    for name in ("DECODE_STEP_MAX_US", "STEP_MAX_US"):
        if hasattr(module, name):
            setattr(module, name, math.inf)


def replace_gpu_queries(module):
    if hasattr(module, "add_deterministic_attention_backend_choices"):  # the other backends need a GPU
        module.add_deterministic_attention_backend_choices(["torch_native"])
    if hasattr(module, "get_device_memory_capacity"):
        module.get_device_memory_capacity = lambda *args, **kwargs: BEFORE >> 20


def report_free_memory(read_gib):
    """Return a hook that makes a module report ``read_gib()`` as the free memory."""

    def replace(module):
        if hasattr(module, "get_available_gpu_memory"):
            module.get_available_gpu_memory = lambda *args, **kwargs: read_gib()

    return replace


def report_before_pools(module):
    report_free_memory(lambda: bytes_before_pools() / GIB)(module)
    for kind in ("ModelRunnerKVCacheMixin", "KVCacheConfigurator"):
        if hasattr(module, kind):
            wrapt.wrap_function_wrapper(module, f"{kind}._profile_available_bytes", read_fraction_first)


def read_fraction_first(wrapped, maker, args, kwargs):
    """Store ``--mem-fraction-static`` in ``fraction`` before the engine sizes its pools, because the simulated free
    memory depends on ``fraction``. With kv-sizing, it is already stored: kv-sizing calls ``fraction_in_force``, which
    :func:`note_fraction` has wrapped. Without kv-sizing, no other code calls this function."""
    if not fraction[0]:
        from sglang_moe_patches.memory.kv_sizing import engine_rule

        engine_rule.fraction_in_force(maker)  # note_fraction has wrapped this function
    return wrapped(*args, **kwargs)


def note_fraction(engine_rule):
    original = engine_rule.fraction_in_force

    def in_force(maker):
        fraction[0] = original(maker)
        return fraction[0]

    engine_rule.fraction_in_force = in_force


def use_host_memory(hooks):
    hooks.CudaMemory = HostMemory


class HostMemory:
    """Stand-in for GPU memory at reserved addresses. Code that touches an unmapped byte ends the process."""

    granularity = mmap.PAGESIZE

    def __init__(self, gpu=0):
        self._libc = ctypes.CDLL(None, use_errno=True)
        self._libc.mmap.restype = ctypes.c_void_p
        self._libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long]

    def reserve(self, size):
        return self._mmap(None, size, 0, 0)

    def map(self, address, size):
        if "MAP_FAILS" in os.environ and os.environ["MAP_FAILS"] == rank() and reads[0] > 3:
            from sglang_moe_patches.memory.kv_sizing.address_space import OutOfMemory

            raise OutOfMemory("nothing is left")
        self._mmap(address, size, mmap.PROT_READ | mmap.PROT_WRITE, MAP_FIXED)
        mapped[0] += size
        note("maps")

    def unmap(self, address, size):
        self._mmap(address, size, 0, MAP_FIXED)
        mapped[0] -= size

    def release(self, address, size):
        self._libc.munmap(ctypes.c_void_p(address), ctypes.c_size_t(size))

    def device(self):
        import torch

        return torch.device("cpu")

    def _mmap(self, address, size, protection, flags):
        flags |= mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | MAP_NORESERVE
        found = self._libc.mmap(address, size, protection, flags, -1, 0)
        if found in (None, ctypes.c_void_p(-1).value):
            raise OSError(ctypes.get_errno(), f"mmap of {size / 1e6:,.0f} MB")
        return found


MAP_FIXED, MAP_NORESERVE = 0x10, 0x4000  # values of Linux on x86-64 and 64-bit Arm; Python's mmap lacks one


def allow_on_cpu(eligibility):
    original = eligibility.skip_reason

    def skip_reason(mode, arguments, environ):
        return original(mode, {**arguments, "device": "cuda"}, environ)

    eligibility.skip_reason = skip_reason


def replace_driver(memory):
    def read(gpu):
        reads[0] += 1
        if reads[0] > 3 and os.environ.get("FAILS") == rank():
            raise RuntimeError("the driver does not answer")
        short = Path(os.environ["SHORT"]) if "SHORT" in os.environ else None
        others = int(short.read_text() or 0) if short is not None and short.exists() else 0
        forwards = forward_bytes() if reads[0] > 3 else 0
        free = bytes_before_pools() - mapped[0] - forwards - others - sampled["most"]
        return memory.Memory(free, reserved=sampled["most"], peak=sampled["now"])

    memory.read = read
