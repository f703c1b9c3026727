"""``python -m grpo.sweep``."""

import sys

from grpo.commands.sweep import main

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
