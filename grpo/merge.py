"""``python -m grpo.merge``: see :mod:`grpo.commands.merge`."""

import sys

from grpo.commands.merge import main

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
