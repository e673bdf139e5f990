"""What all ops here take: a contiguous batch of uint8 pages."""

import torch

from kernels.errors import ContractError

ALIGNMENT = 16  # bytes


def require_pages(op: str, pages: torch.Tensor, channels: int | None = None) -> None:
    """[batch, height, width], or with a last dimension of `channels`. Raises ContractError."""
    is_right_shape = pages.dim() == 3 if channels is None else pages.shape[3:] == (channels,)
    if is_right_shape and pages.dtype is torch.uint8 and pages.is_contiguous():
        return
    last = "" if channels is None else f", {channels}"
    came = f"{list(pages.shape)} {pages.dtype} with strides {pages.stride()}"
    raise ContractError(op, "pages", f"contiguous [batch, height, width{last}] uint8", came)


def aligned(pages: torch.Tensor) -> torch.Tensor:
    """The pages, copied where they do not begin at a multiple of 16 bytes, as a page cut out of a
    batch may not."""
    return pages.clone() if pages.data_ptr() % ALIGNMENT else pages
