"""A plugin of the engine's that tells what the driver would tell, where there is no GPU: kv-sizing on the CPU.

It says how much memory is free before loading, after it and at the worst moment, has rehearsals be short, and kv-sizing
take the server for one on a GPU. All else is the engine's. Each rank writes what it ran while rehearsing into a file of
the folder ``STEPS``.
"""

from __future__ import annotations

import math
import os
import signal
import time
from pathlib import Path

import wrapt

GIB = 1 << 30
BEFORE = 100 * GIB  # 107 GB: the whole GPU, free before the weights are loaded
CACHE = 100_000_000  # what the rule leaves to the KV cache
FREE = int(os.environ.get("FREE", "300000000"))  # at the worst moment
NEED = int(os.environ.get("NEED", "0"))
"""Bytes of forwards: ``BEFORE * (1 - fraction in force) - NEED`` are free. 0: ``FREE`` are, whatever the fraction."""
GAIN = 300_000_000
"""With ``NEED``: what the record gives to the KV cache. The margin is what is left of the reserve by the rule."""
rule = [float(os.environ.get("GIVEN", "0"))]
in_force = [0.0]


def register():
    here = "sglang_moe_patches.memory.kv_sizing."
    hooks = {here + "eligibility": allow, "sglang_moe_patches.core.gpu_memory": measure, here + "hooks": learn_the_rule}
    hooks |= {here + "phases": shorten, here + "rehearsal": be_patient, here + "sizing": set_margin}
    hooks[here + "coordination"] = be_quick
    for module in ("utils.common", "server_args", "arg_groups.memory_hook"):
        hooks["sglang.srt." + module] = tell_the_rule
    for module in ("model_executor.model_runner", "distributed.bootstrap"):
        hooks["sglang.srt." + module] = telling(lambda: BEFORE / GIB)
    for module in ("model_executor.model_runner_kv_cache_mixin", "mem_cache.kv_cache_configurator"):
        hooks["sglang.srt." + module] = telling(lambda: free_before_pools() / GIB)
    wrapt.register_post_import_hook(count_every_step, "sglang.srt.managers.scheduler")
    if "KILLED" in os.environ:
        wrapt.register_post_import_hook(be_killed_in_capture, "sglang.srt.model_executor.model_runner")
    for module, hook in hooks.items():
        wrapt.register_post_import_hook(hook, module)


def free_before_pools():
    """Bytes, whatever fraction is in force: what the rule sets aside, and what it leaves to the KV cache."""
    return int(BEFORE * (1 - rule[0])) + CACHE


def shorten(phases):
    phases.GROWING_PROMPTS, phases.VARIED_PROMPTS = 3, 6


def be_patient(rehearsal):
    rehearsal.REHEARSAL_TIMEOUT_S = 3600  # however slow the machine is
    rehearsal.MIN_FREE_BYTES = FREE // 2
    if "STEPS" in os.environ:
        keep_steps(rehearsal)
    if "SLOW_S" in os.environ:
        be_slow(rehearsal)


def be_slow(rehearsal):
    poll = rehearsal.Rehearsal._poll

    def poll_late(rehearsal):
        time.sleep(float(os.environ["SLOW_S"]))  # in each turn
        return poll(rehearsal)

    rehearsal.Rehearsal._poll = poll_late


def keep_steps(rehearsal):
    begin = rehearsal.Rehearsal.begin

    def begin_with(rehearsal):
        import torch

        begin(rehearsal)
        file = Path(os.environ["STEPS"], str(torch.distributed.get_rank()))
        watched = rehearsal.runner.forward

        def forward(batch, *args, **kwargs):
            mode, tokens = batch.forward_mode.name, len(batch.input_ids)
            with file.open("a") as steps:
                print(mode, tokens, batch.batch_size, sum(batch.global_num_tokens_cpu or [tokens]), file=steps)
            return watched(batch, *args, **kwargs)

        rehearsal.runner.forward = forward

    rehearsal.Rehearsal.begin = begin_with


def be_quick(coordination):
    coordination.WAIT_S = 15


def set_margin(sizing):
    sizing.LaunchMemory.margin = int(os.environ.get("MARGIN", "200000000"))


def count_every_step(module):
    """However long it took, or a request after the one before: releases count no decode step of two seconds."""
    for name in ("DECODE_STEP_MAX_US", "STEP_MAX_US"):
        if hasattr(module, name):
            setattr(module, name, math.inf)


def be_killed_in_capture(module):
    """As by an orchestrator, or by the kernel for want of memory."""
    name = "init_device_graphs" if hasattr(module.ModelRunner, "init_device_graphs") else "init_cuda_graphs"
    setattr(module.ModelRunner, name, lambda *args, **kwargs: os.kill(os.getpid(), signal.SIGKILL))


def tell_the_rule(module):
    if hasattr(module, "get_device_memory_capacity"):
        module.get_device_memory_capacity = lambda *args, **kwargs: BEFORE >> 20


def telling(told):
    def tell(module):
        if hasattr(module, "get_available_gpu_memory"):
            module.get_available_gpu_memory = lambda *args, **kwargs: told()

    return tell


def learn_the_rule(hooks):
    original = hooks._report

    def report(state, runner, before, fraction, arguments):
        rule[0] = fraction
        if NEED:
            hooks.sizing.LaunchMemory.margin = int(BEFORE * (1 - fraction)) - NEED - GAIN
        return original(state, runner, before, fraction, arguments)

    apply = hooks.apply

    def apply_and_learn(outcome, inputs, state, runner, in_context):
        apply(outcome, inputs, state, runner, in_context)
        in_force[0] = runner.mem_fraction_static

    hooks._report, hooks.apply = report, apply_and_learn
    if NEED:  # else what is free has nothing to do with what the pools take
        hooks._free_before_pools = lambda state, runner: free_before_pools()


def allow(eligibility):
    original = eligibility.skip_reason

    def skip_reason(asked, arguments, environ):
        return original(asked, {**arguments, "device": "cuda"}, environ)

    eligibility.skip_reason = skip_reason


def measure(memory):
    reads = [0]

    def read(gpu):
        import torch

        reads[0] += 1
        if reads[0] > 3 and os.environ.get("FAILS_ON_RANK") == str(torch.distributed.get_rank()):
            raise RuntimeError("the driver does not answer")
        free = int(BEFORE * (1 - in_force[0])) - NEED if NEED else FREE
        return memory.Memory(free if reads[0] > 3 else free + 1_000_000_000, BEFORE)

    memory.read = read
