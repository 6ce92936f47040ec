"""Checks while training that the copies of each mirrored variable still agree."""

import keras

from keras_mirror.consistency import checker_of, steps_taken
from keras_mirror.divergence import DivergenceReport, Record
from keras_mirror.errors import ReplicasDifferError, warn_once
from keras_mirror.pacing import EveryNth

MOST_SENTENCES = 5  # of one warning


class ReplicaConsistency(keras.callbacks.Callback):
    """Checks that the replicas' copies of each variable still agree, and says which differ and since when.

    N replicas are one device only while every replica holds the same weights, optimizer state and
    statistics. The callback looks before the first step, every so often, and at the end of each epoch,
    at all variables of layers, optimizers, metrics and seed generators, and at those that the traced
    steps captured. What each replica counts by itself until it is read (metrics, variables with
    `synchronization=ON_READ`) is local by design and only listed.

    A check costs each device one pass over its own copies; one number per variable and replica reaches
    the host, and only variables that differ are compared in full. docs/speed.md has measured it. With
    `every="epoch"` it costs nothing per step; with a number, `fit` runs no more than so many steps in one
    graph call.
    On one replica there is nothing to compare and nothing is done. It looks at the replicas of its own
    process, under this package's strategies and `tf.distribute.MirroredStrategy` alike.

    Args:
        every: `"epoch"`, or an int n to check every n-th batch as well.
        on_violation: `"warn"` for one `MirrorWarning` per variable. `"raise"` to stop with a
            `ReplicasDifferError` at the end of the batch or epoch. `"repair"` to make the copies equal and
            say so: floats that each replica updates by itself (statistics of a layer) are averaged,
            each replica counting once and a NaN not at all; anything else is copied from the replica
            whose value most replicas hold, replica 0 on a tie.
        tolerance: Largest absolute difference of floats that is let pass.

    Attributes:
        record: The checks of the last training, a `Record`.

    Raises:
        ValueError: If an argument is none of these.

    Example:

    >>> consistency = km.ReplicaConsistency()
    >>> history = model.fit(x, y, callbacks=[consistency], verbose=0)
    >>> print(consistency.report().title)
    Replica consistency: all 8 variables agree on 2 replicas
    """

    every_batch = False

    def __init__(self, every="epoch", on_violation="warn", *, tolerance=0.0):
        super().__init__()
        whole = isinstance(every, int) and not isinstance(every, bool) and every > 0
        if every != "epoch" and not whole:
            raise ValueError(f"ReplicaConsistency: every must be 'epoch' or a positive number of batches, and got {every!r}.")
        if on_violation not in ("warn", "raise", "repair"):
            raise ValueError(f"ReplicaConsistency: on_violation must be 'warn', 'raise' or 'repair', and got {on_violation!r}.")
        if not (isinstance(tolerance, (int, float)) and tolerance >= 0):
            raise ValueError(f"ReplicaConsistency: tolerance must be a number of at least 0, and got {tolerance!r}.")
        self.every = every
        self.on_violation = on_violation
        self.tolerance = tolerance
        self.async_safe = every == "epoch"
        self.every_steps = 0 if every == "epoch" else every
        self._every_nth = EveryNth(self.every_steps)
        self.record = Record()
        self.violation = None  # what was raised
        self._batches = 0
        self._is_checked = False  # whether the last batch was

    def on_train_begin(self, logs=None):
        self.record = Record()
        self.violation = None
        self._batches = 0
        self._is_checked = False
        self._check()

    def on_train_batch_begin(self, batch, logs=None):
        self._every_nth.begin_call(batch)

    def on_train_batch_end(self, batch, logs=None):
        ran, self._is_checked = self._every_nth.end_call(self.model)
        self._batches += ran
        if self._is_checked:
            self._check()

    def on_epoch_end(self, epoch, logs=None):
        if not self._is_checked:
            self._check()

    def report(self):
        """Which variables differed in the last training, by how much and since when; it has a `plot()`.

        Returns:
            A `DivergenceReport` with the columns `variable`, `kind`, `replicas` (those that differ from
            what most hold), `largest difference`, `since` and `done`.
        """
        return DivergenceReport(self.record)

    def _check(self):
        repairs = self.on_violation == "repair"
        found = checker_of(self.model).check(on_difference="repair" if repairs else "keep", tolerance=self.tolerance)
        new = self.record.add(steps_taken(self.model, self._batches) if found.replicas > 1 else 0, found)
        if found.differences and self.on_violation == "raise":
            self.violation = ReplicasDifferError(self._text(found.differences))
            raise self.violation
        for code in ("KM401", "KM402"):
            first_seen = [each for each in found.differences if each.code == code and each.copies.path in new]
            if first_seen:
                key = (id(self.model), code, *(each.copies.path for each in first_seen))
                warn_once(key, f"ReplicaConsistency: {self._text(first_seen)}", code=code)

    def _text(self, differences):
        """The differences and, once, each remedy."""
        said = [self._sentence(each) for each in differences[:MOST_SENTENCES]]
        if len(differences) > MOST_SENTENCES:
            more = len(differences) - MOST_SENTENCES
            said.append(f"{more} more variable{'s' * (more != 1)}, which report() lists")
        remedies = dict.fromkeys(each.remedy for each in differences)
        return ". ".join(["; ".join(said), *remedies]) + "."

    def _sentence(self, difference):
        since = self.record.divergences[difference.copies.path].since
        return f"{difference}, since {since}" + (f", and was {difference.repaired}" if difference.repaired else "")
