"""Every public function answers a wrong call in a sentence that names it."""

from functools import partial
from types import ModuleType

import numpy as np
import pytest
import tensorflow as tf

import tw_core
from tw_core import (
    LeastLoadedDeviceSetter,
    Replicated,
    Shared,
    Tower,
    TowerContext,
    TrainTowerContext,
    VariableStore,
    black_box,
    call_threads,
    check_towers,
    contexts,
    copy_to_replicas,
    devices,
    flat_packs,
    flat_variables,
    gradients,
    map_towers,
    merge_grad_list,
    modes,
    optimizers,
    placement,
    replica_device_setter,
    replicate,
    session_config,
    split_grad_list,
    synchronized,
    testing,
    timeline,
    towers,
    use_logical_cpus,
    variables,
)
from tw_core.call_threads import CallThread
from tw_core.contexts import (
    PredictTowerContext,
    TowerFunc,
    TowerHandle,
    TowerHandles,
    freeze_collections,
    leave_no_summaries,
)
from tw_core.devices import (
    LeastLoadedTask,
    canonical_device,
    check_devices,
    check_known_devices,
)
from tw_core.gradients import (
    Gradients,
    check_grad_list,
    check_gradients,
    check_replicated_grad_list,
    check_shared_grad_list,
    ensure_gradient_shapes,
    read_gradients,
    read_pairs,
    sum_duplicate_rows,
)
from tw_core.modes import without_autograph
from tw_core.testing import CPUS, WrongCall, check_wrong_call, names_without_wrong_calls
from tw_core.variables import (
    override_to_local_variable,
    record_variables,
    tf_variable,
    tf_variables,
    tower_build,
    variable_origin,
    variable_origins,
)

v1 = tf.compat.v1
OURS = towers(list(CPUS[:2]))
NAN = float("nan")
SPEC = [tf.TensorSpec([], name="x")]


def rows(name, call, *cases):
    """Makes a row of each (arguments, error, part of the message)."""
    return [
        WrongCall(name, partial(call, *args), error, says)
        for args, error, says in cases
    ]


def entered(call):
    """Enters the context that ``call`` returns."""

    def enter(*args, **kwargs):
        with call(*args, **kwargs):
            pass

    return enter


def named(call, name, *before):
    """Passes one argument by name, after ``before``."""
    return lambda value: call(*before, **{name: value})


def not_whole(name):
    """The cases of an argument that must be a whole number."""
    return [
        ((value,), TypeError, f"{name} must be a whole number; got {value!r}")
        for value in (None, "2", 2.5, NAN, [1], True)
    ]


def no_tower():
    says = "tower must be a tw_core.Tower; got"
    return [((value,), TypeError, says) for value in (None, "tower0", 0, OURS)]


def no_towers():
    return [
        ((None,), TypeError, "towers must be a list of tw_core.Tower; got None"),
        (("/cpu:0",), TypeError, "got '/cpu:0'"),
        ((OURS[0],), TypeError, "must be a list"),
        ((["/cpu:0", 3],), TypeError, "must hold tw_core.Tower; got ['/cpu:0', 3]"),
        (([],), ValueError, "towers is empty"),
    ]


def no_device():
    return [
        ((value,), ValueError, f"{value!r} is not a TensorFlow device string")
        for value in (None, 3, "cpu zero", "/cpu:-1")
    ]


def pairs():
    return [(tf.zeros([2]), v1.get_variable("w", [2]))]


def handle():
    with TrainTowerContext("tower0") as context:
        tf.constant(0, name="made")
    return TowerHandle(context, [], None)


def of_handle(method):
    return lambda *args: getattr(handle(), method)(*args)


def other_graphs_op():
    with tf.Graph().as_default():
        return tf.constant(0)


def in_tower(call):
    def run(*args):
        with TrainTowerContext("tower0") as context:
            call(context, *args)

    return run


