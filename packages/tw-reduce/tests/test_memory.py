"""Reducers with memory beside models in NumPy, step by step."""

from contextlib import contextmanager

import numpy as np
import pytest
import tensorflow as tf
from reduce_given import each_mode, steps

from tw_core.testing import CPUS
from tw_reduce import ReducerState, broadcast, mean, packed
from tw_reduce.compression import (
    error_feedback,
    from_rows,
    int8,
    power_sgd,
    sign,
    to_row,
    top_k,
)

F32 = np.float32
# Compressed: the first and the third; a bias, what is small, an embedding, one unused.
SHAPES = [(64, 80), (7,), (3, 3, 16, 40), (6, 5), (6, 2), (4, 4)]
SPARSE, UNUSED, BIG = 4, 5, (0, 2)
INDICES = [4, 0, 4]
STEPS = 20


def largest(full):
    kept = np.argsort(-np.abs(full.ravel()))[: int(np.ceil(0.01 * full.size))]
    result = np.zeros_like(full)
    result.flat[kept] = full.flat[kept]
    return result


def signs(full):
    return np.where(full >= 0, F32(1), F32(-1)) * np.abs(full).mean(dtype=F32)


def steps_of_127(full):
    scale = np.abs(full).max() / F32(127)
    return np.round(full / scale) * scale


APPROXIMATIONS = {"top_k": largest, "sign": signs, "int8": steps_of_127}
REDUCERS = {
    "top_k": error_feedback(top_k(0.01)),
    "sign": error_feedback(sign()),
    "int8": error_feedback(int8()),
    "power_sgd": power_sgd(rank=3, seed=5),
}
ALL = {**REDUCERS, "sampled": error_feedback(top_k(0.1, sampled=True))}


class Model:
    """A reducer with memory of one compressed variable, in NumPy."""

    def __init__(self, name, num_towers, shape, factor=None):
        self.approximate = APPROXIMATIONS.get(name)
        self.errors = [np.zeros(shape, F32) for _ in range(num_towers)]
        self.factor = factor

    def step(self, grads):
        fulls = [own + error for own, error in zip(grads, self.errors, strict=True)]
        if self.factor is None:
            sent = [self.approximate(own) for own in fulls]
        else:
            flat = [own.reshape(-1, own.shape[-1]).astype(np.float64) for own in fulls]
            basis = np.linalg.qr(sum(own @ self.factor for own in flat))[0]
            rights = [own.T @ basis for own in flat]
            self.factor = sum(rights)
            sent = [(basis @ own.T).reshape(fulls[0].shape) for own in rights]
        self.errors = [(f - s).astype(F32) for f, s in zip(fulls, sent, strict=True)]
        return sum(sent)


def variables(num_towers, dtype=tf.float32, shapes=SHAPES):
    towers = []
    for device in CPUS[:num_towers]:
        with tf.device(device):
            towers.append([tf.Variable(tf.zeros(shape, dtype)) for shape in shapes])
    return towers


def gradients(num_towers, random):
    """A list per tower; of the embedding three rows, of the unused none."""
    shapes = [(3, 2) if n == SPARSE else own for n, own in enumerate(SHAPES[:UNUSED])]
    return [
        [random.standard_normal(own).astype(F32) for own in shapes]
        for _ in range(num_towers)
    ]


def dense(tower):
    full = np.zeros(SHAPES[SPARSE], F32)
    np.add.at(full, INDICES, tower[SPARSE])
    return [*tower[:SPARSE], full]


def placed(towers):
    """Puts tensors on their towers; a dimension stays unknown, as of batches."""
    rows = []
    for device, own in zip(CPUS, towers, strict=False):
        with tf.device(device):
            *more, values = map(tf.identity, own)
            shape = tf.constant(SHAPES[SPARSE], tf.int64)
            sparse = tf.IndexedSlices(values, tf.constant(INDICES, tf.int64), shape)
            rows.append([*more, sparse, None])
    return rows


