"""What ranks do in tests of ``tw_horovod``: functions, called by name."""

import copy
import functools
import json
import os
import time
import warnings
from dataclasses import replace
from typing import Any

import keras
import numpy as np
import tensorflow as tf
from harness.casts import narrow_casts
from harness.rank_programs import answer

import tw_horovod as hvd
import tw_horovod.keras as hvd_keras
from tw_horovod._state import group as state
from tw_horovod._unmodified import mpi_names

v1 = tf.compat.v1


def run_rank(pipe: Any, options: dict[str, Any]) -> None:
    """Initializes, then calls what the test asks for until the pipe closes.

    Args:
      pipe: to the test.
      options: ``rank``, and ``cluster`` unless it is alone; ``v1`` disables TensorFlow
        2's behaviour, as such programs do; ``timeout_s`` is for a silent rank;
      ``threads`` run the ops of the eager runtime.
    """
    os.environ.pop("TF_CONFIG", None)
    os.environ.update(options.get("mpi", {}))
    if "cluster" in options:
        task = {"type": "worker", "index": options["rank"]}
        told = {"cluster": {"worker": options["cluster"]}, "task": task}
        os.environ["TF_CONFIG"] = json.dumps(told)
    if options.get("v1"):
        v1.disable_v2_behavior()
    tf.config.threading.set_inter_op_parallelism_threads(options.get("threads", 0))
    if (timeout_s := options.get("timeout_s")) is not None:
        join = state.join_prepared
        state.join_prepared = lambda prepare, limits, **others: join(
            prepare, replace(limits, timeout_s=timeout_s, warning_s=timeout_s), **others
        )
    answer(pipe, hvd.init)
    while True:
        try:
            name, *arguments = pipe.recv()
        except EOFError:
            break
        answer(pipe, functools.partial(globals()[name], *arguments))


def reduce_in_float64() -> tuple[list[float], list[str]]:
    """Returns gradients whose numbers float32 would round, and casts to float32."""
    w = tf.Variable([0.1], dtype=tf.float64)

    @tf.function
    def step() -> list[tf.Tensor]:
        results = []
        for options in ({}, {"gradient_predivide_factor": 3.0}, {"op": hvd.Sum}):
            with tf.GradientTape() as tape:
                loss = w[0] / (3.0 + hvd.rank())
            tape = hvd.DistributedGradientTape(tape, **options)
            results.append(tape.gradient(loss, w)[0])
        own = tf.constant(0.1 + hvd.rank(), tf.float64)
        scales = {"prescale_factor": 0.1, "postscale_factor": 0.3}
        results.append(hvd.allreduce(own, op=hvd.Sum, **scales))
        return results

    with narrow_casts() as found:
        return [float(own) for own in step()], found


def place() -> list[int]:
    """Initializes again, and tells numbers, those of ops too."""
    hvd.init()
    ops = (hvd.rank_op, hvd.size_op, hvd.local_rank_op, hvd.local_size_op)
    known = (hvd.local_rank, hvd.local_size, hvd.cross_rank, hvd.cross_size)
    of_ops = run(lambda: [op() for op in ops], "session")
    return [*map(int, of_ops), *(own() for own in known), hvd.is_homogeneous()]


def run(build: Any, mode: str = "eager", *arrays: np.ndarray) -> Any:
    """Builds something of tensors and runs it, as a function, eagerly or in a graph."""
    if mode == "session":
        with tf.Graph().as_default():
            fed = [v1.placeholder(array.dtype, array.shape) for array in arrays]
            built = build(*fed)
            with v1.Session() as session:
                return _plain(session.run(built, dict(zip(fed, arrays, strict=True))))
    if mode == "function":
        build = tf.function(build)
    return _plain(build(*(tf.constant(array) for array in arrays)))


def _plain(result: Any) -> Any:
    if hasattr(result, "indices"):
        return np.asarray(result.values), np.asarray(result.indices)
    if isinstance(result, list | tuple):
        return [_plain(item) for item in result]
    return np.asarray(result)


class Quartered(hvd.compression.Compressor):
    """Sends a quarter, and takes half of what it was for the whole."""

    @staticmethod
    def compress(tensor: tf.Tensor) -> tuple[tf.Tensor, Any]:
        return tensor / 4, tensor.dtype

    @staticmethod
    def decompress(tensor: tf.Tensor, ctx: Any) -> tf.Tensor:
        return tf.cast(tensor * 2, ctx)


