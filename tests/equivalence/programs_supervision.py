"""Small training programs in the style of published Keras examples: teachers, sequences, steps that work on gradients.

Each is written for one device: a function of the number of rows and the size of a batch, which returns `(build, use)`.
"""

import keras
import numpy as np
import tensorflow as tf
from keras import layers, ops

from tests.equivalence.harness import LABELS, XV, X, fit
from tests.equivalence.programs_representation import FLIPPED, dense_encoder, zipped


def sgd(rate=0.05):
    return keras.optimizers.SGD(rate, momentum=0.9)


def crossentropy(**options):
    return keras.losses.SparseCategoricalCrossentropy(from_logits=True, **options)


# --- AdaMatch -----------------------------------------------------------------------------------


class AdaMatch(keras.Model):
    """Labelled source rows and unlabelled target rows in one batch; only targets that are sure enough count."""

    def __init__(self, model, steps):
        super().__init__()
        self.model, self.tau, self.steps = model, 0.9, steps
        self.loss_tracker = keras.metrics.Mean(name="loss")
        self.accuracy = keras.metrics.SparseCategoricalAccuracy(name="accuracy")
        self.current_step = tf.Variable(0, dtype="int64", trainable=False)
        self.seed_generator = keras.random.SeedGenerator(11)

    @property
    def metrics(self):
        return [self.loss_tracker, self.accuracy]

    def train_step(self, data):
        ((source_w, source_s), labels), (target_w, target_s) = data
        source_rows = tf.shape(source_w)[0]
        combined = tf.concat([source_w, source_s, target_w, target_s], 0)
        with tf.GradientTape() as tape:
            together = self.model(combined, training=True)[: 2 * source_rows]
            alone = self.model(tf.concat([source_w, source_s], 0), training=True)
            share = keras.random.uniform(ops.shape(together), seed=self.seed_generator)
            source = share * together + (1.0 - share) * alone
            target = self.model(tf.concat([target_w, target_s], 0), training=True)
            target_rows = tf.shape(target_w)[0]
            pseudo = tf.nn.softmax(target[:target_rows])
            expected = tf.reduce_mean(tf.nn.softmax(source[:source_rows]), axis=0)
            pseudo = pseudo * expected / (tf.reduce_mean(pseudo, axis=0) + 1e-6)
            pseudo = tf.stop_gradient(pseudo / tf.reduce_sum(pseudo, 1, keepdims=True))
            threshold = self.tau * tf.reduce_mean(tf.reduce_max(tf.nn.softmax(source[:source_rows]), axis=-1))
            mask = tf.cast(tf.reduce_max(pseudo, axis=-1) >= threshold, tf.float32)
            of_source = tf.reduce_mean(crossentropy(reduction=None)(tf.tile(labels, [2]), source))
            of_target = keras.losses.categorical_crossentropy(pseudo, target[target_rows:], from_logits=True)
            progress = tf.cast(self.current_step, tf.float32) / self.steps
            mu = 0.5 - tf.cos(tf.minimum(np.pi, 2 * np.pi * progress)) / 2
            loss = of_source + mu * tf.reduce_mean(of_target * mask)
            self.current_step.assign_add(1)
        gradients = tape.gradient(loss, self.model.trainable_variables)
        self.optimizer.apply_gradients(zip(gradients, self.model.trainable_variables))
        self.loss_tracker.update_state(loss)
        return {"loss": self.loss_tracker.result(), "sure": tf.reduce_mean(mask)}

    def test_step(self, data):
        x, y = data
        self.accuracy.update_state(y, self.model(x, training=False))
        return {"accuracy": self.accuracy.result()}


def adamatch(rows, batch):
    def build():
        model = AdaMatch(dense_encoder(3), steps=8)
        model.compile(sgd())
        return model

    source = ((X[:rows], X[:rows] * 1.1), LABELS[:rows])
    return build, fit(zipped(source, (FLIPPED[:rows], FLIPPED[:rows] * 0.9), batch=batch), validation_data=(XV, LABELS[:11]))


# --- knowledge distillation ---------------------------------------------------------------------


