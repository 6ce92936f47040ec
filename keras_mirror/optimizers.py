"""Reduce once, then every replica updates its own copy."""

import collections
import math
import threading

import keras
import tensorflow as tf

from keras_mirror import internals
from keras_mirror.rows import current_part

PACK_BELOW = 16384  # entries; below, sending costs more than copying the gradient into a packet


def reduce_gradients(gradients):
    """The gradients of the global batch, from each replica's share of them.

    Runs inside a step. Small dense gradients of one dtype travel in one packet; `None` stays `None`
    and `tf.IndexedSlices` stay sparse: the slices of all replicas, one after another, which are
    the slices that one device would have. What a replica without rows computed is replaced by
    zeros, so that its NaNs do not spread.

    Args:
        gradients: List of tensors, `tf.IndexedSlices` or None.

    Returns:
        A list like `gradients`, equal on all replicas.
    """
    context = tf.distribute.get_replica_context()
    if context.num_replicas_in_sync == 1:
        return list(gradients)
    present = [index for index, gradient in enumerate(gradients) if gradient is not None]
    local = _zero_if_empty([_as_tensor(gradients[index]) for index in present])
    packets, unpack = as_packets(local)
    reduced = context.all_reduce(tf.distribute.ReduceOp.SUM, packets) if packets else []
    result = list(gradients)
    for index, gradient in zip(present, unpack(reduced)):
        result[index] = gradient
    return result


def _as_tensor(gradient):
    return gradient if isinstance(gradient, tf.IndexedSlices) else tf.convert_to_tensor(gradient)


def _zero_if_empty(gradients):
    part = current_part()
    if part is None or (isinstance(part.rows, int) and part.rows > 0) or not gradients:
        return gradients
    dense = [g.values if isinstance(g, tf.IndexedSlices) else g for g in gradients]
    has_rows = tf.convert_to_tensor(part.rows) > 0
    # What code that saw the whole batch in the step has added is this replica's share of it, with rows or without.
    nothing = _without_nan if part.views else tf.zeros_like
    dense = tf.cond(has_rows, lambda: dense, lambda: [nothing(g) for g in dense])
    return [
        tf.IndexedSlices(value, g.indices, g.dense_shape) if isinstance(g, tf.IndexedSlices) else value
        for value, g in zip(dense if isinstance(dense, (list, tuple)) else [dense], gradients)
    ]


def _without_nan(gradient):
    return tf.where(tf.math.is_nan(gradient), tf.zeros_like(gradient), gradient)


def as_packets(gradients):
    """Packets to send, small tensors of one dtype together, and the function that takes them apart again."""
    groups = collections.defaultdict(list)
    for index, gradient in enumerate(gradients):
        small = isinstance(gradient, tf.Tensor) and gradient.shape.is_fully_defined() and gradient.shape.num_elements() < PACK_BELOW
        groups[gradient.dtype.name if small else index].append(index)
    groups = list(groups.values())
    packets = [
        gradients[group[0]] if len(group) == 1 else tf.concat([tf.reshape(gradients[i], [-1]) for i in group], 0)
        for group in groups
    ]

    def unpack(reduced):
        result = [None] * len(gradients)
        for group, packet in zip(groups, reduced):
            if len(group) == 1:
                result[group[0]] = packet
                continue
            pieces = tf.split(packet, [math.prod(gradients[i].shape) for i in group])
            for i, piece in zip(group, pieces):
                result[i] = tf.reshape(piece, gradients[i].shape)
        return result

    return packets, unpack


def _as_half(gradient):
    """A sum of float16 gradients as float16 would hold it: rounded, and infinite where it overflows."""
    if isinstance(gradient, tf.IndexedSlices):
        return tf.IndexedSlices(_as_half(gradient.values), gradient.indices, gradient.dense_shape)
    return tf.cast(tf.cast(gradient, tf.float16), gradient.dtype)


def _build(optimizer, variables):
    """Builds an optimizer that is first used inside a graph, where Keras could not make its variables."""
    if not optimizer.built:
        with tf.init_scope():
            optimizer.build(variables)


def half_variables(model):
    """Ids of the variables whose gradients are computed in float16, under mixed precision."""
    return {
        id(variable)
        for layer in internals.layers_of(model)
        if getattr(layer, "compute_dtype", None) == "float16"
        for variable in internals.own_trainable_variables(layer)
        if internals.is_autocast(variable)
    }


def share_updates(optimizer, half=frozenset()):
    """Makes `optimizer.apply`, and an `apply_gradients` of its class, reduce the gradients before each replica updates its copies.

    Everything after the reduction (unscaling, the test for infinities, clipping, accumulation,
    weight decay, the update, averages, constraints) is Keras' own code. It sees the same numbers
    on every replica, so the copies stay equal without any further word between the replicas.

    Args:
        optimizer: A built or unbuilt `keras.optimizers.Optimizer`, changed in place; its config,
            its state and what is saved of it stay as they are.
        half: Ids of variables whose gradients are computed in float16. Their sum is held to
            float16's range, so that loss scaling meets the infinities that it meets on one device.
    """
    internals.set_attribute(optimizer, "_keras_mirror_half", half)
    if "apply" in vars(optimizer):
        return
    reduced = threading.local()  # every replica is a thread: whether it is inside a method that was given reduced gradients

    def update(method, grads, trainable_variables):
        """What `method(grads, trainable_variables)` returns for reduced gradients."""
        context = tf.distribute.get_replica_context()
        grads = list(grads)
        if context is None or not hasattr(context.strategy.extended, "_keras_mirror_local") or getattr(reduced, "on", False):
            return method(grads, trainable_variables)
        if current_part() is not None:
            current_part().marks.add("update")
        if not optimizer.built and trainable_variables is not None:
            context.merge_call(lambda strategy, *args: _build(optimizer, list(trainable_variables)))
        grads = reduce_gradients(grads)
        half = optimizer._keras_mirror_half
        if half and context.num_replicas_in_sync > 1:
            variables = trainable_variables or internals.variables_updated_by(optimizer)
            grads = [_as_half(g) if g is not None and id(v) in half else g for g, v in zip(grads, variables)]
        reduced.on = True
        try:
            with internals.local_updates(context.strategy.extended):
                return method(grads, trainable_variables)
        finally:
            reduced.on = False

    def apply(grads, trainable_variables=None):
        return update(lambda *each: type(optimizer).apply(optimizer, *each), grads, trainable_variables)

    def apply_gradients(grads_and_vars, *args, **kwargs):
        grads, variables = zip(*grads_and_vars)
        own = type(optimizer).apply_gradients
        return update(lambda *each: own(optimizer, zip(*each), *args, **kwargs), grads, list(variables))

    internals.set_attribute(optimizer, "apply", apply)
    if type(optimizer).apply_gradients is not keras.optimizers.Optimizer.apply_gradients:
        internals.set_attribute(optimizer, "apply_gradients", apply_gradients)
    for each in (optimizer, getattr(optimizer, "inner_optimizer", None)):
        if each is not None:
            internals.skip_all_reduce(each)
