"""Joined layers: what is recognised, that it is only taken when it answers alike, and what it leaves behind."""

import gc
import weakref

import numpy as np
import pytest
import torch
from torch import nn

from cbgen.engine import fusion
from cbgen.engine.linear import GatedLinear, LinearFactory, NativeLinear, OneDnnLinear, PlainLinear, is_plain_linear
from cbgen.engine.loader import LoadedModel
from cbgen.engine.operators.native import NativeOperators
from cbgen.engine.operators.reference import ReferenceOperators
from cbgen.engine.preparation import prepare
from cbgen.errors import CbgenError
from tests.engine import parity
from tests.models import build_model

PROMPTS = [[3, 9, 27, 81, 50], [4], [5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15, 16, 17, 18, 19, 20, 21]]

# architecture -> what is joined of its two layers
FORMS = {
    "llama-ratio-3": {"layers": 2, "norms": 1},
    "qwen2-ratio-7": {"layers": 2, "norms": 1},  # biases
    "qwen3-ratio-4": {"layers": 2, "norms": 1},  # norms of heads
    "gemma2-softcap-window-8": {"attentions": 2, "mlps": 2, "norms": 9},  # four norms a layer, weights around zero
    "gemma3-window-8": {"attentions": 2, "mlps": 2, "norms": 13},  # norms of heads, weights around zero
    "mixtral-moe": {"attentions": 2, "norms": 5},
    "phi3-fused-qkv": {"norms": 5},
    "olmo2": {"mlps": 2, "norms": 9},  # norms over all heads at once
    "smollm3-no-rope-layers": {"layers": 1, "mlps": 1, "norms": 3},  # one layer that does not rotate
    "cohere-parallel": {"mlps": 2},
    "gpt2-learned-positions": {},
}


def _load(name: str, directory, dtype: str = "float32", **changes) -> LoadedModel:
    return parity.load(build_model(name, directory, **changes), dtype)


@pytest.mark.parametrize("name", FORMS)
def test_what_is_recognised(name, tmp_path):
    assert prepare(_load(name, tmp_path), set(), print).fused == FORMS[name]


@pytest.mark.parametrize("disabled", [{"fusion"}, {"fusion", "packing"}, {"native", "fusion", "packing"}])
def test_nothing_is_joined_without_fusion(disabled, tmp_path):
    loaded = prepare(_load("llama-ratio-3", tmp_path), disabled, print)
    assert not loaded.fused
    assert isinstance(loaded.operators, NativeOperators) == ("native" not in disabled)


def test_a_layer_that_computes_more_than_it_shows_is_left_to_its_parts(tmp_path):
    """Granite scales what it adds by a number that no module holds."""
    loaded = _load("granite-scaled-logits", tmp_path, residual_multiplier=0.22)
    expected = parity.generate(loaded, PROMPTS, 12)
    loaded = prepare(loaded, set(), print)
    assert loaded.fused == {"attentions": 2, "mlps": 2, "norms": 5}
    assert parity.generate(loaded, PROMPTS, 12) == expected


@pytest.mark.parametrize("form", ["_norm", "_mlp", "_attention"])
def test_a_part_that_answers_otherwise_is_left_alone(form, tmp_path, monkeypatch):
    """Were a guess wrong, the comparison finds it; here, by a fault in each joined form."""

    def spoil(cls):
        original = cls.forward

        def forward(self, *args, **kwargs):
            result = original(self, *args, **kwargs)
            return (result[0] * 1.5, None) if isinstance(result, tuple) else result * 1.5

        monkeypatch.setattr(cls, "forward", forward)

    spoil({"_norm": fusion.FusedNorm, "_mlp": fusion.FusedMlp, "_attention": fusion.FusedAttention}[form])
    loaded = _load("llama-ratio-3", tmp_path)
    expected = parity.generate(loaded, PROMPTS, 12)
    loaded = prepare(loaded, set(), print)
    everything = {"attentions": 2, "mlps": 2, "norms": 5}
    del everything[{"_norm": "norms", "_mlp": "mlps", "_attention": "attentions"}[form]]
    assert loaded.fused == everything
    assert parity.generate(loaded, PROMPTS, 12) == expected


def test_a_fault_that_only_shows_in_the_whole_is_an_error(tmp_path, monkeypatch):
    monkeypatch.setattr(fusion.Fuser, "_agrees", lambda *_: True)
    loaded = _load("granite-scaled-logits", tmp_path, residual_multiplier=0.22)
    with pytest.raises(CbgenError, match="changed its answers"):
        prepare(loaded, set(), print)


def test_original_weights_are_freed(tmp_path):
    loaded = _load("llama-ratio-3", tmp_path, "bfloat16")
    weights = {name: weakref.ref(p) for name, p in loaded.model.named_parameters()}
    loaded = prepare(loaded, set(), print)
    gc.collect()
    left = [name for name, weight in weights.items() if weight() is not None]
    if loaded.packing == "native":
        assert left == ["model.embed_tokens.weight"]
    else:
        assert not any("proj" in name for name in left)


def test_joining_never_holds_more_than_one_layer_twice(tmp_path, monkeypatch):
    """An 8B model has to fit beside what its joined layers take while they are made."""
    loaded = _load("llama-ratio-3", tmp_path, num_hidden_layers=6)
    originals = [weakref.ref(parameter) for parameter in loaded.model.parameters()]
    made, sizes = [], []
    make = LinearFactory.make

    def counting_make(self, weight, bias):
        linear = make(self, weight, bias)
        if all(weight.data_ptr() != o().data_ptr() for o in originals if o() is not None):
            made.append(weakref.ref(linear.weight))
        alive = [reference() for reference in (*originals, *made)]
        sizes.append(sum(tensor.nbytes for tensor in alive if tensor is not None))
        return linear

    monkeypatch.setattr(LinearFactory, "make", counting_make)
    whole = sum(parameter.nbytes for parameter in loaded.model.parameters())
    layer = sum(parameter.nbytes for parameter in loaded.model.model.layers[0].parameters())
    assert prepare(loaded, {"native"}, print).fused["layers"] == 6
    assert len(made) == 12, "projections, and gates with what they gate; the rest is taken as it is"
    assert whole < max(sizes) <= whole + layer


