"""The peer: what Serve does by default, and still every reader finds its generation."""

import random

from ray.serve.request_router import PendingRequest, RunningReplica

from deployments.replica_router import ReplicaRouter


class PowerOfTwo(ReplicaRouter):
    """Of two random replicas the one with the shorter queue, as Serve's own router."""

    async def choose_replicas(
        self,
        candidate_replicas: list[RunningReplica],
        pending_request: PendingRequest | None = None,
    ) -> list[list[RunningReplica]]:
        if pending_request is None or pending_request.metadata.call_method != "submit":
            return await super().choose_replicas(candidate_replicas, pending_request)
        return [random.sample(candidate_replicas, 2)]
