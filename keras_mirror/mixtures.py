"""Gradients as sums of other gradients, each times a number: arithmetic alone, no TensorFlow."""

import numpy as np

from keras_mirror.comparing import all_equal, compare


def mixture(target, terms, tolerance, rounding=None):
    """The numbers that `terms` have to be multiplied by to add up to `target`, by least squares over all variables.

    Args:
        target: Dict of name to array.
        terms: List of such dicts; a name that one lacks is zero there.
        tolerance: As of `compare`.
        rounding: As of `compare`.

    Returns:
        An array with a number for each term; None where they do not add up to `target`, where there are too few
        entries to tell, or where something is not finite.
    """
    names = list(dict.fromkeys(name for each in (target, *terms) for name in each))
    shapes = {name: np.shape(next(each[name] for each in (target, *terms) if name in each)) for name in names}

    def flat(values):
        arrays = (np.ravel(values[name]) if name in values else np.zeros(shapes[name]).ravel() for name in names)
        return np.concatenate([*arrays, np.zeros(0)])

    wanted, columns = flat(target), np.stack([flat(term) for term in terms], 1)
    if len(wanted) < 3 * len(terms) or not (np.isfinite(wanted).all() and np.isfinite(columns).all()):
        return None
    numbers = np.linalg.lstsq(columns, wanted, rcond=None)[0]
    return numbers if all_equal(compare(target, added(terms, numbers, shapes), tolerance, rounding=rounding)) else None


def added(terms, numbers, shapes):
    """The sum of the terms, each times its number: a dict of name to array."""
    return {
        name: sum(number * term[name] for number, term in zip(numbers, terms) if name in term) + np.zeros(shape)
        for name, shape in shapes.items()
    }


def minus(one, other):
    """The difference of two dicts of name to array, a name that one lacks being zero there."""
    return {name: one.get(name, 0.0) - np.asarray(other.get(name, 0.0)) for name in {**one, **other}}
