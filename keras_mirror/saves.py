"""Saves of a run on disk: written whole or not at all, checked when read. No TensorFlow."""

import hashlib
import json
import os
import pathlib
import shutil
import zipfile

import numpy as np

FORMAT = 1  # raised when a save can no longer be read as it was before
KEPT = 2  # the newest save, and the one before it in case the newest is damaged later

_ARRAYS, _STATE, _CHECKSUMS = "arrays.npz", "state.json", "checksums.json"


class Damaged(Exception):
    """A save that is not what was written; says which file and how."""


class NotPlain(TypeError):
    """A value that plain JSON and arrays do not hold."""


class Saves:
    """The saves in a directory: `save-00000001/` and so on, each with an `.npz`, a `.json` and their checksums.

    A save is written to a directory of another name, flushed to the disk and then renamed, so that a
    `save-...` directory is always complete: killed at any moment, the saves before are intact.

    Args:
        directory: Path; made when the first save is written.
    """

    def __init__(self, directory):
        self.directory = pathlib.Path(directory)

    def __iter__(self):
        """Paths of the saves, newest first."""
        return iter(sorted(self.directory.glob("save-" + "[0-9]" * 8), reverse=True))

    def write(self, state):
        """Writes `state` as the newest save; `keep_newest` then removes those that are no longer needed.

        Args:
            state: Dict of plain values and arrays, as `to_plain` takes.

        Returns:
            The path of the save.
        """
        plain, arrays = to_plain(state)
        self.directory.mkdir(parents=True, exist_ok=True)
        self._remove_unfinished()
        newest = next(iter(self), None)
        number = 1 if newest is None else int(newest.name[5:]) + 1
        unfinished, path = self.directory / f"unfinished-{number:08d}", self.directory / f"save-{number:08d}"
        unfinished.mkdir()
        _write_files(unfinished, plain, arrays)
        os.rename(unfinished, path)
        _flush(self.directory)
        return path

    def keep_newest(self):
        """Removes all but the newest save and the one before it."""
        for old in list(self)[KEPT:]:
            shutil.rmtree(old)

    def go_back_to(self, path):
        """Removes the saves that are newer than the one at `path`."""
        for newer in [each for each in self if each.name > path.name]:
            shutil.rmtree(newer)

    def read(self, path):
        """The state in the save at `path`, each value as it was.

        Raises:
            Damaged: If a file is missing, cut short or altered.
        """
        _check(path)
        with np.load(path / _ARRAYS, allow_pickle=False) as file:
            arrays = {name: file[name] for name in file.files}
        return from_plain(json.loads((path / _STATE).read_text()), arrays)

    def _remove_unfinished(self):
        for left in self.directory.glob("unfinished-*"):
            shutil.rmtree(left)


def _write_files(directory, plain, arrays):
    with zipfile.ZipFile(directory / _ARRAYS, "w", zipfile.ZIP_STORED, allowZip64=True) as file:
        for name, array in arrays.items():
            with file.open(f"{name}.npy", "w", force_zip64=True) as entry:
                np.lib.format.write_array(entry, array, allow_pickle=False)
    (directory / _STATE).write_text(json.dumps(plain, indent=1))
    sums = {name: _sum_of(directory / name) for name in (_ARRAYS, _STATE)}
    (directory / _CHECKSUMS).write_text(json.dumps(sums, indent=1))
    for name in (_ARRAYS, _STATE, _CHECKSUMS):
        _flush(directory / name)
    _flush(directory)


def _flush(path):
    """Has the system write a file or a directory's list of names to the disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _sum_of(path):
    digest = hashlib.sha256()
    with open(path, "rb") as file:
        while piece := file.read(1 << 20):
            digest.update(piece)
        return {"bytes": file.tell(), "sha256": digest.hexdigest()}


def _check(path):
    try:
        sums = json.loads((path / _CHECKSUMS).read_text())
        for name in (_ARRAYS, _STATE):
            right, found = sums[name], _sum_of(path / name)
            if found != right:
                different = "other contents" if found["bytes"] == right["bytes"] else f"{found['bytes']} of {right['bytes']} bytes"
                raise Damaged(f"{path.name}/{name} has {different}")
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise Damaged(f"{path.name}/{_CHECKSUMS} cannot be read or misses a file ({type(error).__name__})") from error


# --- values as plain JSON, and arrays aside ------------------------------------------------------


def to_plain(value):
    """`value` as what JSON holds, and a dict of its arrays.

    Dicts, lists, tuples, None, bools, ints, floats (to the last bit), strings, NumPy scalars and
    arrays. Arrays of types that NumPy does not know, as bfloat16, are kept as raw bytes with the name of their type.

    Raises:
        NotPlain: If there is something else in it.
    """
    arrays = {}
    return _plain(value, arrays, "state"), arrays


def _plain(value, arrays, where):
    if value is None or type(value) in (bool, int, float, str):
        return value
    if isinstance(value, (np.ndarray, np.generic)):
        array = np.asarray(value)
        if array.dtype.hasobject:
            raise NotPlain(f"{where} is an array of Python objects")
        name = where if where not in arrays else f"{where}~{len(arrays)}"
        arrays[name] = _raw(np.ascontiguousarray(array).reshape(array.shape))
        return {"array": name, "dtype": array.dtype.name, "scalar": isinstance(value, np.generic)}
    if type(value) in (list, tuple):
        return {type(value).__name__: [_plain(each, arrays, f"{where}.{index}") for index, each in enumerate(value)]}
    if isinstance(value, dict):
        return {"dict": [[_plain(key, arrays, where), _plain(each, arrays, f"{where}.{key}")] for key, each in value.items()]}
    raise NotPlain(f"{where} is a {type(value).__name__}")


def _raw(array):
    known = array.dtype.isbuiltin == 1 or array.dtype.kind in "USMm"
    return array if known else array.view(f"u{array.dtype.itemsize}")


def from_plain(plain, arrays):
    """The value of which `to_plain` made `plain` and `arrays`."""
    if not isinstance(plain, dict):
        return plain
    if "array" in plain:
        array = arrays[plain["array"]]
        if array.dtype.name != plain["dtype"] and array.dtype.kind == "u":
            array = array.view(_dtype(plain["dtype"]))
        return array[()] if plain["scalar"] else array
    if "dict" in plain:
        return {from_plain(key, arrays): from_plain(each, arrays) for key, each in plain["dict"]}
    (kind, values), *_ = plain.items()
    return {"list": list, "tuple": tuple}[kind](from_plain(each, arrays) for each in values)


def _dtype(name):
    import ml_dtypes  # comes with TensorFlow

    return np.dtype(getattr(ml_dtypes, name))
