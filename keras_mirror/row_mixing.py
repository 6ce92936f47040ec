"""Which layers make something of a row that depends on the other rows, found out by calling them on fewer."""

import collections
import contextlib

import keras
import numpy as np
import tensorflow as tf

from keras_mirror import internals
from keras_mirror.comparing import all_equal, compare
from keras_mirror.rows import Part, working_on


def layers_that_mix_rows(model, batch, known, tolerance):
    """The layers whose output for the first rows is another one when they are called with those rows alone.

    Calls the model once, eagerly and while training, and every layer once more on half of the rows, on
    each replica. Changes what such a call changes.

    Args:
        model: A built `keras.Model` in the scope of a `keras_mirror.MirroredStrategy`.
        batch: Global batch, as `fit` takes it from a dataset.
        known: Ids of layers to leave out.
        tolerance: As of `compare`.

    Returns:
        List of layers; of layers in each other the innermost only.
    """
    x, _, _ = keras.utils.unpack_x_y_sample_weight(batch)
    rows = next(leaf.shape[0] for leaf in tf.nest.flatten(x) if leaf is not None)
    layers = [layer for layer in internals.layers_of(model) if layer is not model]
    strategy, found = internals.training_strategy(model), {}

    def on_replica():
        replica = int(tf.get_static_value(tf.distribute.get_replica_context().replica_id_in_sync_group))
        with working_on(Part(strategy, 0, rows, rows, True, alone=True)):
            internals.call_with_training(model, x, True)
            found[replica] = [
                layer for layer in layers if id(layer) not in known and _mixes(layer, calls[replica], rows, tolerance)
            ]

    calls = collections.defaultdict(dict)
    with contextlib.ExitStack() as undo:
        for layer in layers:
            undo.enter_context(_remembering(layer, calls))
        undo.enter_context(_without_advice())
        tf.distribute.Strategy.run(strategy, on_replica)
    return [layer for layer in found[0] if not any(each in found[0] for each in internals.layers_of(layer) if each is not layer)]


@contextlib.contextmanager
def _remembering(layer, calls):
    """While entered, the first call of the layer on each replica is kept in `calls[replica][id(layer)]`."""
    shadow, own = vars(layer).get("call"), layer.call

    def call(*args, **kwargs):
        outputs = own(*args, **kwargs)
        replica = int(tf.get_static_value(tf.distribute.get_replica_context().replica_id_in_sync_group))
        calls[replica].setdefault(id(layer), (args, kwargs, outputs))
        return outputs

    internals.set_attribute(layer, "call", call)
    try:
        yield
    finally:
        internals.set_attribute(layer, "call", shadow) if shadow else internals.unset_attribute(layer, "call")


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


def _mixes(layer, calls, rows, tolerance):
    if id(layer) not in calls:
        return False
    args, kwargs, outputs = calls[id(layer)]
    half = max(rows // 2, 1)

    def first(value):
        return value[:half] if isinstance(value, tf.Tensor) and value.shape.rank and value.shape[0] == rows else value

    again = layer(*tf.nest.map_structure(first, args), **tf.nest.map_structure(first, kwargs))
    whole = [_array(first(leaf)) for leaf in tf.nest.flatten(outputs)]
    alone = [_array(leaf) for leaf in tf.nest.flatten(again)]
    pairs = [(a, b) for a, b in zip(whole, alone) if a is not None and b is not None and a.shape == b.shape]
    return not all(all_equal(compare({"": a}, {"": b}, tolerance)) for a, b in pairs)


def _array(value):
    value = tf.convert_to_tensor(value)
    return np.asarray(value.numpy(), "float64") if value.dtype.is_floating else None