DEVICES = [
    *rows("Tower", lambda index: Tower(index, "/cpu:0", 1), *not_whole("index")),
    *rows("Tower", lambda total: Tower(0, "/cpu:0", total), *not_whole("total")),
    *rows("Tower", lambda device: Tower(0, device, 1), *no_device()),
    *rows("Tower", Tower, ((1, "/cpu:0", 1), ValueError, "got index=1, total=1")),
    *rows(
        "towers",
        towers,
        ((None,), TypeError, "list of ints and device strings; got None"),
        (("/cpu:0",), TypeError, "Write e.g. [0, 1]"),
        (([],), ValueError, "devices is empty"),
        (([None],), TypeError, "a device is an int"),
        (([True],), TypeError, "got True"),
        (([0.5],), TypeError, "got 0.5"),
        (([-1],), ValueError, "0 or more; got -1"),
        ((["cpu zero"],), ValueError, "is not a TensorFlow device string"),
    ),
    *rows(
        "map_towers",
        map_towers,
        ((None, OURS), TypeError, "fn must be a function; got None"),
        ((print, OURS, None), TypeError, "one item per tower; got [None]"),
        ((print, OURS, 3), TypeError, "got [3]"),
        ((print, OURS, "ab"), TypeError, "got ['ab']"),
        ((print, OURS, [1]), ValueError, "got lengths [1] for 2 towers"),
    ),
    *rows("map_towers", lambda ours: map_towers(print, ours), *no_towers()),
    *rows(
        "check_towers",
        check_towers,
        *no_towers(),
    ),
    *rows("use_logical_cpus", use_logical_cpus, *not_whole("count")),
    *rows(
        "use_logical_cpus", use_logical_cpus, ((0,), ValueError, "at least 1; got 0")
    ),
    *rows("canonical_device", canonical_device, *no_device()),
    *rows(
        "check_devices",
        check_devices,
        ((None,), TypeError, "list of device strings; got None"),
        (("/cpu:0",), TypeError, "got '/cpu:0'"),
        ((3,), TypeError, "got 3"),
        (([None],), ValueError, "None is not a TensorFlow device string"),
        ((["/cpu:99"],), ValueError, "unknown devices ['/cpu:99']"),
    ),
    *rows(
        "check_devices",
        named(check_devices, "session", ["/cpu:0"]),
        ((3,), TypeError, "session must be a session; got 3"),
        (("x",), TypeError, "got 'x'"),
    ),
    *rows(
        "check_known_devices",
        check_known_devices,
        ((None,), TypeError, "list of device strings; got None"),
        (("/cpu:0",), TypeError, "got '/cpu:0'"),
        (([3],), ValueError, "3 is not a TensorFlow device string"),
    ),
    *rows(
        "session_config",
        named(session_config, "num_cpus"),
        *not_whole("num_cpus")[1:],
        ((0,), ValueError, "at least 1; got 0"),
    ),
    *rows(
        "session_config",
        named(session_config, "soft_placement"),
        ((None,), TypeError, "must be True or False; got None"),
        (("no",), TypeError, "got 'no'"),
    ),
    *rows("placement", placement, ((None,), TypeError, "must be a tf.Graph")),
    *rows(
        "placement",
        lambda fetches: placement(tf.Graph(), fetches=fetches),
        ((None,), TypeError, "fetches must be a list of tensors and operations"),
        (("x",), TypeError, "got 'x'"),
        ((["x", 3],), TypeError, "tensors and operations; got ['x', 3]"),
        (([other_graphs_op()],), ValueError, "of another graph than given: ['Const']"),
    ),
    *rows(
        "placement",
        lambda variables: placement(tf.Graph(), variables=variables),
        ((None,), TypeError, "variables must be a list"),
        ((["x"],), TypeError, "must hold variables; got ['x']"),
    ),
    *rows(
        "LeastLoadedDeviceSetter",
        LeastLoadedDeviceSetter,
        ((None, ["/cpu:0"]), ValueError, "None is not a TensorFlow device string"),
        (("/cpu:0", None), ValueError, "at least one device; got None"),
        (("/cpu:0", "/cpu:0"), ValueError, "got '/cpu:0'"),
        (("/cpu:0", []), ValueError, "got []"),
        (("/cpu:0", ["/cpu:0", 3]), ValueError, "3 is not a TensorFlow device string"),
    ),
    *rows(
        "LeastLoadedDeviceSetter.__call__",
        lambda op: LeastLoadedDeviceSetter("/cpu:0", ["/cpu:0"])(op),
        ((None,), TypeError, "op must be a tf.Operation; got None"),
        (("w",), TypeError, "got 'w'"),
    ),
    *rows(
        "LeastLoadedDeviceSetter.create",
        lambda made: LeastLoadedDeviceSetter("/cpu:0", ["/cpu:0"]).create(made),
        ((None,), TypeError, "next_creator must be a function; got None"),
    ),
    *rows(
        "LeastLoadedDeviceSetter.place_with_balance",
        lambda op: LeastLoadedDeviceSetter("/cpu:0", ["/cpu:0"]).place_with_balance(op),
        ((None,), TypeError, "wants an operation with an output; got None"),
    ),
    *rows(
        "replica_device_setter",
        replica_device_setter,
        *not_whole("ps_tasks"),
        ((-1,), ValueError, "at least 0; got -1"),
        ((1, 3), ValueError, "3 is not a TensorFlow device string"),
        ((1, "/job:ps", 0.5), ValueError, "0.5 is not a TensorFlow device string"),
    ),
    *[
        row
        for name, value, error, says in [
            ("merge_devices", None, TypeError, "must be True or False; got None"),
            ("merge_devices", "no", TypeError, "got 'no'"),
            ("cluster", "ps:0", TypeError, "must be a tf.train.ClusterSpec"),
            ("ps_ops", "VarHandleOp", TypeError, "list of op types"),
            ("ps_ops", 3, TypeError, "list of op types"),
            ("ps_ops", [None], TypeError, "must be a string; got None"),
            ("ps_strategy", 3, TypeError, "ps_strategy must be a function"),
        ]
        for row in rows(
            "replica_device_setter",
            named(replica_device_setter, name, 1),
            ((value,), error, says),
        )
    ],
    *rows("LeastLoadedTask", LeastLoadedTask, *not_whole("ps_tasks")),
    *rows("LeastLoadedTask", LeastLoadedTask, ((0,), ValueError, "at least 1; got 0")),
    *rows(
        "LeastLoadedTask.__call__",
        lambda op: LeastLoadedTask(2)(op),
        ((None,), TypeError, "op must be a tf.Operation; got None"),
    ),
]