class Distiller(keras.Model):
    """A compute_loss that adds the teacher's to that which was compiled."""

    def __init__(self, student, teacher):
        super().__init__()
        self.student, self.teacher = student, teacher

    def compile(self, optimizer, metrics, student_loss, distillation_loss, alpha=0.3, temperature=3):
        super().compile(optimizer=optimizer, metrics=metrics, loss=student_loss)
        self.distillation_loss, self.alpha, self.temperature = distillation_loss, alpha, temperature

    def compute_loss(self, x=None, y=None, y_pred=None, sample_weight=None, training=True):
        wanted = ops.softmax(self.teacher(x, training=False) / self.temperature, axis=1)
        found = ops.softmax(y_pred / self.temperature, axis=1)
        student_loss = super().compute_loss(x=x, y=y, y_pred=y_pred, sample_weight=sample_weight, training=training)
        distilled = self.distillation_loss(wanted, found) * self.temperature**2
        return self.alpha * student_loss + (1 - self.alpha) * distilled

    def call(self, x, training=None):
        return self.student(x, training=training)


def distillation(rows, batch):
    def build():
        student = keras.Sequential([keras.Input((6,)), layers.Dense(3, kernel_regularizer="l2")])
        teacher = dense_encoder(3)
        teacher.trainable = False
        model = Distiller(student, teacher)
        model.compile(sgd(), ["sparse_categorical_accuracy"], crossentropy(), keras.losses.KLDivergence())
        return model

    return build, fit(X[:rows], LABELS[:rows], batch_size=batch, validation_data=(XV, LABELS[:11]))


# --- consistency training -----------------------------------------------------------------------


class SelfTrainer(keras.Model):
    """A fixed teacher sees clean rows, the student noisy ones."""

    def __init__(self, student, teacher):
        super().__init__()
        self.student, self.teacher = student, teacher
        self.teacher.trainable = False

    def compile(self, optimizer, metrics, student_loss_fn, distillation_loss_fn, temperature=3):
        super().compile(optimizer=optimizer, metrics=metrics)
        self.student_loss_fn, self.distillation_loss_fn = student_loss_fn, distillation_loss_fn
        self.temperature = temperature

    def train_step(self, data):
        (clean, _), (noisy, y) = data
        wanted = self.teacher(clean, training=False)
        with tf.GradientTape() as tape:
            found = self.student(noisy, training=True)
            distilled = self.distillation_loss_fn(
                tf.nn.softmax(wanted / self.temperature, axis=1), tf.nn.softmax(found / self.temperature, axis=1)
            )
            total = (self.student_loss_fn(y, found) + distilled) / 2
        gradients = tape.gradient(total, self.student.trainable_variables)
        self.optimizer.apply_gradients(zip(gradients, self.student.trainable_variables))
        results = self.compute_metrics(clean, y, tf.nn.softmax(found, axis=1), None)
        return {**results, "total_loss": total}

    def test_step(self, data):
        x, y = data
        found = self.student(x, training=False)
        self.student_loss_fn(y, found)
        return self.compute_metrics(x, y, tf.nn.softmax(found, axis=1), None)

    def call(self, x):
        return self.student(x)


def consistency_training(rows, batch):
    def build():
        model = SelfTrainer(dense_encoder(3), dense_encoder(3))
        model.compile(sgd(), ["sparse_categorical_accuracy"], crossentropy(), keras.losses.KLDivergence())
        return model

    data = zipped((X[:rows], LABELS[:rows]), (FLIPPED[:rows], LABELS[:rows]), batch=batch)
    return build, fit(data, validation_data=(XV, LABELS[:11]))


# --- sharpness aware minimisation ---------------------------------------------------------------


class SharpnessAware(keras.Model):
    """Two passes: up to the worst neighbour and back, and down with the gradient from there."""

    def __init__(self, inner, rho=0.05):
        super().__init__()
        self.inner, self.rho = inner, rho

    def call(self, x):
        return self.inner(x)

    def train_step(self, data):
        x, y = data
        with tf.GradientTape() as tape:
            loss = self.compute_loss(x, y, self.inner(x))
        weights = self.inner.trainable_variables
        gradients = tape.gradient(loss, weights)
        norm = tf.norm([tf.norm(gradient) for gradient in gradients])
        steps = [gradient * self.rho / (norm + 1e-12) for gradient in gradients]
        for weight, step in zip(weights, steps):
            weight.assign_add(step)
        with tf.GradientTape() as tape:
            found = self.inner(x)
            loss = self.compute_loss(x, y, found)
        gradients = tape.gradient(loss, weights)
        for weight, step in zip(weights, steps):
            weight.assign_sub(step)
        self.optimizer.apply_gradients(zip(gradients, weights))
        return self.compute_metrics(x, y, found, None)


def sharpness_aware(rows, batch):
    def build():
        model = SharpnessAware(dense_encoder(3, norm=False))
        model.compile(sgd(), crossentropy(), metrics=["accuracy"])
        return model

    return build, fit(X[:rows], LABELS[:rows], batch_size=batch, validation_data=(XV, LABELS[:11]))


