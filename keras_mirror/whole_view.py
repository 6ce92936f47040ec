"""The whole batch on every replica: how rows get there, how gradients get back.

While a view is open, a replica's thread stands for one device. Two operations carry it, each of which is the gradient
of the other, so that gradients of any order are right. With N replicas:

- `whole` gathers the replicas' rows; its gradient is N times the own rows of the upstream gradient.
- `own` cuts a replica's rows out of a batch; its gradient is the gathered upstream gradient, divided by N.

The gradient of anything in the view is then whole, and the same on every replica; that of a variable is, on each replica,
N times its rows' part plus whatever was computed on the whole batch. Of both the mean over replicas is what one device has.
"""

import contextlib
import contextvars
import dataclasses

import tensorflow as tf

from keras_mirror import internals
from keras_mirror.batches import split_bounds
from keras_mirror.optimizers import as_packets
from keras_mirror.random_states import host_state, set_host_state
from keras_mirror.rows import Part, rows_of, working_on

SUM, MEAN = tf.distribute.ReduceOp.SUM, tf.distribute.ReduceOp.MEAN

_view = contextvars.ContextVar("keras_mirror_view", default=None)


def current_view():
    """The `View` that is open in this thread, or None."""
    return _view.get()


class _OneDevice(tf.distribute.ReplicaContext):
    """What `tf.distribute.get_replica_context` gives code that sees the whole batch: the only replica there is."""

    num_replicas_in_sync = property(lambda self: 1)
    replica_id_in_sync_group = property(lambda self: tf.constant(0))

    def all_reduce(self, reduce_op, value, options=None):
        return value

    def all_gather(self, value, axis, options=None):
        return value

    def merge_call(self, merge_fn, args=(), kwargs=None):
        return current_view().merged(merge_fn, *args, **(kwargs or {}))