BOTH_CONTEXTS = {
    "TrainTowerContext": TrainTowerContext,
    "PredictTowerContext": PredictTowerContext,
    "TowerContext": lambda *args: TowerContext(args[0], True, *args[1:]),
}
CONTEXTS = [
    *[
        row
        for name, kind in BOTH_CONTEXTS.items()
        for row in rows(
            name,
            kind,
            ((None,), TypeError, "ns_name must be a string; got None"),
            ((3,), TypeError, "got 3"),
            (("t", None), TypeError, "vs_name must be a string; got None"),
            (("", "scope"), ValueError, "needs a name"),
            (("t/",), ValueError, "must not end in '/'"),
        )
    ],
    *rows(
        "TrainTowerContext",
        lambda index: TrainTowerContext("t", index=index, total=3),
        *not_whole("index"),
    ),
    *rows(
        "TrainTowerContext",
        lambda total: TrainTowerContext("t", total=total),
        *not_whole("total"),
    ),
    *rows(
        "TrainTowerContext",
        entered(TrainTowerContext),
        (("a b",), ValueError, "['a b'] cannot name scopes of a graph"),
        (("-a",), ValueError, "['-a'] cannot name"),
        (("t", "a:0"), ValueError, "['a:0'] cannot name"),
    ),
    *rows(
        "TowerContext",
        TowerContext,
        (("t", None), TypeError, "is_training must be True or False; got None"),
        (("t", "yes"), TypeError, "got 'yes'"),
        (("t", 1), TypeError, "got 1"),
    ),
    *rows(
        "TrainTowerContext.get_collection_in_tower",
        in_tower(lambda context, key: context.get_collection_in_tower(key)),
        ((None,), TypeError, "key must be a string; got None"),
        ((["a"],), TypeError, "got ['a']"),
    ),
    *rows(
        "PredictTowerContext.get_collection_in_tower",
        PredictTowerContext("t").get_collection_in_tower,
        ((None,), TypeError, "key must be a string; got None"),
        (("losses",), RuntimeError, "enter the tower first"),
    ),
    *rows(
        "TowerFunc",
        TowerFunc,
        ((None, SPEC), TypeError, "tower_fn must be a function"),
        ((print, None), TypeError, "input_signature must be a list of specs"),
        ((print, "x"), TypeError, "got 'x'"),
        ((print, ["x"]), ValueError, "needs a name of its own"),
        ((print, [*SPEC, *SPEC]), ValueError, "got ['x', 'x']"),
    ),
    *rows(
        "TowerFunc.__call__",
        in_tower(lambda context, *args: TowerFunc(print, SPEC)(*args)),
        ((), ValueError, "one input per name of the signature, ['x']; got 0"),
        ((1, 2), ValueError, "got 2"),
    ),
    *rows(
        "TowerFunc.__call__",
        TowerFunc(print, SPEC),
        ((1,), RuntimeError, "call it under a tower context"),
    ),
    *rows(
        "TowerHandle",
        TowerHandle,
        ((None, [], None), TypeError, "must be a tower context; got None"),
    ),
    *rows(
        "TowerHandle",
        in_tower(TowerHandle),
        ((None, None), TypeError, "inputs must be a list"),
        (("x", None), TypeError, "got 'x'"),
        (([], None, "x"), TypeError, "input_names must be a list of names; got 'x'"),
        (([1], None, [3]), TypeError, "input_names must be a string; got 3"),
    ),
    *[
        row
        for method in ("get_tensor", "get_variable")
        for row in rows(
            f"TowerHandle.{method}",
            of_handle(method),
            ((None,), TypeError, "name must be a string; got None"),
            ((["made"],), TypeError, "got ['made']"),
            (("",), ValueError, "must not be empty"),
            (("nothing",), KeyError, "TowerHandle('tower0')"),
        )
    ],
    *[
        row
        for method in ("get_tensors", "get_variables")
        for row in rows(
            f"TowerHandle.{method}",
            of_handle(method),
            ((None,), TypeError, "names must be a list of names; got None"),
            (("made",), TypeError, "got 'made'"),
            (([3],), TypeError, "name must be a string; got 3"),
        )
    ],
    *rows(
        "TowerHandle.get_collection",
        of_handle("get_collection"),
        ((), ValueError, "one of the two"),
        (("a", "b"), ValueError, "one of the two"),
        ((3,), TypeError, "key must be a string; got 3"),
    ),
    *rows(
        "TowerHandles",
        TowerHandles,
        ((None,), TypeError, "must be a list of TowerHandle; got None"),
        (("ab",), TypeError, "got 'ab'"),
        (([3],), TypeError, "must hold TowerHandle; got [3]"),
    ),
]

