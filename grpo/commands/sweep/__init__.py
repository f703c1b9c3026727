"""``python -m grpo.sweep``: one configuration with several values of some keys and several seeds, as one table and one picture."""
