"""One seed, a different stream of random numbers on each replica."""

import keras
import tensorflow as tf

from keras_mirror import internals
from keras_mirror.rows import current_part

# The golden ratio in 32 bits: neighbouring seeds and neighbouring replicas do not meet.
_STRIDE = 0x9E3779B9


def draw_differently(generator):
    """Makes a `keras.random.SeedGenerator` draw another seed on each replica of a step.

    Replica 0 draws what one device draws. The state advances alike on every replica, so the next
    step, a saved model and a resumed run continue the same streams.

    Args:
        generator: The generator, changed in place.
    """
    if getattr(generator, "_keras_mirror_draws", False):
        return

    def next(ordered=True):
        seed = type(generator).next(generator, ordered=ordered)
        replica = _replica()
        if replica == 0:
            return seed
        offset = (replica * _STRIDE) % 2**32
        return seed + tf.constant([offset if seed.dtype == tf.uint32 else offset % 2**31, 0], seed.dtype)

    internals.set_attribute(generator, "next", next)
    internals.set_attribute(generator, "_keras_mirror_draws", True)


def _replica():
    part = current_part()
    if part is not None:
        return part.replica
    context = tf.distribute.get_replica_context()  # a step without data knows no part
    return 0 if context is None else int(tf.get_static_value(context.replica_id_in_sync_group))


def generators_of(model):
    """Every seed generator that the model's layers hold, once each."""
    found = {}
    for layer in internals.layers_of(model):
        for generator in internals.seed_generators_of(layer):
            if isinstance(generator, keras.random.SeedGenerator):
                found[id(generator)] = generator
    return list(found.values())
