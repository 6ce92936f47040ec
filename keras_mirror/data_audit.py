"""`audit_data`: whether an input pipeline is right for so many replicas."""

import contextlib
import random
import warnings

import keras
import numpy as np
import tensorflow as tf

from keras_mirror import errors, internals
from keras_mirror.data_findings import counted, delivery_findings, in_epochs
from keras_mirror.deliveries import Facts, gather, probe_py_dataset
from keras_mirror.feeds import Distributed, Split, is_endless_py_dataset, is_plain, kind_of
from keras_mirror.pipeline_findings import pipeline_findings
from keras_mirror.pipelines import is_endless
from keras_mirror.report import UNKNOWN, Report, axes_or_new

SEVERITIES = ("error", "warning", "note")
BARS = 60  # more rows than this are drawn in groups


class DataAudit(Report):
    """What `audit_data` returns: print it, read it, or plot it.

    It is true when there is a finding that is more than a note.

    Attributes:
        findings: List of `DataFinding` with `code`, `severity`, `what`, `remedy`, `rows`; errors first.
        epochs: List of `EpochDeliveries` with `epoch`, `steps`, `rows` (of each replica), `empty_parts`,
            `missing` and `repeated` (positions of rows in the source), `unknown`, and `lost` and `extra`
            (against one device). The four are empty, and `?` in the table, where rows change from
            reading to reading, so that which is which cannot be known.
        deliveries: Structured array, one entry a row delivered, with the fields `epoch` (from 1), `step`
            and `replica` (from 0) and `row` (position in the source, -1 if it does not hold the row).
        source_rows: int, rows of the source.
        replicas: int.
    """

    def __init__(self, facts, findings):
        self.findings = findings
        self.epochs = facts.epochs
        self.replicas = facts.replicas
        self.source_rows = 0 if facts.source is None else len(facts.source)
        self.deliveries = _deliveries(facts)
        limited = facts.steps is not None
        unknown = any(epoch.unknown for epoch in facts.epochs)
        columns = ["epoch", "steps", "rows", *[f"replica {index}" for index in range(facts.replicas)]]
        columns += ["not delivered"] * (not limited) + ["repeated"] + ["unknown"] * unknown
        rows = [
            {
                "epoch": epoch.epoch,
                "steps": epoch.steps,
                "rows": sum(epoch.rows),
                **{f"replica {index}": rows for index, rows in enumerate(epoch.rows)},
                "not delivered": len(epoch.missing) if facts.steady and not epoch.unknown else UNKNOWN,
                "repeated": len(epoch.repeated) if facts.steady else UNKNOWN,
                "unknown": epoch.unknown,
            }
            for epoch in facts.epochs
        ]
        self._undrawn = sum(epoch.unknown for epoch in facts.epochs)
        super().__init__(f"Data audit: {_verdict(facts)}", columns, rows, [str(finding) for finding in findings])

    def __bool__(self):
        return any(finding.severity != "note" for finding in self.findings)

    def plot(self, ax=None):
        """How often each row was delivered, by replica, over all epochs.

        Args:
            ax: matplotlib axes to draw on, or None for new ones.

        Returns:
            The axes.

        Raises:
            ImportError: If matplotlib is not installed.
        """
        ax = axes_or_new(ax)
        bars = min(self.source_rows, BARS)
        edges = np.round(np.linspace(0, self.source_rows, max(bars, 1) + 1))  # whole rows in each bar
        known, floor = self.deliveries[self.deliveries["row"] >= 0], np.zeros(max(bars, 1))
        for replica in range(self.replicas):
            counts, _ = np.histogram(known["row"][known["replica"] == replica], edges)
            height = counts / np.maximum(np.diff(edges), 1)
            ax.bar(edges[:-1], height, np.diff(edges), floor, align="edge", label=f"replica {replica}")
            floor += height
        ax.axhline(len(self.epochs), color="black", linestyle="--", linewidth=1, label="once an epoch")
        ax.set_ylim(0, max(1.0, len(self.epochs), floor.max()) * 1.1)
        ax.yaxis.get_major_locator().set_params(integer=True)
        undrawn = f" ({counted(self._undrawn)} not recognised)" if self._undrawn else ""
        title = f"Deliveries in {counted(len(self.epochs), 'epoch')}{undrawn}"
        ax.set(xlabel="row of the source", ylabel="times delivered", title=title)
        ax.legend(loc="center left", bbox_to_anchor=(1.0, 0.5), frameon=False)
        return ax


