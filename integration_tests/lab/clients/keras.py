"""Keras's own tests of training, with every model that they train as a ``TowerModel``.

Keras's wheel holds its tests. Those of the trainer, models, callbacks and optimizers
are copied to a folder and rewritten: a test compiles, fits or evaluates
``towers(model)`` (``lab.keras_towers``), two copies of its model. All must pass, except
those listed here, each of which must fail: calls that ``TowerModel`` refuses, and
checks of the model's type or attributes. The trainer's run again over two processes, of
two towers each: all of them run every test.

Run by ``nox -s "clients(keras)"``, with words as pytest's ``-k`` takes them to choose
tests; ``--plain`` leaves the models as they are.
"""

import argparse
import ast
import importlib.metadata
import os
import re
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from xml.etree import ElementTree

from harness.foreign_tests import judge
from harness.processes import Program

DEADLINE_S = 1800  # of a file
FILES = (
    "trainers/trainer_test.py",
    "models/*_test.py",
    "callbacks/*_test.py",
    "optimizers/*_test.py",
)
METHODS = {
    *("compile", "fit", "evaluate", "predict"),
    *("train_on_batch", "test_on_batch", "predict_on_batch"),
}
TRAINS = re.compile(rf"\.({'|'.join(METHODS)})\(")
OVER_RANKS = ("trainers/trainer_test.py",)
RANKS = 2
# What tests import from the folder of Keras's repository.
CONFTEST = """
import pytest
from keras.src import backend


def skip_if_backend(given, reason):
    return pytest.mark.skipif(backend.backend() == given, reason=reason)
"""
FEWEST_TOWERS = 200  # tests that make towers; fewer are a rewrite that missed them

# Why a test that fails need not pass -> its names.
BECAUSE = {
    "a tf.distribute scope is refused": [
        "callbacks/swap_ema_weights_test.py::SwapEMAWeightsTest."
        "test_swap_ema_weights_with_tf_distribute",
    ],
    "the class has an attribute `layers`, which a keras.Model may not have": [
        "trainers/trainer_test.py::TestTrainer.test_loss_scaling_prevents_underflow",
    ],
    "a TowerModel in a list of layers, which cannot be copied": [
        f"trainers/trainer_test.py::TestTrainer.test_trainer_with_raggeds_{kind}"
        for kind in ("functional", "model")
    ],
    "the callback is used without fit, which would show it tower 0": [
        f"callbacks/orbax_checkpoint_test.py::OrbaxCheckpointTest.{test}{n}"
        for test in (
            "test_checkpoint_with_assets",
            "test_comprehensive_model_state_restoration",
        )
        for n in (0, 1)
    ],
    "PyTorch is not installed": [
        "trainers/trainer_test.py::TestTrainer."
        f"test_fit_with_data_adapter_torch_dataloader_{kind}"
        for kind in ("iterable", "iterable_with_len", "tensor")
    ],
}
EXCEPTED = {test: reason for reason, tests in BECAUSE.items() for test in tests}
BECAUSE_OF_RANKS = {
    "ranks stop together, one batch after a callback has asked for it": [
        "trainers/trainer_test.py::TestTrainer.test_stop_loop_fit",
    ],
    "ranks trace a train_step of one's own once more, before they meet": [
        "trainers/trainer_test.py::TestTrainer.test_retracing",
    ],
}
OF_RANKS = {test: why for why, tests in BECAUSE_OF_RANKS.items() for test in tests}
MOST_EXCEPTED = 45


