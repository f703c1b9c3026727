# %% [markdown]
# # A whole GRPO trainer from the parts
# Without configuration, checkpoints or ranks. 30 steps of the tiny model take seconds, once it is
# built. `MODEL` may be any chat model: for "HuggingFaceTB/SmolLM2-135M-Instruct" a learning
# rate of 2e-5 is right.

# %%
import re

import torch

from grpo.algorithm.advantages import group_advantages
from grpo.algorithm.batch import Problem, collate
from grpo.algorithm.logprobs import CompletionScorer
from grpo.algorithm.loss import loss_denominator, policy_loss
from grpo.data.tasks import load_task
from grpo.data.tiny import build_tiny_model
from grpo.model import load_policy, load_tokenizer
from grpo.rollout import BuiltinEngine, SamplingParams, check_model

# Suffixes: P problems, G completions of each, B = P * G rows, T tokens.
MODEL = str(build_tiny_model("arithmetic"))
LEARNING_RATE = 2e-4
STEPS = 30
P = 8  # problems in each step
G = 8  # completions of each problem


def reward(text, answer):
    """Score 1 if the last number is the answer, less 0.001 for each character."""
    numbers = re.findall(r"-?\d+", text)
    is_right = numbers[-1:] == [answer]
    return is_right - 0.001 * len(text)


# %%
tokenizer = load_tokenizer(MODEL)
policy = load_policy(MODEL, tokenizer, device=torch.device("cpu"), precision="fp32")
scorer = CompletionScorer(policy.model)
check_model(policy, scorer)  # refuses a model whose KV cache gives other log-probs than scoring
parameters = list(policy.model.parameters())
optimizer = torch.optim.AdamW(parameters, lr=LEARNING_RATE, weight_decay=0.0)
engine = BuiltinEngine(policy)
sampling = SamplingParams(num_generations=G, max_completion_length=64)

problems = []
rows = load_task("arithmetic").rows("train", seed=0, count=STEPS * P)
for index, row in enumerate(rows):
    prompt = row["prompt"]
    chat = [{"role": "user", "content": prompt}]
    ids = tokenizer.apply_chat_template(
        chat,
        add_generation_prompt=True,
        return_dict=False,
    )
    columns = {"answer": row["answer"]}
    problem = Problem(index, prompt, tuple(ids), columns)
    problems.append(problem)

# %%
for step in range(STEPS):
    # The random numbers follow from this key (seed, purpose, step) and the problem alone.
    start = step * P
    problems_of_step = problems[start : start + P]
    groups = engine.generate(problems_of_step, sampling, seed_key=(0, "rollout", step))

    rewards = []
    for group in groups:
        answer = group.problem.columns["answer"]
        texts = [completion.text for completion in group.completions]
        rewards.append([reward(text, answer) for text in texts])
    rewards_PG = torch.tensor(rewards)
    # The reward minus the mean of its group, divided by the standard deviation of its group.
    advantages_PG = group_advantages(rewards_PG)

    batch = collate(groups, advantages_PG, pad_id=policy.pad_id, device=policy.device)
    logprobs_BT, _ = scorer(*batch.scorer_inputs)
    # The policy that sampled is the policy that is trained: the old log-probs are the new ones.
    old_logprobs_BT = logprobs_BT.detach()
    mask_BT = batch.loss_mask_BT
    advantages_B = batch.advantages_B
    loss_sum, _ = policy_loss(logprobs_BT, old_logprobs_BT, advantages_B, mask_BT)
    # Separate, so that sum and denominator can be added up over micro-batches and ranks.
    loss = loss_sum / loss_denominator(mask_BT)
    loss.backward()
    torch.nn.utils.clip_grad_norm_(parameters, 1.0)
    optimizer.step()
    optimizer.zero_grad()
    mean_reward = rewards_PG.mean()
    print(f"step {step + 1:2}  reward {mean_reward:.3f}")
