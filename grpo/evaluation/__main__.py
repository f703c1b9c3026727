"""``python -m grpo.evaluation --config X --model FOLDER``."""

import sys

from grpo.evaluation.command import main

sys.exit(main(sys.argv[1:]))
