"""One run by TRL on the problems of one of our configurations; started by learning_vs_trl.py with
TRL's own Python.

    python benchmarks/trl_side.py OUTPUT.json EVERY ROWS --config X.yaml key=value ...

ROWS of a micro-batch may end with ``+checkpointing``. A step has as many micro-batches as it needs.
TRL gets the values of our configuration one by one, and its other defaults are set to what this
trainer does. Our code evaluates TRL's model on the held-out problems every EVERY steps. A setting
that TRL does not have, or has in another form, stops the script with its name."""

import json
import sys
import tempfile
import time
from functools import partial
from operator import attrgetter
from pathlib import Path

from common import LOSS_TYPES, microbatches_of_trl, peak_rss_mib, reset_peak_rss, trl_trainer

import torch  # isort: skip
from transformers import TrainerCallback

from grpo.config import load_config
from grpo.data import Schedule, load_rows, make_problems
from grpo.distributed import World
from grpo.evaluation.collect import eval_sampling, evaluate
from grpo.evaluation.grading import Grader
from grpo.model import Policy, end_tokens, load_tokenizer, resolve_model
from grpo.rewards import RewardRunner, load_reward
from grpo.rollout import BuiltinEngine

PASSED_ON = {
    "algorithm.name",
    "algorithm.scale",
    "algorithm.aggregation",
    "algorithm.importance_level",
    "algorithm.epsilon",
    "algorithm.epsilon_high",
    "algorithm.delta",
    "algorithm.beta",
    "algorithm.mask_truncated_completions",
    "algorithm.ref_sync_steps",
    "algorithm.ref_sync_alpha",
    "algorithm.advantage_eps",
}
"""Keys that TRL gets below, or that change no result. TRL's ``advantage_eps`` is 1e-4."""
NOT_PASSED_ON = {
    "model.reference",
    "model.adapter",
    "model.chat_template",
    "model.disable_dropout",
    "lora.rank",
    "data.prompt_template",
    "tools",
    "environment",
    "rollout.stop",
    "optim.min_lr",
}
"""Further keys that TRL does not get."""


def check_settings(config) -> None:
    """Stop unless TRL computes the same with the settings that it gets: every other key must have
    its default."""
    default = type(config)()
    others = {f"algorithm.{key}" for key in type(config.algorithm).model_fields} - PASSED_ON
    for key in sorted(others | NOT_PASSED_ON):
        value = attrgetter(key)(config)
        expected = attrgetter(key)(default)
        if value != expected:
            raise SystemExit(f"{key}={value}: this comparison needs {expected}")
    if config.algorithm.scale not in ("group", "batch", "none") or config.optim.max_steps is None:
        raise SystemExit(
            "this comparison needs algorithm.scale=group, batch or none, and optim.max_steps"
        )


def reward_functions(config) -> list:
    """Our rewards with their arguments. TRL passes conversations, which our rewards read as
    well."""
    rewards = []
    for function in config.reward.functions:
        reward = partial(called, load_reward(function.name), function.args)
        reward.__name__ = function.name
        rewards.append(reward)
    return rewards


def called(reward, arguments: dict, /, **columns) -> list:
    """Arguments take precedence over columns, as in our runs."""
    return reward(**(columns | arguments))


class Evaluate(TrainerCallback):
    """Evaluates before the first step, every N steps, and after the last; times each step, and
    leaves evaluations out of the time and of the peak of memory."""

    def __init__(self, config, tokenizer, problems, every: int, device: torch.device):
        self.config = config
        self.tokenizer = tokenizer
        self.problems = problems
        self.every = every
        self.world = World(0, 1, device)
        self.rewards = RewardRunner(config.reward.functions)
        self.points: list[dict] = []
        self.step_seconds: list[float] = []
        self.peaks: list[float] = []

    def measure(self, model, step: int) -> None:
        self.peaks.append(peak_rss_mib())
        policy = Policy(
            model,
            self.tokenizer,
            end_tokens(model, self.tokenizer),
            self.tokenizer.pad_token_id,
            self.world.device,
            self.config.runtime.precision,
        )
        found = evaluate(
            BuiltinEngine(policy),
            self.problems,
            Grader(self.config.eval, self.rewards),
            self.world,
            eval_sampling(self.config),
            seed=self.config.seed,
        )
        point = {"step": step, "seconds": sum(self.step_seconds), "intervals": found.intervals}
        self.points.append(point | found.metrics)
        reset_peak_rss()

    def on_train_begin(self, args, state, control, model=None, **_):
        self.measure(model, 0)

    def on_step_begin(self, *args, **kwargs):
        self.started = time.perf_counter()

    def on_step_end(self, args, state, control, model=None, **_):
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        self.step_seconds.append(time.perf_counter() - self.started)
        if state.global_step % self.every == 0 or state.global_step == state.max_steps:
            self.measure(model, state.global_step)