def stepper(mode, num_towers):
    """Returns states by name, a function that makes a step with each, and a reader."""
    states = {}

    def make():
        towers = variables(num_towers)
        states.update({name: ReducerState(r, towers) for name, r in REDUCERS.items()})
        states["weighted"] = ReducerState(REDUCERS["int8"], towers, name="weighted")
        return [states["weighted"].of(tuple(towers[0][:UNUSED]))]

    def step(*flat_and_weights):
        *flat, weights, part = flat_and_weights
        towers = [flat[n : n + UNUSED] for n in range(0, len(flat), UNUSED)]
        results = {name: states[name](placed(towers)) for name in REDUCERS}
        # No gradient of the unused one: mean() refuses None.
        few = [tower[:UNUSED] for tower in placed(towers)]
        results["weighted"] = mean(part, weights=tf.unstack(weights))(few)
        return {
            name: [
                [tf.convert_to_tensor(own) for own in row if own is not None]
                for row in rows
            ]
            for name, rows in results.items()
        }

    shapes = [(3, 2) if n == SPARSE else own for n, own in enumerate(SHAPES[:UNUSED])]
    specs = [tf.TensorSpec([None, *own[1:]]) for own in shapes] * num_towers
    run = steps(mode, step, [*specs, tf.TensorSpec([num_towers])], make)

    def run_towers(towers, weights):
        flat = [own for tower in towers for own in tower]
        return tf.nest.map_structure(np.asarray, run(*flat, weights.astype(F32)))

    return states, run_towers, getattr(run, "read", lambda own: own.numpy())


def errors(state, n, value):
    """What all towers remember of a variable's gradients."""
    return [value(own[0]) for own in state._memories[str(n)].towers]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("mode", "num_towers"),
    [("graph", 3), ("function", 1), ("function", 4)],
)
def test_each_step_is_that_of_a_model_in_numpy(mode, num_towers):
    states, run, value = stepper(mode, num_towers)
    random = np.random.default_rng(num_towers)
    models = {}
    for name, reducer in REDUCERS.items():
        starts = reducer.init(variables(1)[0])
        for n in BIG:
            factor = starts[n].get("factor")
            factor = None if factor is None else factor.numpy().astype(np.float64)
            models[name, n] = Model(name, num_towers, SHAPES[n], factor)
    sums = [np.zeros(shape) for shape in SHAPES[:UNUSED]]
    means, got_means = [own.copy() for own in sums], [own.copy() for own in sums]
    got_sums = {name: [own.copy() for own in sums] for name in REDUCERS}
    for step in range(STEPS):
        towers = gradients(num_towers, random)
        weights = np.array([1, 3, 0, 2][:num_towers]) * (1 + step % 3)
        results = run(towers, weights)
        plain = [sum(column) for column in zip(*map(dense, towers), strict=True)]
        shares = weights / weights.sum()
        for n, column in enumerate(zip(*map(dense, towers), strict=True)):
            sums[n] += plain[n]
            means[n] += sum(w * own for w, own in zip(shares, column, strict=True))
            got_means[n] += results["weighted"][0][n]
        for name in REDUCERS:
            for row in results[name][1:]:
                for own, first in zip(row, results[name][0], strict=True):
                    np.testing.assert_array_equal(own, first)
            for n, own in enumerate(results[name][0]):
                got_sums[name][n] += own
                if n not in BIG:
                    np.testing.assert_allclose(own, plain[n], rtol=1e-6, atol=1e-6)
                    continue
                want = models[name, n].step([tower[n] for tower in towers])
                apart = np.abs(own - want) / np.abs(want).max()
                few = 1e-3 if name == "int8" else 0.0  # halves, rounded either way
                near = 1e-4 if name == "power_sgd" else 2e-6
                assert apart.max() < 1e-2, (name, step, n)
                assert (apart > near).mean() <= few, (name, step, n)
    for name in REDUCERS:
        for n in BIG:
            kept = errors(states[name], n, value)
            for own, want in zip(kept, models[name, n].errors, strict=True):
                if name == "top_k":
                    np.testing.assert_array_equal(own, want)
            np.testing.assert_allclose(
                got_sums[name][n] + sum(kept), sums[n], atol=1e-4
            )
    for n, own in enumerate(got_means):
        kept = sum(errors(states["weighted"], n, value)) if n in BIG else 0
        np.testing.assert_allclose(own + kept, means[n], atol=1e-4)
    assert str(UNUSED) not in states["int8"]._memories

    before = {n: errors(states["int8"], n, value) for n in BIG}
    towers[-1][1][0] = np.inf  # of a bias, and of one tower
    results = run(towers, weights)
    for name in REDUCERS:
        for row in results[name]:
            assert not all(np.isfinite(own).all() for own in row)
    for n in BIG:
        np.testing.assert_array_equal(errors(states["int8"], n, value), before[n])