VARIABLES = [
    *rows(
        "Shared",
        Shared,
        ((None,), TypeError, "devices must be a list of device strings; got None"),
        (("/cpu:0",), TypeError, "Write ('/cpu:0',)"),
        ((3,), TypeError, "got 3"),
        (((None,),), ValueError, "None is not a TensorFlow device string"),
        ((("cpu zero",),), ValueError, "is not a TensorFlow device string"),
    ),
    *[
        row
        for policy in (Shared(), Replicated())
        for row in [
            *rows(f"{type(policy).__name__}.scope", entered(policy.scope), *no_tower()),
            *rows(
                f"{type(policy).__name__}.trainable_variables",
                policy.trainable_variables,
                *no_tower(),
            ),
        ]
    ],
    *rows(
        "VariableStore",
        VariableStore,
        *[
            ((value,), TypeError, "Shared() or Replicated() object; got")
            for value in (None, Shared, Replicated, "shared")
        ],
    ),
    *rows("VariableStore.scope", entered(VariableStore(Shared()).scope), *no_tower()),
    *rows("VariableStore.variables", VariableStore(Shared()).variables, *no_tower()),
    *rows(
        "VariableStore.trainable_variables",
        VariableStore(Shared()).trainable_variables,
        *no_tower(),
    ),
    *rows("replicate", lambda ours: replicate(ours, print), *no_towers()),
    *rows(
        "replicate",
        partial(replicate, OURS),
        ((None,), TypeError, "factory must be a function; got None"),
        ((tf.Module(),), TypeError, "factory must be a function"),
        ((lambda tower: 3,), TypeError, "which has no `variables`"),
    ),
    *rows(
        "copy_to_replicas",
        copy_to_replicas,
        ((None,), TypeError, "one list of variables per tower; got None"),
        (([],), ValueError, "no tower's variables were given"),
        (([None],), TypeError, "something else for towers 0 (NoneType)"),
        (([["w"]],), TypeError, "tower 0 number 0: str"),
    ),
    *[
        row
        for call in (override_to_local_variable, leave_no_summaries)
        for row in rows(
            call.__name__,
            entered(call),
            ((None,), TypeError, "enable must be True or False; got None"),
            (("no",), TypeError, "got 'no'"),
        )
    ],
    *rows(
        "variable_origin",
        variable_origin,
        ((None,), TypeError, "a TensorFlow or Keras variable; got None"),
        (("w",), TypeError, "got 'w'"),
    ),
    *rows(
        "variable_origins",
        variable_origins,
        (([1, "w"],), TypeError, "a TensorFlow or Keras variable; got 1, 'w'"),
    ),
    *rows(
        "tf_variables",
        lambda other: tf_variables([other]),
        (("w",), TypeError, "a TensorFlow or Keras variable; got 'w'"),
    ),
    *rows(
        "tf_variable",
        tf_variable,
        ((None,), TypeError, "a TensorFlow or Keras variable; got None"),
        ((np.ones(2),), TypeError, "Keras variable; got array"),
    ),
    *rows("record_variables", entered(record_variables), *no_tower()),
    *rows(
        "record_variables",
        named(entered(record_variables), "are_copies", OURS[1]),
        ((None,), TypeError, "are_copies must be True or False; got None"),
    ),
    *rows(
        "tower_build",
        entered(named(tower_build, "undo_on_error")),
        ((None,), TypeError, "undo_on_error must be True or False; got None"),
    ),
    *rows(
        "freeze_collections",
        freeze_collections,
        ((), ValueError, "name at least one collection"),
        ((None,), TypeError, "got [None]"),
    ),
]

