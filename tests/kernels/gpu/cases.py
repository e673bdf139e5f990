"""A small call of every entry point that launches a kernel: odd sizes, and aligned ones."""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch

from kernels.fp8_quantise.api import fp8_quantise
from kernels.image.binarize.api import sauvola
from kernels.image.convert.api import grey, swap_channels, to_ycrcb
from kernels.image.deskew.api import deskew, estimate_skew
from kernels.image.lines.api import line_runs, projections
from kernels.image.resize.api import resize_normalise
from kernels.kv_append.api import kv_append
from kernels.kv_quantise.layout import slabs_of_block
from kernels.launch import Grid, Launcher, launching
from kernels.linear.api import LINEARS, SILU_MULS, linear, multiply, pack_linear
from kernels.paged_decode.api import paged_decode
from kernels.paged_prefill.api import paged_prefill
from kernels.rms_norm.api import rms_norm
from kernels.rope_append.api import rope_append
from kernels.rotary.api import rotary
from kernels.sampling.api import sample
from kernels.silu_mul.api import silu_mul
from kernels.skip_list.api import skip_list
from kernels.tiered_append.api import tiered_append
from kernels.tiered_decode.api import tiered_decode
from kernels.tiered_decode.reference import Slabs
from kernels.tiered_plan.api import tiered_plan
from kernels.tiered_plan.reference import FORMATS
from kernels.tiered_plan.reference import tiered_plan as reference_plan
from kernels.tiered_skip.api import tiered_skip
from tests.kernels.appended_tokens import appended
from tests.kernels.contexts import paged
from tests.kernels.quantised_blocks import FORMS, KINDS, arena
from tests.kernels.restored_blocks import FORMS as RESTORED_FORMS
from tests.kernels.restored_blocks import RESTORES, stored
from tests.kernels.sampling_rows import ROWS, parameters_of
from tests.kernels.skipped_caches import skipping
from tests.kernels.slab_caches import bounds_of, slab_cache

Calls = Mapping[str, Callable[[], object]]


def small_calls(device: str = "cuda") -> Calls:
    calls: dict[str, Callable[[], object]] = {}
    for head_dim in (6, 128):
        calls |= {
            f"{name} {head_dim}": call for name, call in language_calls(head_dim, device).items()
        }
    for in_size in (48, 1040):
        calls |= {f"{name} {in_size}": call for name, call in linear_calls(in_size, device).items()}
    for head_dim in (64, 96):
        calls |= {
            f"{name} {head_dim}": call for name, call in prefill_calls(head_dim, device).items()
        }
    for head_dim in (80, 128):
        calls |= {
            f"{name} {head_dim}": call for name, call in attention_calls(head_dim, device).items()
        }
    calls |= {f"{name} 128": call for name, call in append_calls(128, device).items()}
    for head_dim in (64, 128):
        calls |= {f"{name} {head_dim}": call for name, call in skip_calls(head_dim, device).items()}
    for head_dim in (256, 128):
        for made in (tiered_calls, quantise_calls, restore_calls):
            calls |= {f"{name} {head_dim}": call for name, call in made(head_dim, device).items()}
    for vocab in (1003, 4128):
        calls |= {f"{name} {vocab}": call for name, call in sampling_calls(vocab, device).items()}
    for height, width in ((61, 47), (64, 48)):
        calls |= {
            f"{name} {width}": call for name, call in image_calls(height, width, device).items()
        }
    return calls


def language_calls(head_dim: int, device: str) -> dict[str, Callable[[], object]]:
    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(shape, dtype=torch.bfloat16, device=device)

    heads, fused = normal(5, 3, head_dim), normal(5, 2 * head_dim)
    query = normal(5, 10, head_dim)
    weight, caches = normal(head_dim), [normal(2, 4, 3, head_dim) for _ in "kv"]
    cos, sin = normal(5, 1, head_dim), normal(5, 1, head_dim)
    slots = torch.tensor([7, 0, -1, 3, 2], device=device)
    residual = normal(5, head_dim).float()
    return {
        "rms_norm": lambda: rms_norm(heads, weight, 1e-5),
        "rms_norm, residual": lambda: rms_norm(heads[:, 0], weight, 1e-5, residual),
        "rotary": lambda: rotary(heads, cos, sin),
        "kv_append": lambda: kv_append(heads, heads, *caches, slots),
        "rope_append": lambda: rope_append(query, heads, heads, cos, sin, *caches, slots),
        "silu_mul": lambda: silu_mul(fused),
        "fp8_quantise": lambda: fp8_quantise(normal(5, 8 * head_dim)),
    }


