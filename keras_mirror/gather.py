"""`gather`: the rows of all replicas, for code that has its own replica's."""

import tensorflow as tf

from keras_mirror.rows import Part, current_part
from keras_mirror.whole_view import SUM, View, gathered, summed


def gather(value):
    """The rows of all replicas, one replica's after another, on every one of them; differentiable.

    For a loss that compares rows with each other, as a contrastive one, in a step that works on a replica's own
    rows: a loop over `strategy.run`, or `mirrored_model(..., view="replica")`. Where the whole batch is seen already,
    and outside of a step, it returns `value`.

    The gradients of all replicas' losses with respect to their copies of the gathered rows are added up and each row's
    sum goes back to the replica that it came from, as the optimizer adds up what replicas compute. A loss that
    every replica computes in full has to be divided by their number therefore.

    Args:
        value: Tensor of any dtype with rows in its first dimension, of which each replica may have another number, also
            none; the other dimensions are the same everywhere.

    Returns:
        A tensor with the rows of all. Costs one copy of all rows to each replica, and one all-reduce of as many
        in the backward pass.

    Raises:
        ValueError: If `value` has no rows.
        TypeError: On several workers, for strings.

    Example:

    >>> def step(data):
    ...     x, y = data
    ...     z = km.gather(model(x, training=True))   # of the whole batch
    ...     ...
    """
    value = tf.convert_to_tensor(value)
    if value.shape.rank == 0:
        raise ValueError("gather: a number has no rows to gather; give it a first dimension, as in value[None].")
    context, part = tf.distribute.get_replica_context(), current_part()
    if context is None or (part is not None and part.alone) or context.num_replicas_in_sync == 1:
        return value
    if part is None:
        replica = int(tf.get_static_value(context.replica_id_in_sync_group))
        part = Part(context.strategy, replica, None, None, False)
    view = View(context, part, prepare=None)
    rows = gathered(view, tf.stop_gradient(value))
    if not value.dtype.is_floating:
        return rows
    counts = view.reduced(SUM, [tf.one_hot(part.replica, view.replicas, dtype=tf.int32) * tf.shape(value)[0]])[0]
    start = tf.reduce_sum(counts[: part.replica])

    @tf.custom_gradient
    def join(mine, rows):
        def gradient(up):
            (total,) = summed(context, [up])
            return total[start : start + tf.shape(mine)[0]], None

        return tf.identity(rows), gradient

    result = join(value, rows)
    result.set_shape(rows.shape)
    return result
