from ._aggregate_grads_colocate import (
    aggregate_grads_colocate as aggregate_grads_colocate,
)
from ._allreduce_grads import allreduce_grads as allreduce_grads
from ._allreduce_grads import (
    allreduce_grads_hierarchical as allreduce_grads_hierarchical,
)
from ._allreduce_grads import allreduce_grads_naive as allreduce_grads_naive
from ._auto import auto as auto
from ._auto_plan import AutoPlan as AutoPlan
from ._auto_plan import Choice as Choice
from ._auto_plan import plan_auto as plan_auto
from ._cast_during import cast_during as cast_during
from ._cast_during import reduce_as as reduce_as
from ._collective import sum_collective as sum_collective
from ._collective_keys import CollectiveKeys as CollectiveKeys
from ._gradient_packer import GradientPacker as GradientPacker
from ._gradient_packer import SplitPlan as SplitPlan
from ._gradient_packer import plan_splits as plan_splits
from ._hierarchical import EIGHT_GPU_CROSS as EIGHT_GPU_CROSS
from ._hierarchical import Groups as Groups
from ._hierarchical import HierarchyPlan as HierarchyPlan
from ._hierarchical import hierarchical as hierarchical
from ._hierarchical import plan_hierarchy as plan_hierarchy
from ._mean import mean as mean
from ._modes import reducer_for_mode as reducer_for_mode
from ._nccl import sum_nccl as sum_nccl
from ._packed import PackPlan as PackPlan
from ._packed import packed as packed
from ._packed import plan_packs as plan_packs
from ._routed import routed as routed
from ._spread import spread as spread
from ._sum_balanced import BalancePlan as BalancePlan
from ._sum_balanced import plan_balanced as plan_balanced
from ._sum_balanced import sum_balanced as sum_balanced
from ._sum_on_device import sum_on_device as sum_on_device
from ._sum_round_robin import sum_round_robin as sum_round_robin
from ._tensor_info import TensorInfo as TensorInfo
from ._tensor_info import describe as describe
from ._tower_tensors import Reducer as Reducer
from ._tower_tensors import Tensorlike as Tensorlike
from ._tower_tensors import TowerTensors as TowerTensors
from ._tower_tensors import check_reduced as check_reduced
from ._tower_tensors import check_tower_tensors as check_tower_tensors
