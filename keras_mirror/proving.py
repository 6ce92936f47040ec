"""The proof that N replicas equal one device on this machine: small trainings, each done on both."""

import contextlib
import dataclasses

import keras
import numpy as np
import tensorflow as tf

from keras_mirror.model import mirrored_model
from keras_mirror.report import Report

SGD, layers, losses = keras.optimizers.SGD, keras.layers, keras.losses

rng = np.random.RandomState(3)
X = rng.randn(29, 6).astype("float32")
Y = (X @ rng.randn(6, 1) + rng.randn(29, 1)).astype("float32")
CLASSES = rng.randint(0, 3, 29)
WEIGHTS = rng.rand(29).astype("float32") + 0.1
TOKENS = rng.randint(1, 9, (29, 5))
TOKENS[::3, 3:] = 0
IMAGES = rng.rand(29, 8, 8, 1).astype("float32")


def mlp(optimizer=lambda: SGD(0.05), loss="mse", units=1, regularizer=None, **arguments):
    """A function that builds and compiles a small dense model."""

    def build_fn():
        hidden = layers.Dense(8, activation="tanh", kernel_regularizer=regularizer)
        model = keras.Sequential([keras.Input((6,)), hidden, layers.Dense(units)])
        model.compile(optimizer(), loss, **arguments)
        return model

    return build_fn


def stack(make, loss="mse", optimizer="sgd"):
    """A function that builds and compiles a Sequential model of what `make()` returns."""

    def build_fn():
        model = keras.Sequential(make())
        model.compile(optimizer, loss)
        return model

    return build_fn


def fit(x=X, y=Y, batch_size=8, **arguments):
    """A function that fits a model for two epochs."""
    if y is None:
        return lambda model: model.fit(x(), epochs=2, shuffle=False, verbose=0)
    return lambda model: model.fit(x, y, batch_size=batch_size, epochs=2, shuffle=False, verbose=0, **arguments)


def dataset(x=X, batch=8):
    """A function that makes a tf.data pipeline."""
    return lambda: tf.data.Dataset.from_tensor_slices((x, Y)).batch(batch)


def masked():
    """Tokens with a mask."""
    return [keras.Input((5,)), layers.Embedding(9, 4, mask_zero=True), layers.TimeDistributed(layers.Dense(1))]


def normalized():
    """Batch normalisation."""
    return [keras.Input((6,)), layers.Dense(5), layers.BatchNormalization(), layers.ReLU(), layers.Dense(1)]


def convolutional():
    """A convolution."""
    return [keras.Input((8, 8, 1)), layers.Conv2D(4, 3, activation="relu"), layers.Flatten(), layers.Dense(1)]


CROSSENTROPY = losses.SparseCategoricalCrossentropy(from_logits=True)
RUNS = [
    ("batches that divide evenly", 2, mlp(), fit(X[:28], Y[:28], 4)),
    ("a last batch of one row", 2, mlp(), fit(batch_size=4)),
    ("a first batch that does not divide", 2, mlp(), fit(batch_size=5)),
    ("a batch smaller than the number of replicas", 4, mlp(), fit(batch_size=3)),
    ("validation that does not divide", 4, mlp(metrics=["mae"]), fit(validation_data=(X[:11], Y[:11]), validation_batch_size=3)),
    ("Adam, uneven batches", 2, mlp(lambda: keras.optimizers.Adam(0.01)), fit()),
    ("clipnorm", 2, mlp(lambda: SGD(0.05, clipnorm=0.3)), fit(X[:28], Y[:28], 4)),
    ("global_clipnorm", 4, mlp(lambda: SGD(0.05, global_clipnorm=0.3)), fit(X[:24], Y[:24])),
    ("gradient accumulation", 2, mlp(lambda: SGD(0.05, gradient_accumulation_steps=2)), fit(X[:24], Y[:24], 4)),
    ("averages of the weights (EMA)", 2, mlp(lambda: SGD(0.05, use_ema=True, ema_overwrite_frequency=2)), fit(X[:24], Y[:24], 4)),
    ("loss scaling", 2, mlp(lambda: keras.optimizers.LossScaleOptimizer(SGD(0.05))), fit()),
    (
        "sample weights, divided by their sum",
        2,
        mlp(loss=losses.MeanSquaredError("mean_with_sample_weight")),
        fit(sample_weight=WEIGHTS),
    ),
    ("class weights", 2, mlp(loss=CROSSENTROPY, units=3), fit(X, CLASSES, class_weight={0: 1.0, 1: 3.0, 2: 0.5})),
    ("sum instead of mean", 2, mlp(lambda: SGD(0.005), losses.MeanSquaredError("sum")), fit()),
    ("a regulariser", 2, mlp(regularizer="l2"), fit()),
    ("masked sequences", 2, stack(masked), fit(TOKENS, TOKENS[..., None].astype("float32"))),
    ("batch normalisation, even batches", 2, stack(normalized), fit(X[:24], Y[:24])),
    ("batch normalisation, an empty replica", 4, stack(normalized), fit(batch_size=28)),
    ("a convolution, an empty replica", 4, stack(convolutional), fit(IMAGES, Y, 27)),
    ("steps_per_execution with a tail", 2, mlp(steps_per_execution=3), fit(batch_size=4)),
    ("tf.data, not divisible", 2, mlp(), fit(dataset(batch=7), None)),
    ("boolean features", 2, mlp(), fit(dataset(X > 0), None)),
]


