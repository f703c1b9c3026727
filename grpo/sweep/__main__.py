"""``python -m grpo.sweep --config X --vary section.key=value,value --seeds 0,1,2``."""

import sys

from grpo.sweep.command import main

sys.exit(main(sys.argv[1:]))
