"""A user's own loss and advantages by file: the built-in ones written again, mistakes, a changed
file, the example."""

import math

import pytest
import torch
from conftest import ROOT, run_trainer, small_run
from outputs import lines
from safetensors.torch import load_file

from grpo.algorithm.advantages import call_user_advantages
from grpo.algorithm.batch import Problem
from grpo.algorithm.loss import loss_denominator, policy_loss
from grpo.checkpoint.saver import Progress
from grpo.config import make_config
from grpo.distributed import World
from grpo.rewards.functions import load_object
from grpo.run.records import Step
from grpo.run.rollouts import sample_and_score
from grpo.run.user_functions import load_user_functions, try_advantages
from grpo.system import UserError

ONE_RANK = World(0, 1, torch.device("cpu"))

FILE = """
import torch
from grpo.algorithm.advantages import group_advantages

def clip(logprobs_BT, ratio_BT, A_B1, mask_BT, bounds):
    return torch.max(-ratio_BT * A_B1, -ratio_BT.clamp(*bounds) * A_B1)

def advantages(rewards_PG, values_PGF):
    return group_advantages(rewards_PG, scale="none")

def clip_and_kl(logprobs_BT, mask_BT, ratio_BT, A_B1, bounds, ref_logprobs_BT):
    d_BT = ref_logprobs_BT - logprobs_BT
    kl_BT = d_BT.exp() - d_BT - 1
    loss_BT = clip(logprobs_BT, ratio_BT, A_B1, mask_BT, bounds) + 0.1 * kl_BT
    return loss_BT, {"kl": kl_BT}

def typo(logprobs_BT, ratio_BT, A_B1, mask_BT, bounds, ref_logprob_BT):
    return -ratio_BT * A_B1

def silent_typo(ratio_BT, A_B1, ref_logprob_BT=None):
    return -ratio_BT * A_B1

def typo_after_star(ratio_BT, A_B1, *, ref_logprob_BT=None):
    return -ratio_BT * A_B1

def without_shape(ratio_BT, A_B1, *, ref_logprobs=None):
    return -ratio_BT * A_B1

def first_typo(logprob_BT, old_logprobs_BT, A_B1, mask_BT, bounds):
    return -(logprob_BT - old_logprobs_BT).exp() * A_B1

def any_keyword(ratio_BT, A_B1, **kwargs):
    return -ratio_BT * A_B1

def detached(ratio_BT, A_B1):
    return -ratio_BT.detach() * A_B1

def per_row(logprobs_BT, ratio_BT, A_B1, mask_BT, bounds):
    return clip(logprobs_BT, ratio_BT, A_B1, mask_BT, bounds).sum(dim=1)

def likelihood(logprobs_BT, ratio_BT, A_B1, mask_BT, bounds):
    return -logprobs_BT

def not_at_1(logprobs_BT, ratio_BT, A_B1, mask_BT, bounds):
    return (ratio_BT - 1).abs() / (ratio_BT - 1) * A_B1

def over_rows(logprobs_BT, ratio_BT, A_B1, mask_BT, bounds):
    return -ratio_BT * (A_B1 - A_B1.mean())

def per_width(logprobs_BT, ratio_BT, A_B1, mask_BT, bounds):
    return -ratio_BT * A_B1 / ratio_BT.shape[1]

def gradient_of_the_mean(logprobs_BT, ratio_BT, A_B1, mask_BT, bounds):
    mean = logprobs_BT.mean()
    return -ratio_BT * A_B1 + mean - mean.detach()

def largest_advantage(logprobs_BT, ratio_BT, A_B1, mask_BT, bounds):
    return -ratio_BT * A_B1 / A_B1.abs().max()

def largest_ratio(logprobs_BT, ratio_BT, A_B1, mask_BT, bounds):
    change_BT = (ratio_BT - 1) ** 2
    return -ratio_BT * A_B1 + change_BT / (change_BT.max().detach() + 1e-6)

def beyond_the_bounds(ratio_BT, A_B1, bounds):
    is_far_BT = ratio_BT > bounds[1]
    loss_BT = -ratio_BT * A_B1
    return loss_BT / is_far_BT.float().mean() if is_far_BT.any() else loss_BT

def fades_in(logprobs_BT, ratio_BT, A_B1, mask_BT, bounds, step):
    mean = logprobs_BT.mean()
    return -ratio_BT * A_B1 + min(step / 4, 1) * (mean - mean.detach())

def fails(logprobs_BT, ratio_BT, A_B1, mask_BT, bounds):
    return {}["a"]

def text_as_metric(ratio_BT, A_B1):
    return -ratio_BT * A_B1, {"kind": "clip"}

constant = 3

def swapped(ratio, logprobs, A, mask, bounds):
    return -ratio * A

def one_of_its_own(ratios):
    return -ratios
"""


