"""What a GPU ran, as TensorFlow recorded it where two logical GPUs share one."""

from tensorflow.core.framework import step_stats_pb2
from tensorflow.tsl.profiler.protobuf import xplane_pb2

from tw_doctor._timeline.step_stats import step_of_stats
from tw_doctor._timeline.xplane import MARK, steps_of_space

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


def add_event(plane, line, name, start, end, /, **stats):
    """Adds an event, of begin and end in us, to a line of a plane."""
    key = len(plane.event_metadata) + 1
    plane.event_metadata[key].name = name
    event = line.events.add(metadata_id=key)
    event.offset_ps, event.duration_ps = 10**6 * start, 10**6 * (end - start)
    for stat, value in stats.items():
        key = len(plane.stat_metadata) + 1
        plane.stat_metadata[key].name = stat
        kind = "str_value" if isinstance(value, str) else "int64_value"
        setattr(event.stats.add(metadata_id=key), kind, value)


def test_kernels_of_a_profile_are_on_the_logical_gpu_that_launched_them():
    space = xplane_pb2.XSpace()
    host = space.planes.add(name="/host:CPU")
    add_event(host, host.lines.add(name="python3"), MARK, 0, 100, step_num=1)
    for k, device in enumerate((A, B)):  # As operations sent say, or their caller.
        line, at = host.lines.add(name=f"tf_Compute/{k}"), 30 * k
        key = f"{TASK}{device};1;{TASK}{HOST};edge_1_x;0:0"
        call = {"name": f"tower{k}/call", "kernel_type": "PartitionedCall"}
        for begin, end, name, stats in [
            (at, at + 29, "ExecutorState::Process", {"id": 7, "_c": k}),
            (at + 1, at + 2, f"x{k}/_1:_Send", {"key": key}),
            (at + 3, at + 4, "cuLaunchKernel", {"correlation_id": 100 + k}),
            (at + 5, at + 8, "ExecutorState::ProcessAsync::Start", {"_p": 50, **call}),
            (at + 6, at + 7, "FunctionRun", {"_p": 10 + k}),
            (70, 99, "ExecutorState::Process", {"id": 8, "_c": 10 + k}),
            (71, 72, "cuLaunchKernel", {"correlation_id": 200 + k}),
        ]:
            add_event(host, line, name, begin, end, **stats)
    whole = space.planes.add(name=A)
    ops = {100: "apply_grad/x", 101: "apply_grad/x", 200: "mul", 201: "mul", 300: "mul"}
    for name in ("Stream #13(Compute)", "TensorFlow Ops"):
        line = whole.lines.add(name=name)
        for at, (launch, op) in enumerate(ops.items(), start=80):
            own = {"tf_op": f"{op}:Mul", "correlation_id": launch}
            add_event(whole, line, "kernel", at, at + 1, **own)
    [step] = steps_of_space(space, last=1)
    assert [(own.device, own.part, own.tower) for own in step.intervals] == [
        *((A, "apply", None), (B, "apply", None)),
        *((A, "forward", 0), (B, "forward", 1), (A, "other", None)),
    ]
