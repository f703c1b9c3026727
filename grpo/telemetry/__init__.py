"""Reports of a run: console, progress bars, metrics.jsonl, dashboards, hints, completions/ and
starts.jsonl."""
