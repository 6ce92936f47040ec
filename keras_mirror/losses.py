"""A mean is a mean over the global batch: losses whose shares add up over the replicas."""

import keras
import tensorflow as tf

from keras_mirror import internals
from keras_mirror.by_row import RowsApart, is_by_row, is_loss_of_keras
from keras_mirror.empty_parts import may_be_empty, with_a_row
from keras_mirror.errors import warn_once
from keras_mirror.rows import current_part
from keras_mirror.user_code import code_of
from keras_mirror.view_steps import loss_of_whole, sees_a_part
from keras_mirror.whole_view import summed

_MEANS = ("sum_over_batch_size", "mean", "mean_with_sample_weight")


def global_sum(value):
    """The sum of `value` over all replicas, for use inside a step; differentiable, any number of times.

    Args:
        value: Tensor, or structure of tensors.

    Returns:
        The same on every replica. Outside of a replica, `value` itself.
    """
    context = tf.distribute.get_replica_context()
    if context is None or context.num_replicas_in_sync == 1:
        return value
    leaves = [tf.convert_to_tensor(leaf) for leaf in tf.nest.flatten(value)]
    return tf.nest.pack_sequence_as(value, list(summed(context, leaves)))


def global_mean(per_example, sample_weight=None):
    """This replica's share of the mean of `per_example` over the global batch.

    The shares of all replicas add up to the mean that one device would compute, so their
    gradients, which the optimizer adds up, are those of one device: for uneven batches, and for a
    replica without rows, too. It replaces `tf.reduce_mean(per_example)`, which is a mean over the
    local rows and makes the update as many times too large as there are replicas.

    Args:
        per_example: Float tensor, one loss per row in its first dimension; further dimensions
            (tokens, pixels) are averaged over as well.
        sample_weight: Optional tensor of weights that broadcasts to `per_example`. As in Keras'
            `sum_over_batch_size`, the weighted losses are divided by their number, not by the sum
            of the weights.

    Returns:
        Scalar tensor. Costs nothing to communicate: the number of global rows is known.

    Example:

    >>> def step(model, data):
    ...     x, y = data
    ...     with tf.GradientTape() as tape:
    ...         loss = km.global_mean(tf.square(y - model(x, training=True)))
    ...     gradients = tape.gradient(loss, model.trainable_variables)
    ...     model.optimizer.apply(gradients, model.trainable_variables)
    ...     return {"loss": loss}
    """
    per_example = tf.convert_to_tensor(per_example)
    if sample_weight is not None:
        per_example = per_example * tf.cast(sample_weight, per_example.dtype)
    share = tf.math.divide_no_nan(tf.reduce_sum(per_example), global_size(per_example, per_example.dtype))
    return mark_as_share(share)


def mark_as_share(loss):
    """Notes that `loss` is this replica's share of a global loss, and returns it."""
    part = current_part()
    if part is not None:
        part.marks.add("global loss")
        part.losses.append(loss)
    return loss


_SUMS = ("Add", "AddV2", "AddN", "Sub", "Neg", "Identity", "Cast", "Pack", "Squeeze")
_FIRST_INPUT = ("Sum", "Reshape", "ExpandDims", "RealDiv", "MulNoNan", "DivNoNan")


def is_share(value):
    """Whether a scalar is this replica's share of a global loss, or a linear combination of such shares.

    In a graph sums and multiples are recognised by their operations; in eager execution only the
    tensors themselves are.
    """
    part = current_part()
    if part is None or not isinstance(value, tf.Tensor):
        return False
    if any(value is loss for loss in part.losses):
        return True
    if not tf.is_symbolic_tensor(value):
        return False
    inputs = list(value.op.inputs)
    if value.op.type in _SUMS:
        return bool(inputs) and all(is_share(each) for each in inputs)
    if value.op.type == "Mul":
        return any(is_share(each) for each in inputs)
    return value.op.type in _FIRST_INPUT and is_share(inputs[0])


