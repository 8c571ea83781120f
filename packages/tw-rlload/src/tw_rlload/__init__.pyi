from ._device_batch import DeviceBatch as DeviceBatch
from ._epoch_function import EpochFunction as EpochFunction
from ._epoch_order import EpochOrder as EpochOrder
from ._epoch_order import epoch_order as epoch_order
from ._epoch_result import EpochResult as EpochResult
from ._load_plan import LoadPlan as LoadPlan
from ._load_plan import plan_load as plan_load
from ._load_report import LoadReport as LoadReport
from ._local_sync_parallel_optimizer import (
    LocalSyncParallelOptimizer as LocalSyncParallelOptimizer,
)
from ._weighted_mean import weighted_mean as weighted_mean