def _find_compression(options: dict[str, Any]) -> dict[str, Any]:
    """Returns the compression that options name."""
    if "compression" not in options:
        return {}
    name = options["compression"]
    known = Quartered if name == "own" else getattr(hvd.Compression, name)
    return {"compression": known}


def call(
    name: str, mode: str, array: Any, options: dict[str, Any], times: int = 1
) -> Any:
    """Calls one of the collectives with a tensor, or a list of them.

    Options are its arguments; compression is given by its name.
    """
    function, options = getattr(hvd, name), dict(options)
    options |= _find_compression(options)
    for _ in range(times):
        if isinstance(array, list):
            result = run(lambda *own: function(list(own), **options), mode, *array)
        else:
            result = run(lambda own: function(own, **options), mode, array)
    return result


def meet(
    name: str, mode: str, arrays: list[np.ndarray], options: dict[str, Any]
) -> list[tuple[Any, float, float]]:
    """Calls a collective twice with each tensor, the last rank some time later.

    Returns each result, when the call began, and when it had ended.
    """
    found = []
    for array in [array for array in arrays for _ in range(2)]:
        time.sleep(0.1 * (hvd.rank() == hvd.size() - 1))
        began_s = time.monotonic()
        found.append((call(name, mode, array, options), began_s, time.monotonic()))
    return found


def gradient(
    name: str, mode: str, array: np.ndarray, upstream: Any, options: dict[str, Any]
) -> Any:
    """Returns the gradient of a collective, for that of its result."""

    def build(given: tf.Tensor, above: tf.Tensor) -> tf.Tensor:
        if mode == "session":
            result = getattr(hvd, name)(given, **options)
            result = result[0] if isinstance(result, tuple) else result
            return tf.gradients(result, given, above)[0]
        with tf.GradientTape() as tape:
            tape.watch(given)
            result = getattr(hvd, name)(given, **options)
            result = result[0] if isinstance(result, tuple) else result
        return tape.gradient(result, given, above)

    return run(build, mode, array, upstream)


def reduce_many(mode: str, threads: int, steps: int) -> list[np.ndarray]:
    """Runs 24 independent collectives, whose inputs are ready in this rank's own order.

    In a function they are all of one kind. Returns what each returned, added up over
    the steps.
    """
    rows = list(range(hvd.size()))
    kinds = [
        lambda own: hvd.allreduce(own, op=hvd.Sum),
        lambda own: hvd.grouped_reducescatter([own * 0, own], op=hvd.Sum)[1],
        lambda own: hvd.grouped_allreduce([own, tf.IndexedSlices(own, rows)])[1].values,
        lambda own: hvd.alltoall(own),
    ]

    def build() -> list[tf.Tensor]:
        inputs: dict[int, tf.Tensor] = {}
        for n in np.random.default_rng(hvd.rank()).permutation(24):
            with tf.control_dependencies(list(inputs.values())[-1:]):
                noise = tf.random.uniform([hvd.size()])  # is not folded to a constant
                inputs[n] = noise * 0 + float(n + hvd.rank())
        count = 4 if mode == "session" else 1
        return [kinds[n % count](inputs[n]) for n in range(24)]

    if mode == "function":
        step = tf.function(build, autograph=False)
        results = [_plain(step()) for _ in range(steps)]
    else:
        config = v1.ConfigProto(
            inter_op_parallelism_threads=threads, use_per_session_threads=True
        )
        with tf.Graph().as_default():
            built = build()
            with v1.Session(config=config) as session:
                results = [session.run(built) for _ in range(steps)]
    return [np.sum(own, axis=0) for own in zip(*results, strict=True)]


def pass_around(obj: Any, root: int) -> Any:
    """Broadcasts and gathers objects, in between waits."""
    got = hvd.broadcast_object(obj, root)
    hvd.barrier()
    again = hvd.broadcast_object_fn(root)(obj)
    return got, again, hvd.allgather_object(obj)


