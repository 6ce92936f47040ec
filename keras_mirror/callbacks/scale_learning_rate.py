"""The learning rate of a larger batch: linear or square-root rule, with warm-up."""

import math

import keras

from keras_mirror import internals

_RULES = {"linear": lambda ratio: ratio, "sqrt": math.sqrt}
_SCALED = "_keras_mirror_scaled"  # on an optimizer: the arguments by which its rate was scaled


def scale_learning_rate(from_batch, to_batch, rule="linear", warmup_steps=0):
    """A callback that scales the learning rate to another global batch size, and says the old and the new value.

    A batch that is k times larger takes k times fewer steps; the learning rate is multiplied by k
    (`"linear"`: Goyal et al. 2017, "Accurate, Large Minibatch SGD", section 2.1) or by the square root of k
    (`"sqrt"`: Krizhevsky 2014, "One weird trick for parallelizing convolutional neural networks", section 5).
    With `warmup_steps` it grows from the old to the new value linearly, step by step (Goyal et al., section 2.2):
    optimizer step t uses `old + (new - old) * min(t / warmup_steps, 1)`.

    When training begins, `model.optimizer` gets the new rate; a learning rate schedule is multiplied.
    Warm-up is a function of `optimizer.iterations`, evaluated in the graph, so it costs nothing and goes on
    rightly after `Resume` or `BackupAndRestore`, which give back the scaled rate. An optimizer is scaled once,
    however often `fit` is called, and keeps its rate afterwards. With warm-up the rate is a schedule, so
    callbacks that assign rates (`ReduceLROnPlateau`, `LearningRateScheduler`) cannot be used with it. A model
    whose own schedule was scaled is saved with a class of this package; load it elsewhere with `compile=False`.

    Args:
        from_batch: int, rows of the global batch for which the learning rate was chosen.
        to_batch: int, rows of the global batch now.
        rule: `"linear"` or `"sqrt"`.
        warmup_steps: int, optimizer steps of the warm-up; 0 for none.

    Returns:
        A Keras callback, for `fit` and `TrainingLoop`, with any model.

    Raises:
        ValueError: If a batch size is not positive, the rule or the number of steps is something else; in `fit`, if the
            optimizer was scaled by other arguments before, with one of the callbacks above, or behind a
            `BackupAndRestore` that restored a backup (models of `mirrored_model` put it in front by themselves).

    Example:

    >>> scaling = km.scale_learning_rate(from_batch=256, to_batch=1024, warmup_steps=500)
    >>> model.fit(dataset, epochs=5, callbacks=[scaling])
    scale_learning_rate: 0.1 -> 0.4 (linear rule, global batch 256 -> 1024), from the one to the other over 500 steps
    """
    return ScaledLearningRate(from_batch, to_batch, rule, warmup_steps)


