"""Files are replaced as wholes; what is not a regular file is written into."""

import os
import threading

import pytest

from grpo.system import publish, write_atomically


@pytest.mark.parametrize("content", ["new", lambda path: path.write_text("new")])
def test_a_file_is_replaced_a_link_keeps_its_place_and_a_pipe_is_written_into(tmp_path, content):
    target, link, pipe = (tmp_path / name for name in ("target", "link", "pipe"))
    link.symlink_to("target")
    for old in (None, "old"):  # first a link whose target is missing
        if old:
            target.write_text(old)
        write_atomically(link, content)
        assert link.is_symlink() and target.read_text() == "new" and not target.is_symlink()
    os.mkfifo(pipe)
    read = []
    reader = threading.Thread(target=lambda: read.append(pipe.read_text()), daemon=True)
    reader.start()
    write_atomically(pipe, content)
    assert pipe.is_fifo()
    reader.join()
    assert read == ["new"] and sorted(os.listdir(tmp_path)) == ["link", "pipe", "target"]


def test_a_folder_takes_the_place_of_a_dangling_link(tmp_path):
    (tmp_path / "partial").mkdir()
    (tmp_path / "partial" / "file").write_text("new")
    (tmp_path / "checkpoint-1").symlink_to(tmp_path / "gone")
    publish(tmp_path / "partial", tmp_path / "checkpoint-1")
    assert (tmp_path / "checkpoint-1" / "file").read_text() == "new"
