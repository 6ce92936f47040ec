"""Small training programs in the style of published Keras examples that learn representations.

Each is written for one device: a function of the number of rows and the size of a batch, which returns `(build, use)`.
"""

import keras
import numpy as np
import tensorflow as tf
from keras import layers, ops

from tests.equivalence.harness import LABELS, XV, X, fit

FLIPPED = X[:, ::-1].copy()


def dense_encoder(width=4, norm=True):
    """Two dense layers, with batch normalisation between them."""
    hidden = [layers.Dense(8, use_bias=False), layers.BatchNormalization()] if norm else [layers.Dense(8)]
    return keras.Sequential([keras.Input((6,)), *hidden, layers.Activation("tanh"), layers.Dense(width)])


def zipped(*parts, batch):
    """A dataset of tuples of arrays, or of structures of them."""
    return tf.data.Dataset.zip(tuple(tf.data.Dataset.from_tensor_slices(part) for part in parts)).batch(batch)


# --- Barlow twins -------------------------------------------------------------------------------


class BarlowLoss(keras.losses.Loss):
    """How far the cross-correlation of two views is from the identity."""

    def __init__(self, weight=0.01):
        super().__init__()
        self.weight = weight

    def standardised(self, z):
        return (z - tf.reduce_mean(z, axis=0)) / tf.sqrt(tf.math.reduce_variance(z, axis=0) + 1e-2)

    def call(self, z_a, z_b):
        rows = tf.cast(tf.shape(z_a)[0], z_a.dtype)
        correlation = tf.matmul(self.standardised(z_a), self.standardised(z_b), transpose_a=True) / rows
        diagonal = tf.linalg.diag_part(correlation)
        rest = tf.reduce_sum(tf.square(correlation)) - tf.reduce_sum(tf.square(diagonal))
        return tf.reduce_sum(tf.square(diagonal - 1)) + self.weight * rest


class BarlowTwins(keras.Model):
    def __init__(self):
        super().__init__()
        self.encoder = dense_encoder()
        self.loss_tracker = keras.metrics.Mean(name="loss")

    @property
    def metrics(self):
        return [self.loss_tracker]

    def train_step(self, data):
        first, second = data
        with tf.GradientTape() as tape:
            loss = self.loss(self.encoder(first, training=True), self.encoder(second, training=True))
        gradients = tape.gradient(loss, self.encoder.trainable_variables)
        self.optimizer.apply_gradients(zip(gradients, self.encoder.trainable_variables))
        self.loss_tracker.update_state(loss)
        return {"loss": self.loss_tracker.result()}


def barlow_twins(rows, batch):
    def build():
        model = BarlowTwins()
        model.compile(keras.optimizers.SGD(0.01, momentum=0.9), loss=BarlowLoss())
        return model

    return build, fit(zipped(X[:rows], FLIPPED[:rows], batch=batch))


# --- SimSiam ------------------------------------------------------------------------------------


def negative_cosine(p, z):
    p, z = tf.math.l2_normalize(p, axis=1), tf.math.l2_normalize(tf.stop_gradient(z), axis=1)
    return -tf.reduce_mean(tf.reduce_sum(p * z, axis=1))


class SimSiam(keras.Model):
    """The predictor of one view finds the other's projection, whose gradient is stopped."""

    def __init__(self, encoder, predictor):
        super().__init__()
        self.encoder, self.predictor = encoder, predictor
        self.loss_tracker = keras.metrics.Mean(name="loss")

    @property
    def metrics(self):
        return [self.loss_tracker]

    def train_step(self, data):
        first, second = data
        with tf.GradientTape() as tape:
            z1, z2 = self.encoder(first, training=True), self.encoder(second, training=True)
            p1, p2 = self.predictor(z1, training=True), self.predictor(z2, training=True)
            loss = negative_cosine(p1, z2) / 2 + negative_cosine(p2, z1) / 2
        weights = self.encoder.trainable_variables + self.predictor.trainable_variables
        self.optimizer.apply_gradients(zip(tape.gradient(loss, weights), weights))
        self.loss_tracker.update_state(loss)
        return {"loss": self.loss_tracker.result()}


