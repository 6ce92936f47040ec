"""Autoencoders, flows and diffusion, each as a published Keras example writes it for one device, on tiny networks."""

import math

import keras
import numpy as np
import tensorflow as tf
from keras import layers, ops

from tests.equivalence.programs_generative import IMAGES, LATENT, adam


class Sampling(layers.Layer):
    """Uses (z_mean, z_log_var) to sample z."""

    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.seed_generator = keras.random.SeedGenerator(1337)

    def call(self, inputs):
        z_mean, z_log_var = inputs
        epsilon = keras.random.normal(shape=(ops.shape(z_mean)[0], ops.shape(z_mean)[1]), seed=self.seed_generator)
        return z_mean + ops.exp(0.5 * z_log_var) * epsilon


def image_decoder(inputs=LATENT, activation="sigmoid"):
    return keras.Sequential(
        [
            keras.Input((inputs,)),
            layers.Dense(4 * 4 * 3, activation="relu"),
            layers.Reshape((4, 4, 3)),
            layers.Conv2DTranspose(4, 3, activation="relu", strides=2, padding="same"),
            layers.Conv2DTranspose(1, 3, activation=activation, padding="same"),
        ],
        name="decoder",
    )


class VAE(keras.Model):
    """Samples in a layer of the encoder; sums over pixels, means over rows."""

    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        image = keras.Input((8, 8, 1))
        x = layers.Flatten()(layers.Conv2D(4, 3, activation="relu", strides=2, padding="same")(image))
        z_mean, z_log_var = layers.Dense(LATENT, name="z_mean")(x), layers.Dense(LATENT, name="z_log_var")(x)
        self.encoder = keras.Model(image, [z_mean, z_log_var, Sampling()([z_mean, z_log_var])], name="encoder")
        self.decoder = image_decoder()
        self.total_loss_tracker = keras.metrics.Mean(name="total_loss")
        self.reconstruction_loss_tracker = keras.metrics.Mean(name="reconstruction_loss")
        self.kl_loss_tracker = keras.metrics.Mean(name="kl_loss")

    @property
    def metrics(self):
        return [self.total_loss_tracker, self.reconstruction_loss_tracker, self.kl_loss_tracker]

    def train_step(self, data):
        with tf.GradientTape() as tape:
            z_mean, z_log_var, z = self.encoder(data)
            reconstruction = self.decoder(z)
            entropy = keras.losses.binary_crossentropy(data, reconstruction)
            reconstruction_loss = ops.mean(ops.sum(entropy, axis=(1, 2)))
            kl_loss = -0.5 * (1 + z_log_var - ops.square(z_mean) - ops.exp(z_log_var))
            kl_loss = ops.mean(ops.sum(kl_loss, axis=1))
            total_loss = reconstruction_loss + kl_loss
        grads = tape.gradient(total_loss, self.trainable_weights)
        self.optimizer.apply_gradients(zip(grads, self.trainable_weights))
        self.total_loss_tracker.update_state(total_loss)
        self.reconstruction_loss_tracker.update_state(reconstruction_loss)
        self.kl_loss_tracker.update_state(kl_loss)
        return {
            "loss": self.total_loss_tracker.result(),
            "reconstruction_loss": self.reconstruction_loss_tracker.result(),
            "kl_loss": self.kl_loss_tracker.result(),
        }


def vae():
    model = VAE()
    model.compile(optimizer=adam())
    return model


def log_normal_pdf(sample, mean, logvar):
    return tf.reduce_sum(-0.5 * ((sample - mean) ** 2.0 * tf.exp(-logvar) + logvar + tf.math.log(2.0 * math.pi)), axis=1)


