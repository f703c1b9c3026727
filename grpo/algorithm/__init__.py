"""The algorithm: batches, advantages, log-probs and the loss. Tensors in, tensors out; no
configuration, no ranks."""
