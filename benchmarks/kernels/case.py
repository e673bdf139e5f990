"""One op at one size: what is called, on what, what it must return, and what it must move."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from benchmarks.errors import MeasurementFailed

Arguments = tuple[Any, ...]
MIN_ROTATED_BYTES = 4 * 50 * 2**20  # several times the L2 of an H200
MAX_SETS = 40


@dataclass(frozen=True)
class Case:
    """arguments: made anew for each seed, on the GPU, random.

    plain: the op in plain torch, run eagerly and compiled; it changes the same arguments.
    reference: what `ours` must equal; None where that is `plain`.
    num_bytes: what one call has to read and write, each byte once. units: pages in a call.
    bar_us: at most, a unit. is_large: held to the copy ceiling and to torch.compile.
    """

    name: str
    shape: str
    ours: Callable[..., Any]
    plain: Callable[..., Any]
    arguments: Callable[[], Arguments]
    num_bytes: int
    units: int = 1
    rtol: float = 0.0
    atol: float = 0.0
    bar_us: float | None = None
    is_large: bool = True
    reference: Callable[..., Any] | None = None
    peers: Mapping[str, Callable[..., Any]] = field(default_factory=dict)

    def argument_sets(self) -> list[Arguments]:
        """So many that together they do not stay in the L2, or MAX_SETS small ones."""
        first = self.arguments()
        num_bytes = sum(each.nbytes for each in first if isinstance(each, torch.Tensor))
        num_sets = min(MAX_SETS, max(2, -(-MIN_ROTATED_BYTES // num_bytes)))
        return [first, *(self.arguments() for _ in range(num_sets - 1))]

    def check(self, run: Callable[..., Any]) -> None:
        """Results, and arguments that are changed in place. Raises MeasurementFailed."""
        ours = self.arguments()
        theirs = tuple(each.clone() if isinstance(each, torch.Tensor) else each for each in ours)
        result, expected = run(*ours), (self.reference or self.plain)(*theirs)
        pairs = [(result, expected), *zip(ours, theirs, strict=True)]
        try:
            for one, other in pairs:
                if isinstance(other, torch.Tensor):
                    torch.testing.assert_close(one, other, rtol=self.rtol, atol=self.atol)
        except AssertionError as exc:
            raise MeasurementFailed(f"{self.name} ({self.shape}) differs: {exc}") from exc