def main() -> int:
    """Runs the tests, and prints what became of them."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("files", nargs="*", help="words in their names; all by default")
    parser.add_argument("-k", default="", help="selects tests, as pytest's -k")
    parser.add_argument("--plain", action="store_true", help="without towers")
    options = parser.parse_args()
    version = importlib.metadata.version("keras")
    print(f"Keras {version}: passed (with towers), excepted, failed")
    is_all = not (options.files or options.k or options.plain)
    wrong, total = [], 0
    with tempfile.TemporaryDirectory() as folder:
        paths = [
            path
            for path in rewritten(Path(folder))
            if not options.files or any(own in str(path) for own in options.files)
        ]
        runs = [(path, 1) for path in paths]
        if not options.plain:
            over = [Path(folder) / name for name in OVER_RANKS]
            runs += [(path, RANKS) for path in paths if path in over]
        for path, ranks in runs:
            run = run_over_ranks if ranks > 1 else run_alone
            outcomes, output = run(path, words=options.k, plain=options.plain)
            name = str(path.relative_to(folder))
            excepted = {**EXCEPTED, **(OF_RANKS if ranks > 1 else {})}
            known = {
                test: why
                for test, why in excepted.items()
                if test.startswith(name) and not options.plain
            }
            ended = {
                f"{name}::{test}": "passed" if good else "failed"
                for test, (good, _) in outcomes.items()
            }
            found = judge(ended, known, good=["passed"], is_all=not options.k)
            passed = [has_towers for good, has_towers in outcomes.values() if good]
            failed = [test for test, how in ended.items() if how == "failed"]
            num_excepted = len(known.keys() & {*failed})
            counts = f"{len(passed):5} ({sum(passed):3}){num_excepted:5}"
            title = name if ranks == 1 else f"{name}, {ranks} ranks"
            print(f"{title:45}{counts}{len(failed) - num_excepted:5}", flush=True)
            if found:
                print(output)
            wrong += [f"{own} ({ranks} ranks)" if ranks > 1 else own for own in found]
            total += sum(passed)
    if is_all and total < FEWEST_TOWERS:
        wrong.append(f"only {total} of the tests that passed made towers")
    if len(EXCEPTED) > MOST_EXCEPTED:
        wrong.append(f"{len(EXCEPTED)} tests are excepted, more than {MOST_EXCEPTED}")
    print(*wrong, sep="\n")
    return 1 if wrong else 0


def rewritten(folder: Path) -> Iterator[Path]:
    """Copies the tests that train, rewritten, and yields their paths."""
    (folder / "conftest.py").write_text(CONFTEST)
    source = Path(
        str(importlib.metadata.distribution("keras").locate_file("keras/src"))
    )
    for path in [path for files in FILES for path in sorted(source.glob(files))]:
        text = path.read_text()
        if not TRAINS.search(text):
            continue
        tree = Rewrite().visit(ast.parse(text))
        to = folder / path.relative_to(source)
        to.parent.mkdir(exist_ok=True)
        to.write_text(ast.unparse(ast.fix_missing_locations(tree)))
        yield to


class Rewrite(ast.NodeTransformer):
    """Makes a test train towers of its models.

    ``model.fit(...)`` becomes ``(model := towers(model)).fit(...)``, so that what
    follows looks at the towers as well; what is private is tower 0's. A class of
    Keras's trainer and a layer, which the tests have for a model, becomes a
    ``keras.Model``.
    """

    def __init__(self) -> None:
        self._bound: list[set[str]] = [set()]

    def visit_Module(self, node: ast.Module) -> ast.AST:
        at = 1 if ast.get_docstring(node) is not None else 0
        self.generic_visit(node)
        node.body[at:at] = ast.parse(
            "import keras\nfrom lab.keras_towers import plain, towers"
        ).body
        return node

    def visit_FunctionDef(self, node: ast.FunctionDef) -> ast.AST:
        arguments = {own.arg for own in ast.walk(node.args) if isinstance(own, ast.arg)}
        self._bound.append(arguments | set(_assigned(node.body)))
        self.generic_visit(node)
        self._bound.pop()
        return node

    def visit_Lambda(self, node: ast.Lambda) -> ast.AST:
        self._bound.append(set())
        self.generic_visit(node)
        self._bound.pop()
        return node

    def visit_ClassDef(self, node: ast.ClassDef) -> ast.AST:
        names = [ast.unparse(base) for base in node.bases]
        if names and names[0] == "Trainer":
            model = ast.parse("keras.Model", mode="eval").body
            layer = [
                base for base in node.bases[1:] if "Layer" not in ast.unparse(base)
            ]
            node.bases = [*layer, model]
        self.generic_visit(node)
        return node

    def visit_Attribute(self, node: ast.Attribute) -> ast.AST:
        self.generic_visit(node)
        is_private = node.attr.startswith("_") and not node.attr.startswith("__")
        is_read = isinstance(node.ctx, ast.Load) and isinstance(node.value, ast.Name)
        if is_private and is_read:
            node.value = ast.Call(ast.Name("plain", ast.Load()), [node.value], [])
        return node

    def visit_Call(self, node: ast.Call) -> ast.AST:
        self.generic_visit(node)
        method = node.func
        if not isinstance(method, ast.Attribute) or method.attr not in METHODS:
            return node
        towers = ast.Call(ast.Name("towers", ast.Load()), [method.value], [])
        if isinstance(method.value, ast.Name) and method.value.id in self._bound[-1]:
            method.value = ast.NamedExpr(ast.Name(method.value.id, ast.Store()), towers)
        elif "super()" not in ast.unparse(method.value):
            method.value = towers
        return node


def _assigned(body: list[ast.stmt]) -> Iterator[str]:
    """Names what a function's own statements assign."""
    inner = (ast.FunctionDef, ast.ClassDef, ast.Lambda)
    nodes: list[ast.AST] = list(body)
    while nodes:
        node = nodes.pop()
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.id
        if not isinstance(node, inner):
            nodes += ast.iter_child_nodes(node)