@pytest.mark.parametrize(
    ("key", "name", "message"),
    [
        ("objective", "per_row", r"must return a tensor of shape \(4, 2\), got \(4,\)"),
        ("objective", "not_at_1", r"the loss \(nan\) or its gradient is not finite"),
        ("objective", "over_rows", "of a row or its gradient depends on the other rows"),
        (
            "objective",
            "per_width",
            r"depends on the number of padding columns \(or on chance\), and so the update on how",
        ),
        ("objective", "gradient_of_the_mean", "its gradient depends on the other rows"),
        ("objective", "fades_in", "its gradient depends on the other rows"),
        ("objective", "largest_advantage", "a row or its gradient depends on the other rows"),
        ("objective", "largest_ratio", "a row or its gradient depends on the other rows"),
        ("objective", "beyond_the_bounds", "a row or its gradient depends on the other rows"),
        ("objective", "typo", "no argument 'ref_logprob_BT': .* may ask for old_logprobs_BT, ref"),
        ("objective", "silent_typo", "there is no argument 'ref_logprob_BT'"),
        ("objective", "typo_after_star", "no argument 'ref_logprob_BT': .* not end in a shape"),
        ("objective", "without_shape", "no argument 'ref_logprobs': .* without its shape"),
        ("objective", "first_typo", "there is no argument 'logprob_BT'"),
        ("objective", "swapped", "there is no argument 'ratio'"),
        ("objective", "one_of_its_own", r"takes 1 positional .* 5 were given \(docs/algorithm.md"),
        ("objective", "detached", "the loss has no gradient"),
        ("objective", "any_keyword", "there is no argument 'kwargs'"),
        ("objective", "fails", r"\(line 74\) raised KeyError: 'a'"),
        ("objective", "text_as_metric", "the metric 'kind' is 'clip', no number"),
        ("objective", "missing", "has no function or class"),
        ("objective", "constant", "has no function or class"),
    ],
)
def test_a_mistake_is_one_line_before_the_run_starts(tmp_path, key, name, message):
    file = tmp_path / "my_loss.py"
    file.write_text(FILE)
    with pytest.raises(ValueError, match=message) as caught:
        load_user_functions(make_config({f"algorithm.{key}": f"{file}:{name}"}))
    text = str(caught.value)
    assert text.startswith((f"algorithm.{key}={file}:{name}", f"algorithm.{key} '{file}:{name}'"))
    assert "\n" not in text


