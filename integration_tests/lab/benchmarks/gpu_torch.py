"""The step of PyTorch's DistributedDataParallel: ResNet-50, one rank on one GPU.

python gpu_torch.py cuda|gpu|cpu SIZE ROWS ROUNDS STEPS

Channels last, autocast, Adam, PyTorch's default TF32. Imports nothing else; at the end
prints a list: the seconds of a step in every round.
"""

import json
import os
import sys
import tempfile
import time

import torch
from torch import distributed, nn


class Block(nn.Module):
    """A bottleneck of three convolutions."""

    def __init__(self, ins: int, width: int, stride: int) -> None:
        super().__init__()
        outs = 4 * width
        self.main = nn.Sequential(
            *(nn.Conv2d(ins, width, 1, stride), nn.BatchNorm2d(width), nn.ReLU(True)),
            *(nn.Conv2d(width, width, 3, 1, 1), nn.BatchNorm2d(width), nn.ReLU(True)),
            *(nn.Conv2d(width, outs, 1), nn.BatchNorm2d(outs)),
        )
        self.short: nn.Module = nn.Identity()
        if stride != 1 or ins != outs:
            convolution = nn.Conv2d(ins, outs, 1, stride)
            self.short = nn.Sequential(convolution, nn.BatchNorm2d(outs))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Adds the shortcut."""
        return nn.functional.relu(self.main(x) + self.short(x))


def resnet(classes: int) -> nn.Module:
    """Makes ResNet-50, as Keras has it: strides in a block's first convolution."""
    stem = nn.Conv2d(3, 64, 7, 2, 3), nn.BatchNorm2d(64), nn.ReLU(True)
    layers: list[nn.Module] = [*stem, nn.MaxPool2d(3, 2, 1)]
    ins = 64
    for blocks, width in ((3, 64), (4, 128), (6, 256), (3, 512)):
        for number in range(blocks):
            stride = 2 if number == 0 and width > 64 else 1
            layers.append(Block(ins, width, stride))
            ins = 4 * width
    pooled = nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(ins, classes)
    return nn.Sequential(*layers, *pooled)


def main(device: str, size: str, rows: str, rounds: str, steps: str) -> None:
    """Trains, and times blocks of steps."""
    on_gpu = device != "cpu"
    place = torch.device("cuda" if on_gpu else "cpu")
    with tempfile.TemporaryDirectory() as folder:
        distributed.init_process_group(
            "nccl" if on_gpu else "gloo",
            init_method=f"file://{os.path.join(folder, 'store')}",
            rank=0,
            world_size=1,
        )
        model = resnet(1000).to(place, memory_format=torch.channels_last)
        model = nn.parallel.DistributedDataParallel(model)
        optimizer = torch.optim.Adam(model.parameters(), lr=1e-4)
        scaler = torch.amp.GradScaler(place.type, enabled=on_gpu)
        loss_of = nn.CrossEntropyLoss()
        x = torch.randn(int(rows), 3, int(size), int(size), device=place)
        x = x.contiguous(memory_format=torch.channels_last)
        y = torch.randint(0, 1000, [int(rows)], device=place)

        def step() -> None:
            optimizer.zero_grad(set_to_none=True)
            dtype = torch.float16 if on_gpu else torch.bfloat16
            with torch.autocast(place.type, dtype):
                loss = loss_of(model(x), y)
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()

        def block() -> float:
            begun = time.perf_counter()
            for _ in range(int(steps)):
                step()
            if on_gpu:
                torch.cuda.synchronize()
            return (time.perf_counter() - begun) / int(steps)

        block()
        print(json.dumps([block() for _ in range(int(rounds))]), flush=True)
        distributed.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])