def simsiam(rows, batch):
    def build():
        predictor = keras.Sequential([keras.Input((4,)), layers.Dense(3, "relu", bias_initializer="ones"), layers.Dense(4)])
        model = SimSiam(dense_encoder(), predictor)
        schedule = keras.optimizers.schedules.CosineDecay(0.05, 10)
        model.compile(keras.optimizers.SGD(schedule, momentum=0.6))
        return model

    return build, fit(zipped(X[:rows], FLIPPED[:rows], batch=batch))


# --- SimCLR -------------------------------------------------------------------------------------


class Shake(layers.Layer):
    """Augments with seeded noise."""

    def __init__(self, scale, seed):
        super().__init__()
        self.scale = scale
        self.seed_generator = keras.random.SeedGenerator(seed)

    def call(self, x):
        return x + self.scale * keras.random.normal(ops.shape(x), seed=self.seed_generator)


class SimCLR(keras.Model):
    """Contrasts two views within the batch; a linear probe learns beside it, with an optimizer of its own."""

    def __init__(self):
        super().__init__()
        self.temperature = 0.2
        self.augmenter = Shake(0.3, 5)
        self.encoder = dense_encoder()
        self.head = keras.Sequential([keras.Input((4,)), layers.Dense(4, "relu", bias_initializer="ones"), layers.Dense(4)])
        self.probe = keras.Sequential([keras.Input((4,)), layers.Dense(3)])

    def compile(self, contrastive_optimizer, probe_optimizer, **kwargs):
        super().compile(**kwargs)
        self.contrastive_optimizer, self.probe_optimizer = contrastive_optimizer, probe_optimizer
        self.probe_loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        self.contrastive_tracker = keras.metrics.Mean(name="c_loss")
        self.contrastive_accuracy = keras.metrics.SparseCategoricalAccuracy(name="c_acc")
        self.probe_tracker = keras.metrics.Mean(name="p_loss")
        self.probe_accuracy = keras.metrics.SparseCategoricalAccuracy(name="p_acc")

    @property
    def metrics(self):
        return [self.contrastive_tracker, self.contrastive_accuracy, self.probe_tracker, self.probe_accuracy]

    def contrastive_loss(self, a, b):
        a, b = ops.normalize(a, axis=1), ops.normalize(b, axis=1)
        similarities = ops.matmul(a, ops.transpose(b)) / self.temperature
        labels = ops.arange(ops.shape(a)[0])
        self.contrastive_accuracy.update_state(labels, similarities)
        self.contrastive_accuracy.update_state(labels, ops.transpose(similarities))
        one = keras.losses.sparse_categorical_crossentropy(labels, similarities, from_logits=True)
        two = keras.losses.sparse_categorical_crossentropy(labels, ops.transpose(similarities), from_logits=True)
        return (one + two) / 2  # a number a row: the gradient is that of their sum

    def train_step(self, data):
        (unlabelled, _), (labelled, labels) = data
        rows = ops.concatenate((unlabelled, labelled), axis=0)
        first, second = self.augmenter(rows), self.augmenter(rows)
        with tf.GradientTape() as tape:
            a = self.head(self.encoder(first, training=True), training=True)
            b = self.head(self.encoder(second, training=True), training=True)
            loss = self.contrastive_loss(a, b)
        weights = self.encoder.trainable_weights + self.head.trainable_weights
        self.contrastive_optimizer.apply_gradients(zip(tape.gradient(loss, weights), weights))
        self.contrastive_tracker.update_state(loss)
        features = self.encoder(self.augmenter(labelled), training=False)
        with tf.GradientTape() as tape:
            logits = self.probe(features, training=True)
            loss = self.probe_loss(labels, logits)
        gradients = tape.gradient(loss, self.probe.trainable_weights)
        self.probe_optimizer.apply_gradients(zip(gradients, self.probe.trainable_weights))
        self.probe_tracker.update_state(loss)
        self.probe_accuracy.update_state(labels, logits)
        return {m.name: m.result() for m in self.metrics}

    def test_step(self, data):
        x, labels = data
        logits = self.probe(self.encoder(x, training=False), training=False)
        self.probe_tracker.update_state(self.probe_loss(labels, logits))
        self.probe_accuracy.update_state(labels, logits)
        return {m.name: m.result() for m in self.metrics[2:]}


