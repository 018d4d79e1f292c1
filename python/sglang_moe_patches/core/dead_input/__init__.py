"""Reuse of a decoder layer's input after the layer has read it for the last time.

A decoder layer normalizes its input, and then attention reads the normalized tensor. After that norm no code reads the
input again: the layer has rebound its local name, and the model's loop over the layers keeps the tensor only until the
layer returns. The input is then called a *dead input*. The layer *offers* the memory of its dead input, and the runner
of its routed experts *takes* the memory for its output or as scratch memory.

Two kinds of inputs are not dead:

- The input of a layer that starts without a residual. This input *becomes* the residual. The next norm updates the
  residual in place, and all later layers read it.
- The input of the first layer of a pipeline stage. It is the caller's ``input_embeds``, or a buffer that receives
  another stage's output.

Newer engine releases offer layer inputs, too, but do not check that the inputs are dead. This package therefore
disables the engine's own offers in every layer. Its own offers use the engine's channel where the engine has one.

For each model that the engine builds, :mod:`.probe` decides which layers may offer their input. It uses proofs about
the source code of the layers and of the model's loop (:mod:`.proofs`).
"""
