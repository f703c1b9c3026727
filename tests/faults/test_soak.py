"""Four kills of the soak; more by hand (see ``soak.py``)."""

import subprocess
import sys

import pytest
from conftest import ROOT


@pytest.mark.slow
def test_four_kills_of_the_soak():
    command = [
        sys.executable,
        str(ROOT / "tests" / "faults" / "soak.py"),
        "--kills",
        "4",
        "--ranks",
        "1",
        "2",
    ]
    done = subprocess.run(
        command, capture_output=True, text=True, cwd=ROOT, timeout=900, check=False
    )
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]
    counted = dict(line.rsplit(maxsplit=1) for line in done.stdout.splitlines()[-10:])
    assert int(counted["kills"]) >= 4
    assert counted["differences"] == counted["lost"] == "0"
