"""Where the value of each key may differ: marks of the schema, and settings that are compared."""

from grpo.config import Config, flat, keys_of, make_config, settings_but, settings_of_all_ranks

MACHINES = "may differ between the machines of a run"
CONTINUED = "may change when a run continues"
RUNS = "may differ between runs that are compared"

TABLE = {
    (MACHINES, CONTINUED, RUNS): """
        output_dir
        rollout: weights_folder
        checkpoint: resume
        runtime: device threads_per_rank
    """,
    (MACHINES, CONTINUED): """
        rollout: server vllm_command
    """,
    (MACHINES,): """
        model: name_or_path adapter reference
        data: dataset eval_dataset
    """,
    (CONTINUED, RUNS): """
        model: gradient_checkpointing
        reward: timeout_s num_workers
        rollout: tokens_in_flight
        optim: tokens_per_microbatch reduce_each_microbatch
        checkpoint: save_steps keep keep_best accept_changes
        logging: wandb project run_name trackio tensorboard log_completions every
        runtime: parallel shard_size offload fast_decode timeout_s deterministic try_largest_step
    """,
    (CONTINUED,): """
        eval: every before_training num_samples temperature top_p top_k min_p
        eval: max_completion_length max_samples correctness correct_above format
    """,
    (): """
        seed tools tools_format environment
        model: chat_template attn_implementation disable_dropout trust_remote_code
        lora: rank alpha dropout target_modules rslora init base_precision
        data: config_name train_split eval_split prompt_column answer_column answer_pattern
        data: system_prompt prompt_template chat_template_kwargs question_template few_shot
        data: conversational max_prompt_length max_train_samples max_eval_samples
        reward: functions
        rollout: prompts_per_step num_generations max_completion_length temperature top_p top_k
        rollout: min_p keep_sampling_mask stop max_turns max_tool_tokens function engine
        algorithm: name objective advantages baseline scale advantage_eps aggregation
        algorithm: normalize_constant importance_level epsilon epsilon_high delta
        algorithm: top_entropy_quantile sampler_correction sampler_correction_min
        algorithm: sampler_correction_max off_policy_mask_threshold beta kl_estimator unbiased_kl
        algorithm: num_iterations num_minibatches mask_truncated_completions dynamic_sampling
        algorithm: ref_sync_steps ref_sync_alpha
        optim: learning_rate betas weight_decay max_grad_norm lr_scheduler_type warmup_steps
        optim: min_lr max_steps num_epochs
        runtime: precision
    """,
}
"""The marks of each key. A new key needs a line here: may its value differ, and where?"""


def test_the_marks_of_every_key():
    expected = {}
    for marks, lines in TABLE.items():
        for line in lines.strip().splitlines():
            section, colon, names = line.strip().rpartition(": ")
            for name in names.split():
                expected[f"{section}.{name}" if colon else name] = set(marks)

    found = {key: set() for key in keys_of(Config)}
    for mark in (MACHINES, CONTINUED, RUNS):
        for key in found.keys() - settings_but(mark, Config()).keys():
            found[key].add(mark)
    assert found == expected


def test_ranks_share_settings_but_no_folders():
    """Two machines with folders of their own, and the same functions in files of the same name."""

    def on(machine, **changes):
        values = {
            "output_dir": f"/{machine}/run",
            "model.name_or_path": f"/{machine}/model",
            "runtime.threads_per_rank": len(machine),
            "algorithm.objective": f"/{machine}/mine.py:loss",
            "algorithm.advantages": f"/{machine}/mine.py:advantages",
            "reward.functions": [{"name": f"/{machine}/mine.py:score", "weight": 0.5}],
        }
        return settings_of_all_ranks(make_config(values | changes))

    shared = on("a")
    assert shared == on("bb")
    assert shared["reward.functions"] == [{"name": "mine.py:score", "weight": 0.5, "args": {}}]
    assert shared["algorithm.objective"] == "mine.py:loss"
    assert not {"output_dir", "model.name_or_path", "runtime.threads_per_rank"} & shared.keys()
    for key, value in {"seed": 1, "logging.every": 2, "algorithm.advantages": "mine.py:g"}.items():
        changed = on("a", **{key: value})
        assert [name for name in shared if shared[name] != changed[name]] == [key]


def test_values_by_key():
    """A mapping that is the value of a key is one value. Keys that no longer exist are kept too."""
    mapping = {"a": {"b": 2}}
    values = {"seed": 1, "data": {"chat_template_kwargs": mapping, "gone": {"c": 3}}}
    assert flat(values) == {"seed": 1, "data.chat_template_kwargs": mapping, "data.gone.c": 3}
