"""Modules that several benchmarks share: model sizes, timing, options, results, servers and their plugins."""
