"""Every private name of Keras and TensorFlow that this package touches, one small function each.

Checked on Keras 3.10.0 with TensorFlow 2.18.0 and Keras 3.15.1 with TensorFlow 2.21.0. Each
function is pinned by a test in `tests/test_internals.py` that says what may be deleted here once
upstream changes. `docs/internals.md` says why each is needed.
"""

from keras_mirror.internals.of_keras import *  # noqa: F403
from keras_mirror.internals.of_tensorflow import *  # noqa: F403
from keras_mirror.internals.of_workers import *  # noqa: F403
