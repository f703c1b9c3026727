"""Every key of the configuration acts, is refused, or says that it has no effect, when it is set
alone."""

import ast
import json
import shutil

import pytest
from conftest import ROOT, small_run

from grpo.config import Config, ConfigError, keys_of, keys_without_effect, load_config
from grpo.report.read import read_run
from train_grpo import main

REFUSED = """
    optim.min_lr=1e-7
    runtime.shard_size=2
    runtime.offload=all
"""
WITHOUT_EFFECT = """
    lora.alpha=4
    lora.dropout=0.1
    lora.target_modules=[q_proj]
    lora.rslora=true
    lora.init=gaussian
    lora.base_precision=fp32
    data.config_name=main
    data.train_split=train[:50%]
    data.eval_split=test
    tools_format=tags
    rollout.max_turns=3
    rollout.max_tool_tokens=3
    rollout.server=http://host:8000
    rollout.vllm_command=/bin/vllm serve {model}
    rollout.weights_folder=/shared
    algorithm.own_args={objective: {a: 1}}
    algorithm.epsilon=0.1
    algorithm.epsilon_high=0.3
    algorithm.delta=3
    algorithm.sampler_correction_min=0.5
    algorithm.sampler_correction_max=2
    algorithm.ref_sync_alpha=0.5
    eval.num_samples=4
    eval.top_p=0.9
    eval.top_k=3
    eval.min_p=0.1
    logging.project=mine
"""
ACTS_IN_A_RUN = """
    seed=1
    model.chat_template={{ messages[-1].content }}
    lora.rank=2
    data.dataset=builtin:countdown
    data.eval_dataset=builtin:countdown
    data.system_prompt=Answer.
    data.prompt_template=Q: {prompt}
    data.question_template=Q: {prompt}
    data.few_shot=[{prompt: 1+1, completion: '2'}]
    data.max_prompt_length=13
    data.max_train_samples=12
    data.max_eval_samples=3
    tools=[calculator]
    reward.functions=[format]
    rollout.prompts_per_step=3
    rollout.num_generations=2
    rollout.max_completion_length=6
    rollout.temperature=0.5
    rollout.top_p=0.5
    rollout.top_k=3
    rollout.min_p=0.5
    rollout.stop=[a]
    algorithm.name=gspo
    algorithm.objective=reinforce
    algorithm.baseline=none
    algorithm.scale=none
    algorithm.advantage_eps=0.1
    algorithm.aggregation=token_mean
    algorithm.importance_level=sequence
    algorithm.top_entropy_quantile=0.5
    algorithm.sampler_correction=sequence_mask
    algorithm.beta=0
    algorithm.kl_estimator=k1
    algorithm.unbiased_kl=true
    algorithm.num_iterations=2
    algorithm.num_minibatches=2
    algorithm.mask_truncated_completions=true
    algorithm.ref_sync_steps=1
    optim.learning_rate=1e-2
    optim.betas=[0.5, 0.9]
    optim.weight_decay=9
    optim.max_grad_norm=0.01
    optim.lr_scheduler_type=linear
    optim.warmup_steps=1
    optim.max_steps=3
    eval.every=1
    eval.before_training=false
    eval.temperature=1
    eval.max_completion_length=2
    eval.max_samples=3
    eval.correct_above=-1
    checkpoint.save_steps=1
    logging.tensorboard=true
    logging.log_completions=2
    logging.every=2
"""
READ_IN = {
    "grpo/run/prepare.py": """
        model.name_or_path=x
        model.reference=x
        model.trust_remote_code=true
        reward.num_workers=2
        optim.num_epochs=2
        rollout.engine=vllm
        runtime.fast_decode=false
        runtime.try_largest_step=true
    """,
    "grpo/run/models.py": """
        model.adapter=x
        model.attn_implementation=eager
        model.gradient_checkpointing=true
        model.disable_dropout=false
        runtime.parallel=fsdp
        runtime.precision=fp32
    """,
    "grpo/run/records.py": """
        rollout.tokens_in_flight=64
        optim.tokens_per_microbatch=64
    """,
    "grpo/data/table.py": """
        data.prompt_column=question
        data.answer_column=answer
        data.answer_pattern=#### (.+)
    """,
    "grpo/data/problems.py": """
        data.chat_template_kwargs={enable_thinking: false}
        data.conversational=true
    """,
    "grpo/evaluation/grading.py": """
        eval.correctness=accuracy
        eval.format=format
    """,
    "grpo/checkpoint/saver.py": """
        checkpoint.keep=1
        checkpoint.keep_best=eval/mean_length
    """,
    "grpo/checkpoint/resume.py": """
        output_dir=x
        checkpoint.resume=x
        checkpoint.accept_changes=true
    """,
    "grpo/telemetry/dashboards.py": "logging.run_name=mine",
    "grpo/telemetry/reporter.py": """
        logging.wandb=offline
        logging.trackio=true
    """,
    "grpo/distributed/launch.py": """
        runtime.device=cpu
        runtime.timeout_s=60
        runtime.deterministic=true
        runtime.threads_per_rank=1
    """,
    "grpo/rewards/scores.py": "environment=a.py:A",
    "grpo/run/optimizer.py": "optim.name=adamw8bit",
    "grpo/run/user_functions.py": """
        algorithm.advantages=a.py:f
        algorithm.loop=a.py:f
    """,
    "grpo/turns/engine.py": """
        reward.timeout_s=1
    """,
    "train_grpo.py": """
        algorithm.off_policy_mask_threshold=0.1
        algorithm.dynamic_sampling=true
    """,
}
"""Keys of other machines, services, failures and memory, and of rows and functions of the user ->
what reads them."""