@dataclasses.dataclass
class View:
    """One replica's thread, while it stands for one device that has the whole batch.

    Attributes:
        context: The replica's own `tf.distribute.ReplicaContext`.
        part: The replica's own `Part`.
        prepare: `prepare(layer)`, called with each layer that runs on the replica's own rows.
        layers: The layers whose `trainable` the code may change.
        inside: Whether the thread runs on its own rows just now, in a layer.
        graph: The graph in which replicas can meet, or None in eager execution.
        replicas: int, number of replicas.
    """

    context: tf.distribute.ReplicaContext
    part: Part
    prepare: object
    layers: list = ()
    inside: bool = False
    graph: object = dataclasses.field(default_factory=internals.current_graph)
    replicas: int = dataclasses.field(init=False)
    drawn: list = dataclasses.field(default_factory=list)  # pairs of seeds of random operations, the same on all replicas
    read_on_own_rows: dict = dataclasses.field(default_factory=dict)  # id of the handle of a variable that a layer read: it
    _made_of: dict = dataclasses.field(default_factory=dict)  # id of a gathered tensor: the tensor, the own rows in it
    _seeds: int = 0  # how many of `drawn` were taken so far

    def __post_init__(self):
        self.replicas = self.context.num_replicas_in_sync  # while it is not 1 yet

    @property
    def strategy(self):
        return self.part.strategy

    @property
    def is_first(self):
        """Whether this is the first of all replicas, whose metrics and logs are the ones that count."""
        return self.part.replica == 0

    @property
    def can_meet(self):
        """Whether the replicas can exchange anything here: not in a branch or a loop of the graph."""
        return internals.current_graph() is self.graph

    @contextlib.contextmanager
    def open(self):
        """While entered, this thread stands for one device."""
        rows = self.part.global_rows
        whole = dataclasses.replace(
            self.part, replica=0, rows=rows, even=True, marks=set(), losses=[], alone=True, thread=self.part.replica
        )
        alone = _OneDevice(self.strategy, self.part.replica)
        token = _view.set(self)
        try:
            with alone, working_on(whole), internals.local_updates(self.strategy.extended):
                yield whole
        finally:
            _view.reset(token)

    @contextlib.contextmanager
    def on_own_rows(self, rows=None, global_rows=None):
        """While entered, the thread is the replica that it is, with `rows` rows of `global_rows`."""
        part = self.part
        if rows is not None:
            even = isinstance(global_rows, int) and global_rows % self.replicas == 0
            part = dataclasses.replace(part, rows=rows, global_rows=global_rows, even=even)
        before, self.inside = self.inside, True
        try:
            with internals.merging_updates(self.strategy.extended), self.context, working_on(part):
                yield
        finally:
            self.inside = before

    def merged(self, function, *values, **keywords):
        """`function(strategy, *values)` for the values of all replicas.

        The replicas take turns, each as if it were alone: see `host_state`.
        """
        state = self.host_state()
        with self.on_own_rows():
            result = self.context.merge_call(function, values, keywords)
        self.set_host_state(state)
        return result

    def host_state(self):
        """What a step changes in Python, of which there is one for all replicas: random numbers, which layers are trained."""
        return host_state(), internals.trainable_flags(self.layers)

    def set_host_state(self, state):
        """Sets what `host_state` returned."""
        set_host_state(state[0])
        internals.set_trainable_flags(state[1])

    def reduced(self, reduce_op, values):
        """A list of tensors or `tf.IndexedSlices`, each reduced over all replicas; without a gradient."""
        if not values:
            return []

        def reduce(strategy, *each):
            return strategy.extended.batch_reduce_to(reduce_op, [(value, value) for value in each])

        packets, unpack = as_packets([_stopped(value) for value in values])
        return [_stopped(value) for value in unpack(list(self.merged(reduce, *packets)))]

    # --- rows ---------------------------------------------------------------------------------

    def whole(self, value):
        """The rows of all replicas, of this replica's `value`: a tensor, ragged or sparse."""
        if not isinstance(value, tf.Tensor):
            return self._remember(gathered(self, value), value)
        rows = gathered(self, tf.stop_gradient(value))
        if not value.dtype.is_floating:
            return self._remember(rows, value)

        @tf.custom_gradient
        def join(mine, rows):
            return tf.identity(rows), lambda up: (self.own(up) * tf.cast(self.replicas, up.dtype), None)

        result = join(value, tf.stop_gradient(rows))
        result.set_shape(rows.shape)
        return self._remember(result, value)

    def own(self, value):
        """This replica's rows of `value`, whatever its number of rows; of what was just gathered, those it was made of."""
        mine = self._own_rows(value)
        if not isinstance(value, tf.Tensor) or not value.dtype.is_floating:
            return mine

        @tf.custom_gradient
        def cut(rows, mine):
            return tf.identity(mine), lambda up: (self.whole(up / tf.cast(self.replicas, up.dtype)), None)

        return cut(value, tf.stop_gradient(mine))

    def with_notes(self, value, change):
        """`change(value)`, which is `whole` or `own`, with the mask and the logits that Keras noted on it, changed alike."""
        changed = change(value)
        for noted, note in ((internals.mask_of(value), internals.set_mask), (internals.logits_of(value), internals.set_logits)):
            if noted is not None:
                note(changed, change(noted))
        return changed

    def _remember(self, rows, mine):
        self._made_of[id(rows)] = rows, mine
        return rows

    def _own_rows(self, value):
        if id(value) in self._made_of:
            return self._made_of[id(value)][1]
        rows = rows_of(value)
        start, stop = split_bounds(rows, self.replicas, self.part.replica)
        if isinstance(value, tf.SparseTensor):
            rest = value.dense_shape[1:]
            return tf.sparse.slice(value, tf.concat([[start], tf.zeros_like(rest)], 0), tf.concat([[stop - start], rest], 0))
        return value[start:stop] if isinstance(value, tf.Tensor) else tf.gather(value, tf.range(start, stop))

    # --- gradients and losses -----------------------------------------------------------------

    def means_of_gradients(self, gradients):
        """Gradients with respect to variables as one device has them; None stays None, `tf.IndexedSlices` sparse.

        The gradient of this reduction is the identity: what comes from upstream is the same on every replica.
        """
        result = list(gradients)
        at = [index for index, gradient in enumerate(gradients) if gradient is not None]
        reduced = self.reduced(MEAN, [gradients[index] for index in at])

        @tf.custom_gradient
        def join(mine, reduced):
            return tf.identity(reduced), lambda up: (up, None)

        for index, mean in zip(at, reduced):
            result[index] = mean if isinstance(mean, tf.IndexedSlices) else join(tf.convert_to_tensor(gradients[index]), mean)
        return result

    def sum_of_shares(self, value, share):
        """The sum over replicas of `share * value`, where each replica has a value of its own rows."""
        total = self.reduced(SUM, [tf.math.multiply_no_nan(value, share)])[0]

        @tf.custom_gradient
        def join(mine, total):
            return tf.identity(total), lambda up: (up * tf.cast(self.replicas, up.dtype) * share, None)

        return join(value, total)

    def seeds(self, draw):
        """The pair of seeds of a random operation: that which the first replica of this process drew for it."""
        number = self._seeds
        self._seeds += 1
        if number == len(self.drawn):
            self.drawn.append(draw())
        return self.drawn[number]


