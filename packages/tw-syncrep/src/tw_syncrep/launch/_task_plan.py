"""Which tasks a launch starts, and with what TF_CONFIG."""

import json
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class TaskPlan:
    """One task.

    Attributes:
      job: "ps", "worker" or "evaluator".
      index: within the job.
      tf_config: JSON.
    """

    job: str
    index: int
    tf_config: str

    @property
    def name(self) -> str:
        """As it is shown, e.g. "worker 1"."""
        return f"{self.job} {self.index}"

    @property
    def decides(self) -> bool:
        """Whether the run is over when all such tasks have ended well."""
        return self.job == "worker"


def plan_tasks(
    *, ps: int, workers: int, evaluators: int, ports: Sequence[int]
) -> tuple[TaskPlan, ...]:
    """Plans a cluster on this machine.

    Args:
      ps: parameter servers.
      workers: replicas; the first is the chief.
      evaluators: tasks outside of the cluster, 0 or 1.
      ports: one a parameter server and worker.

    Returns:
      The tasks, parameter servers first.

    Raises:
      ValueError: a count makes no cluster.
    """
    if ps < 0 or workers < 1 or evaluators not in (0, 1):
        raise ValueError(
            "plan_tasks: needs ps >= 0, workers >= 1 and 0 or 1 evaluator; got "
            f"{ps}, {workers} and {evaluators}."
        )
    addresses = [f"localhost:{port}" for port in ports]
    cluster = {"ps": addresses[:ps], "worker": addresses[ps : ps + workers]}
    cluster = {job: listed for job, listed in cluster.items() if listed}
    counts = {"ps": ps, "worker": workers, "evaluator": evaluators}
    return tuple(
        TaskPlan(job, index, _tf_config(cluster, job, index))
        for job, count in counts.items()
        for index in range(count)
    )


def _tf_config(cluster: dict[str, list[str]], job: str, index: int) -> str:
    return json.dumps({"cluster": cluster, "task": {"type": job, "index": index}})
