"""Adversarial training programs, each as a published Keras example writes it for one device, on tiny networks.

Nothing here knows of replicas. Noise comes from seed generators that the models hold.
"""

import keras
import numpy as np
import tensorflow as tf
from keras import layers, ops

_random = np.random.RandomState(5)
IMAGES = _random.rand(29, 8, 8, 1).astype("float32")
OTHERS = (_random.rand(29, 8, 8, 1) ** 2).astype("float32")
ONE_HOT = np.eye(3, dtype="float32")[_random.randint(0, 3, 29)]
LATENT = 4


def adam(rate=2e-3, **kwargs):
    """Adam that is tame where a gradient is zero to rounding, of which it would otherwise make a step of full size."""
    return keras.optimizers.Adam(rate, epsilon=1e-3, **kwargs)


def critic(channels=1, name="discriminator"):
    """Without dropout, of which each replica draws a mask of its own (docs/limits.md)."""
    return keras.Sequential(
        [
            keras.Input((8, 8, channels)),
            layers.Conv2D(4, 3, strides=2, padding="same", activation="leaky_relu"),
            layers.Conv2D(6, 3, strides=2, padding="same", activation="tanh"),
            layers.Flatten(),
            layers.Dense(1),
        ],
        name=name,
    )


def painter(inputs=LATENT, norm=True):
    return keras.Sequential(
        [
            keras.Input((inputs,)),
            layers.Dense(4 * 4 * 4, use_bias=not norm),
            layers.Reshape((4, 4, 4)),
            *([layers.BatchNormalization()] if norm else []),
            layers.LeakyReLU(negative_slope=0.2),
            layers.Conv2DTranspose(4, 4, strides=2, padding="same", activation="leaky_relu"),
            layers.Conv2D(1, 3, padding="same", activation="sigmoid"),
        ],
        name="generator",
    )


class DCGAN(keras.Model):
    """Two optimizers; labels of both halves in one batch of twice the rows, with noise on them."""

    def __init__(self, discriminator, generator):
        super().__init__()
        self.discriminator = discriminator
        self.generator = generator
        self.seed_generator = keras.random.SeedGenerator(1337)

    def compile(self, d_optimizer, g_optimizer, loss_fn):
        super().compile()
        self.d_optimizer = d_optimizer
        self.g_optimizer = g_optimizer
        self.loss_fn = loss_fn
        self.d_loss_metric = keras.metrics.Mean(name="d_loss")
        self.g_loss_metric = keras.metrics.Mean(name="g_loss")

    @property
    def metrics(self):
        return [self.d_loss_metric, self.g_loss_metric]

    def train_step(self, real_images):
        batch_size = tf.shape(real_images)[0]
        noise = keras.random.normal(shape=(batch_size, LATENT), seed=self.seed_generator)
        combined = tf.concat([self.generator(noise), real_images], axis=0)
        labels = tf.concat([tf.ones((batch_size, 1)), tf.zeros((batch_size, 1))], axis=0)
        labels += 0.05 * keras.random.uniform(tf.shape(labels), seed=self.seed_generator)
        with tf.GradientTape() as tape:
            predictions = self.discriminator(combined, training=True)
            d_loss = self.loss_fn(labels, predictions)
        grads = tape.gradient(d_loss, self.discriminator.trainable_weights)
        self.d_optimizer.apply_gradients(zip(grads, self.discriminator.trainable_weights))

        noise = keras.random.normal(shape=(batch_size, LATENT), seed=self.seed_generator)
        misleading_labels = tf.zeros((batch_size, 1))
        with tf.GradientTape() as tape:
            predictions = self.discriminator(self.generator(noise, training=True))
            g_loss = self.loss_fn(misleading_labels, predictions)
        grads = tape.gradient(g_loss, self.generator.trainable_weights)
        self.g_optimizer.apply_gradients(zip(grads, self.generator.trainable_weights))
        self.d_loss_metric.update_state(d_loss)
        self.g_loss_metric.update_state(g_loss)
        return {"d_loss": self.d_loss_metric.result(), "g_loss": self.g_loss_metric.result()}


def dcgan():
    model = DCGAN(critic(), painter())
    model.compile(adam(), adam(beta_1=0.5), keras.losses.BinaryCrossentropy(from_logits=True))
    return model


