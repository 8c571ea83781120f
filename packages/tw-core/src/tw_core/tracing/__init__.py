"""A function of one tower, traced once and called for every tower.

The trace is cut where towers meet (``meet``): each part becomes a function of the
tower's tensors and of its variables' handles, which is called once per tower, with that
tower's variables in the place of the first one's.
"""

from tw_core.tracing._bodies import side_by_side
from tw_core.tracing._calls import Combine, Scope, call_once
from tw_core.tracing._trace import check_reached, is_same_in_towers, may_meet, meet

__all__ = [
    "Combine",
    "Scope",
    "call_once",
    "check_reached",
    "is_same_in_towers",
    "may_meet",
    "meet",
    "side_by_side",
]
