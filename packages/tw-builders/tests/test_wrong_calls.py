"""Every public function answers a wrong call in a sentence that names it."""

import threading
from functools import partial

import pytest
import tensorflow as tf

import tw_builders
from tw_builders import (
    AsyncMultiGPUBuilder,
    AsyncRunner,
    DataParallelBuilder,
    SyncMultiGPUParameterServerBuilder,
    SyncMultiGPUReplicatedBuilder,
    SyncMultiGPUShardedBuilder,
    SyncVariablesHook,
    TowerModel,
    apply_at_owners,
    apply_gradients,
    apply_sharded_gradients,
    apply_shared_gradients,
    locked_step,
    make_optimizers,
    make_sharded_optimizer,
    owned_variables,
    per_tower,
)
from tw_core import towers
from tw_core.testing import CPUS, WrongCall, check_wrong_call, names_without_wrong_calls

v1 = tf.compat.v1
TWO = list(CPUS[:2])
OURS = towers(TWO)
NAN = float("nan")
descend = partial(v1.train.GradientDescentOptimizer, 0.1)
BUILDERS = {
    "SyncMultiGPUParameterServerBuilder": partial(
        SyncMultiGPUParameterServerBuilder, ps_device="cpu"
    ),
    "SyncMultiGPUReplicatedBuilder": partial(
        SyncMultiGPUReplicatedBuilder, average=True, mode="cpu"
    ),
    "SyncMultiGPUShardedBuilder": partial(SyncMultiGPUShardedBuilder, average=True),
    "AsyncMultiGPUBuilder": AsyncMultiGPUBuilder,
}


def rows(name, call, *cases):
    """Makes a row of each (arguments, error, part of the message)."""
    return [
        WrongCall(name, partial(call, *args), error, says)
        for args, error, says in cases
    ]


def averaging(grads):
    """Stands for a reducer that gives means, and says so."""
    return grads


averaging.averages = True


def no_flag(name):
    return [
        ((value,), TypeError, f"{name} must be True or False; got {value!r}")
        for value in (None, "no", 1)
    ]


def no_function(name):
    return [
        ((value,), TypeError, f"{name} must be a function; got {value!r}")
        for value in (None, "adam", 3)
    ]


def no_devices():
    return [
        ((None,), TypeError, "must be a list of ints and device strings; got None"),
        (("/cpu:0",), TypeError, "got '/cpu:0'"),
        (([],), ValueError, "at least one tower is needed"),
        (([None],), TypeError, "a device is an int (GPU number) or a string; got None"),
        ((["cpu zero"],), ValueError, "'cpu zero' is not a TensorFlow device string"),
        (([-1],), ValueError, "a GPU number is 0 or more; got -1"),
    ]


def no_optimizer():
    return [
        (
            (lambda: None,),
            TypeError,
            "with apply_gradients(pairs), as tf.compat.v1",
        ),
        ((lambda: "adam",), TypeError, "AdamOptimizer() is; got str"),
        (
            (lambda: v1.train.AdamOptimizer,),
            TypeError,
            "got the class AdamOptimizer",
        ),
        (
            (lambda: tf.keras.optimizers.SGD(0.1),),
            TypeError,
            "SGD, a Keras 3 optimizer, does not work in a session graph",
        ),
    ]


def tower_pairs():
    return [(tf.ones([2]), v1.get_variable("w", [2]))]


def built(name):
    builder = BUILDERS[name](TWO)
    return builder, builder.call_for_each_tower(tower_pairs)


def with_grads(name, method="build"):
    return lambda grads: getattr(BUILDERS[name](TWO), method)(grads, descend)


def with_get_opt_fn(name, method="build"):
    def call(get_opt_fn):
        builder, grads = built(name)
        getattr(builder, method)(grads, get_opt_fn)

    return call


def with_gradient(name, method, make):
    """Builds with one gradient in both towers."""

    def call():
        builder, grads = built(name)
        bad = make()
        pairs = [[(bad, variable) for _, variable in own] for own in grads]
        getattr(builder, method)(pairs, descend)

    return call


