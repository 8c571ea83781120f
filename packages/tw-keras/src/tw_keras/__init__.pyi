from ._following import on_rank_0 as on_rank_0
from ._model import TowerModel as TowerModel
from ._over_ranks.local_steps import LocalSteps as LocalSteps
