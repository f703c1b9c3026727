"""``python -m grpo.sweep``: see :mod:`grpo.commands.sweep`."""

import sys

# This file stands above the room `commands` so that the command is short: python -m grpo.sweep.
from grpo.commands.sweep import main

if __name__ == "__main__":
    sys.exit(main())