class ConditionalGAN(DCGAN):
    """Labels beside the noise for the generator, and as more channels of the image for the discriminator."""

    def train_step(self, data):
        real_images, one_hot = data
        batch_size = ops.shape(real_images)[0]
        planes = ops.reshape(ops.repeat(one_hot[:, :, None, None], repeats=[8 * 8]), (-1, 8, 8, 3))
        noise = keras.random.normal((batch_size, LATENT), seed=self.seed_generator)
        generated = self.generator(ops.concatenate([noise, one_hot], axis=1))
        fake = ops.concatenate([generated, planes], -1)
        real = ops.concatenate([real_images, planes], -1)
        combined = ops.concatenate([fake, real], axis=0)
        labels = ops.concatenate([ops.ones((batch_size, 1)), ops.zeros((batch_size, 1))], axis=0)
        with tf.GradientTape() as tape:
            d_loss = self.loss_fn(labels, self.discriminator(combined))
        grads = tape.gradient(d_loss, self.discriminator.trainable_weights)
        self.d_optimizer.apply_gradients(zip(grads, self.discriminator.trainable_weights))

        noise = keras.random.normal((batch_size, LATENT), seed=self.seed_generator)
        vectors = ops.concatenate([noise, one_hot], axis=1)
        with tf.GradientTape() as tape:
            fakes = ops.concatenate([self.generator(vectors), planes], -1)
            g_loss = self.loss_fn(ops.zeros((batch_size, 1)), self.discriminator(fakes))
        grads = tape.gradient(g_loss, self.generator.trainable_weights)
        self.g_optimizer.apply_gradients(zip(grads, self.generator.trainable_weights))
        self.d_loss_metric.update_state(d_loss)
        self.g_loss_metric.update_state(g_loss)
        return {"g_loss": self.g_loss_metric.result(), "d_loss": self.d_loss_metric.result()}


def conditional_gan():
    model = ConditionalGAN(critic(channels=4), painter(LATENT + 3, norm=False))
    model.compile(adam(), adam(), keras.losses.BinaryCrossentropy(from_logits=True))
    return model


class WGAN(keras.Model):
    """Several steps of the critic for one of the generator, with a penalty on gradients at points between images."""

    def __init__(self, discriminator, generator, critic_steps=2, gp_weight=10.0):
        super().__init__()
        self.discriminator = discriminator
        self.generator = generator
        self.d_steps = critic_steps
        self.gp_weight = gp_weight
        self.seed_generator = keras.random.SeedGenerator(21)

    def compile(self, d_optimizer, g_optimizer, d_loss_fn, g_loss_fn):
        super().compile()
        self.d_optimizer = d_optimizer
        self.g_optimizer = g_optimizer
        self.d_loss_fn = d_loss_fn
        self.g_loss_fn = g_loss_fn

    def gradient_penalty(self, batch_size, real_images, fake_images):
        alpha = keras.random.uniform([batch_size, 1, 1, 1], seed=self.seed_generator)
        interpolated = real_images + alpha * (fake_images - real_images)
        with tf.GradientTape() as gp_tape:
            gp_tape.watch(interpolated)
            pred = self.discriminator(interpolated, training=True)
        grads = gp_tape.gradient(pred, [interpolated])[0]
        norm = tf.sqrt(tf.reduce_sum(tf.square(grads), axis=[1, 2, 3]))
        return tf.reduce_mean((norm - 1.0) ** 2)

    def train_step(self, real_images):
        if isinstance(real_images, tuple):
            real_images = real_images[0]
        batch_size = tf.shape(real_images)[0]
        for _ in range(self.d_steps):
            noise = keras.random.normal((batch_size, LATENT), seed=self.seed_generator)
            with tf.GradientTape() as tape:
                fake_images = self.generator(noise, training=True)
                fake_logits = self.discriminator(fake_images, training=True)
                real_logits = self.discriminator(real_images, training=True)
                d_cost = self.d_loss_fn(real_img=real_logits, fake_img=fake_logits)
                gp = self.gradient_penalty(batch_size, real_images, fake_images)
                d_loss = d_cost + gp * self.gp_weight
            d_gradient = tape.gradient(d_loss, self.discriminator.trainable_variables)
            self.d_optimizer.apply_gradients(zip(d_gradient, self.discriminator.trainable_variables))

        noise = keras.random.normal((batch_size, LATENT), seed=self.seed_generator)
        with tf.GradientTape() as tape:
            g_loss = self.g_loss_fn(self.discriminator(self.generator(noise, training=True), training=True))
        gen_gradient = tape.gradient(g_loss, self.generator.trainable_variables)
        self.g_optimizer.apply_gradients(zip(gen_gradient, self.generator.trainable_variables))
        return {"d_loss": d_loss, "g_loss": g_loss}


def wgan_gp():
    model = WGAN(critic(), painter())
    model.compile(
        adam(beta_1=0.5, beta_2=0.9),
        adam(beta_1=0.5, beta_2=0.9),
        d_loss_fn=lambda real_img, fake_img: tf.reduce_mean(fake_img) - tf.reduce_mean(real_img),
        g_loss_fn=lambda fake_img: -tf.reduce_mean(fake_img),
    )
    return model


