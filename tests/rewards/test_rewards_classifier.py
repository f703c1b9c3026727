"""A Hugging Face sequence classifier as a reward: tiny random ones on disk, and what can be wrong with them."""

import shutil

import pytest

from grpo.rewards import RewardRunner, RewardSpec, load_reward


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
        sizes = dict(vocab_size=6, hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2)
        config = transformers.LlamaConfig(**sizes, num_labels=labels, pad_token_id=0)
        folders[labels] = str(tmp_path_factory.mktemp("classifier") / f"model{labels}")
        transformers.LlamaForSequenceClassification(config).save_pretrained(folders[labels])
        tokenizer.save_pretrained(folders[labels])
    return folders


def test_a_classifier_is_a_reward(classifier):
    specs = [RewardSpec(f"classifier:{classifier[1]}", 1.0, {"batch_size": 2}), RewardSpec("accuracy")]
    with RewardRunner(specs) as runner:
        assert runner.names == ["model1", "accuracy"]
        result = runner.score(["a b "] * 3, ["c", "d d d d", "c"], {"answer": ["4"] * 3})
        together = [row[0] for row in result.values]
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
    assert without_template == pytest.approx([together[0]], abs=1e-6), "without a chat template messages are joined"


def test_a_classifier_that_is_none_is_refused(classifier, tmp_path):
    from safetensors.torch import load_file, save_file

    folder = shutil.copytree(classifier[1], tmp_path / "untrained")
    tensors = load_file(folder / "model.safetensors")
    tensors.pop("score.weight")
    save_file(tensors, folder / "model.safetensors")
    for path, args, message in [
        (classifier[2], {}, "this one has 2 labels"),
        (folder, {}, r"untrained weights: \['score.weight'\]"),
        ("/nowhere/at/all", {}, "reward 'classifier:/nowhere/at/all': "),
        (classifier[1], {"batchsize": 2}, "has no argument 'batchsize'"),
    ]:
        with pytest.raises(ValueError, match=message):
            RewardRunner([RewardSpec(f"classifier:{path}", 1.0, args)]).check()
