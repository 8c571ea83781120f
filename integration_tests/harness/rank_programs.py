"""What ranks do in tests: functions of a group, called by name."""

import atexit
import ctypes
import importlib
import json
import logging.handlers
import os
import signal
import socket
import threading
import time
import traceback
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import tensorflow as tf

import tw_ranks
from harness import links
from harness.ports import find_free_ports
from tw_core.ranks import RankGroup
from tw_ranks import _tf_compat
from tw_ranks._endpoint import reports
from tw_ranks._engines.choice import EngineFacts
from tw_ranks._joining import joining
from tw_ranks._side_channel import _member
from tw_ranks.internal import endpoint_of

_counter: Any = None
_must_fail = threading.Event()  # An operation, while others of the step go on.
v1 = tf.compat.v1
_PROGRAMS = Path(__file__).parents[1] / "programs"


def run_rank(pipe: Any, options: dict[str, Any]) -> None:
    """Joins, then calls what the test asks for until the pipe closes.

    Args:
      pipe: to the test.
      options: of ``join``, and what is out of order with this rank: ``alone`` and
        ``tf_config`` (cluster) instead of an address, ``has_gpus``, ``mpi`` (its
        variables), ``starts_early`` (ranks),
        ``refused`` (by the ranks to which a rank cannot connect, by rank),
        ``v1``, ``towers``, ``machine`` (number), ``network`` (process in whose
        namespace it is, None for a new one; its address; all addresses),
        ``starts_in_s`` (how long TensorFlow's runtime takes to start, by rank),
        ``stops_in_join`` (ranks), ``is_quiet``, ``environment`` (variables by rank),
        ``resolves_in_s`` (until names are known).
    """
    joining = _prepare(dict(options), pipe)
    group = answer(pipe, lambda: tw_ranks.join(**joining), tells=False)
    while group is not None:
        try:
            name, *arguments = pipe.recv()
        except EOFError:
            break
        answer(pipe, partial(_find(name), group, *arguments))


def _count_calls_from() -> None:
    """Has this rank reach the others' servers through proxies that count."""
    from harness.calls import CallCounter

    global _counter
    counter = _counter = CallCounter()
    join_cluster = _tf_compat.join_cluster

    def join_through_proxies(addresses: list[str], own: int, **options: Any) -> None:
        reached = [
            address if other == own else counter.between(str(own), str(other), address)
            for other, address in enumerate(addresses)
        ]
        join_cluster(reached, own, **options)

    _tf_compat.join_cluster = join_through_proxies


def _be_refused_by(others: list[int]) -> None:
    """Has others' servers refuse this rank, as nothing listens where it connects."""
    closed, join_cluster = f"127.0.0.1:{find_free_ports(1)[0]}", _tf_compat.join_cluster
    probe = _member.probe

    def join_refused(addresses: list[str], own: int, **options: Any) -> None:
        reached = [closed if r in others else one for r, one in enumerate(addresses)]
        join_cluster(reached, own, **options)

    def probe_refused(addresses: dict[int, str]) -> Any:
        return probe({r: closed if r in others else a for r, a in addresses.items()})

    _tf_compat.join_cluster, _member.probe = join_refused, probe_refused


def _find(name: str) -> Any:
    """Returns a function of this module, or "module:function" of a program or test."""
    module, _, function = name.rpartition(":")
    if (_PROGRAMS / f"{module}.py").exists():
        module = f"programs.{module}"
    return getattr(importlib.import_module(module or __name__), function)


