"""tensorpack's names: its arguments and results, and what it refused or skipped."""

from contextlib import nullcontext
from functools import partial

import keras
import numpy as np
import pytest
import tensorflow as tf

from tw_core.testing import CPUS, SparseRows, run_in_function, run_in_graph
from tw_reduce import (
    auto,
    hierarchical,
    reducer_for_mode,
    sum_nccl,
    sum_on_device,
)
from tw_reduce.reducers import CollectiveKeys
from tw_reduce.tensorpack import (
    GradientPacker,
    aggregate_grads_colocate,
    allreduce_grads,
    allreduce_grads_hierarchical,
    allreduce_grads_naive,
)

EIGHT = list(CPUS)
each_mode = pytest.mark.parametrize("run", [run_in_graph, run_in_function])
KEYS = CollectiveKeys()


def towers_of(num_towers, shapes=((3,), (2, 4), ()), seed=0):
    random = np.random.default_rng(seed)
    return [
        [random.integers(-8, 9, shape).astype(np.float32) + 0 for shape in shapes]
        for _ in range(num_towers)
    ]


def sums(towers):
    return [sum(column) for column in zip(*towers, strict=True)]


def placed(fn, grads):
    rows = []
    for device, tower in zip(CPUS, grads, strict=False):
        with tf.device(device):
            rows.append([tf.identity(grad) for grad in tower])
    return fn(rows)


def arrays(towers):
    return [[np.asarray(grad, np.float32) for grad in tower] for tower in towers]


def assert_rows(got, want):
    for row in got:
        for value, wanted in zip(row, want, strict=True):
            np.testing.assert_array_equal(value, wanted)


@each_mode
@pytest.mark.parametrize("average", [False, True])
def test_allreduce_grads_adds_between_the_gradients_own_devices(run, average):
    towers = arrays(towers_of(4))
    fn = partial(allreduce_grads, average=average, mode="collective", keys=KEYS)
    got = run(partial(placed, fn), towers)
    assert len(got) == 4
    assert_rows(got, [total / (4 if average else 1) for total in sums(towers)])


def test_allreduce_grads_by_nccl_is_refused_without_gpus():
    with (
        tf.Graph().as_default(),
        pytest.raises(ValueError, match=r"NCCL adds between GPUs only.*sum_balanced"),
    ):
        placed(partial(allreduce_grads, average=True), arrays(towers_of(2)))


@each_mode
@pytest.mark.parametrize("average", [False, True])
def test_allreduce_grads_hierarchical_adds_eight_towers(run, average):
    towers = arrays(towers_of(8))
    fn = partial(allreduce_grads_hierarchical, devices=EIGHT, average=average)
    got = run(partial(placed, fn), towers)
    assert_rows(got, [total / (8 if average else 1) for total in sums(towers)])


def test_allreduce_grads_hierarchical_needs_eight_towers():
    with pytest.raises(ValueError, match=r"eight devices.*got 4 and 4.*hierarchical\("):
        allreduce_grads_hierarchical([[tf.ones(2)]] * 4, EIGHT[:4])


@each_mode
def test_allreduce_grads_naive_returns_one_list_of_means(run):
    towers = arrays(towers_of(4))
    got = run(partial(allreduce_grads_naive, devices=EIGHT[:2]), towers)
    assert len(got) == 3
    assert_rows([got], [total / 4 for total in sums(towers)])
    got = run(partial(allreduce_grads_naive, average=False), towers)
    assert_rows([got], sums(towers))