def add_by_mpi(dtype: str, op: str, in_place: bool, mode: str) -> np.ndarray:
    """Adds [2, 3] as programs of MPI do, maybe from a session's Python function."""
    world, rank = mpi_names._AllRanks(), hvd.rank()

    def add(own: np.ndarray) -> np.ndarray:
        total = own.copy() if in_place else np.zeros([6], dtype)
        sent = mpi_names._IN_PLACE if in_place else own
        options = {"op": mpi_names._OPS[op]} if op != "SUM" else {}  # the default
        world.Allreduce(sent, total, **options)
        return np.reshape(total, [2, 3])

    own = np.arange(6).reshape(2, 3).astype(dtype) + (rank + 1) * (rank + 1)
    if mode == "eager":
        return add(own)
    with tf.Graph().as_default(), v1.Session() as session:
        fed = v1.placeholder(dtype, [2, 3])
        total = v1.py_func(add, [fed], dtype)
        return np.asarray(session.run(total * 1, {fed: own}))


def exchange_by_mpi() -> list[Any]:
    """Returns what other calls of MPI give this rank."""
    world, rank = mpi_names._AllRanks(), hvd.rank()
    gathered = np.zeros([world.Get_size() * 2])
    world.Allgather(np.array([rank, 7.0]), gathered)
    last = world.size - 1
    weights = np.full([2, 2], rank, "float32")
    world.Bcast(weights, root=last)
    world.barrier()
    return [
        gathered.tolist(),
        weights.tolist(),
        world.gather((rank, "host")),
        world.gather(rank, root=last),
        world.allreduce(rank + 0.5),
        world.allreduce([rank]),
        world.allreduce(rank, op=mpi_names._OPS["MAX"]),
        world.allreduce(np.array([rank, 1])).tolist(),
        world.allreduce(rank, op=lambda one, other: 10 * one + other),
    ]


def refuse_by_mpi(call: str) -> None:
    """Calls what programs of MPI may not."""
    world, array = mpi_names._AllRanks(), np.zeros([3], "float32")
    calls = {
        "dtype": lambda: world.Allreduce(array, np.zeros([3])),
        "size": lambda: world.Allreduce(array, np.zeros([4], "float32")),
        "list": lambda: world.Allreduce(array, [0.0] * 3),
        "op": lambda: world.Allreduce(array, array.copy(), op=max),
        "Send": lambda: world.Send(array, dest=0),
    }
    calls[call]()


def train_in_session(
    rows: np.ndarray,
    targets: np.ndarray,
    *,
    steps: int = 4,
    use_resource: bool = False,
    start: float = 0.0,
    is_local: bool = False,
    options: dict[str, Any] | None = None,
) -> dict[str, Any]:
    """Trains a linear model with an optimizer of TensorFlow 1; see ``Linear``."""
    options = {**(options or {}), **_find_compression(options or {})}
    with tf.Graph().as_default():
        weights = v1.get_variable(
            "w", initializer=tf.fill([rows.shape[1]], start), use_resource=use_resource
        )
        unused = v1.get_variable("unused", [], use_resource=use_resource)
        loss = tf.reduce_mean((tf.linalg.matvec(rows, weights) - targets) ** 2)
        optimizer = v1.train.MomentumOptimizer(0.1, 0.5)
        optimizer = hvd.DistributedOptimizer(optimizer, **options)
        if is_local:
            optimizer.register_local_var(weights)
        pairs = optimizer.compute_gradients(loss, [weights, unused])
        step = v1.train.get_or_create_global_step()
        train_op = optimizer.apply_gradients(pairs, global_step=step)
        values = []
        with v1.Session() as session:
            session.run(v1.global_variables_initializer())
            session.run(v1.local_variables_initializer())
            session.run(hvd.broadcast_global_variables(0))
            for _ in range(steps):
                session.run(train_op)
                values.append(session.run(weights))
            counted = session.run(step)
        return {
            "is_optimizer": isinstance(optimizer, v1.train.Optimizer),
            "kind": type(weights).__name__,
            "none": pairs[1][0] is None,
            "slots": optimizer.get_slot_names(),
            "slot": optimizer.get_slot(weights, "momentum").name,
            "variables": [variable.name for variable in optimizer.variables()],
            "steps": int(counted),
            "weights": np.array(values),
        }


def train_rows_in_session(
    places: np.ndarray, use_resource: bool, options: dict[str, Any]
) -> np.ndarray:
    """Moves the rows of a table towards one, with sparse gradients."""
    with tf.Graph().as_default():
        table = v1.get_variable(
            "table",
            [6, 2],
            initializer=v1.zeros_initializer(),
            use_resource=use_resource,
        )
        loss = tf.reduce_sum((tf.gather(table, places) - 1.0) ** 2)
        optimizer = v1.train.GradientDescentOptimizer(0.25)
        train_op = hvd.DistributedOptimizer(optimizer, **options).minimize(loss)
        with v1.Session() as session:
            session.run(v1.global_variables_initializer())
            session.run(train_op)
            return np.asarray(session.run(table))


