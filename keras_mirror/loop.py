"""`TrainingLoop`: the loop in the user's hands, with the steps, data and callbacks of `fit`."""

import keras
import tensorflow as tf

from keras_mirror import internals
from keras_mirror.engine import engine_of
from keras_mirror.errors import warn_once
from keras_mirror.progress import arrange


class TrainingLoop:
    """A training loop of one's own that runs the step, the callbacks and the data path of `fit`.

    By hand, one batch after the other:

    >>> loop = km.TrainingLoop(model, callbacks=[km.ReplicaBatchLogger()])
    >>> for epoch in loop.epochs(5):
    ...     for batch in loop.batches(train_data):
    ...         logs = loop.train_step(batch)
    ...     loop.evaluate(val_data)

    or whole, many steps in one graph call where no callback looks at batches:

    >>> history = loop.run(train_data, epochs=5, validation_data=val_data)

    Every Keras callback works in both. Leaving the loop by `break`, by an exception or with Ctrl-C
    still calls `on_train_end` (but for `BackupAndRestore`, whose backup would be deleted), and an
    epoch whose batches had all been trained still ends with `on_epoch_end`.

    Args:
        model: A model of `mirrored_model`, compiled.
        callbacks: List of Keras callbacks. Pass a `keras.callbacks.ProgbarLogger` for a progress bar
            by hand; `run` shows one as `fit` does.

    Attributes:
        history: The `keras.callbacks.History` of the last run.

    Raises:
        TypeError: If `model` was not built by `mirrored_model`.
    """

    def __init__(self, model, callbacks=()):
        if engine_of(model) is None:
            raise TypeError(
                f"TrainingLoop: expected a model of keras_mirror.mirrored_model(build_fn), and got {type(model).__name__}; "
                "build it with mirrored_model, which also compiles it in scope."
            )
        self.model = model
        self.callbacks = list(callbacks)
        self.history = None
        self._list = None  # Keras' CallbackList, between on_train_begin and on_train_end
        self._iterators = {}
        self._epoch = None  # the number of the epoch, between on_epoch_begin and on_epoch_end

    # --- whole ------------------------------------------------------------------------------

    def run(
        self,
        train_data,
        epochs=1,
        *,
        batch_size=None,
        validation_data=None,
        validation_steps=None,
        steps_per_epoch=None,
        initial_epoch=0,
        verbose="auto",
    ):
        """Trains for some epochs, as `model.fit` does: it is the same code.

        Args:
            train_data: Anything that `fit` takes as `x` (`tf.data.Dataset`, `PyDataset`, generator), or
                a tuple of arrays `(x, y)` or `(x, y, sample_weight)`.
            epochs: int, the epoch to stop before.
            batch_size: Rows of a global batch, for arrays.
            validation_data: As `train_data`, or None.
            validation_steps: int or None, as in `fit`.
            steps_per_epoch: int or None, as in `fit`.
            initial_epoch: int, the epoch to start at.
            verbose: As in `fit`.

        Returns:
            A `keras.callbacks.History`.
        """
        x, y, sample_weight = _arrays(train_data)
        begun = _Begun()
        try:
            self.history = self.model.fit(
                x,
                y,
                sample_weight=sample_weight,
                batch_size=batch_size,
                epochs=epochs,
                validation_data=validation_data,
                validation_steps=validation_steps,
                steps_per_epoch=steps_per_epoch,
                initial_epoch=initial_epoch,
                verbose=verbose,
                shuffle=not isinstance(x, tf.data.Dataset),  # Keras warns that it cannot shuffle one
                callbacks=[*self.callbacks, begun],
            )
        except BaseException:
            if begun.training:
                _end(engine_of(self.model).callbacks_here(self.callbacks), None)
            raise
        return self.history

    # --- by hand ----------------------------------------------------------------------------

    def epochs(self, epochs, initial_epoch=0):
        """Yields the numbers of the epochs, and calls the callbacks around each.

        Args:
            epochs: int, the epoch to stop before.
            initial_epoch: int, the epoch to start at; a restored backup overrides it.
        """
        model = self.model
        self._list = keras.callbacks.CallbackList(
            arrange(engine_of(model).callbacks_here(self.callbacks), 0),
            add_history=True,
            model=model,
            verbose=1,
            epochs=epochs,
            steps=None,
        )
        self.history = model.history
        model.stop_training = False
        model.make_train_function()
        self._logs, self._ran, finished = {}, False, False
        begun = _steps_of(model)
        engine = engine_of(model)
        engine.epoch_iterator, engine.data_listener, engine.resumed_logs = None, None, {}  # the data comes with `batches`
        self._list.on_train_begin()
        try:
            for epoch in range(internals.restored_epoch(model) or initial_epoch, epochs):
                self._begin_epoch(epoch)
                yield epoch
                self._end_epoch()
                if model.stop_training:
                    break
            finished = True
        finally:
            self._finish(finished, begun)

    def _begin_epoch(self, epoch):
        self.model.reset_metrics()
        self._epoch, self._step, self._complete = epoch, 0, False
        self._logs, self._validation = {}, {}
        self._list.on_epoch_begin(epoch)

    def _end_epoch(self):
        logs = self._train_logs if self._validation else dict(internals.metrics_or_logs(self.model, self._logs))
        epoch, self._epoch = self._epoch, None
        self._logs = {**logs, **self._validation}
        self._list.on_epoch_end(epoch, self._logs)

    def _finish(self, finished, steps_before):
        try:
            if not finished and self._epoch is not None and self._complete:
                self._end_epoch()
            if finished and self.model.optimizer is not None:
                self.model.optimizer.finalize_variable_values(self.model.trainable_weights)
            self._warn_if_nothing_moved(steps_before)
        finally:
            callbacks, self._list, self._epoch = self._list, None, None
            if finished:
                callbacks.on_train_end(self._logs)
            else:
                _end(callbacks.callbacks, self._logs)

    def _warn_if_nothing_moved(self, steps_before):
        if self._ran and steps_before is not None and _steps_of(self.model) == steps_before:
            warn_once(
                ("nothing moved", id(self.model)),
                "TrainingLoop: the steps never moved model.optimizer.iterations, so the optimizer was not applied; end the step "
                "with model.optimizer.apply(gradients, model.trainable_variables).",
                code="KM208",
            )

    def batches(self, data, *, batch_size=None, steps_per_epoch=None, shuffle=False, class_weight=None):
        """Yields the global batches of one epoch, distributed.

        The same `data` object goes on where the last epoch stopped, as in `fit`.

        Args:
            data: As `train_data` of `run`.
            batch_size: Rows of a global batch, for arrays.
            steps_per_epoch: int or None, as in `fit`.
            shuffle: As in `fit`, for arrays; the default here is not to.
            class_weight: As in `fit`.

        Raises:
            RuntimeError: Outside of `for epoch in loop.epochs(n)`.
        """
        self._check_inside("batches")
        key = id(data) if not isinstance(data, tuple) else tuple(id(each) for each in data)
        if key not in self._iterators:
            x, y, sample_weight = _arrays(engine_of(self.model).strategy.undistributed(data))
            iterator = internals.epoch_iterator(self.model, x, y, sample_weight, batch_size, steps_per_epoch, shuffle, class_weight)
            engine_of(self.model)._maybe_symbolic_build(iterator=iterator)
            iterator.reset()
            if engine_of(self.model).data_listener is not None:
                engine_of(self.model).data_listener(iterator)
            self._iterators[key] = (iterator, data)  # the data, too, so that its id stays its own
        iterator, _ = self._iterators[key]
        self._list.set_params({**self._list.params, "steps": iterator.num_batches})
        self._step, begun = 0, False
        with iterator.catch_stop_iteration():
            for first, *_, batches in iterator:
                self._step, begun = self._step if begun else first, True  # a resumed epoch begins in its middle
                with engine_of(self.model).timers["train"].waiting():
                    batch = next(batches)
                yield batch
                if self.model.stop_training:
                    break
        self._complete = True

    def train_step(self, batch):
        """Runs one step of every replica on a global batch, and calls the callbacks around it.

        Args:
            batch: A batch of `batches`, or a global batch of tensors or arrays, which is split.

        Returns:
            The logs: a dict of name to scalar tensor.

        Raises:
            RuntimeError: Outside of `for epoch in loop.epochs(n)`.
        """
        self._check_inside("train_step")
        engine_of(self.model).build_from(batch)
        self._list.on_train_batch_begin(self._step)
        self._logs = self.model.train_function.run_batch(batch)
        self._list.on_train_batch_end(self._step, self._logs)
        self._step += 1
        self._ran = True
        return self._logs

    def evaluate(self, data, *, batch_size=None, steps=None):
        """Evaluates, as `model.evaluate`; within an epoch the results go into its logs as `val_...`.

        Args:
            data: As `train_data` of `run`.
            batch_size: Rows of a global batch, for arrays.
            steps: int or None, as in `model.evaluate`.

        Returns:
            The results: a dict of name to float.
        """
        x, y, sample_weight = _arrays(data)
        inside = self._epoch is not None
        if inside:
            self._train_logs = keras.tree.map_structure(float, dict(internals.metrics_or_logs(self.model, self._logs)))
        results = self.model.evaluate(
            x,
            y,
            sample_weight=sample_weight,
            batch_size=batch_size,
            steps=steps,
            verbose=0,
            callbacks=self._list if inside else self.callbacks,
            return_dict=True,
        )
        if inside:
            self._validation = {f"val_{name}": value for name, value in results.items()}
        return results

    def _check_inside(self, method):
        if self._epoch is None:
            raise RuntimeError(
                f"TrainingLoop.{method}: call it inside `for epoch in loop.epochs(n):`, so that the callbacks know of the epoch."
            )


class _Begun(keras.callbacks.Callback):
    """Knows whether training has begun, so that it can be ended."""

    async_safe = True
    every_batch = False
    training = False

    def on_train_begin(self, logs=None):
        self.training = True


def _end(callbacks, logs):
    """Ends an interrupted training; a backup is kept, as it is what the run goes on from."""
    for callback in callbacks:
        if not isinstance(callback, keras.callbacks.BackupAndRestore):
            callback.on_train_end(logs)


def _arrays(data):
    if isinstance(data, (tuple, list)):
        return keras.utils.unpack_x_y_sample_weight(tuple(data))
    return data, None, None


def _steps_of(model):
    return None if model.optimizer is None else int(keras.ops.convert_to_numpy(model.optimizer.iterations))
