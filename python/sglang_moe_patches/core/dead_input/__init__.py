"""Reuse of a decoder layer's input after the layer has read it for the last time.

A decoder layer begins with a norm. The norm adds the layer's input to the residual and normalizes the sum. Attention
reads the normalized sum. After this norm, no code reads the input again, and the layer's own variable already refers to
another tensor. Only the model's loop over the layers still refers to the input, until the layer returns. The input is
now called a *dead input*: it is still allocated, but its memory may be overwritten once attention has run. (The norm
may work in place. Attention then reads this memory.) The layer *offers* the memory of its dead input. The runner of the
layer's routed experts *takes* this memory for the output or as scratch memory.

Two kinds of inputs are not dead:

- The input of a layer that receives no residual, such as the model's first layer. This input *becomes* the residual.
  The next norm updates the residual in place, and all later layers read the residual.
- The input of the first layer of a pipeline stage. It is the caller's ``input_embeds``, or a buffer that receives
  another stage's output.

Newer engine releases offer layer inputs, too, but do not check that the inputs are dead. This package therefore
disables the engine's offers in every layer. The offers of this package use the engine's channel if the engine has one.

For each model that the engine builds, :mod:`.probe` decides which layers may offer their input. It uses proofs about
the source code of the layers and of the model's loop (:mod:`.proofs`).
"""
