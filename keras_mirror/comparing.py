"""How far the gradients of replicas are from those of one device: arithmetic alone, no TensorFlow."""

import dataclasses

import numpy as np

ROUNDING = 2e-6  # of the largest gradient of all: what sums in another order may differ by at any rate


@dataclasses.dataclass(frozen=True)
class Difference:
    """How far one variable's gradient is from that of one device.

    Attributes:
        size: Largest absolute value of the gradient on one device.
        off: Largest absolute difference; NaN where one of the two is not finite and the other is.
        equal: Whether that is rounding.
    """

    size: float
    off: float
    equal: bool


def total(parts):
    """The sum over replicas of each variable's gradients: a dict of name to array."""
    return {name: sum(each) for name, each in parts.items()}


def compare(one, many, tolerance, factor=1.0, rounding=None):
    """Compares two dicts of name to array, of which `many` is divided by `factor`.

    Args:
        one: Gradients of one device.
        many: Gradients of the replicas, added up; a variable without one has a gradient of zero.
        tolerance: Largest difference relative to the variable's largest gradient that is rounding.
        factor: float.
        rounding: Dict of name to a difference that is rounding as well, as it was measured.

    Returns:
        A dict of name to `Difference`.
    """
    rounding = rounding or {}
    names = [*one, *(name for name in many if name not in one)]
    both = {name: _both(one.get(name), many.get(name), factor) for name in names}
    largest = max((largest_of(a) for a, _ in both.values()), default=0.0)
    return {name: _difference(a, b, tolerance, ROUNDING * largest + rounding.get(name, 0.0)) for name, (a, b) in both.items()}


def _both(one, many, factor):
    one = np.zeros_like(many) if one is None else np.asarray(one)
    many = np.zeros_like(one) if many is None else np.asarray(many) / factor
    return one, many


def largest_of(array):
    """The largest absolute value, of those that are finite."""
    finite = np.abs(array[np.isfinite(array)])
    return float(finite.max()) if finite.size else 0.0


def _difference(one, many, tolerance, floor):
    size = largest_of(one)
    if not np.array_equal(np.isfinite(one), np.isfinite(many)):
        return Difference(size, float("nan"), False)
    off = largest_of(np.where(np.isfinite(one), many - np.where(np.isfinite(one), one, 0), 0))
    return Difference(size, off, off <= tolerance * size + floor)


def all_equal(differences):
    """Whether nothing but rounding is between two sides."""
    return all(each.equal for each in differences.values())


def factor_between(one, many, tolerance, rounding=None):
    """The number that `many` is `one` times, by least squares over all variables, and whether it is that.

    Returns:
        `(factor, exact)`; `(1.0, False)` where there is nothing finite to compare.
    """
    names = [name for name in one if name in many]
    a = np.concatenate([np.ravel(one[name]) for name in names] or [np.zeros(0)])
    b = np.concatenate([np.ravel(many[name]) for name in names] or [np.zeros(0)])
    if not (np.isfinite(a).all() and np.isfinite(b).all() and a.any() and b.any()):
        return 1.0, False
    factor = float(a @ b / (a @ a))
    if factor <= 0:
        return factor, False
    return factor, all_equal(compare(one, many, tolerance, factor, rounding))
