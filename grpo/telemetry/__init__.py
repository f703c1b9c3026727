"""What a run reports: console, metrics.jsonl, wandb, hints, samples, environment, profile."""