def _prepare(options: dict[str, Any], pipe: Any) -> dict[str, Any]:
    if (mpi := options.pop("mpi", None)) is not None:
        os.environ.update(mpi)
        options["engine"] = "mpi"
    if options.pop("is_quiet", False):
        os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
    if (network := options.pop("network", None)) is not None:
        _enter(pipe, *network)
    if (machine := options.pop("machine", None)) is not None:
        os.environ["TW_NODE_RANK"] = str(machine)
    cpu = tf.config.list_physical_devices("CPU")[0]
    towers = [tf.config.LogicalDeviceConfiguration()] * options.pop("towers", 1)
    tf.config.set_logical_device_configuration(cpu, towers)
    if options.pop("has_gpus", False):  # As far as the choice of an engine goes.
        joining._find_facts = lambda seat: EngineFacts(seat.size, "", False, 1, True)
    if options.pop("counted", False):
        _count_calls_from()
    if options.pop("v1", False):
        v1.disable_v2_behavior()
    rank = options["rank"]
    if others := options.pop("refused", {}).get(rank):
        _be_refused_by(others)
    os.environ.update(options.pop("environment", {}).get(rank, {}))
    if unknown_s := options.pop("resolves_in_s", 0.0):
        _forget_names(unknown_s)
    if rank in options.pop("starts_early", ()):
        tf.constant(1.0)
    wait_s = options.pop("starts_in_s", {}).get(rank, 0.0)
    if rank in options.pop("stops_in_join", ()):
        _hold_up("join_cluster", lambda: os.kill(os.getpid(), signal.SIGSTOP))
    elif wait_s:
        _hold_up("start_runtime", lambda: time.sleep(wait_s))
    os.environ.pop("TF_CONFIG", None)
    alone, cluster = options.pop("alone", False), options.pop("tf_config", None)
    if cluster is not None:
        tasks = [(job, n) for job in cluster for n in range(len(cluster[job]))]
        task = dict(zip(("type", "index"), tasks[rank], strict=True))
        os.environ["TF_CONFIG"] = json.dumps({"cluster": cluster, "task": task})
    options["rank"] = rank
    if alone or cluster is not None:
        for name in ("coordinator", "rank", "size"):
            del options[name]
    return options


def _forget_names(for_s: float) -> None:
    """Has no name be known for a while, as of a pod that has just been made."""
    end_s, getaddrinfo = time.monotonic() + for_s, socket.getaddrinfo

    def find(*arguments: Any, **options: Any) -> Any:
        if time.monotonic() < end_s:
            raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")
        return getaddrinfo(*arguments, **options)

    socket.getaddrinfo = find


def _hold_up(name: str, wait: Any) -> None:
    """Has something happen before the runtime joins the cluster, or starts."""
    function = getattr(_tf_compat, name)

    def held_up(*arguments: Any, **options: Any) -> None:
        wait()
        function(*arguments, **options)

    setattr(_tf_compat, name, held_up)


def _enter(pipe: Any, leader: int | None, address: str, every: list[str]) -> None:
    """Goes into a network namespace: another process's, or one of its own."""
    if leader is None:
        links.join_network(pipe, address, every)
    else:
        links.share_network(leader)
    pipe.send(("done", None))


def answer(pipe: Any, function: Any, *, tells: bool = True) -> Any:
    """Tells the test what a function returned or raised."""
    try:
        result = function()
    except Exception as error:
        at_s = time.monotonic()
        missing = getattr(error, "missing", None)
        kind = type(error).__name__
        told = (kind, str(error), missing and list(missing), at_s)
        pipe.send(("raised", (*told, getattr(error, "report", ""))))
        traceback.print_exc()
        return None
    pipe.send(("done", result if tells else None))
    return result


def place(group: Any) -> dict[str, int]:
    """Tells a rank's numbers."""
    names = ("rank", "size", "local_rank", "local_size", "node_rank", "num_nodes")
    return {name: getattr(group, name) for name in names}


def _server() -> str:
    """Returns the address of a server of TensorFlow's in this process."""
    if not _servers:
        _servers.append(tf.distribute.Server.create_local_server())
    return str(_servers[0].target)


_servers: list[Any] = []
SESSIONS = {
    "session": v1.Session,
    "server": lambda: v1.Session(_server()),
    "monitored": lambda: v1.train.MonitoredTrainingSession(_server()),
}


