"""The site's search finds the right page first: Sphinx's own code, run by Node.js.

`nox -s docs` builds the site and runs this; it needs a `node`, or playwright, which
brings one. No browser is started.
"""

import itertools
import json
import os
import re
import shutil
import subprocess
from importlib.util import find_spec
from pathlib import Path

import pytest

SITE = Path(os.environ.get("TOWERS_SITE", "no site")).resolve()
DEADLINE_S = 60
SCRIPTS = [
    f"_static/{name}"
    for name in (
        "base-stemmer.js",
        "english-stemmer.js",
        "language_data.js",
        "searchtools.js",
        "messages.js",
        "rank_errors.js",
    )
]
# What the page of the search shows for each query: first messages, then Sphinx's list.
RUN = """
const { readFileSync, existsSync } = require("fs");
const vm = require("vm");
const [site, scripts, queries] = JSON.parse(readFileSync(0, "utf8"));
const page = {
  SPHINX_HIGHLIGHT_ENABLED: false, DOCUMENTATION_OPTIONS: {},
  _: (text) => text, _ready: () => {},
  document: { addEventListener: () => {}, getElementById: () => null, readyState: "" },
  localStorage: { setItem: () => {} },
};
page.window = page;
vm.createContext(page);
for (const name of [...scripts, "searchindex.js"])
  if (existsSync(`${site}/${name}`))
    vm.runInContext(readFileSync(`${site}/${name}`, "utf8"), page, name);
const search = (query) => {
  page.query = query;
  const said = vm.runInContext("rankErrors(query)", page);
  const parsed = "Search._performSearch(...Search._parseQuery(query))";
  const found = vm.runInContext(parsed, page).reverse();
  return [
    ...said.map(({ address }) => address),
    ...found.map(([name, , anchor]) => `${name}.html${anchor}`),
  ];
};
console.log(JSON.stringify(queries.map(search)));
"""

SUBJECTS = {  # as people name them -> the address that is found first, or how it begins
    "mixed precision": "howto/ampopt.html",
    "install": "which-package.html",
    "two gpus": "howto/gpus.html",
    "multi gpu": "howto/gpus.html",
    "train on two gpus": "howto/",
    "batch size": "howto/gpus.html",
    "resume": "howto/keras.html#save-load-and-resume",
    "ModelCheckpoint": "howto/keras.html#save-load-and-resume",
    "early stopping": "howto/keras.html#use-callbacks",
    "tensorboard": "howto/keras.html#use-callbacks",
    "contrastive": "howto/contrastive.html",
    "clip": "howto/contrastive.html",
    "gradient clipping": "howto/builders.html#clip-before-the-update",
    "save checkpoint resume": "howto/keras.html#save-load-and-resume",
    "export savedmodel": "howto/keras.html#save-load-and-resume",
    "no_sync": "howto/send-less.html",
    "gradient compression": "howto/send-less.html",
    "ddp": "howto/ranks.html",
    "pytorch": "migration/multi_worker.html",
    "zero": "howto/fit-over-processes.html",
    "slow first step": "howto/core.html",
    "Horovod": "migration/horovod.html",
    "out of memory": "errors/index.html#out-of-memory",
    "OOM": "errors/index.html",
    "tensorpack": "migration/tensorpack.html",
    "MirroredStrategy": "migration/mirrored_strategy.html",
    "gradient accumulation": "howto/ampopt.html",
    "parameter server": "howto/builders.html",
    "slow": "howto/slow-step.html",
    "deadlock": "howto/hangs.html",
    "kubernetes": "howto/cluster.html",
}
QUERIES = {
    **SUBJECTS,
    # Names.
    "ReplicaTimeoutError": "errors/index.html#replicatimeouterror",
    "RankTimeoutError": "errors/index.html#ranktimeouterror",
    "DeadlineError": "errors/index.html#deadlineerror",
    "ExposedServerWarning": "errors/index.html#exposedserverwarning",
    "LeastLoadedDeviceSetter": "api/tw-core.html#tw_core.LeastLoadedDeviceSetter",
    "TowerModel": "api/tw_keras.TowerModel.html",
    # Messages, as they were raised, and the statement of one.
    "Towers 0 and 1 got the same Adam object; every tower needs an "
    "optimizer of its own, or the replicas drift apart. Make a new one in each call of "
    "get_opt_fn.": "errors/messages.html#towers-and-got-the-same-object",
    "ValueError: Every tower must have the same number of gradients; "
    "got [2, 1] from towers 0..1. A tower falls short when a variable's gradient is "
    "None: drop it, or fill it with zeros, everywhere.": (
        "errors/messages.html#every-tower-must-have-the-same-number-of-gradients"
    ),
    "RuntimeError: use_logical_cpus: TensorFlow has already started with 1 logical "
    "CPUs; asked for 4. Call it before the first tensor, variable or session.": (
        "errors/messages.html#tensorflow-has-already-started-with-logical-cpus"
    ),
    "tw_ranks.RankTimeoutError: rank 1 of 2 (host node-7) has closed its connection: "
    "its process has ended; 60 s in step 12": (
        "errors/index.html#when-processes-without-servers-wait-for-each-other"
    ),
    "OOM when allocating tensor with shape[64,112,112,64] and type float on "
    "/job:localhost/replica:0/task:0/device:GPU:0": "errors/index.html#out-of-memory",
    "Incompatible shapes: [32,10] vs. [64,10] [[{{node sub}}]] (in tower 1 of 2, which "
    "has 32 of the batch's 64 rows)": "pitfalls.html#a-step-assumes-the-whole-batch",
    "every tower needs an optimizer of its own": "errors/messages.html#",
    "There is no batch to train on": "errors/messages.html#",
    "TF_CONFIG is not set": "errors/messages.html#",
    "loss must be a scalar": "errors/messages.html#",
}