def train_with_tape(
    rows: np.ndarray,
    targets: np.ndarray,
    *,
    steps: int = 4,
    start: float = 0.0,
    is_eager: bool = False,
    batches: int | None = None,
    options: dict[str, Any] | None = None,
) -> dict[str, Any]:
    """Trains a linear model step by step, broadcasts in the first, and may join."""
    options = {**(options or {}), **_find_compression(options or {})}
    weights = tf.Variable(tf.fill([rows.shape[1]], start), name="w")
    unused = tf.Variable(0.0, name="unused")
    speed = tf.Variable(tf.zeros_like(weights), name="v")
    found: dict[str, Any] = {}

    def step(is_first: bool) -> tf.Tensor:
        with hvd.DistributedGradientTape(tf.GradientTape(), **options) as tape:
            predicted = tf.linalg.matvec(rows, weights)
            loss = tf.reduce_mean((predicted - targets) ** 2)
        grads = tape.gradient(loss, [weights, unused])
        found["none"] = grads[1] is None
        if is_first:
            hvd.broadcast_variables([weights], root_rank=0)
        speed.assign(0.5 * speed + grads[0])
        weights.assign_sub(0.1 * speed)
        return loss

    run_step = step if is_eager else tf.function(step)
    values = []
    for number in range(steps if batches is None else batches):
        run_step(number == 0)
        values.append(weights.numpy())
    last = int(hvd.join()) if batches is not None else None
    values += [weights.numpy()] if batches is not None else []
    return found | {"weights": np.array(values), "last": last}


def take_gradients(op: Any, options: dict[str, Any]) -> Any:
    """Takes gradients of one, of a structure, of sparse rows, and of local sources."""
    table, scale = tf.Variable(tf.ones([4, 2])), tf.Variable(1.0 + hvd.rank())
    tape = hvd.DistributedGradientTape(
        tf.GradientTape(persistent=True), op=op, **options
    )
    tape.register_local_source(scale)
    with tape:
        loss = scale**2 * tf.reduce_sum(tf.gather(table, [hvd.rank()]))
    sparse = tape.gradient(loss, [table])[0]
    both = tape.gradient(loss, {"scale": scale, "table": table})
    local, shared = tape.get_local_and_global_gradients(loss, [table, scale])
    return {
        "sparse": isinstance(sparse, tf.IndexedSlices),
        "dense": tf.convert_to_tensor(sparse).numpy(),
        "scale": float(both["scale"]),
        "one": float(tape.gradient(loss, scale)),
        "local": [source is scale for source, _ in local],
        "shared": [source is table for source, _ in shared],
        "watched": len(tape.watched_variables()),
    }


def call_program(
    name: str, rows: np.ndarray, targets: np.ndarray, options: dict[str, Any]
) -> Any:
    """Calls one of the programs above with arguments by name."""
    return globals()[name](rows, targets, **options)


def make_model(
    start: float,
    optimizer: Any,
    *,
    layer: str = "dense",
    is_built: bool = True,
    **options: Any,
) -> Any:
    """Returns a linear model of Keras, compiled."""
    begin = keras.initializers.Constant(start)
    dense = keras.layers.Dense(1, use_bias=False, kernel_initializer=begin, name=layer)
    model = keras.Sequential([*([keras.Input([2])] if is_built else []), dense])
    model.compile(optimizer=optimizer, loss="mse", **options)
    return model


