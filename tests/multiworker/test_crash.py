"""Killed workers, all started again, end with the weights of workers that nobody killed, bit for bit."""

import json
import re
import signal

import pytest

from tests.multiworker.harness import addresses, environment, run

pytestmark = pytest.mark.xdist_group("workers")  # one cluster at a time, started once for all tests of a file


def commands(place, name, *kill):
    """Starts two workers that save below one directory."""
    workers = addresses(2)
    arguments = [place / name, *kill]
    return [
        ([place / f"{name}-{index}.json", *arguments], environment(workers, index, KERAS_MIRROR_TIMEOUT_SECONDS="60"))
        for index in range(2)
    ]


def test_killed_workers_go_on_where_they_were(tmp_path):
    # 4 steps an epoch: worker 1 dies in the middle of the second epoch, the chief in the last step of the third.
    steady, killed = commands(tmp_path, "steady"), commands(tmp_path, "killed", 6, 1)
    ended = run("crash.py", steady + killed, timeout=150)
    assert [status for status, _ in ended] == [0, 0, 1, -signal.SIGKILL], ended
    assert re.search(r"WorkerLostError: (fit|Resume) on worker:0: worker:1", ended[2][1])
    ended = run("crash.py", commands(tmp_path, "killed", 12, 0), timeout=120)
    assert [status for status, _ in ended] == [-signal.SIGKILL, 1], ended
    assert re.search(r"WorkerLostError: (fit|Resume) on worker:1: worker:0", ended[1][1])
    ended = run("crash.py", commands(tmp_path, "killed"), timeout=120)
    assert [status for status, _ in ended] == [0, 0], ended
    for index in range(2):
        right, found = (json.loads((tmp_path / f"{name}-{index}.json").read_text()) for name in ("steady", "killed"))
        assert len(right["loss"]) == 4
        assert found == right
