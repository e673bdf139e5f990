"""`-p tests.kernels.gpu.shard --shard 3/16`: the tests of the third of sixteen processes."""

import hashlib

import pytest


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--shard", metavar="NUMBER/COUNT", help="a part of the tests: 1/16 to 16/16")


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Dealt in an order that scatters a test's parameters: alike ones are slow together, and want
    the same code compiled at the same time."""
    if shard := config.getoption("--shard"):
        number, count = map(int, shard.split("/"))
        items[:] = sorted(items, key=scattered)[number - 1 :: count]


def scattered(item: pytest.Item) -> bytes:
    return hashlib.sha256(item.nodeid.encode()).digest()
