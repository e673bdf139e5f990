"""The specification: Sauvola's threshold, `skimage.filters.threshold_sauvola` with r = 128.

    T = m (1 + k (s / 128 - 1)), a pixel above T is paper, 255, another one ink, 0
    m, s: mean and standard deviation of the window x window pixels around it

Border: the page goes on mirrored about its edge pixels, which are not repeated (numpy's "reflect"),
as often as the window reaches. Rounding: the sums of levels and of squares are exact integers, as
they are in scikit-image's float64; then m = sum / n, s = sqrt(max(squares / n - m m, 0)) and T are
float64, each step rounded to nearest. No pixel may differ from scikit-image's.
"""

import torch

from kernels.contract import Argument, Contract, Count, Output, Scalar, Tensor

MAX_WINDOW = 181  # 181^2 * 255^2 < 2^31
RANGE = 128  # of the standard deviation, Sauvola's R

_PAGES: dict[str, Argument] = {
    "pages": Tensor("batch height width", torch.uint8, wide_index=True),
    "starts": Tensor("padded_height", torch.int64),  # of the rows, and of one more that is unused
    "columns": Tensor("padded_width", torch.int32),
    "out": Output("batch height width", like="pages", wide_index=True),
    "height": Count("height"),
    "width": Count("width"),
    "padded_width": Count("padded_width"),
}
_PERMILLE = Scalar(int, 0, 1000)
CONTRACT = Contract("sauvola", **_PAGES, permille=_PERMILLE)
ANY_CONTRACT = Contract(
    "sauvola_any", **_PAGES, window=Scalar(int, 1, MAX_WINDOW), permille=_PERMILLE
)


def mirrored(size: int, window: int) -> torch.Tensor:
    """The pixel at each place from window // 2 before the first one to as far behind the last one:
    int32 [size + window - 1]."""
    period = max(2 * (size - 1), 1)
    place = torch.arange(-(window // 2), size + window // 2).abs_().remainder_(period)
    return torch.minimum(place, period - place).int()


def sauvola(pages: torch.Tensor, window: int, k: float) -> torch.Tensor:
    """pages [batch, height, width] uint8 -> 255 where a pixel is paper, 0 where it is ink."""
    padded = pages.long()
    for axis in (1, 2):
        places = mirrored(pages.shape[axis], window)
        padded = padded.index_select(axis, places.to(pages.device))
    mean = _window_sums(padded, window).double().div_(window * window)
    squares = _window_sums(padded.square_(), window).double().div_(window * window)
    deviation = squares.sub_(mean * mean).clamp_(min=0).sqrt_()
    threshold = mean * (1 + k * (deviation / RANGE - 1))
    return torch.where(pages > threshold, 255, 0).to(torch.uint8)


def _window_sums(padded: torch.Tensor, window: int) -> torch.Tensor:
    for axis in (1, 2):
        sums = torch.nn.functional.pad(padded.cumsum(axis).transpose(axis, -1), (1, 0))
        padded = (sums[..., window:] - sums[..., :-window]).transpose(axis, -1)
    return padded
