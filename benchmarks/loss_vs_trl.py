"""The loss and the advantages of TRL's GRPOTrainer and ours on the same numbers: the largest
differences.

    python benchmarks/loss_vs_trl.py --model DIR --trl-python TRLVENV/bin/python

It runs in TRL's own Python and writes benchmarks/results/loss_vs_trl.md.

The trainer is a real one, with a model from DIR that samples once. Then it gets log-probs, old,
reference and sampler's log-probs, entropies and advantages made of random numbers in float64, in
place of its model's, and its ``_compute_loss`` computes loss and gradient of one micro-batch. TRL
computes the weights of the sampler correction while it samples with vLLM, which is not used here:
they come from its documented formula, and the loss that they weigh is TRL's. For GDPO the trainer
gets made-up values of two rewards, some of them missing, and computes the advantages."""

import math
import os
import tempfile

from common import LOSS_TYPES, RESULTS, markdown, parser, trl_trainer

import torch  # isort: skip

from grpo.algorithm.advantages import normalize_then_sum
from grpo.algorithm.loss import entropy_threshold, loss_denominator, policy_loss

B = 16
T = 12
MAX_LENGTH = 16
WEIGHTS = [1.0, 0.5]
TRL_DEFAULTS = {
    "epsilon_low": 0.2,
    "epsilon_high": 0.28,
    "delta": None,
    "beta": 0.0,
    "importance_sampling_level": "token",
    "use_bias_correction_kl": False,
    "off_policy_mask_threshold": None,
    "top_entropy_quantile": 1.0,
}
# TRL's settings, ours
SEQUENCE = ({"importance_sampling_level": "sequence"}, {"importance_level": "sequence"})
KL = ({"beta": 0.1}, {"beta": 0.1})
UNBIASED = ({"use_bias_correction_kl": True}, {"unbiased_kl": True})
SAPO = ({"loss_type": "sapo"}, {"objective": "sapo"})
CISPO = ({"loss_type": "cispo", "epsilon_high": 1.28}, {"objective": "cispo"})
AVERAGES = {"sapo": "response_mean", "cispo": "token_mean"}
TOP_ENTROPY = ({"top_entropy_quantile": 0.2}, {"top_entropy": 0.2})
MASK = {"off_policy_mask_threshold": 0.05}
DELTA = {"delta": 1.5}
CASES = {
    "clip": [],
    "clip, sequence": [SEQUENCE],
    "clip, delta": [(DELTA, DELTA)],
    "cispo": [CISPO],
    "sapo": [SAPO],
    "sapo, sequence": [SAPO, SEQUENCE],
    "clip, KL": [KL],
    "clip, unbiased KL": [UNBIASED, KL],
    "clip, unbiased KL, sequence": [UNBIASED, KL, SEQUENCE],
    "off-policy sequence mask": [(MASK, MASK)],
    "top entropy, KL": [TOP_ENTROPY, KL],
}
for mode in ("token_truncate", "token_mask", "sequence_truncate", "sequence_mask"):
    correction = {"sampler_correction": mode, "sampler_correction_max": 1.5}
    CASES[f"sampler correction, {mode}"] = [({"mode": mode}, correction)]