def reduce(
    group: Any,
    mode: str,
    towers: list[list[Any]],
    options: dict[str, Any],
    times: int = 1,
) -> list[list[Any]]:
    """Sums, or averages where ``mean`` is set, what is given; ``times`` steps of it.

    With "ranks" as ``mean`` it is by ``mean_of_ranks``.
    """
    options = dict(options)
    combine = {
        False: tw_ranks.sum_across,
        True: tw_ranks.mean_across,
        "ranks": tw_ranks.mean_of_ranks,
    }[options.pop("mean", False)]
    hides = options.pop("hides_shapes", False)

    def build(leaves: list[tf.Tensor]) -> list[list[Any]]:
        own = iter(leaves)
        grads = [[_like(item, own) for item in tower] for tower in towers]
        return combine(grads, group=group, **options)

    leaves = [leaf for tower in towers for item in tower for leaf in _leaves(item)]
    results = None
    if mode in SESSIONS:
        with tf.Graph().as_default():
            fed = [
                v1.placeholder(leaf.dtype, [None] * leaf.ndim if hides else leaf.shape)
                for leaf in leaves
            ]
            built = build(fed)
            with SESSIONS[mode]() as session:
                for _ in range(times):
                    results = session.run(built, dict(zip(fed, leaves, strict=True)))
        return _plain(results)
    step = build
    if mode == "function":
        signature = [
            tf.TensorSpec([None] * leaf.ndim if hides else leaf.shape, leaf.dtype)
            for leaf in leaves
        ]
        step = tf.function(lambda *args: build(list(args)), input_signature=signature)
        step = (lambda traced: lambda given: traced(*given))(step)
    for _ in range(times):
        results = group.bounded(step)([tf.constant(leaf) for leaf in leaves])
    return _plain(results)


def reduce_lookups(group: Any, mode: str, dtype: str) -> list[list[Any]]:
    """Averages gradients of a table with a row per word, and one per distinct word.

    The third has both. Rank r has the words r, r, r + 1, and a 1.0 for each.
    """

    def build() -> list[list[Any]]:
        words = tf.constant([0, 0, 1]) + group.rank
        rows, _ = tf.unique(words)
        grads = []
        for own in (words, rows, tf.concat([rows, words], 0)):
            values = tf.ones([tf.size(own), 2], dtype)
            grads.append(tf.IndexedSlices(values, own, tf.constant([5, 2])))
        [means] = tw_ranks.mean_across([grads], group=group)
        return [[own.values, own.indices] for own in means]

    if mode == "session":
        with tf.Graph().as_default():
            built = build()
            with v1.Session() as session:
                return session.run(built)
    step = tf.function(build, autograph=False)
    return tf.nest.map_structure(lambda own: own.numpy(), group.bounded(step)())


def _leaves(item: Any) -> list[np.ndarray]:
    return list(item[:2]) if isinstance(item, tuple) else [item]


def _like(item: Any, own: Any) -> Any:
    if isinstance(item, tuple):
        return tf.IndexedSlices(next(own), next(own), tf.constant(item[2]))
    return next(own)


def _plain(results: Any) -> list[list[Any]]:
    return [[_numpy(value) for value in tower] for tower in results]


def _numpy(value: Any) -> Any:
    if hasattr(value, "indices"):
        return np.asarray(value.values), np.asarray(value.indices)
    return np.asarray(value)


def exchange_variables(
    group: Any, mode: str, arrays: list[np.ndarray], root: int
) -> list[np.ndarray]:
    """Broadcasts variables that have these values here."""
    if mode == "keras":
        import keras

        made = [keras.Variable(a, dtype=a.dtype.name) for a in arrays]
        tw_ranks.broadcast_variables(made, group=group, root=root)
        return [np.asarray(variable) for variable in made]
    if mode == "eager":
        made = [tf.Variable(array, name="v") for array in arrays]
        tw_ranks.broadcast_variables(made, group=group, root=root)
        return [variable.numpy() for variable in made]
    with tf.Graph().as_default(), v1.Session() as session:
        made = [
            v1.get_variable(f"v{n}", initializer=a, use_resource=mode == "resource")
            for n, a in enumerate(arrays)
        ]
        op = tw_ranks.broadcast_variables(made, group=group, root=root)
        session.run(v1.global_variables_initializer())
        session.run(op)
        return list(session.run(made))


def exchange_renamed(group: Any, mode: str, names: list[str]) -> list[list[float]]:
    """Broadcasts, sums and compares variables of such names, twice.

    Returns the variables' values, and the sums of this rank's number.
    """
    value = 1.0 + group.rank

    def exchange(made: list[Any]) -> tuple[Any, list[Any]]:
        told = [variable.name for variable in made]
        done = tw_ranks.broadcast_variables(made, group=group)
        with tf.control_dependencies([] if done is None else [done]):
            own = [tf.constant([value]) for _ in made]
            [sums] = tw_ranks.sum_across([own], group=group, names=told)
            same = tw_ranks.check_same(made, group=group)
        return tf.concat(sums, 0), [] if same is None else [same]

    if mode == "session":
        with tf.Graph().as_default(), v1.Session() as session:
            made = [v1.get_variable(name, initializer=value) for name in names]
            steps = [exchange(made) for _ in range(2)]
            session.run(v1.global_variables_initializer())
            sums = [session.run(step)[0].tolist() for step in steps]
            return [session.run(made), *sums]
    made = [tf.Variable(value, name=name) for name in names]
    run = partial(exchange, made)
    if mode == "function":
        run = group.bounded(tf.function(run))
    sums = [run()[0].numpy().tolist() for _ in range(2)]
    return [[float(variable) for variable in made], *sums]


