"""Environment variables that the program sets before it imports the libraries that read them."""

import subprocess
import sys

from conftest import ROOT


def test_the_program_sets_them_before_torch_is_imported():
    program = (
        "import os, sys\n"
        "class Refused:\n"
        "    def find_spec(self, name, path=None, target=None):\n"
        "        if name == 'torch':\n"
        "            sys.exit(os.environ['LRU_CACHE_CAPACITY'])\n"
        "sys.meta_path.insert(0, Refused())\n"
        "import train_grpo\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, timeout=60
    )
    assert done.stderr.strip() == "64"
