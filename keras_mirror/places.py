"""Files and lines: which belong to a library, and what a person calls a line of a file or of a notebook cell."""

import linecache
import os
import re
import sys
import sysconfig
import threading

USER, LIBRARY, MAKER, NAMED_MAKER = range(4)


def _folder(name):
    return os.path.dirname(os.path.abspath(sys.modules[name].__file__)) + os.sep


_KERAS = os.path.join(_folder("keras"), "src")
_LIBRARIES = (_folder("keras"), _folder("tensorflow"), os.path.dirname(os.path.abspath(__file__)) + os.sep)
_PYTHON = sysconfig.get_paths()
_INSTALLED = tuple(_PYTHON[part] + os.sep for part in ("purelib", "platlib"))  # may be inside the standard library's folder
_NAMED_MAKERS = tuple(os.path.join(_KERAS, part) + os.sep for part in ("layers", "optimizers", "metrics"))
_MAKERS = tuple(os.path.join(_KERAS, part) + os.sep for part in ("random", "trainers"))


class _Kinds(dict):
    """Whose code a file holds, worked out once a file: asked for every frame around a new variable."""

    def __missing__(self, file):
        kinds = ((NAMED_MAKER, _NAMED_MAKERS), (MAKER, _MAKERS), (LIBRARY, _LIBRARIES))
        kinds += ((USER, _INSTALLED), (LIBRARY, _PYTHON["stdlib"] + os.sep))
        self[file] = next((kind for kind, folders in kinds if file.startswith(folders)), USER)
        return self[file]


# `KIND_OF[file]`: `USER`, `LIBRARY`, or library code that makes variables for a user: `NAMED_MAKER` in Keras' layers,
# optimizers and metrics, `MAKER` in its random generators and trainers.
KIND_OF = _Kinds()


def is_library(file):
    """Whether a file belongs to Keras, TensorFlow, this package or Python itself."""
    return KIND_OF[file] != USER


def users_frame():
    """The frame of the user's line that runs, that of the main thread where this thread runs none of the user's; or None."""
    for frame in (sys._getframe(1), sys._current_frames().get(threading.main_thread().ident)):
        while frame is not None and (is_library(frame.f_code.co_filename) or "__autograph_generated" in frame.f_code.co_filename):
            frame = frame.f_back
        if frame is not None:
            return frame
    return None


def place(file, line):
    """What a person calls it: `train.py:12`, or `In[3], line 2` for a cell of a notebook."""
    cell = _cell(file)
    if cell is None:
        return f"{_short(file)}:{line}"
    source = linecache.getline(file, line).strip() if cell == "a notebook cell" else ""
    return f"{cell}, line {line}" + (f" ({source})" if source else "")


def _cell(file):
    shell = sys.modules["IPython"].get_ipython() if "IPython" in sys.modules else None
    named = getattr(getattr(shell, "compile", None), "format_code_name", lambda file: None)(file)
    if named is not None:
        return named[1]
    numbered = re.match(r"<ipython-input-(\d+)-", file)
    if numbered:
        return f"In[{numbered[1]}]"
    return "a notebook cell" if re.search(r"[/\\]ipykernel_\d+[/\\]", file) else None


def _short(file):
    """Relative to the working folder where that is shorter."""
    try:
        relative = os.path.relpath(file) if os.path.isabs(file) else file
    except (OSError, ValueError):  # the working folder is gone, or on another drive
        return file
    return relative if not relative.startswith("..") else file