SIZE, SHARE = 61 * 900, 0.02  # more than a thousand are sent


def patterns():
    """Arrays of SIZE elements by name, in which a sample may mislead."""
    random, places = np.random.default_rng(7), np.arange(SIZE)
    normal = random.standard_normal(SIZE).astype(F32)
    yield "constant", np.ones(SIZE, F32)
    yield "zero", np.zeros(SIZE, F32)
    yield "negative", -np.abs(normal)
    yield "whole", np.round(normal)
    yield "one huge", np.where(places == SIZE - 1, F32(1e30), normal)
    yield "all but huge", np.where(places == 7, normal, F32(1e37))
    yield "tiny", normal * F32(1e-30)
    for share in (1e-4, 0.5 * SHARE, 0.99 * SHARE, 1.01 * SHARE, 0.1):
        yield f"{share} not zero", np.where(random.random(SIZE) < share, normal, 0)
        late = places >= SIZE - int(SIZE * share)
        yield f"{share} at the end", np.where(late, normal, 0)
        yield f"{share} larger at the end", np.where(late, 100 * normal, normal)
    for stride in (*range(2, 70), 122, 128, 183, 600, 3721):
        for phase in {0, 1, stride - 1}:
            is_of_it = places % stride == phase
            yield f"{stride}+{phase} zero", np.where(is_of_it, 0, normal)
            yield f"{stride}+{phase} not zero", np.where(is_of_it, normal, 0)
            yield f"{stride}+{phase} larger", np.where(is_of_it, 100 * normal, normal)
            yield f"{stride}+{phase} smaller", np.where(is_of_it, normal / 100, normal)


def check_largest(got, own, k, *, fewest, name=""):
    """Checks that the largest elements are there, and zeros elsewhere."""
    got, own = got.ravel(), own.ravel()
    is_sent = got != 0
    np.testing.assert_array_equal(got[is_sent], own[is_sent], err_msg=name)
    count = np.count_nonzero(is_sent)
    assert min(fewest, np.count_nonzero(own)) <= count <= k, name
    rest = np.abs(own[~is_sent]).max(initial=0)
    assert np.abs(own[is_sent]).min(initial=np.inf) >= rest, name


