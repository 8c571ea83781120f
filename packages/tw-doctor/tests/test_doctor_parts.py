"""The parts of ``tw-doctor``: its race, what it notes, its page, and what it finds."""

import argparse
import io
import json
import sys
import time
from itertools import permutations

import pytest
import tensorflow as tf

from tw_core.testing import CPUS
from tw_doctor._machine import facts as _facts
from tw_doctor._machine import race as _race
from tw_doctor._machine.command import Examination
from tw_doctor._machine.measuring import (
    PROFILES,
    THRESHOLDS,
    THRESHOLDS_ON_GPUS,
    measure_copies,
    to_time,
    treatment,
    uniform,
)
from tw_doctor._machine.page import Page, check_line, copy_lines, reducer_lines
from tw_reduce import all_reduce, auto
from tw_reduce.plans import Strategy


class Clock:
    """Time that only contenders spend."""

    def __init__(self, monkeypatch):
        self.now = 0.0
        monkeypatch.setattr(_race.time, "perf_counter", lambda: self.now)
        monkeypatch.setattr(_race.time, "monotonic", lambda: self.now)

    def spend(self, seconds):
        self.now += seconds

    def contender(self, *seconds):
        """Takes a time of a list, over and over."""
        turns = iter(seconds * 1_000)
        return lambda: self.spend(next(turns))


def test_ratios_are_medians_of_pairs_and_the_slow_leave(monkeypatch):
    clock = Clock(monkeypatch)
    times = _race.race(
        {
            "peer": clock.contender(2.0),
            "faster": clock.contender(1.5),
            "slow": clock.contender(4.0),
        },
        "peer",
        rounds=7,
        until=1e9,
    )
    assert {name: own.ratio for name, own in times.items()} == {
        "peer": 1.0,
        "faster": 0.75,
        "slow": 2.0,
    }
    assert [times[name].rounds for name in ("peer", "faster", "slow")] == [7, 7, 5]
    assert times["slow"].seconds == 4.0


def test_a_drift_of_the_machine_does_not_change_ratios(monkeypatch):
    clock = Clock(monkeypatch)

    def drifting(share):
        return lambda: clock.spend(share * (1 + clock.now))

    times = _race.race(
        {"peer": drifting(1e-4), "other": drifting(5e-5)}, "peer", rounds=25, until=1e9
    )
    assert times["other"].ratio == pytest.approx(0.5, rel=0.02)


def test_rounds_end_with_the_time_but_not_before_the_fifth(monkeypatch):
    clock = Clock(monkeypatch)
    contenders = {"one": clock.contender(1.0), "two": clock.contender(1.0)}
    times = _race.race(contenders, "one", rounds=50, until=0.0)
    assert times["one"].rounds == times["two"].rounds == 5


def test_who_left_is_never_ahead_of_who_stayed(monkeypatch):
    clock = Clock(monkeypatch)
    # The reference is slow while all take part, as when something else runs.
    reference = iter([1.0] * 3 + [4.0] * 10 + [1.0] * 1_000)
    times = _race.race(
        {
            "peer": lambda: clock.spend(next(reference)),
            "steady": clock.contender(1.1),
            "left": clock.contender(2.0),
        },
        "peer",
        rounds=41,
        until=1e9,
    )
    assert times["left"].rounds == 5
    assert times["steady"].rounds == 41
    assert times["left"].ratio > 1.5 * times["steady"].ratio


def test_strategies_that_treat_a_list_alike_are_timed_once():
    strategies = uniform(["sum_balanced", "sum_nccl"], THRESHOLDS)
    counts = [
        len({treatment(own, profile.num_bytes) for own in strategies})
        for profile in PROFILES
    ]
    assert counts == [2 * 2, 2 * 3, 2 * 1]


def timed(**seconds):
    """Times by algorithm, which are longer by one where nothing is packed."""
    found = {}
    for own in uniform(list(seconds), (0, 16_384)):
        time = seconds[own.small] + (not own.below_bytes)
        found[own] = _race.Time(time, time, 3)
    return found


