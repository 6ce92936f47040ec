"""What each epoch should deliver and what it did, row by row."""

import dataclasses
import functools

import numpy as np

from keras_mirror.distribution import check_batched
from keras_mirror.feeds import Feed, OneDevice, dataset_for, is_endless_py_dataset, kind_of, recorded
from keras_mirror.fingerprints import Source, in_order_of_appearance, row_hashes
from keras_mirror.pipelines import SELECTING, origin, stages_of
from keras_mirror.steadiness import changed_at, draws_numbers, is_used_up, same_rows, sides_changed


@dataclasses.dataclass
class EpochDeliveries:
    """What the replicas got in one epoch.

    Rows are positions in the source, from 0. Where rows change from reading to reading, which is which
    cannot be known, and `missing`, `repeated`, `lost` and `extra` are empty.

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
        dataset: The `tf.data.Dataset` that the data is, or that its function makes for one replica; else None.
        stages: List of `Stage` of the pipeline.
        unsplittable: Why the data is no data of batches, or None.
        source: `Source`.
        source_given: Whether the user said what the source is.
        kept: Stages between the source and the end of the pipeline.
        readings: List of `Reading`, one an epoch.
        positions: List of int arrays, the row of each delivery, one an epoch.
        source_batches: int array, the batch of a PyDataset that each row of the source stood in; empty for others.
        alone: List of int arrays, the rows in the order in which one device reads them; empty if not read.
        epochs: List of `EpochDeliveries`.
        used_up: Rows of the first and of a later reading of data that can be read only once, or None.
        beyond: Rows that a PyDataset holds past its last batch.
        changing: Indices of a PyDataset that yielded rows of other indices when they were read again.
        steady: Whether the data yields the same rows each time it is read, as far as is known.
        same_number: Whether each epoch had as many rows as one device reads; False too where that changes.
        numbers: List of ints, how many rows the data yielded when one device read it, each time.
        moving: int array, rows that a take, skip or shard selects in one reading and not in another.
    """

    kind: str
    data: object
    replicas: int
    plain: bool = False
    steps: int | None = None
    dataset: object = None
    stages: list = dataclasses.field(default_factory=list)
    unsplittable: str | None = None
    source: Source | None = None
    source_given: bool = False
    kept: tuple = ()
    readings: list = dataclasses.field(default_factory=list)
    positions: list = dataclasses.field(default_factory=list)
    source_batches: np.ndarray = dataclasses.field(default_factory=lambda: np.zeros(0, int))
    alone: list = dataclasses.field(default_factory=list)
    epochs: list = dataclasses.field(default_factory=list)
    used_up: tuple | None = None
    beyond: int = 0
    changing: list = dataclasses.field(default_factory=list)
    steady: bool = True
    same_number: bool = True
    numbers: list = dataclasses.field(default_factory=list)
    moving: np.ndarray = dataclasses.field(default_factory=lambda: np.zeros(0, int))

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
    facts.dataset = dataset_for(facts.kind, data)
    if facts.dataset is not None:
        facts.stages = stages_of(facts.dataset)
        try:
            check_batched(facts.dataset.element_spec)
        except ValueError as error:
            facts.unsplittable = str(error)
            return
    if facts.kind == "generator":
        data = recorded(data, hashes)
    feed = Feed(facts.kind, data, target, batch_size, facts.steps, shuffle=True)
    facts.readings = [feed.epoch() for _ in range(epochs)]
    facts.source_given = source is not None
    read_source = functools.partial(_source_hashes, facts, hashes, batch_size, source)
    facts.source = Source(read_source())
    _read_alone(facts, epochs)
    facts.positions = [facts.source.positions(reading.hashes) for reading in facts.readings]
    _look_whether_used_up(facts, read_source)
    facts.epochs = [_deliveries(facts, epoch) for epoch in range(epochs)]
    _look_whether_steady(facts, read_source)
    facts.moving = _moving(facts)


def _source_hashes(facts, recorded_hashes, batch_size, source):
    if source is not None:
        return _once(kind_of(source), source, batch_size).hashes
    if facts.kind == "generator":
        return np.concatenate(recorded_hashes) if recorded_hashes else np.zeros(0, np.uint64)
    if facts.dataset is not None:
        below, facts.kept = origin(facts.dataset)
        if facts.steps is None or facts.kind == "dataset function":
            return _once("dataset", below, None).hashes
    elif not is_endless_py_dataset(facts.data):
        reading = _once(facts.kind, facts.data, batch_size, facts.steps if facts.kind == "generator function" else None)
        facts.source_batches = reading.step if facts.kind == "PyDataset" else facts.source_batches
        return reading.hashes
    return np.zeros(0, np.uint64)  # see `_read_alone`


def _once(kind, data, batch_size, steps=None):
    return Feed(kind, data, OneDevice(), batch_size, steps).epoch()


