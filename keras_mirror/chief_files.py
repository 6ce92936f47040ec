"""Callbacks that write files, used as on one machine: the chief alone writes, and what it restores reaches all."""

import keras

from keras_mirror import internals

# ModelCheckpoint stays: it writes through `model.save` and `model.save_weights`, which only the chief's model has.
CHIEF_ONLY = (keras.callbacks.BackupAndRestore, keras.callbacks.CSVLogger, keras.callbacks.TensorBoard)


class FollowChief(keras.callbacks.Callback):
    """After a backup was restored on the chief: the same weights, optimizer and epoch on every worker.

    Args:
        engine: The model's engine.
    """

    async_safe = True
    every_batch = False

    def __init__(self, engine):
        super().__init__()
        self._engine = engine

    def on_train_begin(self, logs=None):
        strategy, model = self._engine.strategy, self.model
        if model.optimizer is not None and not model.optimizer.built:
            with strategy.building():
                model.optimizer.build(model.trainable_variables)
        epoch = strategy.chiefs(internals.restored_epoch(model), "restoring a backup")
        if epoch:
            internals.set_initial_epoch(model, epoch)
            strategy.broadcast([*self._engine.weights(), *(model.optimizer.variables if model.optimizer is not None else ())])


def on_this_worker(callbacks, engine):
    """The callbacks that this worker calls, of those that every worker was given.

    Args:
        callbacks: None, a callback, a list, or a `CallbackList`, which is changed in place.
        engine: The model's engine.
    """
    if isinstance(callbacks, keras.callbacks.CallbackList):
        callbacks.callbacks[:] = on_this_worker(callbacks.callbacks, engine)
        return callbacks
    arranged = []
    for callback in keras.tree.flatten(callbacks) if callbacks else []:
        if engine.strategy.is_chief or not isinstance(callback, CHIEF_ONLY):
            arranged.append(callback)
        if isinstance(callback, keras.callbacks.BackupAndRestore):
            arranged.append(FollowChief(engine))
    return arranged
