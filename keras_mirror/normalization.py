"""Batch normalisation over the global batch, as one device has it."""

import keras
import tensorflow as tf

from keras_mirror import internals
from keras_mirror.empty_parts import is_stand_in
from keras_mirror.losses import global_sum
from keras_mirror.rows import current_part

MODES = ("sync", "local")


def normalize_globally(layer, mode):
    """Makes a `BatchNormalization` layer keep the promise that N replicas equal one device.

    `"sync"`: mean and variance are those of the global batch; costs one exchange of
    `replicas * (2 * channels + 1)` floats forward and one backward.
    `"local"`: every replica normalises with its own rows, which is another (noisier) training; the
    moving statistics are the average over the replicas, weighted by rows.

    The moments of the parts are merged with Chan, Golub and LeVeque, "Updating formulae and a
    pairwise algorithm for computing sample variances" (1979), which does not cancel as
    `E[x^2] - E[x]^2` does.

    Args:
        layer: A `keras.layers.BatchNormalization`, changed in place.
        mode: `"sync"` or `"local"`.
    """
    if not isinstance(layer, keras.layers.BatchNormalization):
        return
    if mode == "sync":
        internals.set_batch_moments(layer, lambda inputs, mask: _merge(layer, *_local_moments(layer, inputs, mask)))
    else:
        internals.set_batch_moments(layer, lambda inputs, mask: _moments_of_part(layer, inputs, mask))
        _average_moving_statistics(layer)


def _local_moments(layer, inputs, mask):
    """Count, mean and sum of squared deviations of this replica's entries, per channel."""
    axes = [axis for axis in range(inputs.shape.rank) if axis != layer.axis % inputs.shape.rank]
    weights = None if mask is None else tf.cast(tf.broadcast_to(mask[..., None], tf.shape(inputs)), inputs.dtype)
    if weights is None:
        channels = inputs.shape[layer.axis]
        count = tf.fill([channels], tf.cast(tf.size(inputs) // channels, inputs.dtype))
        total = tf.reduce_sum(inputs, axes)
    else:
        count = tf.reduce_sum(weights, axes)
        total = tf.reduce_sum(inputs * weights, axes)
    if is_stand_in():
        there = tf.cast(current_part().rows > 0, inputs.dtype)
        count, total = count * there, tf.math.multiply_no_nan(total, there)
    mean = tf.math.divide_no_nan(total, count)
    shape = [1] * inputs.shape.rank
    shape[layer.axis] = -1
    squared = tf.math.squared_difference(inputs, tf.reshape(mean, shape))
    squares = tf.reduce_sum(squared if weights is None else squared * weights, axes)
    return count, mean, tf.math.multiply_no_nan(squares, there) if is_stand_in() else squares


def _merge(layer, count, mean, squares):
    part = current_part()
    replicas = 1 if part is None else part.strategy.num_replicas_in_sync
    if replicas > 1:
        mine = tf.one_hot(part.replica, replicas, dtype=mean.dtype)[:, None, None]
        count, mean, squares = tf.unstack(global_sum(mine * tf.stack([count, mean, squares])[None]), axis=1)
    else:
        count, mean, squares = count[None], mean[None], squares[None]
    total = tf.reduce_sum(count, 0)
    center = tf.math.divide_no_nan(tf.reduce_sum(count * mean, 0), total)
    spread = tf.reduce_sum(squares + count * tf.square(mean - center), 0)
    return center, tf.math.divide_no_nan(spread, total)


def _moments_of_part(layer, inputs, mask):
    count, mean, squares = _local_moments(layer, inputs, mask)
    empty = count == 0
    mean = tf.where(empty, tf.cast(layer.moving_mean, mean.dtype), mean)
    variance = tf.math.divide_no_nan(squares, count)
    return mean, tf.where(empty, tf.cast(layer.moving_variance, mean.dtype), variance)


def _average_moving_statistics(layer):
    call = type(layer).call

    def averaged(inputs, *args, **kwargs):
        outputs = call(layer, inputs, *args, **kwargs)
        part = current_part()
        training = kwargs.get("training", args[0] if args else None)
        if training and layer.trainable and part is not None:
            statistics = [v.value for v in layer.non_trainable_variables]
            shares = [tf.math.multiply_no_nan(tf.convert_to_tensor(v), part.share(v.dtype)) for v in statistics]
            for variable, average in zip(statistics, global_sum(shares)):
                variable.assign(average)
        return outputs

    internals.set_attribute(layer, "call", averaged)
