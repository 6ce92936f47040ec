"""One device, played by the first replica: what is reduced over all replicas is what that one has."""

import contextlib

import tensorflow as tf

from keras_mirror.rows import Part, rows_of, working_on
from keras_mirror.shadowing import shadowed
from keras_mirror.shared_seeds import sharing_seeds


class _OnlyReplica(tf.distribute.ReplicaContext):
    """What `tf.distribute.get_replica_context` gives a step that runs on one device."""

    num_replicas_in_sync = property(lambda self: 1)

    def all_reduce(self, reduce_op, value, options=None):
        return value

    def all_gather(self, value, axis, options=None):
        return value

    def merge_call(self, merge_fn, args=(), kwargs=None):
        with working_on(None):  # as in the main thread, while all replicas wait in theirs
            return super().merge_call(merge_fn, args, kwargs)


@contextlib.contextmanager
def as_one_device(strategy, batch):
    """While entered, a step in this thread runs as on one device, on the first replica's copies of the variables.

    Running it on all replicas with the whole batch on each would not do: what a step reduces by itself, the sums
    of variables with an `aggregation`, and what it writes to a variable of which there is one, would count each row
    once a replica.

    Args:
        strategy: A `keras_mirror.MirroredStrategy`.
        batch: The global batch, a structure of tensors.
    """
    rows = next(rows_of(leaf) for leaf in tf.nest.flatten(batch) if leaf is not None)
    alone = shadowed(
        strategy.extended,
        reduce_to=lambda reduce_op, value, destinations, options=None: value,
        batch_reduce_to=lambda reduce_op, pairs, options=None: [value for value, _ in pairs],
    )
    part = working_on(Part(strategy, 0, rows, rows, True, alone=True))
    with strategy.scope(), alone, _OnlyReplica(strategy, 0), tf.device(strategy.extended.worker_devices[0]), part:
        with sharing_seeds(strategy) as share_seeds:
            share_seeds()
            yield
