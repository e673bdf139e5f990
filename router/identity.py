"""Who is calling: an API key becomes a Principal. Keys are kept as SHA-256 only."""

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass

from router.errors import AuthenticationFailed


@dataclass(frozen=True, slots=True)
class Principal:
    """`key_id` names a key in logs without being one."""

    team: str
    key_id: str


def hash_key(key: str) -> str:
    return hashlib.sha256(key.encode()).hexdigest()


class KeyRing:
    """Maps key hashes to teams. Lookup is by hash, so its time says nothing about a key."""

    def __init__(self, teams_by_key_hash: Mapping[str, str]) -> None:
        self._principals = {
            key_hash: Principal(team, key_hash[:8]) for key_hash, team in teams_by_key_hash.items()
        }

    @property
    def teams(self) -> frozenset[str]:
        return frozenset(principal.team for principal in self._principals.values())

    def authenticate(self, headers: Mapping[str, str]) -> Principal:
        """Accepts `authorization: Bearer KEY` and `x-api-key: KEY`. Raises AuthenticationFailed."""
        principal = self._principals.get(hash_key(presented_key(headers)))
        if principal is None:
            raise AuthenticationFailed("invalid API key: ask your platform team for one")
        return principal


def presented_key(headers: Mapping[str, str]) -> str:
    """The one key of the request. Two different ones are refused, not guessed between."""
    scheme, _, bearer = headers.get("authorization", "").partition(" ")
    bearer = bearer.strip() if scheme.lower() == "bearer" else ""
    x_api_key = headers.get("x-api-key", "").strip()
    if bearer and x_api_key and bearer != x_api_key:
        raise AuthenticationFailed("authorization and x-api-key carry different keys: send one")
    key = bearer or x_api_key
    if not key:
        raise AuthenticationFailed(
            "missing API key: send `authorization: Bearer KEY` or `x-api-key: KEY`"
        )
    return key
