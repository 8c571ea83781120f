"""Choosing by measurements: plain Python, tested by property without TensorFlow."""

import json
import subprocess
import sys
import warnings
from dataclasses import replace

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from tw_reduce._measured import (
    ALGORITHMS,
    check_made_for,
    choose_strategy,
    described_here,
)
from tw_reduce.plans import (
    MeasuredProfile,
    Measurements,
    Strategy,
    TensorInfo,
    plan_auto,
    read_measurements,
)

DEVICES = ("/device:CPU:0", "/device:CPU:1")
CPU_ALGORITHMS = [name for name in ALGORITHMS if name != "sum_nccl"]
STRATEGIES = st.builds(
    Strategy,
    st.sampled_from(CPU_ALGORITHMS),
    st.sampled_from(CPU_ALGORITHMS),
    st.sampled_from([0, 16_384, 1 << 20]),
)
TIMES = st.floats(0.1, 100, allow_nan=False)
SIZES = st.lists(st.integers(1, 1 << 26), min_size=1, max_size=30)


@st.composite
def measurements(draw):
    """Some strategies, each timed on every profile."""
    strategies = draw(st.lists(STRATEGIES, min_size=1, max_size=6, unique=True))

    def times():
        return {strategy: draw(TIMES) for strategy in strategies}

    profiles = tuple(
        MeasuredProfile(
            f"p{n}", tuple(draw(SIZES)), {"auto": times(), "all_reduce": times()}
        )
        for n in range(draw(st.integers(1, 4)))
    )
    assume(len({profile.log_mean_bytes for profile in profiles}) == len(profiles))
    return Measurements(DEVICES, {}, profiles)


def as_json(own):
    """What the doctor would write."""
    return {
        "format": 1,
        "devices": list(own.devices),
        "made_on": dict(own.made_on),
        "reducers": [
            {
                "name": profile.name,
                "num_bytes": list(profile.num_bytes),
                "times": {
                    where: [
                        {
                            "small": strategy.small,
                            "large": strategy.large,
                            "below_bytes": strategy.below_bytes,
                            "ratio": ratio,
                        }
                        for strategy, ratio in times.items()
                    ]
                    for where, times in profile.times.items()
                },
            }
            for profile in own.profiles
        ],
    }


def made(**mean_to_times):
    """Profiles ``b4096={"sum_on_device": 2.0}``, by their mean bytes."""
    profiles = []
    for name, times in mean_to_times.items():
        own = {Strategy(a, a, 0): time for a, time in times.items()}
        both = {"auto": own, "all_reduce": own}
        profiles.append(MeasuredProfile(name, (int(name[1:]),), both))
    return Measurements(DEVICES, {}, tuple(profiles))


@given(measurements(), SIZES, st.booleans())
def test_one_as_good_as_the_fastest_is_chosen(own, sizes, copies):
    where = "all_reduce" if copies else "auto"
    for profile in own.profiles:
        times = profile.times[where]
        chosen = choose_strategy(own, profile.num_bytes, copies=copies)
        assert times[chosen] <= 1.0201 * min(times.values())
    # Of other lists none that another strategy clearly beats in all that were measured.
    chosen = choose_strategy(own, sizes, copies=copies)
    for other in own.profiles[0].times[where]:
        assert not all(
            1.03 * p.times[where][other] < p.times[where][chosen] for p in own.profiles
        )
    # Lists without bytes count as the smallest.
    smallest = min(own.profiles, key=lambda profile: profile.log_mean_bytes)
    expected = choose_strategy(own, smallest.num_bytes, copies=copies)
    for count in (0, 3):
        assert choose_strategy(own, [0] * count, copies=copies) == expected


@given(measurements(), SIZES, st.booleans(), st.randoms())
def test_neither_order_nor_unit_change_the_choice(own, sizes, copies, random):
    chosen = choose_strategy(own, sizes, copies=copies)
    shuffled = random.sample(sizes, len(sizes))
    assert choose_strategy(own, shuffled, copies=copies) == chosen
    # A power of two, by which times are multiplied without rounding.
    slower = tuple(
        replace(
            profile,
            times={
                where: {strategy: 4 * time for strategy, time in times.items()}
                for where, times in profile.times.items()
            },
        )
        for profile in own.profiles
    )
    other = replace(own, profiles=slower)
    assert choose_strategy(other, sizes, copies=copies) == chosen


def large(own, num_bytes):
    return choose_strategy(own, [num_bytes], copies=False).large


