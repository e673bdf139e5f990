"""Serve's side of replica choice: reads requests and publications for router/affinity.py, and sends
what is addressed to one replica there."""

from collections.abc import Sequence
from typing import Any

from ray.serve.request_router import PendingRequest, ReplicaID, RequestRouter, RunningReplica

from engine.cache.block_hash import extend_chain, root_hash
from engine.cache.formats import BLOCK_SIZE
from router.affinity import PREFIX_BYTES, Publication, ReplicaChoice, load_tokens
from router.generation import GenerationRequest

MAX_HASHED_TOKENS = 512 * BLOCK_SIZE  # of a prompt: 1.3 ms of hashing
PUBLICATION_PERIOD_S = 1.0


def prefix_chain(request: GenerationRequest) -> list[bytes]:
    """The hash chain that the engine keeps of this prompt, shortened, but for the name of model and
    format in its root: all replicas of a deployment have the same."""
    chain: list[bytes] = []
    root = root_hash(b"", request.cache_salt.encode())
    extend_chain(chain, root, request.prompt_token_ids[:MAX_HASHED_TOKENS], BLOCK_SIZE)
    return [block_hash[:PREFIX_BYTES] for block_hash in chain]


def routing_stats(publication: Publication) -> dict[str, Any]:
    return {"prefixes": publication.prefixes, "tokens": publication.tokens}


def publications_of(replicas: Sequence[RunningReplica]) -> dict[str, Publication]:
    """By tag; an empty one of a replica that has not published yet."""
    stats = {_tag(replica): replica.routing_stats for replica in replicas}
    return {
        tag: Publication(each.get("prefixes", b""), each.get("tokens", 0))
        for tag, each in stats.items()
    }


class ReplicaRouter(RequestRouter):
    """`submit(request, avoid=<tags>)` goes by prefix and load, to one of `avoid` only where all
    are; a call with `replica=<tag>` to that replica, or, when it is gone, to another, which says
    so; any other call to the least busy."""

    def initialize_state(self, **kwargs: Any) -> None:
        self._choice = ReplicaChoice()

    def update_replicas(self, replicas: list[RunningReplica]) -> None:
        self._choice.update(publications_of(replicas))
        super().update_replicas(replicas)

    async def choose_replicas(
        self,
        candidate_replicas: list[RunningReplica],
        pending_request: PendingRequest | None = None,
    ) -> list[list[RunningReplica]]:
        by_tag = {_tag(replica): replica for replica in candidate_replicas}
        if pending_request is None:
            return [candidate_replicas]
        pinned = by_tag.get(pending_request.kwargs.get("replica", ""))
        if pinned is not None:
            return [[pinned]]
        if pending_request.metadata.call_method != "submit":
            return [candidate_replicas]
        (request,) = pending_request.args
        refused = pending_request.kwargs.get("avoid", ())
        tags = [tag for tag in by_tag if tag not in refused] or list(by_tag)
        ranked = self._choice.place(
            request.request_id, tags, prefix_chain(request), load_tokens(request)
        )
        return [[by_tag[tag]] for tag in ranked]

    def on_request_routed(
        self, pending_request: PendingRequest, replica_id: ReplicaID, result: Any
    ) -> None:
        method, arguments = pending_request.metadata.call_method, pending_request.args
        if method == "submit" and pending_request.kwargs.get("reader"):
            self._choice.followed(arguments[0].request_id)
        elif method == "subscribe":
            self._choice.opened(arguments[0], pending_request.metadata.internal_request_id)
        elif method == "abort":
            self._choice.ended(arguments[0])
        elif method == "acknowledge":
            for request_id in arguments[0]:
                self._choice.ended(request_id)

    def on_request_completed(self, replica_id: ReplicaID, internal_request_id: str) -> None:
        self._choice.closed(internal_request_id)


def _tag(replica: RunningReplica) -> str:
    return str(replica.replica_id.unique_id)
