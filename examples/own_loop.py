# %% [markdown]
# # A training loop of your own
# The parts of `grpo` without configuration, checkpoints or ranks.
# The tiny model is built at the first use; 30 steps then take seconds.

# %%
import torch

from grpo.algorithm.advantages import group_advantages
from grpo.algorithm.batch import Problem, collate
from grpo.algorithm.logprobs import CompletionScorer
from grpo.algorithm.loss import loss_denominator, policy_loss
from grpo.data.tasks import load_task
from grpo.data.tiny import build_tiny_model
from grpo.model import load_policy, load_tokenizer
from grpo.rollout import BuiltinEngine, SamplingParams, check_model

MODEL = str(build_tiny_model("arithmetic"))
SEED = 0
STEPS = 30
P = 8  # problems in each step
G = 8  # completions of each problem


def reward(completions, answer, **columns):
    """Score 1 for the right answer in its tag, less 0.001 for each character of the completion."""
    rewards = []
    for text, right in zip(completions, answer, strict=True):
        is_right = f"<answer>{right}</answer>" in text
        rewards.append(float(is_right) - 0.001 * len(text))
    return rewards


# %% [markdown]
# The model, the parts that sample and score with it, and the problems: their tokens, and the
# columns that the reward reads.

# %%
tokenizer = load_tokenizer(MODEL)
policy = load_policy(MODEL, tokenizer, device=torch.device("cpu"), precision="fp32")
scorer = CompletionScorer(policy.model)
# Compares the log-probs of sampling with those of scoring. A model whose KV cache gives wrong
# log-probs is refused. Fast kernels are switched on where their results are right.
check_model(policy, scorer)
optimizer = torch.optim.AdamW(policy.model.parameters(), lr=2e-4, weight_decay=0.0)
engine = BuiltinEngine(policy)
sampling = SamplingParams(num_generations=G, max_completion_length=64)

problems = []
rows = load_task("arithmetic").rows("train", seed=SEED, count=STEPS * P)
for index, row in enumerate(rows):
    messages = [{"role": "user", "content": row["prompt"]}]
    prompt_ids = tokenizer.apply_chat_template(
        messages,
        add_generation_prompt=True,
        return_dict=False,
    )
    columns = {"answer": row["answer"]}
    problems.append(Problem(index, row["prompt"], tuple(prompt_ids), columns))

# %% [markdown]
# Each step: sample groups, compute rewards and advantages, score the tokens, update.

# %%
for step in range(STEPS):
    # The random numbers depend on the seed, the step and the problem alone, so a second run gives
    # the same completions.
    groups = engine.generate(
        problems[step * P : (step + 1) * P],
        sampling,
        seed_key=(SEED, "rollout", step),
    )

    rewards = []
    for group in groups:
        texts = [completion.text for completion in group.completions]
        answers = [group.problem.columns["answer"]] * G
        rewards.append(reward(texts, answers))
    rewards_PG = torch.tensor(rewards)
    # The reward minus the mean of its group, divided by the standard deviation of its group.
    advantages_PG = group_advantages(rewards_PG)

    batch = collate(groups, advantages_PG, pad_id=policy.pad_id, device=policy.device)
    logprobs_BT, _ = scorer(*batch.scorer_inputs)
    # With one update per rollout, the policy that sampled is the policy that is trained: the old
    # log-probs are the new ones, without their gradient.
    old_logprobs_BT = logprobs_BT.detach()
    loss_sum, _ = policy_loss(
        logprobs_BT,
        old_logprobs_BT,
        batch.advantages_B,
        batch.loss_mask_BT,
    )
    # The sum and its denominator are separate, so that each can be added up over micro-batches and
    # ranks.
    loss = loss_sum / loss_denominator(batch.loss_mask_BT)
    loss.backward()
    torch.nn.utils.clip_grad_norm_(policy.model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()
    print(f"step {step + 1:2}  reward {rewards_PG.mean():.3f}")