def test_a_loss_with_the_wrong_sign_is_told(tmp_path):
    """A positive advantage pushes its token down, or a negative one up. The built-in loss, written
    again, is not told."""
    file = tmp_path / "mine.py"
    file.write_text(
        f"{FILE}\ndef wrong_sign(ratio_BT, A_B1):\n    return ratio_BT * A_B1\n"
        "def all_up(ratio_BT, A_B1):\n    return -ratio_BT * A_B1.abs()\n"
        "def max_for_min(ratio_BT, A_B1, bounds):\n"
        "    return -torch.max(ratio_BT * A_B1, ratio_BT.clamp(*bounds) * A_B1)\n"
        "def masked(ratio_BT, A_B1):\n"
        "    return -ratio_BT * A_B1 * ((ratio_BT - 1).abs() < 0.1)\n"
        "def reinforce(logprobs_BT, A_B1):\n    return -logprobs_BT * A_B1\n"
        "def max_and_penalty(ratio_BT, A_B1, bounds):\n"
        "    return max_for_min(ratio_BT, A_B1, bounds) + 0.1 * ratio_BT.log() ** 2\n"
    )
    for name in ("wrong_sign", "all_up", "likelihood", "max_for_min", "max_and_penalty"):
        user = load_user_functions(make_config({"algorithm.objective": f"{file}:{name}"}))
        (warning,) = user.warnings
        assert "is its sign right" in warning
    for name in ("clip", "clip_and_kl", "masked", "reinforce"):
        user = load_user_functions(make_config({"algorithm.objective": f"{file}:{name}"}))
        assert not user.warnings


def test_a_penalty_that_moves_away_or_has_no_gradient_is_told(tmp_path):
    """Of the policy or of the reference, also on one side alone. An entropy bonus, and a likelihood
    beside the loss, push all tokens one way, and are no penalties."""
    file = tmp_path / "mine.py"
    begin = "def {}(logprobs_BT, ratio_BT, A_B1, ref_logprobs_BT):\n"
    body = "    d_BT = logprobs_BT - ref_logprobs_BT\n    return -ratio_BT * A_B1 + 0.1 * ({})\n"
    penalties = {
        "away": "-(d_BT**2)",
        "away_below": "-(-d_BT).clamp(min=0)",
        "away_above": "-ratio_BT.clamp(min=1)",
        "detached": "(d_BT**2).detach()",
        "square": "d_BT**2",
        "only_below": "(-d_BT).clamp(min=0)",
        "k3": "(-d_BT).exp() + d_BT - 1",
        "entropy": "logprobs_BT",
        "likelihood_too": "-logprobs_BT",
        "none": "0 * d_BT",
    }
    file.write_text("".join(begin.format(n) + body.format(p) for n, p in penalties.items()))
    told = []
    for name in penalties:
        user = load_user_functions(make_config({"algorithm.objective": f"{file}:{name}"}))
        told += [name for warning in user.warnings if "is the sign of a penalty" in warning]
    assert told == ["away", "away_below", "away_above", "detached"]


def test_advantages_without_a_file_are_refused():
    with pytest.raises(ValueError, match=r"unknown algorithm\.advantages 'mine': your own is"):
        load_user_functions(make_config({"algorithm.advantages": "mine"}))


def test_a_file_that_changed_is_read_again_in_the_same_process(tmp_path):
    file = tmp_path / "my_loss.py"
    found = []
    config = make_config({"algorithm.advantages": f"{file}:two"})
    for factor in (2, 3):
        file.write_text(f"def two(rewards_PG, values_PGF):\n    return {factor} * rewards_PG\n")
        found.append(load_user_functions(config).advantages(torch.ones(1, 1), None).item())
    functions = [load_user_functions(config).advantages.func for _ in range(2)]
    assert found == [2, 3] and functions[0] is functions[1]


