"""The README's examples run as they stand, in a fresh interpreter."""

import re
import subprocess
import sys
from pathlib import Path

README = Path(__file__).parents[1] / "README.md"


def test_the_examples_train_to_the_weights_they_promise():
    examples = re.findall(r"```python\n(.*?)```", README.read_text(), re.DOTALL)
    assert len(examples) == 2
    program = "".join(f"exec({example!r}, {{}})\n" for example in examples)
    command = [sys.executable, "-c", program]
    output = subprocess.run(
        command, check=True, timeout=120, capture_output=True, text=True
    ).stdout
    weights = [float(number) for number in re.findall(r"-?\d+\.\d*", output)]
    assert len(weights) == 6
    assert all(
        abs(got - want) < 0.05 for got, want in zip(weights, [1, 2, 3] * 2, strict=True)
    )
