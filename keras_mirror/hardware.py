"""Which devices there are, which are visible and why not, which are busy, and which to train on."""

import importlib
import os
import subprocess

import tensorflow as tf

from keras_mirror.report import Report

HIDING_VARIABLES = ("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES")


def canonical(device):
    """The short name of a device: `"/job:localhost/device:CPU:1"` becomes `"CPU:1"`.

    Raises:
        ValueError: If `device` does not name a device type and an index.
    """
    try:
        text = device if isinstance(device, str) else device.name
        spec = tf.DeviceSpec.from_string(text if text.startswith("/") else "/" + text)
        if spec.device_type and spec.device_index is not None:
            return f"{spec.device_type.upper()}:{spec.device_index}"
    except (AttributeError, TypeError, ValueError):
        pass
    raise ValueError(f"devices: {device!r} is not the name of a device; write names such as 'GPU:0' or 'CPU:1'.")


def existing():
    """Short names of the logical devices that a replica can run on, GPUs first; starts TensorFlow."""
    return [canonical(d) for kind in ("GPU", "CPU") for d in tf.config.list_logical_devices(kind)]


def virtual_cpus(n):
    """Makes `n` CPU devices, so that `n` replicas run on a machine without GPUs.

    For laptops, notebooks and tests: the arithmetic is that of `n` GPUs, the speed is not, since
    all of them share the same cores. Call it before anything else uses TensorFlow; a second call
    with the same or a smaller `n` changes nothing, so a notebook cell can be run again.

    Args:
        n: int, at least 1.

    Returns:
        The names of the `n` devices: `["CPU:0", "CPU:1", ...]`.

    Raises:
        ValueError: If `n` is not a positive int.
        RuntimeError: If TensorFlow has started already with fewer CPU devices.

    Example:

    >>> import keras_mirror as km
    >>> km.virtual_cpus(2)
    ['CPU:0', 'CPU:1']
    """
    if isinstance(n, bool) or not isinstance(n, int) or n < 1:
        raise ValueError(f"virtual_cpus: n must be a positive whole number of CPU replicas, and got {n!r}.")
    cpu = tf.config.list_physical_devices("CPU")[0]
    configured = tf.config.get_logical_device_configuration(cpu) or []
    if len(configured) < n:
        try:
            tf.config.set_logical_device_configuration(cpu, [tf.config.LogicalDeviceConfiguration()] * n)
        except RuntimeError:
            have = len(tf.config.list_logical_devices("CPU"))
            if have < n:
                raise RuntimeError(
                    f"virtual_cpus({n}): TensorFlow has started already with {have} CPU device{'s' * (have != 1)}, and the "
                    f"number cannot change afterwards; call keras_mirror.virtual_cpus({n}) at the top of the script, before "
                    "anything makes a tensor, a variable or a model (in a notebook: restart the kernel first)."
                ) from None
    return [f"CPU:{i}" for i in range(n)]


def resolve(devices):
    """Turns the `devices` argument of `mirrored_model` into a list of device names that exist.

    Args:
        devices: `None` for every visible GPU, else one CPU; an int for so many GPUs, or so many
            virtual CPUs where there is no GPU; a list of device names; `"idle"` for the GPUs that
            no other process is using.

    Raises:
        ValueError: If a device does not exist, is named twice, or none is left.
        TypeError: If `devices` is something else.
    """
    if devices is None:
        return [name for name in existing() if name.startswith("GPU")] or ["CPU:0"]
    if isinstance(devices, int) and not isinstance(devices, bool):
        return _first(devices)
    if devices == "idle":
        return _idle()
    if isinstance(devices, str):
        devices = [devices]
    if not isinstance(devices, (list, tuple)):
        raise TypeError(f"devices: expected None, a number of replicas, a list of device names or 'idle', and got {devices!r}.")
    return checked(devices)


def checked(names):
    """The short form of `names`, each of which exists and stands there once.

    Raises:
        ValueError: Otherwise, with a list of what exists; TensorFlow itself would accept the names
            and then hang in the first reduction.
    """
    names = [canonical(name) for name in names]
    there = existing()
    if not names:
        raise ValueError(f"devices: the list is empty; name at least one device of {there}, or pass None for every GPU.")
    missing = [name for name in names if name not in there]
    if missing:
        hint = ""
        if any(name.startswith("CPU") for name in missing):
            hint = f" For more CPU replicas call keras_mirror.virtual_cpus({len(names)}) before TensorFlow starts."
        elif hidden_by():
            hint = f" {hidden_by()}"
        raise ValueError(f"devices: {', '.join(missing)} does not exist on this machine, which has {', '.join(there)}.{hint}")
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice:
        raise ValueError(f"devices: {', '.join(twice)} is named twice; one device runs one replica, so name each once.")
    return names


def _first(n):
    if n < 1:
        raise ValueError(f"devices: {n} replicas cannot train anything; ask for at least 1.")
    gpus = tf.config.list_physical_devices("GPU")
    if not gpus:
        return virtual_cpus(n)
    visible = [name for name in existing() if name.startswith("GPU")]
    if n > len(visible):
        raise ValueError(f"devices: asked for {n} GPUs and {len(visible)} are visible. {hidden_by()}".rstrip())
    return visible[:n]


