"""Environment variables that the program sets before it imports the libraries that read them."""

import os
import subprocess
import sys

import pytest
from conftest import ROOT

from grpo.system import ALLOCATOR_NAMES as NAMES
from grpo.system import set_environment_defaults


@pytest.mark.parametrize("own", [{}, *({name: "max_split_size_mb:64"} for name in NAMES), {NAMES[1]: ""}])
def test_segments_are_expandable_unless_the_user_says_otherwise(own, monkeypatch):
    for name in NAMES:
        monkeypatch.delenv(name, raising=False)
    for name, value in own.items():
        monkeypatch.setenv(name, value)
    set_environment_defaults()
    found = {name: os.environ[name] for name in NAMES if name in os.environ}
    assert found == (own or {"PYTORCH_ALLOC_CONF": "expandable_segments:True"})


def test_the_program_sets_them_before_torch_is_imported():
    """The import of torch is where this process ends."""
    program = (
        "import os, runpy, sys\n"
        "class Refused:\n"
        "    def find_spec(self, name, path=None, target=None):\n"
        "        if name == 'torch':\n"
        "            names = 'PYTORCH_ALLOC_CONF', 'ONEDNN_PRIMITIVE_CACHE_CAPACITY', 'LRU_CACHE_CAPACITY'\n"
        "            sys.exit(' '.join(os.environ[name] for name in names))\n"
        "sys.meta_path.insert(0, Refused())\n"
        "runpy.run_path('train_grpo.py', run_name='__main__')\n"
    )
    env = {name: value for name, value in os.environ.items() if not name.startswith(("PYTORCH_", "ONEDNN_", "LRU_"))}
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=ROOT, env=env, capture_output=True, text=True, timeout=60, check=False
    )
    assert done.stderr.strip() == "expandable_segments:True 64 64"
