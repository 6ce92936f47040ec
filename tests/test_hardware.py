import os
import subprocess
import sys

import pytest
import tensorflow as tf

import keras_mirror as km
from keras_mirror import hardware


@pytest.mark.parametrize("name", ["CPU:1", "cpu:1", "/cpu:1", "/device:CPU:1", "/job:localhost/replica:0/task:0/device:CPU:1"])
def test_names_have_one_short_form(name):
    assert hardware.canonical(name) == "CPU:1"


@pytest.mark.parametrize("name", ["CPU", "", None, 3, "nonsense:x"])
def test_what_names_no_device_is_said(name):
    with pytest.raises(ValueError, match="is not the name of a device; write names such as 'GPU:0'"):
        hardware.canonical(name)


@pytest.mark.parametrize(
    ("asked", "error", "fragments"),
    [
        (["CPU:0", "CPU:7"], ValueError, ["CPU:7 does not exist", "CPU:0, CPU:1, CPU:2, CPU:3", "virtual_cpus(2)"]),
        (["GPU:0", "GPU:1"], ValueError, ["GPU:0, GPU:1 does not exist", "CPU:3"]),
        (["/gpu:0"], ValueError, ["GPU:0 does not exist"]),
        (["CPU:1", "/cpu:1"], ValueError, ["CPU:1 is named twice"]),
        ([], ValueError, ["the list is empty", "CPU:0"]),
        (0, ValueError, ["0 replicas", "at least 1"]),
        (-2, ValueError, ["-2 replicas"]),
        (5, RuntimeError, ["TensorFlow has started already with 4 CPU devices", "virtual_cpus(5)", "restart the kernel"]),
        ("idle", ValueError, ["devices='idle' picks among GPUs", "devices=2"]),
        (3.5, TypeError, ["None, a number of replicas, a list of device names or 'idle'", "3.5"]),
        (True, TypeError, ["True"]),
    ],
)
def test_bad_devices_are_refused_before_anything_hangs(asked, error, fragments):
    for make in (km.MirroredStrategy, lambda d: km.mirrored_model(lambda: None, devices=d)):
        with pytest.raises(error) as raised:
            make(asked)
        for fragment in fragments:
            assert fragment in str(raised.value)


def test_devices_that_exist():
    assert hardware.resolve(None) == ["CPU:0"]
    assert hardware.resolve(3) == ["CPU:0", "CPU:1", "CPU:2"]
    assert hardware.resolve("CPU:2") == ["CPU:2"]
    assert hardware.resolve(("cpu:3", "cpu:1")) == ["CPU:3", "CPU:1"]


def test_virtual_cpus_again_with_as_many_or_fewer_changes_nothing():
    assert km.virtual_cpus(4) == ["CPU:0", "CPU:1", "CPU:2", "CPU:3"]
    assert km.virtual_cpus(2) == ["CPU:0", "CPU:1"]


@pytest.mark.parametrize("n", [0, -1, 2.0, "2", None, True])
def test_virtual_cpus_wants_a_positive_number(n):
    with pytest.raises(ValueError, match="positive whole number"):
        km.virtual_cpus(n)


def test_virtual_cpus_too_late():
    script = """
import tensorflow as tf, keras_mirror as km
tf.constant(1.0)
try:
    km.virtual_cpus(2)
except RuntimeError as error:
    assert "has started already with 1 CPU device," in str(error) and "top of the script" in str(error), error
else:
    raise SystemExit("accepted")
"""
    subprocess.run([sys.executable, "-c", script], check=True, timeout=120)


GPUS = [
    {"index": 0, "uuid": "GPU-aaa", "name": "Card", "memory": "1.0 of 80.0 GiB", "busy": []},
    {"index": 1, "uuid": "GPU-bbb", "name": "Card", "memory": "70.0 of 80.0 GiB", "busy": [4711]},
    {"index": 2, "uuid": "GPU-ccc", "name": "Card", "memory": "1.0 of 80.0 GiB", "busy": [os.getpid()]},
]


@pytest.mark.parametrize(
    ("hidden", "expected"),
    [
        ({}, ["GPU:0", "GPU:1", "GPU:2"]),
        ({"CUDA_VISIBLE_DEVICES": "2"}, [None, None, "GPU:0"]),
        ({"CUDA_VISIBLE_DEVICES": "2,0"}, ["GPU:1", None, "GPU:0"]),
        ({"CUDA_VISIBLE_DEVICES": "GPU-bbb"}, [None, "GPU:0", None]),
        ({"CUDA_VISIBLE_DEVICES": ""}, [None, None, None]),
        ({"CUDA_VISIBLE_DEVICES": "-1"}, [None, None, None]),
        ({"CUDA_VISIBLE_DEVICES": "1,9,0"}, [None, "GPU:0", None]),
    ],
)
def test_visible_gpus_are_numbered_as_cuda_does(monkeypatch, hidden, expected):
    monkeypatch.setattr(hardware, "_ask_nvml", lambda: [dict(row) for row in GPUS])
    rows = hardware.gpu_rows(hidden)
    assert [row["device"] for row in rows] == expected
    assert [row["busy"] for row in rows] == [[], [4711], []]  # this process itself does not count


def test_devices_report_says_what_hides_a_gpu(monkeypatch):
    monkeypatch.setattr(hardware, "_ask_nvml", lambda: [dict(row) for row in GPUS])
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    report = km.devices()
    assert [row["visible"] for row in report.rows[:3]] == ["no", "no", "no"]
    assert report.rows[1]["used by"] == "pid 4711"
    assert "CUDA_VISIBLE_DEVICES='' hides every GPU" in str(report)


def test_devices_report_without_a_gpu(monkeypatch):
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    report = km.devices()
    assert [row["device"] for row in report.rows] == ["CPU:0", "CPU:1", "CPU:2", "CPU:3"]
    assert "virtual_cpus(n)" in str(report)


def test_nvidia_smi_answers_are_read(monkeypatch):
    answers = {
        "--query-gpu=index,uuid,name,memory.used,memory.total": "0, GPU-aaa, Big Card, 1024, 81920\n",
        "--query-compute-apps=gpu_uuid,pid": "GPU-aaa, 12\nGPU-aaa, 13\n",
    }

    def run(command, **kwargs):
        return subprocess.CompletedProcess(command, 0, stdout=answers[command[1]])

    monkeypatch.setattr(hardware.subprocess, "run", run)
    assert hardware._ask_nvidia_smi() == [
        {"index": 0, "uuid": "GPU-aaa", "name": "Big Card", "memory": "1.0 of 80.0 GiB", "busy": [12, 13]}
    ]


@pytest.mark.gpu
@pytest.mark.skipif(not tf.config.list_physical_devices("GPU"), reason="needs a GPU; none is visible to TensorFlow here")
def test_idle_gpus_are_found_on_a_real_machine():
    assert all(name.startswith("GPU") for name in hardware.resolve("idle"))
