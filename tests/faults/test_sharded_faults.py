"""Kills, a full disk and a torn file while ranks save their shares: the run ends with the same
bits."""

import pytest
from conftest import save_random_model
from harness import Started, run, tiny
from outputs import assert_same_weights, lines

STEPS = 6
OPTIONS = (
    "runtime.parallel=fsdp",
    "checkpoint.save_steps=1",
    "checkpoint.keep=99",
    "algorithm.ref_sync_steps=2",
)


def fails(output, arguments, fault: str, says: str) -> str:
    """Run it with a fault that happens once; all ranks must end, and one of them say why."""
    once = output.with_name(fault.replace(" ", "_").replace("=", "-"))
    started = Started(output, arguments, ranks=2, fault=f"{fault} once={once}")
    assert started.end(timeout=120) != 0
    text = started.text()
    assert once.exists() and says in text, text[-4000:]
    return text


@pytest.mark.slow
def test_no_fault_in_a_save_changes_how_the_run_ends(tmp_path):
    model = save_random_model(tmp_path / "model", tie_word_embeddings=True)
    undisturbed = tmp_path / "undisturbed"
    output = tmp_path / "run"
    run(undisturbed, tiny(model, undisturbed, *OPTIONS, steps=STEPS), ranks=2)
    arguments = tiny(model, output, *OPTIONS, steps=STEPS)

    text = fails(output, arguments, "place=states rank=1 step=1 do=full", "File too large")
    # of all ranks together
    assert "OSError: rank 1: " in text and text.count("\nerror: [rank ") == 2
    assert (output / "checkpoint-1" / "manifest.json").exists()
    assert not (output / "checkpoint-2").exists()
    fails(output, arguments, "place=states rank=1 step=2 do=kill", "FAULT kill")
    assert (output / "checkpoint-2").exists()
    assert not (output / "checkpoint-3").exists()
    # complete, but not renamed yet
    fails(output, arguments, "place=save rank=0 step=3 do=kill", "FAULT kill")
    assert (output / "checkpoint-3").exists()
    assert not (output / "checkpoint-4").exists()
    text = fails(output, arguments, "place=states rank=1 step=4 do=kill", "FAULT kill")
    assert "checkpoint-4 at step 4" in text
    share = sorted((output / "checkpoint-4" / "trainer" / "states").glob("__1_*"))[0]
    share.write_bytes(share.read_bytes()[:-100])
    text = run(output, arguments, ranks=2).text()
    assert "skipping" in text
    assert share.name in text
    assert "is not what was saved" in text
    assert "UserWarning" not in text  # of torch.distributed.checkpoint, when a rank reads its share
    assert not list(output.glob(".partial*"))

    assert_same_weights(output / f"checkpoint-{STEPS}", undisturbed / f"checkpoint-{STEPS}")
    assert lines(output) == lines(undisturbed)
