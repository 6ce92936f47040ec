"""A replica without rows: layers and losses that cannot run on nothing run on a row of zeros instead."""

import keras
import tensorflow as tf

from keras_mirror import internals
from keras_mirror.rows import current_part

# On CPUs a convolution over no rows, or a pooling behind one, ends the process (oneDNN) or fails; cuDNN refuses it.
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
)


def may_be_empty():
    """Whether the running step works on a part that may have no rows."""
    part = current_part()
    return part is not None and not (isinstance(part.rows, int) and part.rows > 0)


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


def run_on_a_row(layer):
    """Makes a convolution or a pooling run on a row of zeros where it has no rows; its output has none either way.

    Args:
        layer: A Keras layer, changed in place if it is a convolution or a pooling.
    """
    if not isinstance(layer, SPATIAL):
        return
    own = layer.call

    def call(inputs, *args, **kwargs):
        if not may_be_empty():
            return own(inputs, *args, **kwargs)
        return own(with_a_row(inputs), *args, **kwargs)[: tf.shape(inputs)[0]]

    internals.set_attribute(layer, "call", call)
