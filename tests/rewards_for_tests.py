"""Reward functions that the tests name in configurations."""


def share_of_digits(prompts, completions, **columns):
    """Between 0 and 1, different for nearly every completion: an untrained model gets a gradient
    from it."""
    return [
        sum(c.isdigit() or c in "aeiou" for c in text) / max(len(text), 1) for text in completions
    ]


def constant(prompts, completions, **columns):
    return [0.5] * len(completions)


def raises(prompts, completions, **columns):
    raise RuntimeError("this reward is broken")


def wrong_length(prompts, completions, **columns):
    return [1.0]


def unscorable(prompts, completions, **columns):
    """None for every completion whose text has an even length."""
    return [None if len(text) % 2 == 0 else 1.0 for text in completions]


def notes(completions, log_extra, log_metric):
    """0 everywhere; logs what it saw."""
    log_extra("characters", [len(text) for text in completions])
    log_metric("mean_characters", sum(map(len, completions)) / len(completions))
    return [0.0] * len(completions)


def huge(prompts, completions, **columns):
    """Differences of these overflow float32."""
    return [3e38 * (len(text) % 2) for text in completions]
