"""A `tf.function` inside a step becomes part of it: in a graph of its own, replicas cannot exchange anything."""

import functools

from keras_mirror import internals
from keras_mirror.rows import current_part


def inlined(fn):
    """`fn`; of what `tf.function` returned, the Python function, converted by AutoGraph if that would have done so.

    Args:
        fn: A function, or None.
    """
    return internals.python_function_of(fn) if internals.is_tf_function(fn) else fn


def run_inlined(layer):
    """Makes a layer whose `call` is a `tf.function` run it as a part of the step.

    Args:
        layer: A Keras layer, changed in place if its class has such a `call`.
    """
    own = type(layer).call
    if not internals.is_tf_function(own):
        return
    part_of_step = inlined(own)

    @functools.wraps(part_of_step)
    def call(*args, **kwargs):
        return (own if current_part() is None else part_of_step)(layer, *args, **kwargs)

    internals.set_attribute(layer, "call", call)