def linear_calls(in_size: int, device: str) -> dict[str, Callable[[], object]]:
    """Each form; outputs that the last program has not all of."""
    x = torch.randn(5, in_size, dtype=torch.bfloat16, device=device)
    packed = pack_linear(torch.randn(224, in_size, dtype=torch.bfloat16, device=device))
    calls: dict[str, Callable[[], object]] = {
        f"{form.launch.contract.kernel}, form {index}": partial(
            multiply, form, x[: form.max_rows], packed
        )
        for index, form in enumerate((*LINEARS, *SILU_MULS))
    }
    calls["linear, fixed"] = partial(linear, x, packed, deterministic=True)
    head = pack_linear(packed.weight, out_dtype=torch.float32)
    calls["linear, fixed, float32"] = partial(linear, x, head, deterministic=True)
    return calls


def prefill_calls(head_dim: int, device: str) -> dict[str, Callable[[], object]]:
    """Of chunks of 70 and of 3 tokens; the second table ends before its row does."""
    query, *caches = (
        torch.randn(shape, dtype=torch.bfloat16, device=device)
        for shape in ((73, 4, head_dim), (4, 64, 2, head_dim), (4, 64, 2, head_dim))
    )
    starts = torch.tensor([0, 70, 73], dtype=torch.int32, device=device)
    tables = torch.tensor([[2, 0, 3], [1, -7, 10**9]], device=device)
    lens = torch.tensor([150, 40], device=device)
    chunks = (query, starts, *caches, tables, lens, 0.1)
    long = torch.tensor([2250, 40], device=device)
    split = (query, starts, *caches, tables.repeat(1, 12), long, 0.1)
    return {
        "paged_prefill": lambda: paged_prefill(*chunks),
        "paged_prefill, windowed": lambda: paged_prefill(*chunks, 65, 70),
        "paged_prefill, split": lambda: paged_prefill(*split),
        "paged_prefill, split, windowed": lambda: paged_prefill(*split, 2200, 70),
    }


def attention_calls(head_dim: int, device: str) -> dict[str, Callable[[], object]]:
    query = torch.randn(3, 6, head_dim, dtype=torch.bfloat16, device=device)
    contexts = [each.to(device) for each in paged([0, 70, 200], 2, head_dim, dtype=query.dtype)]
    return {
        "paged_decode": lambda: paged_decode(query, *contexts, 0.1),
        "paged_decode, window": lambda: paged_decode(query, *contexts, 0.1, 75, deterministic=True),
    }


def tiered_calls(head_dim: int, device: str) -> dict[str, Callable[[], object]]:
    """Of few runs, and of so many that the merge has its other form; of one query, and of four."""
    queries = torch.randn(3, 4, 6, head_dim, dtype=torch.bfloat16, device=device)
    calls: dict[str, Callable[[], object]] = {}
    for formats in FORMATS:
        slabs, *others = slab_cache(bounds_of([0, 70, 460], warm=128), 2, head_dim, formats)
        on_device = Slabs(*(each.to(device) for each in slabs))
        key_tables, value_tables, bounds = (each.to(device) for each in others)
        for num_runs in (5, 100):
            plan = reference_plan(bounds.cpu(), num_runs, formats).to(device)
            arguments = (on_device, key_tables, value_tables, plan, formats, 0.1)
            name = f"{formats.key_bits}, {formats.value_bits}, {num_runs} runs"
            calls[f"tiered_plan {name}"] = partial(tiered_plan, bounds, num_runs, formats)
            calls[f"tiered_decode {name}"] = partial(tiered_decode, queries[:, 0], *arguments)
            calls[f"tiered_decode {name}, 4 queries"] = partial(tiered_decode, queries, *arguments)
    return calls


