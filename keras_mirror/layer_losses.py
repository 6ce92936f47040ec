"""What `add_loss` and activity regularisers add in a layer, apart for each replica."""

import collections

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
        key = None if part is None else "alone" if part.alone else part.replica
        return self._of.setdefault(key, [])

    def __getitem__(self, index):
        return self.data[index]  # a slice is a list of Keras' own


def keep_losses_apart(layer):
    """Gives each replica losses of its own in a Keras layer, which is changed in place."""
    if not isinstance(internals.list_of_losses(layer), LossesOfReplicas):
        internals.set_list_of_losses(layer, LossesOfReplicas())
