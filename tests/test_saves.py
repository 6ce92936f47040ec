"""Saves on disk: exact values, whole or not at all, and damage is recognised."""

import os

import ml_dtypes
import numpy as np
import pytest

from keras_mirror.saves import Damaged, NotPlain, Saves

STATE = {
    "numbers": [1, 2.5, float("inf"), None, True, "x", (1, {"b": np.arange(3)})],
    3: np.float32(1.1),
    "bfloat16": np.array([[1, 2.5]], ml_dtypes.bfloat16),
    "half": np.array(1.5, np.float16),
    "strings": np.array(["ab", "c"]),
    "none": np.zeros((0, 3)),
    "a": {"b": np.ones(1)},
    "a.b": np.zeros(1),
}


def assert_same(right, found):
    assert type(right) is type(found)
    if isinstance(right, (np.ndarray, np.generic)):
        assert right.dtype == found.dtype and right.shape == found.shape and right.tobytes() == found.tobytes()
    elif isinstance(right, dict):
        assert list(right) == list(found)
        for key in right:
            assert_same(right[key], found[key])
    elif isinstance(right, (list, tuple)):
        assert len(right) == len(found)
        for each in zip(right, found):
            assert_same(*each)
    else:
        assert right == found


def test_values_come_back_as_they_were_and_need_no_pickle(tmp_path):
    saves = Saves(tmp_path / "made" / "here")
    path = saves.write(STATE)
    assert_same(STATE, saves.read(path))
    with np.load(path / "arrays.npz", allow_pickle=False) as file:  # to look at by hand
        assert file["state.numbers.6.1.b"].tolist() == [0, 1, 2]


def test_the_newest_two_are_kept_newest_first(tmp_path):
    saves = Saves(tmp_path)
    assert list(saves) == []
    for number in range(4):
        saves.write({"number": number})
        saves.keep_newest()
    assert [saves.read(path)["number"] for path in saves] == [3, 2]
    assert sorted(os.listdir(tmp_path)) == ["save-00000003", "save-00000004"]


def test_going_back_removes_what_is_newer(tmp_path):
    saves = Saves(tmp_path)
    paths = [saves.write({"number": number}) for number in range(4)]
    assert len(list(saves)) == 4  # nothing is removed unasked
    saves.go_back_to(paths[1])
    assert [saves.read(path)["number"] for path in saves] == [1, 0]
    assert saves.read(saves.write({"number": 5})) == {"number": 5} and next(iter(saves)).name == "save-00000003"


@pytest.mark.parametrize("call", ["rename", "fsync", "mkdir"])
def test_stopped_in_the_middle_the_saves_before_are_intact(tmp_path, monkeypatch, call):
    saves = Saves(tmp_path)
    saves.write({"number": 0})

    def stop(*args, **kwargs):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(os, call, stop)
        saves.write({"number": 1})
    assert [saves.read(path)["number"] for path in saves] == [0]
    saves.write({"number": 2})
    assert [saves.read(path)["number"] for path in saves] == [2, 0]
    assert len(os.listdir(tmp_path)) == 2


@pytest.mark.parametrize("name", ["arrays.npz", "state.json", "checksums.json"])
@pytest.mark.parametrize("damage", ["cut", "empty", "other", "gone"])
def test_damage_is_recognised(tmp_path, name, damage):
    saves = Saves(tmp_path)
    path = saves.write(STATE)
    contents = (path / name).read_bytes()
    if damage == "gone":
        (path / name).unlink()
    else:
        other = bytes([contents[len(contents) // 2] ^ 4])
        middle = len(contents) // 2
        (path / name).write_bytes(
            {"cut": contents[:-7], "empty": b"", "other": contents[:middle] + other + contents[middle + 1 :]}[damage]
        )
    with pytest.raises(Damaged, match=path.name):
        saves.read(path)


def test_what_is_not_plain_is_refused_before_anything_is_written(tmp_path):
    for value, text in (({"f": print}, "state.f is a builtin"), ({"o": np.array([None])}, "state.o is an array of Python objects")):
        with pytest.raises(NotPlain, match=text):
            Saves(tmp_path / "never").write(value)
    assert not (tmp_path / "never").exists()