@pytest.mark.parametrize("average", [False, True])
def test_aggregate_grads_colocate_adds_where_each_variable_lives(average):
    towers = arrays(towers_of(3, [(3,), (2, 4), (5,), (40_000,)]))
    with tf.Graph().as_default():
        variables = []
        for n, grad in enumerate(towers[0]):
            with tf.device(CPUS[n % 2 + 3]):
                variables.append(tf.compat.v1.get_variable(f"v{n}", grad.shape))
        pairs = [list(zip(map(tf.constant, t), variables, strict=True)) for t in towers]
        got = aggregate_grads_colocate(pairs, average=average)
        assert [variable for _, variable in got] == variables
        for grad, variable in got:
            assert grad.device == variable.device
        config = tf.compat.v1.ConfigProto(device_count={"CPU": 8})
        with tf.compat.v1.Session(config=config) as session:
            values = session.run([grad for grad, _ in got])
    for value, total in zip(values, sums(towers), strict=True):
        np.testing.assert_allclose(value, total / (3 if average else 1), rtol=1e-6)


def test_aggregate_grads_colocate_keeps_sparse_gradients_sparse():
    rows = [
        SparseRows(
            np.ones((2, 2), np.float32), np.array([k, 3]), np.array([5, 2], np.int64)
        )
        for k in range(2)
    ]
    variable = tf.Variable(tf.zeros([5, 2]))

    def fn(grads):
        [(grad, own)] = aggregate_grads_colocate([[(g[0], variable)] for g in grads])
        assert own is variable
        return grad

    got = run_in_function(fn, [[row] for row in rows])
    assert isinstance(got, SparseRows)
    np.testing.assert_array_equal(
        got.to_dense(), (rows[0].to_dense() + rows[1].to_dense()) / 2
    )


def test_aggregate_grads_colocate_needs_shared_variables_and_floats():
    one, other = tf.Variable([1.0], name="one"), tf.Variable([1.0], name="other")
    grad = tf.ones(1)
    with pytest.raises(ValueError, match="one is a variable of their own in towers"):
        aggregate_grads_colocate([[(grad, one)], [(grad, other)]])
    whole = tf.ones(1, tf.int32)
    with pytest.raises(TypeError, match=r"others at positions 1 \(int32\)"):
        aggregate_grads_colocate([[(grad, one), (whole, other)]] * 2)


@each_mode
@pytest.mark.parametrize("num_split", [1, 3, 8])
def test_the_packer_gives_every_gradient_back(run, num_split):
    shapes = [(100, 90), (7,), (), (33, 11)]
    towers = arrays(towers_of(2, shapes))

    def fn(grads):
        packer = GradientPacker(num_split)
        assert packer.compute_strategy(grads[0]) is True
        packs = packer.pack_all(grads, CPUS[:2])
        assert [len(row) for row in packs] == [num_split] * 2
        return packer.unpack_all(packs, CPUS[:2])

    for row, tower in zip(run(fn, towers), towers, strict=True):
        assert_rows([row], tower)


@each_mode
def test_the_packer_takes_mixed_dtypes(run):
    tower = [
        np.arange(5000, dtype=np.float32),
        np.arange(4000, dtype=np.float64),
        np.ones((3, 2), np.float32),
    ]

    def fn(grads):
        packer = GradientPacker(2)
        assert packer.compute_strategy(grads) is True
        return packer.unpack(packer.pack(grads))

    got = run(fn, tower)
    assert [value.dtype for value in got] == [value.dtype for value in tower]
    assert_rows([got], tower)


def test_the_packer_says_when_it_cannot_pack():
    assert GradientPacker(8).compute_strategy([tf.ones(100)]) is False
    with tf.Graph().as_default():
        unknown = tf.compat.v1.placeholder(tf.float32, [None])
        assert GradientPacker(1).compute_strategy([unknown]) is False


