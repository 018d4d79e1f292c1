"""The dead input of decoder layers: which layers *offer* it, and which runners *take* it.

A layer's input is dead as soon as attention has read it: the layer rebinds its local name, and only the loop of the
model keeps the tensor, unread, until the layer returns. Not where the layer starts without a residual: its input
*becomes* the residual, which the next norm updates in place and everything downstream reads. And not in the first layer
of a pipeline stage: its input is the caller's ``input_embeds``, or a buffer in which another stage's output arrives.

Only this package offers. Where the engine has an offer of its own, which does not ask whether the input is dead, it is
*withheld* in every layer, and ours go through the engine's channel.

Which layers offer is proved, for the model that is built, by the code of its layers and of its loop (:mod:`.proofs`,
:mod:`.probe`).
"""
