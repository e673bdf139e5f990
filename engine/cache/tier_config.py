"""Which format a token is stored in: a function of absolute positions and nothing else."""

from collections.abc import Iterator
from dataclasses import dataclass

from engine.cache.formats import BLOCK_SIZE, COLD_FORMATS, HOT, WARM, BlockFormat, Part

DEFAULT_COLD_FORMAT = "k8v4"


@dataclass(frozen=True, slots=True)
class Ages:
    """Where the runs of a block table begin, in blocks: sink | cold | warm | hot.

    0 <= cold_start <= warm_start <= hot_start, and none ever moves back while a sequence grows.
    Blocks before cold_start (the sink) and from hot_start on are bf16.
    """

    cold_start: int
    warm_start: int
    hot_start: int


@dataclass(frozen=True, slots=True)
class TierConfig:
    """How long tokens stay hot and warm, and what they are stored as when cold.

    `hot_tokens` is the least number in bf16 behind a decoded token; between block borders there are
    up to a block more. `cell_tokens` is the grid of the prefill rule. `exact`: bf16 everywhere.
    `skip_epsilon`: of the softmax of a query, what a decode step may leave out of cold blocks, and
    does not read the values of; 0: nothing is left out.
    Raises ValueError for what cannot be: everything is by whole blocks.
    """

    exact: bool = False
    sink_tokens: int = 64
    hot_tokens: int = 128
    warm_tokens: int = 512
    cell_tokens: int = 512
    cold_format: str = DEFAULT_COLD_FORMAT
    block_size: int = BLOCK_SIZE
    skip_epsilon: float = 0.0

    def __post_init__(self) -> None:
        if self.cold_format not in COLD_FORMATS:
            raise ValueError(
                f"cold_format must be one of {', '.join(COLD_FORMATS)}, got {self.cold_format!r}"
            )
        if self.exact and self.cold_format != DEFAULT_COLD_FORMAT:
            raise ValueError(
                f"exact keeps everything in bf16, cold_format is {self.cold_format!r}: choose one"
            )
        if not 0 <= self.skip_epsilon < 1:
            raise ValueError(
                "skip_epsilon must be above 0 and below 1, or 0 for no skipping, "
                f"got {self.skip_epsilon}"
            )
        for name, least in (
            ("sink_tokens", 0),
            ("hot_tokens", self.block_size),
            ("warm_tokens", 0),
            ("cell_tokens", self.block_size),
        ):
            num_tokens = getattr(self, name)
            if num_tokens < least or num_tokens % self.block_size:
                raise ValueError(
                    f"{name} must be a multiple of the block size {self.block_size} and at least "
                    f"{least}, got {num_tokens}"
                )

    @property
    def cold(self) -> BlockFormat:
        """The densest that each part is ever stored in: its arena deals out no less than that."""
        return HOT if self.exact else COLD_FORMATS[self.cold_format]

    def decode_ages(self, position: int) -> Ages:
        """What a decoded token at `position` sees of the blocks before its own."""
        own_block = position // self.block_size
        hot_start = own_block - self.hot_tokens // self.block_size
        return self._ages(hot_start - self.warm_tokens // self.block_size, hot_start)

    def prefill_ages(self, position: int) -> Ages:
        """What every prompt token of the grid cell of `position` sees: bf16 from hot + warm tokens
        before the cell on, however chunks fall."""
        cell_start = position // self.cell_tokens * self.cell_tokens
        start = (cell_start - self.hot_tokens - self.warm_tokens) // self.block_size
        return self._ages(start, start)

    def _ages(self, warm_start: int, hot_start: int) -> Ages:
        if self.exact:
            return Ages(0, 0, 0)
        num_sinks = self.sink_tokens // self.block_size
        return Ages(num_sinks, max(num_sinks, warm_start), max(num_sinks, hot_start))

    def runs(self, ages: Ages, num_blocks: int) -> Iterator[tuple[int, int, BlockFormat]]:
        """(start, end, format) of sink, cold, warm and hot among `num_blocks` blocks, in order;
        a run may be empty."""
        starts = (0, ages.cold_start, ages.warm_start, ages.hot_start, num_blocks)
        for index, run_format in enumerate((HOT, self.cold, WARM, HOT)):
            yield min(starts[index], num_blocks), min(starts[index + 1], num_blocks), run_format

    def format_at(self, ages: Ages, block: int) -> BlockFormat:
        if ages.cold_start <= block < ages.hot_start:
            return self.cold if block < ages.warm_start else WARM
        return HOT

    def num_cold(self, position: int) -> int:
        """Blocks behind a decoded token at `position` whose values are of the cold format: where
        that is the warm one, warm blocks are among them."""
        ages = self.decode_ages(position)
        is_warm_too = self.cold.values is WARM.values
        return (ages.hot_start if is_warm_too else ages.warm_start) - ages.cold_start

    def num_slabs(self, ages: Ages, num_tokens: int, part: Part) -> int:
        """That `num_tokens` tokens of one sequence fill."""
        num_blocks = -(-num_tokens // self.block_size)
        return sum(
            (end - start) * run_format[part].num_slabs
            for start, end, run_format in self.runs(ages, num_blocks)
        )
