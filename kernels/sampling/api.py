"""Entry point of the op."""

import torch

from kernels.launch import Launcher, cdiv, runs_kernels
from kernels.metas import narrowest
from kernels.sampling import reference

_launch_greatest = Launcher(
    reference.GREATEST_CONTRACT, "kernels.sampling.kernel:sample_greatest_kernel"
)
_launch_weigh = Launcher(reference.WEIGH_CONTRACT, "kernels.sampling.kernel:sample_weigh_kernel")
_launch_draw = Launcher(reference.DRAW_CONTRACT, "kernels.sampling.kernel:sample_draw_kernel")


def sample(
    logits: torch.Tensor,
    floats: torch.Tensor,
    numbers: torch.Tensor,
    positions: torch.Tensor,
    mask: torch.Tensor | None = None,
) -> torch.Tensor:
    """logits [rows, vocab] float32, left unchanged -> a token of each row, [rows] int64.

    Each row has its own parameters. floats [rows, 3] float32: temperature, 0 for the greatest logit
    (the lowest id among equals); min-p in [0, 1], 0 for none; top-p in [0, 1], 1 for none. numbers
    [rows, 2] int64: top-k, 0 for none; seed. A draw is a function of the seed and of positions
    [rows] int64.
    mask [rows, ceil(vocab / 32)] int32: bit b of word w says that token 32 w + b is allowed.

    Bitwise batch invariant. The host waits for nothing, and launches depend on shapes alone: fit
    for a CUDA graph. vocab <= 524288 on a GPU, or ContractError; scratch as large as the logits.
    """
    rows, vocab = logits.shape
    parameters = (floats, numbers, positions)
    shapes = [each.shape for each in parameters]
    assert vocab > 0, logits.shape
    assert shapes == [(rows, 3), (rows, 2), (rows,)], (logits.shape, shapes)
    words = cdiv(vocab, reference.WORD)
    assert mask is None or mask.shape == (rows, words), (logits.shape, mask)
    if not runs_kernels(logits):
        return reference.sample(logits, *parameters, mask)
    return _sample(logits, parameters, mask)


def _sample(
    logits: torch.Tensor, parameters: tuple[torch.Tensor, ...], mask: torch.Tensor | None
) -> torch.Tensor:
    rows, vocab = logits.shape
    groups, spans = cdiv(vocab, reference.GROUP), cdiv(vocab, reference.SPAN)
    is_masked = int(mask is not None)
    if mask is None:
        mask = logits.new_empty(0, 0, dtype=torch.int32)
    greatest = logits.new_empty(rows, groups)
    masses = logits.new_empty(rows, spans, dtype=torch.float64)
    counts = logits.new_empty(rows, spans, dtype=torch.int32)
    candidates = logits.new_empty(rows, spans, reference.SPAN, dtype=torch.int32)
    token_ids = logits.new_empty(rows, dtype=torch.int64)
    sizes = (is_masked, mask.shape[1], groups)
    inputs, found = (logits, mask, greatest), (masses, counts, candidates)
    weigh = (*inputs, *parameters[:2], *found, *sizes, spans, vocab)
    draw = (*inputs, *parameters, *found, token_ids, *sizes, spans, vocab)
    weigh_meta = narrowest(
        reference.WEIGH_CONTRACT, reference.WEIGH_METAS, "GROUPS", "groups", weigh
    )
    draw_meta = narrowest(reference.DRAW_CONTRACT, reference.DRAW_METAS, "GROUPS", "groups", draw)

    _launch_greatest((spans, rows), *inputs, *sizes, vocab, **reference.GREATEST_META)
    _launch_weigh((spans, rows), *weigh, **weigh_meta)
    _launch_draw((rows,), *draw, **draw_meta)
    return token_ids
