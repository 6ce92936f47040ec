"""Rays, patches, features and curves learnt from images: each as a published Keras example writes it, on tiny networks."""

import keras
import numpy as np
import tensorflow as tf
from keras import layers, ops

from tests.equivalence.programs_generative import adam

_random = np.random.RandomState(8)
SAMPLES = 3  # points on a ray
PICTURES = _random.rand(29, 4, 4, 3).astype("float32")
RAYS = _random.randn(29, 4 * 4 * SAMPLES, 6).astype("float32")
DEPTHS = np.sort(_random.rand(29, 4, 4, SAMPLES) * 4 + 2, -1).astype("float32")
COLOURS = _random.rand(29, 8, 8, 3).astype("float32")
PATCHES, WIDTH = 4, 8  # of an image of 8 by 8, and how wide each is encoded


# --- NeRF ---------------------------------------------------------------------------------------


def render_rgb_depth(model, rays_flat, t_vals):
    predictions = tf.reshape(model(rays_flat), shape=(-1, 4, 4, SAMPLES, 4))
    rgb = tf.sigmoid(predictions[..., :-1])
    sigma_a = tf.nn.relu(predictions[..., -1])
    delta = t_vals[..., 1:] - t_vals[..., :-1]
    delta = tf.concat([delta, tf.broadcast_to([1e10], shape=(tf.shape(t_vals)[0], 4, 4, 1))], axis=-1)
    alpha = 1.0 - tf.exp(-sigma_a * delta)
    transmittance = tf.math.cumprod(1.0 - alpha + 1e-10, axis=-1, exclusive=True)
    weights = alpha * transmittance
    return tf.reduce_sum(weights[..., None] * rgb, axis=-2), tf.reduce_sum(weights * t_vals, axis=-1)


class NeRF(keras.Model):
    """Renders images from what a network says of points on rays; PSNR as a metric."""

    def __init__(self, nerf_model):
        super().__init__()
        self.nerf_model = nerf_model

    def compile(self, optimizer, loss_fn):
        super().compile()
        self.optimizer = optimizer
        self.loss_fn = loss_fn
        self.loss_tracker = keras.metrics.Mean(name="loss")
        self.psnr_metric = keras.metrics.Mean(name="psnr")

    @property
    def metrics(self):
        return [self.loss_tracker, self.psnr_metric]

    def train_step(self, inputs):
        images, rays = inputs
        rays_flat, t_vals = rays
        with tf.GradientTape() as tape:
            rgb, _ = render_rgb_depth(self.nerf_model, rays_flat, t_vals)
            loss = self.loss_fn(images, rgb)
        gradients = tape.gradient(loss, self.nerf_model.trainable_variables)
        self.optimizer.apply_gradients(zip(gradients, self.nerf_model.trainable_variables))
        return self.tracked(images, rgb, loss)

    def test_step(self, inputs):
        images, (rays_flat, t_vals) = inputs
        rgb, _ = render_rgb_depth(self.nerf_model, rays_flat, t_vals)
        return self.tracked(images, rgb, self.loss_fn(images, rgb))

    def tracked(self, images, rgb, loss):
        self.loss_tracker.update_state(loss)
        self.psnr_metric.update_state(tf.image.psnr(images, rgb, max_val=1.0))
        return {"loss": self.loss_tracker.result(), "psnr": self.psnr_metric.result()}


def nerf():
    inputs = keras.Input((4 * 4 * SAMPLES, 6))
    x = layers.Dense(8, activation="tanh")(inputs)
    x = layers.concatenate([layers.Dense(8, activation="tanh")(x), inputs], axis=-1)
    model = NeRF(keras.Model(inputs, layers.Dense(4)(x)))
    model.compile(adam(), keras.losses.MeanSquaredError())
    return model


# --- masked images ------------------------------------------------------------------------------


class Patches(layers.Layer):
    def call(self, images):
        patches = tf.image.extract_patches(images, [1, 4, 4, 1], [1, 4, 4, 1], [1, 1, 1, 1], "VALID")
        return ops.reshape(patches, (ops.shape(images)[0], PATCHES, patches.shape[-1]))


class PatchEncoder(layers.Layer):
    """Hides half of the patches of each image, others for each, behind a token that is learnt."""

    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.num_mask = PATCHES // 2
        self.seed_generator = keras.random.SeedGenerator(77)
        self.projection = layers.Dense(WIDTH)
        self.position_embedding = layers.Embedding(PATCHES, WIDTH)

    def build(self, input_shape):
        self.mask_token = self.add_weight(shape=(1, input_shape[-1]), initializer="ones", name="mask_token")
        self.projection.build(input_shape)
        self.position_embedding.build((None, PATCHES))
        self.built = True

    def call(self, patches):
        batch_size = ops.shape(patches)[0]
        embeddings = self.projection(patches) + self.position_embedding(ops.expand_dims(ops.arange(PATCHES), 0))
        rand_indices = ops.argsort(keras.random.uniform((batch_size, PATCHES), seed=self.seed_generator), axis=-1)
        mask_indices, unmask_indices = rand_indices[:, : self.num_mask], rand_indices[:, self.num_mask :]
        unmasked_embeddings = tf.gather(embeddings, unmask_indices, axis=1, batch_dims=1)
        unmasked_positions = self.position_embedding(unmask_indices)
        masked_positions = self.position_embedding(mask_indices)
        mask_tokens = ops.repeat(ops.repeat(self.mask_token, self.num_mask, axis=0)[None], batch_size, axis=0)
        masked_embeddings = self.projection(mask_tokens) + masked_positions
        return unmasked_embeddings, masked_embeddings, unmasked_positions, mask_indices


