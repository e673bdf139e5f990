"""Sampling on a GPU: the reference's tokens, the same ones in any batch, within a graph too."""

import pytest
import torch

from kernels.sampling import reference
from kernels.sampling.api import sample
from tests.kernels.sampling_rows import GREEDY, ROWS, Row, mask_of, normal, parameters_of

pytestmark = pytest.mark.gpu
LLAMA_3 = 128256
# Rows that a large vocabulary makes hard, and few of them: the reference sorts each.
OF_MANY = (
    GREEDY,
    Row(temperature=5.0),
    Row(min_p=0.05),
    Row(top_k=50),
    Row(top_p=0.9),
    Row(top_p=1 - 2**-24),
    Row(temperature=1.5, min_p=0.01, top_k=1000, top_p=0.95),
)


def drawn(logits: torch.Tensor, *others: torch.Tensor) -> torch.Tensor:
    return sample(logits.cuda(), *(each.cuda() for each in others)).cpu()


@pytest.mark.parametrize("vocab", [1, 33, 256, 1003, 4128, 50257])
@pytest.mark.parametrize("has_mask", [False, True])
def test_the_kernels_equal_their_reference(vocab: int, has_mask: bool) -> None:
    arguments = [3 * normal(len(ROWS), vocab), *parameters_of(*ROWS)]
    if has_mask:
        arguments.append(mask_of(normal(len(ROWS), vocab, seed=1) > 0))

    assert torch.equal(drawn(*arguments), reference.sample(*arguments))


@pytest.mark.parametrize(
    ("vocab", "spread"),
    [(LLAMA_3, 0.1), (LLAMA_3, 1.0), (LLAMA_3, 4.0), (262208, 0.1), (524288, 4.0)],
)
def test_large_vocabularies(vocab: int, spread: float) -> None:
    """Of flat rows, whose tokens are so light that a border may lie within an exponential's last
    bits of a draw, one may differ."""
    arguments = (spread * normal(len(OF_MANY), vocab), *parameters_of(*OF_MANY))

    differ = drawn(*arguments) != reference.sample(*arguments)

    assert differ.sum() <= (1 if spread < 4.0 else 0)


def test_nan_and_infinite_logits() -> None:
    logits = normal(len(ROWS), 3000, seed=2)
    logits[:, ::3], logits[:, 1::7], logits[:, 2::11] = float("nan"), -float("inf"), -3e38
    logits[:, 512:1024] = float("nan")
    parameters = parameters_of(*ROWS)

    assert torch.equal(drawn(logits, *parameters), reference.sample(logits, *parameters))
    logits[:, 1500:] = float("inf")
    assert (drawn(logits, *parameters) == 1500).all()
    assert (drawn(logits * float("nan"), *parameters) == 0).all()


def test_a_row_draws_the_same_in_any_batch() -> None:
    rows = (ROWS * 7)[:128]
    arguments = [each.cuda() for each in (2 * normal(128, LLAMA_3), *parameters_of(*rows))]
    together = sample(*arguments)

    for start, count in [(0, 128), (0, 1), (13, 1), (127, 1), (5, 2), (16, 33), (1, 127)]:
        some = slice(start, start + count)
        assert torch.equal(sample(*(each[some] for each in arguments)), together[some])


def test_a_graph_follows_parameters_and_mask() -> None:
    rows = (GREEDY, Row(), Row(top_k=20), Row(top_p=0.9), Row(min_p=0.1))
    allowed = normal(len(rows), LLAMA_3, seed=3) > 0
    logits, mask = normal(len(rows), LLAMA_3).cuda(), mask_of(allowed).cuda()
    parameters = parameters_of(*rows, device="cuda")
    graph = torch.cuda.CUDAGraph()
    sample(logits, *parameters, mask)
    torch.cuda.synchronize()
    with torch.cuda.graph(graph):
        out = sample(logits, *parameters, mask)

    for step in range(4):
        order = torch.randperm(len(rows), device="cuda")
        for each in (*parameters, mask):
            each.copy_(each[order].clone())
        parameters[2].add_(step)
        logits.normal_()
        graph.replay()
        assert torch.equal(out, sample(logits, *parameters, mask))
        allowed = allowed[order.cpu()]
        assert allowed[torch.arange(len(rows)), out.cpu()].all()


def test_no_rows() -> None:
    assert drawn(torch.empty(0, 100), *parameters_of()).shape == (0,)