@dataclasses.dataclass(frozen=True)
class Verdict:
    """How one training on replicas compares with the same on one device.

    Attributes:
        training: What was trained.
        replicas: int, on how many replicas.
        off: Largest difference of a weight; NaN if weights are not finite, None after a crash.
        text: `"equal"`, or what is wrong, in a few words.
    """

    training: str
    replicas: int
    off: float | None
    text: str

    @property
    def equal(self):
        """Whether nothing but rounding is between the two."""
        return self.text == "equal"


def mirror(build_fn, devices):
    """The model of this package."""
    return mirrored_model(build_fn, devices=devices)


def train(make, use):
    """Weights and logs of a training that always starts alike."""
    keras.backend.clear_session()
    keras.utils.set_random_seed(7)
    model = make()
    keras.utils.set_random_seed(7)
    return model, use(model).history


def judge(name, devices, build_fn, use, impl=mirror):
    """Trains on one device and on `devices`, and returns the `Verdict`.

    Args:
        name: What is trained.
        devices: List of device names.
        build_fn: Builds and compiles the model.
        use: Function of the model that trains it and returns a `keras.callbacks.History`.
        impl: `impl(build_fn, devices)` builds the model for several devices.
    """
    with tf.device(devices[0]):
        one, right = train(build_fn, use)
    try:
        many, found = train(lambda: impl(build_fn, devices), use)
    except Exception as error:  # whatever it dies of is the verdict
        return Verdict(name, len(devices), None, f"crashes ({type(error).__name__})")
    pairs = [(a.numpy(), b.numpy()) for a, b in zip(one.weights, many.weights)]
    if not all(np.isfinite(b).all() for _, b in pairs):
        return Verdict(name, len(devices), float("nan"), "weights are NaN")
    off = max(float(np.max(np.abs(a - b))) for a, b in pairs)
    if off > 1e-4:
        return Verdict(name, len(devices), off, f"weights off by {off:.2g}")
    logs = [log for log in right if not np.allclose(right[log], found.get(log), rtol=1e-3, atol=1e-5)]
    return Verdict(name, len(devices), off, f"wrong {', '.join(logs)}" if logs else "equal")


class Proof(Report):
    """What `prove` found: print it, or read it. True when every training equals one device.

    Attributes:
        verdicts: List of `Verdict`.
    """

    def __init__(self, verdicts, devices):
        self.verdicts = verdicts
        rows = [
            {"training": each.training, "replicas": each.replicas, "weights off by": each.off, "": each.text} for each in verdicts
        ]
        equal = sum(each.equal for each in verdicts)
        super().__init__(
            f"{equal} of {len(verdicts)} trainings on {', '.join(devices)} equal one device",
            ["training", "replicas", "weights off by", ""],
            rows,
        )

    def __bool__(self):
        return all(each.equal for each in self.verdicts)


def prove(devices, progress=iter):
    """Trains each of `RUNS` on one device and on as many of `devices` as it asks for.

    GPUs compute in full float32 meanwhile: TensorFloat-32 rounds to three digits, and differently for
    batches of different size.

    Args:
        devices: List of at least two device names, of one kind.
        progress: Function that takes the list of runs and yields them, e.g. a progress bar.

    Returns:
        A `Proof`.
    """
    with _full_precision():
        verdicts = [
            judge(name, devices[: max(2, min(replicas, len(devices)))], build_fn, use)
            for name, replicas, build_fn, use in progress(RUNS)
        ]
    return Proof(verdicts, devices)


@contextlib.contextmanager
def _full_precision():
    before = tf.config.experimental.tensor_float_32_execution_enabled()
    tf.config.experimental.enable_tensor_float_32_execution(False)
    try:
        yield
    finally:
        tf.config.experimental.enable_tensor_float_32_execution(before)
