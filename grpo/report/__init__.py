"""HTML report (``python -m grpo.report RUN ...``): one file, readable offline, that shows a run or
compares several runs."""
