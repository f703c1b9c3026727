"""Output of a run about itself: console, bars, metrics.jsonl, dashboards, hints, completions/,
starts.jsonl."""
