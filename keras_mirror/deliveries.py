"""What each epoch should deliver and what it did, row by row."""

import dataclasses

import numpy as np

from keras_mirror.distribution import check_batched
from keras_mirror.feeds import Feed, OneDevice, is_endless_py_dataset, kind_of, recorded
from keras_mirror.fingerprints import Source, in_order_of_appearance, row_hashes
from keras_mirror.pipelines import SELECTING, origin, stages_of


@dataclasses.dataclass
class EpochDeliveries:
    """What the replicas got in one epoch.

    Rows are positions in the source, from 0.

    Attributes:
        epoch: int, from 1.
        steps: int.
        rows: List of ints, the rows that each replica got.
        empty_parts: int, the parts of batches that held no rows.
        missing: int array, rows of the source that no replica got.
        repeated: int array, rows that were delivered more than once.
        unknown: int, rows delivered that the source does not hold.
        lost: int array, rows that one device would have got and no replica did.
        extra: int array, rows delivered more often than one device would have got them.
        short: int, rows that are fewer than on one device where it cannot be known which: a selection
            from shuffled rows.
    """

    epoch: int
    steps: int
    rows: list
    empty_parts: int
    missing: np.ndarray
    repeated: np.ndarray
    unknown: int
    lost: np.ndarray
    extra: np.ndarray
    short: int = 0


@dataclasses.dataclass
class Facts:
    """All that the findings are made from.

    Attributes:
        kind: What `kind_of` says of the data.
        data: The data.
        replicas: int.
        plain: Whether the strategy is not one of this package.
        steps: The `steps` that was asked for, or None.
        stages: List of `Stage` of the pipeline.
        unsplittable: Why the data is no data of batches, or None.
        source: `Source`.
        source_given: Whether the user said what the source is.
        kept: Stages between the source and the end of the pipeline.
        readings: List of `Reading`, one an epoch.
        positions: List of int arrays, the row of each delivery, one an epoch.
        alone: List of int arrays, the rows in the order in which one device reads them; empty if not read.
        epochs: List of `EpochDeliveries`.
        used_up: Rows of the first and of a later reading of data that can be read only once, or None.
        beyond: Rows that a PyDataset holds past its last batch.
        changing: Indices of a PyDataset that yielded other rows when they were read again.
    """

    kind: str
    data: object
    replicas: int
    plain: bool = False
    steps: int | None = None
    stages: list = dataclasses.field(default_factory=list)
    unsplittable: str | None = None
    source: Source | None = None
    source_given: bool = False
    kept: tuple = ()
    readings: list = dataclasses.field(default_factory=list)
    positions: list = dataclasses.field(default_factory=list)
    alone: list = dataclasses.field(default_factory=list)
    epochs: list = dataclasses.field(default_factory=list)
    used_up: tuple | None = None
    beyond: int = 0
    changing: list = dataclasses.field(default_factory=list)

    @property
    def shuffled(self):
        """Whether the pipeline, or `fit`, shuffles."""
        return self.kind in ("arrays", "PyDataset") or any(stage.kind == "Shuffle" for stage in self.stages)

    @property
    def selects(self):
        """Whether one device gets something else than every row of the source once."""
        return not self.source_given and any(stage.kind in SELECTING or stage.setting("drop_remainder") for stage in self.kept)


def gather(facts, target, epochs, batch_size, source):
    """Reads the data, and fills in the rest of `facts`.

    The epochs are read first and the source afterwards, so that data that can be read only once
    looks as it would in training.
    """
    hashes, data = [], facts.data
    if facts.kind == "dataset":
        facts.stages = stages_of(data)
        try:
            check_batched(data.element_spec)
        except ValueError as error:
            facts.unsplittable = str(error)
            return
    if facts.kind == "generator":
        data = recorded(data, hashes)
    feed = Feed(facts.kind, data, target, batch_size, facts.steps, shuffle=True)
    facts.readings = [feed.epoch() for _ in range(epochs)]
    facts.source_given = source is not None
    facts.source = Source(_source_hashes(facts, hashes, batch_size, source))
    _read_alone(facts, epochs)
    facts.positions = [facts.source.positions(reading.hashes) for reading in facts.readings]
    _look_whether_used_up(facts)
    facts.epochs = [_deliveries(facts, epoch) for epoch in range(epochs)]


