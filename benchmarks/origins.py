"""What it costs that every variable remembers which line created it."""

import time

import keras
import tensorflow as tf

from benchmarks.pairing import interleave
from keras_mirror import internals
from keras_mirror.report import Report

AT_A_TIME = 50  # short turns: both contenders meet the same machine
AIM = 1.02


def by_hand():
    """Variables made one by one."""
    return [tf.Variable(0.0) for _ in range(AT_A_TIME)]


def in_layers():
    """Variables of layers with a kernel and a bias."""
    stack = [keras.layers.Dense(8) for _ in range(AT_A_TIME // 2)]
    for layer in stack:
        layer.build((None, 8))
    return stack


def compare(what, make, rounds):
    """One row: the same variables made with and without recording, in turns."""

    def without():
        with internals.without_creators():
            make()
        return AT_A_TIME

    def recorded():
        make()
        return AT_A_TIME

    timings = interleave({"without": without, "recorded": recorded}, rounds, warm_up=2, clock=time.process_time)
    return {
        "variables": what,
        "without, µs each": timings.median("without") * 1e6,
        "recorded, µs each": timings.median("recorded") * 1e6,
        "ratio": timings.ratio("recorded", "without"),
        "at most": AIM,
    }


def report(quick=False):
    """The comparison as a `Report`."""
    rounds = 20 if quick else 100
    rows = [compare("tf.Variable by hand", by_hand, rounds), compare("kernel and bias of Dense layers", in_layers, rounds // 5)]
    return Report(
        "Creating variables with their origin recorded, and without",
        ["variables", "without, µs each", "recorded, µs each", "ratio", "at most"],
        rows,
        [f"{AT_A_TIME} variables a turn, {rounds} turns ({rounds // 5} of layers) paired in one process; processor time, median."],
    )
