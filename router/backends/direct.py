"""Claude itself, on its own wire."""

from router.backends.upstream import Upstream


class DirectUpstream(Upstream):
    def credentials(self, key: str | None, team: str) -> dict[str, str]:
        return {} if key is None else {"x-api-key": key}
