"""Prints every comparison; `python -m benchmarks.run --quick` for a rough look."""

import argparse
import importlib
import os
import platform

import keras
import tensorflow as tf

import keras_mirror as km

PARTS = ("fit", "loops", "growth", "consistency", "throughput", "origins", "links")


def machine():
    """What was measured on, in one line."""
    names = [line.split(":")[1].strip() for line in _lines("/proc/cpuinfo") if line.startswith("model name")]
    memory = [int(line.split()[1]) for line in _lines("/proc/meminfo") if line.startswith("MemTotal")]
    return (
        f"{names[0] if names else platform.processor() or 'unknown CPU'}, {os.cpu_count()} cores, "
        f"{round(memory[0] / 2**20) if memory else '?'} GiB, Python {platform.python_version()}, "
        f"TensorFlow {tf.__version__}, Keras {keras.__version__}"
    )


def _lines(path):
    try:
        with open(path) as file:
            return file.readlines()
    except OSError:
        return []


def main(arguments=None):
    """Runs the parts asked for, or all."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.run", description=__doc__)
    parser.add_argument("parts", nargs="*", help=f"any of {', '.join(PARTS)}; all if none")
    parser.add_argument("--quick", action="store_true", help="few rounds, for a rough look")
    options = parser.parse_args(arguments)
    km.virtual_cpus(8)  # for the widest of them; before anything starts TensorFlow
    print(f"Machine: {machine()}\n")
    unknown = sorted(set(options.parts) - set(PARTS))
    if unknown:
        parser.error(f"unknown part {unknown[0]!r}; choose from {', '.join(PARTS)}")
    for part in options.parts or PARTS:
        print(importlib.import_module(f"benchmarks.{part}").report(options.quick), "\n", flush=True)


if __name__ == "__main__":
    main()
