"""The specification, a row at a time: temperature, min-p, top-k, top-p, then one draw.

A token is a candidate where the mask allows it and its logit is greater than -inf (no NaN). What is
compared is the float32 `scaled` = (logit - greatest) / temperature, at most 0. Tokens that tie with
the last one kept by top-k or top-p are kept too. The draw is the inverse of the distribution
function in the order of token ids, on float64 sums of float32 exponentials; without any mass (no
candidate, or a logit of +inf) it is the greatest token.

The kernel's exponentials and orders of summation are its own: it takes the neighbouring token where
u, or top-p, falls within some 1e-7 of the mass on the border between two.
"""

import math

import torch

from kernels.contract import Contract, Count, InOut, Output, Scalar, Size, Tensor
from kernels.sampling.uniform import counter_uniform

MIN_TEMPERATURE = 1e-5  # below it float32 logits are one-hot anyway, and 1/t nears overflow
GROUP = 256  # tokens of which one program keeps the greatest logit
SPAN = 2048  # tokens of a program
WORD = 32  # tokens of a word of the mask

LOGITS = Tensor("rows vocab", torch.float32, wide_index=True)
# Without a mask, of any shape: it is not read.
MASK = Tensor("mask_rows words", torch.int32, align=4, wide_index=True)
IS_MASKED = Scalar(int, 0, 1)
FLOATS = Tensor("rows 3", torch.float32, align=4)  # temperature, min-p, top-p
NUMBERS = Tensor("rows 2", torch.int64, align=8)  # top-k, seed
GREATEST_CONTRACT = Contract(
    "sample_greatest",
    logits=LOGITS,
    mask=MASK,
    greatest=Output("rows groups", torch.float32, align=4, wide_index=True),
    is_masked=IS_MASKED,
    words=Count("words"),
    groups=Count("groups"),
    vocab=Size("vocab"),
)
WEIGH_CONTRACT = Contract(
    "sample_weigh",
    logits=LOGITS,
    mask=MASK,
    greatest=Tensor("rows groups", torch.float32, align=4, wide_index=True),
    floats=FLOATS,
    numbers=NUMBERS,
    masses=InOut("rows spans", torch.float64, align=8, wide_index=True),
    counts=InOut("rows spans", torch.int32, align=4, wide_index=True),
    candidates=InOut(f"rows spans {SPAN}", torch.int32, wide_index=True),
    is_masked=IS_MASKED,
    words=Count("words"),
    groups=Count("groups"),
    spans=Count("spans"),
    vocab=Size("vocab"),
)
DRAW_CONTRACT = Contract(
    "sample_draw",
    logits=LOGITS,
    mask=MASK,
    greatest=Tensor("rows groups", torch.float32, align=4, wide_index=True),
    floats=FLOATS,
    numbers=NUMBERS,
    positions=Tensor("rows", torch.int64, align=8),
    masses=Tensor("rows spans", torch.float64, align=8, wide_index=True),
    counts=Tensor("rows spans", torch.int32, align=4, wide_index=True),
    candidates=Tensor(f"rows spans {SPAN}", torch.int32, wide_index=True),
    token_ids=Output("rows", torch.int64, align=8),
    is_masked=IS_MASKED,
    words=Count("words"),
    groups=Count("groups"),
    spans=Count("spans"),
    vocab=Size("vocab"),
)
GREATEST_META = {"num_warps": 4}
# A row has at most GROUPS groups of tokens.
WEIGH_METAS = ({"GROUPS": 512, "num_warps": 4}, {"GROUPS": 2048, "num_warps": 4})
# Of each span's candidates, WIDTH are looked at at a time.
DRAW_METAS = (
    {"GROUPS": 512, "WIDTH": 64, "num_warps": 16},
    {"GROUPS": 2048, "WIDTH": 16, "num_warps": 16},
)


def sample(
    logits: torch.Tensor,
    floats: torch.Tensor,
    numbers: torch.Tensor,
    positions: torch.Tensor,
    mask: torch.Tensor | None = None,
) -> torch.Tensor:
    """logits [rows, vocab] float32, left unchanged -> [rows] int64; the rest as in the entry."""
    allowed = logits > float("-inf")
    if mask is not None:
        allowed &= unpacked(mask, logits.shape[1])
    logits = logits.masked_fill(~allowed, float("-inf"))
    token_ids = logits.argmax(-1)
    top_ks, seeds = numbers.unbind(1)
    uniforms = counter_uniform(seeds, positions).tolist()
    parameters = zip(floats.tolist(), top_ks.tolist(), strict=True)
    for row, ((temperature, min_p, top_p), top_k) in enumerate(parameters):
        if temperature > 0.0:
            divisor = floats[row, 0].clamp(min=MIN_TEMPERATURE)
            scaled = (logits[row] - logits[row].amax()) / divisor
            scaled.masked_fill_(scaled.isnan(), float("-inf"))  # infinite less infinite
            _filter(scaled, min_p, top_k, top_p)
            mass = scaled.exp().cumsum(-1, dtype=torch.float64)
            if mass[-1] > 0.0:
                token_ids[row] = _draw(mass, uniforms[row])
    return token_ids


def unpacked(mask: torch.Tensor, vocab: int) -> torch.Tensor:
    """[rows, words] int32, the lowest bit first -> [rows, vocab] bool."""
    bits = mask[:, :, None] >> torch.arange(WORD, dtype=torch.int32, device=mask.device)
    return (bits & 1).flatten(1)[:, :vocab].bool()


def _filter(scaled: torch.Tensor, min_p: float, top_k: int, top_p: float) -> None:
    """scaled [vocab]: set to -inf in place where filtered."""
    if min_p > 0.0:
        scaled.masked_fill_(scaled < math.log(min_p), float("-inf"))
    if 0 < top_k < scaled.shape[0]:
        scaled.masked_fill_(scaled < scaled.topk(top_k).values[-1], float("-inf"))
    if top_p < 1.0:
        largest_first = scaled.sort(descending=True).values
        mass = largest_first.exp().cumsum(-1, dtype=torch.float64)
        floor = largest_first[torch.searchsorted(mass, mass[-1:] * top_p)]
        scaled.masked_fill_(scaled < floor, float("-inf"))


def _draw(mass: torch.Tensor, uniform: float) -> torch.Tensor:
    """mass [vocab], cumulated: the first token whose mass exceeds `uniform` of the whole.

    u < 1, but u * total may round up to total, and no token's mass exceeds that.
    """
    total = mass[-1:]
    target = torch.minimum(uniform * total, total.nextafter(total.new_zeros(())))
    return torch.searchsorted(mass, target, right=True).squeeze(-1)
