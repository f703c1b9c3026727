"""Completions of several turns: after each turn of the model, tools or an environment answer.

Only the tokens that the model wrote are trained (docs/tools.md).

:class:`grpo.turns.tools.Tools` holds the tools and the environment of a run. Their code runs in
worker processes (:mod:`grpo.turns.sessions`). :class:`grpo.turns.engine.TurnsEngine` plays the
conversations, and any engine can sample the turns. Importing this package imports no torch.
"""
