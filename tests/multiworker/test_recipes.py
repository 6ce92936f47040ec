"""The recipes of docs/multiworker.md, as they stand there."""

import json
import os
import pathlib
import re
import stat
import subprocess
import sys

import keras
import numpy as np
import pytest

from tests.multiworker.harness import environment, free_ports, run_commands

ROOT = pathlib.Path(__file__).parent.parent.parent
PAGE = (ROOT / "docs" / "multiworker.md").read_text()


def recipe(title, language="python"):
    """The first block of a language below a heading."""
    return re.search(rf"## {title}\n.*?```{language}\n(.*?)```", PAGE, re.S)[1]


@pytest.mark.xdist_group("workers")
def test_by_hand(tmp_path):
    """Both blocks in one folder, but for the ports; and the same script in a shell without TF_CONFIG, on one device."""
    lines = recipe("Start by hand", "sh")
    for port, free in zip(("29500", "29501"), free_ports(2)):
        assert port in lines
        lines = lines.replace(port, str(free))
    commands = []
    for name, script in (("one", "python train.py"), ("two", f"{lines}foreground=$?; wait $! && exit $foreground")):
        place = tmp_path / name
        place.mkdir()
        (place / "train.py").write_text(recipe("Start by hand"))
        env = environment(PATH=f"{pathlib.Path(sys.executable).parent}:{os.environ['PATH']}")
        commands.append((["sh", "-c", f"cd '{place}'\n{script}"], env))
    for status, output in run_commands(commands, timeout=200):
        assert status == 0, output[-4000:]
    one, two = (keras.saving.load_model(tmp_path / name / "best.keras").get_weights() for name in ("one", "two"))
    assert len(one) == 4
    for a, b in zip(two, one):
        np.testing.assert_allclose(a, b, rtol=2e-4, atol=2e-5)
    assert "(2 replicas on 2 workers)" in output


def test_slurm(tmp_path):
    """With a `scontrol` that knows two nodes; Slurm itself was not run."""
    scontrol = tmp_path / "scontrol"
    scontrol.write_text('#!/bin/sh\n[ "$*" = "show hostnames node[1-2]" ] && printf "node1\\nnode2\\n"\n')
    scontrol.chmod(scontrol.stat().st_mode | stat.S_IXUSR)
    script = recipe("Start with Slurm") + "print(os.environ['TF_CONFIG'])\n"
    env = {"PATH": f"{tmp_path}:{os.environ['PATH']}", "SLURM_JOB_NODELIST": "node[1-2]", "SLURM_PROCID": "1"}
    done = subprocess.run([sys.executable, "-c", script], env=env, capture_output=True, text=True, timeout=60, check=True)
    assert json.loads(done.stdout) == {
        "cluster": {"worker": ["node1:29500", "node2:29500"]},
        "task": {"type": "worker", "index": 1},
    }


def test_ray(tmp_path):
    """The recipe on two workers of this machine, against the same function on one device."""
    pytest.importorskip("ray.train", reason="Ray is not installed: pip install 'keras_mirror[ray]' to run its recipe")
    here = f"num_workers=2), run_config=ray.train.RunConfig(storage_path={str(tmp_path)!r}))"
    script = tmp_path / "recipe.py"
    script.write_text(
        "import ray\nray.init(num_cpus=2, include_dashboard=False)\n"
        + recipe("Start with Ray Train").replace("num_workers=2))", here)
        + "print('two workers:', result.metrics['loss'])\nkept = result.checkpoint.path\nray.shutdown()\n"
        + ONE_DEVICE
    )
    env = {**os.environ, "PYTHONPATH": str(ROOT), "CUDA_VISIBLE_DEVICES": "-1", "TF_CPP_MIN_LOG_LEVEL": "3"}
    status, output = _run(script, env, tmp_path, timeout=400)
    assert status == 0, output[-4000:]
    assert "because TF_CONFIG names 2 workers" in output
    one, two = (float(re.search(rf"^{who}: (\S+)", output, re.M)[1]) for who in ("one device", "two workers"))
    assert two == pytest.approx(one, rel=1e-4)
    assert float(re.search(r"^largest difference: (\S+)", output, re.M)[1]) < 1e-5


# The training function of the recipe once more, in a process of its own kind: no TF_CONFIG, and nobody to report to.
ONE_DEVICE = """
import keras
import numpy as np


class ReportCheckpointCallback(keras.callbacks.Callback):
    def on_train_end(self, logs=None):
        saved = keras.saving.load_model(f"{kept}/model.keras").get_weights()
        print("one device:", logs["loss"])
        print("largest difference:", max(np.abs(a - b).max() for a, b in zip(saved, self.model.get_weights())))


train({})
"""


def _run(script, env, cwd, timeout):
    """Runs a script and ends it with every process that it started, in whatever session of its own: Ray leaves some."""
    with (cwd / "output.txt").open("w+") as output:
        process = subprocess.Popen([sys.executable, str(script)], env=env, stdout=output, stderr=subprocess.STDOUT, cwd=cwd)
        try:
            status = process.wait(timeout)
        except subprocess.TimeoutExpired:
            status = None
        finally:
            process.kill()
            process.wait()
            subprocess.run([sys.executable, "-m", "ray.scripts.scripts", "stop", "--force"], capture_output=True, timeout=60)
        output.seek(0)
        return status, output.read()
