"""The command line: `python -m keras_mirror devices | check | demo | env`."""

import argparse
import importlib.metadata
import os
import platform
import sys

import keras
import rich.console
import rich.progress
import tensorflow as tf

from keras_mirror import demo, hardware
from keras_mirror.proving import prove
from keras_mirror.report import Report

_PACKAGES = ("keras_mirror", "keras", "tensorflow", "numpy", "h5py", "nvidia-ml-py", "ray")
_VARIABLES = (
    *("CUDA_", "HIP_", "ROCR_", "NCCL_", "XLA_", "KERAS_", "OMP_", "SLURM_"),
    *("TF_CONFIG", "TF_CPP", "TF_CUDNN", "TF_DETERMINISTIC", "TF_ENABLE", "TF_FORCE", "TF_GPU", "TF_NUM", "TF_USE", "TF_XLA"),
)


def main(arguments=None):
    """Runs one command.

    Args:
        arguments: List of strings; `None` for those of the process.

    Returns:
        The exit code: 0 if all is well, 1 if `check` or `demo` found a difference from one device, 2 for
        what cannot be run (argparse exits with 2 itself for what it does not understand).
    """
    parser = argparse.ArgumentParser(
        prog="python -m keras_mirror",
        description="Looks at this machine, and proves that N replicas equal one device on it.",
        epilog="Exit codes: 0 all is well, 1 replicas differ from one device, 2 could not be run.",
    )
    commands = parser.add_subparsers(dest="command", required=True, metavar="devices | check | demo | env")
    commands.add_parser("devices", help="what is in the machine, what is visible and why not, what is busy")
    check = commands.add_parser("check", help="small trainings on one device and on replicas, compared (a minute or two)")
    check.add_argument("--replicas", type=int, default=None, help="at most so many replicas (default: 4, or every GPU)")
    commands.add_parser("demo", help="a small CNN on handwritten digits, on two replicas and on one device", add_help=False)
    commands.add_parser("env", help="versions, devices and settings, for a bug report")
    options, rest = parser.parse_known_args(arguments)
    if options.command == "demo":
        return _demo(rest)
    if rest:
        parser.error(f"unrecognized arguments: {' '.join(rest)}")
    try:
        return {"devices": _devices, "check": _check, "env": _env}[options.command](options)
    except (ValueError, RuntimeError) as error:
        print(f"python -m keras_mirror {options.command}: {error}", file=sys.stderr)
        return 2


def _devices(options):
    print(hardware.devices())
    return 0


def _env(options):
    print(environment())
    print()
    print(hardware.devices())
    return 0


def _check(options):
    devices, note = _devices_to_prove(options.replicas)
    console = rich.console.Console(stderr=True)
    proof = prove(devices, lambda runs: rich.progress.track(runs, "Training", console=console, transient=True))
    proof.notes += [note] if note else []
    print(proof)
    return 0 if proof else 1


def _devices_to_prove(replicas):
    if replicas is not None and replicas < 2:
        raise ValueError(f"--replicas {replicas}: a comparison with one device takes at least 2.")
    gpus = tf.config.list_physical_devices("GPU")
    if len(gpus) >= 2:
        return hardware.resolve(replicas), ""
    note = "These are virtual CPU replicas: the arithmetic is that of GPUs, the speed is not."
    return hardware.virtual_cpus(replicas or 4), note + (" One GPU alone has nothing to be compared with." if gpus else "")


def _demo(arguments):
    return 0 if demo.main(arguments) < 1e-3 else 1


def environment(environ=os.environ):
    """What a bug report needs: versions, the machine, and the variables that change what TensorFlow does.

    Args:
        environ: The environment.

    Returns:
        A `Report` of the columns `what` and `value`. `TF_CONFIG` is in it, which names the hosts of a
        cluster: look before you publish it.
    """
    build = tf.sysconfig.get_build_info()
    rows = {
        "python": f"{platform.python_version()} ({platform.python_implementation()})",
        "platform": platform.platform(),
        "CPU cores": str(os.cpu_count()),
        **{name: version for name in _PACKAGES if (version := _version(name))},
        "Keras backend": keras.backend.backend(),
        "dtype policy": keras.mixed_precision.dtype_policy().name,
        "CUDA of the build": str(build.get("cuda_version", "none")),
        "cuDNN of the build": str(build.get("cudnn_version", "none")),
        **{name: value for name, value in sorted(environ.items()) if name.startswith(_VARIABLES)},
    }
    return Report("Environment", ["what", "value"], [{"what": name, "value": value} for name, value in rows.items()])


def _version(package):
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "not installed as a package" if package == "keras_mirror" else None