def simclr(rows, batch):
    def build():
        model = SimCLR()
        model.compile(keras.optimizers.Adam(0.005), keras.optimizers.Adam(0.01))
        return model

    data = zipped((FLIPPED[:rows], LABELS[:rows]), (X[:rows], LABELS[:rows]), batch=batch)
    return build, fit(data, validation_data=(XV, LABELS[:11]))


# --- NNCLR --------------------------------------------------------------------------------------


class NNCLR(keras.Model):
    """Contrasts with the nearest neighbour in a queue of features, to whose front each batch is put."""

    def __init__(self):
        super().__init__()
        self.encoder = dense_encoder(norm=False)
        self.correlation_accuracy = keras.metrics.SparseCategoricalAccuracy(name="accuracy")
        self.loss_tracker = keras.metrics.Mean(name="loss")
        start = keras.utils.normalize(np.random.RandomState(1).randn(20, 4), axis=1).astype("float32")
        self.feature_queue = keras.Variable(start, trainable=False, name="queue")

    @property
    def metrics(self):
        return [self.loss_tracker, self.correlation_accuracy]

    def nearest(self, projections):
        similarities = ops.matmul(projections, ops.transpose(self.feature_queue))
        found = ops.take(self.feature_queue, ops.argmax(similarities, axis=1), axis=0)
        return projections + ops.stop_gradient(found - projections)

    def contrastive_loss(self, a, b):
        a, b = ops.normalize(a, axis=1), ops.normalize(b, axis=1)
        one = ops.matmul(self.nearest(a), ops.transpose(b)) / 0.3
        two = ops.matmul(self.nearest(b), ops.transpose(a)) / 0.3
        rows = ops.shape(a)[0]
        labels = ops.arange(rows)
        self.correlation_accuracy.update_state(ops.concatenate([labels] * 2), ops.concatenate([one, two]))
        loss = keras.losses.sparse_categorical_crossentropy(
            ops.concatenate([labels] * 2), ops.concatenate([one, two]), from_logits=True
        )
        self.feature_queue.assign(ops.concatenate([a, self.feature_queue[:-rows]], axis=0))
        return ops.mean(loss)

    def train_step(self, data):
        x = data[0] if isinstance(data, tuple) else data
        with tf.GradientTape() as tape:
            loss = self.contrastive_loss(self.encoder(x, training=True), self.encoder(x[:, ::-1], training=True))
        gradients = tape.gradient(loss, self.encoder.trainable_weights)
        self.optimizer.apply_gradients(zip(gradients, self.encoder.trainable_weights))
        self.loss_tracker.update_state(loss)
        return {m.name: m.result() for m in self.metrics}


def nnclr(rows, batch):
    def build():
        model = NNCLR()
        model.compile(keras.optimizers.Adam(0.01))
        return model

    def use(model):
        return fit(X[:rows], batch_size=batch)(model), model.feature_queue.numpy()

    return build, use


# --- supervised contrastive learning ------------------------------------------------------------


class SupervisedContrastive(keras.losses.Loss):
    """N-pairs over the labels in the batch."""

    def __call__(self, labels, features, sample_weight=None):
        features = tf.math.l2_normalize(features, axis=1)
        logits = tf.matmul(features, features, transpose_b=True) / 0.2
        labels = tf.reshape(labels, (-1, 1))
        same = tf.cast(tf.equal(labels, tf.transpose(labels)), logits.dtype)
        same /= tf.reduce_sum(same, axis=1, keepdims=True)
        return tf.reduce_mean(tf.nn.softmax_cross_entropy_with_logits(labels=same, logits=logits))