def fit(
    rows: np.ndarray,
    targets: np.ndarray,
    *,
    start: float = 0.0,
    steps: int = 4,
    options: dict[str, Any] | None = None,
    compiling: dict[str, Any] | None = None,
    is_local: bool = False,
    folder: str | None = None,
    parts_at: int | None = None,
) -> dict[str, Any]:
    """Trains with ``model.fit`` and the callbacks, one batch an epoch.

    Before the epoch ``parts_at`` rank 1 changes its weights.
    """
    optimizer = hvd_keras.DistributedOptimizer(
        keras.optimizers.SGD(0.1, momentum=0.5), **(options or {})
    )
    model = make_model(start, optimizer, **(compiling or {}))
    weights: list[np.ndarray] = []
    kept = model.trainable_variables if is_local else None
    for variable in kept or []:
        optimizer.register_local_var(variable)
    callbacks = [
        hvd_keras.callbacks.BroadcastGlobalVariablesCallback(0, "", kept),
        hvd_keras.callbacks.MetricAverageCallback(),
        hvd_keras.callbacks.CheckWeightsCallback(every=2),
        _noting(model, weights),
    ]
    if parts_at is not None and hvd.rank() == 1:
        part = keras.callbacks.LambdaCallback(
            on_epoch_begin=lambda epoch, logs: (
                epoch == parts_at and model.layers[0].kernel.assign([[1.0], [2.0]])
            )
        )
        callbacks.append(part)
    history = model.fit(
        rows,
        targets,
        batch_size=len(rows),
        epochs=steps,
        shuffle=False,
        callbacks=callbacks,
        verbose=0,
    )
    result = {
        "class": type(optimizer).__name__,
        "is_keras": isinstance(optimizer, keras.optimizers.SGD),
        "name": optimizer.name,
        "variables": len(optimizer.variables()) == len(optimizer.variables),
        "iterations": int(optimizer.iterations),
        "weights": np.array(weights),
        "losses": history.history["loss"],
        "velocity": np.asarray(optimizer.momentums[0])[:, 0],
    }
    if folder is not None:
        path = os.path.join(folder, f"{hvd.rank()}.keras")
        model.save(path)
        result |= _load(path)
    return result


def resume(
    rows: np.ndarray,
    targets: np.ndarray,
    *,
    start: float,
    folder: str,
    is_built: bool,
    layer: str,
) -> dict[str, Any]:
    """Trains for two steps, then for two more: rank 0 loads, the others make anew."""

    def make(value: float, **options: Any) -> Any:
        optimizer = keras.optimizers.SGD(0.1, momentum=0.5)
        return make_model(value, hvd_keras.DistributedOptimizer(optimizer), **options)

    weights: list[np.ndarray] = []

    def fit(model: Any) -> None:
        broadcast = hvd_keras.callbacks.BroadcastGlobalVariablesCallback(0)
        check = hvd_keras.callbacks.CheckWeightsCallback(every=1)
        options = {"epochs": 2, "shuffle": False, "verbose": 0}
        callbacks = [broadcast, check, _noting(model, weights)]
        model.fit(rows, targets, len(rows), callbacks=callbacks, **options)

    path = os.path.join(folder, "model.keras")
    model = make(start)
    fit(model)
    if hvd.rank() == 0:
        model.save(path)
        resumed = hvd_keras.load_model(path)
    else:
        # It may lack an input, and its layer have another name than rank 0's.
        resumed = make(-start, is_built=is_built, layer=layer)
    fit(resumed)
    fit(resumed)  # Rank 0's paths are known by now.
    path = resumed.weights[0].path
    keras.utils.clear_session()  # Ranks have counted other numbers of models.
    return {
        "weights": np.array(weights),
        "path": path,
        "iterations": int(resumed.optimizer.iterations),
    }


def restore(folder: str) -> dict[str, Any]:
    """Trains from a backup of its own, and drops out with one seed on all ranks."""

    def make(start: float) -> Any:
        begin = keras.initializers.Constant(start)
        dense = keras.layers.Dense(1, use_bias=False, kernel_initializer=begin)
        layers = [keras.Input([32]), keras.layers.Dropout(0.5), dense]
        model = keras.Sequential(layers)
        optimizer = keras.optimizers.SGD(0.01, momentum=0.5)
        model.compile(hvd_keras.DistributedOptimizer(optimizer), "mse")
        model.optimizer.build(model.trainable_variables)
        return model

    keras.utils.set_random_seed(5)
    path = os.path.join(folder, str(hvd.rank()))
    backup = keras.callbacks.BackupAndRestore(path)
    backup.set_model(make(1.0 + hvd.rank()))
    backup.on_epoch_end(0)
    model = make(-1.0)
    weights: list[np.ndarray] = []
    note = _noting(model, weights, "train_batch_begin")
    broadcast = hvd_keras.callbacks.BroadcastGlobalVariablesCallback(0)
    callbacks = [note, broadcast, keras.callbacks.BackupAndRestore(path)]
    rows = np.ones([2, 32], np.float32)
    model.fit(rows, rows[:, :1], 1, epochs=2, callbacks=callbacks, verbose=0)
    dropped = model.layers[0](rows, training=True)
    return {"weights": [*weights, _weights(model)], "dropped": np.asarray(dropped)}


