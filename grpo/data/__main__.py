"""``python -m grpo.data --config X``."""

import sys

from grpo.data.preview import main

sys.exit(main(sys.argv[1:]))
