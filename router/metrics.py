"""Prometheus metrics of the entry, named as vLLM names its own, so that dashboards carry over."""

import time

from prometheus_client import (
    CollectorRegistry,
    Counter,
    Gauge,
    Histogram,
    disable_created_metrics,
    generate_latest,
)

from router.backends.base import BackendStatus
from router.events import Finished

disable_created_metrics()  # type: ignore[no-untyped-call]  # a second series nobody reads

LATENCY_BUCKETS_S = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0)


class RouterMetrics:
    """One registry per router replica: what it saw, and the backend's last status."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self._requests = Counter(
            "flashray:request_success",
            "Completions by how they ended.",
            ["finished_reason"],
            registry=self.registry,
        )
        self._errors = Counter(
            "flashray:request_errors",
            "Error answers by HTTP status.",
            ["status"],
            registry=self.registry,
        )
        self._prompt_tokens = self._counter("prompt_tokens", "Prompt tokens of completions.")
        self._cached_tokens = self._counter("prefix_cache_hits", "Prompt tokens found in cache.")
        self._completion_tokens = self._counter("generation_tokens", "Tokens generated.")
        self._ttft_s = self._histogram("time_to_first_token_seconds", "Received to first token.")
        self._itl_s = self._histogram("inter_token_latency_seconds", "Gap before a token event.")
        self._e2e_s = self._histogram("e2e_request_latency_seconds", "Received to last token.")
        self._backend = {
            name: Gauge(f"flashray:{name}", text, registry=self.registry)
            for name, text in {
                "num_requests_running": "Sequences running in the engine.",
                "num_requests_waiting": "Sequences waiting in the engine.",
                "kv_cache_usage_perc": "Share of KV blocks in use, 0 to 1.",
                "engine_prompt_tokens": "Prompt tokens, the engine's own count.",
                "engine_cached_tokens": "Cached prompt tokens, the engine's own count.",
                "engine_generation_tokens": "Generated tokens, the engine's own count.",
                "engine_preemptions": "Preemptions since the engine started.",
                "cold_tier_spilled_blocks": "KV blocks kept outside the device.",
                "cold_tier_dropped_blocks": "KV blocks handed over and not kept.",
                "cold_tier_restored_blocks": "KV blocks brought back instead of computed.",
                "cold_tier_missed_blocks": "KV blocks asked for and computed after all.",
                "cold_tier_corrupt_blocks": "Of those missed: found, but not what was stored.",
                "skipping_cold_blocks": "Cold blocks of KV heads that decodes could skip.",
                "skipping_read_blocks": "Of those: whose values were read.",
                "skipping_heads": "KV heads of decodes that could skip blocks.",
                "skipping_heads_again": "Of those: that had skipped too much, and read again.",
                "skipping_queries": "Query heads of decodes that could skip blocks.",
                "skipping_certificates": "Sum of the shares of softmax they left out, at most.",
                "skipping_certificate_max": "The greatest of these.",
            }.items()
        }

    def timing(self, started_s: float) -> "RequestTiming":
        return RequestTiming(self, started_s)

    def aborted(self) -> None:
        self._requests.labels("abort").inc()

    def error(self, status: int) -> None:
        self._errors.labels(str(status)).inc()

    def finished(self, event: Finished, duration_s: float) -> None:
        self._requests.labels(event.reason.value).inc()
        self._prompt_tokens.inc(event.usage.prompt_tokens)
        self._cached_tokens.inc(event.usage.cached_tokens)
        self._completion_tokens.inc(event.usage.completion_tokens)
        self._e2e_s.observe(duration_s)

    def render(self, status: BackendStatus) -> bytes:
        """The exposition text, with the backend's gauges brought up to date."""
        used = status.num_blocks - status.num_free_blocks
        for name, value in {
            "num_requests_running": status.num_running,
            "num_requests_waiting": status.num_waiting,
            "kv_cache_usage_perc": used / status.num_blocks if status.num_blocks else 0.0,
            "engine_prompt_tokens": status.prompt_tokens_total,
            "engine_cached_tokens": status.cached_tokens_total,
            "engine_generation_tokens": status.completion_tokens_total,
            "engine_preemptions": status.preemptions_total,
            "cold_tier_spilled_blocks": status.cold_spilled_blocks_total,
            "cold_tier_dropped_blocks": status.cold_dropped_blocks_total,
            "cold_tier_restored_blocks": status.cold_restored_blocks_total,
            "cold_tier_missed_blocks": status.cold_missed_blocks_total,
            "cold_tier_corrupt_blocks": status.cold_corrupt_blocks_total,
            "skipping_cold_blocks": status.skipped.cold_blocks,
            "skipping_read_blocks": status.skipped.read_blocks,
            "skipping_heads": status.skipped.heads,
            "skipping_heads_again": status.skipped.heads_again,
            "skipping_queries": status.skipped.queries,
            "skipping_certificates": status.skipped.certificates,
            "skipping_certificate_max": status.skipped.greatest_certificate,
        }.items():
            self._backend[name].set(value)
        return generate_latest(self.registry)

    def observe_gap(self, gap_s: float, is_first: bool) -> None:
        (self._ttft_s if is_first else self._itl_s).observe(gap_s)

    def _counter(self, name: str, text: str) -> Counter:
        return Counter(f"flashray:{name}", text, registry=self.registry)

    def _histogram(self, name: str, text: str) -> Histogram:
        return Histogram(
            f"flashray:{name}", text, registry=self.registry, buckets=LATENCY_BUCKETS_S
        )


class RequestTiming:
    """The clock of one completion."""

    def __init__(self, metrics: RouterMetrics, started_s: float) -> None:
        self._metrics = metrics
        self._started_s = started_s
        self._last_s = started_s
        self._is_first = True

    def tokens(self, num_tokens: int) -> None:
        if num_tokens == 0:
            return
        now_s = time.monotonic()
        self._metrics.observe_gap(now_s - self._last_s, self._is_first)
        self._last_s, self._is_first = now_s, False

    def finished(self, event: Finished) -> None:
        self._metrics.finished(event, time.monotonic() - self._started_s)
