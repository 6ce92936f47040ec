"""Which layers may run on each replica's own rows, where the code that calls them sees the whole batch."""

import keras

from keras_mirror import internals
from keras_mirror.empty_parts import operations_of

# Of these libraries' layers each row of what comes out is made of the same row of what goes in; those that mix rows, as batch
# normalisation does, exchange between the replicas what they need.
_LIBRARIES = {"keras", "keras_hub", "keras_cv", "keras_nlp"}

# Functions of `keras.ops` in functional models that have a number for each entry, of the arguments' entries of the same place.
_BY_ENTRY = frozenset(
    "Abs Absolute Add Arctan Arcsin Arccos Ceil Clip Cast Cos Cosh Divide Elu Erf Exp Expm1 Floor Gelu Greater GreaterEqual "
    "HardSigmoid HardSilu HardSwish HardTanh IsFinite IsInf IsNan LeakyRelu Less LessEqual Log Log10 Log1p Log2 LogSigmoid "
    "LogicalAnd LogicalNot LogicalOr Maximum Minimum Mod Multiply Negative NotEqual Equal Power Reciprocal Relu Relu6 Round "
    "Rsqrt Selu Sigmoid Sign Silu Sin Sinh Softplus Softsign Sqrt Square Subtract Swish Tan Tanh TanhShrink "
    "TrueDivide Where ZerosLike OnesLike".split()
)


def splits_by_rows(layer):
    """Whether a layer, with all that is in it, can run on some rows of a batch as it would on all.

    Layers and models of a user's own class, `Lambda`s and functions between layers that may mix rows cannot be
    known to: their code sees the whole batch, and the layers that it calls are split in turn.
    """
    return all(_is_of_a_library(each) and _has_safe_operations(each) for each in internals.layers_of(layer))


def _is_of_a_library(layer):
    axes = getattr(layer, "axis", None)
    if isinstance(layer, (keras.layers.Lambda, keras.layers.TFSMLayer)) or 0 in (
        axes if isinstance(axes, (list, tuple)) else [axes]
    ):
        return False
    return all(_is_from_a_library(getattr(type(layer), name)) for name in ("call", "__call__", "build"))


def _is_from_a_library(method):
    return (getattr(method, "__module__", None) or "").split(".")[0] in _LIBRARIES | {"keras_mirror"}


def mixes_in_functions(model):
    """Whether functions between the layers of a functional model may mix rows."""
    return not _has_safe_operations(model)


def _has_safe_operations(model):
    return all(type(operation).__name__ in _BY_ENTRY for operation in operations_of(model))