def test_parameters_come_from_the_configuration(tmp_path):
    """As values of keys with dots, which a sweep can vary: -3 A and 5 r."""
    file = tmp_path / "mine.py"
    file.write_text(
        "def loss(ratio_BT, A_B1, *, factor=1.0):\n    return -factor * ratio_BT * A_B1\n"
        "def advantages(rewards_PG, *, factor):\n    return factor * rewards_PG\n"
        "def typo(ratio_BT, A_B1, factor=1.0, ref_logprob_BT=None):\n    return -ratio_BT * A_B1\n"
    )
    names = {"objective": f"{file}:loss", "advantages": f"{file}:advantages"}
    args = {"own_args.objective.factor": 3.0, "own_args.advantages.factor": 5.0}
    config = make_config({f"algorithm.{key}": value for key, value in (names | args).items()})
    user = load_user_functions(config)
    try_advantages(config, user, {}, ["accuracy"])
    log_BT = torch.zeros(1, 2)
    loss_sum, _ = policy_loss(
        log_BT, log_BT, torch.tensor([2.0]), torch.ones(1, 2), objective=user.objective
    )
    assert loss_sum == -6
    rewards_PG = torch.tensor([[1.0, 0.0]])
    advantages_PG, _ = call_user_advantages(user.advantages, rewards_PG, rewards_PG[..., None], {})
    assert advantages_PG.tolist() == [[5.0, 0.0]]
    misspelt = make_config(config, {"algorithm.own_args.objective.facto": 1.0})
    with pytest.raises(ValueError, match=r"no parameter facto after \*; it has factor"):
        load_user_functions(misspelt)
    text = make_config(config, {"algorithm.own_args.objective.factor": "half"})
    with pytest.raises(ValueError, match=r"raised TypeError: .*'objective': {'factor': 'half'}"):
        load_user_functions(text)
    # With factor bound, Python would take ref_logprob_BT for a parameter after *.
    hidden_typo = make_config(config, {"algorithm.objective": f"{file}:typo"})
    with pytest.raises(ValueError, match=r"no parameter factor after \*; it has none"):
        load_user_functions(hidden_typo)


def test_the_example_by_hand():
    """Ratios 2, 1, 0.5 and bounds 0.7, 1.5: the mean of 1.5, 1, 0.5 where A > 0, and of 2, 1, 0.7
    where A < 0."""
    geometric_mean = load_object(f"{ROOT}/examples/own_loss.py:geometric_mean", "objective", "")
    new_BT = torch.tensor([[2.0, 1.0, 0.5]] * 2, dtype=torch.float64).log().requires_grad_()
    mask_BT = torch.ones(2, 3)
    A_B = torch.tensor([2.0, -1.0])
    options = dict(objective=geometric_mean, epsilon=0.3, epsilon_high=0.5)
    loss_sum, _ = policy_loss(new_BT, torch.zeros(2, 3), A_B, mask_BT, **options)
    up = 0.75 ** (1 / 3)
    down = 1.4 ** (1 / 3)
    assert (loss_sum / loss_denominator(mask_BT)).item() == pytest.approx((-2 * up + down) / 2)
    loss_sum.backward()
    torch.testing.assert_close(
        new_BT.grad, torch.tensor([[0, -2 * up / 3, -2 * up / 3], [down / 3, down / 3, 0]]).double()
    )
    above_median = load_object(f"{ROOT}/examples/own_loss.py:above_median", "advantages", "")
    rewards_PG = torch.tensor([[0.0, 0.0, 3.0], [math.nan, 1.0, 2.0]])
    assert above_median(rewards_PG, rewards_PG[..., None]).nan_to_num(9).tolist() == [
        [0, 0, 3],
        [9, 0, 1],
    ]


