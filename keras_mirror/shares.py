"""What a compiled model computes as its loss on a replica: a share of the loss of the global batch."""

import inspect
import types

import keras
import tensorflow as tf

from keras_mirror import internals
from keras_mirror.errors import warn_once
from keras_mirror.layer_losses import adds_up_over_rows, has_entries_of_rows
from keras_mirror.losses import as_share, is_share, mark_as_share
from keras_mirror.rows import current_part
from keras_mirror.user_code import code_of


class LossShares:
    """Methods that shadow those of a compiled model's class; see `of`.

    Attributes:
        model: The model.
    """

    def __init__(self, model, built):
        self.model = model
        self._built = built

    @classmethod
    def of(cls, model, built, nested):
        """Lets a compiled model compute its share of the loss on a replica, if it does not yet.

        Args:
            model: A compiled Keras model.
            built: Called without arguments when a step was the first to build the compiled losses.
            nested: Whether the model is part of the one that is trained. The outer one's logs are read
                once for all replicas; those of a nested one are read in the step.
        """
        if "compute_loss" in vars(model):
            return
        shares = cls(model, built)
        names = ("compute_loss", "_aggregate_additional_loss", *(("get_metrics_result",) if nested else ()))
        for name in names:
            internals.set_attribute(model, name, getattr(shares, name))

    @tf.autograph.experimental.do_not_convert
    def get_metrics_result(self):
        """`keras.Model.get_metrics_result`; on a replica, the results over all replicas."""
        own = type(self.model).get_metrics_result
        if current_part() is None or current_part().alone:
            return own(self.model)
        return tf.distribute.get_replica_context().merge_call(lambda strategy: own(self.model))

    def compute_loss(self, *args, **kwargs):
        """`keras.Model.compute_loss`; on a replica, its share of the loss of the global batch."""
        part = current_part()
        own = type(self.model).compute_loss
        if part is None:
            return own(self.model, *args, **kwargs)
        if internals.compile_loss(self.model) is not None and not internals.compiled_losses(self.model):
            self._build_losses(own, args, kwargs)
        if part.alone:
            return own(self.model, *args, **kwargs)
        before = set(part.marks)
        part.marks.discard("global loss")
        loss = own(self.model, *args, **kwargs)
        by_hand = own is not keras.Model.compute_loss and ("global loss" not in part.marks or not is_share(loss))
        if by_hand and (tf.is_symbolic_tensor(loss) or "global loss" not in part.marks):
            loss = as_share(loss)
            if part.strategy.num_replicas_in_sync > 1:
                warn_once(
                    ("own loss", type(self.model).__qualname__, code_of(types.MethodType(own, self.model))),
                    f"{type(self.model).__name__}.compute_loss computes a loss by hand; keras_mirror weighs it by each replica's "
                    "share of the rows, which is right for a mean over rows. To be exact for anything else, build it from "
                    "keras_mirror.global_mean(per_example) or super().compute_loss(...).",
                    code="KM203",
                )
        part.marks |= before
        return mark_as_share(loss)

    def _build_losses(self, own, args, kwargs):
        """Builds the compiled losses when a step of the user's own is the first to call them."""
        given = inspect.signature(own).bind(self.model, *args, **kwargs).arguments

        def build(strategy, y, y_pred):
            if not internals.compiled_losses(self.model):
                with tf.init_scope():
                    y, y_pred = (
                        tf.nest.map_structure(lambda leaf: strategy.experimental_local_results(leaf)[0], each)
                        for each in (y, y_pred)
                    )
                    internals.compile_loss(self.model).build(y, y_pred)
                self._built()

        tf.distribute.get_replica_context().merge_call(build, (given.get("y"), given.get("y_pred")))

    def _aggregate_additional_loss(self, loss):
        """The share of a regulariser or an `add_loss` on this replica."""
        if not loss.dtype.is_floating:
            loss = tf.cast(loss, keras.config.floatx())
        part, total = current_part(), tf.reduce_sum(loss)
        if part is None or part.alone:
            return total
        part.marks.add("global loss")
        if not is_share(loss):
            share, adds_up = part.share(total.dtype), any(loss is own for own in self._sums_over_rows())
            total = tf.math.multiply_no_nan(total, tf.cast(share > 0, total.dtype) if adds_up else share)
        return mark_as_share(total)

    def _sums_over_rows(self):
        """Losses of activity regularisers that add up over rows, as L1 and L2 do, and those with an entry for each row."""
        for layer in internals.layers_of(self.model):
            regularizer = getattr(layer, "activity_regularizer", None)
            adds_up = regularizer is not None and adds_up_over_rows(regularizer)
            yield from (loss for loss in internals.own_losses(layer) if adds_up or has_entries_of_rows(loss))