def as_share(value):
    """A loss of which parts may be shares already: what is none is taken for a mean over the replica's rows."""
    if is_share(value):
        return value
    if tf.is_symbolic_tensor(value) and value.op.type in ("Add", "AddV2", "AddN"):
        return tf.add_n([as_share(each) for each in value.op.inputs])
    return tf.math.multiply_no_nan(tf.convert_to_tensor(value), current_part().share(value.dtype))


def global_size(values, dtype):
    """Number of entries of `values` on all replicas, if they are spread like the rows; a scalar."""
    part = current_part()
    size = tf.size(values, tf.int64)
    if part is not None:
        rows = tf.cast(part.rows, tf.int64)
        size = size // tf.maximum(rows, 1) * tf.cast(part.global_rows, tf.int64)
    return tf.cast(size, dtype)


def _loss_per_row(loss, y_pred):
    """What to write so that a loss has a number for each row."""
    over_axes = {keras.losses.dice: "Dice", keras.losses.tversky: "Tversky"}.get(getattr(loss, "fn", None))
    if over_axes is None:
        return "Return one loss per row (for example keras.ops.mean(..., axis=-1))"
    axes = tuple(range(1, y_pred.shape.rank or 2))
    return f"It is no mean: take it over each row with keras.losses.{over_axes}(axis={axes if len(axes) > 1 else -1})"


class GlobalLoss(keras.losses.Loss):
    """Wraps a loss so that it returns this replica's share of the loss of the global batch.

    With `"sum_over_batch_size"` and `"mean"` the denominator is the number of entries (or, under a
    mask, of valid entries) of the whole global batch; with `"mean_with_sample_weight"` it is the
    sum of the weights of the whole global batch. The formulas are those of
    `keras.losses.Loss`, with sums over all replicas.

    Args:
        loss: The `keras.losses.Loss` to wrap; it stays as it is.
        sees_whole: Whether a loss that is not known to be a number per row is given the rows of all
            replicas, or this replica's alone.
    """

    def __init__(self, loss, sees_whole=True):
        super().__init__(name=loss.name, reduction=loss.reduction)
        self.wrapped = loss
        self._by_row = {}
        self._apart = RowsApart(loss.call)
        self._sees_whole = sees_whole

    def __call__(self, y_true, y_pred, sample_weight=None):
        part = current_part()
        if part is None or part.alone:
            return self.wrapped(y_true, y_pred, sample_weight)
        part.marks.add("global loss")
        if part.strategy.num_replicas_in_sync == 1:
            return mark_as_share(self.wrapped(y_true, y_pred, sample_weight))
        if self._sees_whole and sees_a_part() and not self._is_by_row(y_true, y_pred):
            return mark_as_share(loss_of_whole(self.wrapped, y_true, y_pred, sample_weight))
        if may_be_empty() and internals.mask_of(y_pred) is None:
            y_true, y_pred = keras.tree.map_structure(with_a_row, (y_true, y_pred))
            sample_weight = sample_weight if sample_weight is None or is_scalar(sample_weight) else with_a_row(sample_weight)
        total, values, by_row = self._sum(y_true, y_pred, sample_weight)
        if not by_row:
            return self._share_of_whole(y_true, y_pred, sample_weight, values)
        if self.wrapped.reduction in _MEANS:
            total = tf.math.divide_no_nan(total, self._denominator(values, _mask(y_pred, values), sample_weight, total.dtype))
        elif self.wrapped.reduction != "sum":
            return self.wrapped(y_true, y_pred, sample_weight)[: part.rows]
        if may_be_empty():
            total = tf.where(part.rows > 0, total, tf.zeros_like(total))
        return mark_as_share(total)

    def _is_by_row(self, y_true, y_pred):
        return is_loss_of_keras(self.wrapped) or self._apart(y_true, y_pred)

    def _sum(self, y_true, y_pred, sample_weight):
        """The weighted sum over the local entries, the entries, and whether there are some for each row."""
        seen = []
        summed = object.__new__(type(self.wrapped))  # copy.copy would go through the config and lose functions
        vars(summed).update(vars(self.wrapped), reduction="sum")

        def call(y_true, y_pred):
            seen[:] = self.wrapped.call(y_true, y_pred), (y_true, y_pred)
            return seen[0]

        summed.call = call
        total = tf.reduce_sum(summed(y_true, y_pred, sample_weight))  # Keras leaves a loss of no rows as it is
        values = tf.convert_to_tensor(seen[0]) if seen else None
        return total, values, values is not None and is_by_row(self.wrapped.call, seen[1], values, self._by_row)

    def _denominator(self, values, mask, sample_weight, dtype):
        if self.wrapped.reduction == "mean_with_sample_weight" and (sample_weight is not None or mask is not None):
            if mask is None and is_scalar(sample_weight):
                return tf.cast(sample_weight, dtype)  # the batch's weight, which every replica has
            return _global_sum_over_rows(tf.cast(_weight_sum(sample_weight, mask, dtype), dtype))
        if mask is None:
            return global_size(values, dtype)
        # Keras weighs a valid entry with size(mask) / valid and divides by size(values).
        valid = _global_sum_over_rows(tf.reduce_sum(tf.cast(mask, dtype)))
        return valid * tf.math.divide_no_nan(tf.cast(tf.size(values), dtype), tf.cast(tf.size(mask), dtype))

    def _share_of_whole(self, y_true, y_pred, sample_weight, values):
        name = self.wrapped.name
        shape = f"numbers of shape {values.shape}" if values is not None and values.shape.rank else "one number"
        warn_once(
            ("scalar loss", name, code_of(getattr(self.wrapped, "fn", self.wrapped.call))),
            f"The loss {name!r} returns {shape} for a batch instead of one per row, so it cannot be told if that is a mean; "
            "it is weighed by each replica's share of the rows, which is right for a mean over rows. "
            f"{_loss_per_row(self.wrapped, y_pred)} to be exact.",
            code="KM204",
        )
        value, part = self.wrapped(y_true, y_pred, sample_weight), current_part()
        if values is not None and values.shape.rank and self.wrapped.reduction in _MEANS:
            value *= part.strategy.num_replicas_in_sync  # which Keras divided by
        return mark_as_share(tf.math.multiply_no_nan(value, part.share(value.dtype)))

    def get_config(self):
        return self.wrapped.get_config()


