"""Small training programs in the style of published Keras examples: tokens, captions, sequences, several outputs.

Each is written for one device: a function of the number of rows and the size of a batch, which returns `(build, use)`.
"""

import keras
import numpy as np
import tensorflow as tf
from keras import layers, ops

from tests.equivalence.harness import LABELS, SERIES, TOKENS, XV, X, fit
from tests.equivalence.programs_representation import FLIPPED, dense_encoder
from tests.equivalence.programs_supervision import crossentropy, sgd

# --- dual encoder -------------------------------------------------------------------------------


class DualEncoder(keras.Model):
    """Texts and images find each other in the batch; soft targets come from both towers."""

    def __init__(self, text_encoder, image_encoder, temperature=0.5):
        super().__init__()
        self.text_encoder, self.image_encoder, self.temperature = text_encoder, image_encoder, temperature
        self.loss_tracker = keras.metrics.Mean(name="loss")

    @property
    def metrics(self):
        return [self.loss_tracker]

    def call(self, features, training=False):
        texts = self.text_encoder(features["caption"], training=training)
        return texts, self.image_encoder(features["image"], training=training)

    def compute_loss(self, texts, images):
        logits = tf.matmul(texts, images, transpose_b=True) / self.temperature
        alike = tf.matmul(images, images, transpose_b=True) + tf.matmul(texts, texts, transpose_b=True)
        targets = keras.activations.softmax(alike / (2 * self.temperature))
        of_texts = keras.losses.categorical_crossentropy(targets, logits, from_logits=True)
        of_images = keras.losses.categorical_crossentropy(tf.transpose(targets), tf.transpose(logits), from_logits=True)
        return (of_texts + of_images) / 2

    def train_step(self, features):
        with tf.GradientTape() as tape:
            loss = self.compute_loss(*self(features, training=True))
        gradients = tape.gradient(loss, self.trainable_variables)
        self.optimizer.apply_gradients(zip(gradients, self.trainable_variables))
        self.loss_tracker.update_state(loss)
        return {"loss": self.loss_tracker.result()}

    def test_step(self, features):
        self.loss_tracker.update_state(self.compute_loss(*self(features, training=False)))
        return {"loss": self.loss_tracker.result()}


def projected(x, width=4):
    """A residual projection, as on top of each tower."""
    x = layers.Dense(width)(x)
    return layers.LayerNormalization()(layers.Add()([x, layers.Dense(width)(layers.Activation("gelu")(x))]))


def dual_encoder(rows, batch):
    def build():
        words, image = keras.Input((5,), dtype="int32"), keras.Input((6,))
        text = keras.Model(words, projected(layers.LSTM(4, unroll=True)(layers.Embedding(9, 4, mask_zero=True)(words))))
        model = DualEncoder(text, keras.Model(image, projected(image)))
        model.compile(keras.optimizers.AdamW(0.005, weight_decay=0.01))
        return model

    data = tf.data.Dataset.from_tensor_slices({"caption": TOKENS[:rows], "image": X[:rows]}).batch(batch)
    check = tf.data.Dataset.from_tensor_slices({"caption": TOKENS[:11], "image": XV}).batch(4)
    return build, fit(data, validation_data=check)


# --- DeiT ---------------------------------------------------------------------------------------


