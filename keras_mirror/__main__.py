"""`python -m keras_mirror`."""

import sys

from keras_mirror.cli import main

sys.exit(main())
