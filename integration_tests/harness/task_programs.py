"""Programs that the tests start as the tasks of a cluster, driven over a pipe.

A task gets ``(command, value)`` pairs and answers each; an exception that a
command raises is the answer, and ends the task.
"""

import json
import logging
import os
import signal
import time
import traceback
import warnings
from typing import Any

from harness import links


def run_task(
    pipe: Any, program: str, task: dict[str, Any], spec: dict[str, Any]
) -> None:
    """Runs one task in a process of its own."""
    signal.alarm(spec.get("limit_s", 180))
    os.environ["TF_CONFIG"] = json.dumps(task)
    warnings.simplefilter("ignore")
    logging.getLogger("tensorflow").setLevel(logging.ERROR)
    try:
        if "network" in spec:
            links.join_network(pipe, *spec["network"])
        PROGRAMS[program](pipe, spec)
    except EOFError:  # The test is over.
        pass
    except BaseException as error:
        traceback.print_exc()
        pipe.send(("raised", *_told(error)))
    finally:
        # A server's threads would keep the process.
        pipe.close()
        os._exit(0)


def serve(pipe: Any, spec: dict[str, Any]) -> None:
    import tw_launch

    task = tw_launch.read_tf_config()
    server = tw_launch.start_server(task)
    pipe.send(("serving", task.address))
    server.join()


def train(pipe: Any, spec: dict[str, Any]) -> None:
    import tensorflow as tf

    import tw_launch
    import tw_syncrep
    from tw_syncrep import SyncTimeoutError, training_session

    v1 = tf.compat.v1
    task = tw_launch.read_tf_config()
    server = tw_launch.start_server(task)
    graph = tf.Graph()
    with graph.as_default(), graph.container(spec.get("container", "")):
        with v1.device(tw_syncrep.device_setter(task)):
            model = Model(spec, task)
        make = v1.train.MonitoredTrainingSession
        config = tw_launch.with_device_filters(None, task)
        settings: dict[str, Any] = {"config": config, "log_step_count_steps": None}
        if spec.get("bounded", True):
            make = training_session
        if "checkpoint_dir" in spec:
            settings |= {
                "checkpoint_dir": spec["checkpoint_dir"],
                "save_checkpoint_steps": spec.get("save_steps", 1),
                "save_checkpoint_secs": None,
            }
        if not spec.get("addresses", True):
            del os.environ["TF_CONFIG"]
        pipe.send(("built", None))
        pipe.recv()
        settings["hooks"] = [model.hook, *model.extra_hooks]
        while True:
            try:
                with make(server.target, task.is_chief, **settings) as session:
                    pipe.send(("created", None))
                    obey(pipe, model, session)
                break
            except SyncTimeoutError as error:
                if model.has_ended or not spec.get("retries"):
                    raise
                pipe.send(("lost", *_told(error)))
        pipe.send(("closed", None))
        pipe.recv()


def obey(pipe: Any, model: "Model", session: Any) -> None:
    """Does what the test says until it says end; in a new session, what was open."""
    while not model.has_ended:
        model.task_at_hand = model.task_at_hand or pipe.recv()
        command, value = model.task_at_hand
        if command == "end":
            model.has_ended = True
            return
        answer = getattr(model, command)(session, value)
        model.task_at_hand = None
        pipe.send(("done", answer))


class Record:
    """What a replica has seen, in all of its sessions."""

    def __init__(self) -> None:
        self.calls = 0  # how many calls of the training op returned
        self.first: int | None = None  # the first step
        self.highest = 0  # the highest one
        # The largest fall, from a step and to one; None where there was none
        self.fell_back: tuple[int, int] | None = None
        self.longest_s = 0.0  # seconds that the longest call took

    def see(self, step: int) -> None:
        if self.first is None:
            self.first = step
        if self.highest - step > self.fall:
            self.fell_back = self.highest, step
        self.highest = max(self.highest, step)

    @property
    def fall(self) -> int:
        """Steps of the largest fall."""
        return self.fell_back[0] - self.fell_back[1] if self.fell_back else 0

    def time(self, call: Any) -> Any:
        """Makes a call, whose time counts also where it raises."""
        began = time.monotonic()
        try:
            return call()
        finally:
            self.longest_s = max(self.longest_s, time.monotonic() - began)


