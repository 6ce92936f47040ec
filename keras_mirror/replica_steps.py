"""The steps of one model on a replica, and which of them see the whole batch."""

import keras
import tensorflow as tf

from keras_mirror import internals, steps
from keras_mirror.counts_outside import counts_in
from keras_mirror.errors import warn_once
from keras_mirror.holdings import held
from keras_mirror.view_steps import run_step_on_whole, sees_a_part


class ReplicaSteps:
    """The methods of an `Engine` that run on a replica.

    A step of the user's own, or with parts of the user's own, sees the whole batch, unless `sees_whole` is false. Keras'
    step works on the replica's rows.
    """

    @tf.autograph.experimental.do_not_convert
    def train_step(self, data):
        """The step that `fit`, `TrainingLoop` and `strategy.run(model.train_step, ...)` run on a replica."""
        self._build_on_replica(data)
        if self.shows_whole("train_step") and sees_a_part():
            return self._run_on_whole("train_step", data)
        return self._train_step_on(data)

    def _train_step_on(self, data):
        if self.step is not None:
            return self._own_steps["step"](self.model, data)
        if not self._has_default("train_step"):
            return self._own_steps["train_step"](self.model, data)
        return steps.default_train_step(self.model, data) or self.model.get_metrics_result()

    def _test_step_on(self, data):
        if not self._has_default("test_step"):
            return self._own_steps["test_step"](self.model, data)
        return steps.default_test_step(self.model, data) or self.model.get_metrics_result()

    def shows_whole(self, method):
        """Whether a step runs code of the user's own, which sees the whole batch."""
        default = self._has_default(method) and (self.step is None or method == "test_step")
        return self.sees_whole and not (default and self._has_default("compute_loss") and self._has_default("compute_metrics"))

    def _run_on_whole(self, method, data):
        step = self._train_step_on if method == "train_step" else self._test_step_on
        self._warn_of_counts_from_outside(method)
        return run_step_on_whole(step, data, self._metrics, self._prepare_layer, internals.layers_of(self.model))

    def _warn_of_counts_from_outside(self, method):
        """Warns once of a number of replicas that the step has from outside, where it is not 1."""
        for function in (self.function_of_step(method), type(self.model).compute_loss, type(self.model).call):
            for name, count in counts_in(function, self.model):
                warn_once(
                    ("count from outside", id(self), method, name),
                    f"{self.name_of_step(method)} uses {name}, the number of replicas ({int(count)}), read at {count.place}. "
                    "The step sees the whole batch and one replica, so a loss that is divided by it is too small: read "
                    "strategy.num_replicas_in_sync within the step, where it is 1, or leave the division out, or pass "
                    'view="replica" to mirrored_model.',
                    code="KM210",
                )

    def _metrics(self):
        """Every metric that a step may update: those of the model and others that it holds."""
        return [*self.model.metrics, *(metric for _, metric, _ in held(self.model, keras.metrics.Metric))]

    @tf.autograph.experimental.do_not_convert
    def test_step(self, data):
        """The step that `evaluate` runs on a replica."""
        self._build_on_replica(data)
        if self.shows_whole("test_step") and sees_a_part():
            return self._run_on_whole("test_step", data)
        return self._test_step_on(data)

    @tf.autograph.experimental.do_not_convert
    def predict_step(self, data):
        """The step that `predict` runs on a replica."""
        return steps.check_predictions(self.name_of_step("predict_step"), type(self.model).predict_step(self.model, data))

    def _has_default(self, name):
        return getattr(type(self.model), name) is getattr(keras.Model, name)
