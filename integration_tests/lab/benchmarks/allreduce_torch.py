"""One rank of PyTorch's DistributedDataParallel over gloo; imports nothing else.

python allreduce_torch.py RANK SIZE ADDRESS MODEL RATE MOMENTUM

MODEL is JSON: shapes of parameters, or the name of a network as in
``overlap_networks``, and the rows of its batch. Reads a number of steps per line, 0 to
read a parameter, and if ranks exchange ("together", "alone"); answers each with a line:
seconds, or the parameter.
"""

import contextlib
import json
import os
import sys
import time

import torch
from torch import distributed, nn


class Parameters(nn.Module):
    """Parameters of which the loss is the sum."""

    def __init__(self, shapes: list[list[int]]) -> None:
        super().__init__()
        self.all = nn.ParameterList(nn.Parameter(torch.ones(s)) for s in shapes)

    def forward(self, factor: float) -> torch.Tensor:
        """Returns a sum whose gradient is ``factor``, and needs the parameters."""
        return sum((factor * p + 1e-30 * p * p).sum() for p in self.all)


class Transformer(nn.Module):
    """The sizes of ``overlap_networks``, each given once more."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(2_000, 512)
        block = nn.TransformerEncoderLayer(512, 8, 2_048, 0.0, batch_first=True)
        self.blocks = nn.TransformerEncoder(block, 6)
        self.classes = nn.Linear(512, 100)

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        """Returns logits."""
        return self.classes(self.blocks(self.words(words)).mean(1))


def convolutional() -> nn.Module:
    """Makes the network of that name."""
    parts: list[nn.Module] = []
    before = 3
    for channels, count in ((64, 2), (128, 2), (256, 3), (512, 3), (512, 3)):
        for _ in range(count):
            parts += [nn.Conv2d(before, channels, 3, padding=1), nn.ReLU()]
            before = channels
        parts.append(nn.MaxPool2d(2))
    dense = [nn.Flatten(), nn.Linear(512, 8_192), nn.ReLU(), nn.Linear(8_192, 100)]
    return nn.Sequential(*parts, *dense)


def main(
    rank: str, size: str, address: str, described: str, rate: str, momentum: str
) -> None:
    """Trains as it is told on standard input."""
    torch.set_num_threads(1)
    host, port = address.split(":")
    os.environ.update(MASTER_ADDR=host, MASTER_PORT=port)
    distributed.init_process_group("gloo", rank=int(rank), world_size=int(size))
    first, *rest = json.loads(described)
    if isinstance(first, str):
        rows = rest[0]
        is_text = first == "transformer"
        net = Transformer() if is_text else convolutional()
        x = (
            torch.randint(2_000, (rows, 64))
            if is_text
            else torch.randn(rows, 3, 32, 32)
        )
        y = torch.randint(100, (rows,))
    else:
        net = Parameters([first, *rest])
    model = nn.parallel.DistributedDataParallel(net)
    optimizer = torch.optim.SGD(
        model.parameters(), lr=float(rate), momentum=float(momentum)
    )
    for line in sys.stdin:
        number, kind = line.split()
        if not int(number):
            print(float(model.module.all[-1].detach().reshape(-1)[-1]), flush=True)
            continue
        began = time.perf_counter()
        for _ in range(int(number)):
            optimizer.zero_grad()
            with model.no_sync() if kind == "alone" else contextlib.nullcontext():
                if isinstance(first, str):
                    nn.functional.cross_entropy(model(x), y).backward()
                else:
                    model(int(rank) + 1.0).backward()
            optimizer.step()
        print(time.perf_counter() - began, flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
