"""One side of compare_trl.py in a process of its own: this trainer, or TRL's. Each step waits for
its turn.

The one argument is a JSON object. Output lines: ``ready`` before every step, which starts when a
line is read; at last a JSON object with completion tokens, seconds of the step and of sampling for
every step, and the peak RSS."""

import json
import os
import resource
import sys
import tempfile
import time
from pathlib import Path
from types import SimpleNamespace

from common import microbatches_of_trl, trl_trainer

P = 4
G = 8
INSTRUCTION = (
    "Answer the question. First think step by step between <think> and </think>, "
    "then give the final number between <answer> and </answer>."
)
SYSTEM = (
    f"{INSTRUCTION}\n\n"
    "Example question: Natalia sold clips to 48 of her friends in April, and then she sold half as "
    "many clips in May. How many clips did Natalia sell altogether in April and May?\n"
    "Example answer: <think>\n"
    "Natalia sold 48/2 = 24 clips in May. "
    "Natalia sold 48+24 = 72 clips altogether in April and May.\n"
    "</think>\n<answer>72</answer>"
)


def system_prompt(a) -> str:
    return INSTRUCTION if a.prompt_tokens else SYSTEM


def problems(a) -> tuple[list[dict], float]:
    """The first rows of GSM8K whose prompts have a length within 10% of ``prompt_tokens``, any
    length if it is 0, and the mean length of their prompts in tokens."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(a.model)
    rows = []
    lengths = []
    for line in Path(a.data).read_text(encoding="utf-8").splitlines():
        row = json.loads(line)
        prompt = messages(a, row["question"])
        encoded = tokenizer.apply_chat_template(prompt, add_generation_prompt=True)
        length = len(encoded["input_ids"])
        if not a.prompt_tokens or abs(length - a.prompt_tokens) <= 0.1 * a.prompt_tokens:
            answer = row["answer"].split("####")[-1].strip()
            rows.append({"question": row["question"], "answer": answer})
            lengths.append(length)
        if len(rows) == P * a.steps:
            return rows, sum(lengths) / len(lengths)
    raise SystemExit(f"{a.data}: too few prompts of about {a.prompt_tokens} tokens")


def messages(a, question: str) -> list[dict]:
    system = {"role": "system", "content": system_prompt(a)}
    return [system, {"role": "user", "content": question}]


def letters(completions, **columns) -> list[float]:
    """The reward of both sides. It differs within nearly every group: without beta, our trainer
    computes nothing for a group of equal rewards, and a small model has no other reward here."""
    return [len(completion[0]["content"]) / 1000 for completion in completions]


def ours(a, wait_for_turn) -> dict:
    import grpo.run.steps
    import train_grpo

    # A step constructs its Step first, before its clock starts: there it waits for its turn.
    make_step = grpo.run.steps.Step

    def in_turn(number):
        wait_for_turn()
        return make_step(number)

    grpo.run.steps.Step = in_turn
    with tempfile.TemporaryDirectory() as folder:
        data = Path(folder) / "rows.jsonl"
        rows, prompt_tokens = problems(a)
        data.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
        code = train_grpo.main(
            [
                f"output_dir={folder}/run",
                f"model.name_or_path={a.model}",
                f"data.dataset={data}",
                "data.prompt_column=question",
                "data.answer_column=answer",
                "data.max_prompt_length=1024",
                f"data.system_prompt={json.dumps(system_prompt(a))}",
                f"reward.functions=[{{name: '{Path(__file__).resolve()}:letters'}}]",
                f"rollout={{prompts_per_step: {P}, num_generations: {G}, "
                f"max_completion_length: {a.max_tokens}}}",
                f"algorithm={{name: grpo, beta: {a.beta}}}",
                "optim.learning_rate=1.0e-6",
                f"optim.max_steps={a.steps}",
                f"optim.tokens_per_microbatch={a.tokens_per_microbatch}",
                f"runtime={{precision: {a.precision}, threads_per_rank: {a.threads}}}",
            ]
        )
        assert code == 0
        text = (Path(folder) / "run" / "metrics.jsonl").read_text()
    lines = [json.loads(line) for line in text.splitlines()]
    # Step 0 is the evaluation before training.
    steps = [line for line in lines if line["step"]]
    return {
        "prompt_tokens": prompt_tokens,
        "tokens": [line["completions/mean_length"] * P * G for line in steps],
        "step": [line["step_time"] for line in steps],
        "sampling": [line["time/rollout"] for line in steps],
    }


def trl(a, wait_for_turn) -> dict:
    """``a.side`` is the rows of a micro-batch and options, as in ``8+checkpointing``."""
    import torch

    torch.set_num_threads(a.threads)
    from transformers import TrainerCallback
    from trl import GRPOTrainer

    _, *options = a.side.split("+")
    record = {"tokens": [], "step": [], "sampling": []}

    def counted_letters(completions, completion_ids, **columns):
        record["tokens"].append(sum(len(ids) for ids in completion_ids))
        return letters(completions)

    class Clock(TrainerCallback):
        def on_step_begin(self, *args, **kwargs):
            wait_for_turn()
            self.start = time.perf_counter()

        def on_step_end(self, *args, **kwargs):
            if torch.cuda.is_available():
                torch.cuda.synchronize()
            record["step"].append(time.perf_counter() - self.start)

    class Timed(GRPOTrainer):
        def _generate_single_turn(self, *args, **kwargs):
            start = time.perf_counter()
            result = super()._generate_single_turn(*args, **kwargs)
            record["sampling"].append(time.perf_counter() - start)
            return result

    chosen, record["prompt_tokens"] = problems(a)
    rows = [{"prompt": messages(a, row["question"]), "answer": row["answer"]} for row in chosen]
    with tempfile.TemporaryDirectory() as folder:
        trl_trainer(
            a.model,
            rows,
            counted_letters,
            folder,
            cls=Timed,
            callbacks=[Clock()],
            dtype="bfloat16" if "bf16-weights" in options else "float32",
            **microbatches_of_trl(a.side, P * G),
            num_generations=G,
            max_completion_length=a.max_tokens,
            temperature=1.0,
            beta=a.beta,
            learning_rate=1e-6,
            lr_scheduler_type="constant",
            loss_type="grpo",
            max_steps=a.steps,
            bf16=a.precision == "bf16",
            use_cpu=not torch.cuda.is_available(),
            use_transformers_continuous_batching="continuous-batching" in options,
        ).train()
    return record


def main() -> None:
    a = SimpleNamespace(**json.loads(sys.argv[1]))
    replies = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what the trainers print goes to stderr

    def wait_for_turn() -> None:
        print("ready", file=replies, flush=True)
        sys.stdin.readline()

    measure = ours if a.side == "ours" else trl
    record = measure(a, wait_for_turn)
    record["completion_tokens"] = sum(record["tokens"]) / (P * G * len(record["tokens"]))
    record["peak_rss_mib"] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    print(json.dumps(record), file=replies, flush=True)


if __name__ == "__main__":
    main()
