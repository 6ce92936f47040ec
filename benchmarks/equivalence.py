"""The table of the README: the same small trainings on one device, under plain Keras and under keras_mirror.

`python -m benchmarks.equivalence` runs them all and writes the table between the markers in README.md.
"""

import pathlib
import warnings

import keras
import tensorflow as tf

import keras_mirror as km
from keras_mirror.proving import RUNS, judge, mirror

README = pathlib.Path(__file__).parent.parent / "README.md"
BEGIN, END = "<!-- equivalence:begin -->", "<!-- equivalence:end -->"


def plain(build_fn, devices):
    """The model of plain Keras."""
    strategy = tf.distribute.MirroredStrategy(devices, cross_device_ops=tf.distribute.ReductionToOneDevice())
    with strategy.scope():
        return build_fn()


def table():
    """The table in Markdown."""
    rows = []
    for name, replicas, build_fn, use in RUNS:
        devices = [f"CPU:{i}" for i in range(replicas)]
        verdicts = [judge(name, devices, build_fn, use, impl) for impl in (plain, mirror)]
        rows.append((name, replicas, *(each.text.split(" (")[0] for each in verdicts)))
        print(*rows[-1], sep=" | ", flush=True)
    right = [sum(row[column] == "equal" for row in rows) for column in (2, 3)]
    lines = ["| training | replicas | plain Keras | keras_mirror |", "|---|---|---|---|"]
    lines += [f"| {name} | {replicas} | {theirs} | {ours} |" for name, replicas, theirs, ours in rows]
    lines += [f"| **equal to one device** | | **{right[0]} of {len(rows)}** | **{right[1]} of {len(rows)}** |"]
    return "\n".join(
        [*lines, "", f"Keras {keras.__version__}, TensorFlow {tf.__version__}, CPU replicas; `make table` makes it again."]
    )


def main():
    """Writes the table into the README."""
    km.virtual_cpus(4)
    warnings.simplefilter("ignore")
    text = README.read_text()
    head, rest = text.split(BEGIN)
    README.write_text(f"{head}{BEGIN}\n{table()}\n{END}{rest.split(END)[1]}")


if __name__ == "__main__":
    main()
