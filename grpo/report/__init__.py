"""What became of a run, or of several side by side, as one HTML file that needs no network: ``python -m grpo.report RUN ...``."""
