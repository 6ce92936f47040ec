"""The one warning category and the exceptions of this package, and the check of what it runs on."""

import contextlib
import warnings

KERAS_RANGE = "3.10"
TENSORFLOW_RANGE = "2.18"


class MirrorWarning(UserWarning):
    """Every warning of this package, so that one filter silences or raises them all.

    Example:

    >>> import warnings
    >>> import keras_mirror as km
    >>> warnings.simplefilter("error", km.MirrorWarning)   # any finding stops the script
    """


class OutOfScopeError(RuntimeError):
    """A variable was made outside the strategy's scope and `on_violation="raise"` was asked for."""


class ReplicasDifferError(RuntimeError):
    """The replicas' copies of a variable differ and `on_violation="raise"` was asked for."""


_said = set()


def warn_once(key, message, stacklevel=3, code=None):
    """Warns with `message` unless `key` was warned about before in this process.

    Args:
        key: Hashable that names the cause; one cause is said once.
        message: What, where, and what to write instead, in one or two sentences.
        stacklevel: As in `warnings.warn`, counted from the caller.
        code: Stable short code of the kind of fault, e.g. `"KM201"`, put before the message; its page is
            `docs/codes/KM201.md`.
    """
    if key not in _said:
        _said.add(key)
        warnings.warn(message if code is None else f"{code} {message}", MirrorWarning, stacklevel=stacklevel)


def forget_warnings():
    """Makes `warn_once` say everything again; for notebooks and tests."""
    _said.clear()


@contextlib.contextmanager
def unsaid():
    """Forgets the warnings that are said while it is entered, so that they are said again afterwards."""
    before = set(_said)
    try:
        yield
    finally:
        _said.intersection_update(before)


def _release(version):
    return tuple(int(part) for part in version.split("+")[0].split(".")[:2])


def check_versions(keras_version, tensorflow_version, backend):
    """Refuses what this package would get wrong, in one sentence.

    Args:
        keras_version: `keras.__version__`.
        tensorflow_version: `tensorflow.__version__`.
        backend: `keras.backend.backend()`.

    Raises:
        ImportError: On Keras before 3.10 (it trains wrong weights under `MirroredStrategy` without
            a word), TensorFlow before 2.18, or a backend other than TensorFlow.
    """
    if _release(keras_version) < _release(KERAS_RANGE):
        raise ImportError(
            f"keras_mirror needs Keras {KERAS_RANGE} or newer and found {keras_version}, which trains wrong weights under "
            f"MirroredStrategy without saying so: pip install 'keras>={KERAS_RANGE}'."
        )
    if _release(tensorflow_version) < _release(TENSORFLOW_RANGE):
        raise ImportError(
            f"keras_mirror needs TensorFlow {TENSORFLOW_RANGE} or newer and found {tensorflow_version}: "
            f"pip install 'tensorflow>={TENSORFLOW_RANGE}'."
        )
    if backend != "tensorflow":
        raise ImportError(
            f"keras_mirror distributes Keras on TensorFlow and found the Keras backend {backend!r}: set the environment "
            "variable KERAS_BACKEND=tensorflow before anything imports keras."
        )
