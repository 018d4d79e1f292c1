"""The lowest free memory while serving: when it is read, saved and shown; and what is beside the engine's metrics."""

from __future__ import annotations

import pytest
from kv_servers import GB
from sglang_moe_patches.core.gpu_memory import Memory
from sglang_moe_patches.memory.kv_sizing.metrics import FRACTION, LOWEST_FREE, STATE, SUGGESTED, Metrics, Source
from sglang_moe_patches.memory.kv_sizing.monitor import SAMPLE_INTERVAL_S, SAVE_INTERVAL_S, FreeMemoryMonitor


class Monitored:
    """A monitor, its clock, and what it saves and shows.

    :param free: of each reading in GB, or the reading; there are no more.
    :param save: says whether there was a place for it, how often it was saved before.
    """

    def __init__(self, *free, save=lambda times: True):
        self.saved: list[tuple[float, bool]] = []
        self.shown: list[int] = []
        self.now, self._has_place = 100.0, save
        readings = iter([each if isinstance(each, Memory) else Memory(int(each * GB)) for each in free])
        self._monitor = FreeMemoryMonitor(lambda: next(readings), self._save, lambda: self.now, self.shown.append)
        self.end = self._monitor.end

    def _save(self, lowest, ran_out):
        self.saved.append((lowest / GB, ran_out))
        return self._has_place(len(self.saved) - 1)

    def sample(self, times, every_s):
        for _ in range(times):
            self._monitor.sample()
            self._monitor.sample()  # too early: nothing is read
            self.now += every_s
        return self


def test_the_lowest_is_saved_now_and_then_and_at_the_end_and_shown_each_time():
    watch = Monitored(9, 8, 5, 7, 6).sample(1, SAMPLE_INTERVAL_S)
    assert watch.saved == [(8, False)]
    watch.sample(2, SAMPLE_INTERVAL_S)
    assert watch.saved == [(8, False)]
    watch.end()
    assert watch.saved == [(8, False), (5, False)]
    assert watch.shown == [8 * GB, 5 * GB, 5 * GB]


@pytest.mark.parametrize(
    ("readings", "saved"),
    [
        pytest.param([9, 9, 9 - 5e-9, 8], [(9, False), (8, False)], id="what hardly fell is not written again"),
        pytest.param(
            [Memory(9 * GB, ooms=1), *[Memory(9 * GB, ooms=2)] * 3],
            [(9, True)],
            id="an allocator that gave up is remembered once",
        ),
    ],
)
def test_what_is_worth_it_is_saved(readings, saved):
    watch = Monitored(*readings).sample(3, SAVE_INTERVAL_S)
    assert watch.saved == saved
    watch.end()
    assert len(watch.saved) == len(saved)


def test_a_little_less_is_saved_at_the_end():
    watch = Monitored(9, 9, 9 - 5e-9).sample(1, SAVE_INTERVAL_S)
    watch.end()
    assert watch.saved == [(9, False), (9 - 5e-9, False)]


def test_what_found_no_place_is_saved_again():
    assert Monitored(*[9] * 4, save=bool).sample(3, SAVE_INTERVAL_S).saved == [(9, False)] * 2


@pytest.mark.parametrize(
    ("readings", "lowest"),
    [pytest.param([9, 0.5], 0.5, id="the last moment is seen"), pytest.param([1], 1, id="it cannot be read any more")],
)
def test_a_server_that_ends_for_want_of_memory_says_so(readings, lowest):
    watch = Monitored(*readings)
    watch.end(ran_out=True)
    assert watch.saved == [(lowest, True)]


def test_a_file_that_cannot_be_written_ends_neither_the_monitor_nor_its_metric(caplog):
    def fail(times):
        raise OSError("read-only")

    watch = Monitored(9, 8, 7, 6, save=fail).sample(2, SAVE_INTERVAL_S)
    assert watch.shown == [8 * GB, 7 * GB]
    assert caplog.text.count("free memory is not recorded: read-only") == 1


def test_a_monitor_that_fails_says_it_once_and_ends_no_server(caplog):
    watch = Monitored(1).sample(2, SAMPLE_INTERVAL_S)
    watch.end()
    assert watch.saved == []
    assert caplog.text.count("free memory is not monitored any more") == 1


ON = {"enable_metrics": True}


def test_metrics_are_there_where_the_engines_are(metric, world, caplog):
    world.rank_in_group = 3
    for arguments, seen in (({}, (None, None, None, None)), (ON, (5, 0.8, 0.9, 1))):
        shown = Metrics(arguments, 1)
        shown.show_lowest_free(5)
        shown.show_sizing(0.8, 0.9, Source.GIVEN, "why")
        found = [metric(name, gpu="1") for name in (LOWEST_FREE, FRACTION, SUGGESTED)]
        assert (*found, metric(STATE, gpu="1", source="given", reason="why")) == seen
    again = Metrics(ON, 1)  # a name that is taken is no reason to end a server
    again.show_sizing(0.7, None, Source.GIVEN, "why")
    assert "no metrics: " in caplog.text
    assert metric(FRACTION, gpu="1") == 0.8


def test_what_nobody_knows_is_no_metric(metric):
    Metrics(ON, 0).show_sizing(None, None, Source.DEFAULT, "why")
    assert metric(FRACTION) is metric(SUGGESTED) is None
    assert metric(STATE, source="default", reason="why") == 1
