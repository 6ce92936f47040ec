"""What a `tf.data` pipeline is made of, stage by stage, and the dataset that its rows come from."""

import dataclasses

import tensorflow as tf

from keras_mirror import internals

BATCHING = {"Batch", "ParallelBatch"}
SELECTING = {"Shard", "Take", "Skip", "Repeat"}
# These hand on rows as they are; whatever else may change what a row holds.
KEEPING = BATCHING | SELECTING | {"Shuffle", "Prefetch", "Options", "AssertCardinality"}
ROWS_AT_A_TIME = 64


@dataclasses.dataclass(frozen=True)
class Stage:
    """One transformation of a pipeline.

    Attributes:
        kind: E.g. `"Shuffle"`, as `internals.kind_of_dataset` says it.
        dataset: The dataset that it yields.
        above: The stages after it, the last of the pipeline first.
    """

    kind: str
    dataset: tf.data.Dataset
    above: tuple = dataclasses.field(repr=False)

    def setting(self, name):
        """What the stage was made with, e.g. `setting("buffer_size")`, or None if unknown."""
        return internals.setting_of_dataset(self.dataset, name)

    @property
    def input(self):
        """The dataset that it takes."""
        return internals.inputs_of_dataset(self.dataset)[0]

    def is_before(self, kinds):
        """Whether a stage of one of these kinds comes after it."""
        return any(stage.kind in kinds for stage in self.above)


def stages_of(dataset):
    """Every `Stage` of a pipeline, the last first."""
    found, pending = [], [(dataset, ())]
    while pending:
        each, above = pending.pop()
        stage = Stage(internals.kind_of_dataset(each), each, above)
        found.append(stage)
        pending += [(below, (*above, stage)) for below in internals.inputs_of_dataset(each)]
    return found


def origin(dataset):
    """The dataset of the same rows before they were shuffled, selected, repeated and batched, in batches.

    It is where a map or another stage that may change rows ends, or the source itself.

    Returns:
        `(dataset, kept)`: the dataset, and the stages between it and the end.
    """
    kept = ()
    for stage in stages_of(dataset):
        twice = stage.kind in BATCHING and any(above.kind in BATCHING for above in kept)
        if stage.kind not in KEEPING or twice:
            break
        kept = (*kept, stage)
    below = kept[-1].input if kept else dataset
    return (below.batch(ROWS_AT_A_TIME) if any(stage.kind in BATCHING for stage in kept) else below), kept


def is_endless(dataset):
    """Whether a pipeline is known to have no end."""
    if dataset.cardinality() == tf.data.INFINITE_CARDINALITY:
        return True
    return dataset.cardinality() == tf.data.UNKNOWN_CARDINALITY and any(
        stage.kind == "Repeat" and stage.setting("count") == -1 and not stage.is_before({"Take"}) for stage in stages_of(dataset)
    )


def elements(dataset):
    """How many elements a dataset yields; reads it once where nobody knows."""
    known = int(dataset.cardinality())
    return known if known >= 0 else int(dataset.reduce(tf.constant(0, tf.int64), lambda count, *_: count + 1))
