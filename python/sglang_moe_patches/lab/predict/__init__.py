"""Predictions of a server's memory from the sizes in ``config.json``, on any machine.

:mod:`.config` reads the sizes, which :mod:`.shapes` defines. :mod:`.forward` has the formulas for a forward pass. The
benchmarks compare these formulas with measurements. :mod:`.engine_query` asks the engine for its MoE runner and its KV
cache size. :mod:`.room` compares two numbers of bytes: the memory that weights and KV cache leave free (the *room*),
and the memory of forward passes, CUDA graphs and buffers (the *need*). :mod:`.model_report` combines the results in the
report of ``doctor --model``, and :mod:`.terminal` prints the report.
"""
