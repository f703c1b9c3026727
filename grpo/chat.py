"""``python -m grpo.chat``: see :mod:`grpo.commands.chat`."""

import sys

# This file stands above the room `commands` so that the command is short: python -m grpo.chat.
from grpo.commands.chat import main

if __name__ == "__main__":
    sys.exit(main())
