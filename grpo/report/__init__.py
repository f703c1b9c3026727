"""``python -m grpo.report RUN ...``: one HTML file, readable offline, that shows a run or compares
several."""
