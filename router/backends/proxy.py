"""A gateway of the company, or any server that speaks one of the two dialects. It is told which
team is asking."""

from router.backends.upstream import Upstream

TEAM_HEADER = "x-anthropic-team-id"


class ProxyUpstream(Upstream):
    def credentials(self, key: str | None, team: str) -> dict[str, str]:
        headers = {TEAM_HEADER: team}
        if key is not None:
            headers["authorization"] = f"Bearer {key}"
        return headers