def audit_data(dataset, strategy, epochs=1, *, batch_size=None, steps=None, source=None, ignore=()):
    """Reads data as training would, and says whether every row reaches exactly one replica.

    Trains nothing. Each epoch goes the way that `fit` sends it: through
    `strategy.experimental_distribute_dataset` or Keras' adapters for arrays, PyDatasets and generators.
    Which row went to which replica is compared with the source, read once on one device without the
    strategy. Rows are told apart by what they hold, so a row that the source holds twice is due twice.

    Of a `tf.data.Dataset` the source is what its rows were before `shuffle`, `shard`, `take`, `skip`,
    `repeat` and `batch`, back to the last stage that may change what a row holds, such as `map`;
    positions of rows are positions there.

    Costs `epochs + 1` passes over the data, one or two more where the pipeline shuffles, shards,
    selects or repeats (with `steps`: `2 * epochs` times so many batches), one or three more where rows do
    not arrive as expected, to see whether they change from reading to reading, and 8 bytes a row and epoch.
    A Python generator is used up, a shuffle moves on to its next order, `on_epoch_begin` and
    `on_epoch_end` of a PyDataset are called; the random states of Python and NumPy are put back.

    Args:
        dataset: Batched `tf.data.Dataset`; arrays such as `(x, y)` or `(x, y, sample_weight)`;
            `keras.utils.PyDataset`; a Python generator, or a function without arguments that makes one;
            a `tf.distribute.DistributedDataset` (with `source`); or a function of a
            `tf.distribute.InputContext`, as `distribute_datasets_from_function` takes it.
        strategy: A strategy of this package or a plain `tf.distribute.MirroredStrategy`, a model made in
            its scope, or an int, the number of replicas.
        epochs: int, how many epochs to read.
        batch_size: Rows of a global batch, for arrays; 32 as in `fit` if `None`.
        steps: Read so many batches an epoch; needed for data without end.
        source: What should be delivered, each row once an epoch: any of the above, of the same content.
        ignore: Codes of findings to leave out, e.g. `("KM309",)`.

    Returns:
        A `DataAudit`, true when there is a finding that is more than a note.

    Raises:
        TypeError: For data that `fit` does not take, a function of a context that makes no dataset, a
            strategy that is none, or `ignore` that is a string.
        ValueError: For data without end and no `steps`, data without rows, a distributed dataset
            without `source`, unknown codes, or a strategy of several workers.

    Example:

    >>> import keras_mirror as km
    >>> import tensorflow as tf
    >>> print(km.audit_data(tf.data.Dataset.range(29).batch(8), 3, epochs=2))
    Data audit: every one of 29 rows reaches exactly one replica in each of 2 epochs
    epoch   steps   rows   replica 0   replica 1   replica 2   not delivered   repeated
    ───────────────────────────────────────────────────────────────────────────────────
        1       4     29          11          11           7               0          0
        2       4     29          11          11           7               0          0
    """
    kind, target = kind_of(dataset), _target(strategy)
    _check(dataset, kind, target, epochs, steps, source, ignore)
    facts = Facts(kind, dataset, target.num_replicas_in_sync, is_plain(target), steps)
    with _undisturbed():
        gather(facts, target, epochs, batch_size, source)
        if kind == "PyDataset":
            probe_py_dataset(facts)
    if facts.unsplittable is None and not any(map(len, facts.readings)) and facts.readings[0].empty_batch is None:
        raise ValueError("audit_data: the data is empty: it yielded no row.")
    findings = [f for f in [*delivery_findings(facts), *pipeline_findings(facts)] if f.code not in ignore]
    return DataAudit(facts, sorted(findings, key=lambda finding: SEVERITIES.index(finding.severity)))


def _target(strategy):
    if isinstance(strategy, keras.Model):
        strategy = internals.training_strategy(strategy) or tf.distribute.get_strategy()
    if isinstance(strategy, int) and not isinstance(strategy, bool):
        if strategy < 1:
            raise ValueError(f"audit_data: the number of replicas must be at least 1, and is {strategy}.")
        return Split(strategy)
    if not isinstance(strategy, tf.distribute.Strategy):
        raise TypeError(f"audit_data: expected a strategy, a model or a number of replicas, and got {type(strategy).__name__}.")
    here = len(strategy.extended.worker_devices)
    if here != strategy.num_replicas_in_sync:
        raise ValueError(
            f"audit_data: this process holds {here} of {strategy.num_replicas_in_sync} replicas and sees only their rows; "
            f"audit the data in one process without TF_CONFIG, as in audit_data(data, {strategy.num_replicas_in_sync})."
        )
    return Distributed(strategy)


