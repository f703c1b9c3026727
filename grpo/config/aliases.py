"""Names that TRL and other trainers have for keys of the configuration.
docs/trl_arguments.md has all names of TRL."""

# A name that resembles its key is not listed: unknown_key() suggests the key with the most similar
# name.
OTHER_NAMES = {
    # Sections that a user may take for a key: train(model="Qwen/Qwen2.5-0.5B").
    "model": "model.name_or_path names the model",
    "model.name": "model.name_or_path",
    "model.path": "model.name_or_path",
    "lora": "lora.rank above 0 trains LoRA adapters",
    "args": "the settings of GRPOConfig are keys of the configuration: "
    "docs/trl_arguments.md names the key of each",
    "processing_class": "the tokenizer is that of model.name_or_path",
    # Some keys replace two or three settings of TRL. All of these settings are listed, so that none
    # is ignored silently.
    "lr": "optim.learning_rate",
    "warmup_ratio": "optim.warmup_steps",
    "lr_scheduler_kwargs": "optim.min_lr",
    "adam_beta1": "optim.betas",
    "adam_beta2": "optim.betas",
    "adam_epsilon": "AdamW's epsilon is that of PyTorch, 1e-8",
    "max_new_tokens": "rollout.max_completion_length",
    "max_tool_calling_iterations": "rollout.max_turns, which counts the model's turns: one more",
    "rollout_func": "environment, a class whose methods are tools, or which takes whole turns",
    "use_vllm": "rollout.engine is builtin, or vllm, which samples with vLLM servers",
    "vllm_server_base_url": "rollout.server",
    "vllm_server_host": "rollout.server",
    "vllm_server_port": "rollout.server",
    "vllm_group_port": "rollout.weights_folder",
    "vllm_model_impl": "rollout.vllm_command",
    "vllm_server_timeout": "runtime.timeout_s",
    "kl_coef": "algorithm.beta",
    "scale_rewards": "algorithm.scale is group, batch or none (TRL's False)",
    "use_bias_correction_kl": "algorithm.unbiased_kl",
    "vllm_importance_sampling_correction": "algorithm.sampler_correction",
    "vllm_importance_sampling_mode": "algorithm.sampler_correction",
    "ref_model_mixup_alpha": "algorithm.ref_sync_alpha",
    "sync_ref_model": "algorithm.ref_sync_steps, a number of steps, and algorithm.ref_sync_alpha",
    "steps_per_generation": "algorithm.num_minibatches = steps_per_generation / "
    "gradient_accumulation_steps; it is also a factor of rollout.prompts_per_step, in place of "
    "gradient_accumulation_steps",
    "model_init_kwargs": "model.attn_implementation; weights are fp32 (runtime.precision)",
    "lora_r": "lora.rank",
    "r": "lora.rank",
    "lora_alpha": "lora.alpha",
    "init_lora_weights": "lora.init",
    "train_dataset": "data.dataset",
    "dataset_config": "data.config_name",
    "reward_funcs": "reward.functions",
    "eval_steps": "eval.every",
    "eval_strategy": "eval.every",
    "evaluation_strategy": "eval.every",
    "eval_on_start": "eval.before_training",
    "num_generations_eval": "eval.num_samples",
    "save_strategy": "checkpoint.save_steps",
    "save_total_limit": "checkpoint.keep",
    "load_best_model_at_end": "checkpoint.keep_best",
    "metric_for_best_model": "checkpoint.keep_best",
    "resume_from_checkpoint": "checkpoint.resume",
    "logging_steps": "logging.every",
    "logging_strategy": "logging.every",
    "logging_first_step": "logging.every",
    "num_completions_to_print": "logging.log_completions",
    "logging_dir": "TensorBoard's files are in output_dir/tensorboard",
    "overwrite_output_dir": "checkpoint.resume=never starts again",
    "bf16": "runtime.precision is bf16 or fp32",
    "dtype": "runtime.precision",
    "torch_dtype": "runtime.precision",
    "use_cpu": "runtime.device",
    "ddp_backend": "runtime.device",
    "fsdp": "runtime.parallel",
    "cache_implementation": "runtime.fast_decode",
    "full_determinism": "runtime.deterministic",
    "ddp_timeout": "runtime.timeout_s",
    "data_seed": "seed",
    # TRL counts the completions of one device in one accumulation step. Here problems are counted
    # over all ranks, and the tokens of a micro-batch are limited.
    "generation_batch_size": "rollout.prompts_per_step = generation_batch_size / num_generations; "
    "algorithm.num_minibatches = the same / (per_device_train_batch_size * "
    "gradient_accumulation_steps * GPUs)",
    "per_device_train_batch_size": "rollout.prompts_per_step = per_device_train_batch_size * "
    "steps_per_generation (unset: gradient_accumulation_steps) * GPUs / num_generations",
    "gradient_accumulation_steps": "a factor of rollout.prompts_per_step, as is "
    "per_device_train_batch_size; optim.tokens_per_microbatch cuts the passes",
    "per_device_eval_batch_size": "rollout.tokens_in_flight limits the tokens that are sampled at "
    "once",
    "reward_weights": "each entry of reward.functions has a weight: {name: accuracy, weight: 0.5}",
    "report_to": "logging.wandb=online or offline, logging.trackio=true, logging.tensorboard=true",
    "loss_type": "algorithm.name=grpo, cispo or sapo; algorithm.aggregation=token_mean "
    "is TRL's dapo and bnpo, constant its dr_grpo; there is no luspo or vespo",
    # vLLM runs in servers, which have their own command line.
    "vllm_mode": "rollout.engine=vllm samples with servers: "
    "rollout.server=start starts them, or names their addresses",
    "vllm_gpu_memory_utilization": "rollout.vllm_command has vLLM's options: "
    "vllm serve {model} --OPTION VALUE",
    "vllm_tensor_parallel_size": "rollout.vllm_command has vLLM's options: "
    "vllm serve {model} --OPTION VALUE",
    "optim": "optim.name is adamw (TRL's adamw_torch_fused) or adamw8bit (adamw_8bit)",
    "fp16": "runtime.precision is bf16 or fp32",
    "use_peft": "lora.rank above 0 trains LoRA adapters; the section lora has the other settings",
    "peft_config": "the section lora has its settings: "
    "lora.rank, lora.alpha, lora.dropout, lora.target_modules",
    "fsdp_config": "runtime.parallel=fsdp has the settings runtime.shard_size and runtime.offload",
    "deepspeed": "runtime.parallel=fsdp shards weights, gradients and optimizer states, "
    "as ZeRO 3 does",
    "generation_kwargs": "what samples is in the section rollout; "
    "rollout.stop are the stop strings",
    "vllm_importance_sampling_clip_max": "algorithm.sampler_correction_max",
    "vllm_importance_sampling_clip_min": "algorithm.sampler_correction_min",
    "vllm_importance_sampling_cap": "algorithm.sampler_correction_max",
    "multi_objective_aggregation": "algorithm.name=gdpo normalizes each reward before their sum",
}
"""Key to use instead of each name, or a sentence if no single key replaces the name. Names are
listed without their section, unless they are names of another section's keys too."""