def act_as_a_rank_group(group: Any, told: bool) -> tuple[list[Any], list[float], str]:
    """Uses what tw_core.ranks promises of a group; rank 0 tells, and does not wait."""
    rows = tf.IndexedSlices(tf.ones([1, 2]), tf.constant([group.rank]), [4, 2])
    own = [tf.fill([2], float(group.rank)), rows, tf.constant([1], tf.int64)]
    dense, sparse, whole = group.sum(own, names=["a", "b", "c"])
    variable = tf.Variable(10.0 + group.rank)
    group.broadcast([variable])
    if group.rank == 0:
        group.tell("done")
        group.tell("done again")
    elif told:
        group.wait_for("done again")
        group.wait_for("done")
    sums = [dense.numpy().tolist(), sorted(sparse.indices.numpy()), int(whole[0])]
    kind = "is one" if isinstance(group, RankGroup) else "is none"
    return sums, [float(variable.numpy())], kind


def exchange_parts(
    group: Any, lengths: list[int], dtype: str, in_function: bool
) -> tuple[Any, list[Any], list[tuple[str, int]]]:
    """Adds parts where they belong, doubles them, and gives them to all.

    Returns this rank's sum, what all have, and the collectives with their bytes.
    """

    def step() -> list[Any]:
        parts = [
            tf.range(n, dtype=tf.float32) % 50 + 10.0 * r + 100.0 * group.rank
            for r, n in enumerate(lengths)
        ]
        parts = [tf.cast(part, dtype) for part in parts]
        own = group.reduce_scatter(parts, name="sums")
        double = tf.cast(2 * own, tf.float16 if dtype == "float32" else dtype)
        return [own, *group.all_gather(double, lengths, name="doubles")]

    sent: list[tuple[str, int]] = []
    run = step
    if in_function:
        run = tf.function(step, autograph=False)
        for op in run.get_concrete_function().graph.get_operations():
            if op.type.startswith("Collective"):
                own = op.inputs[0]
                sent.append((op.type, own.shape.num_elements() * own.dtype.size))
    for _ in range(2):
        own, *every = [value.numpy() for value in run()]
    return own, every, sent


def exchange_rows(
    group: Any, width: int, dtype: str, in_function: bool, missing: int = 0
) -> tuple[Any, Any]:
    """Sends each rank other numbers; returns those that came, and all ranks' first."""

    def step() -> list[Any]:
        places = 10 * tf.range(group.size - missing)[:, tf.newaxis] + tf.range(width)
        rows = tf.cast(places + 1000 * (1 + group.rank), dtype)
        got = group.all_to_all(rows, name="rows")
        return [got, *group.all_gather(got[0], [width] * group.size, name="firsts")]

    run = tf.function(step, autograph=False) if in_function else step
    for _ in range(2):
        got, *firsts = [value.numpy() for value in run()]
    return got, firsts


def compare_variables(group: Any, mode: str, arrays: list[np.ndarray]) -> None:
    """Checks that variables are the same on all ranks, twice."""
    if mode == "session":
        with tf.Graph().as_default(), v1.Session() as session:
            made = [
                v1.get_variable(f"v{n}", initializer=a) for n, a in enumerate(arrays)
            ]
            op = tw_ranks.check_same(made, group=group)
            session.run(v1.global_variables_initializer())
            for _ in range(2):
                session.run(op)
        return
    made = [tf.Variable(array, name=f"v{n}") for n, array in enumerate(arrays)]
    check = partial(tw_ranks.check_same, made, group=group)
    if mode == "function":
        check = group.bounded(tf.function(check))
    for _ in range(2):
        check()


