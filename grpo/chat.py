"""``python -m grpo.chat``."""

import sys

from grpo.commands.chat import main

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
