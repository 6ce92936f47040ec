"""Four CPU replicas, one seed, nothing left over from the test before."""

import os

os.environ["KERAS_BACKEND"] = "tensorflow"
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

import keras
import pytest
import tensorflow as tf

import keras_mirror as km

km.virtual_cpus(4)
assert len(tf.config.list_logical_devices("CPU")) >= 4, "these tests need four logical CPU devices"


@pytest.fixture(autouse=True)
def fresh_session():
    keras.backend.clear_session()
    keras.utils.set_random_seed(7)
    yield
    keras.mixed_precision.set_dtype_policy("float32")
