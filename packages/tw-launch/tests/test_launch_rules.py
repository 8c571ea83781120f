"""What tw-launch decides, without a process: plans, restarts, messages, summaries.

Private modules are imported for it.
"""

import json
from queue import SimpleQueue

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tw_launch._launcher.meeting import Node
from tw_launch._launcher.messages import (
    Beat,
    Ended,
    Hello,
    Idle,
    Over,
    Start,
    decode,
    encode,
)
from tw_launch._launcher.plan import Share, lay_out, plan_tasks
from tw_launch._launcher.rules import Action, Rules, Standing, judge_end, judge_loss
from tw_launch._launcher.run import Director, summarize

WORKERS = frozenset({"worker 0", "worker 1", "worker 2"})


def test_a_cluster_lies_over_machines_in_the_order_of_their_ranks():
    machines = {"a": (1, 2), "::1": (3, 4), "c": (), "d": (5,)}
    workers = [1, 2, 0, 1]
    cluster, firsts = lay_out(
        [
            Hello(node, host, workers[node], ports, {})
            for node, (host, ports) in enumerate(machines.items())
        ],
        ps=1,
    )
    assert cluster == {"ps": ("a:1",), "worker": ("a:2", "[::1]:3", "[::1]:4", "d:5")}
    assert firsts == (0, 1, 3, 3)
    assert "ps" not in lay_out([Hello(0, "a", 1, (1,), {})], ps=0)[0]


def test_of_a_lost_machine_the_first_worker_by_number_is_named():
    hellos = [Hello(node, f"10.0.0.{node}", 8, (), {}) for node in (0, 1)]
    director = Director(None, [*map(Node, hellos)], Rules(min_workers=8), SimpleQueue())
    director._firsts = (0, 8)
    director._note_loss(director.members[1], "its launcher has ended")
    assert director._first[0].task == "worker 8"


def test_plans_list_servers_first_and_an_evaluator_outside():
    share = Share(ps=1, workers=2, evaluators=1, gpus=(None, None))
    plans = plan_tasks(share, Start(0, {"worker": ("a:1", "a:2")}, 0, ""))
    assert [p.name for p in plans] == ["ps 0", "worker 0", "worker 1", "evaluator 0"]
    config = json.loads(plans[-1].variables["TF_CONFIG"])
    assert config["task"] == {"type": "evaluator", "index": 0}
    assert config["cluster"]["worker"] == ["a:1", "a:2"]


@given(
    rules=st.builds(
        Rules,
        restarts_group=st.booleans(),
        max_restarts=st.integers(0, 3),
        min_workers=st.none() | st.integers(1, 3),
    ),
    data=st.data(),
)
def test_a_run_ends_as_the_rules_say_whatever_happens(rules, data):
    """Against a plain count of what has happened to each task.

    Only tasks that run can end: what has finished or was given up does not.
    """
    standing = Standing(WORKERS)
    running, restarts, given_up = {*WORKERS, "ps 0"}, dict.fromkeys(WORKERS, 0), set()
    restarts |= {"ps 0": 0, "group": 0}
    for _ in range(30):
        task = data.draw(st.sampled_from(sorted(running)))
        status = data.draw(st.sampled_from([0, 0, 1, 137]))
        standing, verdict = judge_end(standing, rules, task=task, status=status)
        key = "group" if rules.restarts_group else task
        running.discard(task)
        if status == 0:
            want = Action.GO_ON if running & WORKERS else Action.SUCCEED
            if task == "ps 0" and not running & WORKERS:
                raise AssertionError("the run should have been over")
        elif restarts[key] < rules.max_restarts:
            restarts[key] += 1
            group = rules.restarts_group
            running = {*WORKERS - given_up, "ps 0"} if group else running | {task}
            want = Action.RESTART_GROUP if group else Action.RESTART_TASK
        elif (
            rules.min_workers is not None
            and task in WORKERS
            and len(WORKERS - given_up) - 1 >= rules.min_workers
        ):
            given_up.add(task)
            want = Action.GO_ON if running & WORKERS else Action.SUCCEED
        else:
            want = Action.FAIL
        assert verdict.action is want
        if want in (Action.SUCCEED, Action.FAIL):
            return


