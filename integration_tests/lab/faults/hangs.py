"""Hangs: somebody is stopped at a random place, and reports must name who, and where.

    kind                  who is stopped           where                       how
    hangs: servers        a worker, the chief,     at some moment of training, SIGSTOP,
                          a parameter server       or before a known step      no call
    hangs: processes      a rank of two or three   the same, in functions and  SIGSTOP,
                                                   sessions                    an Event
    hangs: collective     a tower of two to four   in one of two reductions,   an Event,
                                                   in functions and sessions   a queue
    hangs: runner         a tower of two to five   in a step                   an Event,
                                                                               a queue
    hangs: load           a tower's column         in ``load``, ``load_data``, an Event,
                                                   ``use_next``                a queue

What must hold: every waiter that lives raises within ``GRACE_S`` of its deadline, and
its report names those that were stopped, no fewer and no more, and the round,
collective, step or column, as the drill knows them.
"""

import contextlib
import os
import queue
import random
import re
import signal
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from harness.processes import Peer

GRACE_S = 1.0
DEADLINE_S = 2.0
LONG_S = 120.0
CPUS = [f"/cpu:{k}" for k in range(8)]


@dataclass
class Told:
    """What one waiter said."""

    report: str  # of its error
    # Seconds from the beginning of the wait, or of the fault, to the error
    after_s: float
    # A pattern of what this one waited for; None for that of all
    what: str | None = None


@dataclass
class Hang:
    """One hang, and what the reports must say of it."""

    where: str  # for remarks
    missing: list[str]  # a pattern per line of who is missing, in any order
    what: str  # a pattern of what was waited for
    deadline_s: float = DEADLINE_S  # of the wait
    told: list[Told] = field(default_factory=list)  # by every waiter that lives

    def fault(self) -> str:
        """Returns what is not as it must be; empty where all is."""
        for told in self.told:
            if told.after_s > self.deadline_s + GRACE_S:
                return f"{self.where}: too late, after {told.after_s:.2f} s"
            lines = told.report.splitlines()
            missing = _named(lines, "missing")
            if len(missing) != len(self.missing) or not all(
                any(re.match(pattern, line) for line in missing)
                for pattern in self.missing
            ):
                return f"{self.where}: wanted {self.missing}, named {missing}"
            (what,) = _named(lines, "waits for")
            wanted = told.what or self.what
            if not re.fullmatch(wanted, what):
                return f"{self.where}: wanted {wanted}, named {what!r}"
        return "" if self.told else f"{self.where}: nobody raised"


def _named(lines: list[str], field_: str) -> list[str]:
    start = f"  {field_:<10}"
    return [line.removeprefix(start) for line in lines if line.startswith(start)]


def stop_point(
    rng: random.Random,
) -> tuple[Callable[[], None], Callable[[], None], str]:
    """Returns what blocks, what ends that, and its name."""
    if rng.random() < 0.5:
        event = threading.Event()
        return lambda: event.wait(LONG_S) and None, event.set, "an Event"
    held: queue.Queue[None] = queue.Queue()
    return lambda: held.get(timeout=LONG_S), lambda: held.put(None), "a queue"


def hang_runner(rng: random.Random) -> Hang:
    from tw_builders import AsyncRunner
    from tw_core import DeadlineError

    count = rng.randint(2, 5)
    victim, at = rng.randrange(count), rng.randint(1, 30)
    block, release, how = stop_point(rng)
    blocked, done = threading.Event(), [0] * count

    def step(k: int) -> None:
        time.sleep(rng.uniform(0, 0.004))
        done[k] += 1
        if (k, done[k]) == (victim, at):
            blocked.set()
            block()

    steps = [lambda k=k: step(k) for k in range(count)]
    runner = AsyncRunner(steps, max_steps=rng.choice([None, 60])).start()
    assert blocked.wait(LONG_S)
    time.sleep(rng.uniform(0, 0.5))
    began = time.monotonic()
    where = f"tower{victim} of {count} in step {at}, on {how}"
    pattern = f"tower{victim}: hangs inside step {at} for "
    hang = Hang(where, [pattern], "the end of all towers", DEADLINE_S)
    try:
        runner.join(DEADLINE_S)
    except DeadlineError as error:
        hang.told.append(Told(_without_running(error.report), _since(began)))
    release()
    runner.stop()
    runner.join(LONG_S)
    return hang


def _without_running(report: str) -> str:
    """Leaves out those that are said to run on: they do not hang."""
    kept = [x for x in report.splitlines() if not re.match(r"  missing .*: runs ", x)]
    return "\n".join(kept)


