import subprocess
import sys
import warnings

import keras
import pytest
import tensorflow as tf

from keras_mirror import errors


@pytest.mark.parametrize(
    ("keras_version", "tensorflow_version", "backend", "fragments"),
    [
        ("3.9.2", "2.20.0", "tensorflow", ["Keras 3.10 or newer", "3.9.2", "pip install"]),
        ("2.15.0", "2.18.0", "tensorflow", ["Keras 3.10 or newer", "2.15.0"]),
        ("3.12.0", "2.17.1", "tensorflow", ["TensorFlow 2.18 or newer", "2.17.1"]),
        ("3.12.0", "2.20.0", "jax", ["'jax'", "KERAS_BACKEND=tensorflow"]),
    ],
)
def test_what_cannot_work_is_refused_in_one_sentence(keras_version, tensorflow_version, backend, fragments):
    with pytest.raises(ImportError) as error:
        errors.check_versions(keras_version, tensorflow_version, backend)
    for fragment in fragments:
        assert fragment in str(error.value)
    assert "\n" not in str(error.value)


def test_supported_versions_pass():
    errors.check_versions("3.10.0", "2.18.0", "tensorflow")
    errors.check_versions("4.0.0rc1", "3.1.0-dev", "tensorflow")
    errors.check_versions(keras.__version__, tf.__version__, keras.backend.backend())


def test_a_cause_is_said_once():
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        for _ in range(3):
            errors.warn_once("cause", "Something.")
        errors.warn_once("another cause", "Something else.")
    assert [str(w.message) for w in seen] == ["Something.", "Something else."]
    assert all(w.category is errors.MirrorWarning for w in seen)


def test_import_starts_no_device_and_replaces_nothing():
    script = """
import keras, tensorflow as tf
from tensorflow.python.eager import context
before = {(cls, name): value for cls in (keras.Model, keras.optimizers.Optimizer, keras.losses.Loss, tf.Variable,
          tf.distribute.MirroredStrategy, keras.layers.BatchNormalization, keras.random.SeedGenerator)
          for name, value in vars(cls).items()}
import keras_mirror
after = {(cls, name): vars(cls)[name] for cls, name in before}
assert all(after[key] is before[key] for key in before), "a class was patched"
assert not context.context()._initialized, "TensorFlow was started"
assert keras_mirror.virtual_cpus(3) == ["CPU:0", "CPU:1", "CPU:2"]
assert len(tf.config.list_logical_devices("CPU")) == 3
"""
    subprocess.run([sys.executable, "-c", script], check=True, timeout=120)


def test_another_backend_is_refused_at_import():
    script = """
import keras
keras.backend.backend = lambda: "jax"  # as it answers under KERAS_BACKEND=jax
try:
    import keras_mirror
except ImportError as error:
    assert "KERAS_BACKEND=tensorflow" in str(error), error
else:
    raise SystemExit("imported")
"""
    subprocess.run([sys.executable, "-c", script], check=True, timeout=120)


def test_what_was_said_can_be_unsaid():
    with errors.unsaid(), pytest.warns(errors.MirrorWarning):
        errors.warn_once("key", "first")
    with pytest.warns(errors.MirrorWarning):
        errors.warn_once("key", "again")
