"""The messages of a step of synchronous replicas, and their cost to the server.

Workers are threads, parameter servers are processes. Every call between two tasks is
counted on the wire and compared with the formula; the processor time of the run table's
server is read before and after the same steps. The part of the chief's round is
measured separately, with the tickets of many replicas already waiting.
"""

import itertools
import os
import statistics
import sys
import time
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from racing import save

OPTIONS = {
    "workers": [2, 4, 8, 16],
    "servers": [1, 2, 3],
    "tickets": [10, 100, 300, 1000],
    "timed_steps": 200,
}

sys.path.insert(0, str(Path(__file__).parents[3] / "packages" / "tw-syncrep" / "tests"))
STEPS = 20
LIMIT_S = 3600
_TICKS_PER_S = os.sysconf("SC_CLK_TCK")


def main(options: Any, _: object) -> None:
    """Counts and times, and writes ``out/bench/calls.json``."""
    save(
        "calls",
        calls=count_all(options.workers, options.servers, options.timed_steps),
        rounds=time_rounds(options.tickets, options.servers),
    )


def count_all(
    workers: Sequence[int], servers: Sequence[int], timed_steps: int
) -> list[dict[str, Any]]:
    """Counts the calls of steps, pulled and not, and prints a line for each."""
    if not workers or not servers:
        return []
    from harness.processes import make_template
    from syncrep_counted import CountedCluster, Work

    counted = CountedCluster(
        make_template(), ps=max(servers), workers=max(workers), limit_s=LIMIT_S
    )
    print("W  S  pulled    calls  formula  at table  formula    KiB       ms  us/call")
    try:
        rows = []
        for is_pulled, ps, count in itertools.product((True, False), servers, workers):
            work = Work(count, ps, is_pulled=is_pulled)
            row = count_one(counted, work, timed_steps)
            print(
                f"{count:<3}{ps:<3}{is_pulled!s:<6}{row['calls']:>9}{row['formula']:>9}"
                f"{row['at_table']:>10}{row['formula_at_table']:>9}"
                f"{row['bytes_at_table'] / 1024:>7.1f}{row['table_s'] * 1e3:>9.2f}"
                f"{row['table_s'] / row['at_table'] * 1e6:>9.0f}",
                flush=True,
            )
            rows.append(row)
    finally:
        counted.close()
    return rows


def count_one(counted: Any, work: Any, timed_steps: int) -> dict[str, Any]:
    """Returns the figures of one step of a work."""
    from syncrep_counted import CountedRun, expected_at_table, expected_calls

    run = CountedRun(counted, work)
    calls = run.calls_of_a_step(STEPS)
    table = run.table_server
    server = counted.servers[int(table.split()[1])].process
    bytes_before, cpu_before = at(table, counted.counter.bytes()), cpu_s(server.pid)
    run.run(timed_steps)
    cpu = cpu_s(server.pid) - cpu_before
    sent = at(table, counted.counter.bytes()) - bytes_before
    run.close()
    return {
        "workers": work.workers,
        "servers": work.servers,
        "is_pulled": work.is_pulled,
        "calls": sum(calls.values()),
        "formula": sum(expected_calls(work).values()),
        "at_table": at(table, calls),
        "formula_at_table": expected_at_table(work),
        "bytes_at_table": sent / timed_steps,
        "table_s": cpu / timed_steps,
    }


def at(task: str, counts: Any) -> int:
    """Adds what begins or ends at a task."""
    return int(sum(count for key, count in counts.items() if task in key))


def cpu_s(pid: int) -> float:
    """Returns the processor time that a process has taken."""
    after_name = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(after_name[11]) + int(after_name[12])) / _TICKS_PER_S


def time_rounds(
    tickets: Sequence[int], servers: Sequence[int], times: int = 5
) -> list[dict[str, Any]]:
    """Takes the processor time of the chief's round, and prints a line each."""
    if not tickets:
        return []
    import tw_launch

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", tw_launch.ExposedServerWarning)
        local = tw_launch.start_local(ps=max(servers), workers=1)
    print("tickets  S   a round  at least     ops  reads     rows")
    rows = []
    for ps, count in itertools.product(servers, tickets):
        round_ = time_round(local, ps, count, times)
        rows.append({"tickets": count, "servers": ps, **round_})
        print(
            f"{count:<9}{ps:<3}{round_['median_s'] * 1e3:>7.2f} ms"
            f"{round_['least_s'] * 1e3:>7.2f} ms{round_['ops']:>8}"
            f"{round_['reads']:>7}{round_['rows']:>9}",
            flush=True,
        )
    return rows


def time_round(local: Any, ps: int, replicas: int, times: int) -> dict[str, Any]:
    """Returns the processor time of rounds whose tickets are there, and their ops."""
    import tensorflow as tf

    import tw_launch
    import tw_syncrep
    from tw_syncrep import SyncReplicasOptimizer

    v1 = tf.compat.v1
    addresses = {**local.addresses, "ps": local.addresses["ps"][:ps]}
    task = tw_launch.TaskConfig(addresses, "worker", 0)
    with tf.Graph().as_default() as graph, graph.container(f"r{ps}-{replicas}"):
        with v1.device(tw_syncrep.device_setter(task)):
            made = [v1.get_variable(f"v{n}", [8]) for n in range(2 * ps)]
            step = v1.train.get_or_create_global_step()
            grads = [tf.ones([8]) for _ in made]
            optimizer = SyncReplicasOptimizer(
                v1.train.GradientDescentOptimizer(0.1), replicas, replica_index=0
            )
            optimizer.apply_gradients(zip(grads, made, strict=True), step)
        found = optimizer.sync_graph
        ticket = v1.placeholder(tf.int64, [6])
        by_index = dict(enumerate(grads))
        pushed = [
            queue.enqueue(*queue.receive(ticket, by_index))
            for queue in (*found.state.gradient_queues, found.state.arrivals)
        ]
        one = int(np.float64(1).view(np.int64))  # what the gradients weigh
        init = [v1.global_variables_initializer(), v1.local_variables_initializer()]
        with v1.Session(local.target("worker", 0)) as session:
            session.run(init)
            session.run(found.ops.open)

            def bring_tickets() -> None:
                # The round moves on; this replica has not taken part in it.
                number = optimizer.status(session).round_number
                incarnation = session.run(found.position)[1]
                for replica in range(replicas):
                    about = [replica, number, incarnation, 1, -1, one]
                    session.run(pushed, {ticket: about})

            def run_round() -> float:
                bring_tickets()
                # Server and session are in this process; waiting does not count.
                began = time.process_time()
                session.run(found.round_op)
                return time.process_time() - began

            run_round()
            seconds = [run_round() for _ in range(times)]
            bring_tickets()
            done = trace(session, found.round_op)
    return {"median_s": statistics.median(seconds), "least_s": min(seconds), **done}


def trace(session: Any, op: Any) -> dict[str, int]:
    """Runs an op; counts the ops on servers, reads of the table, and their rows."""
    import tensorflow as tf

    options = tf.compat.v1.RunOptions(trace_level=tf.compat.v1.RunOptions.FULL_TRACE)
    seen = tf.compat.v1.RunMetadata()
    session.run(op, options=options, run_metadata=seen)
    nodes = [
        node
        for device in seen.step_stats.dev_stats
        if "/job:ps/" in device.device
        for node in device.node_stats
    ]
    reads = [n for n in nodes if " = LookupTableFindV2(" in n.timeline_label]
    rows = [n.output[0].tensor_description.shape.dim[0].size for n in reads]
    return {"ops": len(nodes), "reads": len(reads), "rows": sum(rows)}
