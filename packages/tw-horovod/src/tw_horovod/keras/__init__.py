"""The names of ``horovod.tensorflow.keras``, for Keras 3.

They are for Keras 2 where TF_USE_LEGACY_KERAS=1 makes it ``tf.keras``.

.. code-block:: python

    import tw_horovod.keras as hvd

Collectives run at once here, in graph mode too: they take anything that converts to a
tensor, and return a tensor, in graph mode an array. All else is as in
``tw_horovod``.
"""

from tw_horovod import elastic
from tw_horovod._operations.reductions import Adasum, Average, Sum
from tw_horovod._state.group import (
    ProcessSet,
    global_process_set,
    init,
    is_initialized,
    shutdown,
)
from tw_horovod._state.queries import (
    add_process_set,
    ccl_built,
    cross_rank,
    cross_size,
    cuda_built,
    ddl_built,
    gloo_built,
    gloo_enabled,
    local_rank,
    local_size,
    mpi_built,
    mpi_enabled,
    mpi_threads_supported,
    nccl_built,
    rank,
    remove_process_set,
    rocm_built,
    size,
    start_timeline,
    stop_timeline,
)
from tw_horovod.compression import Compression
from tw_horovod.keras import callbacks
from tw_horovod.keras._optimizer import (
    DistributedOptimizer,
    PartialDistributedOptimizer,
)
from tw_horovod.keras._values import (
    allgather,
    allreduce,
    broadcast,
    broadcast_global_variables,
    load_model,
    reducescatter,
)

__all__ = [
    "Adasum",
    "Average",
    "Compression",
    "DistributedOptimizer",
    "PartialDistributedOptimizer",
    "ProcessSet",
    "Sum",
    "add_process_set",
    "allgather",
    "allreduce",
    "broadcast",
    "broadcast_global_variables",
    "callbacks",
    "ccl_built",
    "cross_rank",
    "cross_size",
    "cuda_built",
    "ddl_built",
    "elastic",
    "global_process_set",
    "gloo_built",
    "gloo_enabled",
    "init",
    "is_initialized",
    "load_model",
    "local_rank",
    "local_size",
    "mpi_built",
    "mpi_enabled",
    "mpi_threads_supported",
    "nccl_built",
    "rank",
    "reducescatter",
    "remove_process_set",
    "rocm_built",
    "shutdown",
    "size",
    "start_timeline",
    "stop_timeline",
]
