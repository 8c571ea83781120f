"""The variables of towers: shared or replicated, kept across traces, and their owners.

``Shared`` and ``Replicated`` serve ``get_variable`` code, ``replicate`` serves modules.
"""

from tw_core._records.origins import VariableOrigin, variable_origin, variable_origins
from tw_core.variables._policies import Replicated, Shared, override_to_local_variable
from tw_core.variables._replicas import copy_to_replicas, replicate
from tw_core.variables._store import VariableStore

__all__ = [
    "Replicated",
    "Shared",
    "VariableOrigin",
    "VariableStore",
    "copy_to_replicas",
    "override_to_local_variable",
    "replicate",
    "variable_origin",
    "variable_origins",
]
