"""Tells, inside a graph that runs many steps, waiting for data from stepping."""

import tensorflow as tf

from keras_mirror import internals


class NoClock:
    """Measures nothing and adds nothing to the graph."""

    def first(self, get):
        """Returns what `get()` returns, and the times so far: the state of the loop."""
        return get(), ()

    def step(self, times, run):
        """Runs a step."""
        run()
        return times

    def following(self, times, get):
        """Gets the next batch."""
        return get(), times

    def seconds(self, times):
        """Seconds of waiting and of stepping; a float64 tensor of shape (2,)."""
        return ()


class GraphClock(NoClock):
    """Measures both with a few scalar operations a step, on the host, and delays nothing.

    The next batch is fetched while the step runs, so only the time between the end of the step and
    the arrival of the batch is waiting. A step has ended when every operation of it that changes
    something has run and, as a GPU only takes note of what it is to do, each GPU has handed a number
    over to the host, which it does after all that was asked of it before.

    Args:
        strategy: The strategy that runs the steps.
        model: The model, for a variable with a copy on each replica.
    """

    def __init__(self, strategy, model):
        self._strategy = strategy
        self.hands_over = any("CPU" not in device for device in strategy.extended.worker_devices)
        self._witness = internals.loss_tracker(model).variables[0].value
        with tf.init_scope(), tf.device("CPU:0"):
            self._handed_over = tf.Variable(0.0, trainable=False, name="handed_over")
        self._handed_over.keras_mirror_own = True

    def first(self, get):
        start = _now([])
        with tf.control_dependencies([start]):
            optional = get()
        arrived = _now(tf.nest.flatten(optional, expand_composites=True))
        return optional, (arrived, arrived - start, tf.zeros_like(start))

    def step(self, times, run):
        since, waiting, stepping = times
        graph = tf.compat.v1.get_default_graph()
        before = len(graph.get_operations())
        run()
        changes = [op for op in graph.get_operations()[before:] if op.op_def.is_stateful and op.type != "ReadVariableOp"]
        ended = _now([self._all_handed_over(changes)] if self.hands_over else changes)
        return ended, waiting, stepping + (ended - since)

    def _all_handed_over(self, changes):
        numbers = []
        for copy in self._strategy.experimental_local_results(self._witness):
            with tf.control_dependencies(changes), tf.device(copy.device):
                numbers.append(copy.read_value())
        with tf.device("CPU:0"):
            return self._handed_over.assign(tf.add_n([tf.cast(number, tf.float32) for number in numbers]))

    def following(self, times, get):
        ended, waiting, stepping = times
        following = get()
        arrived = tf.maximum(ended, _now(tf.nest.flatten(following, expand_composites=True)))
        return following, (arrived, waiting + (arrived - ended), stepping)

    def seconds(self, times):
        return tf.stack(times[1:])


def _now(after):
    """The time, in seconds, once the tensors and operations `after` are there; a float64 scalar."""
    with tf.device("CPU:0"), tf.control_dependencies(after):
        return tf.timestamp()
