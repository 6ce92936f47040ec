"""Which variables of a model do not do on several replicas what they do on one device."""

import gc
import re

import keras
import tensorflow as tf

from keras_mirror import internals
from keras_mirror.engine import engine_of
from keras_mirror.errors import check_codes
from keras_mirror.findings import Audit, Finding
from keras_mirror.hints import code_findings, setting_findings
from keras_mirror.holdings import optimizers_of
from keras_mirror.provenance import origin_of
from keras_mirror.randomness import generators_of
from keras_mirror.row_changes import SUMMED_WHEN_READ, fault_of, follow

# What is wrong with a variable: code, severity, effect, remedy.
_OUTSIDE = {
    "layer": (
        "KM101",
        "error",
        "it exists once, so the replicas train it on one device or not at all",
        "Make the layer inside build_fn",
    ),
    "optimizer": (
        "KM102",
        "error",
        "every replica changes the one copy, so it advances once per replica",
        "Make the optimizer inside build_fn",
    ),
    "metric": (
        "KM103",
        "error",
        "all replicas write to one copy, which is counted once per replica when it is read",
        "Make the metric inside build_fn",
    ),
    "seed generator": (
        "KM104",
        "error",
        "all replicas draw from one state in no fixed order",
        "Make the seed generator inside build_fn",
    ),
    "step": (
        "KM105",
        "error",
        "it exists once and every replica writes to it, so a counter counts as many times as there are replicas",
        "Make it inside build_fn with tf.Variable(..., aggregation=tf.VariableAggregation.SUM, "
        "synchronization=tf.VariableSynchronization.ON_READ) for what adds up over replicas, such as rows, "
        "with ONLY_FIRST_REPLICA for what each of them counts alike, such as steps; or count in a metric",
    ),
}
_LOCAL_STEP = (
    "KM106",
    "warning",
    "each replica has its own copy and only the first one is read, so it misses what the other replicas did",
    SUMMED_WHEN_READ,
)
_LOCAL_METRIC = (
    "KM107",
    "error",
    "its state is no metric state: each replica has its own copy and only the first one is read, so it misses rows",
    "Make it with self.add_variable(...) in the metric",
)
_OTHER_THREAD = (
    "KM109",
    "error",
    "it was made in another thread, and a scope holds only in the thread that opened it, so it exists on one device",
    "Build the model in the thread that calls build_fn, or open strategy.scope() in the other one",
)
_SUMMED = (
    "KM111",
    "warning",
    "it has the shape of a gradient and is summed over the replicas whenever it is written, and the optimizer sums what it is "
    "given once more, so accumulated gradients get a wrong factor",
    "Use gradient_accumulation_steps of the optimizer, or make it with aggregation=tf.VariableAggregation.NONE",
)


def audit(model, ignore=()):
    """Looks for what a model, its settings and its steps traced so far get wrong on several replicas.

    Trains nothing. Looks at the variables of layers, optimizers, losses, metrics and seed
    generators, at those that the traced steps read or write, and at the source of the model's own
    steps. `docs/codes` has a page for each kind of finding.

    Args:
        model: A `keras.Model` made in a strategy's scope, by `mirrored_model` or by hand.
        ignore: Tuple of codes to leave out, e.g. `("KM104",)`.

    Returns:
        An `Audit`, false when there is no error and no warning.

    Raises:
        TypeError: If `model` is no Keras model, or `ignore` is a string.
        ValueError: If the model was not made in the scope of a strategy, or a code does not exist.

    Example:

    >>> report = km.audit(model, ignore=("KM113",))
    >>> if report:
    ...     print(report)
    """
    if not isinstance(model, keras.Model):
        raise TypeError(f"audit: expected a keras.Model, and got {type(model).__name__}.")
    ignore = check_codes("audit: ignore", ignore)
    strategy = internals.training_strategy(model)
    if strategy is None:
        raise ValueError(
            "audit: the model was not made in a strategy's scope; build it with keras_mirror.mirrored_model(build_fn)."
        )
    captured = _captured(model, strategy)
    look = _Look(model, strategy, captured)
    found = [*look.at_held_variables(), *look.at_captured_variables(captured)]
    found += [*code_findings(model, strategy), *setting_findings(model, strategy)]
    return Audit([finding for finding in found if finding.code not in ignore], len(look.seen), bool(captured))


def _captured(model, strategy):
    return [*(engine_of(model).captured if engine_of(model) else ()), *getattr(strategy, "captured", ())]


def held_variables(model):
    """Yields `(kind, holder, variable)` for every variable that the model holds."""
    for metric in internals.single_metrics(model):
        for variable in [*metric.variables, *(v for v in vars(metric).values() if isinstance(v, tf.Variable))]:
            yield "metric", metric, variable
    for optimizer in optimizers_of(model).values():
        for variable in optimizer.variables:
            yield "optimizer", optimizer, variable
    for generator in generators_of(model):
        yield "seed generator", generator, generator.state
    for layer in internals.layers_of(model):
        for variable in internals.own_variables(layer):
            yield "layer", layer, variable
        for value in vars(layer).values():
            if isinstance(value, tf.Variable):
                yield "step", layer, value