def of_another_graph():
    with tf.Graph().as_default():
        return tf.ones([2])


def of_builder(name, make, method="build"):
    """The rows that every builder has."""
    whole = f"{name}.{method}"
    kinds = {
        "of another graph in towers [0, 1]": of_another_graph,
        "gradients of dtypes ['bool', 'bool']": lambda: tf.constant([True, False]),
        "gradients of dtypes ['string', 'string']": lambda: tf.constant(["a", "b"]),
        "gradients of dtypes ['complex128', 'complex128']": lambda: tf.constant(
            [1j, 2j]
        ),
        "w has gradient None in towers [0, 1]": lambda: None,
    }
    return [
        *rows(name, make, *no_devices()),
        *rows(
            f"{name}.call_for_each_tower",
            lambda tower_fn: make(TWO).call_for_each_tower(tower_fn),
            *no_function("tower_fn"),
        ),
        *rows(
            whole,
            with_grads(name, method),
            (
                (None,),
                TypeError,
                "grad_list must be a list of lists of pairs; got None",
            ),
            ((3,), TypeError, "got 3"),
            (("ab",), TypeError, "got 'ab'"),
            (([],), ValueError, "got 0 lists for 2 towers"),
            (([3, 4],), TypeError, "one list of (gradient, variable) pairs"),
        ),
        *rows(whole, with_get_opt_fn(name, method), *no_function("get_opt_fn")),
        *rows(whole, with_get_opt_fn(name, method), *no_optimizer()),
        *[
            WrongCall(
                whole,
                with_gradient(name, method, kind),
                ValueError,
                says,
            )
            for says, kind in kinds.items()
        ],
    ]


def call_with(**given):
    """Passes one argument of ``call_for_each_tower`` by name."""
    return DataParallelBuilder.call_for_each_tower(
        **({"towers": TWO, "func": tower_pairs} | given)
    )


def of_call(name, *cases):
    return rows(
        "DataParallelBuilder.call_for_each_tower",
        lambda value: call_with(**{name: value}),
        *cases,
    )


CALLS = [
    *rows("DataParallelBuilder", DataParallelBuilder, *no_devices()),
    *of_call("towers", *no_devices()),
    *of_call("func", *no_function("func")),
    *of_call(
        "devices",
        ((3,), TypeError, "devices must be a list"),
        (("ab",), TypeError, "got 'ab'"),
        ((TWO[:1],), ValueError, "got {'devices': 1} for 2 towers"),
        (([3, None],), TypeError, "device strings and functions; got [3, None]"),
        ((["cpu zero", None],), ValueError, "is not a TensorFlow device string"),
    ),
    *of_call(
        "use_vs",
        ((3,), TypeError, "use_vs must be a list"),
        (("ab",), TypeError, "got 'ab'"),
        (([True],), ValueError, "got {'use_vs': 1}"),
        (([None, None],), TypeError, "use_vs must be True or False; got None"),
        (([0, 1],), TypeError, "got 0"),
    ),
    *rows(
        "DataParallelBuilder.build_on_towers",
        DataParallelBuilder.build_on_towers,
        ((TWO, None), TypeError, "func must be a function; got None"),
        ((None, tower_pairs), TypeError, "device strings; got None"),
    ),
]

