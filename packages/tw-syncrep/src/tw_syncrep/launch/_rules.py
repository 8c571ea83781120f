"""What follows from the end of a task: it is restarted, all are, or the run is over.

Pure: what has been so far goes in, and what is now comes out.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from enum import Enum

_LONGEST_DELAY_S = 30.0


@dataclass(frozen=True)
class Rules:
    """What the user wants.

    Attributes:
      restarts_group: whether all tasks are restarted when one has failed.
      max_restarts: of each task, or of all together.
      min_workers: with so many left, the run goes on without workers that failed for
        good; None where it ends with the first.
      delay_s: before the first restart of all tasks; doubled for each further one.
    """

    restarts_group: bool = False
    max_restarts: int = 0
    min_workers: int | None = None
    delay_s: float = 1.0


class Action(Enum):
    """What is to be done."""

    GO_ON = "go on"
    RESTART_TASK = "restart the task"
    RESTART_GROUP = "restart all tasks"
    SUCCEED = "end well"
    FAIL = "end with the task's status"


@dataclass(frozen=True)
class Standing:
    """How a run stands.

    Attributes:
      workers: that it still counts on; the others have failed for good.
      finished: those of them that have ended well.
      restarts: of each task, or with the key "" of all together.
      reported: servers of which was said that they have ended.
    """

    workers: frozenset[str]
    finished: frozenset[str] = frozenset()
    restarts: Mapping[str, int] = field(default_factory=dict)
    reported: frozenset[str] = frozenset()


@dataclass(frozen=True)
class Verdict:
    """What is to be done, what is said of it, and how long to wait before."""

    action: Action
    said: str = ""
    after_s: float = 0.0


def judge_end(
    standing: Standing, rules: Rules, *, task: str, status: int
) -> tuple[Standing, Verdict]:
    """Judges the end of a task.

    Args:
      standing: before it.
      rules: the user's.
      task: its name, "worker 1".
      status: as a shell reports it; 0 where it ended well.
    """
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
    """Judges the loss of tasks for good.

    Args:
      standing: before it.
      rules: the user's.
      tasks: their names; none has ended well.
      said: what has happened; the verdict says what follows, too.
    """
    lost = frozenset(tasks)
    left = standing.workers - lost
    is_worker = lost <= standing.workers
    if rules.min_workers is None or not is_worker or len(left) < rules.min_workers:
        return standing, Verdict(Action.FAIL, f"{said}; ending all tasks")
    standing = replace(standing, workers=left)
    said = f"{said}; going on with {len(left)} workers"
    return standing, Verdict(_go_on_or_succeed(standing), said)


def _judge_good_end(standing: Standing, task: str) -> tuple[Standing, Verdict]:
    if task in standing.workers:
        standing = replace(standing, finished=standing.finished | {task})
        return standing, Verdict(_go_on_or_succeed(standing))
    # It may be meant, as of a server that waits until the workers are done.
    said = ""
    if task.startswith("ps ") and task not in standing.reported:
        standing = replace(standing, reported=standing.reported | {task})
        said = f"{task} ended with status 0 before the workers"
    return standing, Verdict(Action.GO_ON, said)


def _go_on_or_succeed(standing: Standing) -> Action:
    return Action.SUCCEED if standing.finished == standing.workers else Action.GO_ON