def train_unevenly(
    group: Any, rows: list[list[float]], mode: str
) -> tuple[list[float], int]:
    """Trains on batches of its own, as many as given, then finishes."""
    weight = tf.Variable(0.0)

    @group.bounded
    @tf.function
    def step(batch: tf.Tensor) -> None:
        gradient = tf.reduce_mean(weight - batch)
        count = tf.cast(tf.size(batch), tf.float32)
        [[mean]] = tw_ranks.mean_across([[gradient]], group=group, weight=count)
        weight.assign_sub(0.5 * mean)

    values = []
    batches = [tf.constant(own) for own in rows]
    if mode == "first end":
        batches = tw_ranks.until_first_end(batches, group=group)
    for batch in batches:
        step(batch)
        values.append(float(weight))
    taken = tw_ranks.finish(group) if mode == "finish" else 0
    return values, taken


def reduce_unevenly(
    group: Any, batches: list[tuple[list[float], int]], mode: str, wire: str | None
) -> tuple[list[list[Any]], int]:
    """Reduces gradients of all kinds in two exchanges per batch, then finishes.

    A batch is rows, and the length of a gradient whose shape nobody knows before.
    """

    def build(rows: tf.Tensor, length: tf.Tensor) -> list[Any]:
        total = tf.reduce_sum(rows)
        sparse = tf.IndexedSlices(rows[:, None], tf.cast(rows, tf.int64))
        grads = [tf.fill([length], total), sparse, total]
        count = tf.size(rows)
        [means] = tw_ranks.mean_across(
            [grads], group=group, weight=tf.cast(count, tf.float32), wire_dtype=wire
        )
        [[everything]] = tw_ranks.sum_across([[count]], group=group)
        return [means[0], means[1].values, means[1].indices, means[2], everything]

    results = []
    if mode == "session" and batches:
        with tf.Graph().as_default(), v1.Session() as session:
            fed = [v1.placeholder(tf.float32, [None]), v1.placeholder(tf.int32, [])]
            built = build(*fed)
            for batch in batches:
                results.append(session.run(built, dict(zip(fed, batch, strict=True))))
    elif mode != "session":
        signature = [tf.TensorSpec([None], tf.float32), tf.TensorSpec([], tf.int32)]
        step = build if mode == "eager" else tf.function(build, signature)
        for rows, length in batches:
            given = tf.constant(rows), tf.constant(length)
            results.append([got.numpy() for got in group.bounded(step)(*given)])
    return results, tw_ranks.finish(group)


def broadcast_or_finish(group: Any, mode: str, is_done: bool) -> None:
    """Broadcasts a variable, or finishes meanwhile; all know it, unless it is new."""
    if mode == "session":
        with tf.Graph().as_default():
            value = v1.get_variable("value", [], initializer=v1.zeros_initializer())
            op = tw_ranks.broadcast_variables([value], group=group)
            session = v1.Session()
            session.run(v1.global_variables_initializer())
        run = partial(session.run, op)
    else:
        value = tf.Variable(0.0)
        run = partial(tw_ranks.broadcast_variables, [value], group=group)
        if mode == "function":
            run = group.bounded(tf.function(run))
    if mode != "new":
        run()
    if is_done:
        tw_ranks.finish(group)
    else:
        run()


def step_until(group: Any, steps: int | None = None, mode: str = "function") -> int:
    """Sums again and again."""
    if mode in SESSIONS:
        run = _make_sum_in(SESSIONS[mode], group)
    else:
        run = _make_sum(group, 3 if mode == "buckets" else 1)
    done = total = 0
    while steps is None or done < steps:
        try:
            total = run()
        except tf.errors.InvalidArgumentError:
            if not _must_fail.is_set():
                raise
            end_program(group, "raise RuntimeError('as it was told')")
        done += 1
    return total


def _make_sum(group: Any, count: int = 1) -> Any:
    """Makes a sum of gradients, each of which is late in another order in each rank."""
    value, ones = tf.Variable(0.0), tf.Variable(tf.ones([4096]))

    def wait(grad: np.ndarray, late: np.ndarray) -> np.ndarray:
        time.sleep(0.02 * late)
        if late == 1 and _must_fail.is_set():
            raise ValueError("as it was told")
        return grad

    def late(n: int) -> tf.Tensor:
        # Of a variable: a constant's would be computed once, before the first step.
        given = [ones, tf.constant((n + group.rank) % count)]
        waited = tf.numpy_function(wait, given, tf.float32, stateful=False)
        return tf.ensure_shape(waited, [4096])

    @group.bounded
    @tf.function
    def step() -> None:
        grads = [late(n) if count > 1 else tf.ones([4096]) for n in range(count)]
        [totals] = tw_ranks.sum_across([grads], group=group)
        value.assign_add(tf.add_n(totals)[0] / count)

    def run() -> int:
        step()
        return int(value)

    return run


