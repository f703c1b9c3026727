"""The algorithm: batches, advantages, log-probs and the loss.

Tensors in, tensors out: this package knows no configuration and no ranks.
"""