class TokenClassifier(keras.Model):
    """Attention over a series with a class token and a distillation token before it, and a head for each."""

    def __init__(self):
        super().__init__()
        self.project = layers.Dense(4)
        self.attention = layers.MultiHeadAttention(2, 2)
        self.norm = layers.LayerNormalization()
        self.head, self.distilled_head = layers.Dense(3), layers.Dense(3)

    def build(self, shape):
        self.class_token = self.add_weight(shape=(1, 1, 4), initializer="glorot_uniform", name="class_token")
        self.distilled_token = self.add_weight(shape=(1, 1, 4), initializer="glorot_uniform", name="distilled_token")
        self.positions = self.add_weight(shape=(1, shape[1] + 2, 4), initializer="glorot_uniform", name="positions")
        self.project.build(shape)
        of_tokens = (shape[0], shape[1] + 2, 4)
        self.attention.build(of_tokens, of_tokens)
        self.norm.build(of_tokens)
        self.head.build((shape[0], 4))
        self.distilled_head.build((shape[0], 4))
        self.built = True

    def call(self, inputs, training=False):
        rows = ops.shape(inputs)[0]
        x = self.project(inputs)
        class_token = ops.cast(ops.tile(self.class_token, (rows, 1, 1)), x.dtype)
        distilled_token = ops.repeat(self.distilled_token, rows, axis=0)
        x = ops.concatenate([class_token, distilled_token, x], axis=1) + self.positions
        x = self.norm(x + self.attention(x, x, training=training))
        one, two = self.head(x[:, 0]), self.distilled_head(x[:, 1])
        return (one, two) if training else (one + two) / 2


class DeiT(keras.Model):
    """The class head learns from the labels, the distillation head from the teacher."""

    def __init__(self, student, teacher):
        super().__init__()
        self.student, self.teacher = student, teacher
        self.student_tracker = keras.metrics.Mean(name="student_loss")
        self.distillation_tracker = keras.metrics.Mean(name="distillation_loss")

    @property
    def metrics(self):
        return [*super().metrics, self.student_tracker, self.distillation_tracker]

    def call(self, x):
        return self.student(x) / 2

    def train_step(self, data):
        x, y = data
        wanted = tf.nn.softmax(self.teacher(tf.reduce_mean(x, 1), training=False))
        with tf.GradientTape() as tape:
            of_class, of_distilled = self.student(x, training=True)
            student_loss = self.loss(y, of_class)
            distilled = tf.reduce_mean(keras.losses.categorical_crossentropy(wanted, of_distilled, from_logits=True))
            loss = (student_loss + distilled) / 2
        gradients = tape.gradient(loss, self.student.trainable_variables)
        self.optimizer.apply_gradients(zip(gradients, self.student.trainable_variables))
        self.student_tracker.update_state(student_loss)
        self.distillation_tracker.update_state(distilled)
        self.compute_metrics(x, y, (of_class + of_distilled) / 2, None)
        return {m.name: m.result() for m in self.metrics if m.name in ("student_loss", "distillation_loss")}

    def test_step(self, data):
        x, y = data
        predictions = self.student(x, training=False)
        self.student_tracker.update_state(self.loss(y, predictions))
        return {"student_loss": self.student_tracker.result(), **self.compute_metrics(x, y, predictions, None)}


def deit(rows, batch):
    def build():
        teacher = keras.Sequential([keras.Input((3,)), layers.Dense(3)])
        teacher.trainable = False
        model = DeiT(TokenClassifier(), teacher)
        model.compile(sgd(), crossentropy(), metrics=["accuracy"])
        return model

    return build, fit(SERIES[:rows], LABELS[:rows], batch_size=batch, validation_data=(SERIES[:11], LABELS[:11]))


# --- image captioning ---------------------------------------------------------------------------


class CaptionDecoder(layers.Layer):
    """Attends to the words so far, by a causal mask of its own, and to the image."""

    def __init__(self, words=9, width=4):
        super().__init__()
        self.embedding = layers.Embedding(words, width, mask_zero=True)
        self.own, self.cross = layers.MultiHeadAttention(2, 2), layers.MultiHeadAttention(2, 2)
        self.norm, self.out = layers.LayerNormalization(), layers.Dense(words, activation="softmax")

    def causal(self, x):
        rows, length = tf.shape(x)[0], tf.shape(x)[1]
        mask = tf.cast(tf.range(length)[:, None] >= tf.range(length), tf.int32)[None]
        return tf.tile(mask, tf.concat([[rows], [1, 1]], 0))

    def call(self, tokens, image, training=False, mask=None):
        x = self.embedding(tokens)
        both = tf.minimum(tf.cast(mask[:, None, :], tf.int32), self.causal(x))
        x = x + self.own(x, x, attention_mask=both, training=training)
        return self.out(self.norm(x + self.cross(x, image, training=training)))


