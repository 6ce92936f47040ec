"""Why replicas differ from one device: each cause is found by an experiment on the model itself."""

import contextlib
import dataclasses

import keras
import numpy as np
import tensorflow as tf

from keras_mirror import internals
from keras_mirror.batches import split_sizes
from keras_mirror.comparing import all_equal, compare, factor_between, total
from keras_mirror.distribution import rows_of_batch
from keras_mirror.even_randomness import same_for_every_row
from keras_mirror.gradients import COPIES, ONE_DEVICE, PARTS, regularizer_gradients
from keras_mirror.mixtures import added, minus, mixture
from keras_mirror.normalization import normalize_globally
from keras_mirror.random_states import draw_others_from_host
from keras_mirror.row_mixing import layers_that_mix_rows
from keras_mirror.shadowing import shadowed
from keras_mirror.snapshot import copies_of


@dataclasses.dataclass(frozen=True)
class Cause:
    """Why a step on replicas is not the step of one device.

    Attributes:
        kind: `"non-determinism"`, `"random layers"`, `"local mean"`, `"divided twice"`, `"scale"`,
            `"unequal parts"`, `"local denominator"`, `"regularizers counted again"`, `"sum beside a mean"`,
            `"local batch statistics"`, `"rows are mixed"`, `"clipping before the reduction"`,
            `"unsynchronised state"`, `"rows"` or `"unknown"`.
        evidence: What was measured.
        remedy: What to write instead.
        by_design: Whether replicas are meant to differ here, as random layers do.
    """

    kind: str
    evidence: str
    remedy: str
    by_design: bool = False

    def __str__(self):
        return f"{self.kind}: {self.evidence}. {self.remedy}."


