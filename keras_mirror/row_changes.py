"""Which variables the functions that replicas run change by their own rows, and whether that is reduced as it should be."""

import ast
import contextlib
import dataclasses

import keras
import tensorflow as tf

from keras_mirror import internals
from keras_mirror.engine import engine_of
from keras_mirror.places import is_library
from keras_mirror.provenance import Origin
from keras_mirror.reading import source_of
from keras_mirror.row_flow import Frame
from keras_mirror.row_values import MEAN, REDUCED, ROWS, SUM, Value, is_variable

_HOLDERS = (keras.metrics.Metric, keras.Optimizer, keras.random.SeedGenerator, keras.layers.Layer)
SUMMED_WHEN_READ = (
    "Make it with tf.Variable(..., aggregation=tf.VariableAggregation.SUM, "
    "synchronization=tf.VariableSynchronization.ON_READ), or use a keras.metrics.Metric"
)
_MOST_CALLS = 2000  # of functions within functions
_STEPS = ("train_step", "test_step", "compute_loss", "compute_metrics")


@dataclasses.dataclass(frozen=True)
class Change:
    """A variable that is changed by the rows of a replica.

    Attributes:
        entry: The method or function that the replicas run.
        how: `"mean"`, `"sum"` or `"rows"`: what it is changed by; `"reduced"`: by what was reduced over the replicas.
        adds: Whether `assign_add` or `assign_sub` does it.
        reads_itself: Whether what is written is made of the old value.
        origin: `Origin` of the line.
    """

    entry: str
    how: str
    adds: bool
    reads_itself: bool
    origin: Origin

    def and_also(self, other):
        """This change and another one of the same variable, as one."""
        if REDUCED in (self.how, other.how):
            return other if self.how == REDUCED else self
        how = self.how if self.how == other.how else ROWS
        return dataclasses.replace(
            self, how=how, adds=self.adds and other.adds, reads_itself=self.reads_itself or other.reads_itself
        )


class Flow:
    """Follows rows through the functions that replicas run.

    Attributes:
        changes: Dict of the id of a variable to its `Change`.
        reached: Dict of the id of a variable to how the source names it.
        holders: Metrics, layers, optimizers and random generators that the source names.
        unread: Names of the entries whose source could not be had.
    """

    def __init__(self):
        self.changes, self.reached, self.holders, self.unread = {}, {}, [], set()
        self.attributes = {}  # of Python objects, as assigned by the source
        self._sources, self._running, self._calls = {}, [], 0

    def follow(self, function, holder, name, model=None):
        """Follows a function that the replicas run with rows: a method of `holder`, or a step of `model`."""
        source = self.source_of(function)
        if source is None:
            code = getattr(function, "__code__", None)
            self.unread |= {name} if code is not None and not is_library(code.co_filename) else set()
            return
        self.entry = name
        given = [Value(objects=(each,)) for each in (holder, model) if each is not None]
        try:
            with self.running(function):
                Frame(self, source.tree, source, {}).run(given, {}, rows=True)
        except Exception:  # a source that is not understood must not stop an audit
            self.unread.add(name)

    def source_of(self, function):
        """The `Source` of a function of the user's, read once."""
        if function not in self._sources:
            self._sources[function] = source_of(function)
        return self._sources[function]

    def is_running(self, function):
        """Whether a function need not be followed (again): it calls itself, or there were very many."""
        return self._calls > _MOST_CALLS or any(function is each for each in self._running)

    @contextlib.contextmanager
    def running(self, function):
        """While entered, `function` is followed."""
        self._calls += 1
        self._running.append(function)
        try:
            yield
        finally:
            self._running.pop()

    def note(self, value, node, kind):
        """Remembers how the source names the objects of `value`."""
        for each in value.objects:
            if is_variable(each):
                self.reached.setdefault(id(internals.container_of(each)), f"{kind} {ast.unparse(node)}")
            elif isinstance(each, (list, tuple, dict)):
                for index, child in each.items() if isinstance(each, dict) else enumerate(each):
                    if is_variable(child):
                        self.reached.setdefault(id(internals.container_of(child)), f"{kind} {ast.unparse(node)}[{index!r}]")
            elif isinstance(each, _HOLDERS) and not any(each is other for other in self.holders):
                self.holders.append(each)

    def change(self, variable, node, value, origin):
        """Remembers that a variable is given a value of the replica's own."""
        key = id(internals.container_of(variable))
        adds = node.func.attr in ("assign_add", "assign_sub")
        reads = key in value.reads or adds and isinstance(variable, keras.Variable)  # Keras' is assign(variable + value)
        change = Change(self.entry, value.how, adds, reads, origin)
        before = self.changes.get(key)
        self.changes[key] = change if before is None else before.and_also(change)


def follow(model, strategy):
    """The `Flow` through a model's layers and steps."""
    flow, engine = Flow(), engine_of(model)
    if engine is None or not engine.sees_whole:  # else what steps and layers of the user's own change is made of the whole batch
        for layer in internals.layers_of(model):
            flow.follow(type(layer).call, layer, "call")
        own = engine is not None and engine.step is not None
        if own:
            flow.follow(engine.step, None, engine.name_of_step("train_step"), model)
        for name in _STEPS[own:]:
            flow.follow(getattr(type(model), name), model, name)
    for function in getattr(strategy, "stepped", ()):
        flow.follow(getattr(function, "__func__", function), getattr(function, "__self__", None), "the step")
    return flow


def fault_of(change, variable):
    """`(effect, remedy)` where the aggregation of a variable does not fit how it is changed, or None."""
    aggregation, on_read = variable.aggregation, variable.synchronization == tf.VariableSynchronization.ON_READ
    what = f"{change.entry}()" if change.entry.isidentifier() else change.entry
    if change.how == REDUCED:
        wrong = f'aggregation="sum" adds up what {what} has reduced already, once for every replica'
        return (wrong, "Leave aggregation out") if aggregation == tf.VariableAggregation.SUM else None
    if aggregation == tf.VariableAggregation.MEAN:
        wrong = f'aggregation="mean" averages what {what} should add up, so sums and counts come out too small'
        return (wrong, _remedy(change)) if change.how == SUM else None
    if aggregation == tf.VariableAggregation.SUM and change.how == MEAN:
        wrong = f'aggregation="sum" adds up what {what} takes a mean of, as many times too large as there are replicas'
        return wrong, _remedy(change)
    if aggregation == tf.VariableAggregation.SUM:
        wrong = f'aggregation="sum" adds up the old value of every replica, too, whenever {what} writes it'
        return (wrong, _remedy(change)) if change.reads_itself and not on_read else None
    return (
        f"{what} changes it by the replica's own rows, so the copies drift apart and only the first one is {_kept(change)}",
        _remedy(change),
    )


def _kept(change):
    return "saved" if change.entry == "call" else "read"


def _remedy(change):
    reduced = "what tf.distribute.get_replica_context().all_reduce({}) returns"
    if change.how == SUM and change.entry != "call":
        return SUMMED_WHEN_READ
    if change.how == SUM:
        verb, reduced = "Add" if change.adds else "Write", reduced.format('"SUM", ...')
        return f"{verb} {reduced} for the sum or count, and leave aggregation out"
    if change.how == MEAN:
        return 'Make it with aggregation="mean", right for batches that divide evenly, or write ' + reduced.format("...")
    return f"Write {reduced.format('...')}: the page of this code has it for a mean and for a sum"
