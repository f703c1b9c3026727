"""Turns: the model acts, tools or an environment answer, and only the model's own tokens are
trained (docs/tools.md).

:class:`grpo.turns.tools.Tools` holds the tools and environments of a run. Their calls run in worker
processes (:mod:`grpo.turns.sessions`). :class:`grpo.turns.engine.TurnsEngine` plays conversations
with any engine. Importing this package imports no torch.
"""