def test_between_two_lists_losses_are_weighed_by_nearness():
    own = made(
        b1024={"sum_on_device": 1.0, "sum_balanced": 2.0},
        b1048576={"sum_on_device": 3.0, "sum_balanced": 1.0},
    )
    # Of ten doublings: the losses 1 + 2u and 2 - u are equal a third of the way up.
    assert large(own, 1 << 13) == large(own, 1) == "sum_on_device"
    assert large(own, 1 << 14) == large(own, 1 << 30) == "sum_balanced"
    # Of those that no measurement tells apart the first.
    own = made(b1024={"sum_on_device": 1.01, "sum_balanced": 1.0})
    assert large(own, 1024) == "sum_on_device"
    own = made(b1024={"sum_on_device": 1.03, "sum_balanced": 1.0})
    assert large(own, 1024) == "sum_balanced"
    # What one list lacks is left out between them.
    own = made(
        b1024={"sum_on_device": 1.0, "sum_balanced": 2.0, "hierarchical": 0.1},
        b4096={"sum_on_device": 2.0, "sum_balanced": 1.0},
    )
    assert large(own, 2048) != "hierarchical"
    assert large(own, 1024) == "hierarchical"
    with pytest.raises(ValueError, match="no strategy has times on all profiles for"):
        made(b1024={"sum_on_device": 1.0}, b4096={"sum_balanced": 1.0})


@given(measurements())
def test_what_is_written_is_read_again(tmp_path_factory, own):
    path = tmp_path_factory.getbasetemp() / "written.json"
    path.write_text(json.dumps(as_json(own)))
    assert read_measurements(path) == read_measurements(str(path)) == own
    assert read_measurements(json.loads(path.read_text())) == own
    assert read_measurements(own) is own


def test_files_that_say_nothing_are_refused_by_name(tmp_path):
    content = as_json(made(b1024={"sum_on_device": 1.0}))
    path = tmp_path / "m.json"
    for broken, says in (
        ("{", "m.json is not JSON"),
        ("[]", "m.json is not a JSON object"),
        (json.dumps(content | {"format": 2}), "must have format 1 of tw-doctor; got 2"),
        (json.dumps(content | {"reducers": None}), "m.json has no times of reducers"),
        (json.dumps(content | {"devices": 3}), "m.json is damaged (TypeError"),
        (json.dumps({k: content[k] for k in ("format", "reducers")}), "damaged"),
        (json.dumps(content).replace("sum_on_device", "sum_up"), "'sum_up'; known"),
        (json.dumps(content).replace("1.0", "-1.0"), "must be above 0 and finite"),
        *(
            (json.dumps(content).replace("[1024]", sizes), "'b1024' must be above 0")
            for sizes in (
                *("[0]", "[]", "[Infinity]", "[NaN]", "[-1]", "[1.5]", '["7"]', '"7"'),
                *("[true]", "[null]", f"[1{400 * '0'}]"),
            )
        ),
        *(
            (json.dumps(content).replace("1.0", ratio), "must be above 0 and finite")
            for ratio in ("Infinity", "NaN", "true", '"2"', "null", "[]", "0")
        ),
        (json.dumps(content).replace("1.0", f"1{400 * '0'}"), "is damaged (Overflow"),
        (200_000 * "[", "m.json is not JSON"),
    ):
        path.write_text(broken)
        with pytest.raises(ValueError, match="tw-doctor --json FILE") as refusal:
            read_measurements(path)
        assert says in str(refusal.value), broken


ODD = [float("inf"), float("-inf"), float("nan"), 10**400, 5e-324, True, "7", -1, 1.5]
VALUES = st.sampled_from(ODD) | st.recursive(
    st.none() | st.integers() | st.floats() | st.text(max_size=3),
    lambda own: (
        st.lists(own, max_size=2)
        | st.dictionaries(st.sampled_from(["auto", "ratio"]), own, max_size=2)
    ),
    max_leaves=3,
)


def places(holder):
    """Lists all (dictionary or list, key) of a file's content."""
    found = []
    pairs = holder.items() if isinstance(holder, dict) else enumerate(holder)
    for key, value in pairs:
        found.append((holder, key))
        if isinstance(value, dict | list):
            found += places(value)
    return found


