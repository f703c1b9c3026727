"""The emulated device refuses or notices what a GPU would, each by a planted mistake."""

import pytest

pytestmark = pytest.mark.slow


@pytest.mark.parametrize(
    ("expression", "error"),
    [
        ("ones + torch.ones(4)", "all tensors to be on the same device"),
        ("torch.ones(4)[ones.long()]", "all tensors to be on the same device"),
        ("ones.sum().item()", "called a synchronizing CUDA operation"),
        ("ones[ones > 0]", "called a synchronizing CUDA operation"),
        ("ones.cumsum(dim=0)", "cumsum_cuda_kernel does not have a deterministic implementation"),
        ("torch.ones(2**18, device='cuda')", "CUDA out of memory"),
    ],
)
def test_mistakes_are_refused(gpu, expression, error):
    with pytest.raises(AssertionError, match=error):
        gpu.run("scenarios.evaluates", expression=expression)


def test_what_a_gpu_computes_passes(gpu):
    gpu.run("scenarios.evaluates", expression="ones + torch.ones(()) + ones[ones.long()]")


def test_graphs_read_and_write_their_memory_when_replayed(gpu):
    report = gpu.run("scenarios.captures")
    assert report.returned == [[0.0] * 4, [6.0] * 4]
    assert (report.problems, report.captured, report.replays) == ([], 1, 1)
