"""Where callbacks read the rows that a model's replicas get."""

from keras_mirror.engine import engine_of
from keras_mirror.global_batches import GlobalBatchStrategy


def row_windows(model, kind, who):
    """Opens a `RowWindow` of whoever calls on each counter of the model.

    Args:
        model: The callback's model.
        kind: `"train"` or `"test"`.
        who: Name of the callback, for the error.

    Returns:
        A list: the window on loops of the user's own over `strategy.run`, and for a model of
        `mirrored_model` the one on `fit` and its like.

    Raises:
        TypeError: If nobody counts the model's rows.
    """
    engine, strategy = engine_of(model), model.distribute_strategy
    if not isinstance(strategy, GlobalBatchStrategy):
        raise TypeError(
            f"{who}: the model was not built by keras_mirror, so nobody counts its rows; "
            "build it with keras_mirror.mirrored_model(build_fn)."
        )
    counters = [strategy.row_counters[kind], *([engine.counters[kind]] if engine else [])]
    return [counter.window() for counter in counters]