class Experiments:
    """Runs one step again and again, each time with one thing changed.

    Args:
        probe: A `StepProbe`.
        batches: Dict of `"even"` and `"uneven"` to a global batch that splits like that, or without it.
        tolerance: As of `compare`.
        local_batch_norm: Whether batch normalisation was asked to use each replica's own statistics.
        rounding: The `Rounding` of the step.
    """

    def __init__(self, probe, batches, tolerance, local_batch_norm, rounding):
        self._probe = probe
        self._batches = batches
        self._tolerance = tolerance
        self._local_batch_norm = local_batch_norm
        self._rounding = rounding
        self._layers = list(internals.layers_of(probe.model))
        self._some = next(iter(batches.values()))

    def causes(self):
        """Yields the `Cause`s, those that hide others first."""
        noise = list(self._noise())
        yield from noise
        if noise:
            return
        random_layers = self._random_layers()
        with same_for_every_row():
            self._probe.changed()
            others = list(self._deterministic_causes())
            by_numbers = not others and all(
                self._equal(self._run(batch, ONE_DEVICE), self._run(batch, PARTS), part="handed")
                for batch in self._batches.values()
            )
        self._probe.changed()
        if random_layers or by_numbers:
            yield self._random(random_layers, others)
        yield from others

    # --- one thing at a time ------------------------------------------------------------------

    def _noise(self):
        for how, side in ((ONE_DEVICE, "one device"), (PARTS, "the replicas")):
            once = self._probe.run(self._some, how)
            for traced_again in (False, True):
                if traced_again:  # numbers that Python made are in the graph
                    self._probe.changed()
                    draw_others_from_host()
                differences = self._differences(once, self._probe.run(self._some, how), part="handed")
                if not all_equal(differences):
                    worst = max(differences, key=lambda name: _order(differences[name].off))
                    yield Cause(
                        "non-determinism",
                        f"the same step {'traced' if traced_again else 'run'} twice on {side} differs from itself by "
                        f"{differences[worst].off:.2g} ({worst})",
                        "Draw random numbers from a keras.random.SeedGenerator and leave out state that Python keeps between steps",
                    )
                    return

    def _random_layers(self):
        """Layers whose random numbers change the gradients of one device."""
        layers = [layer for layer in self._layers if internals.seed_generators_of(layer)]
        before = self._probe.run(self._some, ONE_DEVICE)
        if not layers or not self._moves(before, layers):
            return []
        return [layer for layer in layers if self._moves(before, [layer])]

    def _moves(self, before, layers):
        for layer in layers:
            for generator in internals.seed_generators_of(layer):
                for copy in copies_of(generator.state):
                    copy.assign_add(tf.ones_like(copy) * 977)
        after = self._probe.run(self._some, ONE_DEVICE)  # puts the seeds back
        return not self._equal(before, after, part="handed")

    def _random(self, layers, others):
        names = ", ".join(layer.path or layer.name for layer in layers)
        drawn = f"other random numbers in {names} change the gradients of one device" if layers else "the step draws random numbers"
        equal = "a difference stays, which has another cause" if others else "replicas equal one device"
        return Cause(
            "random layers",
            f"{drawn}, and each replica draws its own; with the same numbers for every row {equal}",
            "There is nothing to change about the random numbers: they are reproducible from one seed",
            by_design=True,
        )

    def _deterministic_causes(self):
        runs = {kind: (self._run(batch, ONE_DEVICE), self._run(batch, PARTS)) for kind, batch in self._batches.items()}
        factor = self._factor(runs)
        raw_equal = {kind: self._equal(one, many, factor) for kind, (one, many) in runs.items()}
        differing = [kind for kind, equal in raw_equal.items() if not equal]
        sums = list(self._sums(self._batches[differing[0]], *runs[differing[0]])) if differing else []
        yield from sums or self._scale(factor)
        if not sums and not raw_equal.get("even", True):
            yield from self._mixed_rows(factor)
        elif not sums and not raw_equal.get("uneven", True):
            yield from self._unequal_parts(runs["uneven"], factor)
        if all(raw_equal.values()):
            yield from self._clipping(runs, factor)
        yield from self._state(runs, all(raw_equal.values()))

    def _sums(self, batch, on_one, on_many):
        """A cause that shows in the gradients themselves, as sums of others."""
        one, many, replicas = total(on_one.raw), total(on_many.raw), self._probe.strategy.num_replicas_in_sync
        regularizers = regularizer_gradients(self._probe.model)
        if regularizers and self._alike(minus(many, one), [regularizers], [replicas - 1]):
            yield Cause(
                "regularizers counted again",
                f"the gradients are off by {replicas - 1} times those of the model's regularizers, which each of the {replicas} "
                "replicas adds whole",
                "Write sum(model.losses) / strategy.num_replicas_in_sync, or use model.compute_loss(...)",
            )
            return
        growing = minus(total(self._run(_twice(batch), ONE_DEVICE).raw), one)  # a sum over rows grows with rows that come again
        if not self._alike(growing, [growing], [0.0]) and (yield from self._sum_over_rows(one, many, growing)):
            return
        parts = _of_each_replica(on_many)
        numbers = mixture(one, parts, self._tolerance, self._rounding.raw)
        if numbers is None or not _are_weights(numbers, batch):
            return
        yield Cause(
            "local denominator",
            "each replica's gradients are right but for a number of its own: times "
            f"{', '.join(f'{number:.3g}' for number in numbers)} they add up to those of one device. The loss is divided by what "
            "the replica's own rows add up to, as a sum of weights or a number of valid tokens",
            "Divide by that of all replicas: loss = keras_mirror.global_mean(weight * loss_per_row) / "
            "tf.distribute.get_replica_context().all_reduce('SUM', keras_mirror.global_mean(weight))",
        )

    def _sum_over_rows(self, one, many, growing):
        """A cause where a part of the loss is a sum, and whether there is one."""
        mean, replicas = minus(one, growing), self._probe.strategy.num_replicas_in_sync
        terms = [growing] if self._alike(mean, [mean], [0.0]) else [growing, mean]
        numbers = mixture(many, terms, self._tolerance, self._rounding.raw)
        if numbers is None or (len(terms) > 1 and abs(numbers[0] - numbers[1]) < 1e-2):
            return False
        whole, rest = "the loss is a sum over rows", f"; on {replicas} replicas it comes to {_times(numbers[0])}"
        if len(terms) > 1:
            whole, rest = "a part of the loss is a sum over rows", f"{rest}, and the rest, a mean, to {_times(numbers[1])}"
        yield Cause(
            "sum over rows",
            f"with every row given twice the gradients of one device grow, so {whole}{rest}",
            "Make it a mean over the global batch, as keras_mirror.global_mean(loss_per_row)",
        )
        return True

    def _alike(self, target, terms, numbers):
        shapes = {name: np.shape(each[name]) for each in (target, *terms) for name in each}
        return all_equal(compare(target, added(terms, numbers, shapes), self._tolerance, rounding=self._rounding.raw))

    def _run(self, batch, how):
        return self._probe.run(batch, how)

    def _differences(self, one, many, factor=1.0, part="raw"):
        one, many = (total(getattr(result, part)) for result in (one, many))
        return compare(one, many, self._tolerance, factor, self._rounding.of(part))

    def _equal(self, one, many, factor=1.0, part="raw"):
        return all_equal(self._differences(one, many, factor, part))

    def _factor_between(self, one, many):
        return factor_between(total(one.raw), total(many.raw), self._tolerance, self._rounding.raw)

    def _factor(self, runs):
        """How many times too large the gradients are where nothing else is wrong with them."""
        one, many = runs.get("even") or runs["uneven"]
        in_parts, exact = self._factor_between(one, many)
        if exact:
            return _whole(in_parts)
        # With the whole batch on each replica no part differs from the batch in anything but its scale. A loss that
        # is a sum is right to grow with the rows, though, so the factor must be seen in the parts as well.
        copies = self._run(self._batches.get("even", self._some), COPIES)
        on_copies, exact = self._factor_between(one, copies)
        if exact and in_parts > 0 and abs(np.log(in_parts / on_copies)) < abs(np.log(in_parts)):
            return _whole(on_copies)
        return 1.0

    def _scale(self, factor):
        replicas = self._probe.strategy.num_replicas_in_sync
        if factor == 1.0:
            return
        evidence = f"the gradients of {replicas} replicas add up to {factor:.2f} times those of one device, all of them alike"
        if factor == replicas:
            yield Cause(
                "local mean",
                f"{evidence}: the step's own loss is a mean over each replica's rows",
                "Write loss = keras_mirror.global_mean(loss_per_row), or use model.compute_loss(...)",
            )
        elif factor == _whole(1 / replicas):
            yield Cause(
                "divided twice",
                f"{evidence}: the loss is divided by the number of replicas on top of a mean over the global batch",
                "Drop the division by strategy.num_replicas_in_sync",
            )
        else:
            yield Cause(
                "scale", evidence, "Make the loss a mean over the global batch: loss = keras_mirror.global_mean(loss_per_row)"
            )

    def _unequal_parts(self, runs, factor):
        one, many = runs
        numbers = mixture(total(one.raw), _of_each_replica(many), self._tolerance, self._rounding.raw)
        if factor != 1 and numbers is not None and _as_rows(numbers, self._batches["uneven"]):
            return  # local means, which is said already
        worst = _worst(self._differences(one, many, factor))
        yield Cause(
            "unequal parts",
            f"with parts of equal size the gradients are those of one device, with parts of unequal size they are off by {worst}: "
            "each replica's mean counts the same however many rows it has",
            "Write loss = keras_mirror.global_mean(loss_per_row), which divides by the rows of the global batch",
        )

    def _mixed_rows(self, factor):
        batch = self._batches["even"]
        normalizations = [layer for layer in self._layers if isinstance(layer, keras.layers.BatchNormalization)]
        if normalizations and self._local_batch_norm:
            with contextlib.ExitStack() as undo:
                for layer in normalizations:
                    undo.enter_context(_synchronised(layer))
                self._probe.changed()
                cured = self._equal(self._run(batch, ONE_DEVICE), self._run(batch, PARTS), factor)
            self._probe.changed()
            if cured:
                yield Cause(
                    "local batch statistics",
                    f"with synchronised statistics in {', '.join(layer.name for layer in normalizations)} the difference is gone",
                    "Build with batch_norm='sync', unless noisier statistics are what you want",
                    by_design=True,
                )
                return
        known = () if self._local_batch_norm else normalizations
        with self._probe.restored():
            mixing = layers_that_mix_rows(self._probe, batch, [id(layer) for layer in known], self._tolerance)
        if mixing:
            names = ", ".join(f"{layer.name} ({type(layer).__name__})" for layer in mixing)
            yield Cause(
                "local batch statistics",
                f"what {names} makes of a row depends on the other rows that it is called with, and a replica has its part only",
                "Compute such statistics over all replicas, for a mean by "
                "tf.distribute.get_replica_context().all_reduce('SUM', keras_mirror.global_mean(rows))",
            )
        elif self._copies_are_right(factor):
            yield Cause(
                "rows are mixed",
                "parts of equal size give other gradients than the whole batch, whatever number each part's are multiplied by, and "
                "no layer mixes rows: the loss does",
                "A loss that compares the rows of a batch with each other needs all of them: gather its inputs from the replicas "
                "with tf.distribute.get_replica_context().all_gather first",
            )
        else:
            yield Cause(
                "unknown",
                "neither parts of equal size nor the whole batch on every replica give the gradients of one device, and no "
                "experiment explains why",
                "Build the loss from keras_mirror.global_mean(loss_per_row) and try again; please report a step that stays wrong",
            )

    def _copies_are_right(self, factor):
        batch = self._batches["even"]
        one, copies = self._run(batch, ONE_DEVICE), self._run(batch, COPIES)
        measured, exact = self._factor_between(one, copies)
        return exact or self._equal(one, copies, factor)

    def _clipping(self, runs, factor):
        for kind in ("even", "uneven"):
            if kind not in runs or self._equal(*runs[kind], factor, "handed"):
                continue
            one, many = runs[kind]
            worst = _worst(self._differences(one, many, factor, "handed"))
            how = "clips or otherwise changes" if not _shrinks(many) else "clips"
            yield Cause(
                "clipping before the reduction",
                f"tape.gradient gives the gradients of one device, and the step {how} each replica's part of them before they are "
                f"added up, which puts them off by {worst}",
                "Let the optimizer do it, after the reduction: clipnorm=, global_clipnorm= or clipvalue= of the optimizer",
            )
            return

    def _state(self, runs, gradients_equal):
        one, many = runs.get("uneven") or runs["even"]
        for name, copies in many.state.items():
            apart = not all(np.array_equal(copies[0], copy, equal_nan=True) for copy in copies if copy.dtype.kind in "biufc")
            wrong = not all_equal(
                compare({name: one.state[name][0]}, {name: copies[0]}, self._tolerance, rounding=self._rounding.state)
            )
            if apart or (wrong and gradients_equal and not self._local_batch_norm):
                where = int(np.argmax(np.abs(np.subtract(copies[0], copies[-1], dtype="float64")))) if apart else 0
                values = ", ".join(f"replica {i} {np.ravel(copy)[where]:.4g}" for i, copy in enumerate(copies))
                yield Cause(
                    "unsynchronised state",
                    f"after one step {name} holds {values}, and {np.ravel(one.state[name][0])[where]:.4g} on one device",
                    "Reduce what the layer writes over the replicas, for a mean over rows by "
                    "tf.distribute.get_replica_context().all_reduce('SUM', keras_mirror.global_mean(rows))",
                )