def _stopped(value):
    if isinstance(value, tf.IndexedSlices):
        return tf.IndexedSlices(tf.stop_gradient(value.values), value.indices, value.dense_shape)
    return tf.stop_gradient(value)


def summed(context, values):
    """The sums over all replicas of each replica's list of tensors; differentiable, wherever the gradient is asked for.

    The sums are made out of sight of the gradient and joined afterwards. `ReplicaContext.all_reduce` would look for
    variables from the sum back to the replica's values, through all that the other replicas have traced.
    """
    view = current_view()
    stopped = [tf.stop_gradient(value) for value in values]

    def reduce(strategy, *each):
        return strategy.extended.batch_reduce_to(SUM, [(value, value) for value in each])

    outside = view is not None and not view.inside  # where a layer's gradient is computed
    sums = list(view.merged(reduce, *stopped) if outside else context.merge_call(reduce, stopped))

    @tf.custom_gradient
    def join(*both):
        return tuple(map(tf.identity, both[len(values) :])), lambda *up: (*summed(context, list(up)), *[None] * len(values))

    return join(*values, *map(tf.stop_gradient, sums))


def gathered(view, value):
    """The rows of all replicas one after another, on each of them; without a gradient.

    On several workers every replica adds zeros where the others' rows are, as lengths differ; strings cannot be added.
    """
    if view.strategy.workers > 1:
        return _gathered_by_sum(view, value)

    def gather(strategy, parts):
        parts = strategy.experimental_local_results(parts)
        made = []
        for device in strategy.extended.worker_devices:
            with tf.device(device):
                made.append(_concatenated(parts))
        return internals.regrouped(made)

    return view.merged(gather, value)


def _concatenated(parts):
    return tf.sparse.concat(0, parts) if isinstance(parts[0], tf.SparseTensor) else tf.concat(parts, 0)


def _gathered_by_sum(view, value):
    if not isinstance(value, tf.Tensor) or value.dtype == tf.string:
        kind = "strings" if isinstance(value, tf.Tensor) else type(value).__name__
        raise TypeError(
            f"a step of one's own on several workers was given {kind}, which cannot be gathered over workers; turn them into dense "
            'numbers in the dataset, or pass view="replica" to mirrored_model.'
        )
    view.strategy.gathers_over_workers = True
    number = tf.cast(value, tf.int32) if value.dtype == tf.bool else value
    mine = tf.one_hot(view.part.replica, view.replicas, dtype=tf.int32) * tf.shape(value)[0]
    rows = view.reduced(SUM, [mine])[0]
    before, total = tf.reduce_sum(rows[: view.part.replica]), tf.reduce_sum(rows)
    rest = [[0, 0]] * (value.shape.rank - 1)
    placed = tf.pad(number, [[before, total - before - tf.shape(value)[0]], *rest])
    result = tf.cast(view.reduced(SUM, [placed])[0], value.dtype)
    result.set_shape([None, *value.shape[1:]])
    return result