def main() -> None:
    output, every, microbatches, *arguments = sys.argv[1:]
    config = load_config(arguments)
    torch.set_num_threads(config.runtime.threads_per_rank)
    use_cpu = config.runtime.device == "cpu" or not torch.cuda.is_available()
    device = torch.device("cpu" if use_cpu else "cuda")
    path = resolve_model(config.model.name_or_path, config.data.dataset)
    tokenizer = load_tokenizer(path)
    r = config.rollout
    a = config.algorithm
    o = config.optim
    check_settings(config)
    # As messages, which TRL writes into the chat template again.
    data = config.data.model_copy(update={"conversational": True})
    problems = make_problems(
        load_rows(data, train=True, seed=config.seed), data, tokenizer
    ).problems
    schedule = Schedule(problems, prompts_per_step=r.prompts_per_step, seed=config.seed)
    order = [problem for step in range(o.max_steps) for problem in schedule.problems_of_step(step)]
    rows = []
    for problem in order:
        prompt = problem.reward_prompt
        written = tokenizer.apply_chat_template(
            prompt,
            add_generation_prompt=True,
            **config.data.chat_template_kwargs,
        )
        assert tuple(written["input_ids"]) == problem.prompt_ids, "TRL's prompt is ours"
        rows.append({"prompt": prompt, **problem.columns})
    held_out = make_problems(
        load_rows(config.data, train=False, seed=config.seed), config.data, tokenizer
    ).problems
    callback = Evaluate(config, tokenizer, held_out[: config.eval.max_samples], int(every), device)
    scheduler = o.lr_scheduler_type
    if scheduler == "constant" and o.warmup_steps:
        scheduler = "constant_with_warmup"  # as ours
    trl_microbatches = microbatches_of_trl(microbatches, r.prompts_per_step * r.num_generations)
    with tempfile.TemporaryDirectory() as folder:
        trainer = trl_trainer(
            path,
            rows,
            reward_functions(config),
            folder,
            tokenizer=tokenizer,
            callbacks=[callback],
            seed=config.seed,
            data_seed=config.seed,
            max_steps=o.max_steps,
            use_cpu=use_cpu,
            bf16=config.runtime.precision == "bf16",
            fp16=False,
            # one step = prompts_per_step x G completions = one update, in the order given
            **trl_microbatches,
            steps_per_generation=trl_microbatches["gradient_accumulation_steps"],
            num_iterations=1,
            num_generations=r.num_generations,
            shuffle_dataset=False,
            max_completion_length=r.max_completion_length,
            temperature=r.temperature,
            top_p=r.top_p,
            top_k=r.top_k,
            min_p=r.min_p or None,
            repetition_penalty=1.0,
            use_vllm=False,
            loss_type=LOSS_TYPES[a.aggregation],
            scale_rewards=a.scale,
            beta=a.beta,
            use_bias_correction_kl=False,
            epsilon=a.epsilon,
            epsilon_high=a.epsilon_high,
            delta=a.delta,
            importance_sampling_level=a.importance_level,
            mask_truncated_completions=a.mask_truncated_completions,
            disable_dropout=True,
            sync_ref_model=a.ref_sync_steps > 0,
            ref_model_sync_steps=a.ref_sync_steps or 1,
            ref_model_mixup_alpha=a.ref_sync_alpha,
            reward_weights=[f.weight for f in config.reward.functions],
            optim="adamw_torch_fused",
            learning_rate=o.learning_rate,
            lr_scheduler_type=scheduler,
            warmup_steps=o.warmup_steps,
            weight_decay=o.weight_decay,
            adam_beta1=o.betas[0],
            adam_beta2=o.betas[1],
            adam_epsilon=1e-8,
            max_grad_norm=o.max_grad_norm,
            chat_template_kwargs=config.data.chat_template_kwargs,
        )
        trainer.train()
    callback.rewards.close()
    steps = [entry for entry in trainer.state.log_history if "reward" in entry]
    assert len(steps) == o.max_steps
    found = {
        "points": callback.points,
        "reward_by_step": [round(entry["reward"], 4) for entry in steps],
        "step_seconds": [round(seconds, 3) for seconds in callback.step_seconds],
        "mean_length": [round(entry["completions/mean_length"], 2) for entry in steps],
        "num_tokens": int(steps[-1]["num_tokens"]),
        "seconds": sum(callback.step_seconds),
        "peak_rss_mib": max(callback.peaks),
    }
    Path(output).write_text(json.dumps(found))


if __name__ == "__main__":
    main()