GRADIENTS = [
    *rows(
        "check_grad_list",
        check_grad_list,
        ((None,), TypeError, "list with one list of (gradient, variable) pairs"),
        ((3,), TypeError, "pairs per tower; got 3"),
        (([],), ValueError, "no gradient at all"),
        (([3],), TypeError, "for towers 0 (int)"),
        (([[("g", "w")]],), TypeError, "something else at tower 0 item 0"),
    ),
    *rows(
        "check_grad_list",
        lambda value: check_grad_list([pairs()], allow_none=value),
        ((None,), TypeError, "allow_none must be True or False; got None"),
    ),
    *(
        row
        for read in (check_gradients, read_gradients)
        for row in rows(
            read.__name__,
            lambda make, read=read: read(make()),
            (
                (lambda: None,),
                TypeError,
                "grads must be a list with one",
            ),
            ((list,), ValueError, "grads is empty"),
            (
                (lambda: [[tf.ones([2])], []],),
                ValueError,
                "got [1, 0] from towers 0..1",
            ),
            ((lambda: [[2.0]],), TypeError, "grads[0][0] is float"),
            (
                (lambda: [[None]],),
                ValueError,
                "position 0 has gradient None in towers [0]",
            ),
            (
                (lambda: [[tf.ones([2])], [tf.ones([3])]],),
                ValueError,
                "position 0 has gradients of shapes ['(2,)', '(3,)'] in towers 0..1",
            ),
        )
    ),
    *rows(
        "read_pairs",
        read_pairs,
        ((None,), TypeError, "list with one list of (gradient, variable) pairs"),
        (([],), ValueError, "no gradient at all"),
    ),
    *rows(
        "Gradients.variables",
        lambda: Gradients([["g"]]).variables,
        ((), TypeError, "read without variables"),
    ),
    *rows(
        "check_replicated_grad_list",
        check_replicated_grad_list,
        ((None,), TypeError, "list with one list of (gradient, variable) pairs"),
        (([],), ValueError, "no gradient at all"),
        (([pairs()] * 2,), ValueError, "is one variable in towers [0, 1]"),
    ),
    *rows(
        "check_shared_grad_list",
        check_shared_grad_list,
        ((None,), TypeError, "list with one list of (gradient, variable) pairs"),
        (([],), ValueError, "no gradient at all"),
        (([pairs(), pairs()],), ValueError, "is a variable of their own in towers [1]"),
    ),
    *rows(
        "ensure_gradient_shapes",
        ensure_gradient_shapes,
        ((None,), TypeError, "list with one list of (gradient, variable) pairs"),
        (([[("g", "w")]],), TypeError, "something else at tower 0 item 0"),
    ),
    *rows(
        "split_grad_list",
        split_grad_list,
        ((None,), TypeError, "grad_list must be a list with one list of pairs"),
        (("gv",), TypeError, "got 'gv'"),
        (([None],), TypeError, "something else for towers 0 (NoneType)"),
        (([zip([1], [2], strict=True)],), TypeError, "for towers 0 (zip)"),
        (([["gv"]],), TypeError, "got 'gv' at tower 0 item 0"),
        (([[(1, 2, 3)]],), TypeError, "(gradient, variable) pairs; got (1, 2, 3)"),
    ),
    *rows(
        "merge_grad_list",
        merge_grad_list,
        ((None, [[1]]), TypeError, "all_grads must be a list with one list"),
        (([[1]], None), TypeError, "all_vars must be a list with one list"),
        (([1], [[1]]), TypeError, "for towers 0 (int)"),
        (([[1]], ["v"]), TypeError, "for towers 0 (str)"),
        (([[1]], [[1, 2]]), ValueError, "got [1] gradients and [2] variables"),
    ),
    *rows(
        "sum_duplicate_rows",
        sum_duplicate_rows,
        ((None,), TypeError, "must be a tf.IndexedSlices; got NoneType"),
        ((np.ones(3),), TypeError, "Use a dense gradient as it is"),
    ),
    *rows(
        "without_autograph",
        without_autograph,
        ((None,), TypeError, "function must be a function; got None"),
        (("print",), TypeError, "got 'print'"),
    ),
]