def test_a_function_gets_what_it_names():
    """By name in any order, or by position under names of its own; copies; metrics by (sum,
    count)."""
    mask_BT = torch.tensor([[True, True], [True, False]])
    new_BT = torch.tensor([[-1.0, -2.0], [-3.0, math.nan]])
    ref_BT = torch.tensor([[-1.5, -2.0], [-2.0, math.nan]])
    sampling_BT = torch.tensor([[-1.1, -2.1], [-3.1, math.nan]])
    seen = {}

    def by_name(ref_logprobs_BT, sampling_logprobs_BT, old_logprobs_BT, lengths_B, A_B1, ratio_BT):
        seen.update(ref=ref_logprobs_BT, sampling=sampling_logprobs_BT, lengths=lengths_B)
        values_B = torch.tensor([4.0, math.nan])
        return -ratio_BT * A_B1, {"old": old_logprobs_BT.add_(1), "rows": values_B, "number": 7}

    def by_position(logprobs, ratio, A, mask, bounds, lengths_B, *, scale=2.0):
        return -ratio * A * lengths_B[:, None] / lengths_B[:, None] * scale

    A_B = torch.tensor([1.0, -1.0])
    options = dict(ref_logprobs_BT=ref_BT, sampling_logprobs_BT=sampling_BT)
    loss, stats = policy_loss(new_BT, new_BT, A_B, mask_BT, objective=by_name, **options)
    assert seen["ref"].tolist() == [[-1.5, -2.0], [-2.0, 0.0]]
    assert seen["sampling"][1, 1] == 0 and seen["lengths"].tolist() == [2, 1]
    own = {name: (float(s), int(n)) for name, (s, n) in stats.items() if name.startswith("own/")}
    assert own == {"own/old": (-3.0, 3), "own/rows": (4.0, 1), "own/number": (7.0, 1)}
    assert loss == policy_loss(new_BT, new_BT, A_B, mask_BT, objective=by_position)[0] == 0

    def advantages(answer, rewards_PG, lengths_PG):
        return rewards_PG * lengths_PG + torch.tensor(answer)[:, None], {"mean": rewards_PG}

    rewards_PG = torch.tensor([[1.0, math.nan]])
    lengths_PG = torch.tensor([[3, 4]])
    found, stats = call_user_advantages(
        advantages, rewards_PG, rewards_PG[..., None], {"lengths_PG": lengths_PG, "answer": [5]}
    )
    assert found.tolist() == [[8.0, 0.0]]
    assert [float(value) for value in stats["own/mean"]] == [1.0, 1.0]


def test_a_row_without_tokens_counts_in_no_metric():
    """As FSDP repeats one, so that each rank has the same number of passes."""

    def loss(ratio_BT, A_B1, lengths_B):
        return -ratio_BT * A_B1, {"length": lengths_B, "number": 7.0, "ratio": ratio_BT}

    log_BT = torch.zeros(1, 2)
    _, stats = policy_loss(
        log_BT, log_BT, torch.zeros(1), torch.zeros(1, 2, dtype=torch.bool), objective=loss
    )
    for name in ("length", "number", "ratio"):
        assert [float(value) for value in stats[f"own/{name}"]] == [0.0, 0.0]


def test_the_example_with_lengths_and_a_reference_by_hand():
    """Lengths 2 and 6 of equal rewards: the second is 50% above the mean and loses 0.05. Where the
    policy is above the reference by log 2, k3 is 0.5 - log 0.5 - 1, times 0.1."""
    short_where_best = load_object(f"{ROOT}/examples/own_kl.py:short_where_best", "advantages", "")
    rewards_PG = torch.tensor([[1.0, 1.0, math.nan]])
    advantages_PG, metrics = short_where_best(rewards_PG, torch.tensor([[2, 6, 4]]))
    torch.testing.assert_close(advantages_PG[0, :2], torch.tensor([0.025, -0.025]))
    assert metrics["length_of_best"] == 4
    loss = load_object(f"{ROOT}/examples/own_kl.py:clip_and_asymmetric_kl", "objective", "")
    new_BT = torch.tensor([[0.8, 0.2]]).log()
    ref_BT = torch.tensor([[0.4, 0.4]]).log()
    loss_sum, stats = policy_loss(
        new_BT, new_BT, torch.ones(1), torch.ones(1, 2), objective=loss, ref_logprobs_BT=ref_BT
    )
    kl = [0.5 + math.log(2) - 1, 2 - math.log(2) - 1]
    assert loss_sum.item() == pytest.approx((-2 + 0.1 * kl[0] + 0.01 * kl[1]) / 2)
    assert stats["own/kl"][0].item() == pytest.approx(sum(kl), rel=1e-5)
    assert stats["own/above_reference"][0] == 1


