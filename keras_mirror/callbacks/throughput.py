"""Examples per second, and where the time of a step goes."""

import time

import keras
import tensorflow as tf

from keras_mirror.callbacks.row_windows import row_windows
from keras_mirror.engine import engine_of
from keras_mirror.throughput_report import ThroughputReport
from keras_mirror.timing import Span, SpanTimer


class Throughput(keras.callbacks.Callback):
    """Measures examples per second and tells waiting for data from stepping.

    Examples are the rows that the replicas really got, the warm-up is left out, and validation is
    kept apart. The time runs from the end of one step to the end of the next, so that what Python
    and callbacks do in between counts as well. `fit` goes on running many steps in one graph call.

    At the end of each epoch `logs` gains `examples_per_second`, `replica_<i>/examples_per_second`,
    `seconds_per_step`, `waiting_share` (the part of the time, 0 to 1, that the replicas waited for
    data) and, where the epoch was validated, `val_examples_per_second`; a line is printed below the
    progress bar unless `verbose=0`. A number is NaN where every step of the epoch was warm-up.

    Costs a few scalar operations a step; see `docs/speed.md`. The steps are traced once more, with
    those operations.

    Batches that come while a step runs were not waited for. In `TrainingLoop` by hand the waiting
    is that of `loop.batches`, and each step ends when its logs are there. In `observe`, and in
    `fit` of a model that only stands in a strategy's scope, the examples per second are measured
    from the end of the first trace on, with everything that happens in the loop, and waiting and
    stepping cannot be told apart.

    Args:
        warmup: int, steps to leave out each time the steps were traced, the traced one included.
            Many steps in one graph call are left out or counted together.
        log: Whether to add to `logs`.
        clock: Returns seconds; for tests.

    Attributes:
        spans: What was measured: a `Span` per epoch and per evaluation, in order.

    Raises:
        ValueError: If `warmup` is not a positive int.
        TypeError: When training begins, if the model was not built by keras_mirror.

    Example:

    >>> throughput = km.Throughput()
    >>> history = model.fit(dataset, epochs=3, callbacks=[throughput], verbose=0)
    >>> print(throughput.report())
    """

    adds_replica_logs = True  # so that `fit` calls it before the callbacks that read the logs
    async_safe = True
    every_batch = False

    def __init__(self, warmup=2, log=True, clock=time.perf_counter):
        super().__init__()
        if isinstance(warmup, bool) or not isinstance(warmup, int) or warmup < 1:
            raise ValueError(
                f"Throughput: warmup must be a positive number of steps, and got {warmup!r}; a step that is traced never counts."
            )
        self.warmup = warmup
        self.log = log
        self.spans = []
        self._clock = clock
        self._epoch = None
        self._timers = {}

    # --- what Keras calls -------------------------------------------------------------------

    def on_train_begin(self, logs=None):
        self.spans = []
        self._first_trace = True
        self._listen_to_loops(True)

    def on_train_end(self, logs=None):
        self._epoch = None
        self._stop("train")
        self._listen_to_loops(False)

    def on_epoch_begin(self, epoch, logs=None):
        self._epoch = epoch
        self._since, self._left_out = self._clock(), 0
        self._start("train")

    def on_epoch_end(self, epoch, logs=None):
        measured = self._timers["train"].calls
        span = self._timers["train"].span(epoch, "training") if measured else self._span_of_loop(epoch)
        self._stop("train")
        self.spans.append(span)
        if self.log and logs is not None:
            self._add(logs, epoch)

    def on_test_begin(self, logs=None):
        self._test_began = self._clock()
        self._start("test")

    def on_test_end(self, logs=None):
        self.spans.append(self._timers["test"].span(self._epoch, "validation"))
        self._stop("test")
        if "train" in self._timers:  # its time stood still meanwhile
            self._timers["train"].resume()
            self._since += self._clock() - self._test_began

    # --- what people read -------------------------------------------------------------------

    def line(self):
        """One line on the last epoch, e.g. `1240 examples per second, 6.6 ms a step (0.4 waiting for data, 5.9 stepping)`."""
        span = next(span for span in reversed(self.spans) if span.phase == "training")
        if not span.steps:
            return f"throughput: all {span.left_out} steps were warm-up"
        text = f"throughput: {span.examples_per_second:.0f} examples per second, {span.per_step(span.seconds):.3g} ms a step"
        if span.waiting is None:
            return text
        return text + f" ({span.per_step(span.waiting):.2g} waiting for data, {span.per_step(span.stepping):.3g} stepping)"

    def report(self):
        """What was measured, as a table: one row per epoch and phase, and one for all epochs.

        Returns:
            A `Report` with the columns `epoch`, `phase`, `steps`, `rows`, `examples/s`, `per replica`,
            and in milliseconds per step `ms per step`, `waiting` and `stepping`; `waiting %` is the
            part of the time. `.plot()` draws examples per second over epochs.
        """
        return ThroughputReport(self.spans)

    def plot(self, ax=None):
        """Draws examples per second over epochs; returns the matplotlib axes."""
        return self.report().plot(ax)

    # --- measuring --------------------------------------------------------------------------

    def _start(self, kind):
        self._stop(kind)
        windows = row_windows(self.model, kind, "Throughput")
        self._loop_rows = windows[0] if kind == "train" else None
        self._timers[kind] = SpanTimer(lambda: windows[-1].take().rows.tolist(), self.warmup, self._clock)
        self._listeners(kind).append(self._timers[kind])

    def _stop(self, kind):
        timer = self._timers.pop(kind, None)
        if timer is not None and timer in self._listeners(kind):
            self._listeners(kind).remove(timer)

    def _listeners(self, kind):
        engine = engine_of(self.model)
        return [] if engine is None else engine.timers[kind].listening

    def _listen_to_loops(self, on):
        listeners = getattr(self.model.distribute_strategy, "listeners", [])
        if self._loop_traced in listeners:
            listeners.remove(self._loop_traced)
        if on:
            listeners.append(self._loop_traced)

    def _loop_traced(self, captured):
        """A loop of the user's own was traced: the time until then and the steps so far do not count."""
        if self._first_trace and "train" in self._timers:
            self._first_trace = False
            with tf.init_scope():
                self._left_out += self._loop_rows.take().steps
            self._since = self._clock()

    def _span_of_loop(self, epoch):
        counts = self._loop_rows.read()
        rows, seconds = tuple(counts.rows.tolist()), self._clock() - self._since
        return Span(epoch, "training", counts.steps, self._left_out, rows, seconds if counts.steps else 0.0, None, None)

    def _add(self, logs, epoch):
        span = self.spans[-1]
        logs["examples_per_second"] = span.examples_per_second
        logs["seconds_per_step"] = span.seconds / span.steps if span.steps else float("nan")
        if span.waiting is not None:
            logs["waiting_share"] = span.waiting_share
        for replica, rate in enumerate(span.per_replica):
            logs[f"replica_{replica}/examples_per_second"] = rate
        validation = [span for span in self.spans if span.phase == "validation" and span.epoch == epoch]
        if validation:
            logs["val_examples_per_second"] = validation[-1].examples_per_second
