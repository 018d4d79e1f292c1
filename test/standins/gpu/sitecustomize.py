"""Stands in for a GPU of 100 GB in what ``plan`` observes, in server processes of tests on the CPU, and nowhere else.

99 GB are free before loading and 30 GB are weights. The KV cache gets what the fraction leaves. A forward keeps
``STANDIN_TOKEN_MB`` for each of its tokens.
"""

import os
from typing import Any

import wrapt

GB = 10**9
TOTAL, BEFORE_LOAD, WEIGHTS = 100 * GB, 99 * GB, 30 * GB


class Device:
    used = TOTAL - BEFORE_LOAD
    forwards = 0
    fraction = 0.0

    def read(self) -> Any:
        from sglang_moe_patches.observers.events import Device

        held = self.used + self.forwards
        return Device(allocated=self.used, peak=held, reserved=held, free=TOTAL - held, total=TOTAL)


def stand_in(observe: Any) -> None:
    device = Device()
    token_bytes = float(os.environ["STANDIN_TOKEN_MB"]) * 1e6
    stage, ends = observe.Observer.stage, observe.Observer.forward_ends

    def loaded(self: Any, runner: Any, name: str, ended: bool) -> None:
        device.fraction = runner.mem_fraction_static
        if name == "load_model" and ended:
            device.used += WEIGHTS
        stage(self, runner, name, ended)

    def sized(self: Any, before_load_gib: float, kv_bytes: int) -> None:
        left = BEFORE_LOAD * (1 - device.fraction)
        self.write(observe.events.Sized(BEFORE_LOAD, kv_bytes, device.read()))
        device.used = round(TOTAL - left)

    def ended(self: Any, runner: Any, result: Any) -> None:
        device.forwards = max(device.forwards, round(self.batch.tokens * token_bytes))
        ends(self, runner, result)

    observe.Observer.stage, observe.Observer.sized, observe.Observer.forward_ends = loaded, sized, ended
    observe.read_device = device.read


wrapt.register_post_import_hook(stand_in, "sglang_moe_patches.observers.memory")