# --- gradient centralisation --------------------------------------------------------------------


class Centring(keras.optimizers.RMSprop):
    """Takes from each gradient of a kernel its mean over the inputs."""

    def apply(self, grads, trainable_variables=None):
        centred = [g - ops.mean(g, axis=list(range(len(g.shape) - 1)), keepdims=True) if len(g.shape) > 1 else g for g in grads]
        return super().apply(centred, trainable_variables)


class CentringStep(keras.Model):
    """The same in a train_step, and with the gradients' norm in the logs."""

    def train_step(self, data):
        x, y = data
        with tf.GradientTape() as tape:
            found = self(x, training=True)
            loss = self.compute_loss(x, y, found)
        gradients = tape.gradient(loss, self.trainable_variables)
        gradients = [g - tf.reduce_mean(g, 0, keepdims=True) if g.shape.rank > 1 else g for g in gradients]
        self.optimizer.apply(gradients, self.trainable_variables)
        return {**self.compute_metrics(x, y, found, None), "norm": tf.linalg.global_norm(gradients)}


def centred(cls, optimizer):
    def program(rows, batch):
        def build():
            inputs = keras.Input((6,))
            model = cls(inputs, dense_encoder(3)(inputs))
            model.compile(optimizer(), crossentropy(), metrics=["accuracy"])
            return model

        return build, fit(X[:rows], LABELS[:rows], batch_size=batch)

    return program


def centring_optimizer(rows, batch):
    return centred(keras.Model, lambda: Centring(0.003))(rows, batch)


def centring_step(rows, batch):
    return centred(CentringStep, sgd)(rows, batch)


# --- forward-forward ----------------------------------------------------------------------------


class ForwardDense(layers.Layer):
    """Learns by itself to be active for good rows and quiet for bad ones, with its own optimizer and tape."""

    def __init__(self, units):
        super().__init__()
        self.dense = layers.Dense(units, activation="relu")
        self.optimizer = keras.optimizers.Adam(0.01)
        self.loss_metric = keras.metrics.Mean()

    def call(self, x):
        return self.dense(x / (tf.norm(x, axis=1, keepdims=True) + 1e-4))

    def forward_forward(self, good, bad):
        for _ in range(2):
            with tf.GradientTape() as tape:
                of_good = tf.reduce_mean(tf.square(self.call(good)), 1)
                of_bad = tf.reduce_mean(tf.square(self.call(bad)), 1)
                loss = tf.reduce_mean(tf.math.log(1 + tf.exp(tf.concat([0.5 - of_good, of_bad - 0.5], 0))))
            self.loss_metric.update_state([loss])
            gradients = tape.gradient(loss, self.dense.trainable_weights)
            self.optimizer.apply_gradients(zip(gradients, self.dense.trainable_weights))
        return tf.stop_gradient(self.call(good)), tf.stop_gradient(self.call(bad)), self.loss_metric.result()


class ForwardForward(keras.Model):
    """Trains layer after layer, without a gradient from one to another."""

    def __init__(self):
        super().__init__()
        self.parts = [ForwardDense(8), ForwardDense(6)]
        self.loss_var = keras.Variable(0.0, trainable=False)
        self.loss_count = keras.Variable(0.0, trainable=False)

    def overlay(self, data):
        x, y = data
        return tf.concat([tf.one_hot(y, 3) * tf.reduce_max(x), x[3:]], 0), y

    def call(self, x):
        for part in self.parts:
            x = part(x)
        return x

    def train_step(self, data):
        x, y = data
        good, y = tf.map_fn(fn=self.overlay, elems=(x, y))
        bad, _ = tf.map_fn(fn=self.overlay, elems=(x, tf.math.floormod(y[::-1] + 1, 3)))
        for part in self.parts:
            good, bad, loss = part.forward_forward(good, bad)
            self.loss_var.assign_add(loss)
            self.loss_count.assign_add(1.0)
        return {"FinalLoss": tf.math.divide(self.loss_var, self.loss_count)}


def forward_forward(rows, batch):
    def build():
        model = ForwardForward()
        model.compile(keras.optimizers.SGD(0.01), loss="mse")
        return model

    return build, fit(X[:rows], LABELS[:rows].astype("int32"), batch_size=batch)


PROGRAMS = [
    adamatch,
    distillation,
    consistency_training,
    sharpness_aware,
    centring_optimizer,
    centring_step,
    forward_forward,
]
