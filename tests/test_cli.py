"""The command line and the proof behind `check`."""

import subprocess
import sys

import numpy as np
import pytest
import tensorflow as tf

from keras_mirror import cli, proving


@pytest.fixture
def few_runs(monkeypatch):
    runs = [run for run in proving.RUNS if run[0] in ("a last batch of one row", "a batch smaller than the number of replicas")]
    monkeypatch.setattr(proving, "RUNS", runs)


def plain(build_fn, devices):
    strategy = tf.distribute.MirroredStrategy(devices, cross_device_ops=tf.distribute.ReductionToOneDevice())
    with strategy.scope():
        return build_fn()


def test_check_proves_and_exits_with_0(few_runs, capsys):
    assert cli.main(["check"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "2 of 2 trainings on CPU:0, CPU:1, CPU:2, CPU:3 equal one device"
    assert "virtual CPU replicas" in lines[-1]


def test_check_exits_with_1_where_something_differs(few_runs, capsys, monkeypatch):
    monkeypatch.setattr(proving, "mirrored_model", lambda build_fn, devices: plain(build_fn, devices))  # today's Keras
    assert cli.main(["check", "--replicas", "2"]) == 1
    text = capsys.readouterr().out
    assert text.startswith("0 of 2 trainings on CPU:0, CPU:1 equal one device")
    assert "weights off by" in text and "crashes (" in text


def test_verdicts_see_what_is_wrong():
    _, replicas, build_fn, use = proving.RUNS[0]
    devices = [f"CPU:{index}" for index in range(replicas)]

    def spoilt(change):
        def impl(build_fn, devices):
            model = build_fn()
            model.optimizer.learning_rate = 0.0
            model.set_weights([change(weight) for weight in model.get_weights()])
            return model

        return proving.judge("spoilt", devices, build_fn, use, impl).text

    assert spoilt(lambda weight: weight * np.nan) == "weights are NaN"
    assert spoilt(lambda weight: weight + 1).startswith("weights off by ")


def test_what_cannot_be_run_exits_with_2(capsys):
    assert cli.main(["check", "--replicas", "1"]) == 2
    assert "--replicas 1: a comparison with one device takes at least 2" in capsys.readouterr().err
    assert cli.main(["check", "--replicas", "64"]) == 2
    assert "TensorFlow has started already with 4 CPU devices" in capsys.readouterr().err
    for wrong in (["chekc"], [], ["devices", "--loud"]):
        with pytest.raises(SystemExit) as stopped:
            cli.main(wrong)
        assert stopped.value.code == 2


def test_demo_exits_with_1_where_it_differs(monkeypatch):
    for difference, code in ((1e-7, 0), (0.1, 1), (float("nan"), 1)):
        monkeypatch.setattr(cli.demo, "main", lambda arguments, difference=difference: difference)
        assert cli.main(["demo", "--epochs", "1"]) == code


def test_environment_tells_what_a_bug_report_needs():
    rows = {
        row["what"]: row["value"] for row in cli.environment({"CUDA_VISIBLE_DEVICES": "1", "PATH": "/bin", "TF_CONFIG": "{}"}).rows
    }
    assert rows["tensorflow"] == tf.__version__ and rows["python"].startswith(".".join(map(str, sys.version_info[:3])))
    assert rows["CUDA_VISIBLE_DEVICES"] == "1" and rows["TF_CONFIG"] == "{}" and "PATH" not in rows


def test_module_passes_the_exit_code_on():
    done = subprocess.run(
        [sys.executable, "-m", "keras_mirror", "check", "--replicas", "0"], capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 2 and "--replicas 0" in done.stderr and not done.stdout