def transformer(name, outputs=WIDTH):
    inputs = keras.Input((None, WIDTH))
    x = layers.LayerNormalization()(inputs)
    x = layers.Add()([layers.MultiHeadAttention(2, 4)(x, x), inputs])
    x = layers.Dense(outputs, activation=ops.gelu)(layers.LayerNormalization()(x))
    return keras.Model(inputs, x, name=name)


class MaskedAutoencoder(keras.Model):
    """Encodes the patches that are seen, and decodes those that are not."""

    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.train_augmentation = keras.Sequential([layers.Rescaling(2.0, -1.0)])
        self.patch_layer = Patches()
        self.patch_encoder = PatchEncoder()
        self.encoder = transformer("encoder")
        self.decoder = transformer("decoder", 16)

    def calculate_loss(self, images):
        patches = self.patch_layer(self.train_augmentation(images))
        unmasked, masked, unmasked_positions, mask_indices = self.patch_encoder(patches)
        encoder_outputs = self.encoder(unmasked) + unmasked_positions
        decoder_outputs = self.decoder(ops.concatenate([encoder_outputs, masked], axis=1))
        loss_patch = tf.gather(patches, mask_indices, axis=1, batch_dims=1)
        loss_output = decoder_outputs[:, PATCHES - self.patch_encoder.num_mask :]
        return self.compute_loss(y=loss_patch, y_pred=loss_output), loss_patch, loss_output

    def train_step(self, images):
        with tf.GradientTape() as tape:
            total_loss, loss_patch, loss_output = self.calculate_loss(images)
        train_vars = [
            *self.patch_encoder.trainable_variables,
            *self.encoder.trainable_variables,
            *self.decoder.trainable_variables,
        ]
        self.optimizer.apply_gradients(zip(tape.gradient(total_loss, train_vars), train_vars))
        return {"total": total_loss, **self.compute_metrics(images, loss_patch, loss_output)}

    def test_step(self, images):
        total_loss, loss_patch, loss_output = self.calculate_loss(images)
        return {"total": total_loss, **self.compute_metrics(images, loss_patch, loss_output)}


def masked_images():
    model = MaskedAutoencoder()
    model.compile(optimizer=adam(), loss=keras.losses.MeanSquaredError(), metrics=["mae"])
    return model


# --- I-JEPA -------------------------------------------------------------------------------------


class IJEPA(keras.Model):
    """Predicts the features of patches from those of others; a moving average of the encoder makes the targets."""

    def __init__(self, momentum=0.9, **kwargs):
        super().__init__(**kwargs)
        self.momentum = momentum
        self.patch_layer = Patches()
        self.embed = layers.Dense(WIDTH)
        self.embed.build((None, PATCHES, 16))
        self.context_encoder = transformer("context_encoder")
        self.target_encoder = transformer("target_encoder")
        self.target_encoder.set_weights(self.context_encoder.get_weights())
        self.target_encoder.trainable = False
        self.predictor = transformer("predictor")
        self.positions = self.add_weight(shape=(1, PATCHES, WIDTH), initializer="random_normal", name="positions")
        self.mask_token = self.add_weight(shape=(1, 1, WIDTH), initializer="zeros", name="mask_token")
        self.loss_tracker = keras.metrics.Mean(name="loss")

    @property
    def metrics(self):
        return [self.loss_tracker]

    def features_and_targets(self, images):
        batch_size = ops.shape(images)[0]
        tokens = self.embed(self.patch_layer(images)) + self.positions
        targets = ops.stop_gradient(self.target_encoder(tokens, training=False))[:, 2:]
        context = self.context_encoder(tokens[:, :2], training=True)
        masked = ops.broadcast_to(self.mask_token, (batch_size, PATCHES - 2, WIDTH)) + self.positions[:, 2:]
        predicted = self.predictor(ops.concatenate([context, masked], axis=1), training=True)[:, 2:]
        mean, variance = ops.moments(targets, axes=-1, keepdims=True)
        return predicted, (targets - mean) / ops.sqrt(variance + 1e-2)

    def train_step(self, images):
        with tf.GradientTape() as tape:
            predicted, targets = self.features_and_targets(images)
            difference = ops.abs(predicted - targets)
            loss = ops.mean(ops.where(difference < 1.0, 0.5 * difference**2, difference - 0.5))
        variables = self.trainable_variables
        gradients, _ = tf.clip_by_global_norm(tape.gradient(loss, variables), 1.0)
        self.optimizer.apply_gradients(zip(gradients, variables))
        for target, weight in zip(self.target_encoder.weights, self.context_encoder.weights):
            target.assign(self.momentum * target + (1.0 - self.momentum) * ops.stop_gradient(weight))
        self.loss_tracker.update_state(loss)
        return {"loss": self.loss_tracker.result(), "spread": ops.mean(ops.std(predicted, axis=0))}


