"""Programs that turn images into images, each as a published Keras example writes it for one device, on tiny networks."""

import keras
import numpy as np
import tensorflow as tf
from keras import layers, ops

from tests.equivalence.programs_generative import LATENT, adam

_random = np.random.RandomState(6)
HORSES = _random.rand(29, 8, 8, 1).astype("float32")
ZEBRAS = (_random.rand(29, 8, 8, 1) ** 2).astype("float32")
MASKS = np.eye(3, dtype="float32")[_random.randint(0, 3, (29, 8, 8))]
COLOURS = _random.rand(29, 8, 8, 3).astype("float32")
STYLES = (_random.rand(29, 8, 8, 3) ** 2).astype("float32")


# --- CycleGAN -----------------------------------------------------------------------------------


class ReflectionPadding2D(layers.Layer):
    def __init__(self, padding=(1, 1), **kwargs):
        super().__init__(**kwargs)
        self.padding = padding

    def call(self, x):
        height, width = self.padding
        return tf.pad(x, [[0, 0], [height, height], [width, width], [0, 0]], mode="REFLECT")


def resnet_generator(name):
    image = keras.Input((8, 8, 1))
    x = ReflectionPadding2D()(image)
    x = layers.Conv2D(4, 3, activation="relu")(x)
    y = layers.Conv2D(4, 3, padding="same")(ReflectionPadding2D()(x))
    y = layers.GroupNormalization(groups=-1)(y)
    x = layers.add([x, y[:, 1:-1, 1:-1]])
    return keras.Model(image, layers.Conv2D(1, 3, padding="same", activation="tanh")(x), name=name)


def patch_discriminator(name):
    image = keras.Input((8, 8, 1))
    x = layers.Conv2D(4, 4, strides=2, padding="same", activation="tanh")(image)
    return keras.Model(image, layers.Conv2D(1, 3, padding="same")(x), name=name)


class CycleGan(keras.Model):
    """Two generators, two discriminators, four optimizers, one tape for all."""

    def __init__(self, lambda_cycle=10.0, lambda_identity=0.5):
        super().__init__()
        self.gen_G, self.gen_F = resnet_generator("generator_G"), resnet_generator("generator_F")
        self.disc_X, self.disc_Y = patch_discriminator("discriminator_X"), patch_discriminator("discriminator_Y")
        self.lambda_cycle = lambda_cycle
        self.lambda_identity = lambda_identity

    def call(self, inputs):
        return self.disc_X(inputs), self.disc_Y(inputs), self.gen_G(inputs), self.gen_F(inputs)

    def compile(self, gen_G_optimizer, gen_F_optimizer, disc_X_optimizer, disc_Y_optimizer, gen_loss_fn, disc_loss_fn):
        super().compile()
        self.gen_G_optimizer = gen_G_optimizer
        self.gen_F_optimizer = gen_F_optimizer
        self.disc_X_optimizer = disc_X_optimizer
        self.disc_Y_optimizer = disc_Y_optimizer
        self.generator_loss_fn = gen_loss_fn
        self.discriminator_loss_fn = disc_loss_fn
        self.cycle_loss_fn = keras.losses.MeanAbsoluteError()
        self.identity_loss_fn = keras.losses.MeanAbsoluteError()

    def train_step(self, batch_data):
        real_x, real_y = batch_data
        with tf.GradientTape(persistent=True) as tape:
            fake_y, fake_x = self.gen_G(real_x, training=True), self.gen_F(real_y, training=True)
            cycled_x, cycled_y = self.gen_F(fake_y, training=True), self.gen_G(fake_x, training=True)
            same_x, same_y = self.gen_F(real_x, training=True), self.gen_G(real_y, training=True)
            disc_real_x, disc_fake_x = self.disc_X(real_x, training=True), self.disc_X(fake_x, training=True)
            disc_real_y, disc_fake_y = self.disc_Y(real_y, training=True), self.disc_Y(fake_y, training=True)
            cycle_loss_G = self.cycle_loss_fn(real_y, cycled_y) * self.lambda_cycle
            cycle_loss_F = self.cycle_loss_fn(real_x, cycled_x) * self.lambda_cycle
            id_loss_G = self.identity_loss_fn(real_y, same_y) * self.lambda_cycle * self.lambda_identity
            id_loss_F = self.identity_loss_fn(real_x, same_x) * self.lambda_cycle * self.lambda_identity
            total_loss_G = self.generator_loss_fn(disc_fake_y) + cycle_loss_G + id_loss_G
            total_loss_F = self.generator_loss_fn(disc_fake_x) + cycle_loss_F + id_loss_F
            disc_X_loss = self.discriminator_loss_fn(disc_real_x, disc_fake_x)
            disc_Y_loss = self.discriminator_loss_fn(disc_real_y, disc_fake_y)
        grads_G = tape.gradient(total_loss_G, self.gen_G.trainable_variables)
        grads_F = tape.gradient(total_loss_F, self.gen_F.trainable_variables)
        disc_X_grads = tape.gradient(disc_X_loss, self.disc_X.trainable_variables)
        disc_Y_grads = tape.gradient(disc_Y_loss, self.disc_Y.trainable_variables)
        self.gen_G_optimizer.apply_gradients(zip(grads_G, self.gen_G.trainable_variables))
        self.gen_F_optimizer.apply_gradients(zip(grads_F, self.gen_F.trainable_variables))
        self.disc_X_optimizer.apply_gradients(zip(disc_X_grads, self.disc_X.trainable_variables))
        self.disc_Y_optimizer.apply_gradients(zip(disc_Y_grads, self.disc_Y.trainable_variables))
        return {"G_loss": total_loss_G, "F_loss": total_loss_F, "D_X_loss": disc_X_loss, "D_Y_loss": disc_Y_loss}


