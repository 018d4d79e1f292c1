"""What all benchmarks share: model shapes, the machine, timing, options and results, servers."""
