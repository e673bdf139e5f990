"""What the engine says of its cold tier reaches those who watch the router."""

from router.backends.base import BackendStatus
from router.metrics import RouterMetrics

COUNTS = {"spilled": 5, "dropped": 4, "restored": 3, "missed": 2, "corrupt": 1}


def test_every_counter_has_its_gauge():
    totals = {f"cold_{name}_blocks_total": count for name, count in COUNTS.items()}
    text = RouterMetrics().render(BackendStatus(True, "", **totals)).decode()
    for name, count in COUNTS.items():
        assert f"flashray:cold_tier_{name}_blocks {count:.1f}\n" in text
