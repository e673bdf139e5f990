import os
import sys

import psutil
import pytest

from benchmarks.child import child
from benchmarks.errors import MeasurementFailed
from cluster.bringup import free_port


def test_it_is_up_on_its_core_and_gone_afterwards():
    port = free_port()
    command = [sys.executable, "-m", "benchmarks.router.mock_upstream", "--port", str(port)]
    core = min(os.sched_getaffinity(0))
    with child(command, f"http://127.0.0.1:{port}/healthz", cores={core}) as pid:
        assert os.sched_getaffinity(pid) == {core}
    assert not psutil.pid_exists(pid)


def test_one_that_dies_is_said_with_its_status_and_its_last_words():
    command = [sys.executable, "-c", "raise SystemExit('no such model')", "4711"]
    said = (
        r"`\S+ \.\.\. 4711` ended with 1 after \d+ s, before http://127\.0\.0\.1:9/ answered; "
        r"it said:\nno such model"
    )
    with pytest.raises(MeasurementFailed, match=said), child(command, "http://127.0.0.1:9/"):
        pass


def test_one_that_does_not_answer_in_time_is_said_with_its_last_words():
    command = [sys.executable, "-uc", "print('loading'); import time; time.sleep(60)"]
    said = r"did not answer at http://127\.0\.0\.1:9/ within 3 s; it said:\nloading"
    with (
        pytest.raises(MeasurementFailed, match=said),
        child(command, "http://127.0.0.1:9/", timeout_s=3),
    ):
        pass
