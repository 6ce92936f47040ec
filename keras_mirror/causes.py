"""Why replicas differ from one device: each cause is found by an experiment on the model itself."""

import contextlib

import keras
import numpy as np
import tensorflow as tf

from keras_mirror import internals
from keras_mirror.cause import Cause
from keras_mirror.comparing import all_equal, compare, factor_between, total
from keras_mirror.even_randomness import same_for_every_row
from keras_mirror.gradients import COPIES, ONE_DEVICE, PARTS
from keras_mirror.normalization import normalize_globally
from keras_mirror.random_states import draw_others_from_host
from keras_mirror.row_mixing import layers_that_mix_rows
from keras_mirror.shadowing import shadowed
from keras_mirror.snapshot import copies_of
from keras_mirror.sums import Sums


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
        self._sums = Sums(probe, tolerance, rounding)
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
        drawn = "the step draws random numbers, and each replica does so for its own rows"
        if layers:
            drawn = f"other random numbers in {names} change the gradients of one device, and each replica draws its own"
        equal = "a difference stays, which has another cause" if others else "replicas equal one device"
        return Cause(
            "random layers",
            f"{drawn}; with the same numbers for every row {equal}",
            "There is nothing to change about the random numbers: they are reproducible from one seed",
            by_design=True,
        )

    def _deterministic_causes(self):
        runs = {kind: (self._run(batch, ONE_DEVICE), self._run(batch, PARTS)) for kind, batch in self._batches.items()}
        factor = self._factor(runs)
        raw_equal = {kind: self._equal(one, many, factor) for kind, (one, many) in runs.items()}
        differing = [kind for kind in ("even", "uneven") if not raw_equal.get(kind, True)]
        sums = list(self._sums.causes(self._batches[differing[0]], *runs[differing[0]])) if differing else []
        yield from sums or self._scale(factor)
        if not sums and not raw_equal.get("even", True):
            yield from self._mixed_rows(factor)
        elif not sums and not raw_equal.get("uneven", True):
            yield from self._unequal_parts(runs["uneven"], factor)
        if all(raw_equal.values()):
            yield from self._clipping(runs, factor)
        yield from self._state(runs, all(raw_equal.values()))

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
        if factor != 1 and self._sums.of_local_means(self._batches["uneven"], one, many):
            return  # which is said already
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
            clips = _shrinks(many)
            yield Cause(
                "clipping before the reduction" if clips else "gradients changed before the reduction",
                f"tape.gradient gives the gradients of one device, and the step {'clips' if clips else 'changes'} each replica's "
                f"part of them before the optimizer adds them up, which puts them off by {worst}",
                "Let the optimizer do it, after the reduction: its clipnorm=, global_clipnorm=, clipvalue= or "
                "gradient_accumulation_steps=; anything else to what get_replica_context().all_reduce('SUM', gradient) returns, "
                "divided by num_replicas_in_sync",
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
                    "Write what tf.distribute.get_replica_context().all_reduce('SUM', value) returns, where value is a sum or a "
                    "count of the replica's rows as it is, and a mean over rows keras_mirror.global_mean(rows)",
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


@contextlib.contextmanager
def _synchronised(layer):
    """A context in which a batch normalisation uses the statistics of the global batch."""
    with shadowed(layer, _moments=None, call=type(layer).call.__get__(layer)):
        normalize_globally(layer, "sync")
        yield
