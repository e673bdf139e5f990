"""Who is knocking: the client's address, believed only from trusted proxies, and how often an
address may knock where no key is asked for."""

import ipaddress
import logging
import re
import time
from collections.abc import Sequence

from limits import RateLimitItemPerMinute
from limits.aio.storage import RedisStorage
from limits.aio.strategies import MovingWindowRateLimiter
from redis.asyncio import Redis
from redis.exceptions import RedisError

from router.errors import RateLimited

logger = logging.getLogger(__name__)

Address = ipaddress.IPv4Address | ipaddress.IPv6Address
Network = ipaddress.IPv4Network | ipaddress.IPv6Network

PER_MINUTE = 100
PORT = re.compile(r"\[(?P<six>[^\]]+)\](:\d+)?|(?P<four>[\d.]+):\d+")


def client_ip(peer: str, forwarded_for: Sequence[str], trusted: Sequence[Network]) -> str:
    """The address of the client: the first one, from the right, that no trusted proxy has.
    `peer` is the other end of the connection, `forwarded_for` the X-Forwarded-For headers in order.
    Whatever stands left of that address was written by the client and is not looked at."""
    address = _parse(peer)
    if address is None:
        return peer
    for hop in reversed(",".join(forwarded_for).split(",")):
        if not _is_trusted(address, trusted):
            break
        claimed = _parse(hop)
        if claimed is None:
            break
        address = claimed
    return str(address)


class IpLimit:
    """At most `per_minute` requests of an address in any minute, over all replicas. It guards
    routes that must answer when Redis does not: then everybody passes."""

    def __init__(self, redis: Redis, per_minute: int = PER_MINUTE) -> None:
        storage = RedisStorage(
            "async+redis://",
            implementation="redispy",
            key_prefix="flashray:ip",
            connection_pool=redis.connection_pool,  # type: ignore[arg-type]
        )
        self._limiter = MovingWindowRateLimiter(storage)
        self._limit = RateLimitItemPerMinute(per_minute)

    async def check(self, address: str) -> None:
        """Count one request. Raises RateLimited."""
        identifier = _subscriber(address)
        try:
            if await self._limiter.hit(self._limit, identifier):
                return
            window = await self._limiter.get_window_stats(self._limit, identifier)
        except RedisError as exc:
            logger.warning("address limit unchecked error=%s", type(exc).__name__)
            return
        raise RateLimited(
            f"{self._limit.amount} requests a minute from one address: retry later or use a key",
            retry_after_s=max(1.0, window.reset_time - time.time()),
        )


def _parse(text: str) -> Address | None:
    """Proxies may add a port, and write IPv4 as IPv6; anything else is no address."""
    text = text.strip()
    if match := PORT.fullmatch(text):
        text = match["six"] or match["four"]
    try:
        address = ipaddress.ip_address(text)
    except ValueError:
        return None
    if isinstance(address, ipaddress.IPv6Address) and address.ipv4_mapped:
        return address.ipv4_mapped
    return address


def _is_trusted(address: Address, trusted: Sequence[Network]) -> bool:
    return any(address in network for network in trusted)


def _subscriber(address: str) -> str:
    """An IPv6 subscriber has a whole /64 to knock from."""
    parsed = _parse(address)
    if isinstance(parsed, ipaddress.IPv6Address):
        return str(ipaddress.ip_network((parsed, 64), strict=False))
    return address