class CVAE(keras.Model):
    """A label in encoder and decoder; the loss is one sample's estimate of the bound."""

    def __init__(self):
        super().__init__()
        self.encoder = keras.Sequential(
            [keras.Input((8, 8, 4)), layers.Conv2D(4, 3, 2, activation="relu"), layers.Flatten(), layers.Dense(2 * LATENT)]
        )
        self.decoder = image_decoder(LATENT + 3, activation=None)
        self.seed_generator = keras.random.SeedGenerator(11)
        self.loss_tracker = keras.metrics.Mean(name="elbo")

    @property
    def metrics(self):
        return [self.loss_tracker]

    def encode(self, x, label):
        planes = tf.tile(label[:, None, None, :], [1, 8, 8, 1])
        return tf.split(self.encoder(tf.concat([x, planes], axis=-1)), num_or_size_splits=2, axis=1)

    def reparameterize(self, mean, logvar):
        return keras.random.normal(tf.shape(mean), seed=self.seed_generator) * tf.exp(logvar * 0.5) + mean

    def elbo_loss(self, x, label):
        mean, logvar = self.encode(x, label)
        z = self.reparameterize(mean, logvar)
        x_logit = self.decoder(tf.concat([z, label], axis=1))
        cross_ent = tf.nn.sigmoid_cross_entropy_with_logits(logits=x_logit, labels=x)
        logpx_z = -tf.reduce_sum(cross_ent, axis=[1, 2, 3])
        return -tf.reduce_mean(logpx_z + log_normal_pdf(z, 0.0, 0.0) - log_normal_pdf(z, mean, logvar))

    def train_step(self, data):
        with tf.GradientTape() as tape:
            loss = self.elbo_loss(*data)
        gradients = tape.gradient(loss, self.trainable_variables)
        self.optimizer.apply_gradients(zip(gradients, self.trainable_variables))
        self.loss_tracker.update_state(loss)
        return {"elbo": self.loss_tracker.result()}

    def test_step(self, data):
        self.loss_tracker.update_state(self.elbo_loss(*data))
        return {"elbo": self.loss_tracker.result()}


def cvae():
    model = CVAE()
    model.compile(adam())
    return model


class VectorQuantizer(layers.Layer):
    """The nearest entries of a codebook, with the gradient of the identity; losses of its own."""

    def __init__(self, num_embeddings, embedding_dim, beta=0.25, **kwargs):
        super().__init__(**kwargs)
        self.embedding_dim = embedding_dim
        self.num_embeddings = num_embeddings
        self.beta = beta
        self.embeddings = self.add_weight(
            shape=(embedding_dim, num_embeddings), initializer=keras.initializers.RandomUniform(seed=1), name="embeddings_vqvae"
        )

    def call(self, x):
        input_shape = ops.shape(x)
        flattened = ops.reshape(x, [-1, self.embedding_dim])
        encoding_indices = self.get_code_indices(flattened)
        encodings = ops.one_hot(encoding_indices, self.num_embeddings)
        quantized = ops.reshape(ops.matmul(encodings, ops.transpose(self.embeddings)), input_shape)
        commitment_loss = ops.mean((ops.stop_gradient(quantized) - x) ** 2)
        codebook_loss = ops.mean((quantized - ops.stop_gradient(x)) ** 2)
        self.add_loss(self.beta * commitment_loss + codebook_loss)
        return x + ops.stop_gradient(quantized - x)

    def get_code_indices(self, flattened_inputs):
        similarity = ops.matmul(flattened_inputs, self.embeddings)
        distances = ops.sum(flattened_inputs**2, axis=1, keepdims=True) + ops.sum(self.embeddings**2, axis=0) - 2 * similarity
        return ops.argmin(distances, axis=1)


