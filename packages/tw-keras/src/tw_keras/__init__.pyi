from ._comparing.compare import compare as compare
from ._comparing.verdict import Comparison as Comparison
from ._following import on_rank_0 as on_rank_0
from ._model import TowerModel as TowerModel
from ._over_ranks.local_steps import LocalSteps as LocalSteps
