"""Names that TRL and other trainers have for keys of the configuration."""

from pathlib import Path

import yaml

FILE = Path(__file__).with_name("other_names.yaml")
OTHER_NAMES = yaml.safe_load(FILE.read_text())
"""Name, or pattern of names -> the key that replaces it, the key with a note (``KEY; NOTE``), or a
sentence. Names are listed without their section, unless they are names of another section's keys
too.

The name of a key itself -> an addition to the message about a wrong value of this key."""