def _read_alone(facts, epochs):
    """Reads the data as one device would, where that is not the source, each row once."""
    if facts.kind == "dataset function" and facts.steps is not None:
        return  # whose steps need not be as large for one replica
    limited = facts.steps is not None and (facts.kind == "dataset" or is_endless_py_dataset(facts.data))
    orders = facts.dataset is not None and epochs == 1 and facts.shuffled
    if not (limited or orders or facts.selects):
        return
    feed = Feed(facts.kind, facts.data, OneDevice(), None, facts.steps)
    alone = [feed.epoch() for _ in range(epochs if limited else 1)]
    if limited and not facts.source_given:
        everything = [reading.hashes for reading in [*alone, *facts.readings]]
        facts.source = Source(in_order_of_appearance(np.concatenate(everything if facts.shuffled else everything[:epochs])))
    facts.alone = [facts.source.positions(reading.hashes) for reading in alone]


def _look_whether_used_up(facts, read_source):
    """Whether reading the data again gave less: then the first epoch stands for the source."""
    first, again = len(facts.readings[0]), min([len(facts.source), *map(len, facts.readings[1:])])
    if facts.source_given or facts.steps is not None:
        return
    if facts.kind == "generator":
        if again < first:
            facts.used_up = (first, again)
        return
    if len(facts.source) and (facts.selects or facts.kind == "dataset function" or len(facts.source) >= first):
        return
    later = [*(reading.hashes for reading in facts.readings[1:]), facts.source.hashes]
    if first and is_used_up(facts.readings[0].hashes, later, read_source):
        facts.used_up = (first, again)
        facts.source = Source(facts.readings[0].hashes)
        facts.alone, facts.kept = [], ()
        facts.positions = [facts.source.positions(reading.hashes) for reading in facts.readings]


def _look_whether_steady(facts, read_source):
    """Whether the data itself yields the same rows each time: only then which of them arrived is known."""
    found = [epoch for epoch in facts.epochs if epoch.unknown or epoch.short or len(epoch.lost) or len(epoch.extra)]
    if facts.kind in ("arrays", "generator", "distributed dataset") or facts.source_given or facts.used_up:
        return
    limited, again = facts.steps is not None and facts.kind == "dataset", facts.source.hashes
    if found and not limited and not is_endless_py_dataset(facts.data):
        again = read_source()
        facts.steady = same_rows(facts.source.hashes, again)
        if not facts.selects and facts.steps is None:
            facts.steady &= all(same_rows(facts.readings[0].hashes, reading.hashes) for reading in facts.readings[1:])
    if facts.kind != "dataset function":
        facts.steady &= not any(epoch.unknown for epoch in found)
    if limited and facts.shuffled and draws_numbers(facts.dataset):
        facts.steady = False
    if facts.steady:
        return
    facts.numbers = [len(rows) for rows in facts.alone] or [len(facts.source), len(again)]
    read = [len(reading) for reading in facts.readings]
    due = [facts.numbers[epoch % len(facts.alone) if facts.alone else 0] for epoch in range(len(read))]
    unlimited = facts.steps is None or facts.alone  # else one device read more than so many steps
    facts.same_number = len(facts.source) == len(again) and (due == read or not unlimited)
    none = np.zeros(0, int)
    facts.epochs = [
        dataclasses.replace(epoch, missing=none, repeated=none, lost=none, extra=none, short=0) for epoch in facts.epochs
    ]


def _moving(facts):
    """Rows that a take, skip or shard selects in one reading and not in another."""
    stages = [stage for stage in facts.stages if stage.kind == "Shuffle" and stage.is_before({"Take", "Skip", "Shard"})]
    if not stages or facts.steps is not None or facts.source_given:
        return np.zeros(0, int)
    if not facts.steady:
        return sides_changed(stages[0])
    sets = [np.unique(rows[rows >= 0]) for rows in orders(facts)]
    always = functools.reduce(np.intersect1d, sets)
    return np.setdiff1d(np.unique(np.concatenate(sets)), always)


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
    if facts.kind == "dataset function" and limited:
        return (got if facts.selects else np.minimum(got, 1)), 0
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
        if first is not None and again is not None and changed_at(index, first, again, facts.source, facts.source_batches):
            facts.changing.append(index)
    past = _rows_at(data, data.num_batches)
    if past is not None and facts.steady and not facts.changing:
        facts.beyond = int(np.sum(facts.source.positions(past) < 0))


def _rows_at(data, index):
    try:
        return row_hashes(data[index])
    except Exception:  # whatever a dataset of the user's raises past its end
        return None


def orders(facts):
    """The rows in the order of delivery of every whole reading, that of one device last; for comparing."""
    return [*facts.positions, *(facts.alone[:1] if facts.steps is None else [])]
