"""Towers of several processes: as one process with all of their rows.

The siblings' steps with ``tw_ranks`` between the processes: builders,
loss scaling, and epochs in one call.
"""

import numpy as np
import pytest
from programs.digits_towers import PROGRAMS, accuracy, batch
from programs.rank_towers import make_optimizer

pytestmark = pytest.mark.slow

STEPS = 20


def alone(mode, is_scaled, steps=STEPS, towers=4):
    program = PROGRAMS[mode]("replicated", make_optimizer(mode, is_scaled), towers)
    for step in range(steps):
        program.step(*batch(step))
    return program.read(program.variables)[0]


@pytest.mark.parametrize("mode", PROGRAMS)
@pytest.mark.parametrize("towers", [1, 2])
@pytest.mark.parametrize("is_scaled", [False, True], ids=["plain", "scaled"])
def test_a_builders_steps_are_those_of_one_process(groups, mode, towers, is_scaled):
    wanted = alone(mode, is_scaled)
    results = groups(2).call("rank_towers:train_digits", mode, towers, STEPS, is_scaled)
    copies = [copy for variables, _ in results for copy in variables]
    assert len(copies) == 2 * towers
    for copy in copies:
        for value, same, want in zip(copy, copies[0], wanted, strict=True):
            np.testing.assert_array_equal(value, same)
            np.testing.assert_allclose(value, want, rtol=1e-3, atol=1e-4)
    assert accuracy(*copies[0]) >= 0.9


@pytest.mark.parametrize("mode", PROGRAMS)
def test_one_ranks_infinity_makes_all_skip_and_all_scales_stay_the_same(groups, mode):
    results = groups(2).call("rank_towers:train_digits", mode, 2, 6, True, (2, 4))
    for _, told in results:
        assert [(s["updates"], s["skipped_updates"]) for s in told] == [(4, 2)] * 2
        assert {float(s["loss_scaling_log2"]) for s in told} == {13.0}  # from 15
    first = results[0][0][0]
    for variables, _ in results:
        for copy in variables:
            np.testing.assert_equal(copy, first)


def test_sums_between_processes_run_inside_an_epochs_loop(groups):
    results = groups(2).call("rank_towers:train_epochs", 2, 3)
    copies = [copy for variables in results for copy in variables]
    for copy in copies:
        np.testing.assert_equal(copy, copies[0])
    assert accuracy(*copies[0]) >= 0.9