@pytest.mark.parametrize("mode", ["graph", "function"])
def test_the_packer_compares_in_the_run_what_it_does_not_know(mode):
    shapes = [(60, 50), (3,)]
    grads = [np.full(shape, 2, np.float32) for shape in shapes]

    def there_and_back(*later):
        packer = GradientPacker(2)
        assert packer.compute_strategy([tf.ones(shape) for shape in shapes])
        pieces = packer.pack(later[:2])
        return packer.unpack([later[2], *pieces[1:]])

    specs = [tf.TensorSpec(None), tf.TensorSpec([None]), tf.TensorSpec(None)]
    step = steps(mode, tf.Graph(), there_and_back, specs)
    piece = np.full([1501], 5, np.float32)
    got = step(*grads, piece)
    np.testing.assert_array_equal(np.ravel(got[0])[:1501], piece)
    np.testing.assert_array_equal(got[1], grads[1])
    wrong = {
        r"(?s)check_gradient_shape/pack_position0.*\[50,60\] .*\[60,50\]": (
            grads[0].T,
            grads[1],
            piece,
        ),
        r"(?s)check_gradient_shape/pack_position1.*\[4\] .*expected shape \[3\]": (
            grads[0],
            np.ones(4, np.float32),
            piece,
        ),
        r"(?s)check_gradient_shape/unpack_position0.*\[1,1501\] .*\[1501\]": (
            *grads,
            piece[None],
        ),
    }
    for message, fed in wrong.items():
        with pytest.raises(tf.errors.InvalidArgumentError, match=message):
            step(*fed)


def steps(mode, graph, fn, specs):
    """Returns a function of arrays that runs ``fn`` on tensors of these specs."""
    if mode == "function":
        return tf.function(fn, specs, autograph=False)
    with graph.as_default():
        fed = [tf.compat.v1.placeholder(spec.dtype, spec.shape) for spec in specs]
        results = fn(*fed)
        config = tf.compat.v1.ConfigProto(device_count={"CPU": len(CPUS)})
        session = tf.compat.v1.Session(config=config)
    return lambda *arrays: session.run(results, dict(zip(fed, arrays, strict=True)))


@pytest.mark.parametrize("mode", ["graph", "function"])
def test_a_variables_gradients_of_unknown_shape_are_compared_in_the_run(mode):
    specs = [tf.TensorSpec(None), tf.TensorSpec([None, 2])]

    def add(*grads):
        pairs = aggregate_grads_colocate([[(grad, variable)] for grad in grads])
        return [grad for grad, _ in pairs]

    good = [np.full([3, 2], k, np.float32) for k in (1, 3)]
    graph = tf.Graph()
    with graph.as_default() if mode == "graph" else nullcontext():
        variable = tf.Variable(tf.zeros([3, 2]), name="table")
    step = steps(mode, graph, add, specs)
    np.testing.assert_array_equal(step(*good)[0], np.full([3, 2], 2))
    wanted = r"(?s)check_gradient_shape/tower1/table.*\[4,2\] is not .*\[3,2\]"
    with pytest.raises(tf.errors.InvalidArgumentError, match=wanted):
        step(good[0], np.ones([4, 2], np.float32))


def test_the_packer_names_everything_that_differs_from_its_plan():
    packer = GradientPacker(1)
    assert packer.compute_strategy([tf.ones(2000)])
    wanted = (
        r"^tensors must be those that compute_strategy saw; there "
        r"are 2 instead of 1, 0 is float16 \(2001,\) instead of float32 \(2000,\)\."
    )
    with pytest.raises(ValueError, match=wanted):
        packer.pack([tf.ones(2001, tf.float16), tf.ones(3)])


@each_mode
@pytest.mark.parametrize("mode", ["cpu", "gpu", "collective"])
def test_a_mode_name_is_a_reducer(run, mode):
    towers = arrays(towers_of(2))
    reducer = reducer_for_mode(mode, CPUS[:2], keys=KEYS)
    assert_rows(run(partial(placed, reducer), towers), sums(towers))


def test_the_mode_hierarchical_means_eight_towers():
    towers = arrays(towers_of(8))
    reducer = reducer_for_mode("hierarchical", EIGHT)
    assert_rows(run_in_graph(partial(placed, reducer), towers), sums(towers))
    with pytest.raises(ValueError, match=r"eight towers; got 4.*hierarchical\(groups"):
        reducer_for_mode("hierarchical", EIGHT[:4])


