"""`keras.random` without a seed on replicas: they share one generator, which Keras would make anew in each one's thread."""

import concurrent.futures
import contextlib

import keras

from keras_mirror import internals
from keras_mirror.randomness import draw_differently


@contextlib.contextmanager
def sharing_seeds(strategy):
    """While entered, replicas draw from this thread's global generator, each its own numbers.

    The generator is made when a replica first draws, from the same seed as on one device, and is this thread's
    afterwards. One that was made outside of the scope is replaced by one with its state and a copy on each replica.

    Args:
        strategy: The strategy that runs the replicas.

    Yields:
        A function without arguments that a replica calls in its own thread before it runs.
    """
    shared = _SharedSeeds(strategy, internals.global_seed_generator())
    try:
        yield lambda: internals.set_global_seed_generator(shared)
    finally:
        internals.set_global_seed_generator(shared.generator)


class _SharedSeeds:
    """What Keras takes for the global generator in the threads of the replicas."""

    def __init__(self, strategy, generator):
        self._strategy = strategy
        self._ready = False
        self.generator = generator

    def next(self, ordered=True):
        return self._made().next(ordered=ordered)

    @property
    def state(self):
        return self._made().state

    def _made(self):
        if not self._ready:
            if getattr(self.generator and self.generator.state.value, "distribute_strategy", None) is not self._strategy:
                self._make()
            draw_differently(self.generator)
            self._ready = True
        return self.generator

    def _make(self):
        """Makes the generator in a thread of its own, as that of a replica has a graph or a branch of one open."""
        with concurrent.futures.ThreadPoolExecutor(1) as thread:
            self.generator = thread.submit(_made_in_scope, self._strategy, self.generator).result()


def _made_in_scope(strategy, former):
    """A generator with a copy on each replica, in the state of the `former` one if there is any."""
    state = None if former is None else former.state.value.numpy()
    with strategy.scope():
        made = keras.random.SeedGenerator(None if former is None else 0)
        if state is not None:
            made.state.assign(state)
    return made