@pytest.mark.slow
@each_mode
@pytest.mark.parametrize("sampled", [False, True])
def test_whatever_a_tensor_holds_its_largest_elements_are_sent(mode, sampled):
    """Unsampled exactly so many, and of equal ones the first."""

    def approximation(tensor):
        parts, decode = top_k(SHARE, sampled=sampled)(tensor)
        return decode(*parts)

    run, k = steps(mode, approximation, [tf.TensorSpec([900, 61])]), int(SIZE * SHARE)
    for name, own in patterns():
        got = np.asarray(run(own.astype(F32).reshape(900, 61)))
        if sampled:
            check_largest(got, own, k, fewest=k // 2, name=name)
            continue
        kept = np.argsort(-np.abs(own), kind="stable")[:k]
        want = np.zeros_like(own, F32)
        want[kept] = own[kept]
        np.testing.assert_array_equal(got.ravel(), want, err_msg=name)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32", "float64"])
@pytest.mark.parametrize("jit_compile", [False, True])
def test_of_any_number_of_elements_the_largest_are_sent(dtype, jit_compile):
    random, cases = np.random.default_rng(8), [(1, 1.0), (5000, 0.2)]
    if not jit_compile:
        cases += [(2, 0.01), (61, 1.0), (487, 1.0), (488, 1.0), (489, 1.0), (976, 0.5)]
        cases += [(977, 0.5), (5000, 0.0975), (5000, 0.0977), (7000, 0.9)]
    for size, share in cases:
        own = tf.cast(random.standard_normal(size), dtype)
        for sampled in (False, True):

            def approximation(tensor, share=share, sampled=sampled):
                parts, decode = top_k(share, sampled=sampled)(tensor)
                return decode(*parts)

            run = tf.function(approximation, jit_compile=jit_compile, autograph=False)
            got, k = run(own), int(np.ceil(share * size))
            assert got.dtype == own.dtype
            # Values are sent as float32.
            want = tf.cast(tf.cast(own, tf.float32), tf.float64).numpy()
            check_largest(tf.cast(got, tf.float64).numpy(), want, k, fewest=k // 2)


@pytest.mark.slow(by_day=True)
def test_other_dtypes_and_shapes_known_in_the_run_conserve_too():
    dtypes = {tf.float16: 2e-2, tf.bfloat16: 2e-1, tf.float64: 1e-6}
    bounds = {dtype.name: bound for dtype, bound in dtypes.items()}
    shape, random = (70, 80), np.random.default_rng(3)
    states = {
        (name, dtype.name): ReducerState(own, variables(2, dtype, [shape]))
        for (name, own), dtype in zip(ALL.items(), [*dtypes, *dtypes], strict=False)
    }

    @tf.function(input_signature=[tf.TensorSpec([2, None, 80])], autograph=False)
    def step(grads):
        return {
            key: mean(state)(
                [[tf.cast(own, tf.as_dtype(key[1]))] for own in tf.unstack(grads)]
            )[1]
            for key, state in states.items()
        }

    sums = dict.fromkeys(states, 0.0)
    want = dict.fromkeys(bounds, 0.0)
    for _ in range(4):
        grads = random.standard_normal((2, *shape)).astype(F32)
        for dtype in dtypes:
            cast = tf.cast(tf.cast(grads, dtype), tf.float64)
            want[dtype.name] += np.mean(cast.numpy(), axis=0)
        for key, [own] in step(grads).items():
            assert own.dtype == key[1]
            sums[key] += own.numpy().astype(np.float64)
    for (name, dtype), total in sums.items():
        kept = errors(states[name, dtype], 0, lambda own: own.numpy())
        assert kept[0].dtype == (np.float64 if dtype == "float64" else F32)
        assert np.abs(kept[0]).max() > 0
        np.testing.assert_allclose(
            total + sum(kept), want[dtype], atol=bounds[dtype], err_msg=name
        )


SIZES = [1e-30, 1e19, 1e35, 1e100]


@pytest.mark.slow
@pytest.mark.parametrize("jit_compile", [False, True])
@pytest.mark.parametrize("size", SIZES)
def test_finite_gradients_whose_sum_or_square_overflows_are_reduced(size, jit_compile):
    dtype = tf.float64 if size > 1e38 else tf.float32
    towers = [[tf.Variable(tf.zeros(shape, dtype)) for shape in SMALL]] * 2
    states = {name: ReducerState(own, towers) for name, own in ALL.items()}

    @tf.function(jit_compile=jit_compile, autograph=False)
    def step(*towers):
        return {name: state(towers)[1] for name, state in states.items()}

    random, total = np.random.default_rng(4), 0
    sent = dict.fromkeys(states, 0)
    for _ in range(3):
        grads = [
            [tf.cast(size * random.uniform(0.1, 1, shape), dtype) for shape in SMALL]
            for _ in range(2)
        ]
        total += sum(own[0].numpy() / size for own in grads)
        for name, [own, bias] in step(*grads).items():
            sent[name] += own.numpy() / size
            np.testing.assert_allclose(bias, sum(g[1] for g in grads), rtol=1e-6)
    for name, state in states.items():
        kept = sum(errors(state, 0, lambda own: own.numpy() / size))
        np.testing.assert_allclose(sent[name] + kept, total, atol=1e-4, err_msg=name)
        assert np.any(sent[name]), name


def test_memory_stays_where_an_approximation_overflows():
    def squared(tensor):
        return [tensor * tensor], lambda total: total

    state = ReducerState(error_feedback(squared), variables(2, shapes=SMALL))
    step = tf.function(state, autograph=False)
    ones = [[tf.ones(shape) for shape in SMALL]] * 2
    step(tf.nest.map_structure(lambda own: 3 * own, ones))
    before = errors(state, 0, lambda own: own.numpy())
    huge = [ones[0], [1e30 * own for own in ones[0]]]
    for row in step(huge):
        assert not all(np.isfinite(own).all() for own in row)
    np.testing.assert_array_equal(errors(state, 0, lambda own: own.numpy()), before)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "complex64"])
