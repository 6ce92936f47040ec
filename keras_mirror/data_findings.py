"""What the deliveries of a data audit say: rows lost, repeated, changed, used up."""

import dataclasses

import numpy as np

from keras_mirror.deliveries import Facts
from keras_mirror.distribution import NO_ROWS
from keras_mirror.steadiness import draws_numbers

FEW = 6
WITHOUT_EMPTY = "Leave empty batches out, for example with dataset.filter"


@dataclasses.dataclass(frozen=True)
class DataFinding:
    """One thing about the data that matters on several replicas.

    Attributes:
        code: E.g. `"KM301"`; its page is `docs/codes/KM301.md`.
        severity: `"error"`, `"warning"` or `"note"`.
        what: What happens, with the rows, replicas and epochs.
        remedy: What to write instead.
        rows: Tuple of ints, all the rows concerned, as positions in the source.
    """

    code: str
    severity: str
    what: str
    remedy: str
    rows: tuple = ()

    def __str__(self):
        return f"{self.code} {self.severity}: {self.what}. {self.remedy}."


def listed(numbers, word="row"):
    """Numbers in words, e.g. `rows 0-7, 16 and 17 more`.

    Example:

    >>> listed([3, 4, 5, 9])
    'rows 3-5, 9'
    """
    numbers = sorted({int(number) for number in numbers})
    runs = []
    for number in numbers:
        if runs and runs[-1][1] == number - 1:
            runs[-1][1] = number
        else:
            runs.append([number, number])
    text = ", ".join(str(start) if start == stop else f"{start}-{stop}" for start, stop in runs[:FEW])
    more = sum(stop - start + 1 for start, stop in runs[FEW:])
    return f"{word if len(numbers) == 1 else _plural(word)} {text}" + (f" and {more} more" if more else "")


def counted(number, word="row"):
    """E.g. `1 row` or `5 rows`."""
    return f"{number} {word if number == 1 else _plural(word)}"


def _are(number):
    return "is" if number == 1 else "are"


def _plural(word):
    return {"index": "indices"}.get(word, f"{word}s")


def in_epochs(facts, epochs):
    """E.g. `in each of 3 epochs` or `in epoch 2`."""
    if len(facts.epochs) == 1:
        return "in the epoch read"
    return f"in each of {len(epochs)} epochs" if len(epochs) == len(facts.epochs) else "in " + listed(epochs, "epoch")


def _union(facts, name):
    """The rows of all epochs, the epochs that have some, and the most in one epoch."""
    having = [epoch for epoch in facts.epochs if len(getattr(epoch, name))]
    rows = np.unique(np.concatenate([getattr(epoch, name) for epoch in having])) if having else np.zeros(0, int)
    return rows, [epoch.epoch for epoch in having], max((len(getattr(epoch, name)) for epoch in having), default=0)


def delivery_findings(facts: Facts):
    """Yields the `DataFinding`s of what was delivered."""
    if facts.unsplittable:
        what = facts.unsplittable.split(";")[0]
        if facts.unsplittable == NO_ROWS:
            yield DataFinding("KM315", "error", what[0].upper() + what[1:], WITHOUT_EMPTY)
        else:
            yield DataFinding("KM314", "error", what[0].upper() + what[1:], "Add .batch(n) to the dataset")
        return
    for check in (_empty_batches, _used_up, _lost, _extra, _changed, _empty_parts, _py_dataset, _generator):
        yield from check(facts)


def _empty_batches(facts):
    for epoch, reading in enumerate(facts.readings, 1):
        if reading.empty_batch is not None:
            yield DataFinding(
                "KM315",
                "error",
                f"Batch {reading.empty_batch} of epoch {epoch} has no rows, so it has no mean to train on",
                WITHOUT_EMPTY,
            )
            return


def _stopped(facts):
    return any(reading.empty_batch is not None for reading in facts.readings) and not facts.plain


def _used_up(facts):
    if facts.used_up:
        rows, epochs, _ = _union(facts, "lost")
        first, again = facts.used_up
        where = f"; {counted(len(rows))} {_are(len(rows))} missing {in_epochs(facts, epochs)} ({listed(rows)})" if len(rows) else ""
        yield DataFinding(
            "KM311",
            "error",
            f"The data yields {counted(first)} when it is read first and {again} when it is read again{where}",
            "A generator can be read only once: hand over a function that makes a new one, as in "
            "tf.data.Dataset.from_generator(make_rows, ...) with the generator made inside make_rows",
            tuple(rows.tolist()),
        )


