"""Which steps may still read the cache: they end in the order in which they began."""

from engine.errors import IntegrityError


class Epochs:
    """Steps are numbered from 1. Those after `finished` and up to `begun` are in flight.

    A step begins before anything of it is planned, and is finished once every graph and copy of it
    has run. So what is freed while `begun` is e can be read by steps up to e, and by none after.
    """

    def __init__(self) -> None:
        self.begun = 0
        self.finished = 0

    @property
    def is_in_flight(self) -> bool:
        return self.finished < self.begun

    def begin(self) -> int:
        self.begun += 1
        return self.begun

    def finish(self, epoch: int) -> None:
        """All steps up to `epoch` are done. Raises IntegrityError for one that never began."""
        if epoch > self.begun:
            raise IntegrityError(f"step {epoch} is finished, but only {self.begun} have begun")
        self.finished = max(self.finished, epoch)
