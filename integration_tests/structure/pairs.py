"""Which options of ``TowerModel`` train together, and the table of these in the docs.

What is declared here ``test_pairs`` tries, pair by pair. ``python -m structure.pairs``,
from the folder above, writes it into docs/design/update.md.
"""

import argparse
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from itertools import combinations
from pathlib import Path

PAGE = Path(__file__).parents[2] / "docs" / "design" / "update.md"
BEGIN, END = "<!-- pairs of options: written by a test -->", "<!-- end of pairs -->"

Names = tuple[str, ...]

OPTIONS = {  # and how the page shows them
    "accumulation": "`gradient_accumulation_steps`",
    "memory": "`reducer` with memory",
    "loss scale": "`LossScaleOptimizer`",
    "clipping": "`global_clipnorm`",
    "weight decay": "`weight_decay`",
    "average of weights": "`use_ema`",
    "shards": '`variables="sharded"`',
    "parameter server": '`variables="parameter_server"`',
    "local steps": "`local_steps` †",
    "own data": '`data="own"` †',
    "eager": "`run_eagerly`",
    "XLA": "`jit_compile`",
    "steps per execution": "`steps_per_execution`",
    "own reducer": "`reducer`, a function",
    "weights": "`weights`",
    "wire": "`wire_dtype` †",
}
OVER = ("towers", "ranks")
NEEDS_RANKS = {"local steps", "own data", "wire"}
# Gradients are rounded as they are sent: so far numbers may differ from one device's.
ROUNDED, ROUNDS = "wire", 0.02
# Values of one argument.
APART = ({"memory", "own reducer"}, {"shards", "parameter server"})


@dataclass(frozen=True)
class Pair:
    """Two options that do not train as one device does."""

    options: Names  # in the order above
    why: str
    says: str = ""  # how the error begins that refuses them
    kind: str = "not built"


REFUSED = [
    Pair(
        ("local steps", "steps per execution"),
        "ranks average between two calls, so the first must be a multiple",
        says="TowerModel: local_steps must be a multiple",
    ),
    *(
        Pair((other, ROUNDED), why, says="TowerModel: wire_dtype is the dtype of whole")
        for other, why in [
            ("memory", "a reducer with memory sends an approximation of its own"),
            ("shards", "ranks send parts of gradients to their owners, and new values"),
            ("local steps", "ranks send weights"),
        ]
    ),
]
# These train with other numbers than one device's, equal on all ranks.
OTHER_NUMBERS = [
    Pair(
        ("loss scale", "local steps"),
        "each rank skips the steps in which its own gradients overflow",
        kind="mathematics",
    ),
    Pair(
        ("clipping", "local steps"),
        "each rank clips its own gradients; the norm of their mean is unknown",
        kind="mathematics",
    ),
]


def can_be_given(over: str, names: Collection[str]) -> bool:
    """Returns whether options are no values of one argument, and need no other."""
    are_apart = any(len(apart.intersection(names)) > 1 for apart in APART)
    return not are_apart and (over == "ranks" or NEEDS_RANKS.isdisjoint(names))


def given(over: str, count: int) -> list[Names]:
    """Lists the choices of so many options."""
    return [own for own in combinations(OPTIONS, count) if can_be_given(over, own)]


def refusals(names: Collection[str]) -> list[str]:
    """Returns the beginnings of the errors that may refuse these options; none: []."""
    return [own.says for own in REFUSED if {*own.options} <= {*names}]


def have_other_numbers(names: Collection[str]) -> bool:
    """Returns whether options that train do so with numbers of their own."""
    return any({*own.options} <= {*names} for own in OTHER_NUMBERS)


def are_rounded(over: str, names: Collection[str]) -> bool:
    """Returns whether numbers are one device's to the digits that are sent."""
    return over == "ranks" and ROUNDED in names


def lines() -> Iterator[str]:
    """Yields the table and the reasons, as the page has them."""
    columns = range(1, len(OPTIONS) + 1)
    head = ["", *map(str, columns)]
    yield from map(_row, [head, ["---", *["---:"] * len(columns)]])
    for n, (name, shown) in enumerate(OPTIONS.items(), 1):
        yield _row([f"{n} {shown}", *(_cell(name, other) for other in OPTIONS)])
    others, every = len(REFUSED) + len(OTHER_NUMBERS), given("ranks", 2)
    rounded = sum(are_rounded("ranks", o) and not refusals(o) for o in every)
    yield ""
    yield (
        f"✓ train as one device ({len(every) - others - rounded} pairs); ≈ do, up to "
        f"the digits that are sent ({rounded}); ✗ are refused by name "
        f"({len(REFUSED)}); ≠ train with other numbers, equal on all ranks "
        f"({len(OTHER_NUMBERS)}); — are values of one argument; † needs a `group`."
    )
    yield ""
    for own in [*REFUSED, *OTHER_NUMBERS]:
        first, second = (OPTIONS[name].removesuffix(" †") for name in own.options)
        yield f"- {first} and {second}: {own.kind}: {own.why}."


def _cell(name: str, other: str) -> str:
    names = {name, other}  # one of them: the option alone
    if not can_be_given("ranks", names):
        return "—"
    if refusals(names):
        return "✗"
    if are_rounded("ranks", names):
        return "≈"
    return "≠" if have_other_numbers(names) else "✓"


def _row(cells: list[str]) -> str:
    return f"| {' | '.join(cells)} |"


def written(text: str) -> str:
    """Returns the page with the table in place of what is between its marks."""
    before, _, rest = text.partition(f"{BEGIN}\n")
    _, mark, after = rest.partition(END)
    if not mark:
        raise ValueError(f"the page must have a line {BEGIN!r} and then {END!r}")
    return "\n".join([f"{before}{BEGIN}", "", *lines(), "", f"{END}{after}"])


if __name__ == "__main__":
    argparse.ArgumentParser(description=__doc__).parse_args()
    PAGE.write_text(written(PAGE.read_text()))