def cyclegan():
    mse = keras.losses.MeanSquaredError()
    model = CycleGan()
    model.compile(
        *(adam(beta_1=0.5) for _ in range(4)),
        gen_loss_fn=lambda fake: mse(tf.ones_like(fake), fake),
        disc_loss_fn=lambda real, fake: (mse(tf.ones_like(real), real) + mse(tf.zeros_like(fake), fake)) * 0.5,
    )
    return model


# --- GauGAN -------------------------------------------------------------------------------------


class SPADE(layers.Layer):
    """Normalizes over the whole batch, and scales each pixel by what a mask says."""

    def __init__(self, filters, epsilon=1e-5, **kwargs):
        super().__init__(**kwargs)
        self.epsilon = epsilon
        self.conv = layers.Conv2D(4, 3, padding="same", activation="relu")
        self.conv_gamma = layers.Conv2D(filters, 3, padding="same")
        self.conv_beta = layers.Conv2D(filters, 3, padding="same")

    def build(self, input_shape):
        self.resize_shape = input_shape[1:3]

    def call(self, input_tensor, raw_mask):
        mask = ops.image.resize(raw_mask, self.resize_shape, interpolation="nearest")
        x = self.conv(mask)
        gamma, beta = self.conv_gamma(x), self.conv_beta(x)
        mean, var = tf.nn.moments(input_tensor, axes=(0, 1, 2), keepdims=True)
        normalized = (input_tensor - mean) / ops.sqrt(var + self.epsilon)
        return gamma * normalized + beta


class GaussianSampler(layers.Layer):
    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.seed_generator = keras.random.SeedGenerator(1337)

    def call(self, inputs):
        means, variance = inputs
        epsilon = keras.random.normal((ops.shape(means)[0], LATENT), seed=self.seed_generator)
        return means + ops.exp(0.5 * variance) * epsilon


def gaugan_generator():
    latent, mask = keras.Input((LATENT,)), keras.Input((8, 8, 3))
    x = layers.Reshape((4, 4, 2))(layers.Dense(32)(latent))
    x = layers.Conv2D(4, 3, padding="same")(ops.leaky_relu(SPADE(2)(x, mask)))
    x = layers.UpSampling2D((2, 2))(x)
    x = layers.Conv2D(1, 3, padding="same", activation="tanh")(ops.leaky_relu(SPADE(4)(x, mask)))
    return keras.Model([latent, mask], x, name="generator")


def gaugan_encoder():
    image = keras.Input((8, 8, 1))
    x = layers.Flatten()(layers.Conv2D(3, 3, strides=2, padding="same", activation="tanh")(image))
    return keras.Model(image, [layers.Dense(LATENT)(x), layers.Dense(LATENT)(x)], name="encoder")


