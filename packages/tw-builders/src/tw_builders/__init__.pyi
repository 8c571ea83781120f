from ._apply import apply_gradients as apply_gradients
from ._apply import apply_shared_gradients as apply_shared_gradients
from ._apply import make_optimizers as make_optimizers
from ._local_steps.averager import ModelAverager as ModelAverager
from ._over_ranks.optimizer import RankShardedOptimizer as RankShardedOptimizer
from ._per_tower import per_tower as per_tower
from ._runner import AsyncRunner as AsyncRunner
from ._runner import TowerError as TowerError
from ._runner import locked_step as locked_step
from ._session.base import DataParallelBuilder as DataParallelBuilder
from ._session.replicated import (
    SyncMultiGPUReplicatedBuilder as SyncMultiGPUReplicatedBuilder,
)
from ._session.sharded import SyncMultiGPUShardedBuilder as SyncMultiGPUShardedBuilder
from ._session.shared_variables import AsyncMultiGPUBuilder as AsyncMultiGPUBuilder
from ._session.shared_variables import (
    SyncMultiGPUParameterServerBuilder as SyncMultiGPUParameterServerBuilder,
)
from ._session.sync_variables import SyncVariablesHook as SyncVariablesHook
from ._sharded import apply_at_owners as apply_at_owners
from ._sharded import apply_sharded_gradients as apply_sharded_gradients
from ._sharded_optimizer import make_sharded_optimizer as make_sharded_optimizer
from ._sharded_optimizer import owned_variables as owned_variables
