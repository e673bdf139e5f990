"""What one request has cost so far: filled in along its way, closed once at its end."""

import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field

from router.dialect import Dialect
from router.generation import FinishReason, Usage
from router.identity import Principal
from router.limits.policy import Admission


@dataclass(frozen=True, slots=True)
class Outcome:
    """How one generation ended. `is_exact`: the usage is the backend's own final count."""

    usage: Usage
    reason: FinishReason | None = None
    is_exact: bool = False
    backend: str = "local"


@dataclass(slots=True)
class RequestAccount:
    """Mutable, and owned by the one task that serves the request."""

    request_id: str
    dialect: Dialect
    route: str
    started_s: float = field(default_factory=time.monotonic)
    principal: Principal | None = None
    model: str = ""
    is_stream: bool = False
    backend: str = ""  # the one asked last, where routes decide
    num_attempts: int = 0  # requests sent to upstreams
    upstream_request_id: str | None = None
    is_admitted: bool = False
    admission: Admission | None = None
    error_code: str | None = None
    first_token_s: float | None = None
    generations: dict[str, Outcome] = field(default_factory=dict)  # by generation id
    end_generations: Callable[[], Awaitable[None]] | None = None  # idempotent; set by the pipeline

    @property
    def num_tokens(self) -> int:
        """Prompt and completion tokens of all generations: what the team's bucket pays."""
        return sum(
            outcome.usage.prompt_tokens + outcome.usage.completion_tokens
            for outcome in self.generations.values()
        )

    def saw_token(self) -> None:
        if self.first_token_s is None:
            self.first_token_s = time.monotonic()
