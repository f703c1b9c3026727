"""What FSDP divides. (That all ranks load it alike: ``tests/distributed/test_sharded.py``.)"""

from conftest import load

from grpo.model import decoder_layers


def test_the_layers_of_a_model_are_its_largest_list(random_model):
    model = load(random_model).model
    assert decoder_layers(model) == list(model.model.layers)
