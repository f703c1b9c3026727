"""The commands that ``python -m grpo.chat``, ``data``, ``evaluation``, ``merge``, ``report`` and
``sweep`` run."""