@given(st.data(), st.booleans())
def test_a_file_with_anything_in_a_place_is_read_or_refused_by_name(
    tmp_path_factory, data, copies
):
    times = {"sum_on_device": 1.0, "sum_balanced": 2.0}
    content = as_json(made(b1024=times, b4096=times))
    holder, key = data.draw(st.sampled_from(places(content)))
    holder[key] = data.draw(VALUES)
    path = tmp_path_factory.getbasetemp() / "any.json"
    path.write_text(json.dumps(content))
    try:
        found = read_measurements(path)
    except ValueError as refusal:
        assert "any.json" in str(refusal), refusal
        assert "tw-doctor --json FILE" in str(refusal), refusal
    else:
        assert choose_strategy(found, [2048], copies=copies)
        assert {type(size) for p in found.profiles for size in p.num_bytes} == {int}


def infos(*sizes, dtype="float32", is_sparse=False):
    return [TensorInfo(n, (s // 4,), dtype, 4, is_sparse) for n, s in enumerate(sizes)]


MIXED = Strategy("sum_round_robin", "sum_balanced", 16_384)


def only(strategy):
    times = {"auto": {strategy: 1.0}, "all_reduce": {strategy: 1.0}}
    return Measurements(DEVICES, {}, (MeasuredProfile("one", (4096,), times),))


def test_a_plan_divides_by_size_and_says_why():
    plan = plan_auto(infos(400, 65_536, 800, 131_072), DEVICES, measured=only(MIXED))
    algorithms = [own.algorithm for own in plan.choices]
    assert algorithms == ["sum_round_robin", "sum_balanced"] * 2
    assert [own.packed_with for own in plan.choices] == [2, 1, 2, 1]
    assert plan.choices[3].devices == DEVICES[:1]  # the largest first
    assert plan.choices[1].devices == DEVICES[1:]
    assert plan.below_bytes == 16_384
    assert "packed(sum_round_robin, 16384) and sum_balanced" in plan.choices[0].why
    assert "4 gradients, 197,808 bytes" in str(plan)


@given(measurements(), SIZES, st.booleans())
def test_every_gradient_has_its_place_in_a_measured_plan(own, sizes, copies):
    plan = plan_auto(infos(*sizes), DEVICES, measured=own, copies=copies)
    chosen = choose_strategy(own, [s // 4 * 4 for s in sizes], copies=copies)
    assert [choice.tensor.index for choice in plan.choices] == list(range(len(sizes)))
    for choice in plan.choices:
        small = choice.tensor.num_bytes < chosen.below_bytes
        assert choice.algorithm == (chosen.small if small else chosen.large)
        assert choice.packed_with == 1 or small
        assert set(choice.devices) <= set(DEVICES)


def test_what_was_not_measured_goes_the_way_it_does_without():
    collective = only(Strategy("sum_collective", "sum_collective", 0))
    for others in (
        infos(400, 65_536, is_sparse=True),
        infos(400, 65_536, dtype="complex64"),
    ):
        plain = plan_auto(others, DEVICES)
        assert plan_auto(others, DEVICES, measured=collective).choices == plain.choices
    unknown = [TensorInfo(0, (None,), "float32", 4)]
    (choice,) = plan_auto(unknown, DEVICES, measured=only(MIXED)).choices
    assert choice.algorithm == "sum_balanced"


def test_a_threshold_of_ones_own_comes_before_the_measured_one():
    plan = plan_auto(infos(400, 800), DEVICES, below_bytes=600, measured=only(MIXED))
    algorithms = [own.algorithm for own in plan.choices]
    assert algorithms == ["sum_round_robin", "sum_balanced"]


def test_other_devices_are_refused_and_other_machines_warned_of():
    own = replace(only(MIXED), made_on={"tensorflow": "2.18.0", "cores": "2"})
    with pytest.raises(ValueError, match=r"taken on devices.*CPU:1.*got.*--towers 3"):
        check_made_for(own, [*DEVICES, "/device:CPU:2"], {})
    with pytest.raises(ValueError, match="measured was taken on devices"):
        plan_auto(infos(4), DEVICES[::-1], measured=own)
    here = {"tensorflow": "2.21.0", "cores": "2"}
    with pytest.warns(
        UserWarning, match=r"elsewhere: tensorflow 2.18.0 instead of 2.21"
    ):
        check_made_for(own, DEVICES, here)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        check_made_for(own, DEVICES, {"cores": "2"})
    here = described_here("2.21.0", ["H", "H"])
    assert (here["gpus"], here["tensorflow"]) == ("H, H", "2.21.0")
    assert all(isinstance(value, str) and value for value in here.values())


def test_the_choice_needs_no_tensorflow():
    code = "import sys, tw_reduce._measured; sys.exit('tensorflow' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
