"""A kernel on the GPU beside its reference on the CPU."""

from collections.abc import Callable, Iterator
from typing import Any

import torch


def on_gpu(value: Any) -> Any:
    """A copy with the same strides and offset; tuples and lists of them too."""
    if isinstance(value, list | tuple):
        return type(value)(map(on_gpu, value))
    if not isinstance(value, torch.Tensor):
        return value
    whole = torch.empty(0, dtype=value.dtype).set_(value.untyped_storage())
    return whole.cuda().as_strided(value.shape, value.stride(), value.storage_offset())


def assert_gpu_equals_reference(
    op: Callable[..., Any],
    reference: Callable[..., Any],
    *arguments: Any,
    rtol: float = 0.0,
    atol: float = 0.0,
) -> None:
    """Results, and arguments that both change in place. NaN equals NaN."""
    ours = on_gpu(arguments)
    result, expected = op(*ours), reference(*arguments)
    pairs = zip(tensors_of((result, ours)), tensors_of((expected, arguments)), strict=True)
    for one, other in pairs:
        torch.testing.assert_close(one.cpu(), other, rtol=rtol, atol=atol, equal_nan=True)


def tensors_of(value: Any) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, list | tuple):
        for each in value:
            yield from tensors_of(each)