def _make_sum_in(make_session: Any, group: Any) -> Any:
    with tf.Graph().as_default():
        value = v1.get_variable("value", [], initializer=v1.zeros_initializer())
        [[total]] = tw_ranks.sum_across([[tf.ones([4096])]], group=group)
        [[size]] = tw_ranks.sum_across([[tf.ones([])]], group=group)  # At once.
        op = v1.assign_add(value, total[0] * size / group.size)
        initialize = v1.global_variables_initializer()
        session = make_session()
        if isinstance(session, v1.Session):
            session.run(initialize)
    return lambda: int(session.run(op))


def end_program(group: Any, source: str) -> None:
    """Runs a program's source, and ends this process as the interpreter does then."""
    status = ctypes.pythonapi.PyRun_SimpleString(source.encode())
    ctypes.pythonapi.Py_Exit(1 if status else 0)


def be_busy(how: str, busy_s: float, told: list[logging.LogRecord]) -> None:
    """Keeps the main thread busy until all are told; "held": without others beside."""
    if how == "held":
        ctypes.PyDLL(None).usleep(int(1e6 * busy_s))
        return
    end_s, is_told = time.monotonic() + busy_s, False
    while time.monotonic() < end_s:
        if not is_told and any("be_busy" in one.getMessage() for one in list(told)):
            # Others read the warning later than rank 0, which sends it.
            end_s, is_told = time.monotonic() + 2.0, True


def heed_signal(group: Any, fault: str, mode: str, busy_s: float) -> None:
    """Has SIGUSR1 end this program by an error, break its beats, or keep it busy."""

    def handle(*_: object) -> None:
        if fault == "failed" and mode == "buckets":
            _must_fail.set()
        elif fault == "failed":
            end_program(group, "raise RuntimeError('as it was told')")
        elif fault == "broken":
            member = endpoint_of(group).reports.member
            member._read_report = member.introductions.index
        else:
            time.sleep(busy_s)

    signal.signal(signal.SIGUSR1, handle)


def finish_beside_busy(group: Any, steps: int, how: str, busy_s: float) -> list[str]:
    """Trains, is busy before the last step, finishes; returns what it was warned of."""
    warnings = logging.handlers.BufferingHandler(100)
    logger = logging.getLogger("tw_ranks")
    logger.addHandler(warnings)

    @group.bounded
    @tf.function
    def step() -> tf.Tensor:
        one = tf.ones([])
        [[mean]] = tw_ranks.mean_across([[one]], group=group, weight=one)
        return mean

    for number in range(steps):
        if number == steps - 1:
            be_busy(how, busy_s, warnings.buffer)
        assert float(step()) == 1.0
    tw_ranks.finish(group)
    logger.removeHandler(warnings)
    return [record.getMessage() for record in warnings.buffer]


def trace_for(group: Any, before_s: float, after_s: float) -> int:
    """Sums once; tracing takes a while, before it comes to the sum and after that."""

    @group.bounded
    @tf.function
    def step() -> tf.Tensor:
        time.sleep(before_s)
        [[total]] = tw_ranks.sum_across([[tf.ones([4])]], group=group)
        time.sleep(after_s)
        return total[0]

    return int(step())


def build_unlike(group: Any, specs: list[tuple[str, str, list[int]]]) -> None:
    """Sums zeros of given names, dtypes and shapes."""
    grads = [tf.zeros(shape, dtype) for _, dtype, shape in specs]
    names = [name for name, _, _ in specs]
    tw_ranks.sum_across([grads], group=group, names=names)


def join_again(group: Any) -> str:
    """Tries to join a second time."""
    try:
        tw_ranks.join("127.0.0.1:1", rank=0, size=2)
    except RuntimeError as error:
        return str(error)
    return ""