def test_the_mixture_is_tried_with_what_was_fastest_for_small_and_for_large():
    names = ["sum_balanced", "sum_nccl", "hierarchical"]
    alone = to_time(names, {}, {})
    assert alone == uniform(names, (16_384, 0))
    assert to_time(names, {}, {}, THRESHOLDS_ON_GPUS) == uniform(names, (1 << 18, 0))
    small = timed(sum_balanced=1.0, sum_nccl=1.5, hierarchical=9.0)
    large = timed(sum_balanced=1.5, sum_nccl=1.0, hierarchical=9.0)
    assert (
        to_time(names, small, large)
        == [
            *uniform(names, (16_384,)),
            *uniform(names[:2], (0,)),  # hierarchical is slow on both
            *uniform(names[:2], (1 << 20,)),
            Strategy("sum_balanced", "sum_nccl", 16_384),
            Strategy("sum_balanced", "sum_nccl", 1 << 20),
        ]
    )


def test_the_lists_grow_in_mean_size_and_the_mixture_is_resnet_18():
    means = [sum(own.num_bytes) / len(own.num_bytes) for own in PROFILES]
    assert means == sorted(means)
    assert sum(PROFILES[1].num_bytes) // 4 == 11_689_512  # as torchvision counts


OPTIONS = argparse.Namespace(
    device="cpu",
    towers=2,
    json=None,
    checks_only=False,
    measure_for=1.0,
    time_limit=100.0,
)


class Quiet:
    """A page that nobody reads."""

    def __getattr__(self, name):
        return lambda *args: None


def examination(*events):
    one = Examination(OPTIONS, Quiet())
    for event in events:
        one.take(dict(event))
    return one


def doing(what, checks):
    return {"event": "doing", "what": what, "checks": checks, "share": 0.5}


OK = {"event": "check", "name": "a", "status": "ok", "said": "", "seconds": 1}


def test_a_check_that_hangs_is_not_made_again_and_its_reducer_not_timed():
    one = examination(OK, doing("b", True))
    one.note_loss("did not end within 5 s")
    assert one.faults == ["b: did not end within 5 s"]
    assert not one.is_over
    job = one.job()
    assert job["done"] == ["a", "b"]
    assert job["failed"] == ["b"]
    assert job["parts"] == ["copies", "reducers", "scaling"]


def test_a_measurement_that_hangs_is_named_and_the_next_is_made():
    checked = {"event": "checked"}
    rows = {"event": "copies", "rows": []}
    one = examination(OK, checked, rows, doing("sum_x on y, auto", False))
    one.note_loss("did not end within 5 s")
    assert one.faults == ["sum_x on y, auto: did not end within 5 s"]
    assert one.job()["parts"] == ["scaling"]
    assert not one.is_over
    one.take(doing("steps", False))
    one.note_loss("its process was ended by SIGSEGV")
    assert one.faults[1:] == ["steps: its process was ended by SIGSEGV"]
    assert one.is_over


def test_what_the_time_limit_or_the_end_of_the_process_cut_off_is_said():
    one = examination(doing("b", True))
    one.note_time()
    assert one.faults == [
        "the checks did not end within 100 s; raise --time-limit (during b)"
    ]
    one = examination(OK, {"event": "checked"}, {"event": "copies", "rows": []})
    one.note_time()
    assert "reducers, scaling could not be measured within 100 s" in one.faults[0]
    assert one.is_over
    one = examination()  # whose process dies before anything
    one.note_loss("its process ended with status 1 (no module)")
    assert one.faults == [
        "starting TensorFlow: its process ended with status 1 (no module)"
    ]
    assert one.is_over


class Terminal(io.StringIO):
    def isatty(self):
        return True


def test_the_bar_is_for_terminals_and_gone_before_a_line(monkeypatch, capsys):
    monkeypatch.setattr(sys, "stderr", Terminal())
    page = Page()
    page.progress(0.5, "sum_balanced")
    page.write([check_line({"status": "wrong", "name": "n", "said": "s"})])
    shown = sys.stderr.getvalue()
    assert "[============            ]  50%  sum_balanced" in shown
    assert shown.endswith("\r\033[K")
    assert "  WRONG n  s" in capsys.readouterr().out
    monkeypatch.setattr(sys, "stderr", io.StringIO())
    page = Page()
    page.progress(0.5, "sum_balanced")
    assert sys.stderr.getvalue() == ""