def gaugan_discriminator():
    mask, image = keras.Input((8, 8, 3)), keras.Input((8, 8, 1))
    x = layers.Concatenate()([mask, image])
    x1 = layers.Conv2D(4, 3, strides=2, padding="same", activation="leaky_relu")(x)
    x2 = layers.Conv2D(4, 3, padding="same", activation="leaky_relu")(x1)
    return keras.Model([mask, image], [x1, x2, layers.Conv2D(1, 3)(x2)], name="discriminator")


class FeatureMatchingLoss(keras.losses.Loss):
    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.mae = keras.losses.MeanAbsoluteError()

    def call(self, y_true, y_pred):
        loss = 0
        for i in range(len(y_true) - 1):
            loss += self.mae(y_true[i], y_pred[i])
        return loss


class DiscriminatorLoss(keras.losses.Loss):
    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.hinge_loss = keras.losses.Hinge()

    def call(self, y, is_real):
        return self.hinge_loss(is_real, y)


class GauGAN(keras.Model):
    """A generator from a mask and the encoder's statistics of the image; losses of the features of the discriminator."""

    def __init__(self, feature_loss_coeff=10, kl_divergence_loss_coeff=0.1, **kwargs):
        super().__init__(**kwargs)
        self.feature_loss_coeff = feature_loss_coeff
        self.kl_divergence_loss_coeff = kl_divergence_loss_coeff
        self.discriminator = gaugan_discriminator()
        self.generator = gaugan_generator()
        self.encoder = gaugan_encoder()
        self.sampler = GaussianSampler()
        self.combined_model = self.build_combined_generator()
        self.disc_loss_tracker = keras.metrics.Mean(name="disc_loss")
        self.gen_loss_tracker = keras.metrics.Mean(name="gen_loss")
        self.feat_loss_tracker = keras.metrics.Mean(name="feat_loss")
        self.kl_loss_tracker = keras.metrics.Mean(name="kl_loss")

    @property
    def metrics(self):
        return [self.disc_loss_tracker, self.gen_loss_tracker, self.feat_loss_tracker, self.kl_loss_tracker]

    def build_combined_generator(self):
        self.discriminator.trainable = False
        mask, latent = keras.Input((8, 8, 3)), keras.Input((LATENT,))
        generated = self.generator([latent, mask])
        output = self.discriminator([mask, generated])
        self.discriminator.trainable = True
        return keras.Model([latent, mask], [*output, generated])

    def compile(self, gen_lr=1e-3, disc_lr=4e-3, **kwargs):
        super().compile(**kwargs)
        self.generator_optimizer = adam(gen_lr, beta_1=0.0)
        self.discriminator_optimizer = adam(disc_lr, beta_1=0.0)
        self.discriminator_loss = DiscriminatorLoss()
        self.feature_matching_loss = FeatureMatchingLoss()

    def train_discriminator(self, latent_vector, segmentation_map, real_image):
        fake_images = self.generator([latent_vector, segmentation_map])
        with tf.GradientTape() as gradient_tape:
            pred_fake = self.discriminator([segmentation_map, fake_images])[-1]
            pred_real = self.discriminator([segmentation_map, real_image])[-1]
            loss_fake = self.discriminator_loss(pred_fake, -ops.ones_like(pred_fake))
            loss_real = self.discriminator_loss(pred_real, ops.ones_like(pred_real))
            total_loss = 0.5 * (loss_fake + loss_real)
        self.discriminator.trainable = True
        gradients = gradient_tape.gradient(total_loss, self.discriminator.trainable_variables)
        self.discriminator_optimizer.apply_gradients(zip(gradients, self.discriminator.trainable_variables))
        return total_loss

    def train_generator(self, latent_vector, segmentation_map, image, mean, variance):
        self.discriminator.trainable = False
        with tf.GradientTape() as tape:
            real_d_output = self.discriminator([segmentation_map, image])
            *fake_d_output, _ = self.combined_model([latent_vector, segmentation_map])
            g_loss = -ops.mean(fake_d_output[-1])
            kl_loss = self.kl_divergence_loss_coeff * -0.5 * ops.sum(1 + variance - ops.square(mean) - ops.exp(variance))
            feature_loss = self.feature_loss_coeff * self.feature_matching_loss(real_d_output, fake_d_output)
            total_loss = g_loss + kl_loss + feature_loss
        all_trainable_variables = self.combined_model.trainable_variables + self.encoder.trainable_variables
        gradients = tape.gradient(total_loss, all_trainable_variables)
        self.generator_optimizer.apply_gradients(zip(gradients, all_trainable_variables))
        return total_loss, feature_loss, kl_loss

    def train_step(self, data):
        segmentation_map, image = data
        mean, variance = self.encoder(image)
        latent_vector = self.sampler([mean, variance])
        discriminator_loss = self.train_discriminator(latent_vector, segmentation_map, image)
        generator_loss, feature_loss, kl_loss = self.train_generator(latent_vector, segmentation_map, image, mean, variance)
        self.disc_loss_tracker.update_state(discriminator_loss)
        self.gen_loss_tracker.update_state(generator_loss)
        self.feat_loss_tracker.update_state(feature_loss)
        self.kl_loss_tracker.update_state(kl_loss)
        return {m.name: m.result() for m in self.metrics}


