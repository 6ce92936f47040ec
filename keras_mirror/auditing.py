"""Which variables were made outside of the strategy's scope, and what goes wrong because of it."""

import dataclasses

import keras
import tensorflow as tf

from keras_mirror import internals
from keras_mirror.engine import engine_of, optimizers_of
from keras_mirror.provenance import Origin, origin_of
from keras_mirror.randomness import generators_of
from keras_mirror.report import Report


@dataclasses.dataclass(frozen=True)
class Finding:
    """One variable that does not do on several replicas what it does on one device.

    Attributes:
        path: The variable's path, or its name.
        owner: What holds it, e.g. `layer dense_1` or `the step`.
        origin: `Origin` of the line that created it, or None if unknown.
        effect: What goes wrong because of it.
        remedy: What to write instead.
    """

    path: str
    owner: str
    origin: Origin | None
    effect: str
    remedy: str

    def __str__(self):
        where = f" ({self.origin})" if self.origin else ""
        return f"{self.path} of {self.owner}{where}: {self.effect}. {self.remedy}."


class Audit(Report):
    """What `audit` returns: print it, or read it.

    Attributes:
        findings: List of `Finding`.
        checked: int, number of variables looked at.
    """

    def __init__(self, findings, checked, traced, cured=()):
        self.findings = findings
        self.checked = checked
        rows = [
            {
                "variable": finding.path,
                "owner": finding.owner,
                "created at": str(finding.origin) if finding.origin else "unknown",
                "what goes wrong": finding.effect,
                "write instead": finding.remedy,
            }
            for finding in findings
        ]
        verdict = f"{len(findings)} of {checked} variables need attention" if findings else f"all {checked} variables are in scope"
        notes = [f"Cured: {sentence}" for sentence in cured]
        if not traced:
            notes.append("No step was traced yet: variables that only the step uses (a forgotten counter) are not in this list.")
        super().__init__(
            f"Scope audit: {verdict}", ["variable", "owner", "created at", "what goes wrong", "write instead"], rows, notes
        )

    def __bool__(self):
        return bool(self.findings)


_EFFECTS = {
    "layer": ("it exists once, so the replicas train it on one device or not at all", "Make the layer inside build_fn"),
    "optimizer": ("every replica changes the one copy, so it advances once per replica", "Make the optimizer inside build_fn"),
    "metric": (
        "all replicas write to one copy, which is counted once per replica when it is read",
        "Make the metric inside build_fn",
    ),
    "seed generator": ("all replicas draw from one state in no fixed order", "Make the seed generator inside build_fn"),
    "step": (
        "it exists once and every replica writes to it, so a counter counts as many times as there are replicas",
        "Make it inside build_fn with tf.Variable(..., aggregation=tf.VariableAggregation.SUM, "
        "synchronization=tf.VariableSynchronization.ON_READ), or count in a metric",
    ),
}
_LOCAL_STEP = (
    "each replica has its own copy and only the first one is read, so it misses what the other replicas did",
    "Make it with aggregation=tf.VariableAggregation.SUM and synchronization=tf.VariableSynchronization.ON_READ, "
    "or use a keras.metrics.Metric",
)
_LOCAL_METRIC = (
    "its state is no metric state: each replica has its own copy and only the first one is read, so it misses rows",
    "Make it with self.add_variable(...) in the metric",
)


def audit(model):
    """Looks up every variable that a model, or a step traced so far, uses and was not made in scope.

    Trains nothing. Looks at the variables of layers, optimizers, losses, metrics and seed
    generators, and at those that the traced steps read or write.

    Args:
        model: A `keras.Model` made in a strategy's scope, by `mirrored_model` or by hand.

    Returns:
        An `Audit`, empty (and false) when nothing is wrong.

    Raises:
        TypeError: If `model` is no Keras model.
        ValueError: If the model was not made in the scope of a strategy.
    """
    if not isinstance(model, keras.Model):
        raise TypeError(f"audit: expected a keras.Model, and got {type(model).__name__}.")
    strategy = internals.training_strategy(model)
    if strategy is None:
        raise ValueError(
            "audit: the model was not made in a strategy's scope; build it with keras_mirror.mirrored_model(build_fn)."
        )
    findings, seen = [], set()
    for kind, holder, variable in held_variables(model):
        value = _tensorflow_variable(variable)
        if id(value) in seen:
            continue
        seen.add(id(value))
        if not strategy.extended.variable_created_in_scope(value):
            findings.append(_finding(kind, holder, variable, *_EFFECTS[kind]))
        elif kind == "metric" and strategy.num_replicas_in_sync > 1 and not _is_summed(value):
            findings.append(_finding(kind, holder, variable, *_LOCAL_METRIC))
    captured = [*(engine_of(model).captured if engine_of(model) else ()), *getattr(strategy, "captured", ())]
    findings += _captured_findings(captured, strategy, seen)
    return Audit(findings, len(seen), bool(captured), engine_of(model).rebuilt if engine_of(model) else ())


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


def _captured_findings(captured, strategy, seen):
    findings = []
    for variable in captured:
        value = internals.container_of(variable)
        if id(value) in seen or hasattr(value, "keras_mirror_own"):
            continue
        seen.add(id(value))
        if not strategy.extended.variable_created_in_scope(value):
            findings.append(_finding("step", None, value, *_EFFECTS["step"]))
        elif strategy.num_replicas_in_sync > 1 and not _is_summed(value) and _is_the_users_own(value):
            findings.append(_finding("step", None, value, *_LOCAL_STEP))
    return findings


def _tensorflow_variable(variable):
    return internals.container_of(variable.value if isinstance(variable, keras.Variable) else variable)


def _is_summed(value):
    return getattr(value, "synchronization", None) == tf.VariableSynchronization.ON_READ


def _is_the_users_own(value):
    """Whether it was made by the user, not by Keras for them, and copies do not agree on a value."""
    origin = origin_of(value)
    unaggregated = getattr(value, "aggregation", None) == tf.VariableAggregation.NONE
    return unaggregated and not value.trainable and origin is not None and not origin.by_keras


def _finding(kind, holder, variable, effect, remedy):
    owner = "the step" if holder is None else f"{'layer' if kind == 'step' else kind} {holder.name}"
    path = getattr(variable, "path", None) or variable.name.split(":")[0]
    return Finding(path, owner, origin_of(variable, *([] if holder is None else [holder])), effect, remedy)
