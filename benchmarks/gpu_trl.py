"""A GRPO step of TRL on a GPU, at the shape and with the lengths of ``gpu_step.py``.

    .venv-trl/bin/python benchmarks/gpu_trl.py
    .venv-trl/bin/python benchmarks/gpu_trl.py --dtype bfloat16    weights in bf16, which is faster

8 prompts of 256 tokens have 8 completions of 512 tokens each, which no token ends. Micro-batches
have 16 rows, without gradient checkpointing; all else is TRL's default for its own generation.
"""

import argparse
import json
import random
import tempfile
import time

import torch
import trl
from common import trl_trainer
from gpu_checks import SIZES
from random_model import save_random_model
from transformers import TrainerCallback
from trl import GRPOTrainer

PROMPTS = 8
GROUP = 8
PROMPT_LENGTH = 256
LENGTH = 512

record = {"tokens": [], "step": [], "sampling": []}


def now() -> float:
    torch.cuda.synchronize()
    return time.perf_counter()


def variety(completions, completion_ids, **columns) -> list[float]:
    record["tokens"].append(sum(map(len, completion_ids)))
    return [float(len(set(completion)) % 7) for completion in completions]


class Clock(TrainerCallback):
    def on_step_begin(self, *args, **kwargs):
        self.started = now()

    def on_step_end(self, *args, **kwargs):
        record["step"].append(now() - self.started)


class Timed(GRPOTrainer):
    def _generate_single_turn(self, *args, **kwargs):
        started = now()
        result = super()._generate_single_turn(*args, **kwargs)
        record["sampling"].append(now() - started)
        return result


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--dtype", default="float32", help="of the weights")
    parser.add_argument("--rows", type=int, default=16, help="of a micro-batch")
    parser.add_argument("--steps", type=int, default=3, help="the first is a warm-up")
    a = parser.parse_args()
    rng = random.Random(0)
    rows = []
    for _ in range(PROMPTS * a.steps):
        # A digit is a token.
        digits = [rng.choice("0123456789") for _ in range(PROMPT_LENGTH)]
        rows.append({"prompt": "".join(digits)})
    with tempfile.TemporaryDirectory() as folder:
        model = f"{folder}/model"
        save_random_model(model, query_scale=4.0, **SIZES["qwen2.5-0.5b"])
        trainer = trl_trainer(
            model,
            rows,
            variety,
            f"{folder}/run",
            cls=Timed,
            callbacks=[Clock()],
            dtype=a.dtype,
            bf16=True,
            per_device_train_batch_size=a.rows,
            gradient_accumulation_steps=PROMPTS * GROUP // a.rows,
            num_generations=GROUP,
            max_completion_length=LENGTH,
            temperature=1.0,
            beta=0.0,
            learning_rate=1e-6,
            lr_scheduler_type="constant",
            loss_type="grpo",
            max_steps=a.steps,
            gradient_checkpointing=False,
        )
        trainer.train()
    peak = torch.cuda.max_memory_allocated() / 2**30
    print(json.dumps(record | vars(a) | {"trl": trl.__version__, "GiB": peak}))


if __name__ == "__main__":
    main()
