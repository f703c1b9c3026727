# %% [markdown] # A training loop of your own The parts of `grpo` without configuration, checkpoints
# or ranks. The tiny model is built at the first use; 30 steps then take seconds.

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

MODEL, SEED, STEPS, P, G = (
    str(build_tiny_model("arithmetic")),
    0,
    30,
    8,
    8,
)  # P problems a step, G completions of each


def reward(completions, answer, **columns):
    return [
        float(f"<answer>{a}</answer>" in text) - 0.001 * len(text)
        for text, a in zip(completions, answer, strict=True)
    ]


# %% [markdown] The model, what samples and scores with it, and the problems: their tokens, and the
# columns that the reward reads.

# %%
tokenizer = load_tokenizer(MODEL)
policy = load_policy(MODEL, tokenizer, device=torch.device("cpu"), precision="fp32")
scorer = CompletionScorer(policy.model)
check_model(
    policy, scorer
)  # refuses a model that its KV cache samples wrongly; chooses fast kernels that are right
optimizer = torch.optim.AdamW(policy.model.parameters(), lr=2e-4, weight_decay=0.0)
engine = BuiltinEngine(policy)
sampling = SamplingParams(num_generations=G, max_completion_length=64)

problems = []
for index, row in enumerate(load_task("arithmetic").rows("train", seed=SEED, count=STEPS * P)):
    messages = [{"role": "user", "content": row["prompt"]}]
    ids = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
    problems.append(Problem(index, row["prompt"], tuple(ids), {"answer": row["answer"]}))

# %% [markdown]
# Each step: sample groups, compute rewards and advantages, score the tokens, update.

# %%
for step in range(STEPS):
    groups = engine.generate(
        problems[step * P : (step + 1) * P], sampling, seed_key=(SEED, "rollout", step)
    )
    rewards_PG = torch.tensor(
        [
            reward([c.text for c in group.completions], [group.problem.columns["answer"]] * G)
            for group in groups
        ]
    )
    batch = collate(
        groups, group_advantages(rewards_PG), pad_id=policy.pad_id, device=policy.device
    )
    logprobs_BT, _ = scorer(*batch.scorer_inputs)
    loss_sum, _ = policy_loss(
        logprobs_BT, logprobs_BT.detach(), batch.advantages_B, batch.loss_mask_BT
    )
    (loss_sum / loss_denominator(batch.loss_mask_BT)).backward()
    torch.nn.utils.clip_grad_norm_(policy.model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()
    print(f"step {step + 1:2}  reward {rewards_PG.mean():.3f}")