def _order(off):
    return np.inf if np.isnan(off) else off


def _worst(differences):
    name = max(differences, key=lambda name: _order(differences[name].off))
    return f"{differences[name].off:.2g} ({name}, whose gradient is {differences[name].size:.2g})"


def _whole(factor):
    """`factor`, or the whole number (or one divided by it) that it is within rounding."""
    near = round(factor) if factor >= 1 else 1 / max(round(1 / factor), 1)
    return float(near) if abs(factor - near) < 1e-3 * near else factor


def _shrinks(result):
    """Whether each replica's gradients were handed on no larger than the tape gave them."""
    return all(
        np.all(np.abs(handed) <= np.abs(raw) * (1 + 1e-5))
        for name in result.handed
        if name in result.raw
        for handed, raw in zip(result.handed[name], result.raw[name])
    )


def _of_each_replica(result):
    """The gradients of a step on each of the replicas: a list of dicts of name to array."""
    replicas = max(map(len, result.raw.values()), default=0)
    return [{name: each[i] for name, each in result.raw.items()} for i in range(replicas)]


def _shares(batch, replicas):
    """The replicas' shares of the rows, an array."""
    return np.array(split_sizes(int(rows_of_batch(batch)), replicas)) / int(rows_of_batch(batch))


def _as_rows(numbers, batch):
    """Whether the numbers are to each other as the rows of the parts."""
    return np.allclose(numbers / numbers.sum(), _shares(batch, len(numbers)), rtol=1e-2)


def _are_weights(numbers, batch):
    """Whether the numbers make an average of the parts that is neither a plain one nor one by rows.

    What was divided by the number of replicas, or weighed by shares of the rows, is averaged by as much more.
    """
    sums = numbers.sum(), numbers.mean(), numbers @ _shares(batch, len(numbers))
    uneven = min(numbers) > 0 and max(numbers) / min(numbers) > 1.01 and not _as_rows(numbers, batch)
    return uneven and any(abs(each - 1) < 1e-2 for each in sums)


def _twice(batch):
    """The batch with all its rows twice."""

    def twice(leaf):
        if leaf is None:
            return None
        return tf.sparse.concat(0, [leaf, leaf]) if isinstance(leaf, tf.SparseTensor) else tf.concat([leaf, leaf], 0)

    return tf.nest.map_structure(twice, batch)


def _times(number):
    return "what it should be" if abs(number - 1) < 1e-2 else f"{number:.3g} times what it should be"


@contextlib.contextmanager
def _synchronised(layer):
    """A context in which a batch normalisation uses the statistics of the global batch."""
    with shadowed(layer, _moments=None, call=type(layer).call.__get__(layer)):
        normalize_globally(layer, "sync")
        yield
