"""Ranks that are lost under Horovod's names, whose programs know of no group."""

import os
import re
import signal
import time

import horovod_ranks
import pytest
from harness.ranks import ENGINE, Raised
from harness.task_faults import GRACE_S
from horovod_models import make_batch

SIZE, VICTIM, TIMEOUT_S = 3, 1, 2.0
# Of a step, and of what runs eagerly or while a step is traced.
KINDS = {"UnavailableError", "RankTimeoutError"}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("program", "fault", "kinds"),
    [
        ("train_with_tape", signal.SIGKILL, KINDS),
        ("train_with_tape", signal.SIGSTOP, KINDS),
        ("fit", signal.SIGKILL, KINDS),
        ("fit", signal.SIGSTOP, KINDS),
        ("train_in_session", signal.SIGKILL, {"UnknownError"}),
    ],
)
def test_the_errors_of_all_others_name_who_is_lost(processes, program, fault, kinds):
    is_v1 = program == "train_in_session"
    if os.environ.get(ENGINE) == "mpi":  # Functions call Python, as sessions do.
        kinds = {*kinds, "UnknownError"}
    group = horovod_ranks.make(processes, SIZE, timeout_s=TIMEOUT_S, v1=is_v1)
    rows, targets = make_batch(SIZE)

    def calls(steps):
        return [
            ("call_program", program, rows[rank], targets[rank], {"steps": steps})
            for rank in range(SIZE)
        ]

    try:
        group.call_each("call_program", [own[1:] for own in calls(2)])
        for rank, own in zip(group.all, calls(10**6), strict=True):
            rank.say(*own)
        time.sleep(2.0)  # They train.
        began_s = time.monotonic()
        group.all[VICTIM].send(fault)
        deadline_s = 0.0 if fault == signal.SIGKILL else TIMEOUT_S
        for rank in (group.all[0], group.all[2]):
            with pytest.raises(Raised) as raised:
                rank.hear(TIMEOUT_S + 30)
            told = f"after {raised.value.at_s - began_s:.2f} s: {raised.value}"
            assert raised.value.kind in kinds, told
            says = f"rank {rank.rank} of {SIZE} cannot continue: "
            _, *sentences = raised.value.text.split(says)
            assert sentences, told
            for sentence in sentences:
                [line, *_] = sentence.splitlines()
                assert re.findall(r"rank (\d+) \(", line) == [str(VICTIM)], told
            assert raised.value.at_s - began_s <= deadline_s + GRACE_S, told
    finally:
        group.end()
