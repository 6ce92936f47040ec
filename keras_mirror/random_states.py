"""The state of Python's, NumPy's, Keras' and TensorFlow's global random numbers."""

import random

import keras
import numpy as np
import tensorflow as tf

from keras_mirror import internals


def host_state():
    """The states of Python's `random` and of `numpy.random`, which code of the user's own draws from."""
    version, numbers, gauss = random.getstate()
    name, keys, *rest = np.random.get_state()
    return {"python": (version, np.array(numbers, np.uint32), gauss), "numpy": (name, keys, *rest)}


def set_host_state(state):
    """Sets what `host_state` returned."""
    version, numbers, gauss = state["python"]
    random.setstate((version, tuple(int(number) for number in numbers), gauss))
    np.random.set_state(state["numpy"])


def draw_others_from_host():
    """Makes Python's `random` and `numpy.random` continue somewhere else."""
    random.seed(977)
    np.random.seed(977)


def same_host_state(one, other):
    """Whether nothing was drawn between two results of `host_state`."""
    return all(np.array_equal(one[name][1], other[name][1]) and one[name][2:] == other[name][2:] for name in one)


def generator_states():
    """The states of the global generators of Keras and TensorFlow, those that exist."""
    return {name: np.array(variable.numpy()) for name, variable in _generators().items()}


def set_generator_states(states):
    """Sets what `generator_states` returned, making the generators that do not exist yet."""
    for name, variable in _generators(make=states).items():
        if name in states:
            variable.assign(states[name])


def generator_variables():
    """The TensorFlow variables behind these generators."""
    return list(_generators().values())


def _generators(make=()):
    if "keras" in make and internals.global_seed_generator() is None:
        keras.random.uniform(())  # makes it
    of_tf = tf.random.get_global_generator() if "tensorflow" in make else internals.global_tf_generator()
    of_keras = internals.global_seed_generator()
    found = {"keras": of_keras and of_keras.state.value, "tensorflow": of_tf and of_tf.state}
    return {name: variable for name, variable in found.items() if variable is not None}