def test_devices_of_one_memory_and_links_are_told_apart():
    rows = [
        {"from": "/gpu:0", "to": "/gpu:1", "latency_us": 3.0, "gb_per_s": 20.5},
        {"from": "/cpu:0", "to": "/cpu:1", "latency_us": 0.5, "gb_per_s": None},
        {"from": "/cpu:1", "to": "/cpu:0", "latency_us": None, "gb_per_s": None},
    ]
    _, link, memory, untimed = copy_lines(rows)
    assert "gpu:0 -> gpu:1" in link
    assert "20.5 GB/s" in link
    assert "one memory" in memory
    assert "cpu:1 -> cpu:0  no time left" in untimed


def test_pairs_of_devices_that_time_did_not_reach_are_listed():
    rows = measure_copies(CPUS[:3], print, until=time.monotonic() - 1)
    pairs = [(row["from"], row["to"]) for row in rows]
    assert pairs == list(permutations(CPUS[:3], 2))
    assert {row["latency_us"] for row in rows} == {None}


def test_strategies_that_share_a_time_are_shown_once():
    def row(below, ratio, seconds):
        name = {"small": "sum_balanced", "large": "sum_balanced"}
        return {**name, "below_bytes": below, "ratio": ratio, "seconds": seconds}

    rows = [row(0, 2.0, 0.2), row(16_384, 1.0, 0.1), row(1 << 20, 1.0, 0.1)]
    lines = list(reducer_lines([{"name": "p", "times": {"auto": rows}}]))[2:]
    assert [line.split()[-2:] for line in lines] == [
        ["packed(sum_balanced,", "16384)"],
        ["2.00", "sum_balanced"],
    ]


def test_gpus_and_links_are_what_nvidia_smi_says(monkeypatch, tmp_path):
    command = tmp_path / "nvidia-smi"
    command.write_text(
        "#!/bin/sh\n"
        'if [ "$1" = topo ]; then echo "  GPU0 GPU1"; echo "GPU0 X NV4"; else\n'
        'echo "NVIDIA X, 1000 MiB, 900 MiB"; echo "odd, [N/A], 3 MiB"; fi\n'
    )
    command.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    assert _facts.gpu_memory() == [
        {"name": "NVIDIA X", "total_mib": 1000, "free_mib": 900}
    ]
    assert _facts.links() == ["  GPU0 GPU1", "GPU0 X NV4"]
    command.write_text("#!/bin/sh\nexit 9\n")
    assert _facts.gpu_memory() == _facts.links() == []


def test_a_machine_with_a_network_says_who_could_reach_a_server(monkeypatch):
    found = [(1, "lo"), (2, "up"), (3, "down")]
    monkeypatch.setattr(_facts.socket, "if_nameindex", lambda: found)
    monkeypatch.setattr(_facts, "_address", {"up": "10.1.2.3", "down": ""}.get)
    assert "here 10.1.2.3 (up). Close its ports" in _facts.exposure()
    monkeypatch.setattr(_facts.socket, "if_nameindex", lambda: found[:1])
    assert "from this machine only" in _facts.exposure()


def test_a_wrong_tf_config_does_not_hold(monkeypatch):
    pytest.importorskip("tw_syncrep")
    monkeypatch.setenv("TF_CONFIG", "{")
    with pytest.raises(AssertionError, match="read_tf_config"):
        _facts.tf_config()
    cluster, task = {"worker": ["a:1", "b:2"]}, {"type": "worker", "index": 1}
    monkeypatch.setenv("TF_CONFIG", json.dumps({"cluster": cluster, "task": task}))
    assert _facts.tf_config().startswith("task worker:1 of {'worker': ('a:1', 'b:2')}")
    monkeypatch.delenv("TF_CONFIG")
    assert _facts.tf_config() == "not set"


@pytest.mark.parametrize("make", [auto, all_reduce])
@pytest.mark.parametrize(
    ("present", "algorithm"), [(1, "sum_balanced"), (2, "sum_nccl")]
)
def test_towers_that_share_a_gpu_do_without_nccl(monkeypatch, make, present, algorithm):
    monkeypatch.setattr(
        tf.config, "get_visible_devices", lambda kind=None: ["GPU"] * present
    )
    plans = []
    with tf.Graph().as_default():
        reduce = make(["/gpu:0", "/gpu:1"], explain=plans.append)
        grads = []
        for device in ("/gpu:0", "/gpu:1"):
            with tf.device(device):
                grads.append([tf.ones([2])])
        reduce(grads)
    assert [own.algorithm for own in plans[0].choices] == [algorithm]
