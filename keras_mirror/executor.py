"""Runs steps on all replicas, many in one graph call where asked, and reads the logs once."""

import time

import keras
import tensorflow as tf

from keras_mirror import internals
from keras_mirror.distribution import ReplicaIterator
from keras_mirror.graph_clock import GraphClock, NoClock
from keras_mirror.losses import is_share
from keras_mirror.rows import current_part


class Executor:
    """What `fit` and `evaluate` call for every batch (or every few batches).

    It has the form of Keras' own `train_function`: called with an iterator it runs up to
    `model.steps_per_execution` steps and returns the logs after the last; at the end of the data
    it raises `StopIteration` or TensorFlow's `OutOfRangeError`.

    Args:
        model: A model of `mirrored_model`.
        strategy: Its strategy.
        step: `step(data) -> logs`, what one replica does with its part.
        name: What a person calls that step.
        function: The function of the user's that it is, or Keras' own.
        counter: The `RowCounter` of this kind of step.
        reports_only_metrics: Whether `step` returns no logs of its own, so that all logs are
            results of the model's metrics.
        timers: `Timers` of this kind of step. While they listen, another graph runs, which measures.
        on_trace: Called with the list of captured variables each time the steps were traced,
            before they run for the first time; an exception from it stops them.

    Attributes:
        steps: Steps of one call, in place of `model.steps_per_execution`; None for that.
        limit: Most steps of the next call, so that it does not run past `steps_per_epoch`; None for no limit.
        seconds_per_step: What a step cost in the last call that did not trace; None before.
        steps_of_last_call: How many steps the last call ran.
    """

    def __init__(self, model, strategy, step, name, function, counter, reports_only_metrics, timers, on_trace):
        self._model = model
        self._strategy = strategy
        self._step = step
        self._name = name
        self._function = function
        self._counter = counter
        self._reports_only_metrics = reports_only_metrics
        self._timers = timers
        self._on_trace = on_trace
        self._eager = model.run_eagerly
        self._traced = set()
        self._steps_since_trace = 0
        self._ran = False
        self.steps = None
        self.limit = None
        self.seconds_per_step = None
        self.steps_of_last_call = 0
        self._kept = {}
        self._graph_clock = None
        self._records_loss = False
        self._logs_are_whole = False
        self._run_many = self._compiled(lambda iterator, steps: self._many_steps(iterator, steps, NoClock()))
        self._run_many_timed = self._compiled(lambda iterator, steps: self._many_steps(iterator, steps, self._clock()))
        self._run_batch = self._compiled(lambda batch: self._logs(self._run(batch)))

    def _compiled(self, function):
        function = tf.autograph.experimental.do_not_convert(function)
        return function if self._eager else tf.function(function, reduce_retracing=True)

    def __call__(self, iterator):
        steps = self.steps or self._model.steps_per_execution
        if not isinstance(iterator, (tf.data.Iterator, tf.distribute.DistributedIterator)):
            return self._on_given_batches(iterator, steps)
        traced, start = len(self._traced), time.perf_counter()
        run = self._run_many_timed if self._timers else self._run_many
        ran, logs, seconds = self._run_up_to(min(steps, self.limit or steps), run, iterator)
        self._count(int(ran), seconds)
        if int(ran) < steps:
            self._strategy.data_ended()
        if int(ran) == 0:
            if not self._ran:
                raise ValueError("the data is empty: it yielded no batch, so there is nothing to train on or to evaluate.")
            raise StopIteration
        self._ran = True
        if len(self._traced) == traced:
            self.seconds_per_step = (time.perf_counter() - start) / int(ran)
        return logs

    def run_batch(self, batch):
        """One step on one global batch, distributed or not; returns the logs."""
        start = time.perf_counter()
        if not any(internals.is_per_replica(leaf) for leaf in tf.nest.flatten(batch)):
            batch = tf.nest.map_structure(lambda leaf: None if leaf is None else tf.convert_to_tensor(leaf), batch)
            batch = self._strategy.distribute_batch(batch)
        try:
            logs = self._call(self._run_batch, batch)
        except tf.errors.OpError as error:
            self._strategy.raise_if_lost("a training step", error)
            raise
        if self._timers:
            tf.nest.map_structure(lambda log: log.numpy(), logs)  # so that the step has ended
        self._count(1, (0.0, time.perf_counter() - start))
        return logs

    def _run_up_to(self, steps, run, iterator):
        """Steps in one call, or in a call each where what workers exchange differs in size from step to step.

        TensorFlow's collective operations keep the size that they first had in a call.
        """
        self._trace(run, iterator, tf.constant(steps))
        calls = steps if self._strategy.gathers_over_workers else 1
        self._timers.begin(self._steps_since_trace)
        ran, logs, seconds = run(iterator, tf.constant(steps // calls))
        while int(ran) and int(ran) < calls:
            more, following, times = run(iterator, tf.constant(1))
            if not int(more):
                break
            ran, logs, seconds = ran + more, following, [a + b for a, b in zip(seconds, times)]
        return ran, logs, seconds

    def _call(self, function, *arguments):
        self._trace(function, *arguments)
        self._timers.begin(self._steps_since_trace)
        return function(*arguments)

    def _trace(self, function, *arguments):
        if not self._eager:
            concrete = function.get_concrete_function(*arguments)
            if id(concrete) not in self._traced:
                self._on_trace(internals.captured_variables(concrete.graph))
                self._traced.add(id(concrete))
                self._steps_since_trace = 0

    def _count(self, steps, seconds):
        self.steps_of_last_call = steps
        self._steps_since_trace += steps
        if self._timers:
            self._timers.end(steps, *(float(each) for each in seconds))

    def _on_given_batches(self, batches, steps):
        """For `train_on_batch`: global batches that nobody distributed yet."""
        logs = None
        for _, batch in zip(range(steps), batches):
            logs = self.run_batch(batch)
        return logs

    def _clock(self):
        if self._graph_clock is None and not self._eager:
            self._graph_clock = GraphClock(self._strategy, self._model)
        return self._graph_clock

    def _many_steps(self, iterator, steps, clock):
        if self._eager:
            return self._many_steps_eagerly(iterator, int(steps))

        def get():
            return _next_and_more(iterator)

        def run(optional):
            self._keep(self._run(_value_of(iterator, optional)))

        def body(ran, batch, times):
            times = clock.step(times, lambda: run(batch[0]))
            following, times = clock.following(times, lambda: tf.cond(ran + 1 < steps, get, lambda: batch))
            return ran + 1, following, times

        ran, _, times = tf.while_loop(
            lambda ran, batch, times: tf.logical_and(ran < steps, batch[1]),
            body,
            [tf.constant(0), *clock.first(get)],
            parallel_iterations=1,
        )
        logs = self._logs({name: variable.read_value() for name, variable in self._kept.items()})
        return ran, logs, clock.seconds(times)

    def _keep(self, own):
        """Keeps a step's own logs in variables, as their names are known only once the step was traced."""
        for name, value in own.items():
            if name not in self._kept:
                with tf.init_scope():
                    zero = tf.zeros([0 if size is None else size for size in value.shape], value.dtype)
                    self._kept[name] = tf.Variable(zero, trainable=False, shape=value.shape, name="log")
                    self._kept[name].keras_mirror_own = True
            self._kept[name].assign(value)

    def _many_steps_eagerly(self, iterator, steps):
        own, waiting, stepping = {}, 0.0, 0.0
        for ran in range(steps):
            asked = time.perf_counter()
            optional, more = _next_and_more(iterator)
            arrived = time.perf_counter()
            waiting += arrived - asked
            if not more:
                return ran, self._logs(own), (waiting, stepping)
            own = self._run(_value_of(iterator, optional))
            stepping += time.perf_counter() - arrived
        return steps, self._logs(own), (waiting, stepping)

    def _run(self, batch):
        """One step on every replica; returns the logs of its own, summed over the replicas."""
        with self._strategy.counting(self._counter):
            shares = self._strategy.run(self._on_replica, args=(batch,))
        return self._strategy.reduce("SUM", shares, axis=None)

    def name_of_step(self, method):
        """What a person calls the step that a method runs on the replicas."""
        return self._name

    def function_of_step(self, method):
        """The function of the user's that the step is, or Keras' own."""
        return self._function

    def _on_replica(self, data):
        logs = self._step(data) or {}
        part = current_part()
        self._records_loss = part is not None and "loss recorded" in part.marks
        if part is None or "whole logs" in part.marks:
            self._logs_are_whole = part is not None
            return {name: value for name, value in _flat(logs).items() if value is not None}
        return {name: _share(part, value) for name, value in _flat(logs).items() if value is not None}

    def _logs(self, own):
        """The logs: results of metrics over all replicas; of the step's own, the weighted mean."""
        metrics = values_of(self._model.get_metrics_result())
        if self._reports_only_metrics:
            return metrics
        if self._logs_are_whole:
            return own
        tracked = set(metrics) if self._records_loss else set(metrics) - {"loss"} | own_metric_names(self._model)
        return {name: metrics[name] if name in tracked else own[name] for name in own}


def own_metric_names(model):
    """Names of the metrics that the model holds besides Keras' own tracker of the loss."""
    tracker = internals.loss_tracker(model)
    return {metric.name for metric in model.metrics if metric is not tracker}


def values_of(logs):
    """The logs as they are now: a metric may return one of its variables as its result, which the next epoch changes."""
    return tf.nest.map_structure(
        lambda log: tf.convert_to_tensor(log) if isinstance(log, (keras.Variable, tf.Variable)) else log, logs
    )


def _share(part, value):
    """What `value`, logged on one replica, adds to the log of the global batch."""
    if is_share(value):
        return value
    value = tf.convert_to_tensor(value)
    if not value.dtype.is_floating:
        value = tf.cast(value, tf.float32)
    return tf.math.multiply_no_nan(value, part.share(value.dtype))


def _flat(logs):
    flat = {}
    for name, value in logs.items():
        flat.update(_flat(value) if isinstance(value, dict) else {name: value})
    return flat


def _next_and_more(iterator):
    if isinstance(iterator, ReplicaIterator):
        return iterator.next_and_more()
    optional = iterator.get_next_as_optional()  # TensorFlow's own iterator, on GPUs
    return optional, optional.has_value()


def _value_of(iterator, optional):
    return iterator.value_of(optional) if isinstance(iterator, ReplicaIterator) else optional.get_value()
