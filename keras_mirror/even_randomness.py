"""Random numbers that are the same for every row, so that it does not matter which replica draws them."""

import contextlib

import tensorflow as tf

_SEED = (1, 2)


@contextlib.contextmanager
def same_for_every_row():
    """While entered, TensorFlow's stateless random functions, which Keras draws from, return the same numbers for every row.

    Whatever the seed is: the first dimension is taken for the rows. Distributions whose parameters differ
    from row to row return their mean (the likeliest category) instead.
    """
    with contextlib.ExitStack() as undo:
        for module, name, replacement in _replacements():
            undo.callback(setattr, module, name, getattr(module, name))
            setattr(module, name, replacement)
        yield


def _replacements():
    for name in ("stateless_normal", "stateless_uniform", "stateless_truncated_normal"):
        yield tf.random, name, _of_one_row(getattr(tf.random, name))
    yield tf.random, "stateless_gamma", _mean_of_gamma
    yield tf.random, "stateless_binomial", _mean_of_binomial
    yield tf.random, "stateless_categorical", _likeliest
    yield tf.nn.experimental, "stateless_dropout", _dropout_of_one_row(tf.nn.experimental.stateless_dropout)


def _of_one_row(draw):
    def drawn(shape, seed, *args, **kwargs):
        shape = tf.convert_to_tensor(shape, tf.int32)
        first = tf.concat([tf.ones_like(shape[:1]), shape[1:]], 0)
        return tf.broadcast_to(draw(first, _SEED, *args, **kwargs), shape)

    return drawn


def _dropout_of_one_row(drop):
    def dropped(x, rate, seed, rng_alg="auto_select", noise_shape=None, name=None):
        shape = tf.shape(x) if noise_shape is None else tf.convert_to_tensor(noise_shape, tf.int32)
        first = tf.ones(tf.concat([tf.ones_like(shape[:1]), shape[1:]], 0), x.dtype)
        return x * drop(first, rate, _SEED, rng_alg)

    return dropped


def _mean_of_gamma(shape, seed, alpha, beta=None, dtype=tf.float32, name=None):
    return tf.broadcast_to(tf.cast(alpha, dtype) / tf.cast(1 if beta is None else beta, dtype), shape)


def _mean_of_binomial(shape, seed, counts, probs, output_dtype=tf.int32, name=None):
    return tf.broadcast_to(tf.cast(tf.cast(counts, probs.dtype) * probs, output_dtype), shape)


def _likeliest(logits, num_samples, seed, dtype=tf.int64, name=None):
    return tf.repeat(tf.argmax(logits, -1, dtype)[:, None], num_samples, 1)