def settings_of(text: str) -> dict[str, str]:
    return dict(line.strip().split("=", 1) for line in text.strip().splitlines())


def read_in(file: str) -> set[str]:
    names = set()
    for node in ast.walk(ast.parse((ROOT / file).read_text())):
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Load):
            names.add(node.attr)
        # _load(algorithm, "loop", files)
        if isinstance(node, ast.Call) and getattr(node.func, "id", "") == "_load":
            names |= {word.value for word in node.args if isinstance(word, ast.Constant)}
    return names


READ = {
    key: (value, file) for file, text in READ_IN.items() for key, value in settings_of(text).items()
}


@pytest.mark.parametrize("key", keys_of(Config))
def test_every_key_acts_or_is_refused_or_says_that_it_has_no_effect(key):
    """A new key needs a line above."""
    verdicts = []
    for text in (REFUSED, WITHOUT_EFFECT, ACTS_IN_A_RUN):
        settings = settings_of(text)
        if key in settings:
            verdicts.append((text, settings[key]))
    if key in READ:
        value, file = READ[key]
        assert key.rpartition(".")[2] in read_in(file)
        verdicts.append((READ_IN, value))
    ((verdict, value),) = verdicts

    if verdict is REFUSED:
        with pytest.raises(ConfigError, match=key.rpartition(".")[2]):
            load_config([f"{key}={value}"])
        return
    config = load_config([f"{key}={value}"])
    assert keys_without_effect(config).keys() == ({key} if verdict is WITHOUT_EFFECT else set())
    assert config != Config()


def trace(arguments: list[str], folder) -> tuple:
    """What a run leaves, without what is measured in seconds."""
    assert main(arguments) == 0
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    values = []
    for line in lines:
        values.append(
            {
                name: value
                for name, value in line.items()
                if "time" not in name and "per_second" not in name
            }
        )
    files = sorted(
        str(path.relative_to(folder)) for path in folder.rglob("*") if "events.out" not in path.name
    )
    samples = [sample["completion"] for sample in read_run(folder).samples]
    return values, files, samples


@pytest.mark.slow
def test_what_acts_changes_a_run(random_model, tmp_path, capsys):
    def run(name, *arguments):
        folder = tmp_path / name
        found = trace(
            [
                *small_run(random_model, folder),
                "optim.max_steps=2",
                "data.conversational=false",
                *arguments,
            ],
            folder,
        )
        shutil.rmtree(folder)
        return found

    expected = run("base")
    assert run("again") == expected
    silent = []
    for key, value in settings_of(ACTS_IN_A_RUN).items():
        if run(key, f"{key}={value}") == expected:
            silent.append(key)
    assert " ".join(silent) == ""
