"""The strategy for the devices of one machine."""

import tensorflow as tf

from keras_mirror.global_batches import GlobalBatchStrategy
from keras_mirror.hardware import resolve
from keras_mirror.provenance import watch


class MirroredStrategy(GlobalBatchStrategy, tf.distribute.MirroredStrategy):
    """`tf.distribute.MirroredStrategy` whose replicas together do what one device would.

    A drop-in subclass. It overrides the public methods through which `fit` and every hand-written
    loop pass:

    * `experimental_distribute_dataset` splits each global batch evenly (5 rows on 4 replicas are
      2, 1, 1, 1); no replica is empty while rows suffice.
    * `run` counts the rows of every replica inside the step.
    * `reduce` also takes values whose length differs from replica to replica, bools and strings.

    Several strategies, of different size too, live side by side in one process.

    Args:
        devices: As in `tf.distribute.MirroredStrategy`: `None` for every visible GPU (one CPU
            where there is none) or a list of device names; also a number of replicas or `"idle"`,
            as in `mirrored_model`.
        cross_device_ops: How values travel between devices. `None` takes
            `tf.distribute.NcclAllReduce` for several GPUs and `tf.distribute.ReductionToOneDevice`
            else; TensorFlow's own default, collectives, breaks on CPUs as soon as a process holds
            two strategies or one `fit` was interrupted.

    Raises:
        ValueError: If a device does not exist or is named twice; TensorFlow would hang instead.

    Example:

    >>> import keras_mirror as km
    >>> import tensorflow as tf
    >>> strategy = km.MirroredStrategy(km.virtual_cpus(2))
    >>> dataset = strategy.experimental_distribute_dataset(tf.data.Dataset.range(6).batch(3))
    >>> for batch in dataset:
    ...     print(strategy.reduce("SUM", strategy.run(tf.reduce_sum, args=(batch,)), axis=None).numpy())
    3
    12
    """

    def __init__(self, devices=None, cross_device_ops=None):
        watch()
        names = resolve(devices)
        if cross_device_ops is None:
            all_gpus = len(names) > 1 and all(name.startswith("GPU") for name in names)
            cross_device_ops = tf.distribute.NcclAllReduce() if all_gpus else tf.distribute.ReductionToOneDevice()
        super().__init__(names, cross_device_ops)
        self._prepare(names, range(len(names)))
