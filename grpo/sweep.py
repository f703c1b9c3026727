"""``python -m grpo.sweep``: see :mod:`grpo.commands.sweep`."""

import sys

from grpo.commands.sweep import main

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