CLASSES = [
    *[row for name, make in BUILDERS.items() for row in of_builder(name, make)],
    *of_builder("AsyncMultiGPUBuilder", AsyncMultiGPUBuilder, "build_tower_ops"),
    *rows(
        "SyncMultiGPUParameterServerBuilder",
        lambda ps_device: SyncMultiGPUParameterServerBuilder(TWO, ps_device),
        ((None,), ValueError, "ps_device must be 'cpu'"),
        (("tpu",), ValueError, "got 'tpu'"),
        ((["cpu"],), ValueError, "got ['cpu']"),
    ),
    *rows(
        "SyncMultiGPUReplicatedBuilder",
        lambda average: SyncMultiGPUReplicatedBuilder(TWO, average, "cpu"),
        *no_flag("average"),
    ),
    *rows(
        "SyncMultiGPUReplicatedBuilder",
        lambda mode: SyncMultiGPUReplicatedBuilder(TWO, True, mode),
        ((3,), TypeError, "mode must be a name or a reducer; got 3"),
        ((3,), TypeError, "got 3"),
        (("ring",), ValueError, "unknown mode 'ring'"),
        ((averaging,), ValueError, "mode averages already"),
    ),
    *rows(
        "SyncMultiGPUShardedBuilder",
        lambda average: SyncMultiGPUShardedBuilder(TWO, average),
        *no_flag("average"),
    ),
    *rows(
        "AsyncMultiGPUBuilder",
        lambda scale: AsyncMultiGPUBuilder(TWO, scale),
        *no_flag("scale_gradient"),
    ),
    *rows(
        "AsyncMultiGPUBuilder.build_tower_ops",
        lambda share: AsyncMultiGPUBuilder(TWO).build_tower_ops(
            built("AsyncMultiGPUBuilder")[1], descend, share_optimizer=share
        ),
        *no_flag("share_optimizer"),
    ),
    *rows(
        "SyncVariablesHook",
        SyncVariablesHook,
        (("sync",), TypeError, "or None; got 'sync'"),
        ((3,), TypeError, "got 3"),
    ),
    *rows(
        "SyncVariablesHook.after_create_session",
        lambda session: SyncVariablesHook(None).after_create_session(session, None),
        ((None,), TypeError, "session must be a session; got None"),
    ),
]


def applied(**given):
    """Passes one argument of ``apply_gradients`` by name."""
    right = {
        "towers": OURS,
        "grads": [[tf.ones([2])], [tf.ones([2])]],
        "replicas": [[tf.Variable([1.0, 2.0], name="w")] for _ in TWO],
        "optimizers": [descend(), descend()],
    }
    return apply_gradients(**(right | given))


def applied_in_shards(**given):
    """Passes one argument of ``apply_sharded_gradients`` by name."""
    right = {
        "towers": OURS,
        "grads": [[tf.ones([2])], [tf.ones([2])]],
        "replicas": [[tf.Variable([1.0, 2.0], name="w")] for _ in TWO],
        "optimizer": descend(),
    }
    return apply_sharded_gradients(**(right | given))


def applied_at_owners(**given):
    """Passes one argument of ``apply_at_owners`` by name."""
    right = {
        "towers": OURS,
        "grads": [[tf.ones([2])], [tf.ones([2])]],
        "replicas": [[tf.Variable([1.0, 2.0], name="w")] for _ in TWO],
        "optimizer": descend(),
    }
    return apply_at_owners(**(right | given))


def elsewhere():
    """A replica per tower, the second of which is on the first one's device."""
    with tf.device("/cpu:0"):
        return [[tf.Variable([1.0, 2.0], name=name)] for name in ("w", "tower1/w")]


def one_for_both():
    return [[tf.Variable([1.0, 2.0], name="w")]] * 2


def of_replicas(name, call):
    """The rows of what takes towers and replicas."""
    return [
        *rows(
            name,
            lambda towers: call(towers=towers),
            ((None,), TypeError, "towers must be a list of tw_core.Tower; got None"),
            (("ab",), TypeError, "got 'ab'"),
            (([],), ValueError, "towers is empty; make some with"),
            ((TWO,), TypeError, "must hold tw_core.Tower; got ['/cpu:0', '/cpu:1']"),
        ),
        *rows(
            name,
            lambda replicas: call(replicas=replicas),
            ((None,), TypeError, "a list of one item per tower; got None"),
            (([[]],), ValueError, "one item per tower; got {"),
            (([None, None],), TypeError, "or have trainable_variables; got NoneType"),
            (([["w"], ["w"]],), TypeError, "must hold variables; got ['w']"),
        ),
        *rows(
            name,
            lambda make: call(replicas=make()),
            (
                (elsewhere,),
                ValueError,
                "tower1/w:0 of tower1 is on '/device:CPU:0'",
            ),
            ((one_for_both,), ValueError, "w:0"),
        ),
    ]


