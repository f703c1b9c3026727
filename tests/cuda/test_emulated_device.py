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


@pytest.mark.parametrize(
    ("dtype", "mask", "groups", "is_math"),
    [
        ("bfloat16", False, 2, False),
        ("bfloat16", True, 2, True),
        ("float32", True, 1, False),
        ("float32", False, 2, True),
    ],
)
def test_attention_by_the_math_kernel_is_a_problem(gpu, dtype, mask, groups, is_math):
    assert len(gpu.run("scenarios.attends", dtype=dtype, mask=mask, groups=groups).problems) == is_math


def test_products_are_in_tf32_where_pytorch_is_told_to(gpu):
    assert gpu.run("scenarios.multiplies").returned == [1 + 2**-12, 1.0]


def test_graphs_read_and_write_their_memory_when_replayed(gpu):
    report = gpu.run("scenarios.captures")
    assert report.returned == [[0.0] * 4, [6.0] * 4]
    assert (report.problems, report.captured, report.replays) == ([], 1, 1)
