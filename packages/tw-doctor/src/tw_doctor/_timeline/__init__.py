"""The timeline of a step: what each device did, for whom, and what it waited for.

``record_steps`` records; ``StepRecorder`` has the steps, as data, as a table, as a
picture and as a trace file. ``merge_traces`` joins the files of several processes.
"""

from tw_doctor._timeline.intervals import Arrival, Call, Interval, RecordedStep
from tw_doctor._timeline.recording import StepRecorder, record_steps
from tw_doctor._timeline.summary import Row, Summary
from tw_doctor._timeline.trace import merge_traces
from tw_doctor._timeline.waits import Wait, explained, waits

__all__ = [
    "Arrival",
    "Call",
    "Interval",
    "RecordedStep",
    "Row",
    "StepRecorder",
    "Summary",
    "Wait",
    "explained",
    "merge_traces",
    "record_steps",
    "waits",
]
