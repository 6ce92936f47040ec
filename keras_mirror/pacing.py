"""How many steps `fit` runs in one graph call, so that Python is asked only as often as somebody looks."""

import math

import keras

from keras_mirror.progress import ReplicaProgbarLogger

SECONDS_PER_CALL = 0.1  # a progress bar that moves ten times a second, and Ctrl-C answered as soon
MOST_STEPS = 50

_BATCH_HOOKS = ("on_batch_begin", "on_batch_end", "on_train_batch_begin", "on_train_batch_end")


def looks_at_batches(callback):
    """Whether a callback wants to be called for every batch.

    Keras' own callbacks that have batch hooks but do nothing in them unless asked are known; any
    other callback with a batch hook sees every batch.
    """
    own = getattr(callback, "every_batch", None)
    if own is not None:
        return own
    if type(callback) is keras.callbacks.History:  # a class made of it may look
        return False
    if isinstance(callback, (keras.callbacks.ModelCheckpoint, keras.callbacks.BackupAndRestore)):
        return callback.save_freq != "epoch"
    if isinstance(callback, keras.callbacks.TensorBoard):
        return callback.update_freq != "epoch" or bool(callback.write_steps_per_second)
    return any(
        name in vars(callback) or getattr(type(callback), name) is not getattr(keras.callbacks.Callback, name)
        for name in _BATCH_HOOKS
    )


def with_pace(engine, callbacks, verbose):
    """The callbacks of a `fit` and a `Pace`, if none of them looks at batches, or the callbacks as they are.

    Args:
        engine: The model's engine.
        callbacks: None, a callback, a list, or a `CallbackList`.
        verbose: What `fit` was given.
    """
    model = engine.model
    if isinstance(callbacks, keras.callbacks.CallbackList) or model.steps_per_execution != 1 or model.run_eagerly:
        return callbacks
    flat = keras.tree.flatten(callbacks) if callbacks else []
    if any(looks_at_batches(callback) for callback in flat):
        return callbacks
    shown = not verbose or any(isinstance(callback, keras.callbacks.ProgbarLogger) for callback in flat)
    bar = [] if shown else [ReplicaProgbarLogger()]
    return [Pace(engine, math.gcd(*(getattr(callback, "every_steps", 0) for callback in flat))), *flat, *bar]


class EveryNth:
    """Tells a callback after which calls it has to look, where it looks after every n-th step of an epoch.

    The number that Keras hands to `on_train_batch_end` is that of the last step of a call, in older releases
    that of the first, and the last call of an epoch may have run fewer than asked.

    Args:
        n: int, 0 for never.
    """

    def __init__(self, n):
        self._n = n

    def begin_call(self, batch):
        """A call begins with the step of this number, as `on_train_batch_begin` is told."""
        self._first = batch

    def end_call(self, model):
        """The steps that the call ran, and whether an n-th step was among them."""
        ran = getattr(model.train_function, "steps_of_last_call", model.steps_per_execution)
        return ran, self._n > 0 and (self._first + ran) // self._n > self._first // self._n


class Pace(keras.callbacks.Callback):
    """Lets `fit` run many steps in one call from the second epoch (or the second `fit`) on.

    It measures what a step costs and asks for as many as fit into a tenth of a second. The
    arithmetic is the same; callbacks that look at batches, `run_eagerly` and an own
    `steps_per_execution` rule it out. Callbacks that look after every n-th step say so with an attribute
    `every_steps`, and with `every_batch = False`.

    Args:
        engine: The model's engine.
        divides: int, a number of steps after which a callback looks: calls end there, too; 0 for none.
    """

    async_safe = True
    every_batch = False

    def __init__(self, engine, divides=0):
        super().__init__()
        self._engine = engine
        self._divides = divides

    def on_train_begin(self, logs=None):
        self._iterator = self._engine.epoch_iterator

    @property
    def _executor(self):
        return self.model.train_function

    def on_epoch_begin(self, epoch, logs=None):
        seconds = self._executor.seconds_per_step
        steps = 1 if seconds is None else max(1, min(MOST_STEPS, int(SECONDS_PER_CALL / seconds)))
        steps = next(n for n in range(steps, 0, -1) if self._divides % n == 0)
        self._executor.steps = self._engine.strategy.chiefs(steps, "steps of one call")
        self._announce(0)

    def on_train_batch_begin(self, batch, logs=None):
        total = self.params.get("steps")
        self._executor.limit = None if total is None else total - batch
        self._announce(batch + self._executor.steps)

    def _announce(self, first):
        """Tells Keras how many steps the call will run that begins with this one; it goes by that for all that it counts."""
        left = (self.params.get("steps") or 0) - first
        self._iterator.steps_per_execution = min(self._executor.steps, left) if left > 0 else self._executor.steps

    def on_train_end(self, logs=None):
        self._executor.steps = self._executor.limit = None