def _check(data, kind, target, epochs, steps, source, ignore):
    for name, value in (("epochs", epochs), ("steps", steps)):
        if not (isinstance(value, int) and value > 0) and not (name == "steps" and value is None):
            raise ValueError(f"audit_data: {name} must be a positive int, and is {value!r}.")
    errors.check_codes("audit_data: ignore", ignore, family="KM3")
    if steps is None and (is_endless_py_dataset(data) or (kind == "dataset" and is_endless(data))):
        raise ValueError(
            "audit_data: the data has no end; say how many batches make an epoch: audit_data(data, strategy, steps=10)."
        )
    if kind == "distributed dataset" and source is None:
        raise ValueError("audit_data: what a distributed dataset should deliver is unknown; pass it, as in source=dataset.")
    if source is not None and kind_of(source) == "distributed dataset":
        raise ValueError("audit_data: source is read on one device; pass the dataset as it was before it was distributed.")
    if isinstance(source, tf.data.Dataset) and is_endless(source):
        raise ValueError("audit_data: source has no end; pass it without repeat().")
    if kind in ("distributed dataset", "dataset function") and isinstance(target, Split):
        raise ValueError("audit_data: a distributed dataset belongs to a strategy; pass it instead of a number of replicas.")


@contextlib.contextmanager
def _undisturbed():
    """Leaves random states as they were, and warnings about the data to the findings and to training."""
    states = random.getstate(), np.random.get_state()
    try:
        with warnings.catch_warnings(), errors.unsaid():
            warnings.simplefilter("ignore", errors.MirrorWarning)
            yield
    finally:
        random.setstate(states[0])
        np.random.set_state(states[1])


def _deliveries(facts):
    parts = []
    for epoch, (reading, positions) in enumerate(zip(facts.readings, facts.positions), 1):
        part = np.empty(len(reading), [("epoch", "i4"), ("step", "i4"), ("replica", "i2"), ("row", "i8")])
        part["epoch"], part["step"], part["replica"], part["row"] = epoch, reading.step, reading.replica, positions
        parts.append(part)
    return np.concatenate(parts) if parts else np.zeros(0, [("epoch", "i4"), ("step", "i4"), ("replica", "i2"), ("row", "i8")])


def _verdict(facts):
    if facts.unsplittable:
        return f"the data cannot be split over {facts.replicas} replicas"
    if any(reading.empty_batch is not None for reading in facts.readings):
        return "the data holds a batch without rows"
    suffix = f"; {counted(facts.beyond)} more are never read" if facts.beyond else ""
    if not facts.steady:
        return _verdict_of_changing_rows(facts) + suffix
    unknown = max(epoch.unknown for epoch in facts.epochs)
    if unknown:
        whole = facts.steps is None
        missing = max(len(epoch.missing) for epoch in facts.epochs)
        source = f" and {missing} of its {counted(len(facts.source))} are not recognised" if whole else ""
        return f"{counted(unknown)} of an epoch are not in the source{source} {_when(facts)}{suffix}"
    if facts.steps is not None:
        return _verdict_of_steps(facts) + suffix
    words = [_told(facts, "missing", "reach", "no replica"), _told(facts, "repeated", "arrive", "more than once")]
    if not any(words):
        words = [f"every one of {len(facts.source)} rows reaches exactly one replica {_when(facts)}"]
    return " and ".join(word for word in words if word) + suffix


def _verdict_of_changing_rows(facts):
    if not facts.same_number and facts.kind == "dataset function" and len(set(facts.numbers)) == 1:
        got = max((sum(epoch.rows) for epoch in facts.epochs), key=lambda rows: abs(rows - facts.numbers[0]))
        return f"the replicas get {counted(got)} and one device {facts.numbers[0]} {_when(facts)}"
    if not facts.same_number:
        return "the data yields other rows each time it is read, and not as many, so nobody can tell whether all reach a replica"
    numbers = sorted({sum(epoch.rows) for epoch in facts.epochs})
    told = counted(numbers[0]) if len(numbers) == 1 else f"{numbers[0]} to {counted(numbers[-1])}"
    steps = f" of {counted(facts.steps, 'step')}" if facts.steps is not None else ""
    return (
        f"the replicas get {told}, as many as one device, {_when(facts)}{steps}; "
        "which ones cannot be told, as rows change from reading to reading"
    )


def _verdict_of_steps(facts):
    when = f"{_when(facts)} of {counted(facts.steps, 'step')}"
    bad = max(len(epoch.lost) + len(epoch.extra) + epoch.short for epoch in facts.epochs)
    return f"{counted(bad)} lost or repeated {when}" if bad else f"the replicas get the rows of one device {when}"


def _when(facts):
    return "in one epoch" if len(facts.epochs) == 1 else f"in each of {len(facts.epochs)} epochs"


def _told(facts, name, verb, what):
    having = [epoch for epoch in facts.epochs if len(getattr(epoch, name))]
    if not having:
        return ""
    most = max(len(getattr(epoch, name)) for epoch in having)
    when = _when(facts) if len(having) == len(facts.epochs) else in_epochs(facts, [epoch.epoch for epoch in having])
    return f"{most} of {counted(len(facts.source))} {verb}{_s(verb) * (most == 1)} {what} {when}"


def _s(verb):
    return "es" if verb.endswith("ch") else "s"
