"""tensorpack's names, for programs ported from tensorpack 0.11.

Everything that these packages kept of ``tensorpack.graph_builder`` and
``tensorpack.tfutils.tower`` can be imported from here under its name there; most names
are ``tw_core``'s, ``tw_reduce``'s and ``tw_builders``'s own. For a builder that was not
kept, the error names the replacement.
"""

from tw_builders._session.base import DataParallelBuilder
from tw_builders._session.replicated import SyncMultiGPUReplicatedBuilder
from tw_builders._session.shared_variables import (
    AsyncMultiGPUBuilder,
    SyncMultiGPUParameterServerBuilder,
)
from tw_builders.tensorpack._batch_norm import get_sync_bn_mean_var
from tw_builders.tensorpack._checkpoints import assignment_map
from tw_builders.tensorpack._staging_input import StagingInput
from tw_core.contexts import (
    BaseTowerContext,
    PredictTowerContext,
    TowerContext,
    TowerFunc,
    TrainTowerContext,
    get_current_tower_context,
)
from tw_core.contexts import TowerFunc as TowerFuncWrapper
from tw_core.contexts import TowerHandle as TowerTensorHandle
from tw_core.contexts import TowerHandles as TowerTensorHandles
from tw_core.devices import LeastLoadedDeviceSetter
from tw_core.gradients import merge_grad_list, split_grad_list
from tw_core.variables import override_to_local_variable
from tw_reduce.tensorpack import (
    GradientPacker,
    aggregate_grads_colocate,
    allreduce_grads,
    allreduce_grads_hierarchical,
    allreduce_grads_naive,
)

# The collection of add_moving_summary. Towers restore it as they do summaries.
MOVING_SUMMARY_OPS_KEY = "MOVING_SUMMARY_OPS"

__all__ = [
    "AsyncMultiGPUBuilder",
    "BaseTowerContext",
    "DataParallelBuilder",
    "GradientPacker",
    "LeastLoadedDeviceSetter",
    "MOVING_SUMMARY_OPS_KEY",
    "PredictTowerContext",
    "StagingInput",
    "SyncMultiGPUParameterServerBuilder",
    "SyncMultiGPUReplicatedBuilder",
    "TowerContext",
    "TowerFunc",
    "TowerFuncWrapper",
    "TowerTensorHandle",
    "TowerTensorHandles",
    "TrainTowerContext",
    "aggregate_grads_colocate",
    "allreduce_grads",
    "allreduce_grads_hierarchical",
    "allreduce_grads_naive",
    "assignment_map",
    "get_current_tower_context",
    "get_sync_bn_mean_var",
    "merge_grad_list",
    "override_to_local_variable",
    "split_grad_list",
]

_INSTEAD = {
    "DistributedParameterServerBuilder": "",
    "DistributedReplicatedBuilder": (
        "; under tw_syncrep.pulled_together(task) the workers hold copies of "
        "the parameters"
    ),
}


def __getattr__(name: str) -> object:
    if name in _INSTEAD:
        # `from ... import name` would hide the message of an AttributeError.
        raise ImportError(
            f"tw_builders.tensorpack: {name} is not provided. In every worker use "
            "SyncMultiGPUParameterServerBuilder under tf.compat.v1.device("
            "tw_syncrep.device_setter(task)), and make get_opt_fn return a "
            "tw_syncrep.SyncReplicasOptimizer, which averages over the workers"
            f"{_INSTEAD[name]}."
        )
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
