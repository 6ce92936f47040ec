"""Layers that keep a state for each row from one batch to the next, which parts of a batch cannot."""

import keras


def refuse_stateful(layer, replicas):
    """Refuses a stateful recurrent layer on several replicas.

    Raises:
        ValueError: If the layer is one.
    """
    if replicas > 1 and getattr(layer, "stateful", False) and isinstance(layer, (keras.layers.RNN, keras.layers.Bidirectional)):
        raise ValueError(
            f"mirrored_model: the layer {layer.name!r} is stateful: it keeps a state for each row of a batch of fixed size "
            f"from one batch to the next, and {replicas} replicas have parts of a batch; make it with "
            "stateful=False, or train this model with devices=1."
        )