def test_every_linear_layer_is_packed_when_there_is_a_kernel(tmp_path):
    loaded = prepare(_load("phi3-fused-qkv", tmp_path, "bfloat16"), set(), print)
    if loaded.packing == "none":
        pytest.skip("this CPU has no bfloat16 products")
    assert not any(is_plain_linear(module) for module in loaded.model.modules())
    assert loaded.fused["linears"] == 9


def test_bfloat16_of_joined_layers_is_as_close_to_float32_as_the_original(tmp_path):
    directory = build_model("llama-ratio-3", tmp_path)
    exact = parity.load(directory)
    errors = []
    for disabled in ({"native", "fusion", "packing"}, set()):
        loaded = prepare(parity.load(directory, "bfloat16"), disabled, print)
        errors.append(_distance(loaded, exact))
    assert errors[1] < 1.2 * errors[0]


def _distance(loaded: LoadedModel, exact: LoadedModel) -> float:
    """How far the logits of a prompt are from those of the float32 model whose weights are rounded alike."""
    from cbgen.engine.attention.base import AttentionContext, AttentionMetadata
    from cbgen.engine.kv_cache import KVCache
    from cbgen.engine.loader import forward
    from cbgen.engine.model_input import ModelInput
    from cbgen.engine.operators.backend import PagedBackend
    from cbgen.engine.sampling_input import SamplingInput

    for parameter in exact.model.parameters():
        parameter.data.copy_(parameter.data.bfloat16().float())
    logits = []
    num_tokens = 40
    ids = (np.arange(num_tokens) * 5 + 3) % exact.vocab_size
    for model in (loaded, exact):
        step = ModelInput(
            ids, np.arange(num_tokens), np.arange(num_tokens), np.array([0, num_tokens], dtype=np.int32),
            np.array([num_tokens], dtype=np.int32), np.arange(3, dtype=np.int32)[None], 0, np.arange(num_tokens), [],
            SamplingInput.from_sequences([]),
        )  # fmt: skip
        backend = PagedBackend(
            model.operators,
            KVCache(model.layers, 3, 16, model.dtype, model.device),
            AttentionMetadata.from_model_input(step, model.device),
        )
        indices = torch.arange(num_tokens)
        context = AttentionContext(backend, {})
        logits.append(forward(model.model, torch.from_numpy(ids), indices, indices, context).double())
    return float((logits[0] - logits[1]).norm() / logits[1].norm())


# -- linear layers ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("packing", ["native", "onednn", "none"])
@pytest.mark.parametrize("has_bias", [False, True])
def test_forms_of_linear_layers_compute_alike(packing, has_bias):
    operators = prepared_operators()
    factory = LinearFactory(operators, getattr(operators, "gemm", None), packing)
    torch.manual_seed(3)
    modules = [nn.Linear(64, 48, bias=has_bias, dtype=torch.bfloat16) for _ in range(2)]
    x = torch.randn(2, 7, 64).bfloat16()
    with torch.inference_mode():
        joined, gated = factory.join(modules), factory.gated(*fusion.joined_weights(modules), "silu")
        expected = [module.double()(x.double()) for module in modules]
        torch.testing.assert_close(joined(x).double(), torch.cat(expected, dim=-1), rtol=2**-7, atol=1e-2)
        product = nn.functional.silu(expected[0]) * expected[1]
        torch.testing.assert_close(gated(x[0]).double(), product[0], rtol=2**-6, atol=1e-2)
        residual = torch.randn(7, 96).bfloat16()
        total = residual.double() + torch.cat(expected, dim=-1)[0]
        joined.add_to(x[0], residual)
        torch.testing.assert_close(residual.double(), total, rtol=2**-6, atol=1e-2)
        for shape in ((1, 0, 64), (0, 64)):  # a step in which no row samples has no logits to compute
            assert joined(torch.empty(shape, dtype=torch.bfloat16)).shape == (*shape[:-1], 96)
        assert gated(torch.empty(0, 64, dtype=torch.bfloat16)).shape == (0, 48)
    kinds = {"native": (NativeLinear, PlainLinear), "onednn": (OneDnnLinear,), "none": (PlainLinear,)}
    assert isinstance(joined, kinds[packing])


def prepared_operators():
    from cbgen.engine.operators.choice import choose_operators

    return choose_operators(torch.device("cpu"), set(), print)


def test_a_gate_that_panels_do_not_divide_is_activated_apart():
    operators = prepared_operators()
    factory = LinearFactory(operators, getattr(operators, "gemm", None), "native")
    weight = torch.randn(2 * 24, 64).bfloat16()
    gated = factory.gated(weight, None, "gelu_tanh")
    assert isinstance(gated, GatedLinear)
    x = torch.randn(5, 64).bfloat16()
    whole = x.double() @ weight.double().T
    expected = nn.functional.gelu(whole[:, :24], approximate="tanh") * whole[:, 24:]
    torch.testing.assert_close(gated(x).double(), expected, rtol=2**-6, atol=2e-2)


def test_float32_is_not_packed():
    factory = LinearFactory(ReferenceOperators(), None, "native")
    assert isinstance(factory.make(torch.randn(4, 6), None), PlainLinear)