def hang_collective(rng: random.Random) -> Hang:
    import tensorflow as tf

    from tw_core import DeadlineError
    from tw_core.testing import start_logical_cpus
    from tw_reduce import sum_collective
    from tw_reduce.reducers import CollectiveKeys

    start_logical_cpus()
    count, mode = rng.randint(2, 4), rng.choice(["function", "session"])
    victim, at, part = rng.randrange(count), rng.randint(2, 6), rng.randrange(2)
    sizes = rng.sample(range(1, 6), 2)
    block, release, how = stop_point(rng)
    calls, blocked = [0], threading.Event()

    def wait(value: Any) -> Any:
        calls[0] += 1
        if calls[0] == at:
            blocked.set()
            block()
        return value

    def build(x: Any, keys: CollectiveKeys) -> Any:
        totals = []
        for number, size in enumerate(sizes):
            towers = []
            for k in range(count):
                with tf.device(CPUS[k]):
                    own = x * (k + 1.0)
                    if (k, number) == (victim, part):
                        own = tf.numpy_function(wait, [own], tf.float32)
                        own = tf.ensure_shape(own, [4])
                    towers.append([own + n for n in range(size)])
            [[total, *_], *_] = sum_collective(towers, devices=CPUS[:count], keys=keys)
            totals.append(total)
        return totals

    keys = CollectiveKeys(note_arrivals=True)
    if mode == "function":
        traced = tf.function(lambda x: build(x, keys), autograph=False)
        traced.get_concrete_function(tf.TensorSpec([4]))
        bounded = keys.bounded(traced, timeout_s=DEADLINE_S)
        run = lambda: bounded(tf.ones([4]))  # noqa: E731
    else:
        with tf.Graph().as_default():
            totals = build(tf.ones([4]), keys)
            config = tf.compat.v1.ConfigProto(device_count={"CPU": len(CPUS)})
            session = tf.compat.v1.Session(config=config)
        bounded = keys.bounded(session.run, timeout_s=DEADLINE_S, session=session)
        run = lambda: bounded(totals)  # noqa: E731
    where = (
        f"tower {victim} of {count} in reduction {part}, call {at}, {mode}, on {how}"
    )
    hang = Hang(
        where,
        [rf"tower {victim} \({CPUS[victim]}\): its gradients have not arrived"],
        f"sum_collective of {sizes[part]} gradients",
    )
    for _ in range(at):
        began = time.monotonic()
        try:
            run()
        except DeadlineError as error:
            hang.told.append(Told(error.report, _since(began)))
    release()
    return hang


def hang_load(rng: random.Random) -> Hang:
    from tw_core import DeadlineError

    count, columns = rng.randint(1, 4), rng.randint(1, 4)
    victim, column = rng.randrange(count), rng.randrange(columns)
    block, release, how = stop_point(rng)
    mode = rng.choice(["load", "load_next", "load_data"])
    make = _session_loader if mode == "load_data" else _eager_loader
    load, wait, arm = make(count, columns, (victim, column), block)
    for _ in range(rng.randint(0, 2)):
        load()
    arm()
    if mode == "load_next":
        load(next_too=True)
    began = time.monotonic()
    where = f"tower {victim} of {count}, column {column} of {columns}, {mode}, on {how}"
    others = [f"tower {k}: not started" for k in range(victim + 1, count)]
    missing = [f"tower {victim}: column 'c{column}' for ", *others]
    hang = Hang(where, missing, "the load of a batch")
    try:
        wait(DEADLINE_S) if mode == "load_next" else load(timeout_s=DEADLINE_S)
    except DeadlineError as error:
        hang.told.append(Told(error.report, _since(began)))
    release()
    wait(LONG_S)
    return hang


def _eager_loader(
    count: int, columns: int, victim: tuple[int, int], block: Callable[[], None]
) -> tuple[Callable[..., Any], Callable[[float], Any], Callable[[], None]]:
    import numpy as np
    import tensorflow as tf

    from tw_core import towers
    from tw_core.testing import start_logical_cpus
    from tw_rlload import DeviceBatch

    start_logical_cpus()
    armed: list[None] = []
    batch = DeviceBatch(
        towers(CPUS[:count]),
        {f"c{n}": tf.TensorSpec([None, 3]) for n in range(columns)},
        max_per_device_batch_size=4,
        num_buffers=2,
    )
    real = batch._writer

    def write(buffer: int, tower: int, column: int, rows: Any) -> None:
        if armed and (tower, column) == victim:
            armed.clear()
            block()
        real.write(buffer, tower, column, rows)

    batch._writer = real._replace(write=write)
    data = [np.ones((8 * count, 3), np.float32) for _ in range(columns)]

    def load(*, next_too: bool = False, timeout_s: float = LONG_S) -> None:
        if next_too:
            batch.load_next(data)
        else:
            batch.load(data, timeout_s=timeout_s)

    return load, batch.use_next, lambda: armed.append(None)