@pytest.mark.parametrize("bad", [None, np.inf, -np.inf, np.nan])
def test_gradients_without_memory_are_finite_if_their_elements_are(dtype, bad):
    dtype = tf.as_dtype(dtype)
    values = np.full(70, 6e4 if dtype == tf.float16 else 3e38, np.complex64)
    if bad is not None:
        values[3:5] = bad, (-bad) * (1j if dtype.is_complex else 1)
    values = values if dtype.is_complex else values.real
    state = ReducerState(power_sgd(), [[tf.Variable(tf.zeros([70], dtype))]])
    reduced = state.update([[tf.cast(values, dtype)]])
    assert bool(reduced.is_finite) == (bad is None)


class Momentum:
    """A reducer with memory that cannot be that of other towers."""

    def init(self, variables):
        return [{"sum": tf.zeros(own.shape)} for own in variables]

    def update(self, grads, states, add):
        sums = add(grads)
        new = [
            [{"sum": 0.9 * old["sum"] + own} for own, old in zip(*pair, strict=True)]
            for pair in zip(sums, states, strict=True)
        ]
        return [[own["sum"] for own in tower] for tower in new], new


SMALL = [(64, 80), (7,)]


def holder(reducer, num_towers):
    towers = variables(num_towers, shapes=SMALL)
    state = ReducerState(reducer, towers)
    return state, tf.train.Checkpoint(reducer=state), tf.function(state)


def small_gradients(num_towers, seed):
    random = np.random.default_rng(seed)
    return [
        [tf.constant(random.standard_normal(shape), tf.float32) for shape in SMALL]
        for _ in range(num_towers)
    ]


