"""Published kinds of generative programs, each with a step of its own, train on replicas as on one device."""

import dataclasses
from collections.abc import Callable

import keras
import pytest

import keras_mirror as km
from tests.equivalence import programs_generative as gans
from tests.equivalence import programs_latent as latent
from tests.equivalence import programs_patches as patches
from tests.equivalence import programs_translation as translation
from tests.equivalence.harness import SEED, X, assert_same, assert_same_models, trained


@dataclasses.dataclass
class Program:
    """`build()` gives the compiled model; `data` are arrays, the arguments of `fit`; `first` is called before it."""

    build: Callable
    data: tuple
    first: Callable = lambda model: None
    validated: bool = False
    tol: float = 2e-5


PROGRAMS = {
    "dcgan": Program(gans.dcgan, (gans.IMAGES,)),
    "conditional gan": Program(gans.conditional_gan, (gans.IMAGES, gans.ONE_HOT)),
    "wgan-gp": Program(gans.wgan_gp, (gans.IMAGES,)),
    "gan with adaptive augmentation": Program(gans.gan_with_augmentation, (gans.IMAGES,)),
    "cyclegan": Program(translation.cyclegan, (translation.HORSES, translation.ZEBRAS)),
    "gaugan": Program(translation.gaugan, (translation.MASKS, translation.HORSES)),
    "adain": Program(translation.adain, (translation.STYLES, translation.COLOURS), validated=True),
    "zero-dce": Program(patches.zero_dce, (patches.COLOURS,), validated=True),
    "vae": Program(latent.vae, (gans.IMAGES,)),
    "cvae": Program(latent.cvae, (gans.IMAGES, gans.ONE_HOT), validated=True),
    "vq-vae": Program(latent.vq_vae, (gans.IMAGES,)),
    "ddim": Program(latent.ddim, (gans.IMAGES,), lambda model: model.normalizer.adapt(gans.IMAGES), validated=True),
    "real nvp": Program(latent.real_nvp, (X,), validated=True),
    "nerf": Program(patches.nerf, (patches.PICTURES, (patches.RAYS, patches.DEPTHS)), validated=True),
    "masked images": Program(patches.masked_images, (gans.IMAGES,), validated=True),
    "i-jepa": Program(patches.i_jepa, (gans.IMAGES,)),
}


def used(program, make, rows, batch):
    """The model after two epochs, and what it logged. Unlike the harness' runs, any warning of the package's is an error."""
    keras.backend.clear_session()
    keras.utils.set_random_seed(SEED)
    model = make()
    keras.utils.set_random_seed(SEED)
    program.first(model)
    data = keras.tree.map_structure(lambda array: array[:rows], program.data)
    few = keras.tree.map_structure(lambda array: array[:5], program.data)
    return model, trained(model, *data, batch_size=batch, validation_data=few if program.validated else None)


@pytest.mark.parametrize("replicas, rows, batch", [(2, 28, 14), (3, 29, 7)], ids=["even", "uneven"])
@pytest.mark.parametrize("name", PROGRAMS)
def test_program(name, replicas, rows, batch):
    program = PROGRAMS[name]

    def plain():
        model = program.build()
        model.jit_compile, model.run_eagerly = False, True  # eager costs less than to trace, and gives the same numbers
        return model

    def mirrored():
        return km.mirrored_model(program.build, devices=[f"CPU:{i}" for i in range(replicas)])

    one, logs_of_one = used(program, plain, rows, batch)
    many, logs_of_many = used(program, mirrored, rows, batch)
    assert_same_models(one, many, program.tol)
    assert_same(logs_of_one, logs_of_many, program.tol)
