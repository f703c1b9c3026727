"""Writes checkpoints of divided models: all ranks together, and never in the background."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import nn

from grpo.distributed import World, gathered_on_main, share
from grpo.model import saving
from grpo.run import checkpoint
from grpo.run.saver import Saver, how_to_continue
from grpo.run.sharded.states import save_states
from grpo.run.sharded.weight_files import INDEX, SINGLE

MAX_FILE_BYTES = saving.MAX_FILE_BYTES


class ShardedSaver(Saver):
    """A :class:`Saver` of which every save is a collective: rank 0 writes the model, gathered a tensor at a time, every rank its states."""

    def save(self) -> None:
        """Write a checkpoint of the newest complete step.

        Raises:
            OSError, OtherRankFailed: on all ranks, if any cannot write.
        """
        if self.config.debug:
            return
        with self.world.timed("save", {}):
            if self.world.is_main:
                self.reporter.sync()
            self._save_into(Path(self.config.output_dir), self.progress.step)
        self.saved_step = self.written_step = self.progress.step

    def save_newest(self) -> None:
        if self.saved_step < self.progress.step:
            self.save()

    def dry_run(self) -> None:
        rehearsal = Path(self.config.output_dir) / ".rehearsal"
        try:
            self._save_into(rehearsal, 0)
            with self.world.fail_together():
                if self.world.is_main:
                    checkpoint.verify(rehearsal / "checkpoint-0")
        finally:
            if self.world.is_main:
                shutil.rmtree(rehearsal, ignore_errors=True)

    def rescue(self) -> str | None:
        """A note on the steps that are lost: no rank has the weights, and after a failure the ranks no longer gather them."""
        step = self.progress.step
        if self.config.debug or not self.world.is_main or step <= self.written_step:
            return None
        return (
            f"checkpoint-{self.written_step} is the newest: the steps after it are lost, because under runtime.parallel=fsdp a save needs "
            f"all ranks; {how_to_continue(self.config)}"
        )

    def rescue_while_busy(self) -> str | None:
        return self.rescue()

    def _save_into(self, output_dir: Path, step: int) -> None:
        world, arguments = self.world, self._arguments()
        model, optimizer, reference = (arguments[name] for name in ("model", "optimizer", "reference"))
        partial = checkpoint.partial_folder(output_dir, step)
        try:
            with world.fail_together():
                check_finite_shares(model, step)
                if world.is_main:
                    checkpoint.begin(partial)
            error = write_model(model, partial, world)
            with world.fail_together():
                if error is not None:
                    raise error
            save_states(partial / "trainer", world, model, optimizer, reference)
            with world.fail_together():  # rank 0 lists the files of all ranks in the manifest
                if world.is_main:
                    arguments["tokenizer"].save_pretrained(partial)
                    groups = {"state": {}, "param_groups": optimizer.state_dict()["param_groups"]}
                    trained = {"optimizer": groups, "schedule": arguments["schedule"].state_dict()}
                    checkpoint.save_trained(trained, partial)
                    kept = {name: arguments[name] for name in ("state", "keep", "best_step")}
                    checkpoint.publish(partial, output_dir, step, **kept)
        except OSError as error:
            raise self._explained(step, error) from error


def check_finite_shares(model: nn.Module, step: int) -> None:
    """ValueError if a weight of this rank's share is NaN or infinite."""
    for name, parameter in model.named_parameters():
        if not torch.isfinite(share(parameter)).all():
            problem = f"{name} holds values that are not finite: no checkpoint is saved at step {step}"
            raise ValueError(f"{problem}; lower optim.learning_rate")


def write_model(model: nn.Module, folder: Path, world: World) -> Exception | None:
    """Write a Hugging Face folder in files of at most ``MAX_FILE_BYTES``; returns rank 0's error.

    A rank that stopped gathering after an error would leave the others waiting, so all tensors are gathered in any case.
    """
    error, index, plan = None, {}, list(saving.file_parts(model, MAX_FILE_BYTES))
    for number, tensors in enumerate(plan, 1):
        file = SINGLE if len(plan) == 1 else f"model-{number:05d}-of-{len(plan):05d}.safetensors"
        gathered = {name: tensor.contiguous() for name, tensor in gathered_on_main(tensors, world)}
        if world.is_main and error is None:
            try:
                save_file(gathered, folder / file, metadata={"format": "pt"})
            except Exception as caught:  # safetensors reports a full disk in an exception of its own
                error = caught if isinstance(caught, OSError) else OSError(f"{type(caught).__name__}: {caught}")
            index |= dict.fromkeys(gathered, file)
    if world.is_main and error is None:
        try:
            checkpoint.save_config(model, folder)
            if len(plan) > 1:
                size = sum(p.numel() * p.element_size() for _, p in saving.saved_tensors(model))
                text = json.dumps({"metadata": {"total_size": size}, "weight_map": index}, indent=2)
                (folder / INDEX).write_text(text, encoding="utf-8")
        except OSError as caught:
            error = caught
    return error
