"""What the site's search finds besides the words of its pages.

``SUBJECTS`` are words that people search for and the page or section that answers:
entries of the index, which come first. Messages of errors are written into
``_static/messages.js``; ``find_error.js`` leads from one that is pasted to its heading,
or to the section that explains it.
"""

import json
import re
from collections.abc import Iterator
from pathlib import Path

from docutils import nodes
from error_pages import HOLE, PAGE, find_explained
from sphinx import addnodes
from sphinx.application import Sphinx

MESSAGES = "_static/messages.js"
PASTED = ("errors/index", PAGE, "search")  # pages that take a message
QUOTING = ("errors/index", "pitfalls")  # pages that explain messages they quote
MIN_WORDS = 3
_MESSAGES = re.compile("^Symptom:|OOM|All ranks must")  # what says that it quotes one
_CLASS = re.compile(r"^\w+(?:Error|Warning): (?:\.\.\. )?")
# Names and numbers of an example.
_FILLED = re.compile(r"\(\w+\.py:\d+\)|\.\.\.|'\w[\w:]*\d'|\[?\b\d+(?:,\d+)*\b\]?")
SUBJECTS = {
    "which-package": "install, installation, pip install, requirements",
    "howto/gpus": (
        "two gpus, 2 gpus, multi gpu, multi-gpu, multiple gpus, several gpus, all "
        "gpus, gpu, gpus, batch size"
    ),
    "tutorials/tour": "data parallel, getting started, tutorial",
    "tutorials/gallery": "keras, keras fit, example, examples",
    "howto/ampopt": (
        "mixed precision, mixed_precision, float16, fp16, bfloat16, loss scale, "
        "loss scaling, gradient accumulation, micro-batches, nan, inf"
    ),
    "howto/core": "slow first step, first step, tracing, slow start",
    "howto/keras#save-load-and-resume": (
        "savedmodel, export savedmodel, export, save model, load model, tflite, "
        "checkpoint, save checkpoint resume, resume, resume training, "
        "modelcheckpoint, backupandrestore"
    ),
    "howto/keras#use-callbacks": (
        "callback, callbacks, early stopping, earlystopping, tensorboard, "
        "reducelronplateau"
    ),
    "howto/keras#prove-it-on-your-model": (
        "different results, different loss, same result, reproduce, verify, correct"
    ),
    "howto/reduce": "all-reduce, allreduce, nccl",
    "howto/builders": "parameter server, sharded, fsdp",
    "howto/builders#clip-before-the-update": (
        "clipping, clip gradients, gradient clipping, clipnorm, global_clipnorm"
    ),
    "howto/contrastive": (
        "contrastive, contrastive loss, contrastive learning, simclr, clip, nnclr, "
        "vicreg, barlow twins, triplet, triplet loss, in-batch negatives, negatives"
    ),
    "howto/ranks": "ddp, distributeddataparallel, one process per gpu",
    "howto/fit-over-processes": (
        "multiple machines, several machines, multi-node, zero, zero-1, deepspeed"
    ),
    "howto/send-less": (
        "gradient compression, powersgd, top-k, int8, signsgd, error feedback, "
        "communication hook, bf16 compress hook, local sgd, post-local sgd, diloco, "
        "no_sync, slow network, bandwidth"
    ),
    "howto/slow-step": "slow, profile, profiler, timeline, performance",
    "howto/hangs": "hang, hangs, deadlock, stuck, timeout",
    "howto/rlload": "ppo, reinforcement learning",
    "migration/horovod": "horovod, horovodrun",
    "migration/tensorpack": "tensorpack",
    "migration/mirrored_strategy": "mirroredstrategy, tf.distribute, distribute",
    "migration/multi_worker": "pytorch, multiworkermirroredstrategy",
    "migration/rllib": "rllib, ray",
    "migration/stylegan2": "stylegan, stylegan2",
    "benchmarks": "benchmark, speed, how fast",
    "errors/index": "oom, resourceexhaustederror, exception",
    "howto/launch": "cluster, tf_config, torchrun",
    "howto/security": "security, tw_key, authentication, firewall, port, hmac",
    "howto/cluster": "kubernetes, kubeflow, slurm, mpi",
}


def add_subjects(app, doctree):
    """Adds a page's subjects to the index that the search reads."""
    entries = []
    for place, subjects in SUBJECTS.items():
        page, _, section = place.partition("#")
        if page == app.env.docname:
            each = subjects.split(", ")
            entries += [("single", one, section, "main", None) for one in each]
    if entries:
        doctree.insert(0, addnodes.index(entries=entries))


def write_messages(app, exception):
    """Writes title, address, text and statement of each message that is explained."""
    if exception or app.builder.format != "html":
        return
    found = []
    explained = find_explained()
    for section in app.env.get_doctree(PAGE).findall(nodes.section):
        title = section.next_node(nodes.title).astext()
        if title in explained:
            address = f"{PAGE}.html#{section['ids'][0]}"
            found.append([title, address, explained[title][0].text, title])
    for page in QUOTING:
        found += ([*entry, ""] for entry in find_quoted(app, page))
    script = f"const MESSAGES = {json.dumps(found, ensure_ascii=False, indent=0)};\n"
    Path(app.outdir, MESSAGES).write_text(script, encoding="utf-8")


def find_quoted(app: Sphinx, page: str) -> Iterator[list[str]]:
    """Finds messages that a page quotes as code: section, address and text of each."""
    for section in app.env.get_doctree(page).findall(nodes.section):
        title = section.next_node(nodes.title).astext()
        for child in section.children:
            quotes = isinstance(child, nodes.table) or _MESSAGES.search(child.astext())
            if isinstance(child, nodes.section) or not quotes:
                continue
            for quoted in child.findall(nodes.literal):
                text = _FILLED.sub(HOLE, _CLASS.sub("", quoted.astext()))
                if len(text.replace(HOLE, " ").split()) >= MIN_WORDS:
                    yield [title, f"{page}.html#{section['ids'][0]}", text]


def find_errors(app, pagename, templatename, context, doctree):
    """Lets a page take a message that is pasted."""
    if pagename in PASTED:
        for script in ("messages.js", "rank_errors.js", "find_error.js"):
            app.add_js_file(script, defer="defer")


def setup(app):
    """Adds to the pages as they are read, and to the site when it is written."""
    app.connect("doctree-read", add_subjects)
    app.connect("build-finished", write_messages)
    app.connect("html-page-context", find_errors)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
