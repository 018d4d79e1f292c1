"""Predictions of a server's memory from the sizes in ``config.json``, on any machine.

:mod:`.shapes` has the sizes, and :mod:`.config` reads them. :mod:`.forward` has the formulas for a forward pass, which
the benchmarks compare with measurements. :mod:`.engine_query` asks the engine which runner and which KV cache it would
choose. :mod:`.room` compares the room beside weights and KV cache with the need. :mod:`.model_report` makes a report of
all of it for ``doctor --model``, and :mod:`.terminal` prints the report.
"""