OF_GRADIENT_VALUES = [
    *rows(
        "scale",
        gradients.scale,
        ((tf.constant([1, 2]), 0.5), TypeError, "must be floating"),
    ),
    *rows(
        "check_any_gradient",
        gradients.check_any_gradient,
        (([None], [v1.get_variable("a", [])]), ValueError, "any variable; got ['a"),
        (([], []), ValueError, "got []"),
    ),
    *rows(
        "check_weights",
        lambda weights: gradients.check_weights(weights, num_towers=2),
        ((3,), TypeError, "weights must be a list"),
        (([1, "2"],), TypeError, "got tower 1: '2'"),
        (([1, -2],), ValueError, "finite and 0 or more; got tower 1: -2"),
        (([1],), ValueError, "weights must be one per tower (2); got 1"),
    ),
    *rows(
        "check_weight",
        gradients.check_weight,
        ((True,), TypeError, "must be a real number or a scalar tensor"),
        (("1",), TypeError, "such as the number of rows; got '1'"),
        ((tf.ones([2]),), TypeError, "got <tf.Tensor"),
        ((tf.constant(True),), TypeError, "a real number"),
        ((-1,), ValueError, "must be finite and 0 or more; got -1"),
        ((float("nan"),), ValueError, "got nan"),
        ((float("inf"),), ValueError, "got inf"),
    ),
]
OF_DEVICES = [
    *rows("host_of", devices.host_of, *no_device()[1:]),
    *rows(
        "repeated_devices", lambda one: devices.repeated_devices([one]), *no_device()
    ),
]
OF_VARIABLES_EXEMPT = {
    "VariableOrigin",  # a record
    # They compare; only the caller knows what would be wrong.
    "is_variable",
    "repeated_variables",
    "shared_variables",
}
OF_GRADIENT_VALUES_EXEMPT = {
    # The readers make it; a function that makes the next one has read its input.
    "Gradients",
    # They take what check_weights has let pass.
    *("power_of_two", "shares_of", "unit_of", "weigh"),
    # Called for each gradient: what is no tensor goes through, or fails in TensorFlow.
    "map_values",
    "narrow_source",
    "values_of",
    "with_gradient",
    "with_unique_rows",
}

OF_FLAT_PACKS = [
    *rows("join", flat_packs.join, (([],), ValueError, "pass at least one tensor")),
    *rows(
        "cut",
        partial(flat_packs.cut, tf.zeros([3])),
        (([],), ValueError, "got 0, unknown: none"),
        (([(1,), [None], None],), ValueError, "1 is (None,), 2 is <unknown>"),
    ),
    *rows(
        "unpack",
        flat_packs.unpack,
        (
            ([], flat_packs.PackPlan(((0, 1),), (2,)), [(), (), ()]),
            ValueError,
            "1 packs and 1 other tensors; got 0",
        ),
    ),
]
OF_FLAT_PACKS_EXEMPT = {
    # Plain data, and what makes it of any keys; ``pack`` calls ``join``.
    "PackPlan",
    "PackPlan.packed_shapes",
    "pack",
    "plan_packs",
}

OF_FLAT_VARIABLES = [
    *rows(
        "FlatVariables",
        flat_variables.FlatVariables,
        ((None,), TypeError, "below_bytes must be a whole number; got None"),
        ((-1,), ValueError, "below_bytes must be at least 0; got -1"),
    ),
    *rows(
        "FlatVariables",
        lambda group: flat_variables.FlatVariables(group=group),
        (("bias",), TypeError, "group must be a function; got 'bias'"),
    ),
    *rows(
        "flatten",
        flat_variables.flatten,
        ((None,), TypeError, "make_model must be a function; got None"),
        ((dict,), RuntimeError, "must be called outside of tf.function"),
    ),
    *rows(
        "pack_gradients",
        flat_variables.pack_gradients,
        ((3,), TypeError, "pairs must be a list of pairs; got 3"),
        (([3],), TypeError, "(gradient, variable) pairs; got [3]"),
    ),
    *rows(
        "plain_optimizer",
        flat_variables.plain_optimizer,
        ((None, None, None), TypeError, "get_opt_fn must be a function; got None"),
        ((None, dict, 3), TypeError, "must be what flatten returned; got 3"),
    ),
]
OF_FLAT_VARIABLES_EXEMPT = {
    # What flatten returns; and what asks or watches anything.
    "FlatModel",
    "FlatModel.__call__",
    "FlatVariables.is_missing",
    "FlatVariables.keep_alone",
    "flat_variable_of",
    "slots_like_parts",
}

