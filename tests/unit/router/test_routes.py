"""A table is taken whole or refused whole, with all its faults."""

import pytest

from router.routes import Route, RoutesError, Target, routes_from_list

BACKENDS = ["direct", "proxy"]


def test_a_table():
    table = routes_from_list(
        [
            {
                "model": "claude",
                "aliases": ["sonnet"],
                "egress": True,
                "max_input_tokens": 1000,
                "targets": [
                    {"backend": "proxy", "model": "up"},
                    {"backend": "local", "model": "small"},
                ],
            }
        ],
        BACKENDS,
    )
    targets = (Target("proxy", "up"), Target("local", "small"))
    assert table.routes == (Route("claude", targets, ("sonnet",), True, 1000),)
    assert table.names == ("claude", "sonnet")
    assert table.find("sonnet") is table.find("claude")
    assert table.find("other") is None


def test_no_routes():
    assert routes_from_list([], BACKENDS).names == ()


GOOD = {"model": "a", "targets": [{"backend": "local", "model": "m"}]}


@pytest.mark.parametrize(
    ("entries", "fault"),
    [
        ({}, "routes: expected a list, got dict"),
        ([1], "routes[0]: expected a mapping, got int"),
        ([{"targets": GOOD["targets"]}], "routes[0].model: expected a name, got NoneType"),
        ([{"model": "a"}], "routes[0].targets: expected a list"),
        ([{"model": "a", "targets": []}], "routes[0].targets: expected at least one target"),
        ([{**GOOD, "egres": True}], "routes[0].egres: unknown field, expected one of aliases"),
        ([{**GOOD, "egress": "yes"}], "routes[0].egress: expected true or false, got str"),
        ([{**GOOD, "max_tokens": 0}], "routes[0].max_tokens: expected a whole number above 0"),
        ([{**GOOD, "aliases": [""]}], "routes[0].aliases[0]: expected a name, got str"),
        ([{**GOOD, "aliases": ["a"]}], "'a' is a name of 'a' and 'a'"),
        ([GOOD, {**GOOD, "model": "b", "aliases": ["a"]}], "'a' is a name of 'a' and 'b'"),
        (
            [{"model": "a", "targets": [{"backend": "bedrock", "model": "m"}]}],
            "routes[0].targets[0].backend: expected one of direct, local, proxy, got 'bedrock'",
        ),
        (
            [{"model": "a", "targets": [{"backend": "local", "model": "m", "api_key": "sk-1"}]}],
            "routes[0].targets[0].api_key: unknown field, expected one of backend, model",
        ),
    ],
)
def test_a_fault_is_named_with_its_field(entries, fault: str):
    with pytest.raises(RoutesError) as caught:
        routes_from_list(entries, BACKENDS)
    assert fault in str(caught.value)
    assert "sk-1" not in str(caught.value)


def test_all_faults_at_once():
    with pytest.raises(RoutesError) as caught:
        routes_from_list([{"model": 1, "targets": [], "x": 1}, 2], BACKENDS)
    assert len(caught.value.faults) == 4
