"""What a GPU ran, as TensorFlow recorded it where two logical GPUs share one."""

from dataclasses import replace

from tensorflow.core.framework import step_stats_pb2
from tensorflow.tsl.profiler.protobuf import xplane_pb2

from tw_core.timeline._intervals import Interval
from tw_core.timeline._step_stats import step_of_stats
from tw_core.timeline._xplane import _kernels

A, B, HOST = "/device:GPU:0", "/device:GPU:1", "/device:CPU:0"
TASK = "/job:localhost/replica:0/task:0"


def stats_of(devices):
    """Makes a recorded run from (name, label, begin and end in us) by device."""
    stats = step_stats_pb2.StepStats()
    for device, nodes in devices.items():
        own = stats.dev_stats.add(device=device)
        for name, label, begin, end in nodes:
            own.node_stats.add(
                node_name=name,
                timeline_label=label,
                all_start_micros=1_000_000,
                op_start_rel_micros=begin,
                op_end_rel_micros=end,
            )
    return stats


def test_kernels_of_a_session_are_on_the_logical_gpu_that_launched_them():
    kernels = [
        ("tower0/matmul:MatMul", "sm80_gemm", 30, 90),
        ("tower1/matmul:MatMul", "sm80_gemm", 40, 95),
    ]
    copy = ("tower1/gradients/AddN/_3:_Recv", "MemcpyD2H kind_src:device", 96, 97)
    sent = "tower1/gradients/AddN/_3"
    on_host = [(sent, f"{sent} = _Recv()", 96, 98), ("x", "x = AddN()", 98, 99)]
    stats = stats_of(
        {
            "/device:GPU:0/stream:17": kernels[1:],
            "/device:GPU:0/stream:20<MemcpyD2H>": [copy],
            "/device:GPU:0/stream:all": kernels,
            "/device:GPU:0/memcpy": [copy],
            TASK + HOST: on_host,
            TASK + A: [("tower0/matmul", "tower0/matmul = MatMul()", 1, 2)],
            TASK + B: [("tower1/matmul", "tower1/matmul = MatMul()", 1, 2)],
        }
    )
    step = step_of_stats(stats, 7, begin=0.0, start=0.5, end=2.0, epoch=0.0)
    assert [
        (own.device, own.part, own.tower, round(1e6 * (own.end - own.start)))
        for own in step.intervals
    ] == [
        *((A, "forward", 0, 60), (B, "forward", 1, 55)),
        *((A, "move", 1, 1), (HOST, "move", 1, 2), (HOST, "other", None, 1)),
    ]


def test_kernels_of_a_profile_are_on_the_logical_gpu_that_launched_them():
    space = xplane_pb2.XSpace()
    plane = space.planes.add(name=A)
    plane.stat_metadata[1].name = "tf_op"
    for number, name in enumerate(["tower0/mul:Mul", "tower1/mul:Mul", "alone:Mul"]):
        plane.event_metadata[number].name = "kernel"
        for line in ("Stream #13(Compute)", "TensorFlow Ops"):
            event = plane.lines.add(name=line).events.add(metadata_id=number)
            event.stats.add(metadata_id=1, str_value=name)
    launches = [
        Interval(device, "forward", None, name, "Mul", 0.0, 1.0, None)
        for device, name in [(A, "tower0/mul"), (B, "tower1/mul"), (HOST, "tower1/mul")]
    ]
    ran = [(own.device, own.name, own.kind) for own in _kernels(space, launches)]
    assert ran == [
        (A, "tower0/mul", "Mul"),
        (B, "tower1/mul", "Mul"),
        (A, "alone", "Mul"),
    ]
    several = [*launches, replace(launches[1], device=A)]
    assert [own.device for own in _kernels(space, several)] == [A, A, A]
