"""Stands in for an engine that hangs when it is imported."""

import time

time.sleep(3600)
