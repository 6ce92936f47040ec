"""Four logical CPUs for every test, and the same random numbers."""

import gc
import os

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
os.environ["KERAS_BACKEND"] = "tensorflow"

import keras
import numpy as np
import pytest
import tensorflow as tf

import keras_mirror as km
from keras_mirror import errors

km.virtual_cpus(4)
assert len(tf.config.list_logical_devices("CPU")) == 4, "the tests need four logical CPU devices"

# TensorFlow's own objects never die; without them a collection, of which each test makes some, takes 0.3 s less.
gc.collect()
gc.freeze()


@pytest.fixture(autouse=True)
def fresh():
    """Each test starts from the same seed, says every warning again, and leaves no model behind."""
    keras.backend.clear_session()
    keras.utils.set_random_seed(7)
    errors.forget_warnings()
    yield
    keras.mixed_precision.set_dtype_policy("float32")


@pytest.fixture
def data():
    """29 rows of 6 features and a target: a number that no batch size here divides."""
    rng = np.random.RandomState(3)
    x = rng.randn(29, 6).astype("float32")
    return x, (x @ rng.randn(6, 1) + rng.randn(29, 1)).astype("float32")


@pytest.fixture
def build_fn():
    """Builds and compiles a small model."""

    def build():
        model = keras.Sequential([keras.Input((6,)), keras.layers.Dense(8, activation="tanh"), keras.layers.Dense(1)])
        model.compile(keras.optimizers.SGD(0.05), "mse", metrics=["mae"])
        return model

    return build