class _Look:
    """One look at a model's variables, each of them once.

    Attributes:
        seen: Ids of the variables looked at.
    """

    def __init__(self, model, strategy, captured):
        self.seen = set()
        self._model = model
        self._strategy = strategy
        self._many = strategy.num_replicas_in_sync > 1
        self._gradient_shapes = {tuple(v.shape) for v in model.trainable_variables if len(v.shape)}
        self._trained = {id(internals.container_of(v)) for v in model.trainable_variables}
        self._captured = {id(internals.container_of(v)) for v in captured}
        engine = engine_of(model)
        self._sees_whole = engine is not None and engine.sees_whole  # then only loops of the user's have a replica's rows alone
        self._in_loops = {id(internals.container_of(v)) for v in getattr(strategy, "captured", ())}
        self._flow = follow(model, strategy)

    def at_held_variables(self):
        """Findings on what the model holds."""
        for kind, holder, variable in held_variables(self._model):
            value = internals.container_of(variable)
            fault = self._first_time(value) and self._fault_of_held(kind, holder, value)
            if fault:
                yield self._finding(kind, holder, variable, fault)

    def at_captured_variables(self, captured):
        """Findings on what only the steps use."""
        for variable in captured:
            value = internals.container_of(variable)
            if self._first_time(value) and "keras_mirror_own" not in vars(value):
                kind, holder = self._holder_of(value) if self._is_outside(value) else ("step", None)
                fault = _OUTSIDE[kind] if self._is_outside(value) else self._fault_of_captured(value)
                if fault:
                    yield self._finding(kind, holder, value, fault)

    def _first_time(self, value):
        new = id(value) not in self.seen
        self.seen.add(id(value))
        return new

    def _fault_of_held(self, kind, holder, value):
        if self._is_outside(value):
            return _OTHER_THREAD if self._is_from_another_thread(value) else _OUTSIDE[kind]
        if kind == "metric":
            return _LOCAL_METRIC if self._has_parts(value) and not _is_summed_when_read(value) else None
        if not self._has_parts(value) or kind not in ("layer", "step"):
            return None
        changed = self._fault_of_changed(value)
        if changed or _is_summed_when_read(value):
            return changed
        hidden = holder is self._model and self._flow.unread and id(value) in self._captured
        if hidden and self._is_never_reduced(value):
            return _LOCAL_STEP
        return _SUMMED if self._is_summed_gradient(value) else None

    def _has_parts(self, value):
        """Whether code of the user's own changes the variable with one of several replicas' rows."""
        return self._many and (not self._sees_whole or id(value) in self._in_loops)

    def _fault_of_captured(self, value):
        if not self._has_parts(value):
            return None
        changed = self._fault_of_changed(value)
        if changed or _is_summed_when_read(value):
            return changed
        if self._is_never_reduced(value):
            return _LOCAL_STEP
        return _SUMMED if self._is_summed_gradient(value) else None

    def _fault_of_changed(self, value):
        """What is wrong with a variable that the source changes by rows."""
        change = self._flow.changes.get(id(value))
        if change is None or id(value) in self._trained or change.entry != "call" and self._keeps_gradients(value):
            return None
        fault = fault_of(change, value)
        code = ("KM110", "error") if change.entry == "call" else ("KM106", "warning")
        return fault and (*code, *fault)

    def _is_never_reduced(self, value):
        return _is_local(value) and _is_the_users_own(value) and not self._keeps_gradients(value)

    def _keeps_gradients(self, value):
        """Whether it may hold gradients of its replica's own, for the optimizer to sum."""
        return tuple(value.shape) in self._gradient_shapes

    def _holder_of(self, value):
        """What kind of object outside of the model a variable belongs to, and which."""
        holders = self._flow.holders
        if not any(_holds(each, value) for each in holders) and "/" in value.name:
            holders = [each for each in gc.get_objects() if issubclass(type(each), keras.metrics.Metric)]
        kinds = {keras.metrics.Metric: "metric", keras.Optimizer: "optimizer", keras.layers.Layer: "layer"}
        for holder in holders:
            if _holds(holder, value):
                return next((kind for cls, kind in kinds.items() if isinstance(holder, cls)), "seed generator"), holder
        return "step", None

    def _is_outside(self, value):
        return not self._strategy.extended.variable_created_in_scope(value)

    def _is_from_another_thread(self, value):
        engine, origin = engine_of(self._model), origin_of(value)
        return engine is not None and origin is not None and origin.thread not in (None, engine.thread)

    def _is_summed_gradient(self, value):
        summed = getattr(value, "aggregation", None) == tf.VariableAggregation.SUM
        return summed and not value.trainable and tuple(value.shape) in self._gradient_shapes

    def _finding(self, kind, holder, variable, fault):
        word = "model" if holder is self._model else "layer" if kind == "step" else kind
        path = getattr(variable, "path", None) or variable.name.split(":")[0]
        if re.fullmatch(r"(.*/)?[Vv]ariable(_\d+)?", path):  # nobody gave it a name: how the source names it
            path = self._flow.reached.get(id(internals.container_of(variable)), path)
        code, severity, effect, remedy = fault
        origin = origin_of(variable, *([] if holder is None else [holder]))
        return Finding(code, severity, path, "the step" if holder is None else f"{word} {holder.name}", origin, effect, remedy)


def _holds(holder, value):
    variables = [holder.state] if isinstance(holder, keras.random.SeedGenerator) else holder.variables
    return any(internals.container_of(variable) is value for variable in variables)


def _is_summed_when_read(value):
    return getattr(value, "synchronization", None) == tf.VariableSynchronization.ON_READ


def _is_local(value):
    """Whether each replica changes its own copy, without any reduction."""
    is_trained = value.trainable and (value.dtype.is_floating or value.dtype.is_complex)
    return getattr(value, "aggregation", None) == tf.VariableAggregation.NONE and not is_trained


def _is_the_users_own(value):
    """Whether it was made by the user, not by Keras for them."""
    origin = origin_of(value)
    return origin is not None and not origin.by_keras
