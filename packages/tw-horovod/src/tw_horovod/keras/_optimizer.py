"""``DistributedOptimizer`` of ``horovod.tensorflow.keras``."""

from typing import Any

from tw_horovod._gradients.keras_optimizers import copy_reducing
from tw_horovod._gradients.reducer import make_reducer
from tw_horovod._gradients.tape import find_local_variables
from tw_horovod._operations.reductions import Average, Sum
from tw_horovod._state.group import global_process_set
from tw_horovod.compression import Compression


def DistributedOptimizer(
    optimizer: Any,
    name: str | None = None,
    device_dense: str = "",
    device_sparse: str = "",
    compression: Any = Compression.none,
    sparse_as_dense: bool = False,
    gradient_predivide_factor: float = 1.0,
    op: Any = Average,
    backward_passes_per_step: int = 1,
    average_aggregated_gradients: bool = False,
    num_groups: int = 0,
    groups: Any = None,
    process_set: Any = global_process_set,
    scale_local_gradients: bool = True,
) -> Any:
    """Returns a copy of an optimizer that applies gradients reduced over all ranks.

    The copy has the configuration of ``optimizer`` and fresh state. Its class is a
    subclass of ``optimizer``'s with the same name, so that a model saved with it loads
    where this package is not installed. Its ``apply`` and ``apply_gradients`` reduce
    first. For Keras 2, ``compute_gradients`` reduces, and an ``apply_gradients`` that
    follows it does not, so that the program can clip reduced gradients in between.

    Arguments and errors are those of ``tw_horovod.DistributedOptimizer``, but:

    - ``optimizer`` is of Keras 3, and the outermost if several wrap each other, such as
      a ``LossScaleOptimizer``; or of Keras 2, whose ``LossScaleOptimizer`` goes around;
    - ``name`` is by default that of ``optimizer``;
    - ``op`` is Average or Sum;
    - ``iterations`` counts all ``backward_passes_per_step``.
    """
    reducer = make_reducer(
        (Average, Sum),
        op=op,
        compression=compression,
        sparse_as_dense=sparse_as_dense,
        gradient_predivide_factor=gradient_predivide_factor,
        num_groups=num_groups,
        groups=groups,
        process_set=process_set,
        scale_local_gradients=scale_local_gradients,
        backward_passes_per_step=backward_passes_per_step,
        average_aggregated_gradients=average_aggregated_gradients,
    )
    return copy_reducing(optimizer, name, reducer)


def PartialDistributedOptimizer(
    optimizer: Any,
    name: str | None = None,
    device_dense: str = "",
    device_sparse: str = "",
    compression: Any = Compression.none,
    sparse_as_dense: bool = False,
    gradient_predivide_factor: float = 1.0,
    op: Any = Average,
    backward_passes_per_step: int = 1,
    average_aggregated_gradients: bool = False,
    groups: Any = None,
    process_set: Any = global_process_set,
    local_layers: Any = None,
    scale_local_gradients: bool = True,
) -> Any:
    """Returns a ``DistributedOptimizer`` that keeps some layers local to each rank.

    ``local_layers`` is one or several built Keras layers; each rank keeps the gradients
    of their variables. All else is as in ``DistributedOptimizer``.

    Raises:
      ValueError: an item of ``local_layers`` is not a layer.
    """
    local = find_local_variables(local_layers)
    made = DistributedOptimizer(
        optimizer,
        name,
        compression=compression,
        sparse_as_dense=sparse_as_dense,
        gradient_predivide_factor=gradient_predivide_factor,
        op=op,
        backward_passes_per_step=backward_passes_per_step,
        average_aggregated_gradients=average_aggregated_gradients,
        groups=groups,
        process_set=process_set,
        scale_local_gradients=scale_local_gradients,
    )
    for variable in local:
        made.register_local_var(variable)
    return made
