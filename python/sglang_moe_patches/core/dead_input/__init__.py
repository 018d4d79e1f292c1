"""Reuse of a decoder layer's input after the layer has read it for the last time.

A decoder layer normalizes its input, and then attention reads the normalized tensor. After this norm, no code reads the
input again. The layer's variable for the input refers to another tensor, and the model's loop over the layers only
keeps the input until the layer returns. The input is then called a *dead input*: its memory may be overwritten,
although it is still allocated. The layer *offers* the memory of its dead input. The runner of the layer's routed
experts *takes* this memory for the output or as scratch memory.

Two kinds of inputs are not dead:

- The input of a layer that starts without a residual. This input *becomes* the residual. The next norm updates the
  residual in place, and all later layers read it.
- The input of the first layer of a pipeline stage. It is the caller's ``input_embeds``, or a buffer that receives
  another stage's output.

Newer engine releases offer layer inputs, too, but do not check that the inputs are dead. This package therefore
disables the engine's offers in every layer. The offers of this package use the engine's channel if the engine has one.

For each model that the engine builds, :mod:`.probe` decides which layers may offer their input. It uses proofs about
the source code of the layers and of the model's loop (:mod:`.proofs`).
"""
