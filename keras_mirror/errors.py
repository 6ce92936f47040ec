"""The one warning category and the exceptions of this package, and the check of what it runs on."""

import collections
import contextlib
import warnings

from keras_mirror.codes import CODES
from keras_mirror.places import users_frame

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
    """Something is wrong for sure, such as a variable outside of the scope, and `on_violation="raise"` was asked for."""


class ReplicasDifferError(RuntimeError):
    """The replicas' copies of a variable differ and `on_violation="raise"` was asked for."""


_said = set()
_silenced = collections.Counter()


def warn_once(key, message, code=None, also=None):
    """Warns with `message`, at the user's line that runs, unless `key` was warned about before in this process.

    Args:
        key: Hashable that names the cause; one cause is said once.
        message: What, where, and what to write instead, in one or two sentences.
        code: Stable short code of the kind of fault, e.g. `"KM201"`, put before the message; its page is
            `docs/codes/KM201.md`.
        also: The key under which the same cause would be warned about elsewhere; it counts as said, too.
    """
    if key not in _said and not _silenced[code]:
        _said.update([key, also])
        text, frame = message if code is None else f"{code} {message}", users_frame()
        if frame is None:
            warnings.warn(text, MirrorWarning, stacklevel=2)
        else:
            module = frame.f_globals.get("__name__")
            warnings.warn_explicit(text, MirrorWarning, frame.f_code.co_filename, frame.f_lineno, module)


def check_codes(caller, codes, family=""):
    """Refuses codes that do not exist; returns them as a frozenset.

    Args:
        caller: Name of the function and its argument, for the error.
        codes: Tuple of codes.
        family: What the codes begin with that the function reports, e.g. `"KM3"`.

    Raises:
        ValueError: If one does not exist; the text lists those that do.
        TypeError: If `codes` is a single string instead of a tuple.
    """
    if isinstance(codes, str):
        raise TypeError(f"{caller}: expected a tuple of codes and got one string; write ({codes!r},).")
    known = [code for code in CODES if code.startswith(family)]
    unknown = [code for code in codes if code not in known]
    if unknown:
        raise ValueError(f"{caller}: there is no code {unknown[0]!r}; the codes are {', '.join(known)}.")
    return frozenset(codes)


class Silence:
    """What `silence` returns: ends with `undo()`, or at the end of a `with` block."""

    def __init__(self, codes):
        self._codes = codes
        self._on = True
        _silenced.update(codes)

    def undo(self):
        """Lets the warnings be heard again."""
        if self._on:
            self._on = False
            _silenced.subtract(self._codes)

    def __enter__(self):
        return self

    def __exit__(self, *exception):
        self.undo()

    def __repr__(self):
        return f"<{'silent' if self._on else 'no longer silent'}: {', '.join(sorted(self._codes))}>"


def silence(*codes):
    """Silences the warnings with these codes, in the whole process, until it is undone.

    A report such as `audit` still lists what it finds; leave findings out of it with `ignore=`.

    Args:
        *codes: Codes as they stand before each warning, e.g. `"KM205"`; `docs/codes` has a page for each.

    Returns:
        An object with `undo()`, which is also a context manager.

    Raises:
        ValueError: If no code is given, or one does not exist.

    Example:

    >>> quiet = km.silence("KM203", "KM205")
    >>> quiet.undo()
    >>> with km.silence("KM203"):
    ...     history = model.fit(x, y, verbose=0)
    """
    if not codes:
        raise ValueError(f"silence: name one code or more; the codes are {', '.join(CODES)}.")
    return Silence(check_codes("silence", codes))


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