class Model:
    """A small model whose gradients are what the test feeds."""

    def __init__(self, spec: dict[str, Any], task: Any) -> None:
        import tensorflow as tf

        import tw_syncrep

        v1 = tf.compat.v1
        self.spec, self.task = spec, task
        self.task_at_hand: Any = None
        self.has_ended = False
        self.record = Record()
        self.global_step = v1.train.get_or_create_global_step()
        self.factor = v1.placeholder(tf.float32, [])
        self.ids = v1.placeholder(tf.int64, [None])
        getter = None
        if spec.get("pulled"):
            getter = tw_syncrep.variable_getter(task)
        with v1.variable_scope("model", custom_getter=getter):
            loss = self._loss()
        self.optimizer = self._optimizer()
        self.train_op = self.optimizer.minimize(loss, global_step=self.global_step)
        chief = task.is_chief
        tokens = spec.get("num_tokens", 0 if spec["kind"] == "tensorflow" else -1)
        self.hook = self.optimizer.make_session_run_hook(chief, tokens)
        self.asking = _asking_hook()
        self.extra_hooks: list[Any] = [self.asking]
        if spec.get("fails_once"):
            self.extra_hooks.append(_fails_once())
        (self.local_step,) = (
            v for v in v1.local_variables() if v.name == "sync_rep_local_step:0"
        )
        self.masters = [v for v in v1.global_variables() if v.name.startswith("model/")]

    def _loss(self) -> Any:
        import tensorflow as tf

        v1 = tf.compat.v1
        w = v1.get_variable("w", [3], initializer=v1.ones_initializer())
        b = v1.get_variable("b", [], initializer=v1.zeros_initializer())
        read = tf.identity(w)
        loss = self.factor * tf.reduce_sum(read * tf.constant([1.0, 2.0, 4.0]))
        loss += self.factor * b
        for index in range(self.spec.get("more", 0)):
            extra = v1.get_variable(f"x{index}", [8], initializer=v1.ones_initializer())
            # Not tf.square: its gradient has a constant that waits for the read.
            here = tf.identity(extra)
            loss += self.factor * tf.reduce_sum(here * here)
        if self.spec.get("quadratic"):
            loss += tf.reduce_sum(tf.square(read)) / 2
        if self.spec.get("sparse"):
            table = v1.get_variable("table", [6, 2], initializer=v1.ones_initializer())
            loss += self.factor * tf.reduce_sum(tf.gather(table, self.ids))
        return loss

    def _optimizer(self) -> Any:
        import tensorflow as tf

        from tw_syncrep import SyncReplicasOptimizer

        v1 = tf.compat.v1
        inner = {
            "sgd": lambda: v1.train.GradientDescentOptimizer(0.5),
            "momentum": lambda: v1.train.MomentumOptimizer(0.5, 0.5),
            "adam": lambda: v1.train.AdamOptimizer(0.5),
        }[self.spec.get("inner", "sgd")]()
        arguments = {
            "replicas_to_aggregate": self.spec["aggregate"],
            "total_num_replicas": self.spec["total"],
        }
        if self.spec.get("averages"):
            average = tf.train.ExponentialMovingAverage(0.5)
            arguments |= {
                "variable_averages": average,
                "variables_to_average": v1.trainable_variables(),
            }
        if self.spec["kind"] == "tensorflow":
            return v1.train.SyncReplicasOptimizer(inner, **arguments)
        options = self.spec.get("options", {})
        if "compression" in options:
            options["compression"] = tf.as_dtype(options["compression"])
        return SyncReplicasOptimizer(inner, **arguments, **options)

    def _feed(self, value: Any) -> dict[Any, Any]:
        feed = {self.factor: value["factor"]}
        if self.spec.get("sparse"):
            feed[self.ids] = value["ids"]
        return feed

    def step(self, session: Any, value: Any) -> Any:
        """Runs one training step; returns whether the session is over."""
        session.run(self.train_op, self._feed(value))
        return session.should_stop()

    def steps(self, session: Any, value: Any) -> Any:
        """Runs steps until the session is over, or as many as are asked for."""
        count = 0
        while not session.should_stop() and count < value["count"]:
            session.run(self.train_op, self._feed(value))
            count += 1
        return count

    def until(self, session: Any, value: Any) -> Any:
        """Runs steps until the global step is reached; whether the session is over."""
        self.lowest = 10**9
        while not session.should_stop():
            step = int(self.record.time(lambda: session.run(self.global_step)))
            self.lowest = min(self.lowest, step)
            self.record.see(step)
            if step >= value["step"]:
                break
            feed = self._feed(value)
            self.record.time(lambda: session.run(self.train_op, feed))  # noqa: B023
            self.record.calls += 1
        return session.should_stop()

    def recorded(self, session: Any, value: Any) -> Any:
        """Returns the record of all sessions."""
        return self.record

    def sessions(self, session: Any, value: Any) -> Any:
        """Returns how many sessions were made, after a call on the servers."""
        session.run(self.global_step)
        return self.asking.sessions

    def lowest_step(self, session: Any, value: Any) -> Any:
        """Returns the lowest global step that the last ``until`` has seen."""
        return self.lowest

    def read(self, session: Any, value: Any) -> Any:
        """Returns the global step and all of the model's variables."""
        import tensorflow as tf

        v1 = tf.compat.v1
        found = {v.name: v for v in v1.global_variables() if "/" in v.name}
        names = sorted(n for n in found if n.startswith("model/"))
        step, values = session.run([self.global_step, [found[n] for n in names]])
        return int(step), dict(zip(names, values, strict=True))

    def local(self, session: Any, value: Any) -> Any:
        """Returns the global step that the next gradient is computed for."""
        return int(session.run(self.local_step))

    def status(self, session: Any, value: Any) -> Any:
        """Returns the status and its line."""
        return self.optimizer.status(session), self.optimizer.status_line(session)

    def ask(self, session: Any, value: Any) -> Any:
        """Returns the global step, in a call whose fetches no other call has."""
        fetches = [self.global_step, self.local_step]
        if value == "in a step function":
            return session.run_step_fn(
                lambda step_context: step_context.session.run(fetches)
            )
        if value == "in a hook":
            self.asking.fetches = fetches
            return session.run(self.global_step)
        return session.run(fetches)

    def out_of_data(self, session: Any, value: Any) -> None:
        """Comes to the end of its data."""
        import tensorflow as tf

        raise tf.errors.OutOfRangeError(None, None, "end of data")


