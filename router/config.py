"""What a router is told at start."""

from dataclasses import dataclass
from ipaddress import IPv4Network, IPv6Network

Network = IPv4Network | IPv6Network

MAX_BODY_BYTES = 32 * 1024 * 1024


@dataclass(frozen=True, slots=True)
class RouterConfig:
    """`keep_alive_s` is both the longest silence on a stream and the longest time its HTTP status
    is held back for the first content: after it, errors travel in the stream."""

    max_body_bytes: int = MAX_BODY_BYTES
    keep_alive_s: float = 10.0
    max_running_requests: int = 256  # in this replica; more wait in their team's line
    trusted_proxies: tuple[Network, ...] = ()
