"""Predictions of a server's memory from the sizes in ``config.json``, on any machine.

:mod:`.shapes` has the sizes, and :mod:`.config` reads these sizes. :mod:`.forward` has the formulas for a forward pass,
    which the benchmarks compare with measurements. :mod:`.engine_query` asks the engine which runner and which KV cache
    it would choose. :mod:`.room` compares two numbers of bytes. The *room* is the memory that weights and KV cache
    leave free. The *need* is the memory that forward passes, CUDA graphs and buffers take. :mod:`.model_report`
    combines all of this in a report for ``doctor --model``, and :mod:`.terminal` prints the report.
"""
