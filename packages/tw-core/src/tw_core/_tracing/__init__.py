"""A function of one tower, traced once and called for every tower.

The trace is cut where towers synchronise, at a meeting (``meet``). Each part becomes a
function of the tower's tensors and of its variables' handles, which is called once per
tower, with that tower's variables in place of the first one's.
"""

from tw_core._tracing.calls import Scope, call_once
from tw_core._tracing.stand_ins import Settle
from tw_core._tracing.trace import (
    Combine,
    device_in_trace,
    is_same_in_towers,
    may_meet,
    meet,
    meeting_alone,
)

__all__ = [
    "Combine",
    "Scope",
    "Settle",
    "call_once",
    "device_in_trace",
    "is_same_in_towers",
    "may_meet",
    "meet",
    "meeting_alone",
]