FILLINGS = (
    "dense_7/kernel:0",
    "[2, 1]",
    "3",
    "'/device:GPU:1'",
    "worker 1",
    "(32, 10)",
)

if "TOWERS_SITE" not in os.environ:
    pytest.skip("TOWERS_SITE names no site", allow_module_level=True)


def read_messages():
    """Fills in names and numbers where messages have holes -> address of the cause."""
    script = (SITE / "_static" / "messages.js").read_text("utf-8")
    fillings = itertools.cycle(FILLINGS)
    return {
        re.sub("…", lambda _: next(fillings), text): address
        for _, address, text, _ in json.loads(script[script.index("[") : -2])
    }


MESSAGES = read_messages()
# After a traceback, and with a line's end where a terminal wraps.
TRACEBACK = 'Traceback (most recent call last):\n  File "a.py", line 3\nValueError: {}'


def find_node():
    """Returns a Node.js: the system's, or the one that playwright brings."""
    if found := shutil.which("node"):
        return found
    if spec := find_spec("playwright"):
        brought = Path(spec.origin).parent / "driver" / "node"
        return str(brought) if brought.exists() else None
    return None


@pytest.fixture(scope="module")
def answers():
    """Query -> the addresses that the search shows, in order."""
    if (node := find_node()) is None:
        pytest.skip("no Node.js: install node, or playwright")
    pasted = map(TRACEBACK.format, MESSAGES)
    pasted = [text.replace(", ", ",\n", 1) for text in pasted]
    done = subprocess.run(
        [node, "-e", RUN],
        input=json.dumps([str(SITE), SCRIPTS, [*QUERIES, *pasted]]),
        capture_output=True,
        text=True,
        timeout=DEADLINE_S,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return dict(zip([*QUERIES, *pasted], json.loads(done.stdout), strict=True))


@pytest.mark.parametrize("query", QUERIES)
def test_the_search_finds_the_right_page_first(query, answers):
    assert answers[query], "nothing was found"
    assert answers[query][0].startswith(QUERIES[query]), answers[query][:5]


def test_a_message_with_names_and_numbers_finds_its_cause_first(answers):
    first = [answers[query][:1] for query in answers if query not in QUERIES]
    assert len(first) > 80
    wrong = [
        (message, found, address)
        for (message, address), found in zip(MESSAGES.items(), first, strict=True)
        if found != [address]
    ]
    assert not wrong


def test_what_is_no_message_is_not_taken_for_one(answers):
    for query, found in answers.items():
        if " " not in query or query in SUBJECTS:
            last = found[0].partition("#")[0].rpartition("/")[2]
            assert not found[0].startswith("errors/") or last == "index.html", query
