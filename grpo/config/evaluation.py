"""The section ``eval`` of the configuration."""

from typing import Self

from pydantic import Field, model_validator

from grpo.config.schema import Section


class EvalConfig(Section):
    every: int | None = Field(None, ge=1)
    """Evaluate every N steps; none: only before and after training."""
    before_training: bool = True
    """Evaluate before the first step, to compare the end of training with."""
    num_samples: int = Field(1, ge=1)
    """Sampled completions per problem for mean@k and pass@k, besides the greedy one; none are sampled at temperature 0."""
    temperature: float = Field(0.0, ge=0)
    """Sampling temperature of the sampled completions; 0: the greedy completion only."""
    top_p: float = Field(1.0, gt=0, le=1)
    """Sample only among the likeliest tokens that have this probability together. The greedy completion uses no filter."""
    top_k: int = Field(0, ge=0)
    """Sample only among the k likeliest tokens; 0: all."""
    min_p: float = Field(0.0, ge=0, le=1)
    """Do not sample tokens with less than this fraction of the likeliest token's probability."""
    max_completion_length: int | None = Field(None, ge=1)
    """Longest completion of an evaluation in tokens, greedy ones too; none: rollout.max_completion_length."""
    max_samples: int | None = Field(None, ge=1)
    """Evaluate on the first N evaluation problems; none: all."""
    correctness: str | None = None
    """Name of the reward that tells whether a completion is correct; none: the first reward that checks answers."""
    correct_above: float = 0.0
    """A completion is correct if the reward `correctness` is above this value (0.99 where a wrong answer earns a part of the reward)."""
    format: str | None = None
    """Name of the reward that is above 0 for a well-formed completion; none: `format`. Without that reward, a completion
    is well-formed if it has an answer as `accuracy` in the mode boxed or #### reads it, else if it is <think>..</think> <answer>..</answer>."""

    @property
    def num_sampled(self) -> int:
        """Sampled completions per problem: ``num_samples``, or 0 at temperature 0."""
        return self.num_samples if self.temperature > 0 else 0

    @model_validator(mode="after")
    def _check_samples_differ(self) -> Self:
        if self.num_samples > 1 and self.temperature == 0:
            raise ValueError(
                f"eval.num_samples={self.num_samples} at eval.temperature=0 would be the same completion {self.num_samples} "
                "times: set eval.temperature (1.0, for example), or num_samples=1 for greedy only"
            )
        return self
