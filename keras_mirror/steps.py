"""What one replica does with its part: Keras' own train and test step, with global denominators."""

import functools

import keras
import tensorflow as tf

from keras_mirror import internals
from keras_mirror.by_row import RowsApart, is_by_row, is_function_of_keras
from keras_mirror.empty_parts import is_stand_in, may_be_empty
from keras_mirror.losses import global_size, is_scalar, is_share
from keras_mirror.rows import current_part
from keras_mirror.view_steps import sees_a_part, update_with_whole


def default_train_step(model, data):
    """`keras.Model.train_step` on one replica: loss, gradients, update, metrics.

    It differs from Keras' in two places: the log `loss` weighs each batch by its global rows, and
    the metrics' results are read once for all replicas by the caller, not here.

    Args:
        model: A compiled model of `mirrored_model`.
        data: `(x, y, sample_weight)` of this replica, as `keras.Model.train_step` takes it.

    Returns:
        An empty dict, or what an own `compute_metrics` of the model returned.
    """
    x, y, sample_weight = keras.utils.unpack_x_y_sample_weight(data)
    with tf.GradientTape() as tape:
        y_pred = internals.call_with_training(model, x, True)
        loss = internals.model_loss(model, x=x, y=y, y_pred=y_pred, sample_weight=sample_weight, training=True)
        record_loss(model, loss)
        scaled = loss if model.optimizer is None else model.optimizer.scale_loss(loss)
    variables = model.trainable_weights
    if variables:
        gradients = tape.gradient(scaled, variables)
        model.optimizer.apply_gradients(zip(gradients, variables))
    return update_metrics(model, x, y, y_pred, sample_weight)


def default_test_step(model, data):
    """`keras.Model.test_step` on one replica; see `default_train_step`."""
    x, y, sample_weight = keras.utils.unpack_x_y_sample_weight(data)
    y_pred = internals.call_with_training(model, x, False)
    loss = internals.model_loss(model, x=x, y=y, y_pred=y_pred, sample_weight=sample_weight, training=False)
    record_loss(model, loss)
    return update_metrics(model, x, y, y_pred, sample_weight)


def record_loss(model, loss):
    """Adds this replica's share of the loss to the log `loss`, as Keras' own steps do; see `weigh_by_global_rows`."""
    part = current_part()
    if part.alone:
        internals.loss_tracker(model).update_state(loss, sample_weight=tf.cast(part.global_rows, "float32"))
    else:
        internals.loss_tracker(model).update_state(loss * part.strategy.num_replicas_in_sync)


def weigh_by_global_rows(tracker, mark="loss recorded"):
    """Makes Keras' tracker of the loss weigh each batch by its global rows.

    Keras' steps give it the local loss times the number of replicas, R. Over the replicas the
    shares add up to the global loss L and the weights B / R to the global rows B, so the mean over
    steps is the sum of L * B over the sum of B, as on one device.

    Args:
        tracker: The tracker, or None.
        mark: What a step that updates it is marked with, or None.
    """
    if tracker is None or "update_state" in vars(tracker):
        return

    def update_state(values, sample_weight=None):
        part = current_part()
        if part is not None:
            part.marks.update([mark] if mark else [])
        if part is not None and not part.alone:
            if values.shape.rank:  # with reduction=None there is one loss per row
                values = tf.math.divide_no_nan(tf.reduce_sum(values), global_size(values, values.dtype))
            sample_weight = tf.cast(part.global_rows, "float32") / part.strategy.num_replicas_in_sync
        return type(tracker).update_state(tracker, values, sample_weight=sample_weight)

    internals.set_attribute(tracker, "update_state", update_state)


def weigh_outputs_by_global_rows(tracker):
    """Makes Keras' tracker of one of several losses weigh each batch by its global rows, where Keras weighs it at all.

    Keras does so in eager steps and for batches of one size, where it knows the number of rows; on a replica it would
    take the local one.
    """
    if "update_state" in vars(tracker):
        return

    def update_state(values, sample_weight=None):
        part = current_part()
        if part is not None and not part.alone and sample_weight is not None:
            sample_weight = tf.cast(part.global_rows, "float32") / part.strategy.num_replicas_in_sync
        return type(tracker).update_state(tracker, values, sample_weight=sample_weight)

    internals.set_attribute(tracker, "update_state", update_state)


def check_predictions(name, outputs):
    """The outputs of a `predict_step`, each with rows.

    Raises:
        ValueError: If one is a number for a batch, of which every replica has another.
    """
    replicas = 1 if current_part() is None else current_part().strategy.num_replicas_in_sync
    if replicas > 1 and any(isinstance(leaf, tf.Tensor) and leaf.shape.rank == 0 for leaf in tf.nest.flatten(outputs)):
        raise ValueError(
            f"{name} returns one number for a batch. Each of the {replicas} replicas has one for its own rows, so predict would "
            f"return {replicas} numbers for a batch. Return a number for each row, and reduce what predict returns: "
            "numpy.mean(model.predict(...)); or make it a metric, and call evaluate."
        )
    return outputs


def update_metrics(model, x, y, y_pred, sample_weight):
    """Updates the compiled metrics, or calls the model's own `compute_metrics`."""
    if type(model).compute_metrics is not keras.Model.compute_metrics:
        return model.compute_metrics(x, y, y_pred, sample_weight=sample_weight)
    metrics = internals.compile_metrics(model)
    if metrics is not None:
        metrics.update_state(y, y_pred, sample_weight)
    return {}


