"""Operators that lie, fail or answer NaN are found out, each on its own, and the others stay."""

import dataclasses
import math

import pytest
import torch

from cbgen.engine.kv_cache import LayerSpec
from cbgen.engine.operators import trials, trust
from cbgen.engine.operators.choice import choose_operators
from cbgen.engine.operators.reference import ReferenceOperators
from cbgen.engine.operators.trials import ModelShape, make_trials
from cbgen.engine.operators.trust import OPERATOR_NAMES, MixedOperators, find_faults, trusted
from cbgen.errors import CbgenError

PLAIN = LayerSpec(0, num_kv_heads=2, key_dim=16, value_dim=16, window=None, num_heads=6)
KINDS = {
    "plain": [PLAIN],
    "windows": [PLAIN, dataclasses.replace(PLAIN, layer_idx=1, window=4096)],
    "softcap": [dataclasses.replace(PLAIN, softcap=20.0)],
    "sinks": [dataclasses.replace(PLAIN, has_sinks=True, window=7)],
    "two-dims": [dataclasses.replace(PLAIN, value_dim=8, num_kv_heads=1)],
}
DTYPES = (torch.float32, torch.float16, torch.bfloat16)


def make_shape(kind="plain", dtype=torch.float32, vocab_size=101, hidden_size=24):
    return ModelShape(dtype, torch.device("cpu"), hidden_size, 20, vocab_size, tuple(KINDS[kind]))


class Honest(ReferenceOperators):
    name = "other"


class Faulty:
    """The reference with some operators whose result goes through `spoil`, which may raise."""

    name = "other"
    is_capturable = True

    def __init__(self, spoil, *faulty):
        reference = ReferenceOperators()  # of its own: there, one operator may call another
        for name in OPERATOR_NAMES:
            setattr(self, name, getattr(reference, name))

        def spoiled(operator):
            return lambda *arguments, **options: spoil(operator(*arguments, **options))

        for name in faulty:
            setattr(self, name, spoiled(getattr(reference, name)))


def raising(_):
    raise RuntimeError("first line\n  out of shared memory\n")


def off(result):
    return result + 1


def nan_at_end(result):
    result = result.clone()
    result.view(-1)[-1] = math.nan
    return result


FLOATS = ("rms_norm", "activation_mul", "rope_and_store", "attention")
FAULTS = [
    *((name, raising, "RuntimeError: out of shared memory") for name in OPERATOR_NAMES),
    *((name, off, "off by") for name in FLOATS),
    *((name, nan_at_end, "NaN in") for name in FLOATS),
    *((name, off, "other token ids") for name in ("argmax", "draw", "sample")),
    ("gather_step", lambda step: step._replace(positions=step.positions + 1), "other positions"),
    ("gather_sampling", lambda given: given._replace(forbids_stops=~given.forbids_stops), "other forbidding"),
    *((name, lambda result: result.double(), "torch.float64") for name in ("rms_norm", "argmax")),
    *((name, lambda result: result[1:], "in place of") for name in FLOATS),
]


@pytest.mark.parametrize(("operator", "spoil", "fault"), FAULTS)
def test_a_faulty_operator_is_replaced_and_no_other(operator, spoil, fault):
    notices = []
    operators = Faulty(spoil, operator)
    mixed = trusted(operators, make_shape(), notices.append)
    assert isinstance(mixed, MixedOperators)
    assert mixed.replaced == {operator}
    for name in OPERATOR_NAMES:
        assert (getattr(mixed, name) == getattr(operators, name)) is (name != operator)
    assert len(notices) == 1
    assert f"{operator} (" in notices[0]
    assert fault in notices[0]
    assert "\n" not in notices[0]
    assert find_faults(mixed, ReferenceOperators(), make_shape()) == {}


def test_one_notice_for_all_faults():
    notices = []
    mixed = trusted(Faulty(raising, "draw", "sample", "store"), make_shape(), notices.append)
    assert mixed.replaced == {"draw", "sample", "store"}
    assert len(notices) == 1
    assert notices[0].count("out of shared memory") == 1  # one reason, said once


