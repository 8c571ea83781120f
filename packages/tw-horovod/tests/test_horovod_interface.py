"""Names, arguments and defaults are those of Horovod 0.28.1."""

import gc
import inspect
import warnings
import weakref
from types import SimpleNamespace

import numpy as np
import pytest
import tensorflow as tf

import tw_horovod as hvd
import tw_horovod.keras as hvd_keras
from tw_horovod._state import group as state
from tw_ranks._side_channel._attendance import Deadlines

_SCOPE = "ignore_name_scope=False"
_SET = "process_set=global_process_set"
_DEVICES = "device_dense='', device_sparse=''"
_SCALES = "prescale_factor=1.0, postscale_factor=1.0"
_COMPRESSION = "compression=Compression.none"
_GROUPS = "num_groups=0, groups=None"
_LOCAL = "scale_local_gradients=True"
_OBJECT = f"session=None, name=None, {_SET}"

# As horovod/tensorflow/__init__.py and the modules that it imports define them; those
# of its C library's wrapper, horovod/common/basics.py, without `self`.
NO_ARGUMENTS = """
    shutdown is_initialized stop_timeline size local_size cross_size rank
    local_rank cross_rank is_homogeneous mpi_threads_supported mpi_enabled
    mpi_built gloo_enabled gloo_built nccl_built ddl_built ccl_built
    cuda_built rocm_built join
"""
TENSORFLOW = dict.fromkeys(NO_ARGUMENTS.split(), "") | {
    "init": "comm=None, process_sets=None",
    "start_timeline": "file_path, mark_cycles=False",
    "rank_op": "name=None",
    "local_rank_op": "name=None",
    "size_op": "process_set_id=0, name=None",
    "local_size_op": "name=None",
    "process_set_included_op": "process_set_id=0, name=None",
    "ProcessSet": "ranks_or_comm",
    "add_process_set": "process_set",
    "remove_process_set": "process_set",
    "allreduce": (
        f"tensor, average=None, {_DEVICES}, {_COMPRESSION}, op=None, {_SCALES}, "
        f"name=None, {_SET}, {_SCOPE}"
    ),
    "grouped_allreduce": (
        f"tensors, average=None, {_DEVICES}, {_COMPRESSION}, op=None, {_SCALES}, "
        f"{_SET}, {_SCOPE}, name=None"
    ),
    "allgather": f"tensor, name=None, {_SCOPE}, {_SET}",
    "grouped_allgather": f"tensors, name=None, {_SCOPE}, {_SET}",
    "broadcast": f"tensor, root_rank, name=None, {_SCOPE}, {_SET}",
    "broadcast_": f"variables, root_rank, name=None, {_SET}",
    "alltoall": f"tensor, splits=None, name=None, {_SCOPE}, {_SET}",
    "reducescatter": (
        f"tensor, device_dense='', {_COMPRESSION}, op=Average, name=None, {_SET}, "
        f"{_SCOPE}, {_SCALES}"
    ),
    "grouped_reducescatter": (
        f"tensors, device_dense='', {_COMPRESSION}, op=Average, {_SET}, {_SCALES}"
    ),
    "barrier": _SET,  # As horovod.torch has it.
    "broadcast_object": f"obj, root_rank=0, {_OBJECT}",
    "broadcast_object_fn": f"root_rank=0, {_OBJECT}",
    "allgather_object": f"obj, {_OBJECT}",
    "broadcast_variables": f"variables, root_rank, {_SET}, inplace=False",
    "broadcast_global_variables": "root_rank",
    "BroadcastGlobalVariablesHook": "root_rank, device=''",
    "DistributedOptimizer": (
        f"optimizer, name=None, use_locking=False, {_DEVICES}, {_COMPRESSION}, "
        "sparse_as_dense=False, backward_passes_per_step=1, op=Average, "
        "gradient_predivide_factor=1.0, average_aggregated_gradients=False, "
        f"{_GROUPS}, {_SET}, {_LOCAL}"
    ),
    "DistributedGradientTape": (
        f"gradtape, {_DEVICES}, {_COMPRESSION}, sparse_as_dense=False, op=Average, "
        f"gradient_predivide_factor=1.0, {_GROUPS}, {_SET}, {_LOCAL}"
    ),
    "PartialDistributedGradientTape": (
        f"gradtape, {_DEVICES}, {_COMPRESSION}, sparse_as_dense=False, op=Average, "
        f"gradient_predivide_factor=1.0, {_GROUPS}, {_SET}, local_layers=None, {_LOCAL}"
    ),
    "SyncBatchNormalization": "fused=False, **kwargs",
}
VALUES = """
    Compression Average Sum Adasum Min Max Product compression elastic
    global_process_set keras
"""

