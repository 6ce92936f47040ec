"""The models and data of the benchmarks."""

import keras
import numpy as np

BATCH = 64


def data(kind, steps=100):
    """`(x, y)` for `steps` steps of `BATCH` rows."""
    rng = np.random.RandomState(0)
    shape = {"mlp": (784,), "cnn": (28, 28, 1)}[kind]
    rows = steps * BATCH
    return rng.rand(rows, *shape).astype("float32"), rng.randint(0, 10, rows)


def build(kind, steps_per_execution=1):
    """A function that builds and compiles the MLP (784-128-10) or the small CNN."""
    layers = keras.layers
    stacks = {
        "mlp": lambda: [keras.Input((784,)), layers.Dense(128, activation="relu"), layers.Dense(10)],
        "cnn": lambda: [
            keras.Input((28, 28, 1)),
            layers.Conv2D(16, 3, activation="relu"),
            layers.MaxPooling2D(),
            layers.Conv2D(32, 3, activation="relu"),
            layers.MaxPooling2D(),
            layers.Flatten(),
            layers.Dense(10),
        ],
    }

    def build_fn():
        model = keras.Sequential(stacks[kind]())
        model.compile(
            keras.optimizers.Adam(1e-3),
            keras.losses.SparseCategoricalCrossentropy(from_logits=True),
            metrics=["accuracy"],
            steps_per_execution=steps_per_execution,
        )
        return model

    return build_fn


def many_layers(variables):
    """A function that builds and compiles a model with so many small variables."""

    def build_fn():
        stack = [keras.layers.Dense(8, activation="relu") for _ in range(variables // 2)]
        model = keras.Sequential([keras.Input((8,)), *stack])
        model.compile("sgd", "mse")
        return model

    return build_fn
