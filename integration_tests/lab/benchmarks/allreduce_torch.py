"""One rank of PyTorch's DistributedDataParallel over gloo; imports nothing else.

python allreduce_torch.py RANK SIZE PORT SHAPES RATE MOMENTUM

Reads a number of steps per line, 0 to read a parameter, and answers each with a line:
seconds, or the parameter.
"""

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


def main(
    rank: str, size: str, port: str, shapes: str, rate: str, momentum: str
) -> None:
    """Trains as it is told on standard input."""
    torch.set_num_threads(1)
    os.environ.update(MASTER_ADDR="localhost", MASTER_PORT=port)
    distributed.init_process_group("gloo", rank=int(rank), world_size=int(size))
    model = nn.parallel.DistributedDataParallel(Parameters(json.loads(shapes)))
    optimizer = torch.optim.SGD(
        model.parameters(), lr=float(rate), momentum=float(momentum)
    )
    for line in sys.stdin:
        steps = int(line)
        if not steps:
            print(float(model.module.all[-1].detach().reshape(-1)[-1]), flush=True)
            continue
        began = time.perf_counter()
        for _ in range(steps):
            optimizer.zero_grad()
            model(int(rank) + 1.0).backward()
            optimizer.step()
        print(time.perf_counter() - began, flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
