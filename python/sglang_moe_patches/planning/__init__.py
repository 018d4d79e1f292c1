"""How far ``--mem-fraction-static`` can go up: what the engine sets aside, what its forwards need, and what follows.

The engine sizes its KV cache so that a part of the memory that was free before loading stays free: ``1 -
--mem-fraction-static``, guessed by a rule from a few arguments. Here a server is started and its largest forwards are
driven; what they leave free, less a margin, can be KV cache.
"""
