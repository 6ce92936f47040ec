"""Which layers make something of a row that depends on the other rows, found out by calling them on fewer."""

import contextlib
import functools

import numpy as np
import tensorflow as tf

from keras_mirror import internals
from keras_mirror.comparing import all_equal, compare
from keras_mirror.one_device import as_one_device
from keras_mirror.shadowing import shadowed
from keras_mirror.snapshot import Snapshot


def layers_that_mix_rows(probe, batch, known, tolerance):
    """The layers whose output for the first rows is another one when they are called with those rows alone.

    Runs the step once on one device, eagerly, and calls every layer twice more: on all rows and on half of
    them. Changes what such a step changes, but for gradients.

    Args:
        probe: A `StepProbe`.
        batch: Global batch.
        known: Ids of layers to leave out.
        tolerance: As of `compare`.

    Returns:
        List of layers; of layers in each other the innermost only.
    """
    rows = next(leaf.shape[0] for leaf in tf.nest.flatten(batch) if leaf is not None)
    layers = [layer for layer in internals.layers_of(probe.model) if layer is not probe.model]
    states = {id(layer): Snapshot(_state_of(layer)) for layer in layers if id(layer) not in known}
    calls = {}
    with _without_advice():
        with contextlib.ExitStack() as undo:
            for layer in layers:
                undo.enter_context(shadowed(layer, call=_remembering(layer, calls)))
            probe.run_eagerly(batch)
        with as_one_device(probe.strategy, batch):
            found = [layer for layer in layers if id(layer) in states and _mixes(layer, states[id(layer)], calls, rows, tolerance)]
    return [layer for layer in found if not any(each in found for each in internals.layers_of(layer) if each is not layer)]


def _remembering(layer, calls):
    """The layer's `call`, of which the first call is kept in `calls[id(layer)]`."""
    own = layer.call

    @functools.wraps(own)
    def call(*args, **kwargs):
        outputs = own(*args, **kwargs)
        calls.setdefault(id(layer), (args, kwargs, outputs))
        return outputs

    return call


@contextlib.contextmanager
def _without_advice():
    """Keeps TensorFlow from advising against eager steps, of which there is this one."""
    logger = tf.get_logger()
    level = logger.level
    logger.setLevel("ERROR")
    try:
        yield
    finally:
        logger.setLevel(level)


def _state_of(layer):
    """What calling the layer may change, and what it then makes of the next rows."""
    for each in internals.layers_of(layer):
        yield from internals.own_non_trainable_variables(each)
        yield from (value for value in vars(each).values() if isinstance(value, tf.Variable))


def _mixes(layer, state, calls, rows, tolerance):
    if id(layer) not in calls:
        return False
    args, kwargs, outputs = calls[id(layer)]
    half = max(rows // 2, 1)

    def first(value):
        return value[:half] if isinstance(value, tf.Tensor) and value.shape.rank and value.shape[0] == rows else value

    def again(change):
        state.restore()
        return layer(*tf.nest.map_structure(change, args), **tf.nest.map_structure(change, kwargs))

    def differs(one, other):
        pairs = [(_array(first(a)), _array(first(b))) for a, b in zip(tf.nest.flatten(one), tf.nest.flatten(other))]
        pairs = [(a, b) for a, b in pairs if a is not None and b is not None and a.shape == b.shape]
        return not all(all_equal(compare({"": a}, {"": b}, tolerance)) for a, b in pairs)

    if differs(outputs, again(lambda value: value)):
        return False  # what it makes of the same rows is another thing each time
    return differs(outputs, again(first))


def _array(value):
    value = tf.convert_to_tensor(value)
    return np.asarray(value.numpy(), "float64") if value.dtype.is_floating else None
