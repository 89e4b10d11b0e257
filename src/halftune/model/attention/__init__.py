"""The plan's attention in front of transformers' layers, softmax and linear; the proof that packed samples stay apart.

In: a model, an `AttentionPlan`.
Out: the same model with its attention routed behind the guard.
Imported by: `bench`, `certify`, `doctor`, `model.adapters`, `model.load`, `model.meta`, `model.policy`, `serve`,
    `train`.
"""