class Captioner(keras.Model):
    """Several captions an image; losses and accuracies are masked by hand."""

    def __init__(self, encoder, decoder, captions=2):
        super().__init__()
        self.encoder, self.decoder, self.captions = encoder, decoder, captions
        self.loss_tracker = keras.metrics.Mean(name="loss")
        self.acc_tracker = keras.metrics.Mean(name="accuracy")

    @property
    def metrics(self):
        return [self.loss_tracker, self.acc_tracker]

    def masked_loss(self, true, found, mask):
        mask = tf.cast(mask, tf.float32)
        return tf.reduce_sum(self.loss(true, found) * mask) / tf.reduce_sum(mask)

    def masked_accuracy(self, true, found, mask):
        right = tf.logical_and(mask, tf.equal(true, tf.argmax(found, axis=2)))
        return tf.reduce_sum(tf.cast(right, tf.float32)) / tf.reduce_sum(tf.cast(mask, tf.float32))

    def of_caption(self, image, caption, training):
        encoded = self.encoder(image, training=training)
        found = self.decoder(caption[:, :-1], encoded, training=training, mask=tf.math.not_equal(caption[:, :-1], 0))
        true = caption[:, 1:]
        mask = tf.math.not_equal(true, 0)
        return self.masked_loss(true, found, mask), self.masked_accuracy(true, found, mask)

    def train_step(self, batch):
        images, captions = batch
        batch_loss, batch_acc, total = 0, 0, None
        for i in range(self.captions):
            with tf.GradientTape() as tape:
                loss, acc = self.of_caption(images, captions[:, i, :], training=True)
                batch_loss += loss
                batch_acc += acc
            weights = self.encoder.trainable_variables + self.decoder.trainable_variables
            gradients = tape.gradient(loss, weights)
            total = gradients if total is None else [tf.add_n(pair) for pair in zip(total, gradients)]
        self.optimizer.apply_gradients(zip(total, weights))
        self.loss_tracker.update_state(batch_loss)
        self.acc_tracker.update_state(batch_acc / float(self.captions))
        return {"loss": self.loss_tracker.result(), "acc": self.acc_tracker.result()}

    def test_step(self, batch):
        images, captions = batch
        for i in range(self.captions):
            loss, acc = self.of_caption(images, captions[:, i, :], training=False)
            self.loss_tracker.update_state(loss)
            self.acc_tracker.update_state(acc)
        return {"loss": self.loss_tracker.result(), "acc": self.acc_tracker.result()}


def image_captioning(rows, batch):
    def build():
        encoder = keras.Sequential([keras.Input((5, 3)), layers.LayerNormalization(), layers.Dense(4, "relu")])
        model = Captioner(encoder, CaptionDecoder())
        encoder.layers[0].trainable = False
        model.compile(sgd(), keras.losses.SparseCategoricalCrossentropy(from_logits=False, reduction=None))
        return model

    captions = np.stack([TOKENS, TOKENS[::-1]], axis=1)
    data = tf.data.Dataset.from_tensor_slices((SERIES[:rows], captions[:rows])).batch(batch)
    check = tf.data.Dataset.from_tensor_slices((SERIES[:11], captions[:11])).batch(4)
    return build, fit(data, validation_data=check)


# --- optical character recognition with CTC -----------------------------------------------------


class CTC(layers.Layer):
    """An endpoint: adds the loss of each row, and hands the predictions on."""

    def call(self, true, found):
        rows = ops.shape(true)[0]
        steps = ops.shape(found)[1] * ops.ones((rows,), dtype="int32")
        lengths = ops.shape(true)[1] * ops.ones((rows,), dtype="int32")
        self.add_loss(ops.ctc_loss(true, found, lengths, steps))
        return found


