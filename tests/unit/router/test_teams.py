"""Reading teams: what is right becomes a tree, what is wrong is named, all at once."""

import hashlib
from typing import Any

import pytest
import yaml

from router.identity import KeyRing
from router.limits.policy import Limits
from router.teams import Team, TeamsError, teams_by_key_hash, teams_from_mapping

HASH = hashlib.sha256(b"sk-red").hexdigest()
OTHER_HASH = hashlib.sha256(b"sk-blue").hexdigest()


def faults(*teams: Any) -> tuple[str, ...]:
    with pytest.raises(TeamsError) as caught:
        teams_from_mapping({"teams": list(teams)})
    return caught.value.faults


def test_reads_every_field() -> None:
    text = f"""
    teams:
      - name: red
        key_hashes: [{HASH}]
        models: [smollm2, claude-sonnet]
        backends: [local, direct]
        limits:
          requests_per_minute: 60
          tokens_per_minute: 100000
          max_concurrent_requests: 8
          max_queued: 32
          weight: 2
    """
    assert teams_from_mapping(yaml.safe_load(text)) == (
        Team(
            "red",
            frozenset({HASH}),
            frozenset({"smollm2", "claude-sonnet"}),
            frozenset({"local", "direct"}),
            Limits(60, 100_000, 8, 32, 2.0),
        ),
    )


def test_a_name_is_enough_and_stays_local() -> None:
    (team,) = teams_from_mapping({"teams": [{"name": "red"}]})
    assert team == Team("red", backends=frozenset({"local"}), limits=Limits())
    assert team.may_use("anything")
    assert team.may_reach("local")
    assert not team.may_reach("direct")


def test_listed_models_exclude_all_others() -> None:
    team = Team("red", models=frozenset({"small"}))
    assert team.may_use("small")
    assert not team.may_use("large")
    assert not Team("none", models=frozenset()).may_use("small")


def test_keys_open_the_door_of_their_team() -> None:
    teams = teams_from_mapping(
        {"teams": [{"name": "red", "key_hashes": [HASH]}, {"name": "b", "key_hashes": []}]}
    )
    keys = KeyRing(teams_by_key_hash(teams))
    assert keys.authenticate({"x-api-key": "sk-red"}).team == "red"


def test_a_key_in_clear_text_is_refused_and_never_repeated() -> None:
    secret = "sk-flashray-abcdefgh"
    (fault,) = faults({"name": "red", "key_hashes": [HASH, secret]})
    assert fault.startswith("teams[0].key_hashes[1]: expected the SHA-256 of a key")
    assert "flashray hash-key" in fault
    assert secret not in fault
    (fault,) = faults({"name": "red", "api_keys": [secret]})
    assert fault.startswith("teams[0].api_keys: unknown field")
    assert "flashray hash-key" in fault
    assert secret not in fault


def test_every_fault_is_told_at_once_with_the_file() -> None:
    with pytest.raises(TeamsError) as caught:
        teams_from_mapping(
            {
                "teams": [
                    {"name": "red team", "models": "all"},
                    {"name": "blue", "limits": {"tokens_per_minute": 0, "rpm": 5}},
                    "green",
                ]
            },
            source="teams.yaml",
        )
    assert str(caught.value).splitlines() == [
        "teams.yaml: teams[0].name: expected 1 to 64 letters, digits, `.`, `_` or `-`, a letter or"
        " digit first, got str",
        "teams.yaml: teams[0].models: expected a list of strings, got str",
        "teams.yaml: teams[1].limits.rpm: unknown field, expected one of max_concurrent_requests,"
        " max_queued, requests_per_minute, tokens_per_minute, weight",
        "teams.yaml: teams[1].limits.tokens_per_minute: expected a whole number from 1 to"
        " 1000000000, or null, got int 0",
        "teams.yaml: teams[2]: expected a mapping with at least `name`, got str",
    ]


@pytest.mark.parametrize(
    ("limits", "field"),
    [
        ({"requests_per_minute": True}, "requests_per_minute"),
        ({"requests_per_minute": 1.5}, "requests_per_minute"),
        ({"tokens_per_minute": 10**9 + 1}, "tokens_per_minute"),
        ({"tokens_per_minute": "100"}, "tokens_per_minute"),
        ({"max_concurrent_requests": -1}, "max_concurrent_requests"),
        ({"max_queued": None}, "max_queued"),
        ({"max_queued": -1}, "max_queued"),
        ({"weight": 0}, "weight"),
        ({"weight": float("nan")}, "weight"),
        ({"weight": float("inf")}, "weight"),
    ],
)
def test_bad_limits_name_their_field(limits: dict[str, Any], field: str) -> None:
    (fault,) = faults({"name": "red", "limits": limits})
    assert fault.startswith(f"teams[0].limits.{field}: expected")


def test_names_and_keys_belong_to_one_team() -> None:
    assert faults(
        {"name": "red", "key_hashes": [HASH]},
        {"name": "red", "key_hashes": [HASH, OTHER_HASH]},
    ) == (
        "teams[1].name: 'red' is also teams[0]",
        f"teams[1].key_hashes: {HASH[:8]}... is also a key of teams[0]; a key belongs to one team",
    )


@pytest.mark.parametrize("mapping", [{}, {"teams": None}, {"teams": {"red": {}}}])
def test_no_list_of_teams_is_a_fault(mapping: dict[str, Any]) -> None:
    with pytest.raises(TeamsError, match="teams: expected a list of teams"):
        teams_from_mapping(mapping)


def test_a_field_of_another_kind_is_a_fault() -> None:
    assert faults({"name": 5, "limits": [], "backends": [1], "key_hashes": {}}) == (
        "teams[0].name: expected 1 to 64 letters, digits, `.`, `_` or `-`, a letter or digit first,"
        " got int 5",
        "teams[0].key_hashes: expected a list of strings, got dict",
        "teams[0].backends[0]: expected a string, got int 1",
        "teams[0].limits: expected a mapping, got list",
    )
