"""Add a LoRA adapter to the weights of its model: a Hugging Face folder that every program loads without peft.

    python -m grpo.merge runs/X                                the newest checkpoint of a run, into its folder merged/
    python -m grpo.merge runs/X/checkpoint-100 --output DIR    any folder with adapter_config.json

The model's own weights are read again from where the adapter's configuration says; peft adds the adapter in fp32.
"""

import argparse
import sys
from pathlib import Path

from grpo.checkpoint import format as checkpoint
from grpo.model import is_adapter, write_merged
from grpo.telemetry.terminal import print_user_error, survive_lost_readers


def main(argv: list[str]) -> int:
    survive_lost_readers()
    parser = argparse.ArgumentParser(
        prog="python -m grpo.merge", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", metavar="RUN_OR_CHECKPOINT", type=Path)
    parser.add_argument(
        "--output", metavar="DIR", type=Path, help="folder to write; default: merged/ in the checkpoint"
    )
    parser.add_argument("--trust-remote-code", action="store_true", help="run Python code that comes with the model")
    options = parser.parse_args(argv)
    try:
        adapter = _adapter_folder(options.folder.expanduser())
        output = (options.output or adapter / "merged").expanduser()
        write_merged(adapter, output, trust_remote_code=options.trust_remote_code)
    except (ValueError, OSError) as error:
        print_user_error(error)
        return 2
    print(f"written   {output}, a Hugging Face folder")
    return 0


def _adapter_folder(folder: Path) -> Path:
    newest = folder if is_adapter(folder) else checkpoint.find_newest_valid(folder)[0]
    if newest is None:
        raise ValueError(f"{folder} holds neither an adapter (adapter_config.json) nor a valid checkpoint")
    if not is_adapter(newest):
        raise ValueError(f"{newest} holds no adapter: it is a whole model already")
    return newest


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