Outcomes = dict[str, tuple[bool, bool]]  # whether a test passed, and made towers


def run_alone(path: Path, *, words: str, plain: bool) -> tuple[Outcomes, str]:
    """Runs a file; returns the outcomes and the output."""
    report = path.with_suffix(".xml")
    status, output = pytest_of(path, report, words=words, plain=plain)
    if status not in (0, 1, 5) or not report.exists():
        return {"(the file)": (False, False)}, output
    return read(report), output


def run_over_ranks(path: Path, *, words: str, plain: bool) -> tuple[Outcomes, str]:
    """As ``run_alone``, over ranks: a test passes that passes on all.

    Where ranks part in a test, new ones run those after it.
    """
    found: Outcomes = {}
    said = ""
    done = path.with_suffix(".done")
    while True:
        done.write_text("\n".join(found))
        report = path.with_suffix(f".{len(found)}.xml")
        status, output = pytest_of(
            path, report, words=words, plain=plain, done=done, ranks=RANKS
        )
        said += output
        reports = [Path(f"{report}.{rank}") for rank in range(RANKS)]
        if status != 0 or not all(own.exists() for own in reports):
            return {**found, "(the file)": (False, False)}, said
        of_ranks = [read(own) for own in reports]
        for name in sorted({name for own in of_ranks for name in own}):
            outcomes = [own.get(name, (False, False)) for own in of_ranks]
            good, has_towers = zip(*outcomes, strict=True)
            found[name] = all(good), any(has_towers)
        if "ranks part in" not in output:
            return found, said


def pytest_of(
    path: Path,
    report: Path,
    *,
    words: str,
    plain: bool,
    done: Path | None = None,
    ranks: int = 1,
) -> tuple[int, str]:
    """Runs pytest on a file, on each rank; returns its status and its output."""
    launch = ("tw_launch", "--ps", "0", "--workers", str(ranks), "--")
    command = (
        *((sys.executable, "-m", *launch) if ranks > 1 else ()),
        *(sys.executable, "-P", "-m", "pytest", str(path), "-p", "lab.keras_towers"),
        *("--import-mode=importlib", "-q", "--tb=native", "-k", words, "-W", "ignore"),
        *("-p", "no:cacheprovider", f"--junitxml={report}"),
        f"--rootdir={path.parents[1]}",
    )
    env = {
        **os.environ,
        "KERAS_BACKEND": "tensorflow",
        "KERAS_TESTS_PLAIN": str(int(plain)),
        "PYTHONPATH": os.pathsep.join(
            [os.environ.get("PYTHONPATH", ""), str(path.parents[1])]
        ),
        "TF_CPP_MIN_LOG_LEVEL": "2",
    }
    if done is not None:
        env["KERAS_TESTS_DONE"] = str(done)
    program = Program(command, cwd=path.parent, env=env)
    return program.finish(DEADLINE_S), program.out


def read(report: Path) -> Outcomes:
    """Reads a report of pytest's."""
    outcomes: Outcomes = {}
    for case in ElementTree.parse(report).iter("testcase"):
        if case.find("skipped") is not None:
            continue
        good = case.find("failure") is None and case.find("error") is None
        made = case.find("properties/property[@name='towers']")
        kind = case.attrib["classname"].rpartition(".")[2]
        outcomes[f"{kind}.{case.attrib['name']}"] = (
            good,
            made is not None and made.attrib["value"] != "0",
        )
    return outcomes


if __name__ == "__main__":
    sys.exit(main())