def random_inputs(seed: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)

    def noise(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    old_BT = -noise(B, T).abs() - 0.1
    lengths_B = torch.randint(1, T + 1, (B,), generator=generator)
    return {
        "new": old_BT + 0.3 * noise(B, T),
        "old": old_BT,
        "sampled": old_BT + 0.2 * noise(B, T),
        "ref": old_BT + 0.3 * noise(B, T),
        "entropies": noise(B, T).abs().float(),  # as the scorer has them
        "advantages": noise(B),
        "mask": torch.arange(T) < lengths_B[:, None],
    }


def trl_loss(trainer, x: dict, settings: dict) -> tuple[torch.Tensor, torch.Tensor]:
    """Loss and gradient of the log-probs by TRL's ``_compute_loss``."""
    mode = settings.get("mode")
    for name, value in (TRL_DEFAULTS | settings).items():
        # TRL reads some from its arguments.
        setattr(trainer, name, value)
        setattr(trainer.args, name, value)
    trainer.use_vllm = mode is not None
    trainer.vllm_importance_sampling_correction = True
    new_BT = x["new"].clone().requires_grad_()
    trainer._get_per_token_logps_and_entropies = lambda *a, **k: (new_BT, x["entropies"], None)
    mask_BT = x["mask"].to(torch.float64)
    prompt = torch.ones(B, 2, dtype=torch.long)
    inputs = {
        "prompt_ids": prompt,
        "prompt_mask": prompt,
        "completion_ids": torch.ones(B, T, dtype=torch.long),
        "completion_mask": mask_BT,
        "advantages": x["advantages"],
        "old_per_token_logps": x["old"],
        "ref_per_token_logps": x["ref"],
        "sampling_per_token_logps": x["sampled"],
        "num_items_in_batch": mask_BT.sum(),
    }
    if mode:
        log_ratio = (x["old"] - x["sampled"]) * mask_BT
        if mode.startswith("sequence"):
            log_ratio = log_ratio.sum(dim=-1, keepdim=True)
        ratio = log_ratio.exp()
        is_cut = mode.endswith("truncate")
        inputs["importance_sampling_ratio"] = (
            ratio.clamp(max=1.5) if is_cut else ratio * (ratio <= 1.5)
        )
    loss = trainer._compute_loss(trainer.model, inputs)
    (gradient_BT,) = torch.autograd.grad(loss, new_BT)
    return loss.detach(), gradient_BT


def our_loss(x: dict, settings: dict) -> tuple[torch.Tensor, torch.Tensor]:
    options = dict(settings)
    new_BT = x["new"].clone().requires_grad_()
    policy_mask_BT = None
    if quantile := options.pop("top_entropy", None):
        threshold = entropy_threshold(x["entropies"][x["mask"]], quantile)
        policy_mask_BT = x["entropies"] >= threshold
    loss_sum, _ = policy_loss(
        new_BT,
        x["old"],
        x["advantages"],
        x["mask"],
        ref_logprobs_BT=x["ref"],
        sampling_logprobs_BT=x["sampled"],
        policy_mask_BT=policy_mask_BT,
        epsilon_high=0.28,
        max_length=MAX_LENGTH,
        **options,
    )
    denominator = loss_denominator(
        x["mask"],
        aggregation=options["aggregation"],
        max_length=MAX_LENGTH,
    )
    loss = loss_sum / denominator
    (gradient_BT,) = torch.autograd.grad(loss, new_BT)
    return loss.detach(), gradient_BT


def gdpo_difference(trainer, rows: list[dict]) -> float:
    """Largest difference of TRL's advantages of ``normalize_then_sum`` from ours, with two made-up
    rewards."""
    generator = torch.Generator().manual_seed(0)
    values_BF = torch.randint(0, 3, (len(rows), 2), generator=generator)
    values_BF = values_BF * torch.tensor([1.0, 30.0])
    values_BF[1, 0] = math.nan
    values_BF[2, 1] = math.nan
    values_BF[3] = math.nan
    values_BF[4:8] = 1.0  # a group of equal values
    trainer.multi_objective_aggregation = "normalize_then_sum"
    trainer._calculate_rewards = lambda *a, **k: values_BF
    theirs = trainer._generate_and_score_completions(rows)["advantages"]
    ours = normalize_then_sum(values_BF.view(-1, 4, 2), WEIGHTS).flatten()
    return float((theirs - ours).abs().max())


def make_trainer(model: str, folder: str, rows: list[dict]):
    """TRL's trainer, which makes no step of its own."""

    def nothing(completions, **_):
        return [0.0] * len(completions)

    trainer = trl_trainer(
        model,
        rows,
        [nothing, nothing],
        folder,
        per_device_train_batch_size=16,
        num_generations=4,
        use_cpu=True,
        bf16=False,
        max_completion_length=MAX_LENGTH,
        reward_weights=WEIGHTS,
        gradient_checkpointing=False,
        epsilon=0.2,
    )
    trainer.current_gradient_accumulation_steps = 1
    trainer.model.train()
    return trainer


def compare(model: str, seeds: int) -> str:
    """The table, as Markdown."""
    rows = [{"prompt": f"{n // 4} + 1 ="} for n in range(16)]
    lines = []
    with tempfile.TemporaryDirectory() as folder:
        trainer = make_trainer(model, folder, rows)
        gdpo = gdpo_difference(trainer, rows)
        for name, parts in CASES.items():
            for aggregation, loss_type in LOSS_TYPES.items():
                theirs = {"loss_type": loss_type}
                ours = {"aggregation": aggregation}
                for of_trl, of_ours in parts:
                    theirs |= of_trl
                    ours |= of_ours
                # TRL's sapo and cispo are averaged in one way.
                if (
                    theirs["loss_type"] != loss_type
                    and aggregation != AVERAGES[theirs["loss_type"]]
                ):
                    continue
                most = torch.zeros(2)
                for seed in range(seeds):
                    x = random_inputs(seed)
                    pairs = zip(
                        trl_loss(trainer, x, theirs),
                        our_loss(x, ours),
                        strict=True,
                    )
                    distances = [(a - b).abs().max() for a, b in pairs]
                    most = most.maximum(torch.tensor(distances))
                loss, gradient = most.tolist()
                figures = [f"{loss:.1e}", f"{gradient:.1e}"]
                lines.append([name, aggregation, *figures])
    lines.append(["GDPO, advantages in fp32", "", f"{gdpo:.1e}", ""])
    return markdown(["case", "average", "largest difference of the loss", "of its gradient"], lines)


def main() -> None:
    options = parser(__doc__, model=None, trl_python=None, seeds=20).parse_args()
    if options.trl_python:
        arguments = [
            options.trl_python,
            __file__,
            f"--model={options.model}",
            f"--seeds={options.seeds}",
        ]
        os.execv(options.trl_python, arguments)
    text = compare(options.model, options.seeds)
    (RESULTS / "loss_vs_trl.md").write_text(text)
    print(text)


if __name__ == "__main__":
    main()
