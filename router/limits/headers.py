"""What an answer tells its caller of the limits, in the words of each dialect. Pure."""

import math
from datetime import UTC, datetime

from router.errors import RateLimited
from router.limits.policy import Admission, Allowance, Dimension

REASONS: dict[Dimension, str] = {
    "requests": "requests per minute",
    "tokens": "tokens per minute",
    "concurrency": "concurrent requests",
}


def anthropic_headers(admission: Admission) -> dict[str, str]:
    """`anthropic-ratelimit-*`, resets as RFC 3339 times rounded up to a second."""
    headers: dict[str, str] = {}
    for name, allowance in _allowances(admission):
        reset = datetime.fromtimestamp(math.ceil(admission.unix_s + allowance.reset_s), UTC)
        headers |= {
            f"anthropic-ratelimit-{name}-limit": str(allowance.limit),
            f"anthropic-ratelimit-{name}-remaining": str(allowance.remaining),
            f"anthropic-ratelimit-{name}-reset": reset.strftime("%Y-%m-%dT%H:%M:%SZ"),
        }
    return headers | retry_headers(admission)


def openai_headers(admission: Admission) -> dict[str, str]:
    """`x-ratelimit-*`, resets as durations such as `6m0s`."""
    headers: dict[str, str] = {}
    for name, allowance in _allowances(admission):
        headers |= {
            f"x-ratelimit-limit-{name}": str(allowance.limit),
            f"x-ratelimit-remaining-{name}": str(allowance.remaining),
            f"x-ratelimit-reset-{name}": duration(allowance.reset_s),
        }
    return headers | retry_headers(admission)


def retry_headers(admission: Admission) -> dict[str, str]:
    """Both forms: the SDKs read milliseconds first, everybody else whole seconds."""
    if admission.retry_after_s is None:
        return {}
    return {
        "retry-after": str(max(1, math.ceil(admission.retry_after_s))),
        "retry-after-ms": str(math.ceil(admission.retry_after_s * 1e3)),
    }


def rate_limited(team_name: str, admission: Admission) -> RateLimited:
    """The error of a refused admission."""
    if admission.refused_by is None or admission.retry_after_s is None:
        raise ValueError("expected a refused admission, got an allowed one: ask `is_allowed` first")
    return RateLimited(
        f"team {team_name}: too many {REASONS[admission.refused_by]}, "
        f"retry in {duration(admission.retry_after_s)}",
        retry_after_s=admission.retry_after_s,
    )


def duration(seconds: float) -> str:
    """`20ms`, `1.5s`, `6m0s` or `1h0m0s`, rounded up to a millisecond."""
    num_ms = math.ceil(round(seconds * 1e3, 3))
    if num_ms < 1000:
        return f"{num_ms}ms" if num_ms else "0s"
    minutes, rest_ms = divmod(num_ms, 60_000)
    hours, minutes = divmod(minutes, 60)
    text = f"{rest_ms / 1e3:g}s"
    if hours:
        return f"{hours}h{minutes}m{text}"
    return f"{minutes}m{text}" if minutes else text


def _allowances(admission: Admission) -> list[tuple[str, Allowance]]:
    named = [("requests", admission.requests), ("tokens", admission.tokens)]
    return [(name, allowance) for name, allowance in named if allowance is not None]