def test_unknown_modes_and_nccl_without_gpus_are_refused():
    known = r"\['collective', 'cpu', 'gpu', 'hierarchical', 'nccl'\]"
    with pytest.raises(ValueError, match=f"Unknown mode 'ring'; known are {known}"):
        reducer_for_mode("ring", CPUS[:2])
    with pytest.raises(ValueError, match="NCCL adds between GPUs only"):
        reducer_for_mode("nccl", CPUS[:2])


def test_nccl_names_its_alternatives():
    with (
        tf.Graph().as_default(),
        pytest.raises(ValueError, match=r"this process has no GPU.*sum_collective"),
    ):
        sum_nccl([[tf.ones(2)]] * 2, devices=["/gpu:0", "/gpu:1"], keys=KEYS)


def test_nccl_is_refused_where_towers_share_a_gpu(monkeypatch):
    gpu = tf.config.PhysicalDevice("/physical_device:GPU:0", "GPU")
    parts = [tf.config.LogicalDeviceConfiguration(memory_limit=64)] * 2
    devices = {"CPU": tf.config.get_visible_devices("CPU"), "GPU": [gpu]}
    configured = {gpu: parts}
    monkeypatch.setattr(tf.config, "get_visible_devices", devices.get)
    monkeypatch.setattr(tf.config, "get_logical_device_configuration", configured.get)
    with (
        tf.Graph().as_default(),
        pytest.raises(ValueError, match="a GPU for each tower; got 2 towers on 1"),
    ):
        sum_nccl([[tf.ones(2)]] * 2, devices=["/gpu:0", "/gpu:1"], keys=KEYS)


def test_groups_must_hold_every_tower_once():
    with tf.Graph().as_default():
        grads = [[tf.ones(2)] for _ in range(3)]
        with pytest.raises(ValueError, match="tower"):
            hierarchical([[0, 1]])(grads)
        with pytest.raises(ValueError, match="1"):
            hierarchical([[0, 1], [1, 2]])
        with pytest.raises(ValueError, match=r"empty|tower"):
            hierarchical([[0, 1, 2], []])


def test_unknown_devices_are_refused_in_a_function():
    with pytest.raises(ValueError, match=r"Unknown devices \['/cpu:77'\]"):
        run_in_function(partial(sum_on_device, device="/cpu:77"), arrays(towers_of(2)))


def test_keys_never_come_twice():
    keys = CollectiveKeys(start=10)
    group = keys.group(CPUS[:2])
    assert keys.group(["/device:CPU:1", "/cpu:0"]) == group
    given = [group, keys.group(CPUS[:3]), *(keys.instance() for _ in range(5))]
    assert len(set(given)) == len(given)
    with pytest.raises(ValueError, match=r"between 1 and 2\*\*30; got 0"):
        CollectiveKeys(start=0)


def test_auto_explains_itself():
    plans = []
    towers = arrays(towers_of(2))
    reducer = auto(CPUS[:2], explain=plans.append)
    assert_rows(run_in_graph(partial(placed, reducer), towers), sums(towers))
    assert [choice.tensor.index for choice in plans[0].choices] == [0, 1, 2]
    assert "bytes per tower" in str(plans[0])


def test_gradients_of_keras_variables_are_added_where_those_are():
    with tf.device(CPUS[1]):
        variables = [keras.Variable([1.0, 2.0]), tf.Variable([3.0, 4.0])]
    pairs = [[(tf.constant([k, 2.0]), v) for v in variables] for k in (1.0, 3.0)]
    reduced = aggregate_grads_colocate(pairs)
    assert all(v is own for (_, v), own in zip(reduced, variables, strict=True))
    for grad, _ in reduced:
        assert grad.device.endswith("CPU:1")
        np.testing.assert_array_equal(grad, [2, 2])