OF_OPTIMIZERS = rows(
    "check_optimizer",
    optimizers.check_optimizer,
    ((None,), TypeError, "got NoneType"),
    ((v1.train.AdamOptimizer,), TypeError, "got the class AdamOptimizer"),
    (("adam",), TypeError, "with apply_gradients(pairs)"),
)
OF_OPTIMIZERS_EXEMPT = {
    # The kind of anything can be asked for; the others call the optimizer itself.
    "OptimizerKind",
    "apply_pairs",
    "check_elementwise",
    "create_slots",
    "kind_of",
}

WRONG_CALLS = [*DEVICES, *CONTEXTS, *VARIABLES, *GRADIENTS]
EXEMPT = {
    # Abstract: TrainTowerContext and PredictTowerContext are called.
    "BaseTowerContext",
    "BaseTowerContext.get_collection_in_tower",
    # Records that functions return.
    "Placement",
    "Transfer",
    "VariableOrigin",
}


def normalise(x, **options):
    return synchronized.batch_normalization(x, **({"training": True} | options))


OF_SYNCHRONIZED = [
    *rows(
        "sum_over_towers",
        lambda: map_towers(
            lambda _: tf.function(synchronized.sum_over_towers)(tf.ones([])), OURS
        ),
        ((), RuntimeError, "in the body of a tf.cond, a loop or a function"),
    ),
    *rows(
        "joined_towers",
        lambda total: synchronized.joined_towers(total).__enter__(),
        ((0,), ValueError, "total must be at least 1; got 0"),
        ((2.0,), TypeError, "total must be a whole number; got 2.0"),
    ),
    *rows(
        "joined_towers",
        lambda index: (
            synchronized.joined_towers(2).__enter__().tower(index).__enter__()
        ),
        ((2,), ValueError, "index must be below total=2; got 2"),
        ((-1,), ValueError, "index must be at least 0; got -1"),
        ((None,), TypeError, "index must be a whole number; got None"),
    ),
    *rows(
        "moments_over_towers",
        synchronized.moments_over_towers,
        ((np.ones([2], np.int32), 0), TypeError, "wants floating point; got int32"),
        ((np.ones([2]), 1), ValueError, "axes must be within the rank 1; got 1"),
        ((np.ones([2]), [None]), TypeError, "axes must be a whole number; got None"),
    ),
    *rows(
        "moments_over_towers",
        lambda: synchronized.moments_over_towers(v1.placeholder(tf.float32), 0),
        ((), ValueError, "the rank of the tensor must be known"),
    ),
    *rows(
        "moments_over_towers",
        lambda keep: synchronized.moments_over_towers(tf.ones([2]), 0, keepdims=keep),
        (("no",), TypeError, "keepdims must be True or False; got 'no'"),
    ),
    *rows(
        "batch_normalization",
        lambda options: normalise(tf.ones([2, 3]), **options),
        (({"training": None},), TypeError, "training must be True or False; got None"),
        (({"momentum": 1.5},), ValueError, "momentum must be below 1; got 1.5"),
        (({"epsilon": -1},), ValueError, "epsilon must be at least 0; got -1"),
        (({"axis": 2},), ValueError, "axes must be within the rank 2; got 2"),
        (({"axis": "c"},), TypeError, "axis must be a whole number; got 'c'"),
    ),
    *rows(
        "batch_normalization",
        lambda: normalise(v1.placeholder(tf.float32, [2, None])),
        ((), ValueError, "the length of axis -1 must be known; got (2, None)"),
    ),
]


OF_TIMELINE = [
    *rows(
        "record_steps",
        tw_core.record_steps,
        ((2.5,), TypeError, "num_steps must be a whole number; got 2.5"),
        ((0,), ValueError, "num_steps must be at least 1; got 0"),
    ),
    *rows(
        "record_steps",
        lambda graph: tw_core.record_steps(graph=graph),
        (("g",), TypeError, "graph must be a tf.Graph; got str"),
    ),
    *rows(
        "merge_traces",
        lambda paths: timeline.merge_traces(paths, "all.json"),
        (("trace.json",), TypeError, "paths"),
        (([],), ValueError, "paths"),
    ),
]
OF_TIMELINE_EXEMPT = {
    # Plain data and rules on them; test_recording.py tests what a recorder refuses.
    *("Arrival", "Call", "Interval", "RecordedStep", "Row", "Summary", "Wait"),
    *("RecordedStep.on", "StepRecorder", "StepRecorder.draw", "StepRecorder.run"),
    *("StepRecorder.write", "explained", "waits"),
}

