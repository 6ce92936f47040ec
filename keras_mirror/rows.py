"""The rows that every replica got: measured inside the step, kept on the device, read when asked."""

import contextlib
import contextvars
import dataclasses
import weakref

import numpy as np
import tensorflow as tf

from keras_mirror import internals

_EMPTY = np.iinfo(np.int64).max  # the least of no steps


@dataclasses.dataclass(frozen=True)
class RowCounts:
    """What every replica got; each array has one entry per replica.

    Attributes:
        steps: int, steps counted.
        uneven_steps: int, steps in which not all replicas got the same number of rows.
        rows: Rows in all.
        least: Rows in the step that had fewest (0 before the first step).
        most: Rows in the step that had most.
        empty_steps: Steps without a single row.
    """

    steps: int
    uneven_steps: int
    rows: np.ndarray
    least: np.ndarray
    most: np.ndarray
    empty_steps: np.ndarray

    @property
    def mean(self):
        """Rows per step."""
        return self.rows / max(self.steps, 1)

    def __add__(self, other):
        """Both together."""
        if not self.steps or not other.steps:
            return other if other.steps else self
        return RowCounts(
            self.steps + other.steps,
            self.uneven_steps + other.uneven_steps,
            self.rows + other.rows,
            np.minimum(self.least, other.least),
            np.maximum(self.most, other.most),
            self.empty_steps + other.empty_steps,
        )


class RowCounter:
    """Counts the rows of every replica, step by step.

    In a graph a step costs a handful of scalar operations on the host and nothing is sent to
    Python until somebody reads. In eager execution the numbers are Python's already and no
    operation runs at all.

    Each reader opens a `window` of its own, so that readers do not reset what others read: whoever
    reads fetches what was counted since anybody last did, and adds it to all windows.

    Args:
        replicas: int, number of replicas.
    """

    def __init__(self, replicas):
        self._replicas = replicas
        self._windows = weakref.WeakSet()
        self._on_host = self._zeros()
        with tf.init_scope(), tf.device("CPU:0"):
            self._in_graph = tf.Variable(self._zeros(), trainable=False, dtype=tf.int64, name="row_counter")
        self._in_graph.keras_mirror_own = True
        self._whole = self.window()

    def _zeros(self):
        # One row each: rows in all, least, most, empty steps, steps, uneven steps.
        zeros = np.zeros((6, self._replicas), np.int64)
        zeros[1] = _EMPTY
        return zeros

    def add(self, rows):
        """Counts one step with `rows`, a list of one int or scalar integer tensor per replica."""
        if tf.executing_eagerly():
            rows = np.array([int(r) for r in rows], np.int64)
            self._on_host = _added(np, self._on_host, rows, np.full_like(rows, rows.max() != rows.min()))
            return
        with tf.device("CPU:0"):
            rows = tf.stack([tf.cast(r, tf.int64) for r in rows])
            uneven = tf.cast(tf.reduce_max(rows) != tf.reduce_min(rows), tf.int64)
            self._in_graph.assign(_added(tf, self._in_graph.read_value(), rows, tf.fill(rows.shape, uneven)))

    def window(self):
        """A `RowWindow` that counts from here on."""
        self._fetch()
        window = RowWindow(self._fetch, _as_counts(self._zeros(), self._zeros()))
        self._windows.add(window)
        return window

    def read(self):
        """The `RowCounts` of every step so far."""
        return self._whole.read()

    def _fetch(self):
        """Hands what was counted since the last time to every window; waits for the steps that are under way."""
        host, graph = self._on_host, self._in_graph.numpy()
        counts = _as_counts(host, graph)
        if counts.steps:
            self._on_host = self._zeros()
            self._in_graph.assign(self._zeros())
            for window in self._windows:
                window.add(counts)


class RowWindow:
    """What a `RowCounter` counted since this window was opened or last restarted.

    Args:
        fetch: Called before reading.
        nothing: `RowCounts` of no step.
    """

    def __init__(self, fetch, nothing):
        self._fetch = fetch
        self._nothing = self._counts = nothing

    def add(self, counts):
        """Adds `RowCounts`."""
        self._counts = self._counts + counts

    def read(self):
        """The `RowCounts` so far."""
        self._fetch()
        return self._counts

    def take(self):
        """The `RowCounts` so far, and starts over."""
        counts = self.read()
        self._counts = self._nothing
        return counts


