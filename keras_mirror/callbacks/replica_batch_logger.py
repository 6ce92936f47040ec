"""Logs the rows that every replica really got."""

import keras

from keras_mirror.engine import engine_of
from keras_mirror.global_batches import GlobalBatchStrategy
from keras_mirror.report import Report


class ReplicaBatchLogger(keras.callbacks.Callback):
    """Logs the rows that every replica really got: measured inside the step, not computed.

    At the end of each epoch `logs` gains `replica_<i>/examples` (rows of replica i in the epoch)
    and `replica_<i>/batch_size` (its mean rows a step), for History, CSVLogger and TensorBoard
    wherever they stand in the list of callbacks, and a line is printed below the progress bar
    unless `verbose=0`. Rows of validation are kept apart, in `report`.

    The counts stay on the device: one read per epoch, or every `log_freq` batches if asked.

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

    def __init__(self, log_freq="epoch"):
        super().__init__()
        whole = isinstance(log_freq, int) and not isinstance(log_freq, bool) and log_freq > 0
        if log_freq != "epoch" and not whole:
            raise ValueError(f"ReplicaBatchLogger: log_freq must be 'epoch' or a positive number of batches, and got {log_freq!r}.")
        self.log_freq = log_freq
        self.async_safe = log_freq == "epoch"
        self.every_batch = log_freq != "epoch"
        self.counts = []  # (epoch, "training" or "validation", RowCounts) of every epoch and evaluation
        self._epoch = 0
        self._training = False

    def on_train_begin(self, logs=None):
        self.counts = []
        self._training = True

    def on_train_end(self, logs=None):
        self._training = False

    def on_epoch_begin(self, epoch, logs=None):
        self._epoch = epoch
        self._batches_read = 0
        self._rows_read = self._steps_read = 0
        self._reset("train")

    def on_train_batch_end(self, batch, logs=None):
        if self.log_freq == "epoch" or (batch + 1) // self.log_freq == self._batches_read:
            return
        self._batches_read = (batch + 1) // self.log_freq
        counts = self._read("train")
        rows, steps = counts.rows - self._rows_read, counts.steps - self._steps_read
        self._rows_read, self._steps_read = counts.rows, counts.steps
        _add(logs, rows, rows / max(steps, 1))

    def on_epoch_end(self, epoch, logs=None):
        counts = self._read("train")
        self.counts.append((epoch, "training", counts))
        _add(logs, counts.rows, counts.mean)

    def on_test_begin(self, logs=None):
        self._reset("test")

    def on_test_end(self, logs=None):
        self.counts.append((self._epoch if self._training else None, "validation", self._read("test")))

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
            `empty steps`, `uneven steps` and `steps`.
        """
        columns = ["epoch", "phase", "replica", "rows", "mean", "least", "most", "empty steps", "uneven steps", "steps"]
        rows = [
            {
                "epoch": None if epoch is None else epoch + 1,
                "phase": phase,
                "replica": index,
                "rows": int(counts.rows[index]),
                "mean": float(counts.mean[index]),
                "least": int(counts.least[index]),
                "most": int(counts.most[index]),
                "empty steps": int(counts.empty_steps[index]),
                "uneven steps": counts.uneven_steps,
                "steps": counts.steps,
            }
            for epoch, phase, counts in sorted(self.counts, key=_order)
            for index in range(len(counts.rows))
        ]
        return Report("Rows that every replica got", columns, rows, [] if rows else ["Nothing was trained or evaluated yet."])

    def _counters(self, kind):
        """Where rows are counted: by `fit` and its like, and by a loop of the user's own over `strategy.run`."""
        engine, strategy = engine_of(self.model), self.model.distribute_strategy
        if not isinstance(strategy, GlobalBatchStrategy):
            raise TypeError(
                "ReplicaBatchLogger: the model was not built by keras_mirror, so nobody counts its rows; "
                "build it with keras_mirror.mirrored_model(build_fn)."
            )
        return [strategy.row_counters[kind], *([engine.counters[kind]] if engine else [])]

    def _read(self, kind):
        first, *others = [counter.read() for counter in self._counters(kind)]
        return sum(others, first)

    def _reset(self, kind):
        for counter in self._counters(kind):
            counter.reset()


def _order(entry):
    epoch, phase, _ = entry
    return (epoch is None, epoch or 0, phase)


def _add(logs, rows, means):
    if logs is not None:
        for index, (total, mean) in enumerate(zip(rows, means)):
            logs[f"replica_{index}/examples"] = float(total)
            logs[f"replica_{index}/batch_size"] = float(mean)