class ScaledLearningRate(keras.callbacks.Callback):
    """What `scale_learning_rate` returns.

    Args:
        from_batch: As there.
        to_batch: As there.
        rule: As there.
        warmup_steps: As there.

    Attributes:
        factor: What the learning rate is multiplied by.
    """

    async_safe = True
    every_batch = False
    comes_first = True  # a backup that is restored afterwards holds the scaled rate

    def __init__(self, from_batch, to_batch, rule, warmup_steps):
        super().__init__()
        for name, value in (("from_batch", from_batch), ("to_batch", to_batch)):
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise ValueError(f"scale_learning_rate: {name} must be a positive number of rows, and got {value!r}.")
        if rule not in _RULES:
            raise ValueError(f"scale_learning_rate: rule must be 'linear' or 'sqrt', and got {rule!r}.")
        if isinstance(warmup_steps, bool) or not isinstance(warmup_steps, int) or warmup_steps < 0:
            raise ValueError(f"scale_learning_rate: warmup_steps must be a number of steps, and got {warmup_steps!r}.")
        self.factor = _RULES[rule](to_batch / from_batch)
        self.others = []  # the other callbacks, told by `fit`
        self._arguments = (from_batch, to_batch, rule, warmup_steps)

    def set_model(self, model):
        super().set_model(model)
        self._epoch_before = internals.restored_epoch(model)

    def on_train_begin(self, logs=None):
        if self.model.optimizer is None:
            raise ValueError("scale_learning_rate: the model has no optimizer; compile it with one.")
        optimizer = getattr(self.model.optimizer, "inner_optimizer", self.model.optimizer)
        before = getattr(optimizer, _SCALED, self._arguments)
        if before != self._arguments:
            raise ValueError(
                f"scale_learning_rate: the learning rate was scaled by {before} before and would now be scaled again by "
                f"{self._arguments}; compile the model again first."
            )
        if not hasattr(optimizer, _SCALED):
            if internals.restored_epoch(self.model) != self._epoch_before:
                raise ValueError(
                    "scale_learning_rate: a backup was restored before it, with a learning rate that was scaled already, so it "
                    "would be scaled twice; put scale_learning_rate before BackupAndRestore in callbacks=[...]."
                )
            self._scale(optimizer)
            internals.set_attribute(optimizer, _SCALED, self._arguments)

    def _scale(self, optimizer):
        from_batch, to_batch, rule, warmup_steps = self._arguments
        schedule, old = internals.learning_rate_schedule(optimizer), float(optimizer.learning_rate.numpy())
        if schedule is None and not warmup_steps:
            optimizer.learning_rate = old * self.factor
        else:
            self._check_company()
            with self.model.distribute_strategy.scope() if self.model.distribute_strategy else keras.name_scope("scale"):
                optimizer.learning_rate = _scaled(schedule, old, self.factor, warmup_steps)
            self.model.make_train_function(force=True)  # a step that was traced has the old rate
        if self.params.get("verbose", 1):
            what = "" if schedule is None else f" times the schedule {type(schedule).__name__}"
            values = f"{old:.6g} -> {old * self.factor:.6g}" if schedule is None else f"1 -> {self.factor:.6g}{what}"
            slow = f", from the one to the other over {warmup_steps} steps" if warmup_steps else ""
            print(f"scale_learning_rate: {values} ({rule} rule, global batch {from_batch} -> {to_batch}){slow}", flush=True)

    def _check_company(self):
        assigning = (keras.callbacks.ReduceLROnPlateau, keras.callbacks.LearningRateScheduler)
        for callback in self.others:
            if isinstance(callback, assigning):
                raise ValueError(
                    f"scale_learning_rate: {type(callback).__name__} assigns learning rates, which Keras refuses for a schedule, "
                    "and warm-up is one; leave one of the two out, or use warmup_steps=0 with a plain number as the rate."
                )


def _scaled(schedule, old, factor, warmup_steps):
    if schedule is None:  # Keras' own, so that a saved model loads anywhere
        return keras.optimizers.schedules.PolynomialDecay(old, warmup_steps, old * factor, power=1.0)
    return ScaledSchedule(schedule, factor, warmup_steps)


@keras.saving.register_keras_serializable("keras_mirror")
class ScaledSchedule(keras.optimizers.schedules.LearningRateSchedule):
    """A schedule times a factor that grows from 1 linearly.

    Args:
        schedule: The `keras.optimizers.schedules.LearningRateSchedule`.
        factor: float, the factor from step `warmup_steps` on.
        warmup_steps: int, 0 for the whole factor from the first step.
    """

    def __init__(self, schedule, factor, warmup_steps=0):
        self.schedule = schedule
        self.factor = factor
        self.warmup_steps = warmup_steps

    def __call__(self, step):
        done = keras.ops.minimum(keras.ops.cast(step, "float32") / max(self.warmup_steps, 1), 1.0) if self.warmup_steps else 1.0
        return self.schedule(step) * (1.0 + (self.factor - 1.0) * done)

    def get_config(self):
        schedule = keras.saving.serialize_keras_object(self.schedule)
        return {"schedule": schedule, "factor": self.factor, "warmup_steps": self.warmup_steps}

    @classmethod
    def from_config(cls, config):
        return cls(**{**config, "schedule": keras.saving.deserialize_keras_object(config["schedule"])})
