"""The two pictures of a training run: its curves, and the placement of variables."""

import textwrap

import matplotlib

matplotlib.use("Agg")

import matplotlib.pyplot as plt
from matplotlib.patches import FancyBboxPatch
from matplotlib.textpath import TextPath

import tw_core

_BLUE, _ORANGE, _GREY = "#2a6f97", "#c8553d", "#555555"


def draw_curves(history, *, path):
    """Draws loss and test accuracy over epochs."""
    epochs = range(1, len(history["loss"]) + 1)
    figure, (left, right) = plt.subplots(1, 2, figsize=(9, 3.4), layout="constrained")
    left.plot(epochs, history["loss"], color=_BLUE, label="loss per image")
    left.set(title="Training loss", xlabel="epoch", ylabel="cross-entropy (nats)")
    left.set_yscale("log")
    right.plot(epochs, history["accuracy"], color=_ORANGE, label="accuracy")
    right.axhline(0.97, color=_GREY, linestyle=":", label="97 %")
    right.set(title="Test accuracy", xlabel="epoch", ylabel="share of images right")
    right.set_ylim(min([0.9, *history["accuracy"]]) - 0.01, 1.0)
    for axes in (left, right):
        axes.grid(alpha=0.3)
        axes.legend()
        axes.xaxis.get_major_locator().set_params(integer=True)
    figure.savefig(path, dpi=130)
    plt.close(figure)


def draw_placement(placed, towers, *, title, path, owned=False):
    """Draws a box per device with its variables, and what moves between devices.

    With ``owned`` each variable is applied by one device and copied by the others.
    """
    devices = _devices(placed, towers)
    lists = [_inventory(device, placed) for device in devices]
    # More than the text: the box has a margin, and the layout takes some space.
    column = max(1.8, 1.4 * max(map(_inches, lists)))
    width = max(6.0, 1.0 + (column + 1.0) * len(devices))  # inches
    figure, (boxes, moves) = plt.subplots(
        1,
        2,
        figsize=(width, 4.6),
        width_ratios=[column * len(devices), 1.0 + len(devices)],
        layout="constrained",
    )
    figure.suptitle(f"{title}: where variables live, what moves in a step")
    story = textwrap.fill(_story(devices, placed, owned), int(13 * width))
    figure.supxlabel(story, fontsize=10)
    _draw_boxes(boxes, devices, placed, towers)
    _draw_moves(moves, devices, placed)
    figure.savefig(path, dpi=130)
    plt.close(figure)


def _story(devices, placed, owned):
    holders = [device for device in devices if placed.variables.get(device)]
    if len(devices) == 1:
        return "One device: nothing has to move."
    if owned:
        return (
            "Every device holds the whole model and computes the gradients of its "
            "shard. Each variable's gradients are added up and applied by one device, "
            "its owner, which has the optimizer's state; the others copy the new value."
        )
    if len(holders) == len(devices):
        return (
            "Every device holds the whole model and computes the gradients of its "
            "shard. Each gradient is added up on one device, whose sum all others "
            "fetch and apply."
        )
    return (
        f"The variables live on {', '.join(map(_short, holders))}; the towers fetch "
        "them and compute the gradients of their shards. The gradients travel back "
        "to be added up and applied once."
    )


def _devices(placed, towers):
    used = [tw_core.devices.canonical_device(tower.device) for tower in towers]
    return sorted({*used, *filter(None, placed.variables)}, key=lambda d: (len(d), d))


def _draw_boxes(axes, devices, placed, towers):
    axes.set(xlim=(0, len(devices)), ylim=(0, 1))
    axes.axis("off")
    for i, device in enumerate(devices):
        sizes = placed.variables.get(device, {})
        axes.add_patch(
            FancyBboxPatch(
                (i + 0.03, 0.01),
                0.94,
                0.98,
                boxstyle="round,pad=0,rounding_size=0.04",
                facecolor="#eef4f8" if sizes else "#f6f6f6",
                edgecolor=_BLUE,
            )
        )
        names = [
            t.name
            for t in towers
            if tw_core.devices.canonical_device(t.device) == device
        ]
        held = names[0] if len(names) == 1 else f"{len(names) or 'no'} towers"
        head = f"{_short(device)}\n{held}"
        axes.text(i + 0.5, 0.96, head, ha="center", va="top", weight="bold")
        axes.text(i + 0.5, 0.81, _inventory(device, placed), **_LIST)


_LIST = {"ha": "center", "va": "top", "fontsize": 9, "linespacing": 1.4}
_MOST_LINES = 8
_MOST_LETTERS = 36  # of a variable's name


def _inches(lines):
    size = _LIST["fontsize"]
    paths = [TextPath((0, 0), own, size=size) for own in lines.splitlines() if own]
    return max(path.get_extents().width for path in paths) / 72


def _shortened(name):
    """Leaves the middle of a long name out."""
    half = _MOST_LETTERS // 2
    is_long = len(name) > _MOST_LETTERS
    return f"{name[: half - 1]}…{name[-half:]}" if is_long else name


def _inventory(device, placed):
    sizes = placed.variables.get(device, {})
    largest = sorted(sizes.items(), key=lambda item: -item[1])
    lines = []
    for name, size in largest[:_MOST_LINES]:
        own = name.split("/", 1)[-1] if name.startswith("tower") else name
        lines.append(f"{_shortened(own)}  {_bytes(size)}")
    if len(largest) > _MOST_LINES:
        rest = largest[_MOST_LINES:]
        lines.append(f"{len(rest)} more  {_bytes(sum(size for _, size in rest))}")
    if not lines:
        lines = ["no variables"]
    lines.append(f"\n{placed.operations.get(device, 0)} operations")
    lines.append(f"{_bytes(sum(sizes.values()))} of variables")
    return "\n".join(lines)


def _draw_moves(axes, devices, placed):
    grid = [[0 for _ in devices] for _ in devices]
    axes.set_title("what moves between devices", fontsize=10)
    labels = {}
    for move in placed.transfers:
        if move.source in devices and move.target in devices:
            row, column = devices.index(move.source), devices.index(move.target)
            grid[row][column] = move.num_bytes
            tensors = f"{move.tensors} tensor" + "s" * (move.tensors != 1)
            labels[row, column] = f"{_bytes(move.num_bytes)}\n{tensors}"
    most = max(map(max, grid)) * 1.6 or 1
    axes.imshow(grid, cmap="Oranges", vmin=0, vmax=most, aspect="auto")
    for row in range(len(devices)):
        for column in range(len(devices)):
            text = labels.get((row, column), "stays" if row == column else "-")
            axes.text(column, row, text, ha="center", va="center", fontsize=9)
    ticks, names = range(len(devices)), [_short(device) for device in devices]
    axes.set_xticks(ticks, names, fontsize=9)
    axes.set_yticks(ticks, names, fontsize=9)
    axes.set(xlabel="to", ylabel="from")


def _short(device):
    return device.removeprefix("/device:").lower()


def _bytes(count):
    for unit, size in (("MB", 1e6), ("kB", 1e3)):
        if count >= size:
            return f"{count / size:.1f} {unit}"
    return f"{count} B"
