from ._auto import auto as auto
from ._auto_plan import AutoPlan as AutoPlan
from ._auto_plan import Choice as Choice
from ._auto_plan import plan_auto as plan_auto
from ._combinators.broadcast import spread as spread
from ._combinators.compress import cast_during as cast_during
from ._combinators.compress import reduce_as as reduce_as
from ._combinators.mean import mean as mean
from ._combinators.packed import PackPlan as PackPlan
from ._combinators.packed import packed as packed
from ._combinators.packed import plan_packs as plan_packs
from ._combinators.partition import routed as routed
from ._modes import reducer_for_mode as reducer_for_mode
from ._reducer import Reducer as Reducer
from ._reducer import Tensorlike as Tensorlike
from ._reducer import TowerTensors as TowerTensors
from ._reducer import check_reduced as check_reduced
from ._reducer import check_tower_tensors as check_tower_tensors
from ._sums.collective import sum_collective as sum_collective
from ._sums.collective_keys import CollectiveKeys as CollectiveKeys
from ._sums.hierarchical import EIGHT_GPU_CROSS as EIGHT_GPU_CROSS
from ._sums.hierarchical import Groups as Groups
from ._sums.hierarchical import HierarchyPlan as HierarchyPlan
from ._sums.hierarchical import hierarchical as hierarchical
from ._sums.hierarchical import plan_hierarchy as plan_hierarchy
from ._sums.nccl import sum_nccl as sum_nccl
from ._sums.sum_balanced import BalancePlan as BalancePlan
from ._sums.sum_balanced import plan_balanced as plan_balanced
from ._sums.sum_balanced import sum_balanced as sum_balanced
from ._sums.sum_on_device import sum_on_device as sum_on_device
from ._sums.sum_round_robin import sum_round_robin as sum_round_robin
from ._tensor_info import TensorInfo as TensorInfo
from ._tensor_info import describe as describe
from .tensorpack._aggregate_grads_colocate import (
    aggregate_grads_colocate as aggregate_grads_colocate,
)
from .tensorpack._allreduce_grads import allreduce_grads as allreduce_grads
from .tensorpack._allreduce_grads import (
    allreduce_grads_hierarchical as allreduce_grads_hierarchical,
)
from .tensorpack._allreduce_grads import allreduce_grads_naive as allreduce_grads_naive
from .tensorpack._gradient_packer import GradientPacker as GradientPacker
from .tensorpack._gradient_packer import SplitPlan as SplitPlan
from .tensorpack._gradient_packer import plan_splits as plan_splits
