"""The choices of an algorithm by name: one list each, read by the configuration, the loss and the advantages. Imports no torch."""

from typing import Literal

Objective = Literal["clip", "cispo", "reinforce"]
Baseline = Literal["mean", "leave_one_out", "none"]
Scale = Literal["group", "batch", "none"]
Aggregation = Literal["response_mean", "token_mean", "constant"]
ImportanceLevel = Literal["token", "sequence"]
KLEstimator = Literal["k1", "k2", "k3"]
