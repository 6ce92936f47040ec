"""`observe`: rows and scope of a loop that is entirely the user's."""

import contextlib

import keras

from keras_mirror import internals
from keras_mirror.engine import engine_of
from keras_mirror.errors import warn_once
from keras_mirror.global_batches import GlobalBatchStrategy


@contextlib.contextmanager
def observe(model_or_strategy, callbacks=()):
    """Lets callbacks see a loop over `strategy.run` that knows nothing of them.

    For the length of the `with` block, which the callbacks take as one epoch, every
    `strategy.run`, eager or inside a `tf.function`, is counted and audited:

    >>> logger = km.ReplicaBatchLogger()
    >>> with km.observe(model, callbacks=[logger, km.ScopeAuditor()]):
    ...     for batch in strategy.experimental_distribute_dataset(data):
    ...         strategy.run(step, args=(batch,))
    >>> print(logger.report())

    Costs nothing per step: the rows are counted anyway. A `ScopeAuditor` traces an eager step once
    more to see which variables it uses.

    Args:
        model_or_strategy: A model made in the scope of a `keras_mirror.MirroredStrategy`, or the
            strategy itself.
        callbacks: List of Keras callbacks. They get `on_train_begin`, `on_epoch_begin(0)`,
            `on_epoch_end(0)` and `on_train_end`; the loop has no batches that they could know of.

    Yields:
        The `keras.Model` that the callbacks were given.

    Raises:
        TypeError: If it is neither a model nor a strategy of this package.
    """
    model, strategy = _model_and_strategy(model_or_strategy)
    before = _iterations(model)
    runs_before = strategy.runs
    callback_list = keras.callbacks.CallbackList(list(callbacks), model=model, epochs=1, steps=None, verbose=0)
    callback_list.on_train_begin()
    callback_list.on_epoch_begin(0)
    try:
        yield model
        callback_list.on_epoch_end(0, {})
        if before is not None and strategy.runs > runs_before and _iterations(model) == before:
            warn_once(
                ("nothing moved", id(model)),
                "observe: the steps never moved model.optimizer.iterations, so the model's optimizer was not applied; end the step "
                "with model.optimizer.apply(gradients, model.trainable_variables).",
                code="KM208",
            )
    except Exception:
        # AutoGraph replaces an exception that is raised while it traces by one of its own.
        for callback in callbacks:
            if getattr(callback, "violation", None) is not None:
                raise callback.violation from None
        raise
    finally:
        callback_list.on_train_end({})


def _model_and_strategy(given):
    if isinstance(given, GlobalBatchStrategy):
        with given.scope():
            stand_in = keras.Sequential(name="observed")
        internals.set_training_strategy(stand_in, given)
        return stand_in, given
    strategy = internals.training_strategy(given) if isinstance(given, keras.Model) else None
    if not isinstance(strategy, GlobalBatchStrategy):
        raise TypeError(
            f"observe: expected a keras_mirror.MirroredStrategy or a model made in its scope, and got {type(given).__name__}; "
            "build the model with keras_mirror.mirrored_model(build_fn)."
        )
    engine = engine_of(given)
    if engine is not None:
        engine.prepare()
    return given, strategy


def _iterations(model):
    optimizer = getattr(model, "optimizer", None)
    return None if optimizer is None else int(keras.ops.convert_to_numpy(optimizer.iterations))