def test_the_delay_of_restarts_of_all_tasks_doubles_up_to_a_bound():
    rules = Rules(restarts_group=True, max_restarts=7, delay_s=1)
    standing, verdicts = Standing(WORKERS), []
    for _ in range(8):
        standing, verdict = judge_end(standing, rules, task="worker 1", status=1)
        verdicts.append(verdict)
    assert [v.after_s for v in verdicts[:-1]] == [1, 2, 4, 8, 16, 30, 30]
    assert verdicts[0].said == (
        "worker 1 failed with status 1; restart 1 of 7, of all tasks, in 1 s"
    )
    assert verdicts[-1].action is Action.FAIL
    many = Rules(restarts_group=True, max_restarts=10**6, delay_s=0)
    standing = Standing(WORKERS, restarts={"": 10**5})
    _, verdict = judge_end(standing, many, task="ps 0", status=1)
    assert verdict.after_s == 0


def test_a_lost_machine_ends_the_run_unless_enough_workers_are_left():
    lost = {"tasks": ["worker 1", "worker 2"], "said": "node 1 is lost"}
    _, verdict = judge_loss(Standing(WORKERS), Rules(), **lost)
    assert verdict.action is Action.FAIL
    assert verdict.said == "node 1 is lost; ending all tasks"
    _, verdict = judge_loss(Standing(WORKERS), Rules(min_workers=2), **lost)
    assert verdict.action is Action.FAIL
    standing, verdict = judge_loss(Standing(WORKERS), Rules(min_workers=1), **lost)
    assert verdict.action is Action.GO_ON
    assert verdict.said == "node 1 is lost; continuing with 1 workers"
    _, verdict = judge_end(standing, Rules(min_workers=1), task="worker 0", status=0)
    assert verdict.action is Action.SUCCEED
    # A machine without workers is one that the user asked for, too.
    _, verdict = judge_loss(Standing(WORKERS), Rules(), tasks=[], said="")
    assert verdict.action is Action.FAIL


ENDED = Ended("worker 1", 137, "SIGKILL", ("a", "b"), "/logs/worker-1.0.log")
MESSAGES = [
    Hello(1, "10.0.0.2", 2, (1, 2), {"Python": "3.11"}),
    Start(1, {"worker": ("a:1", "b:2")}, 1, "5f0c"),
    Idle(()),
    Over(137, "said", failed=ENDED, where="node 1 (10.0.0.2)"),
    Over(137, "said", failed=ENDED, last=Ended("worker 0", 1)),
    Over(0),
    Beat(),
]


@pytest.mark.parametrize("message", MESSAGES, ids=lambda m: type(m).__name__)
def test_a_message_is_read_as_it_was_sent(message):
    line = encode(message)
    assert line.count(b"\n") == 1
    assert decode(line) == message


@pytest.mark.parametrize(
    "line",
    [
        b"GET / HTTP/1.1\r",
        b"null",
        b'["Hello", {}]',
        b'["Idle", {"ports": "12"}]',
        b'["Idle", {"ports": [1.5]}]',
        b'["Idle", {"ports": [true]}]',
        b'["Idle", {"ports": [], "more": 1}]',
        b'["Signalled", {"number": "9"}]',
        b'["Start", {"number": 1, "cluster": {"ps": [1]}, "first_worker": 0}]',
        b'[["Idle"], {"ports": []}]',
        b'["__import__", {}]',
    ],
    ids=range(11),
)
def test_what_is_no_message_is_refused(line):
    with pytest.raises(ValueError, match="expected a message, got"):
        decode(line)


def test_a_summary_names_the_first_failure_and_counts_the_others():
    later = [Ended("worker 0", 1), ENDED, Ended("ps 0", 139, "SIGSEGV")]
    assert summarize(Over(137, "", failed=ENDED, where="node 1 (b)"), later) == [
        "the first task that failed: worker 1 on node 1 (b), SIGKILL",
        "its log: /logs/worker-1.0.log",
        "its last lines:",
        "  a",
        "  b",
        "2 more failed on this machine: worker 0 (exit code 1), ps 0 (SIGSEGV)",
    ]
    assert summarize(Over(130, "node 0 got SIGINT"), later) == []
