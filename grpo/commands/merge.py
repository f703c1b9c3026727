"""Merge a LoRA adapter into the weights of its base model. The result is a Hugging Face folder that
loads without peft.

    python -m grpo.merge runs/X
        the newest checkpoint of a run, into its folder merged/
    python -m grpo.merge runs/X/checkpoint-100 --output DIR
        any folder with adapter_config.json

The weights of the base model are read from the place that the adapter's configuration names. peft
adds the adapter in fp32.
"""

import argparse
from pathlib import Path

from grpo.checkpoint import format as checkpoint
from grpo.commands.command import command
from grpo.model import is_adapter, write_merged


@command
def main(argv: list[str]) -> None:
    parser = argparse.ArgumentParser(
        prog="python -m grpo.merge",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("folder", metavar="RUN_OR_CHECKPOINT", type=Path)
    parser.add_argument(
        "--output", metavar="DIR", type=Path, help="default: merged/ in the checkpoint"
    )
    parser.add_argument(
        "--trust-remote-code", action="store_true", help="run Python code that comes with the model"
    )
    options = parser.parse_args(argv)

    folder = options.folder
    # The folder of a run holds checkpoints. The newest of them may be half written, so the newest
    # valid checkpoint is taken.
    adapter = folder if is_adapter(folder) else checkpoint.find_newest_valid(folder)
    # A run without LoRA has checkpoints, too, but they are models already.
    if adapter is None or not is_adapter(adapter):
        raise ValueError(f"{adapter or folder} holds no adapter (adapter_config.json)")
    output = options.output or adapter / "merged"
    write_merged(adapter, output, trust_remote_code=options.trust_remote_code)
    print(f"written   {output}, a Hugging Face folder")