def test_advantages_are_tried_on_columns_of_the_rows(tmp_path):
    """And on values of each reward function, by its name: 0 and 1, and groups of equal rewards."""
    file = tmp_path / "mine.py"
    file.write_text(
        "import torch\n"
        "def columns(rewards_PG, solution):\n    return rewards_PG / len(solution)\n"
        "def difficulty(rewards_PG, accuracy):\n"
        "    p_P1 = accuracy.nanmean(dim=1, keepdim=True)\n"
        "    return rewards_PG * (p_P1 * (1 - p_P1)).sqrt()\n"
        "def no_eps(rewards_PG):\n"
        "    centred_PG = rewards_PG - rewards_PG.mean(dim=1, keepdim=True)\n"
        "    return centred_PG / rewards_PG.std(dim=1, keepdim=True)\n"
        "def wrong_sign(rewards_PG):\n"
        "    return rewards_PG.nanmean(dim=1, keepdim=True) - rewards_PG\n"
        "def plain_mean(rewards_PG):\n"
        "    return rewards_PG - rewards_PG.mean(dim=1, keepdim=True)\n"
        "def by_the_mean(rewards_PG):\n"
        "    return rewards_PG / rewards_PG.mean(dim=1, keepdim=True) - 1\n"
        "def all_ones(rewards_PG):\n"
        "    return torch.ones_like(rewards_PG)\n"
        "def over_problems(rewards_PG):\n"
        "    return rewards_PG - rewards_PG.nanmean(dim=0)\n"
        "def rank_of_ties(rewards_PG):\n"
        "    return rewards_PG.flip(1).argsort(dim=1, stable=True).argsort(dim=1).flip(1).float()\n"
        "def trimmed(rewards_PG):\n"
        "    rank_PG = rewards_PG.argsort(dim=1, stable=True).argsort(dim=1)\n"
        "    is_kept_PG = (rank_PG >= 1) & (rank_PG < rewards_PG.shape[1] - 1)\n"
        "    kept_PG = rewards_PG.masked_fill(~is_kept_PG, torch.nan)\n"
        "    return (kept_PG - kept_PG.nanmean(dim=1, keepdim=True)).nan_to_num(0)\n"
        "def all_zeros(rewards_PG):\n"
        "    return torch.zeros_like(rewards_PG)\n"
        "def by_chance(rewards_PG):\n"
        "    return rewards_PG + torch.rand_like(rewards_PG) / 9\n"
        "def three(rewards_PG):\n"
        "    return rewards_PG, {}, rewards_PG\n"
        "def no_name(rewards_PG):\n"
        "    return rewards_PG, 0.5\n"
        "def typo(reward_PG, *, q=1):\n"
        "    return reward_PG\n"
        "def texts(rewards_PG):\n"
        "    return rewards_PG, {'names': ['a', 'b']}\n"
        "def measured(rewards_PG):\n"
        "    return rewards_PG, {'level': 1.0, 'spread': 2.0}\n"
        "def loss(ratio_BT, A_B1):\n"
        "    return -ratio_BT * A_B1, {'level': ratio_BT}\n"
    )

    def try_function(name, objective="clip", **columns):
        config = make_config(
            {"algorithm.advantages": f"{file}:{name}", "algorithm.objective": objective}
        )
        user = load_user_functions(config)
        try_advantages(config, user, columns, ["accuracy", "format"])
        return user.warnings

    assert not try_function("columns", solution=1)
    assert not try_function("difficulty")
    for name in ("wrong_sign", "all_ones"):
        (warning,) = try_function(name)
        assert "gives 1 no more than one to which each gives 0: is its sign right?" in warning
    # One completion of each problem has nothing to be compared with.
    alone = {"rollout.num_generations": 1, "algorithm.baseline": "none", "algorithm.scale": "none"}
    config = make_config({"algorithm.advantages": f"{file}:columns"} | alone)
    user = load_user_functions(config)
    try_advantages(config, user, {"solution": 1}, ["accuracy"])
    assert not user.warnings
    for name in ("over_problems", "rank_of_ties", "trimmed"):
        (warning,) = try_function(name)
        assert "completions of a group apart that have equal rewards and lengths" in warning
    # As a filter of the groups may.
    assert not try_function("all_zeros")
    assert "gives other advantages at a second call" in str(try_function("by_chance"))
    with pytest.raises(ValueError, match=r"nan, .* with the rewards \[0.0, 0.0, .*None"):
        try_function("by_the_mean")
    with pytest.raises(
        ValueError, match=r"the rewards \[0.0, .*, nan\]: does it take a mean where"
    ):
        try_function("plain_mean")
    for name in ("three", "no_name"):
        with pytest.raises(ValueError, match=r"a tuple must be \(tensor, {name: value}\), not "):
            try_function(name)
    with pytest.raises(ValueError, match=r"the metric 'names' is \['a', 'b'\], no number"):
        try_function("texts")
    with pytest.raises(ValueError, match="there is no argument 'reward_PG'"):
        try_function("typo")
    assert not try_function("measured")
    assert not try_function("all_zeros", objective=f"{file}:loss")
    with pytest.raises(ValueError, match="has a metric of this name: own/level"):
        try_function("measured", objective=f"{file}:loss")
    words = (
        "no argument 'solution': .* may ask for step, answer, accuracy, format, lengths_PG, rewards"
    )
    with pytest.raises(ValueError, match=f"advantages=.*{words}"):
        try_function("columns", answer=1)
    with pytest.raises(
        ValueError, match=r"finite numbers, got .*nan.* with the rewards .*1.0, 1.0"
    ):
        try_function("no_eps")


