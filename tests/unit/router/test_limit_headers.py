"""What callers read of their limits, as transcripts."""

from collections.abc import Callable
from datetime import datetime

import anthropic
import httpx2
import pytest
from hypothesis import given
from hypothesis import strategies as st

from router.dialect import error_body, error_headers
from router.limits.headers import anthropic_headers, duration, openai_headers, rate_limited
from router.limits.policy import Admission, Allowance, Bucket

ADMITTED = Admission(
    unix_s=1_800_000_000.25,
    requests=Allowance(limit=50, remaining=49, reset_s=1.2),
    tokens=Allowance(limit=40_000, remaining=0, reset_s=360.0),
)
REFUSED = Admission(
    unix_s=1_800_000_000.25,
    requests=Allowance(limit=50, remaining=0, reset_s=60.0),
    refused_by="requests",
    retry_after_s=1.2,
)


def test_anthropic_headers_of_an_admitted_request() -> None:
    assert anthropic_headers(ADMITTED) == {
        "anthropic-ratelimit-requests-limit": "50",
        "anthropic-ratelimit-requests-remaining": "49",
        "anthropic-ratelimit-requests-reset": "2027-01-15T08:00:02Z",
        "anthropic-ratelimit-tokens-limit": "40000",
        "anthropic-ratelimit-tokens-remaining": "0",
        "anthropic-ratelimit-tokens-reset": "2027-01-15T08:06:01Z",
    }


def test_openai_headers_of_an_admitted_request() -> None:
    assert openai_headers(ADMITTED) == {
        "x-ratelimit-limit-requests": "50",
        "x-ratelimit-remaining-requests": "49",
        "x-ratelimit-reset-requests": "1.2s",
        "x-ratelimit-limit-tokens": "40000",
        "x-ratelimit-remaining-tokens": "0",
        "x-ratelimit-reset-tokens": "6m0s",
    }


@pytest.mark.parametrize("headers", [anthropic_headers, openai_headers])
def test_a_refusal_says_when_to_retry_in_both_units(
    headers: Callable[[Admission], dict[str, str]],
) -> None:
    sent = headers(REFUSED)
    assert (sent["retry-after"], sent["retry-after-ms"]) == ("2", "1200")
    assert not any("tokens" in name for name in sent)


def test_an_unlimited_team_hears_nothing() -> None:
    assert anthropic_headers(Admission(unix_s=0.0)) == openai_headers(Admission(unix_s=0.0)) == {}


def test_the_sdk_takes_the_refusal_for_a_rate_limit() -> None:
    error = rate_limited("red", REFUSED)
    body = error_body("anthropic", error, "req_1")
    headers = error_headers(error) | anthropic_headers(REFUSED)

    def answer(_request: httpx2.Request) -> httpx2.Response:
        return httpx2.Response(error.status, json=body, headers=headers)

    http_client = httpx2.Client(transport=httpx2.MockTransport(answer))
    with anthropic.Anthropic(api_key="k", max_retries=0, http_client=http_client) as client:
        with pytest.raises(anthropic.RateLimitError, match="too many requests per minute") as seen:
            client.messages.create(
                model="m", max_tokens=1, messages=[{"role": "user", "content": "hi"}]
            )
        assert client._parse_retry_after_header(seen.value.response.headers) == 1.2
    assert body["error"]["type"] == "rate_limit_error"
    assert body["error"]["message"] == ("team red: too many requests per minute, retry in 1.2s")
    assert error_body("openai", error, "req_1")["error"]["code"] == "rate_limit_exceeded"


def test_an_admitted_request_is_no_error() -> None:
    with pytest.raises(ValueError, match="expected a refused admission"):
        rate_limited("red", ADMITTED)


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0, "0s"),
        (0.0001, "1ms"),
        (0.02, "20ms"),
        (0.9999, "1s"),
        (1, "1s"),
        (8.64, "8.64s"),
        (59.999, "59.999s"),
        (60, "1m0s"),
        (359.9995, "6m0s"),
        (3600, "1h0m0s"),
        (90061.5, "25h1m1.5s"),
    ],
)
def test_durations(seconds: float, text: str) -> None:
    assert duration(seconds) == text


@given(st.integers(1, 10**9), st.integers(-(10**13), 10**9 * 60_000), st.floats(0, 2e9))
def test_headers_of_any_level_are_sound(per_minute: int, level: int, unix_s: float) -> None:
    bucket = Bucket(per_minute, min(level, per_minute * 60_000))
    admission = Admission(unix_s=unix_s, tokens=bucket.allowance())
    sent = anthropic_headers(admission)
    assert 0 <= int(sent["anthropic-ratelimit-tokens-remaining"]) <= per_minute
    reset = datetime.fromisoformat(sent["anthropic-ratelimit-tokens-reset"])
    assert reset.timestamp() >= unix_s
    assert openai_headers(admission)["x-ratelimit-reset-tokens"].endswith("s")