def apply_copies() -> dict[str, Any]:
    """Applies a gradient with copies of an optimizer; trains a cloned model."""
    shared, local = keras.Variable(0.0), keras.Variable(0.0)
    optimizer = hvd_keras.DistributedOptimizer(
        keras.optimizers.SGD(1.0, momentum=0.5), scale_local_gradients=False
    )
    copies = {
        "from_config": type(optimizer).from_config(optimizer.get_config()),
        "made": type(optimizer)(1.0),
    }
    optimizer.register_local_var(local)
    optimizer.build([shared, local])
    copies |= {"copy": copy.copy(optimizer), "deepcopy": copy.deepcopy(optimizer)}
    applied = {}
    for name, copied in copies.items():
        shared.assign(0.0)
        local.assign(0.0)
        copied.apply([tf.constant(1.0 + hvd.rank())] * 2, [shared, local])
        applied[name] = float(shared), float(local)
    model = make_model(0.0, hvd_keras.DistributedOptimizer(keras.optimizers.SGD()))
    broadcast = hvd_keras.callbacks.BroadcastGlobalVariablesCallback(0)
    said = []
    clone = keras.models.clone_model(model)
    if not clone.compiled:  # as Keras does since 3.9
        clone.compile(keras.optimizers.SGD(), "mse")
    for trained in (model, clone):
        with warnings.catch_warnings(record=True) as heard:
            warnings.simplefilter("always")
            rows = np.ones([1, 2], np.float32)
            trained.fit(rows, rows[:, :1], callbacks=[broadcast], verbose=0)
        said.append([str(w.message) for w in heard if "will diverge" in str(w.message)])
    return {"applied": applied, "said": said}


def _weights(model: Any) -> np.ndarray:
    return np.asarray(model.get_weights()[0])[:, 0]


def _noting(model: Any, weights: list[np.ndarray], when: str = "epoch_end") -> Any:
    """Returns a callback that notes weights after each epoch, or at another time."""
    noting = {f"on_{when}": lambda number, logs: weights.append(_weights(model))}
    return keras.callbacks.LambdaCallback(**noting)


def _load(path: str) -> dict[str, Any]:
    """Loads a model without and with Horovod's names."""
    plain, ours = keras.models.load_model(path), hvd_keras.load_model(path)
    loaded = {"plain": plain, "ours": ours}
    return {
        "loaded": {
            key: (
                type(model.optimizer).__name__,
                hasattr(model.optimizer, "register_local_var"),
                int(model.optimizer.iterations),
                np.asarray(model.optimizer.momentums[0])[:, 0],
                _weights(model),
            )
            for key, model in loaded.items()
        }
    }


def train_by_hand(
    rows: np.ndarray,
    targets: np.ndarray,
    *,
    start: float = 0.0,
    steps: int = 4,
    options: dict[str, Any] | None = None,
    is_eager: bool = False,
    is_scaled: bool = False,
) -> dict[str, Any]:
    """Trains a Keras model step by step, with a distributed optimizer."""
    optimizer = keras.optimizers.SGD(0.1, momentum=0.5)
    if is_scaled:
        optimizer = keras.optimizers.LossScaleOptimizer(optimizer)
    optimizer = hvd.DistributedOptimizer(optimizer, **(options or {}))
    model = make_model(start, optimizer)
    optimizer.build(model.trainable_variables)
    hvd.broadcast_variables(model.variables, root_rank=0)
    hvd.broadcast_variables(optimizer.variables(), root_rank=0)

    def step() -> None:
        with tf.GradientTape() as tape:
            loss = keras.losses.mean_squared_error(targets, model(rows)[:, 0])
            scaled = optimizer.scale_loss(loss)
        grads = tape.gradient(scaled, model.trainable_variables)
        optimizer.apply_gradients(zip(grads, model.trainable_variables, strict=True))

    run_step = step if is_eager else tf.function(step)
    weights = []
    for _ in range(steps):
        run_step()
        weights.append(_weights(model))
    # A LossScaleOptimizer shows this count as its own since Keras 3.9.
    counts = getattr(optimizer, "inner_optimizer", optimizer).iterations
    return {"weights": np.array(weights), "iterations": int(counts)}


