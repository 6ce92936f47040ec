"""Finds out by trying whether a layer of the user's own gives for each row what it would give for that row alone."""

import concurrent.futures
import contextvars
import weakref

import keras
import numpy as np
import tensorflow as tf

from keras_mirror import internals
from keras_mirror.by_row import SIZE, around_zero, changes_a_variable, fractions, keeps_nothing, zeros_and_ones
from keras_mirror.rows import Part, working_on

ROWS = 3

_trying = contextvars.ContextVar("keras_mirror_trying", default=False)
_known = weakref.WeakKeyDictionary()


def is_trying():
    """Whether this thread calls a layer for trial: the libraries' layers in it are called with `training=False` then."""
    return _trying.get()


BY_ROW, MIXES, KEEPS, UNKNOWN = "by row", "mixes rows", "keeps something", "unknown"


def how_it_goes(layer, strategy, args, kwargs):
    """What a built layer of the user's own does with the rows of a batch: `BY_ROW` if it may run on some of them as on all.

    It is called once more, on small batches of several kinds of numbers, all rows together and each alone. Random
    layers and batch normalisations of Keras' in it are left out, as they know how to run on some of the rows. A layer that
    changes a variable or adds a loss `KEEPS` something; one that draws random numbers itself, or is given something else
    than rows, is `UNKNOWN`.

    Args:
        layer: The layer.
        strategy: The strategy.
        args: Its arguments in the step, a structure of tensors and other things.
        kwargs: Its keyword arguments, likewise.
    """
    leaves = [leaf for leaf in keras.tree.flatten((args, kwargs)) if isinstance(leaf, (tf.Tensor, tf.__internal__.CompositeTensor))]
    if not leaves or not all(_is_plain(leaf) and leaf.shape[0] == leaves[0].shape[0] for leaf in leaves):
        return UNKNOWN
    key = (tuple((leaf.dtype, *leaf.shape[1:]) for leaf in leaves), str(keras.tree.map_structure(_kind, (args, kwargs))))
    known = _known.setdefault(layer, {})
    if key not in known:
        with concurrent.futures.ThreadPoolExecutor(1) as thread:  # that of a replica is in its step
            known[key] = thread.submit(_try, layer, strategy, leaves, args, kwargs).result()
    return known[key]


def _is_plain(leaf):
    return isinstance(leaf, tf.Tensor) and bool(leaf.shape.rank) and internals.mask_of(leaf) is None


def _kind(leaf):
    return "tensor" if isinstance(leaf, tf.Tensor) else leaf


def _try(layer, strategy, leaves, args, kwargs):
    specs = [tf.TensorSpec([None, *(size or SIZE for size in leaf.shape[1:])], leaf.dtype) for leaf in leaves]
    places = {id(leaf): index for index, leaf in enumerate(leaves)}
    part = Part(strategy, 0, ROWS, ROWS, True, alone=True, thread="trial")

    def call(*given):
        in_place = keras.tree.map_structure(lambda leaf: given[places[id(leaf)]] if id(leaf) in places else leaf, (args, kwargs))
        return keras.tree.flatten(layer(*in_place[0], **in_place[1]))

    token = _trying.set(True)
    try:
        with working_on(part):
            traced = tf.function(call, autograph=False).get_concrete_function(*specs)
            added = [loss for each in internals.layers_of(layer) for loss in internals.list_of_losses(each)]
            for each in internals.layers_of(layer):
                internals.list_of_losses(each).clear()
        if added or not keeps_nothing(traced.graph):
            return KEEPS if added or changes_a_variable(traced.graph) else UNKNOWN
        verdicts = [_is_alike(traced, specs, draw) for draw in (around_zero, fractions, zeros_and_ones)]
        return MIXES if False in verdicts else BY_ROW if True in verdicts else UNKNOWN
    except Exception:  # whatever the user's code cannot do with such rows
        return UNKNOWN
    finally:
        _trying.reset(token)


def _is_alike(traced, specs, draw):
    """Whether all rows together give what each gives alone; None where these numbers tell nothing."""
    generator = np.random.RandomState(7)
    given = [tf.cast(tf.constant(draw(generator, [ROWS, *spec.shape[1:]])), spec.dtype) for spec in specs]
    together = traced(*given)
    alone = [traced(*[each[row : row + 1] for each in given]) for row in range(ROWS)]
    for index, output in enumerate(together):
        if output.shape[:1] != (ROWS,):
            return False
        rows = tf.concat([each[index] for each in alone], 0)
        if output.dtype.is_floating and not (np.isfinite(output).all() and np.isfinite(rows).all()):
            return None
        if rows.shape != output.shape or not np.allclose(
            tf.cast(output, tf.float64), tf.cast(rows, tf.float64), rtol=1e-3, atol=1e-5
        ):
            return False
    return True
