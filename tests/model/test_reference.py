"""``model.reference``: another model than the start as the reference of the KL."""

import shutil

import pytest
import torch
from conftest import save_random_model, small_run
from outputs import lines
from transformers import AutoModelForCausalLM

from grpo.algorithm.batch import Completion, Group, Problem, collate
from grpo.config import load_config
from grpo.distributed import start_world
from grpo.model import check_reference, load_tokenizer
from grpo.run.passes import batch_logprobs
from grpo.run.prepare import prepare
from train_grpo import main


@pytest.fixture(scope="module")
def other(tmp_path_factory):
    """A model of another depth and with other weights than ``random_model``, with the same
    tokenizer."""
    return save_random_model(
        tmp_path_factory.mktemp("other"), num_hidden_layers=3, initializer_range=0.2
    )


def test_ref_logprobs_are_those_of_the_named_model(random_model, other, tmp_path):
    config = load_config(
        [*small_run(random_model, tmp_path), f"model.reference={other}", "rollout.temperature=0.7"]
    )
    run = prepare(config, start_world(config.runtime))
    try:
        ids = torch.randint(3, 90, (2, 4 + 6), generator=torch.Generator().manual_seed(0))
        completions = tuple(Completion(tuple(row[4:].tolist()), "", True) for row in ids)
        problem = Problem(0, "", tuple(ids[0, :4].tolist()))
        batch = collate(
            [Group(problem, completions)], torch.zeros(1, 2), pad_id=run.learner.policy.pad_id
        )
        for folder, scorer in (
            (random_model, run.learner.bare_scorer),
            (other, run.learner.ref_scorer),
        ):
            model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64)
            with torch.no_grad():
                logits_BTV = model(batch.sequence_ids_BS).logits[:, 3:-1] / 0.7
            expected = logits_BTV.log_softmax(-1).gather(-1, ids[:, 4:, None])[..., 0]
            torch.testing.assert_close(
                batch_logprobs(run.learner, scorer, batch).double(), expected, atol=1e-4, rtol=1e-4
            )
    finally:
        run.close()


def test_a_reference_with_another_vocabulary_is_refused(random_model):
    tokenizer = load_tokenizer(str(random_model))
    tokenizer.add_tokens(["another"])
    with pytest.raises(ValueError, match=r"model\.reference=.* has another vocabulary"):
        check_reference(str(random_model), tokenizer, [], 1, trust_remote_code=False)


@pytest.mark.slow
def test_a_continued_run_notices_other_weights_of_its_reference(
    random_model, other, tmp_path, capsys
):
    folder = shutil.copytree(other, tmp_path / "reference")
    arguments = [
        *small_run(random_model, tmp_path / "run"),
        f"model.reference={folder}",
        "algorithm.beta=0.1",
        "data.eval_split=null",
        "checkpoint.save_steps=1",
    ]
    assert main([*arguments, "optim.max_steps=1"]) == 0
    assert lines(tmp_path / "run")[0]["kl"] > 0.01, "the reference is not the start"
    shutil.rmtree(folder)
    save_random_model(folder, num_hidden_layers=3, initializer_range=0.25)
    assert main([*arguments, "optim.max_steps=1"]) == 2
    assert f"content of {folder}/model.safetensors: checkpoint '" in capsys.readouterr().err
