from ._function.batch import DeviceBatch as DeviceBatch
from ._function.epochs import EpochFunction as EpochFunction
from ._loading.plan import LoadPlan as LoadPlan
from ._loading.plan import LoadReport as LoadReport
from ._loading.plan import plan_load as plan_load
from ._session.optimizer import (
    LocalSyncParallelOptimizer as LocalSyncParallelOptimizer,
)
from ._training.gradients import weighted_mean as weighted_mean
from ._training.loop import EpochResult as EpochResult
from ._training.order import EpochOrder as EpochOrder
from ._training.order import epoch_order as epoch_order
