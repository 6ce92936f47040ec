"""What `add_loss` and activity regularisers add in a layer, apart for each replica."""

import collections

import keras
import tensorflow as tf

from keras_mirror import internals
from keras_mirror.rows import current_part


class LossesOfReplicas(collections.UserList):
    """A list that is another one on each replica.

    Keras keeps a layer's losses in a list of the layer. Replicas share the layer, and one that waits in the middle of
    its call for the others, as in a batch normalisation, would find theirs in it, and its own cleared.
    A replica that stands for one device, as where a layer is called for trial, has another one, too.
    """

    def __init__(self):
        self._of = {}

    @property
    def data(self):
        part = current_part()
        key = None if part is None else part.thread if part.thread is not None else "alone" if part.alone else part.replica
        return self._of.setdefault(key, [])

    def __setitem__(self, index, loss):
        self.data[index] = loss

    def __getitem__(self, index):
        return self.data[index]  # a slice is a list of Keras' own


def keep_losses_apart(layer):
    """Gives each replica losses of its own in a Keras layer, which is changed in place."""
    if not isinstance(internals.list_of_losses(layer), LossesOfReplicas):
        internals.set_list_of_losses(layer, LossesOfReplicas())


def has_entries_of_rows(values):
    """Whether the first dimension of what `add_loss` was given looks like that of the replica's rows."""
    rows = current_part().rows
    return bool(values.shape.rank) and (values.shape[0] is None or (isinstance(rows, int) and values.shape[0] == rows))


def adds_up_over_rows(regularizer):
    """Whether an activity regulariser counts two equal rows twice, found out by trying.

    Keras 3.10 adds it up over the rows of a batch, Keras 3.15 takes the mean.
    """
    with tf.init_scope():
        probes = [keras.layers.Activation("linear", activity_regularizer=regularizer, name="probe") for _ in range(2)]
        for rows, probe in enumerate(probes, 1):
            probe(tf.ones((rows, 4)))
        one, two = (float(sum(tf.reduce_sum(loss) for loss in probe.losses)) for probe in probes)
    return abs(two - 2 * one) < 1e-3 * abs(one)