@pytest.mark.parametrize("is_made", [False, True])
@pytest.mark.parametrize("name", ["power_sgd", "momentum"])
def test_a_checkpoint_restores_memory_for_any_number_of_towers(
    is_made, name, tmp_path, caplog
):
    reducer = {**REDUCERS, "momentum": Momentum()}[name]
    state, checkpoint, step = holder(reducer, 2)
    for seed in range(3):
        step(small_gradients(2, seed))
    path = checkpoint.save(str(tmp_path / name))
    saved = [key for key, _ in tf.train.list_variables(path)]
    assert len([key for key in saved if "memories" in key]) == len(saved) - 2
    before = [[leaf.numpy() for leaf in own] for own in state._memories["0"].towers]
    grads = small_gradients(2, 4)
    want = step(grads)
    for num_towers in (2, 3):
        other, restored, go_on = holder(reducer, num_towers)
        if is_made:
            go_on(small_gradients(num_towers, 9))
        status = restored.restore(path)
        if not is_made:  # The step makes what is restored, and leaves it as it is.
            go_on([[tf.fill(own, np.nan) for own in SMALL]] * num_towers)
        status.assert_existing_objects_matched()
        kept = other._memories["0"].towers
        if num_towers == 2:
            for own, same in zip(go_on(grads)[0], want[0], strict=True):
                np.testing.assert_array_equal(own, same)
        elif name == "momentum":
            lines = [own.getMessage() for own in caplog.records]
            assert ["starts from zero" in own for own in lines] == [True]
        else:
            total = sum(own[0].numpy() for own in kept)
            np.testing.assert_allclose(total, sum(own[0] for own in before), atol=1e-6)
            for _, factor in kept:
                np.testing.assert_array_equal(factor, before[0][1])


SESSION = tf.compat.v1.ConfigProto(device_count={"CPU": len(CPUS)})


@contextmanager
def in_session(reducer, num_towers):
    """Yields a state, a step with it, and a session that has not run this."""
    with tf.Graph().as_default(), tf.compat.v1.Session(config=SESSION) as session:
        state = ReducerState(reducer, variables(num_towers, shapes=SMALL))
        step = state(small_gradients(num_towers, 0))
        session.run(tf.compat.v1.global_variables_initializer())
        yield state, step, session


def test_savers_of_sessions_keep_memory(tmp_path):
    saver, objects = (str(tmp_path / name) for name in ("saver", "objects"))
    with in_session(REDUCERS["power_sgd"], 2) as (state, step, session):
        first = session.run(step[0][0])
        tf.compat.v1.train.Saver().save(session, saver)
        tf.train.Checkpoint(reducer=state).write(objects)
        wanted = session.run(step[0][0])
    assert not np.array_equal(first, wanted)
    with in_session(REDUCERS["power_sgd"], 2) as (state, step, session):
        tf.compat.v1.train.Saver().restore(session, saver)
        np.testing.assert_array_equal(session.run(step[0][0]), wanted)
        status = tf.train.Checkpoint(reducer=state).read(objects)
        status.assert_consumed().run_restore_ops(session)
        np.testing.assert_array_equal(session.run(step[0][0]), wanted)


@pytest.mark.parametrize(
    ("saved", "restored", "says"),
    [(3, 2, "as many towers"), (3, 1, "as many towers"), (2, 3, "is missing")],
)
def test_savers_of_sessions_refuse_another_number_of_towers(
    saved, restored, says, tmp_path
):
    with in_session(REDUCERS["int8"], saved) as (_, step, session):
        session.run(step)
        path = tf.compat.v1.train.Saver().save(session, str(tmp_path / "saver"))
    with (
        in_session(REDUCERS["int8"], restored) as (_, _, session),
        pytest.raises(tf.errors.OpError) as found,
    ):
        tf.compat.v1.train.Saver().restore(session, path)
    assert says in str(found.value)
    # The file's graph is not of another number.
    with tf.Graph().as_default(), tf.compat.v1.Session(config=SESSION) as session:
        tf.compat.v1.train.import_meta_graph(f"{path}.meta").restore(session, path)