def _as_counts(host, graph):
    total = host + graph
    least = np.minimum(host[1], graph[1])
    return RowCounts(
        steps=int(total[4, 0]),
        uneven_steps=int(total[5, 0]),
        rows=total[0],
        least=np.where(least == _EMPTY, 0, least),
        most=np.maximum(host[2], graph[2]),
        empty_steps=total[3],
    )


def _added(lib, old, rows, uneven):
    one = lib.ones_like(rows)
    empty = lib.where(rows == 0, one, lib.zeros_like(rows))
    return lib.stack(
        [old[0] + rows, lib.minimum(old[1], rows), lib.maximum(old[2], rows), old[3] + empty, old[4] + one, old[5] + uneven]
    )


def rows_of(leaf):
    """Rows of one replica's part: an int where it is known, else a scalar tensor, None without rows."""
    if isinstance(leaf, tf.RaggedTensor):
        return leaf.nrows()
    if isinstance(leaf, tf.SparseTensor):
        return leaf.dense_shape[0]
    if not isinstance(leaf, (tf.Tensor, np.ndarray)) or leaf.shape.__len__() == 0:
        return None
    return leaf.shape[0] if leaf.shape[0] is not None else tf.shape(leaf, tf.int64)[0]


def rows_per_replica(strategy, structure):
    """Rows of each replica in what a step is given, or None where there is nothing with rows.

    The first leaf with a part per replica decides, as every part of a batch has the same rows.
    """
    many = strategy.num_replicas_in_sync > 1
    for leaf in tf.nest.flatten(structure):
        if internals.is_per_replica(leaf):
            parts = strategy.experimental_local_results(leaf)
        elif many:
            continue
        else:
            parts = [leaf]
        rows = [rows_of(part) for part in parts]
        if all(r is not None for r in rows):
            return rows
    return None


def lengths_may_differ(parts):
    """Whether the replicas' tensors may have another first dimension each."""
    if not all(isinstance(part, tf.Tensor) and part.shape.rank for part in parts):
        return False
    lengths = {part.shape[0] for part in parts}
    return None in lengths or len(lengths) > 1


def sum_rows(parts, mean):
    """The sum, or the mean, of tensors row by row, over those that have the row."""
    lengths = [tf.shape(part)[0] for part in parts]
    longest = tf.reduce_max(tf.stack(lengths))

    def padded(part, length):
        return tf.pad(part, [[0, longest - length]] + [[0, 0]] * (part.shape.rank - 1))

    total = tf.add_n([padded(part, length) for part, length in zip(parts, lengths)])
    if not mean:
        return total
    having = tf.add_n([tf.cast(tf.range(longest) < length, total.dtype) for length in lengths])
    return total / tf.reshape(having, [-1] + [1] * (total.shape.rank - 1))


# --- what a step, running on one replica, knows about its part ---------------------------------


@dataclasses.dataclass
class Part:
    """One replica's part of the global batch, while a step runs on it.

    Attributes:
        strategy: The strategy that runs the step.
        replica: int, which replica.
        rows: Rows of this replica; int or scalar int64 tensor.
        global_rows: Rows of the global batch; int or scalar int64 tensor.
        even: Whether every replica is known to hold the same number of rows.
        marks: Set of words about what the step did so far.
        losses: Loss tensors that stand for a share of the global loss.
        alone: Whether the replica stands for one device: it has the whole batch, and the strategy says
            that there is one replica.
        thread: int, the replica that runs it where it stands for one device with the others; else None.
        views: The views of the whole batch that this replica has opened in the step.
    """

    strategy: tf.distribute.Strategy
    replica: int
    rows: object
    global_rows: object
    even: bool
    marks: set = dataclasses.field(default_factory=set)
    losses: list = dataclasses.field(default_factory=list)
    alone: bool = False
    thread: int = None
    views: list = dataclasses.field(default_factory=list)

    def share(self, dtype="float32"):
        """This replica's share of the rows, so that shares add up to one; a scalar of `dtype`."""
        if isinstance(self.rows, int) and isinstance(self.global_rows, int):
            return tf.constant(self.rows / max(self.global_rows, 1), dtype)
        return tf.math.divide_no_nan(tf.cast(self.rows, dtype), tf.cast(self.global_rows, dtype))


_part = contextvars.ContextVar("keras_mirror_part", default=None)


def current_part():
    """The `Part` that the running step works on, or None outside of a step with rows."""
    return _part.get()


@contextlib.contextmanager
def working_on(part):
    """Makes `part` the current part of this thread."""
    token = _part.set(part)
    try:
        yield part
    finally:
        _part.reset(token)