def _session_loader(
    count: int, columns: int, victim: tuple[int, int], block: Callable[[], None]
) -> tuple[Callable[..., Any], Callable[[float], Any], Callable[[], None]]:
    import numpy as np
    import tensorflow as tf

    from tw_rlload import LocalSyncParallelOptimizer

    v1 = tf.compat.v1
    armed: list[int] = []

    class Loss:
        def __init__(self, inputs: list[Any]) -> None:
            w = v1.get_variable("w", [], initializer=v1.ones_initializer())
            self.loss = w * tf.reduce_mean(inputs[0])

        def gradients(self, optimizer: Any) -> Any:
            return optimizer.compute_gradients(self.loss)

    class Held:
        """A session whose n-th call since it was armed hangs."""

        def __init__(self, session: Any) -> None:
            self._session = session
            self.graph = session.graph

        def run(self, *args: Any) -> Any:
            if armed:
                armed[0] -= 1
                if armed[0] == 0:
                    block()
            return self._session.run(*args)

    with tf.Graph().as_default():
        placeholders = [
            v1.placeholder(tf.float32, [None, 3], f"c{n}") for n in range(columns)
        ]
        optimizer = LocalSyncParallelOptimizer(
            v1.train.GradientDescentOptimizer(0.1),
            *(CPUS[:count], placeholders, [], 4, Loss),
        )
        config = v1.ConfigProto(device_count={"CPU": len(CPUS)})
        session = v1.Session(config=config)
        session.run(v1.global_variables_initializer())
    held = Held(session)
    data = [np.ones((8 * count, 3), np.float32) for _ in range(columns)]
    # One call frees, then each column of each tower is one.
    place = 2 + victim[0] * columns + victim[1]
    return (
        lambda timeout_s=LONG_S: optimizer.load_data(
            held, data, [], timeout_s=timeout_s
        ),
        optimizer.use_next,
        lambda: armed.append(place),
    )


def hang_processes(rng: random.Random, context: Any) -> Hang:
    from harness.ranks import Ranks

    count, mode = rng.randint(2, 3), rng.choice(["function", "session"])
    victim, at = rng.randrange(count), rng.randint(4, 20)
    how = rng.choice(["SIGSTOP", "an Event"])
    options = {
        "timeout_s": DEADLINE_S,
        "stall_timeout_s": DEADLINE_S,
        "first_timeout_s": 60.0,
        "start_timeout_s": 60.0,
    }
    where = f"rank {victim} of {count}, {mode}, {how}"
    hang = Hang(where, [f"rank {victim}: has "], what="")
    ranks = Ranks(context, count, is_quiet=True, **options)
    try:
        ranks.joined()
        for rank in ranks.all:
            stops = at if how != "SIGSTOP" and rank.rank == victim else None
            rank.say(f"{__name__}:train_rank", mode, stops)
        if how == "SIGSTOP":
            time.sleep(rng.uniform(1.0, 2.0))
            ranks.all[victim].send(signal.SIGSTOP)
            began = time.monotonic()
        else:
            began = ranks.all[victim].hear()
        for rank in ranks.all:
            if rank.rank != victim:
                found = rank.hear()
                number = found["done"] + 1
                # Ranks of a ring may be one apart: each waits in a sum of its own, of
                # which a session's step has two.
                each = 2 if mode == "session" else 1
                sums = [str(each * found["done"] + n + 1) for n in range(each)]
                what = rf"collective ({'|'.join(sums)})( \(traced last: .*\))?"
                if number == 1:  # It is agreed on first.
                    what += r"|agreement on 'the sum of gradients'"
                after_s = found["at_s"] - began
                hang.told.append(Told(found["report"], after_s, what))
                is_there = how == "SIGSTOP" or number == at
                assert is_there, f"{where}: collective {number}, not {at}"
    finally:
        ranks.end()
    return hang


def train_rank(group: Any, mode: str, stops_at: int | None) -> Any:
    """Sums again and again; returns how far it came, and what the error said.

    One that stops returns when it does, and hangs in what the test calls next.
    """
    from harness import rank_programs

    with _reports_in_a_folder() as folder:
        if mode in rank_programs.SESSIONS:
            run = rank_programs._make_sum_in(rank_programs.SESSIONS[mode], group)
        else:
            run = rank_programs._make_sum(group)
        done = 0
        try:
            while done + 1 != stops_at:
                run()
                done += 1
            return time.monotonic()
        except Exception as error:
            at_s = time.monotonic()
            # In a session the error is TensorFlow's; the report is in its file.
            texts = [path.read_text() for path in Path(folder).iterdir()]
            report = getattr(error, "report", "") or "".join(texts)
            assert report in texts
            return {"done": done, "at_s": at_s, "report": report}


