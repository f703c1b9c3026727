"""``python -m grpo.chat``: see :mod:`grpo.commands.chat`."""

import sys

from grpo.commands.chat import main

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
