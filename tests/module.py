"""``python -m`` of the first argument, as a script: ``run_forked`` starts scripts."""

import runpy
import sys

sys.argv.pop(0)
runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
