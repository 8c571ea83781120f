"""Explores the model of the protocol: with all rules, and without each of them."""

import pytest
from syncrep_model import RULES, Setup, Violation, explore

CRASHES = frozenset({"crash", "orphan"})

SOUND = [
    Setup(faults=0),
    Setup(servers=2, faults=0),
    Setup(kinds=frozenset({"crash", "lost call"})),
    Setup(kinds=CRASHES),
    Setup(servers=2, rounds=1, kinds=CRASHES),
    Setup(servers=2, rounds=1, kinds=frozenset({"crash", "lost call"})),
    Setup(servers=2, kinds=frozenset({"restart"})),
    Setup(aggregate=1, rounds=1, kinds=CRASHES),
    Setup(aggregate=1, kinds=frozenset({"crash", "lost call"})),
    Setup(servers=2, aggregate=1, kinds=frozenset({"save"})),
]
FAULTS = {
    "fence rounds": (CRASHES, "wait for ever"),
    "fence waits": (CRASHES, "wait for ever"),
    "put back": (CRASHES, "wait for ever"),
    "bound rounds": (CRASHES, "wait for ever"),
    "stamps": (frozenset({"lost call"}), "applied twice"),
    "baton": (CRASHES, "two rounds change the variables at once"),
    "finish": (frozenset({"crash"}), "2 rounds have applied"),
    "keep": (frozenset({"crash"}), "steps that the servers held are lost"),
    "hold": (frozenset({"save"}), "a checkpoint is torn"),
}


def name_of(setup):
    """Returns the same in every process, which the text of a set is not."""
    sizes = f"{setup.servers} servers, {setup.aggregate} in a round, {setup.rounds}"
    return f"{sizes} rounds, {setup.faults} of {' '.join(sorted(setup.kinds))}"


@pytest.mark.parametrize("setup", SOUND, ids=name_of)
def test_no_order_of_moves_breaks_the_protocol(setup):
    assert explore(setup) > 100


@pytest.mark.parametrize("rule", sorted(RULES))
def test_without_a_rule_the_model_finds_the_fault_that_it_prevents(rule):
    kinds, fault = FAULTS[rule]
    torn = {"servers": 2, "aggregate": 1} if rule == "hold" else {}
    setup = Setup(kinds=kinds, rules=RULES - {rule}, **torn)
    with pytest.raises(Violation, match=fault):
        explore(setup)


def test_a_fault_is_told_with_the_moves_that_led_to_it():
    setup = Setup(kinds=frozenset({"lost call"}), rules=RULES - {"stamps"})
    with pytest.raises(Violation) as raised:
        explore(setup)
    story = str(raised.value).splitlines()
    assert story[0] == "0 calls open"
    assert "the watchdog of 0 renews its session" in story
