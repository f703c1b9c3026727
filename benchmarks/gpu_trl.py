"""Steps of TRL on a GPU, with prompts of 256 tokens as in ``gpu.py``, and completions of 512.

    python benchmarks/gpu_trl.py --model DIR

Weights are fp32. 8 prompts of 256 digits have 8 completions each, which no token ends. Micro-batches have 16 rows,
without gradient checkpointing; all else is TRL's default for its own generation. The first of two
steps is a warm-up. ``gpu.py`` starts this script with a random model; a digit must be a token.
"""

import json
import random
import tempfile
import time

import torch
from common import parser, trl_trainer
from trl import GRPOTrainer

ROWS = 64
LENGTH = 512
clock = []
"""Begin and end of each generation."""


def now() -> float:
    torch.cuda.synchronize()
    return time.perf_counter()


def variety(completions, **columns) -> list[float]:
    return [float(len(set(text)) % 7) for text in completions]


class Timed(GRPOTrainer):
    def _generate_single_turn(self, *args, **kwargs):
        clock.append(now())
        result = super()._generate_single_turn(*args, **kwargs)
        clock.append(now())
        return result


p = parser(__doc__)
p.add_argument("--model", required=True)
a = p.parse_args()
rows = [{"prompt": "".join(random.choices("0123456789", k=256))} for _ in range(16)]
with tempfile.TemporaryDirectory() as folder:
    trainer = trl_trainer(
        a.model,
        rows,
        variety,
        folder,
        cls=Timed,
        bf16=True,
        per_device_train_batch_size=16,
        gradient_accumulation_steps=ROWS // 16,
        num_generations=8,
        max_completion_length=LENGTH,
        max_steps=2,
        gradient_checkpointing=False,
    )
    trainer.train()
begin, end = clock[-2:]
found = {
    "step s": now() - begin,
    "sampling s": end - begin,
    "sampled tokens/s": ROWS * LENGTH / (end - begin),
    "GiB": torch.cuda.max_memory_allocated() / 2**30,
}
print(json.dumps(found))
