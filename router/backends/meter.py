"""What a request to an upstream costs: its own count once it has given one, until then a guess that
is marked as such."""

from router.account import Outcome, RequestAccount
from router.backends.reader import BYTES_PER_TOKEN, StreamReader
from router.events import Finished
from router.generation import FinishReason, Usage
from router.metrics import RouterMetrics


class UpstreamMeter:
    """Keeps the account's entry of one upstream request up to date."""

    def __init__(
        self,
        account: RequestAccount,
        backend: str,
        fold: StreamReader,
        num_request_bytes: int,
        metrics: RouterMetrics,
    ) -> None:
        self._account = account
        self._backend = backend
        self._fold = fold
        self._est_prompt_tokens = max(1, num_request_bytes // BYTES_PER_TOKEN)
        self._timing = metrics.timing(account.started_s)
        self._is_recorded = False

    @property
    def usage(self) -> Usage:
        """Never less than what was seen: a count may lag behind the text that it counts."""
        fold = self._fold
        if fold.is_counted and fold.usage is not None:
            return fold.usage
        reported = fold.usage or Usage(self._est_prompt_tokens, 0, 0)
        seen_tokens = -(-fold.num_content_bytes // BYTES_PER_TOKEN)
        return Usage(
            reported.prompt_tokens,
            reported.cached_tokens,
            max(reported.completion_tokens, seen_tokens),
            reported.reasoning_tokens,
        )

    def observe(self) -> None:
        """Call when the upstream has said something more."""
        fold = self._fold
        if fold.has_content:
            self._account.saw_token()
            self._timing.tokens(1)
        if fold.is_finished and not self._is_recorded:
            self._is_recorded = True
            self._timing.finished(Finished(fold.reason or FinishReason.STOP_TOKEN, self.usage))
        self._account.generations[self._generation_id] = Outcome(
            self.usage, fold.reason, fold.is_counted, self._backend
        )

    def forget(self) -> None:
        """The request failed before it gave anything: nothing is owed for it."""
        self._account.generations.pop(self._generation_id, None)

    @property
    def _generation_id(self) -> str:
        return f"{self._account.request_id}@{self._backend}"