def skip_calls(head_dim: int, device: str) -> dict[str, Callable[[], object]]:
    """What is skipped is read again of all heads, of none."""
    calls: dict[str, Callable[[], object]] = {}
    for formats in FORMATS:
        case = skipping(bounds_of([0, 70, 460], warm=64), 2, 6, head_dim, formats)
        plan = reference_plan(case.bounds, 5, formats)
        query, plan, *rest = (
            each.to(device) for each in (case.query, plan, *case.cache[1:3], *case[4:])
        )
        slabs = Slabs(*(each.to(device) for each in case.cache.slabs))
        tables, state = rest[:2], rest[2:]
        for epsilon in (0.0, 0.99):
            arguments = (slabs, *tables, plan, formats, 0.1, *state, epsilon)
            name = f"tiered_skip {formats.key_bits}, {formats.value_bits}, {epsilon}"
            calls[name] = partial(tiered_skip, query, *arguments)
        lse, bounds = torch.ones(3, 6, device=device), case.bounds.to(device)
        name = f"skip_list {formats.value_bits}"
        calls[name] = partial(skip_list, state[1].fill_(-3.0), lse, bounds, formats, 0.03)
    return calls


def append_calls(head_dim: int, device: str) -> dict[str, Callable[[], object]]:
    arguments = [each.to(device) for each in appended(5, 3, 2, head_dim)]
    return {"tiered_append": lambda: tiered_append(*arguments)}


def quantise_calls(head_dim: int, device: str) -> dict[str, Callable[[], object]]:
    calls: dict[str, Callable[[], object]] = {}
    for kind, (quantise, _) in KINDS.items():
        for from_bits, bits, grain in FORMS:
            slabs, meta, sources, others = arena(kind, from_bits, head_dim, grain=grain)
            targets = others[: 2 * slabs_of_block(bits)].view(2, -1)
            tensors = [each.to(device) for each in (slabs, meta, sources, targets)]
            name = f"quantise {kind} of {from_bits} bits to {bits}, grains of {grain}"
            calls[name] = partial(quantise, *tensors, from_bits, bits)
    return calls


def restore_calls(head_dim: int, device: str) -> dict[str, Callable[[], object]]:
    calls: dict[str, Callable[[], object]] = {}
    for kind, (restore, _) in RESTORES.items():
        for bits, grain in RESTORED_FORMS:
            *tensors, _ = stored(kind, bits, grain, head_dim)
            on_device = [each.to(device) for each in tensors]
            name = f"restore {kind} of {bits} bits, grains of {grain}"
            calls[name] = partial(restore, *on_device, bits)
    return calls


def sampling_calls(vocab: int, device: str) -> dict[str, Callable[[], object]]:
    logits = torch.randn(len(ROWS), vocab, device=device)
    parameters = parameters_of(*ROWS, device=device)
    mask = torch.randint(2**31, (len(ROWS), -(-vocab // 32)), dtype=torch.int32, device=device)
    return {
        "sample": lambda: sample(logits, *parameters),
        "sample, masked": lambda: sample(logits, *parameters, mask),
    }


def image_calls(height: int, width: int, device: str) -> dict[str, Callable[[], object]]:
    pages = torch.randint(256, (2, height, width, 3), dtype=torch.uint8, device=device)
    greys = pages[..., 0].contiguous()
    third, degrees = (1 / 3,) * 3, torch.tensor([1.5, -2.0], device=device)
    return {
        "grey": lambda: grey(pages),
        "swap_channels": lambda: swap_channels(pages),
        "to_ycrcb": lambda: to_ycrcb(pages),
        "resize_normalise": lambda: resize_normalise(pages, 48, 61, third, third),
        "horizontal runs": lambda: line_runs(greys, 5, 2),
        "vertical runs": lambda: line_runs(greys, 5, 1),
        "projections": lambda: projections(greys),
        "estimate_skew": lambda: estimate_skew(greys),
        "deskew": lambda: deskew(greys, degrees),
        "sauvola": lambda: sauvola(greys),
        "sauvola, any window": lambda: sauvola(greys, 31, 0.3),
    }


def launches_by_kernel(calls: Calls) -> dict[str, tuple[Launcher, Sequence[Any]]]:
    """A launch of each kernel that the calls make, with its arguments. None of them runs."""
    found: dict[str, tuple[Launcher, Sequence[Any]]] = {}

    def record(
        launcher: Launcher, grid: Grid, arguments: Sequence[Any], meta: Mapping[str, int]
    ) -> None:
        found[launcher.contract.kernel] = (launcher, arguments)

    with launching(record):
        for call in calls.values():
            call()
    return found
