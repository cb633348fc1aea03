"""What can be said of a model's files without loading it, and what is wrong with them, by name."""

import json

import pytest

from cbgen.engine.model_files import find_model, sampling_defaults
from cbgen.errors import ModelError


@pytest.fixture
def model(tmp_path):
    (tmp_path / "config.json").write_text("{}")
    return tmp_path


def defaults(model, config):
    (model / "generation_config.json").write_text(json.dumps(config))
    return sampling_defaults(find_model(str(model)))


def test_sampling_follows_the_file_as_transformers_does(model):
    assert defaults(model, {"temperature": 0.5}) == {}
    assert defaults(model, {"do_sample": True}) == {"temperature": 1.0}
    assert defaults(model, {"do_sample": True, "temperature": None, "top_p": None}) == {"temperature": 1.0}
    assert defaults(model, {"do_sample": True, "temperature": 0.5, "top_k": 5}) == {"temperature": 0.5, "top_k": 5}


@pytest.mark.parametrize(
    ("config", "says"),
    [
        ([], "must hold a JSON object"),
        ({"do_sample": True, "temperature": "0.5"}, "temperature must be a number"),
        ({"do_sample": True, "top_p": 1.5}, "top_p must be"),
    ],
)
def test_a_bad_generation_config_is_named(model, config, says):
    with pytest.raises(ModelError, match=says) as caught:
        defaults(model, config)
    assert "generation_config.json" in str(caught.value)


@pytest.mark.parametrize(
    ("head", "says"), [(b"version https://git-lfs.github.com/spec/v1\noid", "git lfs pull"), (b"", "is empty")]
)
def test_weights_that_were_never_downloaded_are_named(model, head, says):
    (model / "model.safetensors").write_bytes(head)
    with pytest.raises(ModelError, match=says):
        find_model(str(model))


def test_names_that_are_no_models_say_what_to_do(tmp_path):
    (tmp_path / "adapter_config.json").write_text("{}")
    with pytest.raises(ModelError, match="adapter"):
        find_model(str(tmp_path))
    with pytest.raises(ModelError, match="such as org/name"):
        find_model("https://huggingface.co/org/name")
