"""The variables of towers: shared or replicated, kept across traces, and their owners.

``Shared`` and ``Replicated`` serve ``get_variable`` code, ``replicate`` serves modules.
"""

from tw_core._records.builds import tower_build
from tw_core._records.matching import repeated_variables, shared_variables
from tw_core._records.origins import (
    VariableOrigin,
    variable_origin,
    variable_origins,
)
from tw_core._towers import record_variables
from tw_core._variable_kinds import is_variable, plain_name, tf_variable, tf_variables
from tw_core.variables._policies import Replicated, Shared, override_to_local_variable
from tw_core.variables._replicas import copy_to_replicas, replicate
from tw_core.variables._store import VariableStore

__all__ = [
    "Replicated",
    "Shared",
    "VariableOrigin",
    "VariableStore",
    "copy_to_replicas",
    "is_variable",
    "override_to_local_variable",
    "plain_name",
    "record_variables",
    "repeated_variables",
    "replicate",
    "shared_variables",
    "tf_variable",
    "tf_variables",
    "tower_build",
    "variable_origin",
    "variable_origins",
]