def supervised_contrastive(rows, batch):
    def build():
        inputs = keras.Input((6,))
        model = keras.Model(inputs, layers.Dense(4, "relu", bias_initializer="ones")(dense_encoder(6)(inputs)))
        model.compile(keras.optimizers.Adam(0.01), loss=SupervisedContrastive())
        return model

    return build, fit(X[:rows], LABELS[:rows], batch_size=batch, validation_data=(XV, LABELS[:11]))


# --- metric learning ----------------------------------------------------------------------------


class SimilarityModel(keras.Model):
    """Each anchor is to find its own positive among those of the batch."""

    def train_step(self, data):
        if isinstance(data, tuple):
            data = data[0]
        anchors, positives = data[:, 0], data[:, 1]
        with tf.GradientTape() as tape:
            anchors, positives = self(anchors, training=True), self(positives, training=True)
            similarities = tf.einsum("ae,pe->ap", anchors, positives) / 0.2
            labels = tf.range(tf.shape(anchors)[0])
            loss = self.compute_loss(y=labels, y_pred=similarities)
        gradients = tape.gradient(loss, self.trainable_variables)
        self.optimizer.apply_gradients(zip(gradients, self.trainable_variables))
        for metric in self.metrics:
            if metric.name == "loss":
                metric.update_state(loss)
            else:
                metric.update_state(labels, similarities)
        return {m.name: m.result() for m in self.metrics}


def metric_learning(rows, batch):
    def build():
        inputs = keras.Input((6,))
        model = SimilarityModel(inputs, layers.UnitNormalization()(dense_encoder()(inputs)))
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        model.compile(keras.optimizers.Adam(0.005), loss=loss, metrics=["sparse_categorical_accuracy"])
        return model

    return build, fit(np.stack([X, FLIPPED], axis=1)[:rows], batch_size=batch)


# --- siamese network ----------------------------------------------------------------------------


class Distances(layers.Layer):
    def call(self, anchor, positive, negative):
        return tf.reduce_sum(tf.square(anchor - positive), -1), tf.reduce_sum(tf.square(anchor - negative), -1)


class Siamese(keras.Model):
    """Triplets; the loss is a number a row, of which the tape takes the sum."""

    def __init__(self, network, margin=0.5):
        super().__init__()
        self.network, self.margin = network, margin
        self.loss_tracker = keras.metrics.Mean(name="loss")

    def call(self, inputs):
        return self.network(inputs)

    def triplet_loss(self, data):
        near, far = self.network(data)
        return tf.maximum(near - far + self.margin, 0.0)

    def train_step(self, data):
        with tf.GradientTape() as tape:
            loss = self.triplet_loss(data)
        gradients = tape.gradient(loss, self.network.trainable_weights)
        self.optimizer.apply_gradients(zip(gradients, self.network.trainable_weights))
        self.loss_tracker.update_state(loss)
        return {"loss": self.loss_tracker.result()}

    def test_step(self, data):
        self.loss_tracker.update_state(self.triplet_loss(data))
        return {"loss": self.loss_tracker.result()}

    @property
    def metrics(self):
        return [self.loss_tracker]


def siamese(rows, batch):
    def build():
        embedding = dense_encoder()
        inputs = [keras.Input((6,), name=name) for name in ("anchor", "positive", "negative")]
        network = keras.Model(inputs, Distances()(*(embedding(each) for each in inputs)))
        model = Siamese(network)
        model.compile(keras.optimizers.SGD(0.005, momentum=0.9))  # the last bias cancels out, which Adam would scale up
        return model

    triplets = (X[:rows], X[:rows] * 0.5, FLIPPED[:rows])
    return build, fit(zipped(*triplets, batch=batch), validation_data=zipped(XV, XV * 0.5, XV[::-1].copy(), batch=4))


PROGRAMS = [barlow_twins, simsiam, simclr, nnclr, supervised_contrastive, metric_learning, siamese]
