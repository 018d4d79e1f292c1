"""What kv-sizing gives a server, judged: two starts, the engine's rule beside what was needed, and a verification.

The engine sizes its KV cache so that a part of the memory that was free before loading stays free: ``1 -
--mem-fraction-static``, guessed by a rule from a few arguments. What is needed is measured in the server itself
(:mod:`sglang_moe_patches.memory.kv_sizing`); here it is shown, and a load of another kind has to be survived with it.
"""
