"""Output of a run about itself: console, progress bars, metrics.jsonl, wandb, hints, completions/, starts.jsonl, traces."""
