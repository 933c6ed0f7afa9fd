"""A recipe for the task on given pictures, and single samples of its data."""

from stepsnet.settings.config import ClassificationRecipe, ModelSpec


def recipe_of(batch_size=4, **settings):
    return ClassificationRecipe(
        name="pictures", model=ModelSpec("test_vit"), data="folder:pictures", batch_size=batch_size, **settings
    )


def sample(samples, *key):
    """The input of (epoch, index, copy) by itself, its label, and the name of what could not be decoded."""
    return samples._read(key, samples.transform)