# As horovod/tensorflow/keras/__init__.py and its callbacks.py define them.
KERAS = {
    "DistributedOptimizer": (
        f"optimizer, name=None, {_DEVICES}, {_COMPRESSION}, sparse_as_dense=False, "
        "gradient_predivide_factor=1.0, op=Average, backward_passes_per_step=1, "
        f"average_aggregated_gradients=False, {_GROUPS}, {_SET}, {_LOCAL}"
    ),
    "broadcast_global_variables": "root_rank",
    "allreduce": f"value, name=None, average=None, {_SCALES}, op=None, {_COMPRESSION}",
    "allgather": "value, name=None",
    "broadcast": "value, root_rank, name=None",
    "reducescatter": "value, name=None, op=Average",
    "load_model": (
        "filepath, custom_optimizers=None, custom_objects=None, "
        f"{_COMPRESSION}, legacy_opts=False"
    ),
    # As horovod/keras/__init__.py has it.
    "PartialDistributedOptimizer": (
        f"optimizer, name=None, {_DEVICES}, {_COMPRESSION}, sparse_as_dense=False, "
        "gradient_predivide_factor=1.0, op=Average, backward_passes_per_step=1, "
        f"average_aggregated_gradients=False, groups=None, {_SET}, local_layers=None, "
        f"{_LOCAL}"
    ),
}
SAME_NAMES = """
    Adasum Average Compression ProcessSet Sum add_process_set ccl_built cross_rank
    cross_size cuda_built ddl_built elastic global_process_set gloo_built
    gloo_enabled init is_initialized local_rank local_size mpi_built mpi_enabled
    mpi_threads_supported nccl_built rank remove_process_set rocm_built shutdown
    size start_timeline stop_timeline
"""
CALLBACKS = {
    "BroadcastGlobalVariablesCallback": "root_rank, device='', local_variables=None",
    "MetricAverageCallback": "device=''",
    "LearningRateScheduleCallback": (
        "initial_lr, multiplier, start_epoch=0, end_epoch=None, staircase=True, "
        "momentum_correction=True, steps_per_epoch=None"
    ),
    "LearningRateWarmupCallback": (
        "initial_lr, warmup_epochs=5, momentum_correction=True, steps_per_epoch=None, "
        "verbose=0"
    ),
    "BestModelCheckpoint": (
        "monitor='val_loss', verbose=0, save_weights_only=False, mode='auto', "
        "save_freq='epoch'"
    ),
}
METHODS = {
    "gradient": "target, sources, output_gradients=None, use_generic_names=False",
    "get_local_and_global_gradients": (
        "target, sources, output_gradients=None, use_generic_names=False"
    ),
    "register_local_source": "source",
}
SHOWN = [(hvd.Compression.none, "Compression.none"), (hvd.Average, "Average")]


def written(function):
    """Writes a signature as the tables have it, without keyword-only arguments."""
    parts = []
    for parameter in inspect.signature(function).parameters.values():
        if parameter.kind is parameter.KEYWORD_ONLY:
            continue
        if parameter.kind is parameter.VAR_KEYWORD:
            parts.append(f"**{parameter.name}")
        elif parameter.default is parameter.empty:
            parts.append(parameter.name)
        else:
            names = [name for value, name in SHOWN if value is parameter.default]
            default = names[0] if names else repr(parameter.default)
            parts.append(f"{parameter.name}={default}")
    return ", ".join(parts)


def test_a_function_takes_what_horovods_takes():
    tables = (hvd, TENSORFLOW), (hvd_keras, KERAS), (hvd_keras.callbacks, CALLBACKS)
    for module, table in tables:
        assert {name: written(getattr(module, name)) for name in table} == table


def test_there_are_no_other_names():
    assert set(hvd.__all__) == {*TENSORFLOW, *VALUES.split()}
    assert set(hvd_keras.__all__) == {*KERAS, *SAME_NAMES.split(), "callbacks"}
    for name in SAME_NAMES.split():
        assert getattr(hvd_keras, name) is getattr(hvd, name)


def test_reductions_have_horovods_numbers():
    names = ["Average", "Sum", "Adasum", "Min", "Max", "Product"]
    assert [getattr(hvd, name) for name in names] == list(range(6))
    assert hvd.compression.Compression is hvd.Compression
    assert hvd.Compression.fp16 is hvd.compression.FP16Compressor


