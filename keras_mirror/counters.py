"""What callbacks count (best value, patience left, history), saved and given back. No TensorFlow."""

import io
import json

from keras_mirror.saves import NotPlain, to_plain

# Keras' callbacks turn the sign of `min_delta`, a setting, when they first look at their metric.
_NOT_COUNTERS = ("_model", "model", "params", "validation_data", "min_delta")


class Counters:
    """The counters of a list of callbacks.

    A callback with `get_state()` and `set_state(state)` says itself what to keep. Of any other, the
    attributes are kept that hold plain values (numbers, strings, None, arrays, and lists, tuples and dicts of
    these) and have changed since training began; so settings stay those of the script.

    Args:
        callbacks: List of callbacks, after their `on_train_begin`.
    """

    def __init__(self, callbacks):
        self._callbacks = dict(zip(_names(callbacks), callbacks))
        self._before = {name: _fingerprints(_attributes(callback)) for name, callback in self._callbacks.items()}

    def state(self):
        """What to save: a dict of the callbacks' names to their counters."""
        found = {name: self._of(name, callback) for name, callback in self._callbacks.items()}
        return {name: state for name, state in found.items() if state}

    def give_back(self, state):
        """Gives the callbacks back what `state` returned; callbacks that are new keep what they have."""
        for name, counters in state.items():
            callback = self._callbacks.get(name)
            if callback is None:
                continue
            if "own" in counters:
                callback.set_state(counters["own"])
            vars(callback).update(counters.get("attributes", {}))
            if "file" in counters:
                _restore_file(callback, counters["file"])

    def _of(self, name, callback):
        if hasattr(callback, "get_state") and hasattr(callback, "set_state"):
            return {"own": callback.get_state()}
        attributes = _attributes(callback)
        now, before = _fingerprints(attributes), self._before[name]
        changed = {key: attributes[key] for key in now if now[key] != before.get(key)}
        return {**({"attributes": changed} if changed else {}), **_file(callback)}


def _names(callbacks):
    """Class names, numbered where a class comes more than once."""
    names = []
    for callback in callbacks:
        kind = type(callback).__name__
        names.append(f"{kind} {sum(name.split()[0] == kind for name in names)}")
    return names


def _attributes(callback):
    plain = {}
    for name, value in vars(callback).items():
        try:
            to_plain(value)
        except NotPlain:
            continue
        if name not in _NOT_COUNTERS:
            plain[name] = value
    return plain


def _fingerprints(attributes):
    """For each attribute something that is equal only while it is unchanged."""
    found = {}
    for name, value in attributes.items():
        plain, arrays = to_plain(value)
        found[name] = (json.dumps(plain), [(key, array.dtype.name, array.tobytes()) for key, array in arrays.items()])
    return found


# --- a CSVLogger's counter is its file -----------------------------------------------------------


def _file(callback):
    file = getattr(callback, "csv_file", None)
    if not isinstance(file, io.IOBase) or file.closed:
        return {}
    with open(callback.filename, newline="") as written:
        return {"file": written.read()}


def _restore_file(callback, text):
    """Rows that were written after the save are written again by the resumed run."""
    callback.csv_file.close()
    with open(callback.filename, "w", newline="") as file:
        file.write(text)
    callback.csv_file = open(callback.filename, "a", newline="")
    callback.append_header = not text
    callback.writer = None
