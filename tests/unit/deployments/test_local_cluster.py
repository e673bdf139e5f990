from deployments.local_cluster import failure_in

FAILED = """The deployment failed to start 3 times in a row. See controller logs. Error:
\x1b[36mray::ServeReplica:flashray:FlashEngine.initialize_and_get_metadata()\x1b[39m (pid=3565)
RuntimeError: Traceback (most recent call last):
  File "deployments/rank_group.py", line 189, in _gather
    raise BringUpError(
deployments.errors.BringUpError: rank 0 of 1 did not start: CacheTooSmall: raise kv_cache_bytes
"""


def test_the_error_behind_a_deployment_is_found():
    expected = "rank 0 of 1 did not start: CacheTooSmall: raise kv_cache_bytes"
    assert failure_in(["", FAILED]) == expected


def test_a_deployment_that_only_waits_is_no_failure():
    assert failure_in(["", "Deployment 'Router' has 1 replicas that take long to start."]) is None
