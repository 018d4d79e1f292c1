"""Tests of ``core/log.py``: of several messages with the same key, only the first is logged."""

from __future__ import annotations

import logging

from sglang_moe_patches.core import log


def test_once_logs_one_message_per_key(caplog):
    with caplog.at_level(logging.INFO, log.logger.name):
        for rows in (16, 17):
            log.log_once(logging.WARNING, "cut", "%d rows are cut", rows)
        log.log_once(logging.INFO, "whole", "nothing is cut")
    assert [(record.levelname, record.message) for record in caplog.records] == [
        ("WARNING", "16 rows are cut"),
        ("INFO", "nothing is cut"),
    ]
