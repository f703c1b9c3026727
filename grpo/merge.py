"""``python -m grpo.merge``: see :mod:`grpo.commands.merge`."""

import sys

# This file stands above the room `commands` so that the command is short: python -m grpo.merge.
from grpo.commands.merge import main

if __name__ == "__main__":
    sys.exit(main())
