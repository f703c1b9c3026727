"""What a run shows and writes about itself: console, progress bars, metrics.jsonl, wandb, hints, completions/, run.json, traces."""
