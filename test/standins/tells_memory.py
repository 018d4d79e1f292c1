"""A plugin of the engine's that tells what the driver would tell, where there is no GPU: kv-sizing on the CPU.

It says how much memory is free before loading, after it and at the worst moment, has rehearsals be short, and kv-sizing
take the server for one on a GPU. All else is the engine's. Each rank writes what it ran while rehearsing into a file of
the folder ``STEPS``.
"""

from __future__ import annotations

import os
from pathlib import Path

import wrapt

GIB = 1 << 30
BEFORE = 100 * GIB
CACHE = 100_000_000  # what the rule leaves to the KV cache
FREE = 300_000_000  # at the worst moment
NEED = int(os.environ.get("NEED", "0"))  # or whatever is in force but for this
GAIN = 300_000_000  # then
rule = [float(os.environ.get("GIVEN", "0"))]
in_force = [0.0]


def register():
    here = "sglang_moe_patches.memory.kv_sizing."
    hooks = {here + "decide": allow, "sglang_moe_patches.core.gpu_memory": measure, here + "seams": learn_the_rule}
    hooks |= {here + "script": shorten, here + "rehearse": be_patient, here + "size": be_content}
    hooks[here + "ranks"] = be_quick
    for module in ("utils.common", "server_args", "arg_groups.memory_hook"):
        hooks["sglang.srt." + module] = tell_the_rule
    for module in ("model_executor.model_runner", "distributed.bootstrap"):
        hooks["sglang.srt." + module] = telling(lambda: BEFORE / GIB)
    for module in ("model_executor.model_runner_kv_cache_mixin", "mem_cache.kv_cache_configurator"):
        hooks["sglang.srt." + module] = telling(lambda: (BEFORE * (1 - rule[0]) + CACHE) / GIB)
    for module, hook in hooks.items():
        wrapt.register_post_import_hook(hook, module)


def shorten(script):
    script.RISING, script.VARIED = 3, 6


def be_patient(rehearse):
    rehearse.LIMIT_S = 3600  # however slow the machine is
    rehearse.LEAST_FREE = FREE // 2
    if "STEPS" in os.environ:
        keep_steps(rehearse)


def keep_steps(rehearse):
    begin = rehearse.Rehearsal.begin

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

    rehearse.Rehearsal.begin = begin_with


def be_quick(ranks):
    ranks.WAIT_S = 15


def be_content(size):
    size.MARGIN = 200_000_000


def tell_the_rule(module):
    if hasattr(module, "get_device_memory_capacity"):
        module.get_device_memory_capacity = lambda *args, **kwargs: BEFORE >> 20


def telling(told):
    def tell(module):
        if hasattr(module, "get_available_gpu_memory"):
            module.get_available_gpu_memory = lambda *args, **kwargs: told()

    return tell


def learn_the_rule(seams):
    original = seams._look_around

    def look_around(state, runner, before, fraction, arguments):
        rule[0] = fraction
        if NEED:
            seams.size.MARGIN = int(BEFORE * (1 - fraction)) - NEED - GAIN
        return original(state, runner, before, fraction, arguments)

    sizes = seams._size

    def size(state, runner, *args):
        sizes(state, runner, *args)
        in_force[0] = runner.mem_fraction_static

    seams._look_around, seams._size = look_around, size


def allow(decide):
    original = decide.stands_back

    def stands_back(asked, arguments, environ):
        return original(asked, {**arguments, "device": "cuda"}, environ)

    decide.stands_back = stands_back


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
