"""Stands in for the engine's module of that name."""


def get_device_memory_capacity(device=None):
    return 100_000.0
