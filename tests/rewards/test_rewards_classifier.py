"""A Hugging Face sequence classifier as a reward: tiny random ones on disk, and everything that can be wrong with them."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from grpo.rewards import RewardRunner, RewardSpec, load_reward

ROOT = Path(__file__).parents[2]


def column(result, function=0):
    return [row[function] for row in result.values]


@pytest.fixture(scope="module")
def classifier(tmp_path_factory):
    """Two tiny random classifiers saved on disk: with one label and with two."""
    tokenizers = pytest.importorskip("tokenizers")
    transformers = pytest.importorskip("transformers")
    import torch

    vocabulary = {word: i for i, word in enumerate(["[PAD]", "[UNK]", "a", "b", "c", "d"])}
    raw = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocabulary, unk_token="[UNK]"))
    raw.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=raw, pad_token="[PAD]", unk_token="[UNK]")
    tokenizer.chat_template = "{% for m in messages %}{{ m['content'] }} {% endfor %}"
    folders = {}
    for labels in (1, 2):
        torch.manual_seed(0)
        config = transformers.LlamaConfig(
            vocab_size=6,
            hidden_size=16,
            intermediate_size=16,
            num_hidden_layers=1,
            num_attention_heads=2,
            num_labels=labels,
            pad_token_id=0,
        )
        folders[labels] = str(tmp_path_factory.mktemp("classifier") / f"model{labels}")
        transformers.LlamaForSequenceClassification(config).save_pretrained(folders[labels])
        tokenizer.save_pretrained(folders[labels])
    return folders


def test_a_classifier_is_a_reward(classifier):
    with RewardRunner(
        [RewardSpec(f"classifier:{classifier[1]}", 1.0, {"batch_size": 2}), RewardSpec("accuracy")]
    ) as runner:
        assert runner.names == ["model1", "accuracy"]
        result = runner.score(["a b "] * 3, ["c", "d d d d", "c"], {"answer": ["4"] * 3})
        together = column(result)
        alone = [runner.score(["a b "], [text], {"answer": ["4"]}).values[0][0] for text in ("c", "d d d d", "c")]
        columns = {"answer": ["4"], "batch_size": ["from a column"]}
        chat = runner.score([[{"role": "user", "content": "a b"}]], [[{"role": "assistant", "content": "c"}]], columns)
    assert together == pytest.approx(alone, abs=1e-6)  # padding changes nothing
    assert together[0] == pytest.approx(together[2]) and together[0] != pytest.approx(together[1])
    assert chat.values[0][0] == pytest.approx(together[0], abs=1e-6)
    reward = load_reward(f"classifier:{classifier[1]}")
    reward.tokenizer.chat_template = None
    messages = [{"role": role, "content": text} for role, text in (("system", "a"), ("user", "b "))]
    without_template = reward([messages], [[{"role": "assistant", "content": "c"}]])
    assert without_template == pytest.approx([together[0]], abs=1e-6), (
        "messages of a model without a chat template are joined"
    )


def test_a_classifier_needs_one_label(classifier):
    with pytest.raises(ValueError, match="has 2 labels"):
        RewardRunner([RewardSpec(f"classifier:{classifier[2]}")]).check()
    with pytest.raises(ValueError, match="cannot be loaded"):
        RewardRunner([RewardSpec("classifier:/nowhere/at/all")]).check()
    with pytest.raises(ValueError, match="has no argument 'batchsize'"):
        RewardRunner([RewardSpec(f"classifier:{classifier[1]}", 1.0, {"batchsize": 2})]).check()
    for value in (0, 2.5):
        with pytest.raises(ValueError, match=f"batch_size must be a whole number of at least 1, got {value}"):
            RewardRunner([RewardSpec(f"classifier:{classifier[1]}", 1.0, {"batch_size": value})]).check()


def test_a_truncated_or_untrained_classifier_is_refused(classifier, tmp_path):
    from safetensors.torch import load_file, save_file

    folder = shutil.copytree(classifier[1], tmp_path / "copy")
    weights = folder / "model.safetensors"
    tensors = load_file(weights)
    save_file({name: tensor for name, tensor in tensors.items() if name != "score.weight"}, weights)
    with pytest.raises(ValueError, match=r"is no trained classifier: it has no score\.weight"):
        RewardRunner([RewardSpec(f"classifier:{folder}")]).check()
    weights.write_bytes(weights.read_bytes()[:100])
    with pytest.raises(ValueError, match="copy' cannot be loaded"):
        RewardRunner([RewardSpec(f"classifier:{folder}")]).check()


@pytest.mark.slow
def test_a_classifier_without_a_hub_is_refused_at_once(tmp_path):
    """Nothing listens on port 9 of this machine: the Hub's own client would try for a minute."""
    code = "from grpo.rewards import *; RewardRunner([RewardSpec('classifier:nobody/nothing')]).check()"
    proxies = {name: "" for proxy in ("http_proxy", "https_proxy", "all_proxy") for name in (proxy, proxy.upper())}
    environment = os.environ | proxies | {"HF_ENDPOINT": "http://127.0.0.1:9", "HF_HOME": str(tmp_path)}
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, env=environment, capture_output=True, text=True, timeout=40, check=False
    )
    assert "cannot be loaded: it is no local folder, the Hub cannot be reached" in done.stderr


def test_a_classifier_scores_in_batches(classifier):
    with RewardRunner([RewardSpec(f"classifier:{classifier[1]}", 1.0, {"batch_size": 2})]) as runner:
        runner.check()
        rows = []
        ((reward, _),) = runner._here.functions.values()
        reward.model.register_forward_pre_hook(
            lambda _, args, given: rows.append(len(given["input_ids"])), with_kwargs=True
        )
        assert len(column(runner.score(["a "] * 5, ["b", "c c", "d", "a", "b"], {}))) == 5
    assert rows == [2, 2, 1]
