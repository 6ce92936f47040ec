"""How far apart rounding alone may put a step, measured: one device again, with numbers moved by their last bit."""

import dataclasses

import numpy as np
import tensorflow as tf

from keras_mirror.comparing import largest_of
from keras_mirror.gradients import ONE_DEVICE
from keras_mirror.snapshot import copies_of

LAST_BIT = {"float64": 2.0**-52, "float32": 2.0**-23, "float16": 2.0**-10, "bfloat16": 2.0**-7}
TIMES = 3  # that it is measured
MULTIPLE = 10  # of the largest that was measured: other sums round otherwise
MOST = 1e-2  # of the largest of all numbers: more than that is never taken for rounding


@dataclasses.dataclass(frozen=True)
class Rounding:
    """What may be rounding: dicts of a variable's name to the largest difference, for each part of a `StepResult`.

    Sums that cancel, and statistics of rows that are nearly alike, make much of the last bit of a number, so no
    constant will do. What is more than `MOST` of the largest gradient is a difference whatever was measured.

    Attributes:
        share: The largest of what was measured for the gradients, of the largest gradient.
    """

    handed: dict = dataclasses.field(default_factory=dict)
    raw: dict = dataclasses.field(default_factory=dict)
    state: dict = dataclasses.field(default_factory=dict)
    share: float = 0.0

    def of(self, part):
        """The dict for `"handed"`, `"raw"` or `"state"`."""
        return getattr(self, part)

    def or_more(self, other):
        """For each variable the larger of two."""
        pairs = zip(self._all(), other._all())
        each = ({name: max(a.get(name, 0.0), b.get(name, 0.0)) for name in {**a, **b}} for a, b in pairs)
        return Rounding(*each, max(self.share, other.share))

    def _all(self):
        return self.handed, self.raw, self.state

    def notes(self):
        """Yields a sentence where one device itself makes too much of the last bit for a comparison."""
        if self.share > MOST:
            yield (
                f"One device's own gradients change by {self.share:.2g} of the largest when inputs and weights change by their "
                "last bit, so a difference of that order says nothing; check a batch of other rows."
            )


def measure(probe, batch, dtype):
    """Runs the step of one device with inputs and weights moved by their last bit, and takes what that changes.

    Args:
        probe: A `StepProbe`.
        batch: A global batch, of whose first component the floats are moved, each by itself.
        dtype: Name of the type that the step computes in.

    Returns:
        A `Rounding`.
    """
    before = probe.run(batch, ONE_DEVICE)
    random = np.random.RandomState(0)
    found = Rounding()
    for _ in range(TIMES):
        for variable in probe.model.trainable_variables:
            _move(copies_of(variable), random, LAST_BIT[dtype])
        after = probe.run(_moved(batch, random, LAST_BIT[dtype]), ONE_DEVICE)  # puts the weights back
        found = found.or_more(_between(before, after))
    return found


def _move(copies, random, last_bit):
    value = copies[0].numpy()
    if copies[0].dtype.is_floating:
        moved = tf.cast(_further(value, random, last_bit), copies[0].dtype)
        for copy in copies:
            copy.assign(moved)


def _moved(batch, random, last_bit):
    def leaf(value):
        if not isinstance(value, tf.Tensor) or not value.dtype.is_floating:
            return value
        return tf.cast(_further(value.numpy(), random, last_bit), value.dtype)

    x, *others = batch if isinstance(batch, tuple) else (batch,)
    x = tf.nest.map_structure(leaf, x)
    return (x, *others) if isinstance(batch, tuple) else x


def _further(value, random, last_bit):
    """Some of the numbers a bit further from zero, so that a whole number stays one when it is cut off."""
    return np.asarray(value, "float64") * (1 + last_bit * random.randint(0, 2, value.shape))


def _between(before, after):
    found, share = [], 0.0
    for part in ("handed", "raw", "state"):
        one, other = _numbers(getattr(before, part)), _numbers(getattr(after, part))
        largest = max(map(largest_of, one.values()), default=0.0)
        with np.errstate(invalid="ignore"):  # a gradient may be infinite
            moved = {name: largest_of(other[name] - value) for name, value in one.items() if name in other}
        found.append({name: min(MULTIPLE * value, MOST * largest) for name, value in moved.items()})
        if part == "handed" and largest:
            share = max(moved.values(), default=0.0) / largest
    return Rounding(*found, share)


def _numbers(values):
    return {name: np.asarray(v, "float64") for name, (v, *_) in values.items() if v.dtype.kind in "biuf"}
