"""The files that a continued run reads again: how a refusal names those that differ."""

from grpo.run.resume import _content_differences


def test_a_folder_that_has_moved_is_one_entry():
    files = ("config.json", "model.safetensors", "tokenizer.json")
    saved = {f"/old/base/{name}": name for name in files} | {"rewards.py": "a", "/adapter/adapter_config.json": "b"}
    now = {f"/new/base/{name}": name for name in files} | {"rewards.py": "changed"}
    assert _content_differences(saved, now) == [
        ("content of /adapter/adapter_config.json", "as it was", "missing"),
        ("content of /new/base (3 files)", "missing", "new"),
        ("content of /old/base (3 files)", "as it was", "missing"),
        ("content of rewards.py", "as it was", "changed"),
    ]
    assert _content_differences(saved, saved) == []