@contextlib.contextmanager
def _reports_in_a_folder() -> Iterator[str]:
    with tempfile.TemporaryDirectory() as folder:
        os.environ["TW_REPORTS"] = folder
        yield folder


def hang_servers(rng: random.Random, context: Any) -> Hang:
    from harness.task_faults import RAISED, SPEC
    from harness.tasks import Tasks

    victim = rng.choice(["worker", "chief", "ps"])
    how = "SIGSTOP" if victim == "ps" else rng.choice(["SIGSTOP", "no call"])
    workers, at = rng.randint(2, 3), rng.randint(3, 30)
    options = {**SPEC["options"], "wait_timeout_s": DEADLINE_S}
    spec = {**SPEC, "aggregate": workers, "total": workers, "options": options}
    lost = 0 if victim == "chief" else rng.randrange(1, workers)
    missing = {
        "worker": rf"replica {lost}: is inside its step of round ",
        "chief": r"replica 0: is ",
        "ps": r"ps 0: \(.*does not answer",
    }[victim]
    where = f"{victim} ({lost} of {workers}) by {how}"
    what = "an answer from the parameter servers to a step"
    hang = Hang(
        where, [missing], what if victim == "ps" else r"the end of round \d+ .*"
    )
    tasks = Tasks(context, workers=workers)
    try:
        tasks.serve()
        tasks.train(spec)
        for worker in tasks.workers:
            worker.say("until", {"factor": 1.0, "step": at})
        for worker in tasks.workers:
            worker.expect("done")
        waiting = [
            w for n, w in enumerate(tasks.workers) if victim == "ps" or n != lost
        ]
        if how == "SIGSTOP":
            for worker in tasks.workers:
                worker.say("until", {"factor": 1.0, "step": 10**6})
            time.sleep(rng.uniform(0.05, 1.0))
            (tasks.servers[0] if victim == "ps" else tasks.workers[lost]).stop()
        else:
            for worker in waiting:
                worker.say("step", {"factor": 1.0})
        began, steps = time.monotonic(), set()
        for worker in waiting:
            word, kind, message, facts = worker.hear(LONG_S)
            hang.told.append(Told(facts.get("report", ""), time.monotonic() - began))
            steps.add(facts.get("step"))
            # A chief that makes no call runs rounds all the same: it is but a replica.
            fitting = RAISED["worker" if how == "no call" else victim]
            assert (word, kind) == ("raised", fitting), f"{where}: {kind}: {message}"
        if victim != "ps":
            (step,) = steps
            hang.what = rf"the end of round \d+ \(step {step}\)"
            assert how != "no call" or step == at, f"{where}: step {step}, not {at}"
    finally:
        tasks.kill()
    return hang


IN_ONE_PROCESS = {
    "hangs: collective": hang_collective,
    "hangs: runner": hang_runner,
    "hangs: load": hang_load,
}
OF_TASKS = {"hangs: servers": hang_servers, "hangs: processes": hang_processes}
DRILLS = {**OF_TASKS, **IN_ONE_PROCESS}


def run_drill(
    context: Any, name: str, folder: Path | None = None, *, seed: int | None = None
) -> Any:
    """Runs one trial, of which no process is left."""
    from harness.task_faults import Outcome

    rng = random.Random(seed)
    try:
        if name in OF_TASKS:
            hang = OF_TASKS[name](rng, context)
        else:
            hang = _in_a_process(context, name, rng)
        failure, where = hang.fault(), hang.where
        after_s = [told.after_s - hang.deadline_s for told in hang.told]
    except (AssertionError, TimeoutError, EOFError) as error:
        failure, where, after_s = f"{type(error).__name__}: {error}", "", []
    return Outcome(failure, max(after_s, default=None), remarks=where)


def _in_a_process(context: Any, name: str, rng: random.Random) -> Hang:
    peer = Peer(context, name, _run_child, name, rng)
    try:
        found: Hang = peer.hear(LONG_S)
        return found
    finally:
        peer.kill()


def _run_child(pipe: Any, name: str, rng: random.Random) -> None:
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
    with _reports_in_a_folder() as folder:
        hang = IN_ONE_PROCESS[name](rng)
        written = [path.read_text() for path in Path(folder).iterdir()]
    if len(written) != 1:
        hang.where += f": {len(written)} files were written"
        hang.told.append(Told("", 0.0))
    pipe.send(hang)


def _since(began: float) -> float:
    return time.monotonic() - began