def test_operators_without_a_sound_one_are_the_reference():
    notices = []
    operators = trusted(Faulty(raising, *OPERATOR_NAMES), make_shape(), notices.append)
    assert type(operators) is ReferenceOperators
    assert len(notices) == 1


def test_a_device_that_was_broken_is_said(monkeypatch):
    """A kernel that writes where it must not spoils all that comes after it in the process."""
    broken = []

    def breaking(_):
        broken.append(True)
        raise RuntimeError("an illegal memory access was encountered")

    norm = ReferenceOperators.rms_norm
    monkeypatch.setattr(
        ReferenceOperators,
        "activation_mul",
        lambda self, *arguments: raising(None) if broken else norm(self, arguments[0], torch.ones(40), 0.0),
    )
    with pytest.raises(CbgenError, match=r"rms_norm of other left .*illegal memory access.*--disable other"):
        trusted(Faulty(breaking, "rms_norm"), make_shape(), pytest.fail)


def test_a_word_when_it_takes_seconds(monkeypatch):
    notices = []
    for slow, count in ((1e9, 0), (0.0, 1)):
        monkeypatch.setattr(trust, "_SLOW_SECONDS", slow)
        trusted(Honest(), make_shape(), notices.append)
        assert len(notices) == count
    assert "compiling" in notices[0]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", KINDS)
def test_honest_operators_are_left_as_they_are(kind, dtype):
    class InDouble(Honest):
        """Attends and normalizes with other roundings."""

        def attention(self, call, query, *caches_and_metadata):
            return super().attention(call, query.double().to(query.dtype), *caches_and_metadata) * (1 + 1e-5)

        def rms_norm(self, x, weight, eps, residual=None):
            return super().rms_norm(x, weight, eps, residual) * (1 - 1e-5)

    operators = InDouble()
    assert trusted(operators, make_shape(kind, dtype), pytest.fail) is operators


@pytest.mark.parametrize(("faulty", "is_capturable"), [("store", True), ("sample", False), ("attention", False)])
def test_steps_are_recorded_unless_what_looks_at_the_host_is_in_them(faulty, is_capturable):
    assert MixedOperators(Faulty(None), ReferenceOperators(), frozenset({faulty})).is_capturable == is_capturable


# -- the trials themselves --------------------------------------------------------------------------------------------


def results(shape, operators=None):
    return [(trial.operator, trial.run(operators or ReferenceOperators())) for trial in make_trials(shape)]


@pytest.mark.parametrize("kind", KINDS)
def test_trials_cover_every_operator_and_are_the_same_each_time(kind):
    first, second = results(make_shape(kind)), results(make_shape(kind))
    assert {name for name, _ in first} == set(OPERATOR_NAMES) - ({"rope_and_store"} if kind == "two-dims" else set())
    for (operator, values), (_, again) in zip(first, second, strict=True):
        assert operator != "attention" or values["output"].isfinite().all()
        for name, value in values.items():
            assert torch.equal(value.float().nan_to_num(7.0), again[name].float().nan_to_num(7.0))


def test_long_windows_are_tried_once():
    kinds = make_shape("windows").kinds
    assert [kind.window for kind in kinds] == [None, 16]
    layers = tuple(dataclasses.replace(PLAIN, layer_idx=index, window=100 + index) for index in range(9))
    assert len(dataclasses.replace(make_shape(), layers=layers).kinds) == 1


class Misreading(Honest):
    """Attention with one mistake in what it sees."""

    def __init__(self, mistake):
        self.mistake = mistake

    def attention(self, call, query, keys, values, metadata):
        return super().attention(*self.mistake(call, query, keys, values, metadata))


def longer(call, query, keys, values, metadata):
    lens = [length + 1 for length in metadata.host_context_lens]
    changed = dataclasses.replace(metadata, context_lens=metadata.context_lens + 1, host_context_lens=lens)
    return call, query, keys, values, changed