def set_up(group: Any, mode: str, changes: bool, wait_s: float) -> dict[str, Any]:
    """Sums on two logical CPUs, after settings where they come after ``join``."""
    if mode == "session":
        v1.disable_v2_behavior()
    if changes:
        cpus = tf.config.list_physical_devices("CPU")
        two = [tf.config.LogicalDeviceConfiguration()] * 2
        tf.config.set_logical_device_configuration(cpus[0], two)
        tf.config.set_visible_devices(cpus, "CPU")
        tf.config.threading.set_inter_op_parallelism_threads(3)
        tf.config.threading.set_intra_op_parallelism_threads(1)
    time.sleep(wait_s)
    for place in ("/cpu:0", "/cpu:1"):
        with tf.device(place):
            [[total]] = reduce(group, mode, [[np.ones([2], np.float32)]], {})
    devices = tf.config.list_logical_devices("CPU")
    return {"total": total.tolist(), "devices": [device.name for device in devices]}


def sum_in_the_global_graph(group: Any) -> list[float]:
    """Sums twice in a session of the graph that programs of TensorFlow 1 build in."""
    grads = [[[tf.constant([n + 1.0])]] for n in range(2)]
    sums = [tw_ranks.sum_across(own, group=group)[0][0] for own in grads]
    with v1.Session() as session:
        return [float(total[0]) for total in session.run(sums)]


def place_in_child(group: Any) -> str:
    """Tells where a forked child's ops run, which is no rank."""
    read, write = os.pipe()
    if (child := os.fork()) == 0:
        signal.alarm(30)
        os.write(write, tf.constant(1.0).device.encode())
        os._exit(0)
    os.close(write)
    os.waitpid(child, 0)
    return os.read(read, 1000).decode()


def leave(group: Any, timeout_s: float = 5.0) -> None:
    """Leaves the group."""
    group.leave(timeout_s=timeout_s)


def fork(group: Any) -> None:
    """Forks a child that exits as Python does, and one that lives for half a minute."""
    if (child := os.fork()) == 0:
        atexit._run_exitfuncs()
        os._exit(0)
    os.waitpid(child, 0)
    if os.fork() == 0:
        signal.alarm(30)
        while True:
            signal.pause()


def reduce_until_interrupted(group: Any, mode: str) -> float:
    """Sums again and again; tells when Ctrl-C was heard (``time.monotonic``)."""
    try:
        try:
            reduce(group, mode, [[np.ones(4, np.float32)]], {}, 10**9)
        except tf.errors.UnknownError:  # A session's may be milliseconds ahead of it.
            time.sleep(1.0 if mode in SESSIONS else 0.0)
            raise
    except KeyboardInterrupt:
        return time.monotonic()
    raise AssertionError("nobody pressed Ctrl-C")


def fail_outside_of_collectives(group: Any) -> list[str]:
    """Tells of errors with which no collective has to do; a wait for a rank hangs."""
    reports._VERDICT_S = 600.0
    batches = iter(tf.data.Dataset.range(1))

    @group.bounded
    @tf.function
    def step() -> None:
        tw_ranks.sum_across([[tf.ones([4]) * float(next(batches))]], group=group)

    step()
    try:
        step()
    except tf.errors.OutOfRangeError as error:
        own = tf.errors.UnavailableError(None, None, "a server of the user's is away")
        return [type(error).__name__, group.explain(own.message)]
    return []


def count_calls(
    group: Any, floats: int, steps: int, options: dict[str, Any]
) -> tuple[dict[str, float], float, set[int]]:
    """Tells this rank's calls of others per step, by method, and bytes received.

    Last are the ranks that it has called.
    """

    @tf.function
    def step() -> None:
        tw_ranks.sum_across([[tf.ones([floats])]], group=group, **options)

    step()
    step()  # The first asks for devices and groups.
    calls, sizes = _counter.settled(), sum(_counter.bytes().values())
    for _ in range(steps):
        step()
    made = _counter.settled() - calls
    received = (sum(_counter.bytes().values()) - sizes) / steps
    by_method: dict[str, float] = {}
    for (_, _, path), count in made.items():
        method = path.rpartition("/")[2]
        by_method[method] = by_method.get(method, 0) + count / steps
    return by_method, received, {int(target) for _, target, _ in made}


def reduce_new_shapes(group: Any, count: int) -> tuple[list[float], int]:
    """Broadcasts eagerly, each time another shape; tells the last sum."""
    total = 0.0
    for n in range(1, count):
        tw_ranks.broadcast([tf.zeros([n])], group=group)
    [[total]] = tw_ranks.sum_across([[tf.ones([])]], group=group)
    return [float(total)], count