@pytest.mark.slow
def test_runs_with_own_functions_are_those_of_the_built_in_ones(tmp_path, random_model):
    """On two ranks, with two updates a rollout, and continued; the KL too, where it is a part of
    the own loss. A changed file is refused."""
    file = tmp_path / "my_loss.py"
    own = []
    file.write_text(FILE)

    def run(folder, *changes, **options):
        settings = "algorithm.num_minibatches=3", "algorithm.beta=0.1", "eval.before_training=false"
        return run_trainer(
            *small_run(random_model, tmp_path / folder), *settings, *changes, **options
        )

    own = f"algorithm.objective={file}:clip", f"algorithm.advantages={file}:advantages"
    run("built_in", "algorithm.scale=none", ranks=2)
    run("own", *own, ranks=2)
    with_kl = f"algorithm.objective={file}:clip_and_kl", own[1], "algorithm.beta=0"
    run("own_kl", *with_kl, ranks=2)
    weights = [
        load_file(tmp_path / f"{name}/checkpoint-5/model.safetensors")
        for name in ("built_in", "own", "own_kl")
    ]
    for name, tensor in weights[0].items():
        for other in weights[1:]:
            torch.testing.assert_close(other[name], tensor, rtol=1e-4, atol=1e-5)
    for expected, line in zip(
        lines(tmp_path / "built_in"), lines(tmp_path / "own_kl"), strict=True
    ):
        assert line.get("own/kl") == pytest.approx(expected.get("kl"), rel=1e-3, abs=1e-7)
    file.write_text(FILE.replace("torch.max", "torch.maximum"))
    done = run("own", *own, ranks=2, check=False)
    assert (
        done.returncode
        and f"was started with other settings (content of {file}: checkpoint '" in done.stderr
    )


@pytest.mark.slow
def test_a_loss_trains_where_all_advantages_are_0(tmp_path, random_model):
    """Equal rewards, and a loss that does not look at them."""
    file = tmp_path / "my_loss.py"
    file.write_text(FILE)
    run_trainer(
        *small_run(random_model, tmp_path / "run"), f"algorithm.objective={file}:likelihood",
        f"reward.functions=['{ROOT}/tests/rewards_for_tests.py:constant']", "algorithm.aggregation=constant",
        "algorithm.beta=0", "optim.max_steps=1", "eval.before_training=false",
    )  # fmt: skip
    assert lines(tmp_path / "run")[-1]["grad_norm"] > 0


