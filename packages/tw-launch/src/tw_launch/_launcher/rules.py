"""Decides after the end of a task: restart it, restart all tasks, or end the run.

Pure functions from the state before to the state after.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from enum import Enum

_LONGEST_DELAY_S = 30.0


@dataclass(frozen=True)
class Rules:
    """The user's rules for failed tasks."""

    restarts_group: bool = False  # whether one failure restarts all tasks
    max_restarts: int = 0  # of each task, or of all together
    min_workers: int | None = None  # that must be left; None: the first loss is fatal
    delay_s: float = 1.0  # before the first restart of all tasks; doubled each time


class Action(Enum):
    """The next step of a run."""

    GO_ON = "go on"
    RESTART_TASK = "restart the task"
    RESTART_GROUP = "restart all tasks"
    SUCCEED = "end well"
    FAIL = "end with the task's status"


@dataclass(frozen=True)
class Standing:
    """The state of a run."""

    workers: frozenset[str]  # those that have not failed for good
    finished: frozenset[str] = frozenset()  # workers that ended well
    restarts: Mapping[str, int] = field(default_factory=dict)  # key "": of all together
    reported: frozenset[str] = frozenset()  # servers whose end was announced


@dataclass(frozen=True)
class Verdict:
    """The next step, its announcement, and the delay before it."""

    action: Action
    said: str = ""
    after_s: float = 0.0


def judge_end(
    standing: Standing, rules: Rules, *, task: str, status: int
) -> tuple[Standing, Verdict]:
    """Judges the end of a task."""
    if status == 0:
        return _judge_good_end(standing, task)
    key = "" if rules.restarts_group else task
    before = standing.restarts.get(key, 0)
    failed = f"{task} failed with status {status}"
    if before == rules.max_restarts:
        failed = f"{failed} after {before + 1} start(s)"
        return judge_loss(standing, rules, tasks=[task], said=failed)
    restarts = {**standing.restarts, key: before + 1}
    failed = f"{failed}; restart {before + 1} of {rules.max_restarts}"
    if not rules.restarts_group:
        verdict = Verdict(Action.RESTART_TASK, failed)
        return replace(standing, restarts=restarts), verdict
    delay_s = min(_LONGEST_DELAY_S, rules.delay_s * 2.0 ** min(before, 64))
    verdict = Verdict(
        Action.RESTART_GROUP, f"{failed}, of all tasks, in {delay_s:g} s", delay_s
    )
    return Standing(standing.workers, restarts=restarts), verdict


def judge_loss(
    standing: Standing, rules: Rules, *, tasks: Iterable[str], said: str
) -> tuple[Standing, Verdict]:
    """Judges the permanent loss of tasks, none of which has ended well."""
    lost = frozenset(tasks)
    left = standing.workers - lost
    is_worker = lost <= standing.workers
    if rules.min_workers is None or not is_worker or len(left) < rules.min_workers:
        return standing, Verdict(Action.FAIL, f"{said}; ending all tasks")
    standing = replace(standing, workers=left)
    said = f"{said}; continuing with {len(left)} workers"
    return standing, Verdict(_go_on_or_succeed(standing), said)


def _judge_good_end(standing: Standing, task: str) -> tuple[Standing, Verdict]:
    if task in standing.workers:
        standing = replace(standing, finished=standing.finished | {task})
        return standing, Verdict(_go_on_or_succeed(standing))
    # It may be intended, e.g. by a server that waits until the workers are done.
    said = ""
    if task.startswith("ps ") and task not in standing.reported:
        standing = replace(standing, reported=standing.reported | {task})
        said = f"{task} ended with status 0 before the workers"
    return standing, Verdict(Action.GO_ON, said)


def _go_on_or_succeed(standing: Standing) -> Action:
    return Action.SUCCEED if standing.finished == standing.workers else Action.GO_ON
