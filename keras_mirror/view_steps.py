"""Runs a step, a loss or a metric of the user's own on the whole batch, on every replica alike."""

import contextlib

import keras
import tensorflow as tf

from keras_mirror import internals
from keras_mirror.rows import current_part
from keras_mirror.view_calls import whole_batch_calls
from keras_mirror.whole_view import SUM, View


def sees_a_part():
    """Whether the running code has one of several replicas' rows, and can be given those of all."""
    part = current_part()
    return part is not None and not part.alone and part.strategy.num_replicas_in_sync > 1


@contextlib.contextmanager
def viewing_the_whole(prepare=lambda layer: None, layers=()):
    """While entered, this replica's thread stands for one device with the whole batch.

    Args:
        prepare: Called with each layer that will run on the replica's own rows.
        layers: The layers whose `trainable` the code may change.

    Yields:
        `(view, part)`: the `View`, and the `Part` of the whole batch.
    """
    strategy, part = current_part().strategy, current_part()
    view, number = View(tf.distribute.get_replica_context(), part, prepare, layers), len(part.views)
    part.views.append(view)
    if part.replica == strategy.replica_ids[0]:  # which gets here before the others
        strategy.begun_views = [*strategy.begun_views[:number], (view.drawn, view.host_state())]
    else:
        view.drawn, state = strategy.begun_views[number]
        view.set_host_state(state)
    with whole_batch_calls(), view.open() as whole:
        yield view, whole


def gathered_structure(view, structure):
    """A structure of tensors with the rows of all replicas, masks too; a number for the whole batch stays."""

    def whole(leaf):
        if not isinstance(leaf, (tf.Tensor, tf.RaggedTensor, tf.SparseTensor)) or leaf.shape.rank == 0:
            return leaf
        return view.with_notes(leaf, view.whole)

    return keras.tree.map_structure(whole, structure)


def run_step_on_whole(step, data, metrics, prepare, layers):
    """What `step(data)` logs for the whole batch; the first replica's logs, and zeros on the others, so that the sum is theirs.

    Args:
        step: `step(data) -> logs`, written for one device.
        data: This replica's rows.
        metrics: Function that returns the metrics that the step may update.
        prepare: Called with each layer that will run on the replica's own rows.
        layers: The layers whose `trainable` the step may change.
    """
    part = current_part()
    with viewing_the_whole(prepare, layers) as (view, whole):
        with counted_once(view, metrics, read=True):
            logs = step(gathered_structure(view, data)) or {}
        logs = keras.tree.map_structure(lambda value: _only_from_the_first(view, value), logs)
    part.marks |= whole.marks - {"update"} | {"whole logs"}
    return logs


def _only_from_the_first(view, value):
    value = tf.convert_to_tensor(value)
    return value if view.is_first or value.dtype == tf.string else tf.zeros_like(value)


def loss_of_whole(loss, *arguments):
    """This replica's share of `loss(*arguments)` for the whole batch, a scalar of which the shares are all equal."""
    with viewing_the_whole() as (view, _):
        value = tf.convert_to_tensor(loss(*gathered_structure(view, arguments)))
        return value / tf.cast(view.replicas, value.dtype)


def update_with_whole(metric, update, *arguments):
    """`update(*arguments)` of a metric, with the rows of the whole batch, counted once."""
    with viewing_the_whole() as (view, _):
        with counted_once(view, lambda: [metric], read=False):
            return update(*gathered_structure(view, arguments))


@contextlib.contextmanager
def counted_once(view, metrics, read):
    """While entered, metrics are updated by every replica with the whole batch; afterwards the first one's count alone.

    Args:
        view: The view.
        metrics: Function that returns the metrics, when entered and, as a step may make some, at the end.
        read: Whether the results of metrics may be read on the way, which all replicas need to have then.
    """
    before = {} if view.is_first else {id(v): (v, tf.zeros_like(v.value)) for v in _added_up(metrics())}
    if read:
        variables = _added_up(metrics())
        for variable, total in zip(variables, view.reduced(SUM, [tf.convert_to_tensor(v.value) for v in variables])):
            variable.assign(total)
    elif not view.is_first:
        before = {key: (v, tf.identity(v.value)) for key, (v, _) in before.items()}
    yield
    if view.is_first:
        return
    for variable in _added_up(metrics()):
        _, value = before.get(id(variable), (None, None))
        variable.assign(tf.zeros_like(variable.value) if value is None else value)


def _added_up(metrics):
    """The variables of metrics of which each replica has a part, each once."""
    variables = {id(variable): variable for metric in metrics for variable in metric.variables}
    return [v for v in variables.values() if isinstance(v, keras.Variable) and internals.is_read_together(v.value)]