@pytest.mark.slow
def test_loss_and_advantages_see_the_step_and_a_step_without_update_is_refused(
    tmp_path, random_model
):
    """Three steps, 0 to 2. The loop leaves out the update of the last. It draws each problem three
    times, with other completions each time, and trains on the last."""
    file = tmp_path / "mine.py"
    file.write_text(
        """
import train_grpo

def loss(ratio_BT, A_B1, step):
    return -ratio_BT * A_B1, {"step_of_loss": step}

def advantages(rewards_PG, step):
    return rewards_PG, {"step_of_advantages": step}

def train(run):
    update = train_grpo.update
    sample_and_score = train_grpo.sample_and_score

    def sample_twice(run, step, problems):
        rollouts = [sample_and_score(run, step, problems, draw=draw) for draw in range(3)]
        found = set()
        for rollout in rollouts:
            completions = [each for group in rollout.groups for each in group.completions]
            found.add(tuple(tuple(each.sampled_ids) for each in completions))
        assert len(found) == 3
        return rollouts[2]

    train_grpo.sample_and_score = sample_twice
    def update_before_the_last(learner, step, *arguments, **named):
        if step.number < 2:
            update(learner, step, *arguments, **named)

    train_grpo.update = update_before_the_last
    train_grpo.train(run)
"""
    )
    own = [
        f"algorithm.objective={file}:loss",
        f"algorithm.advantages={file}:advantages",
        f"algorithm.loop={file}:train",
    ]
    done = run_trainer(
        *small_run(random_model, tmp_path / "run"),
        *own,
        "optim.max_steps=3",
        "eval.before_training=false",
        check=False,
    )
    assert done.returncode == 1
    assert "step 3/3 made 0 updates, and the learning-rate schedule is for 1" in done.stderr
    metrics = lines(tmp_path / "run")
    assert [line["own/step_of_advantages"] for line in metrics] == [0, 1]
    assert [line["own/step_of_loss"] for line in metrics] == [0, 1]


@pytest.mark.slow
def test_the_state_of_a_loop_is_the_same_on_all_ranks(random_model, tmp_path):
    file = tmp_path / "loop.py"
    file.write_text(
        """
import train_grpo

def train(run):
    run.progress.loop_state["rank"] = run.world.rank
    train_grpo.train(run)
"""
    )
    loop = [f"algorithm.loop={file}:train", "eval.before_training=false"]
    done = run_trainer(*small_run(random_model, tmp_path / "run"), *loop, ranks=2, check=False)
    assert done.returncode == 1
    assert """progress.loop_state is '{"rank": 0}' on rank 0 and '{"rank": 1}'""" in done.stderr


def test_a_problem_that_is_twice_in_a_step_is_refused():
    problem = Problem(3, "a", (1,), {})
    with pytest.raises(UserError, match="a problem is twice in this step"):
        sample_and_score(None, Step(0), [problem, problem])
    with pytest.raises(UserError, match="a problem is twice in this step"):
        sample_and_score(None, Step(0, sampled={(3, 0)}), [problem])


def test_the_state_of_a_loop_is_what_a_checkpoint_would_give_back():
    progress = Progress(loop_state={"seen": {3: (1, 2)}})
    progress.complete_step({"step": 1, "num_tokens": 5}, ONE_RANK)
    assert progress.loop_state == {"seen": {"3": [1, 2]}}
    progress.loop_state["seen"] = torch.ones(2)
    with pytest.raises(TypeError, match="Tensor is not JSON serializable"):
        progress.complete_step({"step": 2, "num_tokens": 5}, ONE_RANK)
