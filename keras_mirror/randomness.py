"""One seed, a different stream of random numbers on each replica."""

import contextlib

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
        part = current_part()
        if part is None or part.replica == 0:
            return seed
        offset = (part.replica * _STRIDE) % 2**32
        return seed + tf.constant([offset if seed.dtype == tf.uint32 else offset % 2**31, 0], seed.dtype)

    internals.set_attribute(generator, "next", next)
    internals.set_attribute(generator, "_keras_mirror_draws", True)


@contextlib.contextmanager
def drawing_without_seed(strategy):
    """While entered, on a replica, random numbers without a seed come from the generator of the thread that runs the strategy.

    Keras keeps one for each thread, and replicas run in threads of their own: each would make its own inside the graph.
    """
    lent = _Lent(strategy, internals.global_seed_generator())
    internals.set_global_seed_generator(lent)
    try:
        yield
    finally:
        internals.set_global_seed_generator(lent.before)


class _Lent:
    """In place of Keras' global seed generator: makes that, or takes it into the scope, when it is first asked.

    Attributes:
        before: The generator that the thread had before.
    """

    def __init__(self, strategy, before):
        self._strategy = strategy
        self.before = before

    def next(self, ordered=True):
        """As `keras.random.SeedGenerator.next`, another one on each replica."""
        return tf.distribute.get_replica_context().merge_call(lambda strategy: self._in_scope()).next(ordered=ordered)

    def _in_scope(self):
        """The generator of this thread, with a copy of its state on each replica."""
        here = internals.global_seed_generator()
        found = here.before if here is self else here
        if found is None or not self._strategy.extended.variable_created_in_scope(found.state.value):
            with tf.init_scope(), self._strategy.scope():
                made = keras.random.SeedGenerator(None if found is None else 0)
                if found is not None:
                    made.state.assign(found.state)
            found = made
        draw_differently(found)
        if here is self:
            self.before = found
        else:
            internals.set_global_seed_generator(found)
        return found


def generators_of(model):
    """Every seed generator that the model's layers hold, once each."""
    found = {}
    for layer in internals.layers_of(model):
        for generator in internals.seed_generators_of(layer):
            if isinstance(generator, keras.random.SeedGenerator):
                found[id(generator)] = generator
    return list(found.values())