def i_jepa():
    model = IJEPA()
    model.compile(optimizer=adam())
    return model


# --- Zero-DCE -----------------------------------------------------------------------------------


def color_constancy_loss(x):
    mean_rgb = ops.mean(x, axis=(1, 2), keepdims=True)
    r, g, b = mean_rgb[..., 0], mean_rgb[..., 1], mean_rgb[..., 2]
    return ops.sqrt(ops.square(r - g) ** 2 + ops.square(r - b) ** 2 + ops.square(b - g) ** 2)


def exposure_loss(x, mean_val=0.6):
    x = ops.mean(x, axis=3, keepdims=True)
    return ops.mean(ops.square(ops.average_pool(x, pool_size=4, strides=4) - mean_val))


def illumination_smoothness_loss(x):
    batch_size, height, width = ops.shape(x)[0], ops.shape(x)[1], ops.shape(x)[2]
    h_tv = ops.sum(ops.square(x[:, 1:] - x[:, : height - 1]))
    w_tv = ops.sum(ops.square(x[:, :, 1:] - x[:, :, : width - 1]))
    count_h, count_w = (width - 1) * x.shape[-1], width * (x.shape[-1] - 1)
    return 2 * (h_tv / count_h + w_tv / count_w) / ops.cast(batch_size, "float32")


class SpatialConsistencyLoss(keras.losses.Loss):
    def __init__(self, **kwargs):
        super().__init__(reduction="none")
        self.left_kernel = ops.array([[[[0]], [[0]], [[0]]], [[[-1]], [[1]], [[0]]], [[[0]], [[0]], [[0]]]], dtype="float32")
        self.up_kernel = ops.array([[[[0]], [[-1]], [[0]]], [[[0]], [[1]], [[0]]], [[[0]], [[0]], [[0]]]], dtype="float32")

    def call(self, y_true, y_pred):
        original = ops.average_pool(ops.mean(y_true, 3, keepdims=True), pool_size=2, strides=2)
        enhanced = ops.average_pool(ops.mean(y_pred, 3, keepdims=True), pool_size=2, strides=2)
        loss = 0
        for kernel in (self.left_kernel, self.up_kernel):
            before = tf.nn.conv2d(original, kernel, strides=[1, 1, 1, 1], padding="SAME")
            loss += ops.square(before - tf.nn.conv2d(enhanced, kernel, strides=[1, 1, 1, 1], padding="SAME"))
        return loss


class ZeroDCE(keras.Model):
    """Curves that brighten an image, learnt without targets from four losses of the image."""

    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        image = keras.Input((8, 8, 3))
        conv1 = layers.Conv2D(4, 3, activation="relu", padding="same")(image)
        conv2 = layers.Conv2D(4, 3, activation="relu", padding="same")(conv1)
        both = layers.Concatenate(axis=-1)([conv1, conv2])
        self.dce_model = keras.Model(image, layers.Conv2D(6, 3, activation="tanh", padding="same")(both))

    def compile(self, learning_rate, **kwargs):
        super().compile(**kwargs)
        self.optimizer = adam(learning_rate)
        self.spatial_constancy_loss = SpatialConsistencyLoss(reduction="none")
        self.trackers = [keras.metrics.Mean(name=name) for name in ("total", "illumination", "spatial", "color", "exposure")]

    @property
    def metrics(self):
        return self.trackers

    def get_enhanced_image(self, data, output):
        x = data
        for i in range(0, 6, 3):
            r = output[:, :, :, i : i + 3]
            x = x + r * (ops.square(x) - x)
        return x

    def call(self, data):
        return self.get_enhanced_image(data, self.dce_model(data))

    def compute_losses(self, data, output):
        enhanced = self.get_enhanced_image(data, output)
        illumination = 200 * illumination_smoothness_loss(output)
        spatial = ops.mean(self.spatial_constancy_loss(enhanced, data))
        color = 5 * ops.mean(color_constancy_loss(enhanced))
        exposure = 10 * ops.mean(exposure_loss(enhanced))
        return [illumination + spatial + color + exposure, illumination, spatial, color, exposure]

    def tracked(self, losses):
        for tracker, loss in zip(self.trackers, losses):
            tracker.update_state(loss)
        return {m.name: m.result() for m in self.metrics}

    def train_step(self, data):
        with tf.GradientTape() as tape:
            losses = self.compute_losses(data, self.dce_model(data))
        gradients = tape.gradient(losses[0], self.dce_model.trainable_weights)
        self.optimizer.apply_gradients(zip(gradients, self.dce_model.trainable_weights))
        return self.tracked(losses)

    def test_step(self, data):
        return self.tracked(self.compute_losses(data, self.dce_model(data)))


def zero_dce():
    model = ZeroDCE()
    model.compile(1e-3)
    return model
