"""Tests of two values that ``common.allocator_trace`` computes from a server's memory after each forward pass. The
first value is the *slack*: memory that the allocator reserved and no tensor used. The second value is the growth of the
reserved memory."""

from __future__ import annotations

from common import allocator_trace
from common.allocator_trace import Line


def line(reserved: int, peak: int = 0, free: int = 100, allocated: int = 10) -> Line:
    return Line(0.0, allocated, peak, reserved, free)


def test_slack_does_not_include_the_memory_in_use_before_the_first_forward_pass():
    lines = [line(20, peak=99, free=80), line(50, peak=25, free=50), line(45, peak=40, free=55)]
    slack = allocator_trace.compute_slack(lines)
    assert (slack.tensors, slack.reserved, slack.lowest_free, slack.grown, slack.slack) == (30, 30, 50, 0, 0)
    assert allocator_trace.compute_slack([*lines, line(70, peak=12)]).slack == 20


def test_growth_compares_the_two_halves_of_the_load_of_random_prompts():
    run = [line(reserved) for reserved in (30, 50, 40, 50)]
    assert allocator_trace.compute_slack([line(20)], run).grown == 0
    assert allocator_trace.compute_slack([line(20)], [*run[:3], line(57)]).grown == 7