def build_when_updated(metrics, built):
    """Lets Keras' container of the compiled metrics be built by a step of the user's own that is the first to update it.

    Args:
        metrics: The container, or None.
        built: Called without arguments once it is built.
    """
    if metrics is None or metrics.built or "update_state" in vars(metrics):
        return

    def build(strategy, y, y_pred):
        if not metrics.built:
            local = strategy.experimental_local_results
            with tf.init_scope():
                metrics.build(*(tf.nest.map_structure(lambda leaf: local(leaf)[0], each) for each in (y, y_pred)))
            built()

    def update_state(y_true, y_pred, sample_weight=None):
        if not metrics.built and current_part() is not None:
            tf.distribute.get_replica_context().merge_call(build, (y_true, y_pred))
        return type(metrics).update_state(metrics, y_true, y_pred, sample_weight=sample_weight)

    internals.set_attribute(metrics, "update_state", update_state)


def track_shares_as_losses(metric):
    """Lets a `Mean` that is given this replica's share of the loss track the loss itself, anything else where there are rows."""
    if "update_state" in vars(metric):
        return

    def update_state(values, sample_weight=None):
        if not current_part_is_whole() and is_share(values):
            values = values * current_part().strategy.num_replicas_in_sync
            return type(metric).update_state(metric, values, sample_weight=sample_weight)
        return _kept_without_rows(metric, lambda: type(metric).update_state(metric, values, sample_weight=sample_weight))

    internals.set_attribute(metric, "update_state", update_state)


def current_part_is_whole():
    """Whether the running code has the whole batch, as on one device."""
    part = current_part()
    return part is not None and part.alone


def keep_without_rows(metric, sees_whole=True):
    """Leaves a metric as it was where a replica has no rows: one of the user's own class, of which a mean is NaN, and any in a
    layer that runs on a row of zeros then."""
    if getattr(metric, "_keras_mirror_keeps", False):
        return
    own, of_keras = metric.update_state, _is_of_keras(metric) or "update_state" in vars(metric)

    def update_state(*args, **kwargs):
        if (of_keras and not is_stand_in()) or current_part_is_whole():
            return own(*args, **kwargs)
        if sees_whole and not of_keras and sees_a_part():
            return update_with_whole(metric, lambda args, kwargs: own(*args, **kwargs), args, kwargs)
        return _kept_without_rows(metric, lambda: own(*args, **kwargs))

    internals.set_attribute(metric, "update_state", update_state)
    internals.set_attribute(metric, "_keras_mirror_keeps", True)


def _kept_without_rows(metric, update):
    if not may_be_empty():
        return update()
    before = [tf.identity(variable) for variable in metric.variables]
    result = update()
    for variable, value in zip(metric.variables, before):
        variable.assign(tf.where(current_part().rows > 0, variable, value))
    return result


def weigh_wholes_by_rows(metric, sees_whole=True):
    """Lets a mean of Keras' weigh what stands for a batch, not for its rows, by the replica's rows.

    That is what a function returned, or a batch's only sample weight. One device counts each batch
    once. The replicas count it once together: each as much as its share of the rows, and a replica
    without rows, whose number may be NaN, not at all.
    """
    of_function = type(metric) is keras.metrics.MeanMetricWrapper
    means = isinstance(metric, keras.metrics.Mean) and type(metric) is not keras.metrics.Mean
    if not means or not _is_of_keras(metric) or "update_state" in vars(metric):
        return
    known, apart = {}, RowsApart(functools.partial(internals.metric_values, metric))

    def sees_rows_of_all(y_true, y_pred):
        by_row = is_function_of_keras(internals.function_of_metric(metric)) or apart(y_true, y_pred)
        return not by_row

    def wholes(y_true, y_pred):
        values = tf.convert_to_tensor(internals.metric_values(metric, y_true, y_pred))
        by_row = is_by_row(functools.partial(internals.metric_values, metric), (y_true, y_pred), values, known)
        return None if by_row else values

    def update_state(y_true, y_pred, sample_weight=None):
        if current_part_is_whole():
            return type(metric).update_state(metric, y_true, y_pred, sample_weight=sample_weight)
        if of_function and sees_whole and sees_a_part() and sees_rows_of_all(y_true, y_pred):
            return update_with_whole(metric, functools.partial(type(metric).update_state, metric), y_true, y_pred, sample_weight)
        part = current_part()
        scalar = part is not None and is_scalar(sample_weight)
        share = 1.0 if part is None else part.share("float32") * (tf.cast(sample_weight, "float32") if scalar else 1.0)
        values = wholes(y_true, y_pred) if part is not None and of_function else None
        if values is not None:
            values = tf.where(part.rows > 0, tf.cast(values, "float32"), tf.zeros_like(values, "float32"))
            return keras.metrics.Mean.update_state(metric, values, sample_weight=share)
        update = functools.partial(type(metric).update_state, metric, y_true, y_pred)
        if scalar:
            return _kept_without_rows(metric, lambda: update(sample_weight=share))
        return update(sample_weight=sample_weight)

    internals.set_attribute(metric, "update_state", update_state)


def _is_of_keras(metric):
    return type(metric).__module__.split(".")[0] == "keras"
