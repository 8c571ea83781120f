"""Explores the model of the protocol: with all rules, and without each of them.

With SYNCREP_MODEL_DEEP=1 in the environment also larger setups, with two faults at a
time: a quarter of an hour.
"""

import dataclasses
import os

import pytest
from syncrep_model import RULES, Setup, Violation, explore


def of(*faults, orphans=False, **sizes):
    """Returns a setup in which any of these faults may happen, by default one."""
    modes = {"orphan"} if orphans else set()
    return Setup(kinds=frozenset(faults) | modes, **sizes)


def in_turn(*faults, rounds=1, **sizes):
    """Returns a setup in which each of these faults may happen, in this order."""
    return of(*faults, order=faults, faults=len(faults), rounds=rounds, **sizes)


SOUND = [
    of(faults=0),
    of(servers=2, faults=0),
    of("crash", "lost call"),
    of("crash", orphans=True),
    of("crash", orphans=True, servers=2, rounds=1),
    of("crash", "lost call", servers=2, rounds=1),
    of("restart", servers=2),
    of("crash", orphans=True, aggregate=1, rounds=1),
    of("crash", "lost call", aggregate=1),
    of("save", servers=2, aggregate=1),
    of("evict"),
    of("evict", servers=2, rounds=1),
    of("takeover", rounds=1),
    of("takeover", aggregate=1, rounds=1),
    of("takeover", servers=2, rounds=1),
    of("gone", orphans=True),
    of("gone", servers=2),
    of("gone", aggregate=1),
    of("twin", rounds=1),
    in_turn("save", "crash", orphans=True),
    in_turn("gone", "lost call"),
]
DEEP = [
    of("takeover"),
    of("takeover", aggregate=1),
    of("evict", aggregate=1),
    of("twin", aggregate=1, rounds=1),
    in_turn("save", "takeover", servers=2),
    in_turn("save", "evict", servers=2),
    in_turn("takeover", "restart", servers=2),
    in_turn("restart", "takeover", servers=2),
    in_turn("takeover", "crash", orphans=True),
    in_turn("crash", "takeover"),
    in_turn("crash", "lost call", orphans=True),
    in_turn("lost call", "crash", orphans=True),
    in_turn("evict", "takeover"),
    in_turn("takeover", "evict"),
    in_turn("takeover", "takeover"),
    in_turn("gone", "takeover", orphans=True),
]
FAULTS = {
    "fence rounds": (of("crash", orphans=True), "wait for ever"),
    "fence waits": (of("crash", orphans=True), "wait for ever"),
    "put back": (of("crash", orphans=True), "wait for ever"),
    "bound rounds": (of("takeover"), "wait for ever"),
    "stamps": (of("lost call"), "applied twice"),
    "baton": (of("takeover"), "two rounds change the variables at once"),
    "finish": (of("crash"), "2 rounds have applied"),
    "keep": (of("crash"), "steps that the servers held are lost"),
    "hold": (of("save", servers=2, aggregate=1), "a checkpoint is torn"),
    "release": (in_turn("save", "crash", orphans=True), "wait for ever"),
    "withdraw": (in_turn("save", "takeover", servers=2), "a checkpoint is torn"),
    "claim": (in_turn("takeover", "restart", servers=2), "half-restored variables"),
    "own office": (in_turn("gone", "lost call"), "wait for ever"),
    "step down": (of("takeover"), "the office changes for ever"),
    "tell": (of("gone"), "wait for ever"),
    "come back": (of("evict"), "arrives, and is not waited for"),
    "lives": (of("twin", rounds=1), "for ever|taken its number back again"),
    "draw first": (of("crash", orphans=True), "wait for ever"),
    "take at once": (of("twin", rounds=1), "for ever|taken its number back again"),
}


def name_of(setup):
    """Returns the same in every process, which the text of a set is not."""
    sizes = f"{setup.servers} servers, {setup.aggregate} in a round, {setup.rounds}"
    kinds = " then ".join(setup.order) or " ".join(sorted(setup.kinds))
    orphans = " with orphans" * bool(setup.order and "orphan" in setup.kinds)
    return f"{sizes} rounds, {setup.faults} of {kinds}{orphans}"


@pytest.mark.timeout(0 if "SYNCREP_MODEL_DEEP" in os.environ else None)
@pytest.mark.slow(
    by_day=[
        "1 servers, 2 in a round, 2 rounds, 0 of ",
        "2 servers, 2 in a round, 2 rounds, 0 of ",
        "1 servers, 2 in a round, 2 rounds, 1 of crash lost call",
        "2 servers, 2 in a round, 1 rounds, 1 of crash lost call",
        "2 servers, 2 in a round, 2 rounds, 1 of restart",
        "1 servers, 1 in a round, 1 rounds, 1 of crash orphan",
    ]
)
@pytest.mark.parametrize(
    "setup",
    SOUND + (DEEP if "SYNCREP_MODEL_DEEP" in os.environ else []),
    ids=name_of,
)
def test_no_order_of_moves_breaks_the_protocol(setup):
    assert explore(setup, at_most=2_000_000) > 100


@pytest.mark.slow(
    by_day=[
        "baton",
        "claim",
        "draw first",
        "fence waits",
        "hold",
        "lives",
        "put back",
        "stamps",
        "tell",
    ]
)
@pytest.mark.parametrize("rule", sorted(RULES))
def test_without_a_rule_the_model_finds_the_fault_that_it_prevents(rule):
    setup, fault = FAULTS[rule]
    with pytest.raises(Violation, match=fault):
        explore(dataclasses.replace(setup, rules=RULES - {rule}))


def test_a_fault_is_told_with_the_moves_that_led_to_it():
    setup = of("lost call", rules=RULES - {"stamps"})
    with pytest.raises(Violation) as raised:
        explore(setup)
    story = str(raised.value).splitlines()
    assert story[0] == "0 calls open"
    assert "the watchdog of 0 renews its session" in story
