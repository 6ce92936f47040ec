"""Models that are made for batches of one size, which cannot be split."""

import keras

from keras_mirror import internals


def refuse_fixed_batches(model, replicas):
    """Raises if the model or a layer takes batches of one size only, and there are several replicas to split them over.

    Raises:
        ValueError: If so; it names the model or the layer.
    """
    if replicas == 1:
        return
    for layer in internals.layers_of(model):
        if getattr(layer, "stateful", False) and isinstance(layer, (keras.layers.RNN, keras.layers.Bidirectional)):
            raise ValueError(
                f"mirrored_model: the layer {layer.name!r} is stateful: it keeps a state for each row of a batch of fixed size "
                f"from one batch to the next, and {replicas} replicas have parts of a batch; make it with "
                "stateful=False, or train this model with devices=1."
            )
    size = _fixed_size(model)
    if size is not None:
        raise ValueError(
            f"mirrored_model: the input of {model.name!r} has a fixed batch size of {size}, and each of {replicas} replicas has "
            "a part of the batch; write keras.Input(shape=...) without the batch size, or train this model with devices=1."
        )


def _fixed_size(model):
    """The batch size of the first input that has a fixed one; inputs of nested models need not have a row for each of the batch."""
    for leaf in keras.tree.flatten(getattr(model, "inputs", None) or []):
        if isinstance(leaf, keras.KerasTensor) and len(leaf.shape) and leaf.shape[0] is not None:
            return leaf.shape[0]
    return None