def _idle():
    visible = [name for name in existing() if name.startswith("GPU")]
    if not visible:
        raise ValueError("devices='idle' picks among GPUs and this machine shows none; write devices=2 for two CPU replicas.")
    busy = {row["device"] for row in gpu_rows() if row["busy"]}
    idle = [name for name in visible if name not in busy]
    if not idle:
        raise ValueError(
            f"devices='idle': every visible GPU ({', '.join(visible)}) is in use by another process; wait or name one."
        )
    return idle


def hidden_by(environ=os.environ):
    """One sentence on the environment variable that hides GPUs, or an empty string."""
    for variable in HIDING_VARIABLES:
        if variable in environ:
            value = environ[variable]
            what = "every GPU" if value.strip() in ("", "-1") else f"every GPU but {value}"
            return f"{variable}={value!r} hides {what} from this process."
    return ""


def gpu_rows(environ=os.environ):
    """One dict per GPU in the machine: `index`, `name`, `memory`, `device` (its TensorFlow name or
    None when hidden) and `busy` (pids of other processes that use it). Empty without a driver.

    Asks NVML through `nvidia-ml-py` where it is installed and `nvidia-smi` otherwise. Not run on a
    machine with a GPU so far; see the README.
    """
    installed = _ask_nvml() or _ask_nvidia_smi()
    visible = _visible_indices(installed, environ)
    for row in installed:
        place = visible.index(row["index"]) if row["index"] in visible else None
        row["device"] = None if place is None else f"GPU:{place}"
        row["busy"] = [pid for pid in row["busy"] if pid != os.getpid()]
    return installed


def _visible_indices(installed, environ):
    """Indices of the installed GPUs in the order in which CUDA numbers them for this process."""
    indices = [row["index"] for row in installed]
    value = environ.get("CUDA_VISIBLE_DEVICES")
    if value is None:
        return indices
    chosen = []
    for part in value.split(","):
        part = part.strip()
        match = [r["index"] for r in installed if part == str(r["index"]) or (part and r["uuid"].startswith(part))]
        if not match:  # CUDA stops at the first entry that it does not know
            break
        chosen += match[:1]
    return chosen


def _ask_nvml():
    try:
        nvml = importlib.import_module("pynvml")
        nvml.nvmlInit()
    except Exception:  # not installed, or no driver: either way there is nothing to ask
        return []
    try:
        rows = []
        for index in range(nvml.nvmlDeviceGetCount()):
            handle = nvml.nvmlDeviceGetHandleByIndex(index)
            memory = nvml.nvmlDeviceGetMemoryInfo(handle)
            processes = nvml.nvmlDeviceGetComputeRunningProcesses(handle)
            rows.append(
                {
                    "index": index,
                    "uuid": _as_text(nvml.nvmlDeviceGetUUID(handle)),
                    "name": _as_text(nvml.nvmlDeviceGetName(handle)),
                    "memory": f"{memory.used / 2**30:.1f} of {memory.total / 2**30:.1f} GiB",
                    "busy": [process.pid for process in processes],
                }
            )
        return rows
    finally:
        nvml.nvmlShutdown()


def _as_text(value):
    return value.decode() if isinstance(value, bytes) else value


def _ask_nvidia_smi():
    def query(*arguments):
        answer = subprocess.run(
            ["nvidia-smi", *arguments, "--format=csv,noheader,nounits"], capture_output=True, text=True, timeout=20
        )
        return [[cell.strip() for cell in line.split(",")] for line in answer.stdout.splitlines() if line.strip()]

    try:
        gpus = query("--query-gpu=index,uuid,name,memory.used,memory.total")
        processes = query("--query-compute-apps=gpu_uuid,pid")
    except (OSError, subprocess.SubprocessError):
        return []
    return [
        {
            "index": int(index),
            "uuid": uuid,
            "name": name,
            "memory": f"{float(used) / 1024:.1f} of {float(total) / 1024:.1f} GiB",
            "busy": [int(pid) for owner, pid in processes if owner == uuid],
        }
        for index, uuid, name, used, total in gpus
    ]


def devices():
    """What is in the machine, what TensorFlow sees of it and why not, and what is busy.

    Starts TensorFlow (its devices are listed), so call `virtual_cpus` first if you want it.

    Returns:
        A `Report`: print it, or read `.rows` (`device`, `name`, `visible`, `memory`, `used by`).
    """
    logical = existing()
    rows = []
    for gpu in gpu_rows():
        rows.append(
            {
                "device": gpu["device"] or f"GPU {gpu['index']} of the machine",
                "name": gpu["name"],
                "visible": "yes" if gpu["device"] in logical else "no",
                "memory": gpu["memory"],
                "used by": ", ".join(f"pid {pid}" for pid in gpu["busy"]) or "nobody else",
            }
        )
    known = {row["device"] for row in rows}
    for name in logical:
        if name not in known:
            kind = "logical CPU device" if name.startswith("CPU") else "GPU"
            rows.append({"device": name, "name": kind, "visible": "yes", "memory": None, "used by": None})
    notes = [note for note in (hidden_by(), _driver_note(rows)) if note]
    return Report("Devices", ["device", "name", "visible", "memory", "used by"], rows, notes)


def _driver_note(rows):
    invisible = [row["device"] for row in rows if row["visible"] == "no"]
    if invisible and not hidden_by():
        return f"TensorFlow does not see {', '.join(invisible)}: it was built without CUDA or found no CUDA libraries."
    if not any("GPU" in row["device"] for row in rows):
        return "No GPU. keras_mirror.virtual_cpus(n) makes n CPU replicas, for trying things out."
    return ""