def _lost(facts):
    rows, epochs, most = _union(facts, "lost")
    short = sum(epoch.short for epoch in facts.epochs)
    changed = max((epoch.unknown for epoch in facts.epochs), default=0)
    if facts.used_up:
        epochs, rows = [1] * (1 in epochs), facts.epochs[0].lost
        most = len(rows)
    if _stopped(facts) or (not len(rows) and not short) or (facts.source_given and most <= changed):
        return
    if facts.kind == "dataset function" and not facts.source_given:
        yield _depends_on_replicas(facts, rows, epochs)
    elif facts.kind == "generator" and facts.plain:
        yield DataFinding(
            "KM320",
            "error",
            f"{counted(most)} {_are(most)} lost before training: Keras builds the model from a batch of the generator, "
            f"reads ahead, and starts again ({listed(rows)})",
            "Build with keras_mirror.mirrored_model, which builds without a batch, or pass a tf.data.Dataset",
            tuple(rows.tolist()),
        )
    elif len(rows):
        yield DataFinding(
            "KM301",
            "error",
            f"{'at least ' * bool(changed)}{most - changed} of {counted(len(facts.source))} reach{'es' * (most - changed == 1)} no "
            f"replica {in_epochs(facts, epochs)} ({'not recognised: ' * bool(changed)}{listed(rows)})",
            "Distribute the whole dataset with strategy.experimental_distribute_dataset, which hands every row to one replica",
            tuple(rows.tolist()),
        )
    else:
        yield DataFinding(
            "KM301",
            "error",
            f"{counted(short)} fewer than one device reads reach the replicas; which ones changes with the shuffle",
            "Distribute the whole dataset with strategy.experimental_distribute_dataset, which hands every row to one replica",
        )


def _depends_on_replicas(facts, rows, epochs):
    got = sum(facts.epochs[0].rows)
    alone = len(facts.alone[0]) if facts.alone else len(facts.source)
    other = f" (other: {listed(rows)})" if len(rows) else ""
    return DataFinding(
        "KM303",
        "error",
        f"The rows depend on the number of replicas: one replica alone is given {counted(alone)}, "
        f"{facts.replicas} replicas together {got} {in_epochs(facts, epochs)}{other}",
        "Shard by context.num_input_pipelines and context.input_pipeline_id alone, and batch by "
        "context.get_per_replica_batch_size(global_batch_size); or hand the dataset of global batches to "
        "strategy.experimental_distribute_dataset",
        tuple(int(row) for row in rows),
    )


def _extra(facts):
    rows, epochs, most = _union(facts, "extra")
    if not len(rows):
        return
    together = np.unique(np.concatenate([_shared_in_a_step(facts, epoch) for epoch in range(len(facts.epochs))]))
    if len(np.intersect1d(rows, together)) == len(rows):
        yield DataFinding(
            "KM303",
            "error",
            f"{counted(most)} {_are(most)} given to several replicas in one step {in_epochs(facts, epochs)} "
            f"({listed(rows)}; {_receivers(facts, rows)})",
            "Let each replica have rows of its own: hand the dataset of global batches to strategy.experimental_distribute_dataset",
            tuple(rows.tolist()),
        )
    elif facts.kind == "dataset function" and not facts.source_given:
        yield _depends_on_replicas(facts, rows, epochs)
    else:
        yield DataFinding(
            "KM302",
            "error",
            f"{counted(most)} {_are(most)} delivered more often than the source holds them {in_epochs(facts, epochs)} "
            f"({listed(rows)}; {_receivers(facts, rows)})",
            "Look for a repeat(), overlapping shards, or a generator that starts again before it ends",
            tuple(rows.tolist()),
        )


def _shared_in_a_step(facts, epoch):
    """Rows that more than one replica was given in the same step."""
    reading, positions = facts.readings[epoch], facts.positions[epoch]
    triples = np.unique(np.stack([reading.step, positions, reading.replica], 1)[positions >= 0], axis=0)
    pairs, replicas = np.unique(triples[:, :2], axis=0, return_counts=True)
    return pairs[replicas > 1, 1]


