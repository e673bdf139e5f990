"""Spoofed addresses are not believed, and an address may knock a hundred times a minute."""

import ipaddress

import pytest
from hypothesis import given
from hypothesis import strategies as st
from redis.asyncio import Redis

from router.errors import RateLimited
from router.limits.ip_limit import IpLimit, client_ip
from router.limits.limiter import connect

TRUSTED = [ipaddress.ip_network(text) for text in ("10.0.0.0/8", "fd00::/8")]


@pytest.mark.parametrize(
    ("peer", "forwarded_for", "client"),
    [
        pytest.param("203.0.113.9", [], "203.0.113.9", id="direct"),
        pytest.param("203.0.113.9", ["1.1.1.1"], "203.0.113.9", id="untrusted peer lies"),
        pytest.param("203.0.113.9", ["10.0.0.1"], "203.0.113.9", id="untrusted peer plays proxy"),
        pytest.param("10.0.0.1", ["203.0.113.9"], "203.0.113.9", id="one proxy"),
        pytest.param("10.0.0.1", ["203.0.113.9, 10.0.0.2"], "203.0.113.9", id="two proxies"),
        pytest.param("10.0.0.1", ["1.1.1.1, 203.0.113.9"], "203.0.113.9", id="client prepends"),
        pytest.param(
            "10.0.0.1", ["10.0.0.7, 203.0.113.9, 10.0.0.2"], "203.0.113.9", id="prepends a proxy"
        ),
        pytest.param(
            "10.0.0.1", ["1.1.1.1", "203.0.113.9"], "203.0.113.9", id="client's own header first"
        ),
        pytest.param("10.0.0.1", ["1.1.1.1, nonsense"], "10.0.0.1", id="nonsense ends the walk"),
        pytest.param("10.0.0.1", ["nonsense, 203.0.113.9"], "203.0.113.9", id="nonsense unread"),
        pytest.param("10.0.0.1", ["1.1.1.1,"], "10.0.0.1", id="empty entry ends the walk"),
        pytest.param("10.0.0.1", [""], "10.0.0.1", id="empty header"),
        pytest.param("10.0.0.1", [], "10.0.0.1", id="the proxy itself"),
        pytest.param("10.0.0.1", ["10.0.0.3, 10.0.0.2"], "10.0.0.3", id="all inside"),
        pytest.param("10.0.0.1", ["203.0.113.9:4711"], "203.0.113.9", id="with a port"),
        pytest.param("10.0.0.1", ["[2001:db8::1]:4711"], "2001:db8::1", id="IPv6 with a port"),
        pytest.param("10.0.0.1", ["[2001:db8::1]"], "2001:db8::1", id="IPv6 in brackets"),
        pytest.param("fd00::1", ["2001:DB8:0::1"], "2001:db8::1", id="one spelling of IPv6"),
        pytest.param("::ffff:10.0.0.1", ["203.0.113.9"], "203.0.113.9", id="mapped proxy"),
        pytest.param("10.0.0.1", ["::ffff:203.0.113.9"], "203.0.113.9", id="mapped client"),
        pytest.param("testclient", ["203.0.113.9"], "testclient", id="peer without an address"),
    ],
)
def test_client_ip(peer: str, forwarded_for: list[str], client: str) -> None:
    assert client_ip(peer, forwarded_for, TRUSTED) == client


def test_without_trusted_proxies_the_peer_is_the_client() -> None:
    assert client_ip("10.0.0.1", ["203.0.113.9"], []) == "10.0.0.1"


@given(st.lists(st.text(), max_size=4), st.ip_addresses(v=4))
def test_nothing_a_client_sends_changes_its_address(sent: list[str], client: object) -> None:
    if ipaddress.ip_address(str(client)) in TRUSTED[0]:
        return
    seen_by_proxy = [*sent, str(client)]
    assert client_ip("10.0.0.1", seen_by_proxy, TRUSTED) == str(client)
    assert client_ip("10.0.0.1", [", ".join(seen_by_proxy)], TRUSTED) == str(client)


async def test_an_address_may_knock_so_often_over_all_replicas(
    valkey: Redis, valkey_server: str
) -> None:
    async with connect(valkey_server, timeout_s=5.0) as other:
        replicas = [IpLimit(valkey, per_minute=10), IpLimit(other, per_minute=10)]
        for index in range(10):
            await replicas[index % 2].check("203.0.113.9")
        for replica in replicas:
            with pytest.raises(RateLimited, match="10 requests a minute") as caught:
                await replica.check("203.0.113.9")
            assert caught.value.retry_after_s is not None
            assert 1 <= caught.value.retry_after_s <= 60
        await replicas[0].check("203.0.113.10")


async def test_a_hundred_a_minute_unless_told_otherwise(valkey: Redis) -> None:
    limit = IpLimit(valkey)
    for _ in range(100):
        await limit.check("203.0.113.9")
    with pytest.raises(RateLimited):
        await limit.check("203.0.113.9")


async def test_an_ipv6_subscriber_is_one_address(valkey: Redis) -> None:
    limit = IpLimit(valkey, per_minute=1)
    await limit.check("2001:db8::1")
    with pytest.raises(RateLimited):
        await limit.check("2001:db8::ffff:1")
    await limit.check("2001:db8:0:1::1")


async def test_everybody_passes_when_the_store_is_gone() -> None:
    async with connect("unix:///nowhere/socket", timeout_s=0.05) as redis:
        limit = IpLimit(redis, per_minute=1)
        for _ in range(3):
            await limit.check("203.0.113.9")