class VQVAETrainer(keras.Model):
    """Adds up the reconstruction and what the codebook added to the losses of the model in it."""

    def __init__(self, train_variance, **kwargs):
        super().__init__(**kwargs)
        self.train_variance = train_variance
        image = keras.Input((8, 8, 1))
        encoded = layers.Conv2D(3, 3, strides=2, padding="same", name="encoder")(image)
        quantized = VectorQuantizer(5, 3, name="vector_quantizer")(encoded)
        decoded = layers.Conv2DTranspose(1, 3, strides=2, padding="same", name="decoder")(quantized)
        self.vqvae = keras.Model(image, decoded, name="vq_vae")
        self.total_loss_tracker = keras.metrics.Mean(name="total_loss")
        self.reconstruction_loss_tracker = keras.metrics.Mean(name="reconstruction_loss")
        self.vq_loss_tracker = keras.metrics.Mean(name="vq_loss")

    @property
    def metrics(self):
        return [self.total_loss_tracker, self.reconstruction_loss_tracker, self.vq_loss_tracker]

    def train_step(self, x):
        with tf.GradientTape() as tape:
            reconstructions = self.vqvae(x)
            reconstruction_loss = ops.mean((x - reconstructions) ** 2) / self.train_variance
            total_loss = reconstruction_loss + sum(self.vqvae.losses)
        grads = tape.gradient(total_loss, self.vqvae.trainable_variables)
        self.optimizer.apply_gradients(zip(grads, self.vqvae.trainable_variables))
        self.total_loss_tracker.update_state(total_loss)
        self.reconstruction_loss_tracker.update_state(reconstruction_loss)
        self.vq_loss_tracker.update_state(sum(self.vqvae.losses))
        return {
            "loss": self.total_loss_tracker.result(),
            "reconstruction_loss": self.reconstruction_loss_tracker.result(),
            "vqvae_loss": self.vq_loss_tracker.result(),
        }


def vq_vae():
    model = VQVAETrainer(float(np.var(IMAGES)))
    model.compile(optimizer=adam())
    return model


@keras.saving.register_keras_serializable("programs_latent")
def sinusoidal_embedding(x):
    frequencies = ops.exp(ops.linspace(ops.log(1.0), ops.log(10.0), 2))
    angular_speeds = ops.cast(2.0 * math.pi * frequencies, "float32")
    return ops.concatenate([ops.sin(angular_speeds * x), ops.cos(angular_speeds * x)], axis=3)


def noise_network():
    noisy_images, noise_variances = keras.Input((8, 8, 1)), keras.Input((1, 1, 1))
    e = layers.Lambda(sinusoidal_embedding, output_shape=(1, 1, 4))(noise_variances)
    e = layers.UpSampling2D(size=8, interpolation="nearest")(e)
    x = layers.Concatenate()([layers.Conv2D(4, kernel_size=1)(noisy_images), e])
    y = layers.BatchNormalization(center=False, scale=False)(x)
    y = layers.Conv2D(4, kernel_size=3, padding="same", activation="swish")(y)
    y = layers.UpSampling2D(size=2)(layers.AveragePooling2D(pool_size=2)(y))
    x = layers.Concatenate()([x, y])
    return keras.Model([noisy_images, noise_variances], layers.Conv2D(1, 1, kernel_initializer="zeros")(x))


