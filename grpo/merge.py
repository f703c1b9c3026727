"""Add a LoRA adapter to the weights of its model: a Hugging Face folder that every program loads without peft.

    python -m grpo.merge runs/X                                the newest valid checkpoint of a run, into its folder merged/
    python -m grpo.merge runs/X/checkpoint-100 --output DIR    any folder with adapter_config.json

The model's own weights are read again from where the adapter's configuration says. The sum W + scale * B @ A is written in fp32.
"""

import argparse
import os
import shutil
import sys
from pathlib import Path

from grpo.model import is_adapter, write_merged
from grpo.run import checkpoint
from grpo.system import sync
from grpo.telemetry.terminal import survive_lost_readers
from grpo.telemetry.user_errors import print_user_error


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
        merge(adapter, output, trust_remote_code=options.trust_remote_code)
    except (ValueError, OSError) as error:
        print_user_error(error)
        return 2
    print(f"written   {output}, a Hugging Face folder")
    return 0


def _adapter_folder(folder: Path) -> Path:
    if is_adapter(folder):
        return folder
    newest, _ = checkpoint.find_newest_valid(folder)
    if newest is None:
        raise ValueError(f"{folder} holds neither an adapter (adapter_config.json) nor a valid checkpoint")
    if not is_adapter(newest):
        raise ValueError(f"{newest} holds no adapter: it is a whole model already")
    return newest


def merge(adapter: Path, output: Path, *, trust_remote_code: bool = False) -> None:
    """Write the whole model of an adapter folder. ``output`` appears when it is complete and on disk.

    Raises:
        ValueError: if ``output`` exists, or if adapter or model cannot be read.
        OSError: if it cannot be written.
    """
    if output.exists():
        raise ValueError(f"{output} exists: delete it, or choose another folder with --output")
    partial = output.with_name(f".partial-{output.name}")
    shutil.rmtree(partial, ignore_errors=True)
    try:
        write_merged(adapter, partial, trust_remote_code=trust_remote_code)
        for path in [*partial.iterdir(), partial]:
            sync(path)
        os.rename(partial, output)
        sync(output.parent)
    finally:
        shutil.rmtree(partial, ignore_errors=True)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