OF_TESTS = [
    *[
        row
        for name in ("run_in_graph", "run_in_function", "run_eagerly")
        for row in rows(
            name,
            getattr(testing, name),
            ((None,), TypeError, "fn must be a function; got None"),
            ((3,), TypeError, "got 3"),
        )
    ],
]
OF_TESTS_EXEMPT = {
    # Plain records; and what checks others, which test_testing.py tests.
    "SparseRows",
    "WrongCall",
    "check_wrong_call",
    "names_without_wrong_calls",
}

LATE = black_box.Wait("me", "it", 1.0, 1.0)
OF_BLACK_BOX = [
    *rows("Recorder", black_box.Recorder, ((1,), TypeError, "task must be a string")),
    *rows("Recorder", black_box.Recorder, (("",), ValueError, "task")),
    *rows(
        "report",
        black_box.report,
        (("late", black_box.Recorder("me")), TypeError, "must be a black_box.Wait"),
        ((LATE, None), TypeError, "must be a black_box.Recorder; got None"),
    ),
]
OF_CALL_THREADS = [
    *rows("CallThread", CallThread, ((3,), TypeError, "name must be a string; got 3")),
    *rows(
        "CallThread", CallThread, (("",), TypeError, "name must be a string; got ''")
    ),
    *rows(
        "CallThread.run",
        lambda *given: CallThread("calls").run(*given, after_s=1.0),
        ((None, print), TypeError, "call must be a function; got None"),
        ((print, 3), TypeError, "check must be a function; got 3"),
    ),
    *rows(
        "CallThread.submit",
        CallThread("calls").submit,
        ((3,), TypeError, "call must be a function; got 3"),
    ),
]
OF_BLACK_BOX_EXEMPT = {
    # Called in every step: what they are given is told as it is.
    *("Recorder.began", "Recorder.during", "Recorder.ended", "Recorder.noted"),
    # Records of plain values.
    *("Event", "Open", "Wait"),
    # Raises nothing: the error that it adds to is what matters.
    "add_report",
}


@pytest.mark.parametrize(
    "row",
    [
        *WRONG_CALLS,
        *OF_TESTS,
        *OF_BLACK_BOX,
        *OF_CALL_THREADS,
        *OF_DEVICES,
        *OF_GRADIENT_VALUES,
        *OF_FLAT_PACKS,
        *OF_FLAT_VARIABLES,
        *OF_OPTIMIZERS,
        *OF_SYNCHRONIZED,
        *OF_TIMELINE,
    ],
    ids=lambda row: f"{row.name} {row.says[:40]}",
)
def test_a_wrong_call_is_refused_in_a_sentence(row, graph):
    check_wrong_call(row)


def test_every_public_name_has_wrong_calls():
    assert names_without_wrong_calls(testing, OF_TESTS, exempt=OF_TESTS_EXEMPT) == []
    own = (black_box, OF_BLACK_BOX)
    assert names_without_wrong_calls(*own, exempt=OF_BLACK_BOX_EXEMPT) == []
    own = (call_threads, OF_CALL_THREADS)
    assert names_without_wrong_calls(*own) == []
    table = [
        *(*WRONG_CALLS, *OF_DEVICES, *OF_GRADIENT_VALUES, *OF_FLAT_PACKS),
        *(*OF_FLAT_VARIABLES, *OF_OPTIMIZERS, *OF_SYNCHRONIZED, *OF_TIMELINE),
    ]
    exempt = {
        *(*EXEMPT, *OF_GRADIENT_VALUES_EXEMPT, *OF_FLAT_PACKS_EXEMPT),
        *(*OF_OPTIMIZERS_EXEMPT, *OF_VARIABLES_EXEMPT, *OF_FLAT_VARIABLES_EXEMPT),
        *OF_TIMELINE_EXEMPT,
    }
    homes = (contexts, devices, flat_packs, flat_variables, gradients, modes)
    homes += (optimizers, synchronized, timeline, variables)
    everything = ModuleType("everything")
    for module in (tw_core, *homes):
        vars(everything).update((n, getattr(module, n)) for n in module.__all__)
    everything.__all__ = [name for name in vars(everything) if name[0] != "_"]
    assert names_without_wrong_calls(everything, table, exempt=exempt) == []
