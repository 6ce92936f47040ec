"""Logs the rows that every replica really got."""

import keras

from keras_mirror.callbacks.row_windows import row_windows
from keras_mirror.pacing import EveryNth
from keras_mirror.rows_report import MostReadings, RowsReport


class ReplicaBatchLogger(keras.callbacks.Callback):
    """Logs the rows that every replica really got: measured inside the step, not computed.

    At the end of each epoch `logs` gains `replica_<i>/examples` (rows of replica i in the epoch)
    and `replica_<i>/batch_size` (its mean rows a step), for History, CSVLogger and TensorBoard
    wherever they stand in the list of callbacks, and a line is printed below the progress bar
    unless `verbose=0`. Rows of validation are kept apart, in `report`.

    The counts stay on the device: one read per epoch, or every `log_freq` batches if asked. In between,
    `fit` goes on running many steps in one graph call.

    Args:
        log_freq: `"epoch"`, or an int n to add the same keys, counted over the last n batches, to the
            logs of every n-th batch as well. 1 reads the counts after every batch.

    Raises:
        ValueError: If `log_freq` is something else.

    Example:

    >>> logger = km.ReplicaBatchLogger()
    >>> history = model.fit(x, y, batch_size=8, callbacks=[logger], verbose=0)
    >>> print(logger.report())
    """

    adds_replica_logs = True  # so that `fit` calls it before the callbacks that read the logs
    every_batch = False

    def __init__(self, log_freq="epoch"):
        super().__init__()
        whole = isinstance(log_freq, int) and not isinstance(log_freq, bool) and log_freq > 0
        if log_freq != "epoch" and not whole:
            raise ValueError(f"ReplicaBatchLogger: log_freq must be 'epoch' or a positive number of batches, and got {log_freq!r}.")
        self.log_freq = log_freq
        self.async_safe = log_freq == "epoch"
        self.every_steps = 0 if log_freq == "epoch" else log_freq
        self._every_nth = EveryNth(self.every_steps)
        self.counts = []  # (epoch, "training" or "validation", RowCounts) of every epoch and evaluation
        self._epoch = 0
        self._training = False
        self._windows = {}
        self._readings = MostReadings()

    def on_train_begin(self, logs=None):
        self.counts = []
        self._readings = MostReadings()
        self._training = True

    def on_train_end(self, logs=None):
        self._training = False

    def on_epoch_begin(self, epoch, logs=None):
        self._epoch = epoch
        self._rows_read = self._steps_read = 0
        self._rows_noted = self._steps_noted = 0
        self._open("train")

    def on_train_batch_begin(self, batch, logs=None):
        self._every_nth.begin_call(batch)

    def on_train_batch_end(self, batch, logs=None):
        _, looks = self._every_nth.end_call(self.model)
        if not looks:
            return
        counts = self._read("train")
        rows, steps = counts.rows - self._rows_read, counts.steps - self._steps_read
        self._rows_read, self._steps_read = counts.rows, counts.steps
        self._note(counts)
        _add(logs, rows, rows / max(steps, 1))

    def on_epoch_end(self, epoch, logs=None):
        counts = self._read("train")
        self.counts.append((epoch, "training", counts))
        self._note(counts)
        _add(logs, counts.rows, counts.mean)

    def on_test_begin(self, logs=None):
        if self._training and self.every_steps:  # the steps before belong before it in the plot
            self._note(self._read("train"))
        self._open("test")

    def on_test_end(self, logs=None):
        counts = self._read("test")
        self.counts.append((self._epoch if self._training else None, "validation", counts))
        self._readings.add("validation", counts.steps, counts.rows)

    def line(self):
        """One line on the last epoch, e.g. `rows per step: replica 0 4, replica 1 3.25 (1 of 4 steps uneven)`."""
        _, _, counts = next(entry for entry in reversed(self.counts) if entry[1] == "training")
        parts = ", ".join(f"replica {i} {mean:.4g}" for i, mean in enumerate(counts.mean))
        text = f"rows per step: {parts} ({counts.uneven_steps} of {counts.steps} steps uneven"
        empty = int(counts.empty_steps.sum())
        return text + (f", {empty} empty part{'s' * (empty > 1)})" if empty else ")")

    def report(self):
        """What every replica got, as a table: one row per epoch, phase and replica.

        Returns:
            A `Report` with the columns `epoch`, `phase`, `replica`, `rows`, `mean`, `least`, `most`,
            `empty steps`, `uneven steps` and `steps`. `.plot()` draws the rows of each replica over
            epochs, or over steps where `log_freq` counts batches.
        """
        return RowsReport(self.counts, self._readings if self.every_steps else None)

    def _note(self, counts):
        self._readings.add("training", counts.steps - self._steps_noted, counts.rows - self._rows_noted)
        self._rows_noted, self._steps_noted = counts.rows, counts.steps

    def _open(self, kind):
        self._windows[kind] = row_windows(self.model, kind, "ReplicaBatchLogger")

    def _read(self, kind):
        first, *others = [window.read() for window in self._windows[kind]]
        return sum(others, first)


def _add(logs, rows, means):
    if logs is not None:
        for index, (total, mean) in enumerate(zip(rows, means)):
            logs[f"replica_{index}/examples"] = float(total)
            logs[f"replica_{index}/batch_size"] = float(mean)