def _receivers(facts, rows):
    found = [reading.replica[np.isin(positions, rows)] for reading, positions in zip(facts.readings, facts.positions)]
    return "on " + listed(np.concatenate(found), "replica")


def _changed(facts):
    having = [epoch.epoch for epoch in facts.epochs if epoch.unknown]
    most = max((epoch.unknown for epoch in facts.epochs), default=0)
    if facts.source_given and having:
        yield DataFinding(
            "KM322",
            "warning",
            f"{counted(most)} delivered {in_epochs(facts, having)} hold{'s' * (most == 1)} something that no row of the "
            "source holds: a map or padding changed them, or they are other rows",
            "Pass the source as it is after all maps that change what a row holds",
        )
    elif facts.steady and having and facts.kind == "dataset function":
        yield _depends_on_replicas(facts, (), having)
    elif not facts.steady and not facts.changing and not len(facts.moving):
        if facts.same_number:
            yield DataFinding(
                "KM304",
                "note",
                f"The rows change from reading to reading: {_cause(facts)}, so nobody can tell whether each arrives once; "
                "their number is that of one device",
                "Audit the data as it is before that, where its rows can be told apart; for training nothing has to change",
            )
        elif facts.kind == "dataset function" and len(set(facts.numbers)) == 1:
            yield _depends_on_replicas(facts, (), [epoch.epoch for epoch in facts.epochs])
        else:
            yield DataFinding(
                "KM304",
                "warning",
                f"The data yields other rows each time it is read, and not as many: {_numbers(facts)}",
                "Look for what leaves rows out or draws them at random while it reads (a generator or a function that keeps a "
                "count, a random filter, files that are still written), and make it yield the same rows each time",
            )


def _cause(facts):
    if facts.kind == "PyDataset":
        return "__getitem__ or on_epoch_end makes them anew"
    if facts.dataset is None:
        return "the generator makes them anew"
    if any(stage.kind == "PaddedBatch" for stage in facts.stages) and not draws_numbers(facts.dataset):
        return "padding depends on which rows meet in a batch, or a map is random"
    return "a map or another stage is random"


def _numbers(facts):
    """E.g. `20 rows in epoch 1, 19 in epochs 2-3, 19 and 20 on one device`."""
    per_epoch = [sum(epoch.rows) for epoch in facts.epochs]
    told = []
    for number in dict.fromkeys(per_epoch):
        epochs = [epoch for epoch, rows in enumerate(per_epoch, 1) if rows == number]
        told.append(f"{number if told else counted(number)} in {listed(epochs, 'epoch')}")
    return f"{', '.join(told)}, {' and '.join(str(number) for number in dict.fromkeys(facts.numbers))} on one device"


def _empty_parts(facts):
    having = [epoch for epoch in facts.epochs if epoch.empty_parts]
    if having and not any(reading.empty_batch is not None for reading in facts.readings):
        most, epochs = max(epoch.empty_parts for epoch in having), [epoch.epoch for epoch in having]
        yield DataFinding(
            "KM316",
            "note",
            f"{'1 part of a batch' if most == 1 else f'{most} parts of batches'} {in_epochs(facts, epochs)} "
            f"{'is' if most == 1 else 'are'} empty: the batch has fewer rows than there are replicas, and some only wait",
            "Results stay those of one device; a larger batch uses all replicas",
        )


def _py_dataset(facts):
    if facts.beyond:
        yield DataFinding(
            "KM318",
            "error",
            f"The PyDataset's __len__ says {facts.data.num_batches} batches, and index {facts.data.num_batches} yields "
            f"{counted(facts.beyond)} more that are never read",
            "Round up in __len__: math.ceil(rows / batch_size)",
        )
    if facts.changing:
        yield DataFinding(
            "KM319",
            "warning",
            f"The PyDataset yields other rows when the same index is read again ({listed(facts.changing, 'index')})",
            "Shuffle in on_epoch_end, and make __getitem__ return the same rows for the same index until then",
        )


def _generator(facts):
    if facts.kind == "generator":
        yield DataFinding(
            "KM321",
            "note",
            "The audit has used the generator up",
            "Make a new one for training, or audit the function that makes it",
        )