def with_replicas(function, *others):
    def call(**given):
        made = [[tf.Variable([1.0, 2.0], name="w")] for _ in TWO]
        right = {"towers": OURS, "replicas": made}
        ours, replicas = (right | given).values()
        return function(ours, *others, replicas)

    return call


def made_by(get_opt_fn):
    return with_replicas(make_sharded_optimizer, get_opt_fn)()


def shared(optimizer, **given):
    pairs = [(tf.ones([2]), tf.Variable([1.0, 2.0]))]
    return apply_shared_gradients([pairs], optimizer, **given)


def batches(**shapes):
    """A dataset of zeros of these shapes."""
    return tf.data.Dataset.from_tensors(
        {name: tf.zeros(shape) for name, shape in shapes.items()}
    )


def of_input(name, call):
    """The rows of what takes a dataset."""
    return [
        *rows(
            name,
            call,
            ((None,), TypeError, "must be a tf.data.Dataset; got None"),
            (([1, 2],), TypeError, "got [1, 2]"),
        ),
        *[
            WrongCall(name, lambda make=make: call(make()), error, says)
            for make, error, says in (
                (lambda: batches(x=[4], y=[]), ValueError, "got 1 scalar(s)"),
                (lambda: batches(x=[4], y=[3]), ValueError, "['(4,)', '(3,)']"),
                (
                    lambda: batches(x=[4]).window(2),
                    TypeError,
                    "dense, ragged and sparse tensors; got [DatasetSpec",
                ),
            )
        ],
    ]