def ctc_ocr(rows, batch):
    def build():
        image = keras.Input((5, 3), name="image")
        labels = keras.Input((2,), name="label", dtype="int32")
        x = layers.Bidirectional(layers.SimpleRNN(3, return_sequences=True, unroll=True))(layers.Dense(4, "relu")(image))
        model = keras.Model([image, labels], CTC(name="ctc_loss")(labels, layers.Dense(5)(x)))
        model.compile(sgd(0.005))
        return model

    labels = np.stack([LABELS + 1, (LABELS + 1) % 3 + 1], axis=1).astype("int32")
    data = tf.data.Dataset.from_tensor_slices({"image": SERIES[:rows], "label": labels[:rows]}).batch(batch)
    return build, fit(data)


# --- semantic clustering ------------------------------------------------------------------------


class Consistency(keras.losses.Loss):
    """Neighbours are to be in the same cluster."""

    def __call__(self, target, similarity, sample_weight=None):
        return ops.mean(keras.losses.binary_crossentropy(ops.ones_like(similarity), similarity, from_logits=True))


class Entropy(keras.losses.Loss):
    """The batch as a whole is to be spread over all clusters."""

    def __init__(self, weight=1.0):
        super().__init__()
        self.weight = weight

    def __call__(self, target, probabilities, sample_weight=None):
        highest = ops.log(ops.cast(ops.shape(probabilities)[-1], "float32"))
        mean = ops.clip(ops.mean(probabilities, axis=0), 1e-8, 1.0)
        return self.weight * (highest + ops.sum(mean * ops.log(mean)))


def semantic_clustering(rows, batch):
    def build():
        anchors, neighbours = keras.Input((6,), name="anchors"), keras.Input((2, 6), name="neighbours")
        encoder = dense_encoder()
        clusters = keras.Sequential([keras.Input((4,)), layers.Dense(3, activation="softmax")])
        of_anchors = clusters(encoder(anchors))
        of_neighbours = clusters(encoder(ops.reshape(neighbours, (-1, 6))))
        of_neighbours = ops.reshape(of_neighbours, (-1, 2, 3))
        similarity = ops.einsum("bij,bkj->bik", ops.expand_dims(of_anchors, 1), of_neighbours)
        model = keras.Model([anchors, neighbours], [layers.Flatten(name="similarity")(similarity), of_anchors])
        model.compile(sgd(), loss=[Consistency(), Entropy(2.0)], loss_weights=[1.0, 0.5])
        return model

    inputs = {"anchors": X[:rows], "neighbours": np.stack([FLIPPED, X * 0.9], axis=1)[:rows]}
    return build, fit(inputs, [np.ones((rows, 1)), np.ones((rows, 1))], batch_size=batch)


# --- memory network -----------------------------------------------------------------------------


def memory_network(rows, batch):
    """A story and a question, whose words meet in a matrix of dot products; Keras' own step."""

    def build():
        story, question = keras.Input((5,), dtype="int32"), keras.Input((3,), dtype="int32")
        in_memory, in_answer = layers.Embedding(9, 4)(story), layers.Embedding(9, 3)(story)
        asked = layers.Embedding(9, 4)(question)
        match = layers.Activation("softmax")(layers.Dot(axes=(2, 2))([in_memory, asked]))
        response = layers.Permute((2, 1))(layers.add([match, in_answer]))
        answer = layers.concatenate([response, asked])
        answer = layers.Dropout(0.0)(layers.SimpleRNN(4, unroll=True)(answer))
        model = keras.Model([story, question], layers.Activation("softmax")(layers.Dense(9)(answer)))
        model.compile(keras.optimizers.RMSprop(0.01), "sparse_categorical_crossentropy", metrics=["accuracy"])
        return model

    data = [TOKENS[:rows], TOKENS[:rows, ::-1][:, :3].copy()]
    check = ([TOKENS[:11], TOKENS[:11, 2:]], LABELS[:11])
    return build, fit(data, LABELS[:rows], batch_size=batch, validation_data=check)


PROGRAMS = [dual_encoder, deit, image_captioning, ctc_ocr, semantic_clustering, memory_network]
