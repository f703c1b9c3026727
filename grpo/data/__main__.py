"""Entry point of ``python -m grpo.data``."""

import sys

from grpo.commands.data import main

if __name__ == "__main__":
    sys.exit(main())
