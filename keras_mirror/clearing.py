"""What `keras.utils.clear_session` does to the scope of a strategy."""

import contextlib

import tensorflow as tf


@contextlib.contextmanager
def explaining_clear_session():
    """Around a scope: says what happened where `keras.utils.clear_session` threw away the graph that the scope is kept in."""
    graph = tf.compat.v1.get_default_graph()
    try:
        yield
    except IndexError:  # of TensorFlow, which looks for the scope in the new graph
        if tf.compat.v1.get_default_graph() is graph:
            raise
        raise RuntimeError(
            "keras.utils.clear_session() was called inside the scope of a strategy, as in build_fn, and ended the scope, so that "
            "what is made after it would exist on one device only; call it before: `keras.utils.clear_session()`, then "
            "`model = keras_mirror.mirrored_model(build_fn)`."
        ) from None