class AdaptiveAugmenter(keras.Model):
    """Changes images with a probability that follows how sure the discriminator is."""

    def __init__(self):
        super().__init__()
        self.probability = keras.Variable(0.3)
        self.seed_generator = keras.random.SeedGenerator(42)

    def call(self, images, training):
        if training:
            batch_size = ops.shape(images)[0]
            shift = keras.random.uniform((batch_size, 1, 1, 1), -0.3, 0.3, seed=self.seed_generator)
            augmented = ops.clip(images[:, :, ::-1] + shift, 0.0, 1.0)
            chance = keras.random.uniform((batch_size, 1, 1, 1), 0.0, 1.0, seed=self.seed_generator)
            chosen = ops.cast(ops.less(chance, self.probability), "float32")
            images = augmented * chosen + images * (1.0 - chosen)
        return images

    def update(self, accuracy):
        self.probability.assign(ops.clip(self.probability + (accuracy - 0.4) / 4.0, 0.0, 1.0))


class AdaptiveGAN(keras.Model):
    """Augments what the discriminator sees; a running accuracy of the discriminator sets how often; EMA generator."""

    def __init__(self):
        super().__init__()
        self.augmenter = AdaptiveAugmenter()
        self.generator = painter()
        self.ema_generator = keras.models.clone_model(self.generator)
        self.discriminator = critic()
        self.seed_generator = keras.random.SeedGenerator(9)

    def compile(self, generator_optimizer, discriminator_optimizer, **kwargs):
        super().compile(**kwargs)
        self.generator_optimizer = generator_optimizer
        self.discriminator_optimizer = discriminator_optimizer
        self.generator_loss_tracker = keras.metrics.Mean(name="g_loss")
        self.discriminator_loss_tracker = keras.metrics.Mean(name="d_loss")
        self.real_accuracy = keras.metrics.BinaryAccuracy(name="real_acc")
        self.generated_accuracy = keras.metrics.BinaryAccuracy(name="gen_acc")
        self.augmentation_probability_tracker = keras.metrics.Mean(name="aug_p")

    @property
    def metrics(self):
        return [
            self.generator_loss_tracker,
            self.discriminator_loss_tracker,
            self.real_accuracy,
            self.generated_accuracy,
            self.augmentation_probability_tracker,
        ]

    def adversarial_loss(self, real_logits, generated_logits):
        real_labels, generated_labels = ops.ones_like(real_logits), ops.zeros_like(generated_logits)
        generator_loss = keras.losses.binary_crossentropy(real_labels, generated_logits, from_logits=True)
        discriminator_loss = keras.losses.binary_crossentropy(
            ops.concatenate([real_labels, generated_labels], axis=0),
            ops.concatenate([real_logits, generated_logits], axis=0),
            from_logits=True,
        )
        return ops.mean(generator_loss), ops.mean(discriminator_loss)

    def train_step(self, real_images):
        batch_size = ops.shape(real_images)[0]
        real_images = self.augmenter(real_images, training=True)
        with tf.GradientTape(persistent=True) as tape:
            latent = keras.random.normal((batch_size, LATENT), seed=self.seed_generator)
            generated_images = self.augmenter(self.generator(latent, training=True), training=True)
            real_logits = self.discriminator(real_images, training=True)
            generated_logits = self.discriminator(generated_images, training=True)
            generator_loss, discriminator_loss = self.adversarial_loss(real_logits, generated_logits)
        generator_gradients = tape.gradient(generator_loss, self.generator.trainable_weights)
        discriminator_gradients = tape.gradient(discriminator_loss, self.discriminator.trainable_weights)
        self.generator_optimizer.apply_gradients(zip(generator_gradients, self.generator.trainable_weights))
        self.discriminator_optimizer.apply_gradients(zip(discriminator_gradients, self.discriminator.trainable_weights))
        self.generator_loss_tracker.update_state(generator_loss)
        self.discriminator_loss_tracker.update_state(discriminator_loss)
        self.real_accuracy.update_state(1.0, ops.sign(real_logits) * 0.5 + 0.5)
        self.generated_accuracy.update_state(0.0, ops.sign(generated_logits) * 0.5 + 0.5)
        self.augmenter.update(self.real_accuracy.result())
        self.augmentation_probability_tracker.update_state(self.augmenter.probability)
        for weight, ema_weight in zip(self.generator.weights, self.ema_generator.weights):
            ema_weight.assign(0.9 * ema_weight + 0.1 * weight)
        return {m.name: m.result() for m in self.metrics}


def gan_with_augmentation():
    model = AdaptiveGAN()
    model.compile(adam(), adam())
    return model
