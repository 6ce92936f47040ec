"""The variables of a model in training as arrays: gathered from the replicas, and given back to any number of them."""

import numpy as np
import tensorflow as tf

from keras_mirror.holdings import optimizers_of, without_numbers
from keras_mirror.random_states import generator_variables


def variables_of(model):
    """Every variable that training changes, by a name that is the same in the next process.

    Weights, states of seed generators, metrics, and of every optimizer its slots, counters and loss
    scale. Keras numbers the names of layers through a whole process (`dense_3`); such numbers are left out.

    Returns:
        A dict of name to variable; the names begin with `model/`, `metrics/` or the optimizer's attribute.
    """
    optimizers = optimizers_of(model)
    metrics = [variable for metric in model.metrics for variable in metric.variables]
    groups = {"model": model.variables, "metrics": metrics}
    groups |= {name.replace("/", ":"): each.variables for name, each in optimizers.items()}
    found, seen = {}, set()
    for group, variables in groups.items():
        for variable in variables:
            if id(variable) not in seen:
                seen.add(id(variable))
                found[f"{group}/{len(found):04d}/{without_numbers(variable.path)}"] = variable
    return found


def known_variables(model):
    """The TensorFlow variables behind `variables_of` and behind the global generators of random numbers."""
    return [*(variable.value for variable in variables_of(model).values()), *generator_variables()]


def values_of(model):
    """The value of every variable, each once, whatever the number of replicas.

    Copies on the replicas are equal for what optimizers update, so one is taken. Others that differ (a
    metric's share of each replica, local batch statistics) are kept apart: the same replicas get
    their own back, another number of replicas gets the same sum or mean.

    Returns:
        A dict of name to `{"value": array}`, or `{"copies": array}` with one row per replica.
    """
    strategy, equal = model.distribute_strategy, _ids_of_equal(model)
    return {name: _value(strategy, variable, id(variable) in equal) for name, variable in variables_of(model).items()}


def _ids_of_equal(model):
    updated = [model.trainable_variables, *(each.variables for each in optimizers_of(model).values())]
    return {id(variable) for variables in updated for variable in variables}


def _value(strategy, variable, equal):
    copies = strategy.experimental_local_results(variable.value)
    first = copies[0].numpy()
    if equal or len(copies) == 1:
        return {"value": first, "sum": _is_sum(variable)}
    arrays = [first, *(copy.numpy() for copy in copies[1:])]
    if not _is_sum(variable) and all(each.tobytes() == first.tobytes() for each in arrays):
        return {"value": first, "sum": False}
    return {"copies": np.stack(arrays), "sum": _is_sum(variable)}


def _is_sum(variable):
    return getattr(variable.value, "aggregation", None) == tf.VariableAggregation.SUM


def give_back(model, values):
    """Gives every variable of `model` the value that `values_of` took, on every replica.

    Args:
        model: Built, with the same variables; its strategy may have another number of replicas.
        values: As of `values_of`.
    """
    for (_, variable), saved in zip(variables_of(model).items(), values.values()):
        copies = model.distribute_strategy.experimental_local_results(variable.value)
        for copy, value in zip(copies, _for_replicas(saved, len(copies))):
            copy.assign(value)


def _for_replicas(saved, replicas):
    parts = saved["copies"] if "copies" in saved else saved["value"][np.newaxis]
    if len(parts) == replicas:
        return parts
    if saved["sum"]:  # the first replica gets all, as if it had seen all rows
        total = parts.sum(0, dtype=parts.dtype)
        return [total] + [np.zeros_like(total)] * (replicas - 1)
    mean = parts.mean(0, dtype="float64").astype(parts.dtype) if len(parts) > 1 and parts.dtype.kind == "f" else parts[0]
    return [mean] * replicas


def first_difference(model, values):
    """One phrase on the first variable of `model` that is not as the saved one, or None."""
    ours = [(name.split("/", 2)[2], tuple(v.shape), str(v.dtype)) for name, v in variables_of(model).items()]
    theirs = [(name.split("/", 2)[2], *_shape_and_type(saved)) for name, saved in values.items()]
    for here, there in zip(ours, theirs):
        if here != there:
            return f"it holds {_described(there)} where this model has {_described(here)}"
    if len(ours) != len(theirs):
        return f"it holds {len(theirs)} variables and this model has {len(ours)}"
    return None


def _shape_and_type(saved):
    array = saved["copies"][0] if "copies" in saved else saved["value"]
    return tuple(array.shape), array.dtype.name


def _described(entry):
    name, shape, dtype = entry
    return f"{name} of shape {shape} and {dtype}"
