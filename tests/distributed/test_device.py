"""GPUs that the installed PyTorch cannot use stop the run; they must not turn into CPU ranks, one
for each GPU."""

import pytest
import torch

from grpo.config import RuntimeConfig
from grpo.distributed import start_world

pytestmark = pytest.mark.skipif(
    torch.cuda.is_available(), reason="PyTorch can use the GPUs of this machine"
)


@pytest.mark.parametrize(
    ("has_driver", "device", "hidden", "is_refused"),
    [
        (True, "auto", None, True),
        (True, "cpu", None, False),
        (True, "auto", "-1", False),
        (False, "auto", None, False),
        (False, "cuda", None, True),
    ],
)
def test_gpus_that_pytorch_cannot_use(
    tmp_path, monkeypatch, has_driver, device, hidden, is_refused
):
    if has_driver:
        (tmp_path / "nvidia-smi").touch(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if hidden is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", hidden)
    if is_refused:
        with pytest.raises(
            ValueError, match=r"cannot use a GPU of this machine: .*runtime.device=cpu"
        ):
            start_world(RuntimeConfig(device=device))
    else:
        assert start_world(RuntimeConfig(device=device)).device.type == "cpu"