def wider(call, query, keys, values, metadata):
    return dataclasses.replace(call, window=call.window and call.window + 1), query, keys, values, metadata


def narrower(call, query, keys, values, metadata):
    return dataclasses.replace(call, window=call.window and call.window - 1), query, keys, values, metadata


def uncapped(call, query, keys, values, metadata):
    return dataclasses.replace(call, softcap=None), query, keys, values, metadata


def without_sinks(call, query, keys, values, metadata):
    return dataclasses.replace(call, sinks=None), query, keys, values, metadata


def other_heads(call, query, keys, values, metadata):
    return call, query.flip(1), keys, values, metadata


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("kind", "mistake"),
    [
        ("plain", longer),
        ("plain", other_heads),
        ("windows", wider),
        ("windows", narrower),
        ("softcap", uncapped),
        ("sinks", without_sinks),
        ("sinks", wider),
    ],
)
def test_small_mistakes_of_attention_show(kind, mistake, dtype):
    operators = Misreading(mistake)
    assert find_faults(operators, ReferenceOperators(), make_shape(kind, dtype)).keys() == {"attention"}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("vocab_size", [8, 50, 32_001])
def test_no_rounding_moves_a_draw(vocab_size, dtype):
    """Every uniform number that is used, in `draw` and in `sample`, could be off by 0.0002 and draw the same."""
    shape = make_shape(dtype=dtype, vocab_size=vocab_size)
    drawn = [values for name, values in results(shape) if name in ("draw", "sample")]
    assert len(drawn) == 3
    assert len({int(token_id) for values in drawn for token_id in values["token ids"]}) > 4
    draw = ReferenceOperators.draw
    for shift in (-2e-4, 2e-4):

        class Shifted(Honest):
            def draw(self, logits, rows, params, shift=shift):
                return draw(self, logits, rows, dataclasses.replace(params, uniforms=params.uniforms + shift))

        again = [values for name, values in results(shape, Shifted()) if name in ("draw", "sample")]
        for values, others in zip(drawn, again, strict=True):
            assert torch.equal(values["token ids"], others["token ids"])


@pytest.mark.parametrize("name", ["temperature", "top_k", "top_p", "min_p"])
def test_a_filter_that_is_left_out_shows(name):
    neutral = {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0}[name]

    class Forgetful(Honest):
        def draw(self, logits, rows, params):
            values = getattr(params, name)
            values = values * 0 + values.dtype.type(neutral)
            return super().draw(logits, rows, dataclasses.replace(params, **{name: values}))

    assert "draw" in find_faults(Forgetful(), ReferenceOperators(), make_shape())


# -- the choice -------------------------------------------------------------------------------------------------------


def test_the_native_operators_are_sound_by_the_same_trials():
    operators = choose_operators(torch.device("cpu"), set(), print)
    assert find_faults(operators, ReferenceOperators(), make_shape()) == {}


def test_without_cuda_operators_there_is_the_reference():
    shape = dataclasses.replace(make_shape(), device=torch.device("cuda"))
    for arguments in ((set(), pytest.fail), ({"triton"}, pytest.fail, shape)):
        assert type(choose_operators(torch.device("cuda"), *arguments)) is ReferenceOperators
    assert type(choose_operators(torch.device("cpu"), {"native"}, pytest.fail)) is ReferenceOperators


def test_a_triton_that_does_not_load_is_said(monkeypatch):
    shape = make_shape()
    notices = []
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: raising(device))
    assert type(choose_operators(torch.device("cuda"), set(), notices.append, shape)) is ReferenceOperators
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert type(choose_operators(torch.device("cuda"), set(), notices.append, shape)) is ReferenceOperators
    assert len(notices) == 2
    assert all("slower" in notice and "Triton" in notice for notice in notices)


def test_trials_name_only_operators_there_are():
    assert all(callable(getattr(ReferenceOperators, trial.operator)) for trial in trials.make_trials(make_shape()))