def received_tensors(metadata: Any) -> list[tuple[str, str, str]]:
    """Returns sender, receiver and name of what crossed between tasks in a call."""
    nodes = [node for graph in metadata.partition_graphs for node in graph.node]
    received = [
        (_task(node, "send"), _task(node, "recv"), node.attr["tensor_name"].s.decode())
        for node in nodes
        if node.op == "_Recv"
    ]
    return [found for found in received if found[0] != found[1]]


def _asking_hook() -> Any:
    """Makes a hook that once makes a call of its own, where it is given fetches.

    It counts the sessions, too.
    """
    import tensorflow as tf

    class Asking(tf.compat.v1.train.SessionRunHook):
        fetches: Any = None
        sessions = 0

        def after_create_session(self, session: Any, coord: Any) -> None:
            self.sessions += 1

        def before_run(self, run_context: Any) -> None:
            if self.fetches is not None:
                fetches, self.fetches = self.fetches, None
                run_context.session.run(fetches)

    return Asking()


def _task(node: Any, side: str) -> str:
    device = node.attr[f"{side}_device"].s.decode().partition("/device")[0]
    return device.replace("/replica:0", "")


def _fails_once() -> Any:
    """Makes a user's hook for which TensorFlow makes the first session again."""
    import tensorflow as tf

    class FailsOnce(tf.compat.v1.train.SessionRunHook):
        has_failed = False

        def after_create_session(self, session: Any, coord: Any) -> None:
            if not self.has_failed:
                self.has_failed = True
                raise tf.errors.AbortedError(None, None, "once")

    return FailsOnce()


def _told(error: BaseException) -> tuple[str, str, dict[str, Any]]:
    return type(error).__name__, str(error), _facts(error)


def _facts(error: BaseException) -> dict[str, Any]:
    names = ("step", "arrived", "missing", "heard_s", "servers", "waited_s", "report")
    return {name: getattr(error, name) for name in names if hasattr(error, name)}


PROGRAMS = {"serve": serve, "train": train, "hub": links.hub}