def is_scalar(sample_weight):
    """Whether a sample weight is one number for the whole batch."""
    return sample_weight is not None and len(sample_weight.shape) == 0


def _global_sum_over_rows(value):
    """`global_sum` of what was added up over rows: the row that stands in for none may look like one, and counts nothing."""
    return global_sum(tf.where(current_part().rows > 0, value, tf.zeros_like(value)) if may_be_empty() else value)


def _mask(y_pred, values):
    masks = [mask for mask in (internals.mask_of(y_pred), internals.mask_of(values)) if mask is not None]
    return masks[0] if len(masks) < 2 and masks else (masks[0] & masks[1] if masks else None)


def _weight_sum(sample_weight, mask, dtype):
    """Sum of the weights as Keras merges them with a mask: equal ranks by a last dimension of one."""
    if mask is not None:
        mask = tf.cast(mask, dtype)
    if sample_weight is None:
        return tf.reduce_sum(mask)
    weight = tf.cast(sample_weight, dtype)
    if mask is None:
        return tf.reduce_sum(weight)
    if weight.shape.rank == mask.shape.rank + 1:
        weight = tf.squeeze(weight, -1) if mask.shape.rank > 1 else weight
        mask = mask if weight.shape.rank == mask.shape.rank else mask[..., None]
    elif mask.shape.rank == weight.shape.rank + 1:
        weight = weight[..., None]
    return tf.reduce_sum(weight * mask)