def warm_up(epochs: int, batches: int, momentum: float) -> list[float]:
    """Returns the learning rates, the one logged last, and the last velocity."""
    optimizer = keras.optimizers.SGD(0.8, momentum=momentum)
    model = make_model(0.0, hvd_keras.DistributedOptimizer(optimizer))
    rates: list[float] = []
    note = keras.callbacks.LambdaCallback(
        on_train_batch_begin=lambda batch, logs: rates.append(
            float(model.optimizer.learning_rate)
        )
    )
    warm = hvd_keras.callbacks.LearningRateWarmupCallback(0.8, warmup_epochs=epochs)
    rows = np.ones([batches, 2], np.float32)
    history = model.fit(
        rows,
        np.ones([batches, 1]),
        batch_size=1,
        epochs=epochs + 1,
        callbacks=[warm, note],
        verbose=0,
    )
    return [*rates, history.history["lr"][-1]]


def schedule(momentum: float) -> list[float]:
    """Returns weights after steps with gradient 1, whose rate a schedule changes."""
    optimizer = keras.optimizers.SGD(0.5, momentum=momentum)
    model = make_model(0.0, hvd_keras.DistributedOptimizer(optimizer))
    model.compile(optimizer=model.optimizer, loss=lambda y, p: keras.ops.mean(p))
    weights: list[np.ndarray] = []
    change = hvd_keras.callbacks.LearningRateScheduleCallback(0.5, 0.5)
    callbacks = [change, _noting(model, weights)]
    rows = np.ones([1, 2], np.float32)
    model.fit(rows, rows[:, :1], epochs=3, callbacks=callbacks, verbose=0)
    return [float(own[0]) for own in weights]


def normalize(rows: np.ndarray, shift: float) -> dict[str, Any]:
    """Normalizes a batch with other ranks; returns gradients too."""
    layer = hvd.SyncBatchNormalization(momentum=0.0, epsilon=0.0)
    layer.build([None, rows.shape[1]])
    given = tf.constant(rows)

    @tf.function
    def step() -> Any:
        with tf.GradientTape() as tape:
            tape.watch(given)
            normal = layer(given, training=True)
            loss = tf.reduce_sum(normal * (given + shift))
        return normal, tape.gradient(loss, given)

    normal, grad = step()
    return {
        "normal": normal.numpy(),
        "gradient": grad.numpy(),
        "mean": np.asarray(layer.moving_mean),
        "variance": np.asarray(layer.moving_variance),
        "later": layer(given, training=False).numpy(),
        "name": layer.name,
    }


def call_keras(name: str, value: Any, *arguments: Any) -> Any:
    """Calls a collective of values."""
    return np.asarray(getattr(hvd_keras, name)(value, *arguments))


def train_partial() -> list[float]:
    """Takes gradients of a shared and of a local layer; applies this rank's number."""
    layers = [keras.layers.Dense(1, kernel_initializer="ones") for _ in range(2)]
    own = tf.constant([[1.0 + hvd.rank()]])
    with tf.GradientTape() as tape:
        loss = tf.reduce_sum(layers[1](layers[0](own)))
    tape = hvd.PartialDistributedGradientTape(
        tape, local_layers=layers[1], scale_local_gradients=False
    )
    kernels = [layer.kernel for layer in layers]
    grads = tape.gradient(loss, kernels)
    optimizer = hvd_keras.PartialDistributedOptimizer(
        keras.optimizers.SGD(1.0), local_layers=layers[1]
    )
    optimizer.apply([own, own], kernels)
    return [float(one[0, 0]) for one in (*grads, *kernels)]


def reduce_by_name(
    mode: str, names: list[str], hides: bool, times: int
) -> list[dict[str, float]]:
    """Averages a value per name, in the order given; "" is one without a name.

    The value of a name is its length times the rank plus one. An op without a name
    comes after those before it.
    """

    def build(*given: tf.Tensor) -> dict[str, tf.Tensor]:
        results = {}
        for name, own in zip(names, given, strict=True):
            with tf.name_scope("metrics"):
                results[name] = hvd.allreduce(own, name=name or None)
        return results

    def take(results: Any) -> dict[str, float]:
        return {name: float(np.sum(value)) for name, value in results.items()}

    arrays = [np.float32([len(name) * (hvd.rank() + 1)]) for name in names]
    shape = [None] if hides else [1]
    if mode == "session":
        threads = v1.ConfigProto(
            inter_op_parallelism_threads=1, use_per_session_threads=True
        )
        with tf.Graph().as_default(), v1.Session(config=threads) as session:
            fed = [v1.placeholder(tf.float32, shape) for _ in names]
            built = build(*fed)
            feed = dict(zip(fed, arrays, strict=True))
            return [take(session.run(built, feed)) for _ in range(times)]
    step = build
    if mode == "function":
        step = tf.function(build, [tf.TensorSpec(shape, tf.float32)] * len(names))
    return [take(step(*map(tf.constant, arrays))) for _ in range(times)]


