"""Causes that show in the gradients themselves: what was added up is each time right, but for a number."""

import numpy as np
import tensorflow as tf

from keras_mirror.batches import split_sizes
from keras_mirror.cause import Cause
from keras_mirror.comparing import all_equal, compare, total
from keras_mirror.distribution import rows_of_batch
from keras_mirror.gradients import ONE_DEVICE, regularizer_gradients
from keras_mirror.mixtures import added, minus, mixture


class Sums:
    """Looks for sums over rows beside means, denominators of each replica's own, regularizers that count again.

    Args:
        probe: A `StepProbe`.
        tolerance: As of `compare`.
        rounding: The `Rounding` of the step.
    """

    def __init__(self, probe, tolerance, rounding):
        self._probe = probe
        self._tolerance = tolerance
        self._rounding = rounding

    def causes(self, batch, on_one, on_many):
        """Yields the cause of a difference, if it is one of these.

        Args:
            batch: The global batch of both steps.
            on_one: `StepResult` of one device.
            on_many: `StepResult` of the replicas.
        """
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
        growing = minus(
            total(self._probe.run(_twice(batch), ONE_DEVICE).raw), one
        )  # a sum over rows grows with rows that come again
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

    def of_local_means(self, batch, on_one, on_many):
        """Whether the gradients of each replica are a mean over its rows, so that shares of the rows make them right."""
        numbers = mixture(total(on_one.raw), _of_each_replica(on_many), self._tolerance, self._rounding.raw)
        return numbers is not None and _as_rows(numbers, batch)

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
