"""Do the copies of each mirrored variable still agree? One check, and the record of many."""

import dataclasses
import math

import keras
import tensorflow as tf

from keras_mirror import internals
from keras_mirror.copies import Copies, Inventory, as_numbers, checksum_function, compare, inventory, repair
from keras_mirror.divergence import DivergenceReport, Record
from keras_mirror.provenance import origin_of

_CHECKER = "_keras_mirror_checker"


@dataclasses.dataclass(frozen=True)
class Difference:
    """One variable whose copies do not agree.

    Attributes:
        copies: Its `Copies`.
        reference: int, the replica that the others are compared with: the first that holds what most hold, but none
            with NaN where another has fewer.
        largest: Dict of replica to the largest absolute difference of its copy from that of `reference`.
        repaired: How the copies were made equal, `""` if they were not.
    """

    copies: Copies
    reference: int
    largest: dict
    repaired: str = ""

    @property
    def worst(self):
        """The largest difference of all; NaN where one copy holds a NaN and another does not."""
        return math.nan if any(math.isnan(value) for value in self.largest.values()) else max(self.largest.values())

    @property
    def code(self):
        """`"KM401"` for state that each replica updates by itself, `"KM402"` for what training keeps equal."""
        return "KM401" if self.copies.is_unsynchronized else "KM402"

    def __str__(self):
        names = " and ".join(", ".join(str(r) for r in self.largest).rsplit(", ", 1))
        plural = len(self.largest) > 1
        origin = origin_of(self.copies.variable, *([] if self.copies.holder is None else [self.copies.holder]))
        where = f"{self.copies.kind}, made at {origin}" if origin else self.copies.kind
        if math.isnan(self.worst):
            how = f"{'hold' if plural else 'holds'} NaN where replica {self.reference} does not, or the other way round"
        else:
            how = f"{'differ' if plural else 'differs'} from replica {self.reference} by up to {self.worst:.4g}"
        return f"{self.copies.path} ({where}): replica{'s' * plural} {names} {how}"

    @property
    def remedy(self):
        """Why it happens and what to write instead, in one or two sentences."""
        if isinstance(self.copies.holder, keras.layers.BatchNormalization):
            return (
                "Each replica keeps the statistics of its own rows; build the model with keras_mirror.mirrored_model, or pass "
                "synchronized=True to the layer"
            )
        if self.copies.kind == "metric state":
            return "Each replica counts its own rows, which nobody adds up; make the state with self.add_variable(...)"
        if self.copies.is_unsynchronized:
            return (
                "Each replica updates its own copy with its own rows, and only replica 0's is saved; add the rows up over the "
                "replicas before the assign, as docs/codes/KM401.md shows"
            )
        return (
            "Training keeps these copies equal, so something wrote to one of them alone; assign outside of strategy.run, where all "
            "copies are written, or the same value on every replica"
        )


@dataclasses.dataclass(frozen=True)
class Check:
    """What one check found.

    Attributes:
        replicas: int.
        inventory: What was looked at, an `Inventory`.
        differences: List of `Difference`.
    """

    replicas: int
    inventory: Inventory
    differences: list


class Checker:
    """Checks the copies of one model's variables, as often as asked.

    The checksums are one graph, traced again only when the model has other variables.

    Args:
        model: A `keras.Model` made in a strategy's scope.
    """

    def __init__(self, model):
        self._model = model
        self._key = None

    def check(self, *, on_difference="keep", tolerance=0.0):
        """Compares all copies now.

        Args:
            on_difference: `"keep"` or `"repair"`.
            tolerance: Largest difference of floats that is let pass.

        Returns:
            A `Check`.
        """
        strategy = internals.training_strategy(self._model) or tf.distribute.get_strategy()
        replicas = strategy.num_replicas_in_sync
        if replicas == 1:
            return Check(1, Inventory([], [], 0, []), [])
        found = inventory(self._model, strategy)
        differences = []
        for each, sums in zip(found.mirrored, self._checksums(found.mirrored)):
            if len(set(sums)) > 1:
                reference, largest = compare(each, sums)
                largest = {replica: value for replica, value in largest.items() if not value <= tolerance}
                if largest:
                    done = repair(each, reference) if on_difference == "repair" else ""
                    differences.append(Difference(each, reference, largest, done))
        return Check(replicas, found, differences)

    def _checksums(self, mirrored):
        if not mirrored:
            return []
        key = [id(each.variable) for each in mirrored]
        if key != self._key:
            self._key, self._mirrored = key, mirrored  # holds the variables, so that no id is used again
            self._function = checksum_function(mirrored)
        return as_numbers(self._function())


def checker_of(model):
    """The `Checker` of a model, made once."""
    if getattr(model, _CHECKER, None) is None:
        internals.set_attribute(model, _CHECKER, Checker(model))
    return getattr(model, _CHECKER)


def compare_replicas(model, *, repair=False, tolerance=0.0):
    """Compares the copies that the replicas hold of each variable, once; for loops without callbacks.

    Looks at the variables of layers, optimizers, losses, metrics and seed generators, and at those
    that the traced steps captured. What each replica counts by itself until it is read (metrics,
    variables with `synchronization=ON_READ`) is local by design and not compared. Each device sums
    the bits of its own copies; only variables whose sums differ are compared in full. In several
    processes, the copies of this one are compared.

    Args:
        model: A `keras.Model` made in the scope of a `keras_mirror.MirroredStrategy` or of
            `tf.distribute.MirroredStrategy`.
        repair: Whether to make copies that differ equal: floats that each replica updates by itself
            (statistics of a layer) are averaged, anything else is copied from the replica whose value
            most replicas hold, but not a NaN if another has a number.
        tolerance: Largest difference of floats that is let pass.

    Returns:
        A `keras_mirror.report.Report` with a row per variable whose copies differ; its
        `checks[0]` is `(step, {path: largest difference})`, and `bool(report)` says whether any differ.

    Raises:
        TypeError: If `model` is no Keras model.

    Example:

    >>> if km.compare_replicas(model):
    ...     print(km.compare_replicas(model, repair=True))
    """
    if not isinstance(model, keras.Model):
        raise TypeError(f"compare_replicas: expected a keras.Model, and got {type(model).__name__}.")
    record = Record()
    found = checker_of(model).check(on_difference="repair" if repair else "keep", tolerance=tolerance)
    record.add(steps_taken(model), found)
    return DivergenceReport(record)


def steps_taken(model, batches=0):
    """How many steps the model has been trained for: those that its optimizer counted, over all its trainings.

    Args:
        model: A `keras.Model`.
        batches: int, the answer where no optimizer and no strategy of this package counts.
    """
    optimizer = getattr(model, "optimizer", None)
    counted = [] if optimizer is None else [v for v in optimizer.variables if v.name == "iteration"]
    if counted:
        return max(int(keras.ops.convert_to_numpy(variable)) for variable in counted)
    counters = getattr(internals.training_strategy(model), "row_counters", None)
    return batches if counters is None else max(batches, counters["train"].read().steps)
