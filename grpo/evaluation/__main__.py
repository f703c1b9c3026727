"""Entry point of ``python -m grpo.evaluation``."""

import sys

from grpo.commands.evaluation import main

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
