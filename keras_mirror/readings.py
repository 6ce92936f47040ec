"""The state of metrics, put together over the workers once a step and then read without asking them again."""

import contextlib

import numpy as np
import tensorflow as tf

from keras_mirror import internals

_KEPT = "_keras_mirror_kept"


class Readings:
    """Reads variables whose copies are added up when they are read, such as a metric's.

    What a graph reads is kept. Reading it again outside of a graph, on any one worker alone, costs
    no communication as long as no step ran in between. What changed without a step was assigned
    on every worker alike (a reset, a restored file), so this worker's copies tell the whole.

    Args:
        strategy: A `MultiWorkerMirroredStrategy`.
    """

    def __init__(self, strategy):
        self._strategy = strategy
        self._steps = internals.single_variable(0, "steps_run", tf.int64)
        self._at_hand = {}

    def a_step_runs(self):
        """Counts a step, in a graph or not; what was kept is out of date from then on."""
        with tf.device("CPU:0"):
            self._steps.assign_add(1)

    @contextlib.contextmanager
    def together(self, variables):
        """Inside a graph: while entered, reading `variables` costs one message for each dtype, not one for each of them."""
        context = tf.distribute.get_replica_context()
        if not tf.inside_function() or (context is not None and context.strategy is self._strategy):
            yield  # a replica reads its own copies
            return
        groups = {}
        for variable in variables:
            if internals.is_read_together(variable) and variable.aggregation == tf.VariableAggregation.SUM:
                groups.setdefault(variable.dtype, []).append(variable)
        try:
            for group in groups.values():
                self._at_hand.update(self._totals(group))
            yield
        finally:
            self._at_hand = {}

    def _totals(self, group):
        packets = []
        for copies in zip(*map(self._copies, group)):  # of one replica
            with tf.device(copies[0].device):
                packets.append(tf.concat([tf.reshape(copy, [-1]) for copy in copies], 0))
        pieces = tf.split(self._strategy.sum_over_replicas(packets), [variable.shape.num_elements() for variable in group])
        return {id(variable): tf.reshape(piece, variable.shape) for variable, piece in zip(group, pieces)}

    def _copies(self, variable):
        return [tf.convert_to_tensor(copy.read_value()) for copy in self._strategy.experimental_local_results(variable)]

    def read(self, variable, reduce_op):
        """The variable's value over all replicas."""
        copies = self._copies(variable)
        if reduce_op not in ("SUM", tf.distribute.ReduceOp.SUM):
            return copies[0]  # all replicas hold the same average
        if not tf.inside_function():
            kept = vars(variable).get(_KEPT)  # getattr would read the variable
            at = -1 if kept is None else int(kept.steps)
            if at == int(self._steps) or int(self._steps) == 0:
                unchanged = kept is not None and all(bool(tf.reduce_all(a == b)) for a, b in zip(kept.copies, copies))
                return tf.identity(kept.total) if unchanged else tf.add_n(copies) * self._strategy.workers
        total = self._at_hand[id(variable)] if id(variable) in self._at_hand else self._strategy.sum_over_replicas(copies)
        self._keep(variable, copies, total)
        return total

    def _keep(self, variable, copies, total):
        kept = vars(variable).setdefault(_KEPT, None) or _Kept(copies)
        vars(variable)[_KEPT] = kept
        for own, copy in zip(kept.copies, copies):
            own.assign(copy)
        kept.total.assign(total)
        kept.steps.assign(self._steps.read_value())


class _Kept:
    """The value of a variable over all replicas, with this worker's copies and the number of steps at that time."""

    def __init__(self, copies):
        zeros = [np.zeros(copy.shape, copy.dtype.as_numpy_dtype) for copy in copies]
        self.copies = [internals.single_variable(zero, "reading") for zero in zeros]
        self.total = internals.single_variable(zeros[0], "reading")
        self.steps = internals.single_variable(-1, "reading", tf.int64)
