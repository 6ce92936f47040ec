"""The table of the README: the same small trainings on one device, under plain Keras and under keras_mirror.

`python -m benchmarks.equivalence` runs them all and writes the table between the markers in README.md.
"""

import pathlib
import warnings

import keras
import numpy as np
import tensorflow as tf

import keras_mirror as km

README = pathlib.Path(__file__).parent.parent / "README.md"
BEGIN, END = "<!-- equivalence:begin -->", "<!-- equivalence:end -->"
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
        return lambda model: model.fit(x(), epochs=2, verbose=0)
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


def mirror(build_fn, devices):
    """The model of this package."""
    return km.mirrored_model(build_fn, devices=devices)


def plain(build_fn, devices):
    """The model of plain Keras."""
    strategy = tf.distribute.MirroredStrategy(devices, cross_device_ops=tf.distribute.ReductionToOneDevice())
    with strategy.scope():
        return build_fn()


def train(make, use):
    """Weights and logs of a training that always starts alike."""
    keras.backend.clear_session()
    keras.utils.set_random_seed(7)
    model = make()
    keras.utils.set_random_seed(7)
    return model, use(model).history


def verdict(replicas, build_fn, use, impl):
    """`equal`, or what is wrong, in a few words."""
    one, right = train(build_fn, use)
    try:
        many, found = train(lambda: impl(build_fn, [f"CPU:{i}" for i in range(replicas)]), use)
    except Exception:  # whatever Keras dies of is what the table reports
        return "crashes"
    pairs = [(a.numpy(), b.numpy()) for a, b in zip(one.weights, many.weights)]
    if not all(np.isfinite(b).all() for _, b in pairs):
        return "weights are NaN"
    off = max(float(np.max(np.abs(a - b))) for a, b in pairs)
    if off > 1e-4:
        return f"weights off by {off:.2g}"
    logs = [name for name in right if not np.allclose(right[name], found.get(name), rtol=1e-3, atol=1e-5)]
    return f"wrong {', '.join(logs)}" if logs else "equal"


def table():
    """The table in Markdown."""
    rows = []
    for name, replicas, build_fn, use in RUNS:
        rows.append((name, replicas, *(verdict(replicas, build_fn, use, impl) for impl in (plain, mirror))))
        print(*rows[-1], sep=" | ", flush=True)
    right = [sum(row[column] == "equal" for row in rows) for column in (2, 3)]
    lines = ["| training | replicas | plain Keras | keras_mirror |", "|---|---|---|---|"]
    lines += [f"| {name} | {replicas} | {theirs} | {ours} |" for name, replicas, theirs, ours in rows]
    lines += [f"| **equal to one device** | | **{right[0]} of {len(rows)}** | **{right[1]} of {len(rows)}** |"]
    return "\n".join(
        [*lines, "", f"Keras {keras.__version__}, TensorFlow {tf.__version__}, CPU replicas; `make table` makes it again."]
    )


def main():
    """Writes the table into the README."""
    km.virtual_cpus(4)
    warnings.simplefilter("ignore")
    text = README.read_text()
    head, rest = text.split(BEGIN)
    README.write_text(f"{head}{BEGIN}\n{table()}\n{END}{rest.split(END)[1]}")


if __name__ == "__main__":
    main()