def gaugan():
    model = GauGAN()
    model.compile()
    return model


# --- style transfer -----------------------------------------------------------------------------


def get_mean_std(x, epsilon=1e-5):
    mean, variance = tf.nn.moments(x, axes=[1, 2], keepdims=True)
    return mean, tf.sqrt(variance + epsilon)


def ada_in(style, content):
    content_mean, content_std = get_mean_std(content)
    style_mean, style_std = get_mean_std(style)
    return style_std * (content - content_mean) / content_std + style_mean


class NeuralStyleTransfer(keras.Model):
    """A frozen encoder, a decoder, losses of the statistics of features."""

    def __init__(self, style_weight=4.0, **kwargs):
        super().__init__(**kwargs)
        image = keras.Input((8, 8, 3))
        first = layers.Conv2D(4, 3, padding="same", activation="relu", name="first")(image)
        second = layers.Conv2D(6, 3, strides=2, padding="same", activation="relu", name="second")(first)
        self.encoder = keras.Model(image, second)
        self.encoder.trainable = False
        self.loss_net = keras.Model(image, [first, second])
        self.loss_net.trainable = False
        self.decoder = keras.Sequential([keras.Input((4, 4, 6)), layers.UpSampling2D(), layers.Conv2D(3, 3, padding="same")])
        self.style_weight = style_weight

    def compile(self, optimizer, loss_fn):
        super().compile()
        self.optimizer = optimizer
        self.loss_fn = loss_fn
        self.style_loss_tracker = keras.metrics.Mean(name="style_loss")
        self.content_loss_tracker = keras.metrics.Mean(name="content_loss")
        self.total_loss_tracker = keras.metrics.Mean(name="total_loss")

    @property
    def metrics(self):
        return [self.style_loss_tracker, self.content_loss_tracker, self.total_loss_tracker]

    def losses_of(self, style, content):
        t = ada_in(style=self.encoder(style), content=self.encoder(content))
        reconstructed_image = self.decoder(t)
        reconstructed_features = self.loss_net(reconstructed_image)
        loss_content = self.loss_fn(t, reconstructed_features[-1])
        loss_style = 0.0
        for inp, out in zip(self.loss_net(style), reconstructed_features):
            mean_inp, std_inp = get_mean_std(inp)
            mean_out, std_out = get_mean_std(out)
            loss_style += self.loss_fn(mean_inp, mean_out) + self.loss_fn(std_inp, std_out)
        return self.style_weight * loss_style, loss_content

    def tracked(self, loss_style, loss_content, total_loss):
        self.style_loss_tracker.update_state(loss_style)
        self.content_loss_tracker.update_state(loss_content)
        self.total_loss_tracker.update_state(total_loss)
        return {m.name: m.result() for m in self.metrics}

    def train_step(self, inputs):
        style, content = inputs
        with tf.GradientTape() as tape:
            loss_style, loss_content = self.losses_of(style, content)
            total_loss = loss_content + loss_style
        trainable_vars = self.decoder.trainable_variables
        gradients = tape.gradient(total_loss, trainable_vars)
        self.optimizer.apply_gradients(zip(gradients, trainable_vars))
        return self.tracked(loss_style, loss_content, total_loss)

    def test_step(self, inputs):
        loss_style, loss_content = self.losses_of(*inputs)
        return self.tracked(loss_style, loss_content, loss_style + loss_content)


def adain():
    model = NeuralStyleTransfer()
    model.compile(adam(), keras.losses.MeanSquaredError())
    return model