FUNCTIONS = [
    *of_input("per_tower", lambda dataset: per_tower(dataset, OURS)),
    *rows(
        "per_tower",
        lambda ours: per_tower(batches(x=[4]), ours),
        ((None,), TypeError, "towers must be a list of tw_core.Tower; got None"),
        (([],), ValueError, "towers is empty"),
        ((TWO,), TypeError, "must hold tw_core.Tower; got ['/cpu:0', '/cpu:1']"),
    ),
    *rows(
        "per_tower",
        lambda prefetch: per_tower(batches(x=[4]), OURS, prefetch=prefetch),
        ((0,), ValueError, "prefetch must be at least 1; got 0"),
        ((1.5,), TypeError, "prefetch must be a whole number; got 1.5"),
        ((None,), TypeError, "got None"),
    ),
    *[
        row
        for name, wanted in {
            "towers": "a list of tw_core.Tower",
            "grads": "a list of one item per tower",
            "replicas": "a list of one item per tower",
            "optimizers": "a list of one item per tower",
        }.items()
        for row in rows(
            "apply_gradients",
            lambda value, name=name: applied(**{name: value}),
            ((None,), TypeError, f"{name} must be {wanted}; got None"),
            (("ab",), TypeError, "got 'ab'"),
            ((3,), TypeError, "got 3"),
            (
                ([],),
                ValueError,
                "towers is empty" if name == "towers" else "one item per tower",
            ),
        )
    ],
    *rows(
        "apply_gradients",
        lambda towers: applied(towers=towers),
        ((TWO,), TypeError, "must hold tw_core.Tower; got ['/cpu:0', '/cpu:1']"),
    ),
    *rows(
        "apply_gradients",
        lambda grads: applied(grads=grads),
        (([None, None],), TypeError, "grads must be a list with one list of gradients"),
        (([["g"], ["g"]],), TypeError, "something else at tower 0 item 0"),
        (([[None], [None]],), ValueError, "w has gradient None in towers [0]"),
    ),
    *rows(
        "apply_gradients",
        lambda replicas: applied(replicas=replicas),
        (([None, None],), TypeError, "or have trainable_variables; got NoneType"),
        ((["w", "w"],), TypeError, "or have trainable_variables; got str"),
        (([["w"], ["w"]],), TypeError, "must hold variables; got ['w']"),
    ),
    *rows(
        "apply_gradients",
        lambda optimizers: applied(optimizers=optimizers),
        (
            ([None, None],),
            TypeError,
            "with apply_gradients(pairs), as tf.compat.v1",
        ),
        ((["adam"] * 2,), TypeError, "AdamOptimizer() is; got str"),
        (([descend()] * 2,), ValueError, "towers 0 and 1 got the same"),
        (([v1.train.AdamOptimizer] * 2,), TypeError, "got the class AdamOptimizer"),
    ),
    *of_replicas("apply_sharded_gradients", applied_in_shards),
    *rows(
        "apply_sharded_gradients",
        lambda grads: applied_in_shards(grads=grads),
        ((None,), TypeError, "a list of one item per tower; got None"),
        (([None, None],), TypeError, "grads must be a list with one list of gradients"),
        (([["g"], ["g"]],), TypeError, "something else at tower 0 item 0"),
        (([[None], [None]],), ValueError, "w has gradient None in towers [0]"),
    ),
    *rows(
        "apply_sharded_gradients",
        lambda optimizer: applied_in_shards(optimizer=optimizer),
        ((None,), TypeError, "with apply_gradients(pairs), as tf.compat.v1"),
        (([descend()] * 2,), TypeError, "got list"),
        ((v1.train.AdamOptimizer,), TypeError, "got the class AdamOptimizer"),
        (
            (tf.keras.optimizers.SGD(0.1),),
            TypeError,
            "SGD, a Keras 3 optimizer, does not work in a session graph",
        ),
    ),
    *rows(
        "apply_sharded_gradients",
        lambda average: applied_in_shards(average=average),
        *no_flag("average"),
    ),
    *of_replicas("apply_at_owners", applied_at_owners),
    *rows(
        "apply_at_owners",
        lambda grads: applied_at_owners(grads=grads),
        ((None,), TypeError, "a list of one item per tower; got None"),
        (([None, None],), TypeError, "grads must be a list with one list of gradients"),
        (([["g"], ["g"]],), TypeError, "something else at tower 0 item 0"),
        (([[], []],), ValueError, "the same lengths; got [0, 0] gradients"),
        (([[None], [None]],), ValueError, "no gradient for any variable; got ['w"),
    ),
    *rows(
        "apply_at_owners",
        lambda make: applied_at_owners(grads=make()),
        ((lambda: [[tf.ones([2])], [None]],), ValueError, "in some towers for w"),
        ((lambda: [[tf.ones([3])]] * 2,), ValueError, "w"),
    ),
    *rows(
        "apply_at_owners",
        lambda optimizer: applied_at_owners(optimizer=optimizer),
        ((None,), TypeError, "with apply_gradients(pairs), as tf.compat.v1"),
        ((v1.train.AdamOptimizer,), TypeError, "got the class AdamOptimizer"),
    ),
    *of_replicas(
        "make_sharded_optimizer", with_replicas(make_sharded_optimizer, descend)
    ),
    *rows("make_sharded_optimizer", made_by, *no_function("get_opt_fn")),
    *rows("make_sharded_optimizer", made_by, *no_optimizer()),
    *of_replicas("owned_variables", with_replicas(owned_variables)),
    *rows(
        "apply_shared_gradients",
        lambda grad_list: apply_shared_gradients(grad_list, descend()),
        ((None,), TypeError, "one list of (gradient, variable) pairs"),
        (([],), ValueError, "no gradient at all"),
        (([[("g", "w")]],), TypeError, "something else at tower 0 item 0"),
    ),
    WrongCall(
        "apply_shared_gradients",
        lambda: apply_shared_gradients([[(None, tf.Variable(1.0))]], descend()),
        ValueError,
        "has gradient None in towers [0]",
    ),
    *rows(
        "apply_shared_gradients",
        shared,
        (
            (None,),
            TypeError,
            "with apply_gradients(pairs), as tf.compat.v1",
        ),
        ((v1.train.AdamOptimizer,), TypeError, "got the class AdamOptimizer"),
    ),
    *rows(
        "apply_shared_gradients",
        lambda average: shared(descend(), average=average),
        *no_flag("average"),
    ),
    *rows(
        "make_optimizers",
        lambda ours: make_optimizers(ours, descend),
        ((None,), TypeError, "towers must be a list of tw_core.Tower; got None"),
        (([],), ValueError, "towers is empty"),
        ((TWO,), TypeError, "must hold tw_core.Tower; got ['/cpu:0', '/cpu:1']"),
    ),
    *rows(
        "make_optimizers", partial(make_optimizers, OURS), *no_function("get_opt_fn")
    ),
    *rows("make_optimizers", partial(make_optimizers, OURS), *no_optimizer()),
    *rows(
        "make_optimizers",
        partial(make_optimizers, OURS, descend),
        ((3,), TypeError, "replicas must be a list of one item per tower; got 3"),
        (([[]],), ValueError, "got {'replicas': 1} for 2 towers"),
        (([None, None],), TypeError, "or have trainable_variables; got NoneType"),
        (([["w"], ["w"]],), TypeError, "must hold variables; got ['w']"),
    ),
    *rows(
        "locked_step",
        locked_step,
        ((None, print, threading.Lock()), TypeError, "compute must be a function"),
        ((print, "apply", threading.Lock()), TypeError, "apply must be a function"),
        ((print, print, None), TypeError, "lock must be a threading.Lock(); got None"),
    ),
    *rows(
        "AsyncRunner",
        AsyncRunner,
        ((None,), TypeError, "steps must be a list of callables; got None"),
        (("ab",), TypeError, "got 'ab'"),
        (([],), ValueError, "must hold at least one of callables"),
        (([3],), TypeError, "must be callables; got [3]"),
    ),
    *rows(
        "AsyncRunner",
        lambda max_steps: AsyncRunner([print], max_steps=max_steps),
        ((1.5,), TypeError, "max_steps must be a whole number; got 1.5"),
        (("2",), TypeError, "got '2'"),
        ((-1,), ValueError, "at least 0; got -1"),
    ),
    *rows(
        "AsyncRunner.join",
        AsyncRunner([print], max_steps=0).join,
        (("60",), TypeError, "got '60'"),
        ((-1,), ValueError, "at least 0; got -1"),
        ((NAN,), ValueError, "must be finite; got nan"),
        ((float("inf"),), ValueError, "must be finite; got inf"),
        ((1.0,), RuntimeError, "was not started"),
    ),
]


