"""`check`: one step on one device and on the replicas, compared gradient by gradient, and why they differ."""

import keras
import numpy as np
import tensorflow as tf

from keras_mirror import internals
from keras_mirror.auditing import held_variables
from keras_mirror.batches import split_sizes
from keras_mirror.cause import Cause
from keras_mirror.causes import Experiments
from keras_mirror.comparing import all_equal, compare, total
from keras_mirror.engine import engine_of
from keras_mirror.gradients import ONE_DEVICE, PARTS, StepProbe
from keras_mirror.report import Report
from keras_mirror.rounding import Rounding, measure
from keras_mirror.rows import rows_of
from keras_mirror.strategy import MirroredStrategy

_TOLERANCE = {"float32": 1e-4, "float64": 1e-9, "float16": 2e-2, "bfloat16": 1e-1}


class Check(Report):
    """What `check` returns: print it, or read it. True when replicas differ from one device, but not by design.

    Attributes:
        causes: List of `Cause` (`kind`, `evidence`, `remedy`, `by_design`), empty when all is equal.
        differences: Dict of a split, e.g. `(4, 3)` rows, to a dict of a variable's path to its
            `Difference` (`size`, `off`, `equal`).
        replicas: int, number of replicas.
    """

    def __init__(self, replicas, differences, causes, notes):
        self.replicas = replicas
        self.differences = differences
        self.causes = causes
        columns = {split: f"off by, {' + '.join(map(str, split))} rows" for split in differences}
        names = list(dict.fromkeys(name for each in differences.values() for name in each))
        rows = [
            {
                "variable": name,
                "largest gradient": max(each[name].size for each in differences.values() if name in each),
                **{columns[split]: each[name].off for split, each in differences.items() if name in each},
                "": "equal" if all(each[name].equal for each in differences.values() if name in each) else "differs",
            }
            for name in names
        ]
        differ = sum(row[""] == "differs" for row in rows)
        super().__init__(
            self._title(len(rows), differ),
            ["variable", "largest gradient", *columns.values(), ""],
            rows,
            [*(f"{'By design' if cause.by_design else 'Cause'}: {cause}" for cause in causes), *notes],
        )

    def _title(self, variables, differ):
        if self.replicas == 1:
            return "Check: one replica is one device"
        verdict = f"{differ} of {variables} gradients differ from" if differ else f"all {variables} gradients equal"
        why = ", by design" if differ and not self else ""
        return f"Check: {verdict} those of one device on {self.replicas} replicas{why}"

    def __bool__(self):
        return any(not cause.by_design for cause in self.causes)


def check(model, batch, *, step=None):
    """Compares one training step on the replicas with the same step on one device, and names why they differ.

    Trains nothing: gradients are computed and thrown away, and weights, optimizer, metrics and
    random generators are left as they were. A model that is not built yet is built from the batch.

    The step runs from the same weights with the whole batch on one device, and with its parts on
    the replicas; once with parts of equal and once with parts of unequal size (one row is left
    out for that). Where they differ, it runs again with one thing changed at a time (twice the
    same, other random numbers, the whole batch on every replica, synchronised batch statistics,
    each layer on half of the rows) until the cause is found.

    What may be rounding is measured: where a difference is more than sums in another order make of
    ordinary numbers, one device runs three times more, with inputs and weights moved by their last bit. A
    difference within ten times of what that changes is rounding, but never more than 1% of the largest
    gradient.

    Costs two traces of the step and a handful of runs; where something differs, a few more of
    each. All replicas' gradients are held in host memory as float64 for that time.

    Args:
        model: A model of `mirrored_model`, or another that was made in the scope of a
            `keras_mirror.MirroredStrategy`.
        batch: A global batch as the dataset yields it: `(x, y)` or `(x, y, sample_weight)`, arrays or
            tensors, distributed or not; or a `tf.data.Dataset`, whose first batch is taken.
        step: `step(model, data)` of a loop of one's own, in place of the model's training step. It has
            to end with `optimizer.apply` (or `apply_gradients`) of an optimizer of the model.

    Returns:
        A `Check`, true when something is wrong; random layers, say, differ by design.

    Raises:
        TypeError: If `model` is no Keras model.
        ValueError: If it was not made in such a scope, was made for several workers, is not compiled, or the
            batch has no rows.

    Example:

    >>> report = km.check(model, (x[:32], y[:32]))
    >>> print(report.title)
    Check: all 4 gradients equal those of one device on 2 replicas
    """
    strategy = _strategy_of(model, step)
    batch = _as_tensors(batch, strategy)
    rows = _rows(batch)
    replicas = strategy.num_replicas_in_sync
    if replicas == 1:
        return Check(1, {}, [], ["There is nothing to compare. Build with devices=2 (or more) to see what replicas would change."])
    _build(model, strategy, batch)
    held = [variable for _, _, variable in held_variables(model)]
    probe = StepProbe(model, strategy, step, [*held, *getattr(engine_of(model), "captured", ())])
    batches = {kind: _first_rows(batch, n) for kind, n in _sizes(rows, replicas).items()}
    dtypes = {getattr(layer, "compute_dtype", "float32") for layer in internals.layers_of(model)}
    dtype = max(dtypes & {*_TOLERANCE} or {"float32"}, key=_TOLERANCE.get)
    tolerance, rounding = _TOLERANCE[dtype], Rounding()
    differences, apart = {}, False
    for part_of_batch in batches.values():
        one, many = probe.run(part_of_batch, ONE_DEVICE), probe.run(part_of_batch, PARTS)
        each, differ = _compared(one, many, tolerance, rounding)
        if differ:
            rounding = rounding.or_more(measure(probe, part_of_batch, dtype))
            each, differ = _compared(one, many, tolerance, rounding)
        differences[tuple(split_sizes(_rows(part_of_batch), replicas))] = each
        apart = apart or differ
    causes, notes = list(_row_causes(strategy, batch, rows)), [_rows_note(rows, replicas), *rounding.notes()]
    if apart:
        local = getattr(engine_of(model), "batch_norm", "sync") == "local"
        causes += Experiments(probe, batches, tolerance, local, rounding).causes()
        if not causes:
            causes.append(Cause("unknown", "no experiment made the difference go away", "Please report the model and the batch"))
    return Check(replicas, differences, causes, [] if causes and causes[0].kind == "rows" else notes)


