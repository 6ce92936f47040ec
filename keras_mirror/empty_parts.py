"""A replica without rows: layers and losses that cannot run on nothing run on a row of zeros instead."""

import contextlib
import contextvars
import functools

import keras
import tensorflow as tf

from keras_mirror import internals
from keras_mirror.row_needs import is_looking, looking_away, needs_a_row
from keras_mirror.rows import current_part

# Keras' own layers with such operations; of others `needs_a_row` finds out.
SPATIAL = (
    keras.layers.Conv1D,
    keras.layers.Conv2D,
    keras.layers.Conv3D,
    keras.layers.Conv1DTranspose,
    keras.layers.Conv2DTranspose,
    keras.layers.Conv3DTranspose,
    keras.layers.DepthwiseConv1D,
    keras.layers.DepthwiseConv2D,
    keras.layers.SeparableConv1D,
    keras.layers.SeparableConv2D,
    keras.layers.MaxPooling1D,
    keras.layers.MaxPooling2D,
    keras.layers.MaxPooling3D,
    keras.layers.AveragePooling1D,
    keras.layers.AveragePooling2D,
    keras.layers.AveragePooling3D,
    keras.layers.ConvLSTM1D,
    keras.layers.ConvLSTM2D,
    keras.layers.ConvLSTM3D,
    keras.layers.MelSpectrogram,
    *([keras.layers.STFTSpectrogram] if hasattr(keras.layers, "STFTSpectrogram") else []),
)

_standing_in = contextvars.ContextVar("keras_mirror_standing_in", default=False)


def may_be_empty():
    """Whether the running step works on a part that may have no rows."""
    part = current_part()
    return part is not None and not part.alone and not (isinstance(part.rows, int) and part.rows > 0)


def with_a_row(tensor):
    """`tensor`, or one row of zeros where it has no rows."""
    tensor = tf.convert_to_tensor(tensor)

    def padded_by_one():  # a concatenation, so that gradients find their way through it
        shape = tf.concat([[1], tf.shape(tensor)[1:]], 0)
        row = tf.fill(shape, "") if tensor.dtype == tf.string else tf.zeros(shape, tensor.dtype)
        return tf.concat([tensor, row], 0)

    padded = tf.cond(tf.shape(tensor)[0] > 0, lambda: tf.identity(tensor), padded_by_one)
    if tf.is_symbolic_tensor(padded):
        padded.set_shape([None, *tensor.shape[1:]])
    return padded


def is_stand_in():
    """Whether what a layer is given may be a row of zeros in place of no rows, which must not count."""
    return _standing_in.get()


def run_on_a_row(layer):
    """Makes a layer that calls operations that cannot run on no rows run on a row of zeros then; its outputs have none either way.

    Args:
        layer: A Keras layer or operation, changed in place if it is a convolution, a pooling and the like, or
            is the user's own: of that it is found out when a part that may be empty is given to it.
    """
    spatial = isinstance(layer, SPATIAL)
    if not spatial and not is_own(layer):
        return
    own, known = layer.call, {}

    @functools.wraps(own)
    def call(*args, **kwargs):
        if is_looking():
            with looking_away():
                return own(*args, **kwargs)
        if not may_be_empty() or not _has_rows((args, kwargs)):
            return own(*args, **kwargs)
        if not spatial:
            key = str(kwargs.get("training"))
            if key not in known:
                known[key] = needs_a_row(own, args, kwargs)
            if not known[key]:
                return own(*args, **kwargs)
        return _on_a_row(own, args, kwargs)

    internals.set_attribute(layer, "call", call)


def operations_of(model):
    """Functions of `keras.ops` between the layers of a functional model."""
    operations = getattr(model, "operations", None) if isinstance(model, keras.Model) else None
    operations = operations if isinstance(operations, (list, tuple)) else ()
    return [each for each in operations if isinstance(each, keras.Operation) and not isinstance(each, keras.Layer)]


def is_own(layer):
    """Whether the user wrote what a layer does, or it is a function of `keras.ops`."""
    if not isinstance(layer, keras.Layer) or isinstance(layer, keras.layers.Lambda):
        return True
    return type(layer).call.__module__.split(".")[0] != "keras"


def _has_rows(structure):
    """Whether there are tensors that may be without rows, and none of the kinds that cannot be told."""
    leaves = tf.nest.flatten(structure)
    told = not any(isinstance(leaf, tf.__internal__.CompositeTensor) for leaf in leaves)
    return told and any(_may_lack_rows(leaf) for leaf in leaves)


def _may_lack_rows(leaf):
    return isinstance(leaf, tf.Tensor) and leaf.shape.rank not in (None, 0) and not leaf.shape[0]


def _on_a_row(call, args, kwargs):
    rows = tf.shape(next(leaf for leaf in tf.nest.flatten((args, kwargs)) if _may_lack_rows(leaf)))[0]
    args, kwargs = tf.nest.map_structure(lambda leaf: _like(leaf, with_a_row) if _may_lack_rows(leaf) else leaf, (args, kwargs))
    with _standing_in_for_none():
        outputs = call(*args, **kwargs)

    def cut(leaf):
        if not isinstance(leaf, tf.Tensor) or not leaf.shape.rank or (leaf.shape[0] and not tf.executing_eagerly()):
            return leaf
        return _like(leaf, lambda tensor: tensor[: tf.where(rows > 0, tf.shape(tensor)[0], 0)])

    return tf.nest.map_structure(cut, outputs)


def _like(leaf, change):
    """The changed tensor, with the changed mask where there is one."""
    changed, mask = change(leaf), internals.mask_of(leaf)
    if mask is not None:
        internals.set_mask(changed, change(mask))
    return changed


@contextlib.contextmanager
def _standing_in_for_none():
    token = _standing_in.set(True)
    try:
        yield
    finally:
        _standing_in.reset(token)