def tower_model(**given):
    return TowerModel(**{"make_model": dict, "devices": TWO, **given})


TOWER_MODELS = [
    *rows(
        "TowerModel",
        lambda make_model: tower_model(make_model=make_model),
        ((3,), TypeError, "make_model must be a function"),
        ((dict,), RuntimeError, "made outside of graphs"),
    ),
    *rows(
        "TowerModel",
        lambda variables: tower_model(variables=variables),
        (("mirrored",), ValueError, "variables must be one of"),
    ),
]
WRONG_CALLS = [*CALLS, *CLASSES, *FUNCTIONS, *TOWER_MODELS]


@pytest.mark.parametrize(
    "row", WRONG_CALLS, ids=lambda row: f"{row.name} {row.says[:40]}"
)
def test_a_wrong_call_is_refused_in_a_sentence(row):
    with tf.Graph().as_default():
        check_wrong_call(row)


# They hand their arguments to Keras, which answers; compile cannot be called in a
# graph, as these rows are, and has its refusals in tests of its own.
KERAS = (
    *(
        "call",
        "compile",
        "evaluate",
        "export",
        "fit",
        "get_layer",
        "load_weights",
        "predict",
    ),
    *("predict_step", "save", "save_weights", "set_weights", "summary", "test_step"),
    "train_step",
)


def test_every_public_name_has_wrong_calls():
    # DataParallelBuilder's static method, by its older name.
    inherited = [f"{name}.build_on_towers" for name in BUILDERS]
    inherited += [f"TowerModel.{name}" for name in KERAS]
    missing = names_without_wrong_calls(tw_builders, WRONG_CALLS, exempt=inherited)
    assert missing == []
