"""What a forward's memory should be: from the sizes in ``config.json`` alone, on any machine.

:mod:`.shapes` are the sizes, :mod:`.config` reads them, :mod:`.forward` has the formulas, which the benchmarks check
against what they measure. :mod:`.engine_query` asks the engine which runner it would choose; :mod:`.model_report` puts
them together for ``doctor --model``.
"""
