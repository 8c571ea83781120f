from ._apply import apply_gradients as apply_gradients
from ._apply import apply_shared_gradients as apply_shared_gradients
from ._async import AsyncMultiGPUBuilder as AsyncMultiGPUBuilder
from ._async_runner import AsyncRunner as AsyncRunner
from ._async_runner import TowerError as TowerError
from ._async_runner import locked_step as locked_step
from ._data_parallel import DataParallelBuilder as DataParallelBuilder
from ._optimizers import make_optimizers as make_optimizers
from ._parameter_server import (
    SyncMultiGPUParameterServerBuilder as SyncMultiGPUParameterServerBuilder,
)
from ._replicated import SyncMultiGPUReplicatedBuilder as SyncMultiGPUReplicatedBuilder
from ._sync_variables import SyncVariablesHook as SyncVariablesHook
