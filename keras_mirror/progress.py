"""The order of callbacks and the progress bar of a model whose replicas log their rows."""

import keras

# Keys of logs that stand on a line of their own.
_NOT_IN_THE_BAR = ("replica_", "examples_per_second", "val_examples_per_second", "seconds_per_step", "waiting_share")


class ReplicaProgbarLogger(keras.callbacks.ProgbarLogger):
    """Keras' progress bar, with the steps that a call really ran, and the replicas' rows on a line of their own.

    Args:
        loggers: Callbacks with a method `line()`, printed at the end of each epoch.
    """

    every_batch = False

    def __init__(self, loggers=()):
        super().__init__()
        self._loggers = loggers

    def on_train_batch_begin(self, batch, logs=None):
        self._first = batch

    def on_train_batch_end(self, batch, logs=None):
        # Keras tells the last step that was asked for; where data ends earlier than known, fewer were run.
        ran = getattr(self.model.train_function, "steps_of_last_call", 0)
        super().on_train_batch_end(self._first + ran - 1 if ran else batch, _without_replicas(logs))

    def on_epoch_end(self, epoch, logs=None):
        super().on_epoch_end(epoch, _without_replicas(logs))
        if self.verbose:
            for logger in self._loggers:
                print(logger.line())


def _without_replicas(logs):
    return {name: value for name, value in (logs or {}).items() if not name.startswith(_NOT_IN_THE_BAR)}


def arrange(callbacks, verbose):
    """Puts the loggers first, so that every other callback sees their keys, and their lines last.

    Args:
        callbacks: What `fit` was given: None, a callback, or a list.
        verbose: What `fit` was given.

    Returns:
        A list for `fit`, or `callbacks` itself where there is nothing to arrange.
    """
    if isinstance(callbacks, keras.callbacks.CallbackList):
        callbacks.callbacks.sort(key=lambda callback: not getattr(callback, "adds_replica_logs", False))
        callbacks.callbacks[:] = _last(callbacks.callbacks)
        return callbacks
    flat = keras.tree.flatten(callbacks) if callbacks else []
    if any(hasattr(callback, "others") for callback in flat):
        history = [] if any(isinstance(callback, keras.callbacks.History) for callback in flat) else [keras.callbacks.History()]
        callbacks = flat = _last([*flat, *history])
    loggers = [callback for callback in flat if getattr(callback, "adds_replica_logs", False)]
    if not loggers:
        return callbacks
    others = [callback for callback in flat if not getattr(callback, "adds_replica_logs", False)]
    if verbose != 0 and not any(isinstance(callback, keras.callbacks.ProgbarLogger) for callback in others):
        others.append(ReplicaProgbarLogger(loggers))
    return _last([*loggers, *others])


def _last(callbacks):
    """Those that save what the others count come last, those that a restored backup must find done first.

    Those with an attribute `others` are told of the others.
    """
    for callback in callbacks:
        if hasattr(callback, "others"):
            callback.others = [other for other in callbacks if other is not callback]
    return sorted(callbacks, key=lambda callback: getattr(callback, "comes_last", False) - getattr(callback, "comes_first", False))