def combine_ones(mode: str, name: str, shape: list[int], signature: Any) -> float:
    """Combines ones, of whose shape the signature is known; returns their sum."""
    options = {} if name == "allgather" else {"op": hvd.Sum}

    def build(ones: tf.Tensor) -> tf.Tensor:
        return getattr(hvd, name)(ones, **options)

    if mode == "session":
        with tf.Graph().as_default(), v1.Session() as session:
            fed = v1.placeholder(tf.float32, signature)
            return float(np.sum(session.run(build(fed), {fed: np.ones(shape)})))
    step = tf.function(build, [tf.TensorSpec(signature, tf.float32)])
    return float(np.sum(step(tf.ones(shape))))


def use_in_order(kind: str, order: list[int]) -> list[float]:
    """Runs two collectives that all ranks agree on in turn, then in the order given."""
    ones = tf.ones([2])
    calls = {
        "eager": [lambda n=n: hvd.allreduce(ones, name=n) for n in ("loss", "part")],
        "shape": [lambda n=n: hvd.allreduce(tf.ones([n])) for n in (3, 4)],
        "root": [tf.function(lambda r=r: hvd.broadcast(ones, r)) for r in (0, 1)],
        "name": [
            tf.function(lambda n=n: hvd.allreduce(tf.ones([n]), name="x"))
            for n in (5, 6)
        ],
    }[kind]
    for call_ in calls:
        call_()
    return [float(calls[n]()[0]) for n in order]


def average_metrics(logs: dict[str, float]) -> dict[str, float]:
    """Averages metrics as ``fit`` does at the end of an epoch."""
    logs = dict(logs)
    hvd_keras.callbacks.MetricAverageCallback().on_epoch_end(0, logs)
    return logs


def bring_new_shapes(shapes: int, kept: int) -> tuple[list[float], int]:
    """Sums tensors of many shapes eagerly, twice; tells how many functions it keeps."""
    from tw_ranks._endpoint import endpoint

    endpoint._MAX_COMPILED = kept
    lengths = [*range(1, shapes + 1)] * 2
    sums = [float(hvd.allreduce(tf.ones([n]), op=hvd.Sum)[0]) for n in lengths]
    return sums, len(state.find_endpoint().built._compiled)


def agree_on_keys(counts: list[int]) -> list[int]:
    """Agrees on exchanges that need so many keys; returns how far from the first."""
    from tw_ranks.internal import Exchange

    keys = state.find_endpoint().keys
    firsts = [keys.agree(Exchange(f"number {n}", ()), n) for n in counts]
    return [first - firsts[0] for first in firsts]


def reduce_apart(count: int) -> list[set[float]]:
    """Sums tensors of unlike lengths in two exchanges, the last with its last key too.

    TensorFlow ends all collectives where another shape comes under a key.
    """
    from tw_ranks import internal

    endpoint, last = state.find_endpoint(), internal.KEYS_PER_TENSOR - 1

    def body(brought: list[tf.Tensor], keys: list[int]) -> list[tf.Tensor]:
        return [
            internal.add_up(tensor, endpoint, key + place, "Add")
            for tensor, key in zip(brought, keys, strict=True)
            for place in ((0, last) if key == keys[-1] else (0,))
        ]

    results = []
    for first in (1, 500):
        tensors = [tf.ones([first + n]) for n in range(count)]
        specs = [tf.TensorSpec([None], tf.float32)] * count
        exchange = internal.Exchange(f"{count} tensors from {first}", ())
        got = internal.run_collectives(
            body, tensors, endpoint=endpoint, exchange=exchange, specs=specs
        )
        results.append({float(t[0]) for t in got} | {float(t[-1]) for t in got})
    return results
