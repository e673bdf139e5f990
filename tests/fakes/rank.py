"""A rank in this process: the real engine and its step thread over the fake executor."""

from deployments import in_process_rank
from engine.async_engine import AsyncEngine
from engine.cache.block_allocator import BlockAllocator
from engine.config import SchedulerConfig
from engine.engine import Engine
from engine.scheduling.paged_space import PagedSpace
from engine.scheduling.scheduler import Scheduler
from tests.fakes.executor import FakeExecutor

BLOCK_SIZE = 16
VOCAB_SIZE = 97


class InProcessRank(in_process_rank.InProcessRank):
    def __init__(
        self, executor: FakeExecutor | None = None, num_blocks: int = 64, max_model_len: int = 512
    ) -> None:
        self.executor = executor or FakeExecutor(BLOCK_SIZE, vocab_size=VOCAB_SIZE)
        self.allocator = BlockAllocator(num_blocks, BLOCK_SIZE, enable_prefix_cache=True)
        scheduler = Scheduler(
            SchedulerConfig(16, 64), PagedSpace(self.allocator, b"test"), max_model_len
        )
        engine = Engine(scheduler, self.executor, vocab_size=VOCAB_SIZE, check_integrity=True)
        super().__init__(AsyncEngine(engine), output_wait_s=0.05)
