"""Entry point of ``python -m grpo.report``."""

import sys

from grpo.commands.report import main

if __name__ == "__main__":
    sys.exit(main())