def _strategy_of(model, step):
    if not isinstance(model, keras.Model):
        raise TypeError(f"check: expected a keras.Model, and got {type(model).__name__}.")
    if step is not None and not callable(step):
        raise TypeError(f"check: step must be a function step(model, data), and got {type(step).__name__}.")
    strategy = internals.training_strategy(model)
    if isinstance(strategy, tf.distribute.MultiWorkerMirroredStrategy):
        raise ValueError(
            f"check: the model was made for several workers (a {type(strategy).__name__}), where no process can run the step of "
            "one device by itself; check it in one process without TF_CONFIG, with as many replicas, as in "
            f"keras_mirror.check(keras_mirror.mirrored_model(build_fn, devices={strategy.num_replicas_in_sync}), batch)."
        )
    if not isinstance(strategy, MirroredStrategy):
        raise ValueError(
            "check: the model was not made in the scope of a keras_mirror.MirroredStrategy, so there are no replicas to compare; "
            "build it with keras_mirror.mirrored_model(build_fn)."
        )
    if step is None and not model.compiled and type(model).train_step is keras.Model.train_step:
        raise ValueError("check: the model is not compiled, so it has no training step; compile it, or pass step=.")
    return strategy


def _as_tensors(batch, strategy):
    if isinstance(batch, tf.data.Dataset):
        batch = next(iter(batch), None)
        if batch is None:
            raise ValueError("check: the dataset is empty, so there is no batch to try a step on.")
    batch = tuple(batch) if isinstance(batch, list) else batch
    return tf.nest.map_structure(lambda leaf: _tensor(leaf, strategy), batch)


def _tensor(leaf, strategy):
    if internals.is_per_replica(leaf):  # a batch that was distributed already
        return tf.concat(strategy.experimental_local_results(leaf), 0)
    return leaf if leaf is None or isinstance(leaf, (tf.SparseTensor, tf.RaggedTensor)) else tf.convert_to_tensor(leaf)


def _rows(batch):
    counts = {int(n) for n in (rows_of(leaf) for leaf in tf.nest.flatten(batch) if leaf is not None) if n is not None}
    if len(counts) != 1 or 0 in counts:
        raise ValueError(
            f"check: a batch needs rows, as many in each of its components, and this one has {sorted(counts) or 'none'}; pass "
            "(x[:32], y[:32]) or a batched tf.data.Dataset."
        )
    return counts.pop()


def _sizes(rows, replicas):
    """Rows to try a step on: all of the batch, and a few less that split the other way."""
    if rows % replicas == 0:
        return {"even": rows, **({"uneven": rows - 1} if rows > 1 else {})}
    even = rows - rows % replicas
    return {"uneven": rows, **({"even": even} if even else {})}


def _first_rows(batch, n):
    def first(leaf):
        if isinstance(leaf, tf.SparseTensor):
            return tf.sparse.slice(leaf, tf.zeros_like(leaf.dense_shape), tf.concat([[n], leaf.dense_shape[1:]], 0))
        return leaf if leaf is None else leaf[:n]

    return tf.nest.map_structure(first, batch)


def _build(model, strategy, batch):
    if engine_of(model) is not None:
        engine_of(model).build_from(batch)
    elif not internals.is_built(model):
        with strategy.scope():
            internals.symbolic_build(model, batch)


def _compared(one, many, tolerance, rounding):
    """The differences of the gradients that the optimizer was given, and whether they or the states differ."""
    each = compare(total(one.handed), total(many.handed), tolerance, rounding=rounding.handed)
    return each, not all_equal(each) or _states_differ(one, many, tolerance, rounding.state)


def _states_differ(one, many, tolerance, rounding):
    return any(
        not all_equal(compare({name: np.asarray(one.state[name][0])}, {name: np.asarray(copy)}, tolerance, rounding=rounding))
        for name, copies in many.state.items()
        for copy in copies
        if copy.dtype.kind in "biuf"
    )


def _row_causes(strategy, batch, rows):
    """Sends the numbers of the rows the way that the rows go, and looks at what arrives."""
    dataset = tf.data.Dataset.from_tensors((tf.range(rows), batch))
    arrived = [
        np.concatenate([part.numpy() for part in strategy.experimental_local_results(numbers)])
        for numbers, _ in strategy.experimental_distribute_dataset(dataset)
    ]
    counts = np.bincount(np.concatenate(arrived), minlength=rows)
    if (counts != 1).any():
        yield Cause(
            "rows",
            f"of {rows} rows, {int((counts == 0).sum())} reach no replica and {int((counts > 1).sum())} more than one, "
            f"the first of them row {int(np.argmax(counts != 1))}",
            "Distribute the batch with the strategy's own experimental_distribute_dataset",
        )


def _rows_note(rows, replicas):
    return f"Each row of the batch of {rows} reaches exactly one replica ({' + '.join(map(str, split_sizes(rows, replicas)))})."
