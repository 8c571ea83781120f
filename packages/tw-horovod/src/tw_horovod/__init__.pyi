from . import compression as compression
from . import elastic as elastic
from . import keras as keras
from ._gradients.optimizers import DistributedOptimizer as DistributedOptimizer
from ._gradients.tape import DistributedGradientTape as DistributedGradientTape
from ._gradients.tape import (
    PartialDistributedGradientTape as PartialDistributedGradientTape,
)
from ._operations.batch_norm import SyncBatchNormalization as SyncBatchNormalization
from ._operations.objects import allgather_object as allgather_object
from ._operations.objects import barrier as barrier
from ._operations.objects import broadcast_object as broadcast_object
from ._operations.objects import broadcast_object_fn as broadcast_object_fn
from ._operations.objects import join as join
from ._operations.ops import allgather as allgather
from ._operations.ops import allreduce as allreduce
from ._operations.ops import broadcast as broadcast
from ._operations.ops import grouped_allgather as grouped_allgather
from ._operations.ops import grouped_allreduce as grouped_allreduce
from ._operations.reductions import Adasum as Adasum
from ._operations.reductions import Average as Average
from ._operations.reductions import Max as Max
from ._operations.reductions import Min as Min
from ._operations.reductions import Product as Product
from ._operations.reductions import Sum as Sum
from ._operations.shares import alltoall as alltoall
from ._operations.shares import grouped_reducescatter as grouped_reducescatter
from ._operations.shares import reducescatter as reducescatter
from ._operations.variables import (
    BroadcastGlobalVariablesHook as BroadcastGlobalVariablesHook,
)
from ._operations.variables import broadcast_ as broadcast_
from ._operations.variables import (
    broadcast_global_variables as broadcast_global_variables,
)
from ._operations.variables import broadcast_variables as broadcast_variables
from ._state.group import ProcessSet as ProcessSet
from ._state.group import global_process_set as global_process_set
from ._state.group import init as init
from ._state.group import is_initialized as is_initialized
from ._state.group import shutdown as shutdown
from ._state.queries import add_process_set as add_process_set
from ._state.queries import ccl_built as ccl_built
from ._state.queries import cross_rank as cross_rank
from ._state.queries import cross_size as cross_size
from ._state.queries import cuda_built as cuda_built
from ._state.queries import ddl_built as ddl_built
from ._state.queries import gloo_built as gloo_built
from ._state.queries import gloo_enabled as gloo_enabled
from ._state.queries import is_homogeneous as is_homogeneous
from ._state.queries import local_rank as local_rank
from ._state.queries import local_rank_op as local_rank_op
from ._state.queries import local_size as local_size
from ._state.queries import local_size_op as local_size_op
from ._state.queries import mpi_built as mpi_built
from ._state.queries import mpi_enabled as mpi_enabled
from ._state.queries import mpi_threads_supported as mpi_threads_supported
from ._state.queries import nccl_built as nccl_built
from ._state.queries import process_set_included_op as process_set_included_op
from ._state.queries import rank as rank
from ._state.queries import rank_op as rank_op
from ._state.queries import remove_process_set as remove_process_set
from ._state.queries import rocm_built as rocm_built
from ._state.queries import size as size
from ._state.queries import size_op as size_op
from ._state.queries import start_timeline as start_timeline
from ._state.queries import stop_timeline as stop_timeline
from .compression import Compression as Compression