@pytest.mark.parametrize("resizes", [True, False])
def test_sessions_divide_memory_between_other_towers(resizes, tmp_path, caplog):
    power, path = REDUCERS["power_sgd"], str(tmp_path / "objects")

    class Whole:
        init, update = power.init, power.update

    reducer = power if resizes else Whole()
    with in_session(reducer, 2) as (state, step, session):
        kept = [own.stacked() for own in state._memories.values()]
        session.run(step)
        tf.train.Checkpoint(reducer=state).write(path)
        saved = session.run(kept)
    with in_session(reducer, 3) as (state, _, session):
        kept = [own.stacked() for own in state._memories.values()]
        made = session.run(kept)
        status = tf.train.Checkpoint(reducer=state).read(path)
        status.assert_consumed().run_restore_ops(session)
        restored = session.run(kept)
    lines = [line for line in caplog.messages if "starts from zero" in line]
    assert len(lines) == (not resizes)
    if not resizes:
        np.testing.assert_equal(restored, made)
        return
    for own, before in zip(restored, saved, strict=True):
        total = before["leaf_0"].sum(0)
        np.testing.assert_allclose(own["leaf_0"].sum(0), total, atol=1e-6)
        np.testing.assert_equal(own["leaf_1"], [before["leaf_1"][0]] * 3)


def first_row(tensor):
    """Sends a row as int32, at an index that is its first element."""
    shape = tf.constant(list(tensor.shape), tf.int64)
    place = tf.cast(tensor[:1, 0], tf.int64)
    sent = tf.IndexedSlices(tf.cast(tensor[:1], tf.int32), place, shape)

    def read(total, rows, nothing):
        assert len(from_rows(nothing, [])) == 0
        [octets] = from_rows(rows, [tf.TensorSpec([3], tf.uint8)])
        values = tf.cast(total.values, tensor.dtype)
        table = tf.math.unsorted_segment_sum(values, total.indices, tensor.shape[0])
        return table + tf.reduce_sum(tf.cast(octets, tensor.dtype))

    return [sent, to_row([tf.constant([0, 0, 7], tf.uint8)]), to_row([])], read


@pytest.mark.parametrize("count", [1, 2])
def test_rows_of_a_compressor_of_ones_own_keep_their_indices(count):
    towers = variables(2, shapes=[(3, 2)] * count)
    state = ReducerState(error_feedback(first_row, min_elements=0), towers)
    grads = [[np.zeros((3, 2), F32) for _ in range(count)] for _ in range(2)]
    for k, own in enumerate(grads):
        for n, grad in enumerate(own):
            grad[0] = [(n + k) % 3, 5 + n]
    sums = tf.function(state, autograph=False)(
        tf.nest.map_structure(tf.constant, grads)
    )
    for n, own in enumerate(sums[1]):
        want = np.full((3, 2), 2 * 7)
        for k in range(2):
            want[(n + k) % 3] += grads[k][n][0].astype(int)
        np.testing.assert_array_equal(own, want)


def largest_norm(grads):
    """Returns, for each variable and to every tower, the gradient of largest norm."""
    best = []
    for column in zip(*grads, strict=True):
        norms = tf.stack([tf.norm(grad) for grad in column])
        best.append(tf.gather(tf.stack(column), tf.argmax(norms)))
    return [list(best) for _ in grads]


def test_a_reducer_that_looks_at_whole_gradients_gets_no_packs():
    grads = [
        [tf.constant([10.0, 0]), tf.constant([1.0])],
        [tf.constant([1.0, 0]), tf.constant([5.0])],
    ]
    for around in (packed, broadcast, lambda own: packed(broadcast(own))):
        for row in around(largest_norm)(grads):
            assert [own.numpy().tolist() for own in row] == [[10.0, 0], [5.0]]
        [row, _] = mean(around(largest_norm))(grads)
        assert [own.numpy().tolist() for own in row] == [[5.0, 0], [2.5]]
        [row, _] = around(mean(largest_norm, weights=[1, 1]))(grads)
        assert [own.numpy().tolist() for own in row] == [[5.0, 0], [2.5]]


def test_it_is_told_what_travels():
    state, _, step = holder(power_sgd(rank=2), 2)
    step(small_gradients(2, 0))
    sent = 4 * (2 * (64 + 80) + 7) + 4  # and whether gradients are finite
    assert state.describe() == (
        f"{sent:,} bytes in 2 sums, for gradients of {4 * (64 * 80 + 7):,} bytes"
    )
