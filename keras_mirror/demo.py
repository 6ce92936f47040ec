"""`make demo`: a small CNN on real handwritten digits, on two CPU replicas, against one device."""

import argparse

import keras
import numpy as np

import keras_mirror as km


def digits():
    """The 1,797 handwritten digits that scikit-learn ships: images in [0, 1] and labels."""
    try:
        from sklearn.datasets import load_digits
    except ImportError:
        raise SystemExit("The demo trains on scikit-learn's digits: pip install 'keras_mirror[demo]'.") from None
    data = load_digits()
    return (data.images[..., None] / 16).astype("float32"), data.target


def build_fn():
    """A small CNN, compiled."""
    model = keras.Sequential(
        [
            keras.Input((8, 8, 1)),
            keras.layers.Conv2D(16, 3, activation="relu"),
            keras.layers.Conv2D(32, 3, activation="relu"),
            keras.layers.Flatten(),
            keras.layers.Dense(10),
        ]
    )
    model.compile(
        keras.optimizers.SGD(0.05, momentum=0.9),
        keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        metrics=["accuracy"],
    )
    return model


def main(arguments=None):
    """Trains on `--replicas` replicas and on one device, and compares the weights."""
    parser = argparse.ArgumentParser(prog="python -m keras_mirror.demo", description=__doc__)
    parser.add_argument("--replicas", type=int, default=2, help="number of replicas (default: 2)")
    parser.add_argument("--epochs", type=int, default=5, help="number of epochs (default: 5)")
    parser.add_argument("--batch-size", type=int, default=64, help="rows of a global batch (default: 64)")
    options = parser.parse_args(arguments)
    devices = km.virtual_cpus(options.replicas)
    images, labels = digits()
    fit = dict(batch_size=options.batch_size, epochs=options.epochs)

    print(f"{len(images)} handwritten digits on {options.replicas} CPU replicas\n")
    keras.utils.set_random_seed(1)
    model = km.mirrored_model(build_fn, devices=devices)
    print(km.plan((images, labels), model, batch_size=options.batch_size), "\n")
    logger, auditor = km.ReplicaBatchLogger(), km.ScopeAuditor()
    keras.utils.set_random_seed(1)
    model.fit(images, labels, callbacks=[logger, auditor], **fit)
    print(f"\n{logger.report()}\n\n{auditor.report()}\n")

    print("The same training on one device, for comparison ...")
    keras.utils.set_random_seed(1)
    one = build_fn()
    keras.utils.set_random_seed(1)
    one.fit(images, labels, verbose=0, **fit)
    accuracy = model.evaluate(images, labels, verbose=0, return_dict=True)["accuracy"]
    difference = max(float(np.max(np.abs(a - b))) for a, b in zip(model.get_weights(), one.get_weights()))
    print(f"\naccuracy on {options.replicas} replicas: {accuracy:.4f}")
    print(f"largest weight difference against one device: {difference:.1e}")
    return difference


if __name__ == "__main__":
    main()
