"""Calls that must be refused in a sentence, for every public name that takes any."""

from contextlib import nullcontext

from harness.wrong_calls import Interface, WrongCalls

EXEMPT = {
    "test_recording.py tests what a recorder makes": (
        "StepRecorder StepRecorder.__exit__ StepRecorder.draw StepRecorder.run "
        "StepRecorder.write explained waits RecordedStep.on merge_traces"
    ),
}
INTERFACE = Interface(
    "tw-doctor",
    {"num_steps": lambda: 1, "path": lambda: "trace.json"},
    lambda _: nullcontext(),
    named={"main.arguments": "arguments?"},
    exempt=EXEMPT,
)
OTHERS = {
    "record_steps.num_steps": [(0, ValueError, "num_steps must be at least 1; got 0")],
    "merge_traces.paths": [
        ("trace.json", TypeError, "paths"),
        ([], ValueError, "paths"),
    ],
}
ROWS = INTERFACE.rows(OTHERS)


class TestWrongCalls(WrongCalls):
    interface, rows = INTERFACE, ROWS
