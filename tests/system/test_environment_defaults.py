"""Environment variables that the program sets before it imports the libraries that read them."""

import os
import subprocess
import sys

import pytest
from conftest import ROOT

from grpo.system import ALLOCATOR_NAMES as NAMES
from grpo.system import set_environment_defaults


@pytest.mark.parametrize("own", [{}, {NAMES[0]: "max_split_size_mb:64"}, {NAMES[1]: ""}])
def test_segments_are_expandable_unless_the_user_says_otherwise(own, monkeypatch):
    monkeypatch.setattr(os, "environ", found := dict(own))
    set_environment_defaults()
    assert {name: found[name] for name in NAMES if name in found} == (own or {NAMES[0]: "expandable_segments:True"})


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
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert done.stderr.strip() == "64"
