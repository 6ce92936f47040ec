"""What the stages of a `tf.data` pipeline say: shards, shuffles, dropped tails, repeats."""

import numpy as np

from keras_mirror.data_findings import DataFinding, counted, in_epochs, listed
from keras_mirror.deliveries import Facts, orders
from keras_mirror.pipelines import BATCHING, elements


def pipeline_findings(facts: Facts):
    """Yields the `DataFinding`s of how the pipeline is built."""
    if facts.unsplittable:
        return
    for stage in facts.stages:
        check = _CHECKS.get(stage.kind)
        if check is not None:
            yield from check(facts, stage)
    yield from _no_fixed_order(facts)
    yield from _changing_sides(facts)


def _shard(facts, stage):
    count, index = stage.setting("num_shards"), stage.setting("index")
    if count is None or count < 2:
        return
    if stage in facts.kept and facts.alone and facts.steady and not facts.shuffled and facts.steps is None:
        missing = np.setdiff1d(np.arange(len(facts.source)), facts.alone[0])
        where = f"{len(missing)} of {len(facts.source)} rows are never seen ({listed(missing)})"
    else:
        total = None if facts.steps is not None else elements(stage.input)
        missing = np.array([row for row in range(total or 0) if row % count != index], int)
        where = "the elements of the other shards are never seen"
        if total is not None:
            where = f"{len(missing)} of the {total} elements before it are never seen ({listed(missing, 'element')})"
    yield DataFinding(
        "KM305",
        "error",
        f"dataset.shard({count}, {index}) keeps one of {count} elements by hand: {where}",
        "Leave out shard: the strategy hands every row to exactly one replica",
        tuple(missing.tolist()),
    )


def _shuffle(facts, stage):
    seeded = stage.setting("seed") or stage.setting("seed2")
    reshuffles = stage.setting("reshuffle_each_iteration") is not False
    seen = orders(facts)
    same = len(seen) > 1 and all(np.array_equal(seen[0], other) for other in seen[1:])
    if not seeded and not (same and facts.steady):
        yield DataFinding(
            "KM307",
            "note",
            "shuffle has no seed: its order differs from iterator to iterator, so a run cannot be repeated, and on several workers "
            "each would shuffle in its own way, whose shards then overlap",
            "Write dataset.shuffle(buffer_size, seed=...)",
        )
    if len(seen) > 1 and same and facts.steady and len(facts.source) > 1:
        cause = "it is cached afterwards" if reshuffles else "reshuffle_each_iteration=False"
        if not reshuffles or stage.is_before({"Cache"}):
            yield DataFinding(
                "KM310",
                "note",
                f"shuffle yields the same order in every epoch ({cause})",
                "Cache before shuffling, and leave reshuffle_each_iteration at True, if epochs should differ",
            )
    yield from _shuffled_badly(stage, facts)


def _shuffled_badly(stage, facts):
    below = [other for other in facts.stages if stage in other.above]
    if any(other.kind in BATCHING for other in below) and not any(other.kind == "Unbatch" for other in below):
        yield DataFinding(
            "KM308",
            "note",
            "shuffle comes after batch: it shuffles whole batches, whose rows stay together in every epoch",
            "Shuffle before batch",
        )
        return
    buffer = stage.setting("buffer_size")
    size = len(facts.source) if stage in facts.kept and facts.steps is None else int(stage.dataset.cardinality())
    if buffer is not None and 0 <= buffer < size:
        yield DataFinding(
            "KM309",
            "note",
            f"shuffle has a buffer of {buffer} and {size} rows to shuffle: a row moves forward by fewer than {buffer} places",
            f"Write shuffle({size}) if that fits into memory",
        )


def _changing_sides(facts):
    """Rows that a take, skip or shard selects in one epoch and not in another."""
    if len(facts.moving):
        moving = facts.moving
        stages = [stage for stage in facts.stages if stage.kind == "Shuffle"]
        kinds = sorted({above.kind.lower() for stage in stages for above in stage.above} & {"take", "skip", "shard"})
        yield DataFinding(
            "KM306",
            "warning",
            f"{' and '.join(kinds)} after shuffle selects other rows each time the dataset is read: "
            f"{counted(len(moving))} change{'s' * (len(moving) == 1)} sides between readings "
            f"({listed(moving)}), so training sees rows that were kept for validation",
            "Split before shuffling, or write shuffle(..., reshuffle_each_iteration=False)",
            tuple(moving.tolist()),
        )


def _batch(facts, stage):
    if not stage.setting("drop_remainder"):
        return
    alone_in_selecting = all(other is stage or other.kind not in ("Shard", "Take", "Skip", "Repeat") for other in facts.kept)
    counts = {epoch.epoch: len(epoch.missing) for epoch in facts.epochs if len(epoch.missing)}
    if stage in facts.kept and alone_in_selecting and facts.steady and not facts.source_given and facts.steps is None:
        if not counts:
            return
        where = ": ".join([f"{counted(max(counts.values()))} {in_epochs(facts, list(counts))}", _which(facts)])
        rows = tuple(np.unique(np.concatenate([epoch.missing for epoch in facts.epochs])).tolist())
    else:
        where, rows = f"fewer than {stage.setting('batch_size')} rows each time the dataset is read", ()
    yield DataFinding(
        "KM312",
        "note",
        f"batch(drop_remainder=True) leaves out the tail, {where}",
        "Leave out drop_remainder: uneven tails are trained right here",
        rows,
    )


def _which(facts):
    rows = [tuple(epoch.missing.tolist()) for epoch in facts.epochs]
    return listed(rows[0]) if len(set(rows)) == 1 else f"{listed(rows[0])} in epoch 1, others later, by the shuffle"


def _repeat(facts, stage):
    count = stage.setting("count")
    if count is not None and count > 1:
        yield DataFinding(
            "KM313",
            "note",
            f"repeat({count}) makes one epoch of {count} passes over the rows",
            f"Leave it out and train for {count} times as many epochs, if an epoch should be one pass",
        )


def _no_fixed_order(facts):
    options = facts.dataset is not None and facts.dataset.options().deterministic is False
    if options or any(stage.setting("deterministic") == "false" for stage in facts.stages):
        yield DataFinding(
            "KM317",
            "note",
            "deterministic=False lets elements come in any order, so a run cannot be repeated exactly",
            "Leave it out where runs should be repeatable",
        )


_CHECKS = {
    "Shard": _shard, "Shuffle": _shuffle, "Batch": _batch, "ParallelBatch": _batch, "PaddedBatch": _batch, "Repeat": _repeat,
}  # fmt: skip