def _source_hashes(facts, recorded_hashes, batch_size, source):
    if source is not None:
        return _once(kind_of(source), source, batch_size).hashes
    if facts.kind == "generator":
        return np.concatenate(recorded_hashes) if recorded_hashes else np.zeros(0, np.uint64)
    if facts.kind == "dataset":
        below, facts.kept = origin(facts.data)
        if facts.steps is None:
            return _once("dataset", below, None).hashes
    elif not is_endless_py_dataset(facts.data):
        steps = facts.steps if facts.kind == "generator function" else None
        return _once(facts.kind, facts.data, batch_size, steps).hashes
    return np.zeros(0, np.uint64)  # see `_read_alone`


def _once(kind, data, batch_size, steps=None):
    return Feed(kind, data, OneDevice(), batch_size, steps).epoch()


def _read_alone(facts, epochs):
    """Reads the data as one device would, where that is not the source, each row once."""
    limited = facts.steps is not None and (facts.kind == "dataset" or is_endless_py_dataset(facts.data))
    orders = facts.kind == "dataset" and epochs == 1 and facts.shuffled
    if not (limited or orders or facts.selects):
        return
    feed = Feed(facts.kind, facts.data, OneDevice(), None, facts.steps)
    alone = [feed.epoch() for _ in range(epochs if limited else 1)]
    if limited and not facts.source_given:
        everything = [reading.hashes for reading in [*alone, *facts.readings]]
        facts.source = Source(in_order_of_appearance(np.concatenate(everything if facts.shuffled else everything[:epochs])))
    facts.alone = [facts.source.positions(reading.hashes) for reading in alone]


def _look_whether_used_up(facts):
    """Whether reading the data again gave less: then the first epoch stands for the source."""
    first, again = len(facts.readings[0]), min([len(facts.source), *map(len, facts.readings[1:])])
    if facts.source_given or facts.steps is not None or facts.kind == "dataset function":
        return
    if facts.kind == "generator":
        if again < first:
            facts.used_up = (first, again)
        return
    if len(facts.source) < first and (not facts.selects or not len(facts.source)):
        facts.used_up = (first, again)
        facts.source = Source(facts.readings[0].hashes)
        facts.alone, facts.kept = [], ()
        facts.positions = [facts.source.positions(reading.hashes) for reading in facts.readings]


def _deliveries(facts, epoch):
    reading, positions = facts.readings[epoch], facts.positions[epoch]
    known = positions[positions >= 0]
    got = np.bincount(known, minlength=len(facts.source))
    due, short = _due(facts, epoch, got)
    per_part = np.bincount(reading.step * facts.replicas + reading.replica, minlength=reading.steps * facts.replicas)
    return EpochDeliveries(
        epoch=epoch + 1,
        steps=reading.steps,
        rows=np.bincount(reading.replica, minlength=facts.replicas).tolist(),
        empty_parts=int(np.sum(per_part == 0)),
        missing=np.flatnonzero(got == 0),
        repeated=np.flatnonzero(got > 1),
        unknown=len(positions) - len(known),
        lost=np.flatnonzero(got < due),
        extra=np.flatnonzero(got > due),
        short=short,
    )


def _due(facts, epoch, got):
    """How often each row should have been delivered, and how many of some rows are missing."""
    ones = np.ones(len(facts.source), int)
    limited = facts.steps is not None and facts.kind != "generator function"
    if limited and facts.kind == "generator":
        start = sum(len(reading) for reading in facts.readings[:epoch])
        span = np.arange(start, min(start + len(facts.readings[epoch]), len(ones)))
        return np.bincount(span, minlength=len(ones)), 0
    if not facts.selects and not (limited and facts.alone):
        return np.minimum(got, 1) if limited else ones, 0
    alone = facts.alone[epoch if limited else 0]
    due = np.bincount(alone[alone >= 0], minlength=len(ones))
    if not facts.shuffled:
        return due, 0
    return np.minimum(got, max(due, default=0)), max(0, len(alone) - len(facts.readings[epoch]))


def probe_py_dataset(facts):
    """Looks past a PyDataset's last batch, and at its first batches twice."""
    data = facts.data
    if data.num_batches is None or facts.steps is not None:
        return
    for index in range(min(3, data.num_batches)):
        first, again = (_rows_at(data, index) for _ in range(2))
        if first is not None and sorted(first.tolist()) != sorted(again.tolist()):
            facts.changing.append(index)
    past = _rows_at(data, data.num_batches)
    if past is not None and not facts.changing:
        facts.beyond = int(np.sum(facts.source.positions(past) < 0))


def _rows_at(data, index):
    try:
        return row_hashes(data[index])
    except Exception:  # whatever a dataset of the user's raises past its end
        return None


def orders(facts):
    """The rows in the order of delivery of every whole reading, that of one device last; for comparing."""
    return [*facts.positions, *(facts.alone[:1] if facts.steps is None else [])]
