"""Which elements of memory a tensor lies in, and whether two tensors share some."""

import torch


def span_of(tensor: torch.Tensor) -> int:
    """Elements from the first to the last one of a tensor, those between its rows as well."""
    if tensor.numel() == 0:
        return 0
    return 1 + sum(
        (n - 1) * stride for n, stride in zip(tensor.shape, tensor.stride(), strict=True)
    )


def overlaps_itself(tensor: torch.Tensor) -> bool:
    """Whether two indices may mean one element: an expanded dimension, or rows that cross."""
    end = 0
    for stride, length in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if length > 1:
            if stride <= end:
                return True
            end += (length - 1) * stride
    return False


def is_same(one: torch.Tensor, two: torch.Tensor) -> bool:
    forms = [(t.data_ptr(), t.shape, t.stride(), t.dtype) for t in (one, two)]
    return forms[0] == forms[1]


def lie_in_rows_apart(one: torch.Tensor, two: torch.Tensor) -> bool:
    """Columns of one matrix: rows of the same stride, and within a row the two lie apart."""
    if one.dim() < 2 or two.dim() < 2 or one.stride(0) != two.stride(0):
        return False
    row_bytes = one.stride(0) * one.element_size()
    if row_bytes == 0 or row_bytes != two.stride(0) * two.element_size():
        return False
    ahead = (two.data_ptr() - one.data_ptr()) % row_bytes
    one_bytes, two_bytes = (span_of(each[0]) * each.element_size() for each in (one, two))
    return one_bytes <= ahead <= row_bytes - two_bytes