class DiffusionModel(keras.Model):
    """Learns the noise that it adds; a copy of the network follows as a moving average, and is what is evaluated."""

    def __init__(self):
        super().__init__()
        self.normalizer = layers.Normalization()
        self.network = noise_network()
        self.ema_network = keras.models.clone_model(self.network)
        self.seed_generator = keras.random.SeedGenerator(8)

    def compile(self, **kwargs):
        super().compile(**kwargs)
        self.noise_loss_tracker = keras.metrics.Mean(name="n_loss")
        self.image_loss_tracker = keras.metrics.Mean(name="i_loss")

    @property
    def metrics(self):
        return [self.noise_loss_tracker, self.image_loss_tracker]

    def denoise(self, noisy_images, noise_rates, signal_rates, training):
        network = self.network if training else self.ema_network
        pred_noises = network([noisy_images, noise_rates**2], training=training)
        return pred_noises, (noisy_images - noise_rates * pred_noises) / signal_rates

    def losses_of(self, images, training):
        images = self.normalizer(images, training=training)
        noises = keras.random.normal(ops.shape(images), seed=self.seed_generator)
        times = keras.random.uniform((ops.shape(images)[0], 1, 1, 1), 0.0, 1.0, seed=self.seed_generator)
        angles = math.acos(0.95) + times * (math.acos(0.02) - math.acos(0.95))
        signal_rates, noise_rates = ops.cos(angles), ops.sin(angles)
        noisy_images = signal_rates * images + noise_rates * noises
        pred_noises, pred_images = self.denoise(noisy_images, noise_rates, signal_rates, training=training)
        return self.loss(noises, pred_noises), self.loss(images, pred_images)

    def train_step(self, images):
        with tf.GradientTape() as tape:
            noise_loss, image_loss = self.losses_of(images, training=True)
        gradients = tape.gradient(noise_loss, self.network.trainable_weights)
        self.optimizer.apply_gradients(zip(gradients, self.network.trainable_weights))
        self.noise_loss_tracker.update_state(noise_loss)
        self.image_loss_tracker.update_state(image_loss)
        for weight, ema_weight in zip(self.network.weights, self.ema_network.weights):
            ema_weight.assign(0.9 * ema_weight + 0.1 * weight)
        return {m.name: m.result() for m in self.metrics}

    def test_step(self, images):
        noise_loss, image_loss = self.losses_of(images, training=False)
        self.image_loss_tracker.update_state(image_loss)
        self.noise_loss_tracker.update_state(noise_loss)
        return {m.name: m.result() for m in self.metrics}


def ddim():
    model = DiffusionModel()
    model.compile(optimizer=keras.optimizers.AdamW(1e-3, weight_decay=1e-4, epsilon=1e-3), loss=keras.losses.mean_absolute_error)
    return model


def coupling(features=6):
    inputs = keras.Input((features,))
    t = layers.Dense(features, kernel_regularizer=keras.regularizers.l2(0.01))(layers.Dense(8, activation="tanh")(inputs))
    s = layers.Dense(features, activation="tanh")(layers.Dense(8, activation="tanh")(inputs))
    return keras.Model(inputs=inputs, outputs=[s, t])


class RealNVP(keras.Model):
    """A flow of coupling layers, trained by the likelihood that a method of the model computes."""

    def __init__(self, num_coupling_layers=3):
        super().__init__()
        self.num_coupling_layers = num_coupling_layers
        self.masks = ops.array([[0, 1] * 3, [1, 0] * 3] * 2, dtype="float32")
        self.loss_tracker = keras.metrics.Mean(name="loss")
        self.layers_list = [coupling() for _ in range(num_coupling_layers)]

    @property
    def metrics(self):
        return [self.loss_tracker]

    def call(self, x, training=True):
        log_det_inv = 0
        direction = -1 if training else 1
        for i in range(self.num_coupling_layers)[::direction]:
            x_masked = x * self.masks[i]
            reversed_mask = 1 - self.masks[i]
            s, t = self.layers_list[i](x_masked)
            s, t = s * reversed_mask, t * reversed_mask
            gate = (direction - 1) / 2
            x = reversed_mask * (x * ops.exp(direction * s) + direction * t * ops.exp(gate * s)) + x_masked
            log_det_inv += gate * ops.sum(s, axis=1)
        return x, log_det_inv

    def log_loss(self, x):
        y, logdet = self(x)
        log_likelihood = -0.5 * ops.sum(ops.square(y) + math.log(2 * math.pi), axis=1) + logdet
        return -ops.mean(log_likelihood)

    def train_step(self, data):
        with tf.GradientTape() as tape:
            loss = self.log_loss(data)
        g = tape.gradient(loss, self.trainable_variables)
        self.optimizer.apply_gradients(zip(g, self.trainable_variables))
        self.loss_tracker.update_state(loss)
        return {"loss": self.loss_tracker.result()}

    def test_step(self, data):
        self.loss_tracker.update_state(self.log_loss(data))
        return {"loss": self.loss_tracker.result()}


def real_nvp():
    model = RealNVP()
    model.compile(optimizer=adam())
    return model
