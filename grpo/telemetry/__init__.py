"""What a run reports about itself: console, progress bars, metrics.jsonl, dashboards, hints,
completions/, starts.jsonl."""