BEFORE = {
    "size": (),
    "local_rank": (),
    "cross_size": (),
    "is_homogeneous": (),
    "rank_op": (),
    "size_op": (),
    "allreduce": (np.ones(2),),
    "grouped_allreduce": ([np.ones(2)],),
    "allgather": (np.ones(2),),
    "grouped_allgather": ([np.ones(2)],),
    "broadcast": (np.ones(2), 0),
    "broadcast_": ([], 0),
    "broadcast_variables": ([], 0),
    "broadcast_object": (1,),
    "broadcast_object_fn": (),
    "allgather_object": (1,),
    "alltoall": (np.ones(2),),
    "reducescatter": (np.ones(2),),
    "grouped_reducescatter": ([np.ones(2)],),
    "barrier": (),
    "join": (),
    "DistributedGradientTape": (tf.GradientTape(),),
}


def test_it_is_said_that_init_was_not_called():
    assert not hvd.is_initialized()
    for name, arguments in BEFORE.items():
        with pytest.raises(ValueError, match=r"^hvd\.init\(\) has not been called"):
            getattr(hvd, name)(*arguments)


@pytest.mark.parametrize(
    ("argument", "shutdown", "check", "disable", "stall_s", "warning_s"),
    [
        (None, None, None, None, 600.0, 60.0),
        (None, "0", "0", "0", 600.0, 60.0),
        (None, "1800", "90.5", "", 1800.0, 90.5),
        (20.0, "1800", "", None, 20.0, 60.0),
        (None, None, "90.5", "1", 600.0, 600.0),
    ],
)
def test_how_long_a_rank_is_waited_for_is_said_as_horovod_says_it(
    monkeypatch, argument, shutdown, check, disable, stall_s, warning_s
):
    told = []
    monkeypatch.setattr(state, "_group", None)
    monkeypatch.setattr(
        state,
        "join_prepared",
        lambda _, limits, start_timeout_s: (
            told.append((limits, start_timeout_s)) or SimpleNamespace(size=1, rank=0)
        ),
    )
    names = {
        "STALL_SHUTDOWN_TIME_SECONDS": shutdown,
        "STALL_CHECK_TIME_SECONDS": check,
        "STALL_CHECK_DISABLE": disable,
        "START_TIMEOUT": "45",
    }
    for name, text in names.items():
        if text is not None:
            monkeypatch.setenv(f"HOROVOD_{name}", text)
    hvd.init(stall_timeout_s=argument)
    [(limits, start_s)] = told
    assert limits == Deadlines(60.0, stall_s, stall_s, warning_s)
    assert start_s == 45.0


@pytest.mark.parametrize("name", ["SHUTDOWN", "CHECK"])
@pytest.mark.parametrize("text", ["-1", "nan", "inf", "soon"])
def test_a_time_that_is_none_is_refused(monkeypatch, name, text):
    variable = f"HOROVOD_STALL_{name}_TIME_SECONDS"
    monkeypatch.setenv(variable, text)
    with pytest.raises(ValueError, match=rf"init: {variable} must be .*; got '{text}'"):
        hvd.init()


def test_traces_of_collectives_are_freed(monkeypatch):
    monkeypatch.delenv("TF_CONFIG", raising=False)
    graphs = []

    def step(x):
        graphs.append(weakref.ref(tf.compat.v1.get_default_graph()))
        with tf.GradientTape() as tape:
            tape.watch(x)
            y = hvd.allreduce(x) + hvd.allgather(x) + hvd.broadcast(x, 0)
            y += hvd.reducescatter(x) + hvd.alltoall(x)
        return tape.gradient(y, x)

    hvd.init()
    try:
        np.testing.assert_array_equal(tf.function(step)(tf.ones([3])), [5, 5, 5])
    finally:
        hvd.shutdown()
    gc.collect()
    assert graphs[0]() is None


def test_a_process_alone_can_begin_and_end(monkeypatch):
    monkeypatch.delenv("TF_CONFIG", raising=False)
    hvd.init()
    try:
        assert hvd.is_initialized() and hvd.size() == 1
        assert float(hvd.allreduce(2.0)) == 2.0
        tape = hvd.DistributedGradientTape(tf.GradientTape())
        for name, want in METHODS.items():
            assert written(getattr(tape, name)) == want
        with pytest.warns(DeprecationWarning, match="average is deprecated") as said:
            hvd.allreduce(2.0, average=False)
        assert said[0].filename == __file__
        with pytest.warns(DeprecationWarning, match="num_groups is deprecated") as said:
            hvd.DistributedGradientTape(tf.GradientTape(), num_groups=2)
        assert said[0].filename == __file__
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            hvd.allreduce(2.0, op=hvd.Sum)
    finally:
        hvd.shutdown()
    assert not hvd.is_initialized()
    with pytest.raises(ValueError, match=r"hvd.init\(\)"):
        hvd.rank()
