"""Sampling parameters: what is in range, and how a row's overrides are read."""

import dataclasses
import json
import math
from typing import Any

import pytest

from cbgen.params import PARAM_NAMES, SamplingParams, check_vocabulary, merge_params, shown

BASE = SamplingParams(max_tokens=7, temperature=0.5, stop=("x",), seed=3)


@pytest.mark.parametrize(
    ("name", "values"),
    [
        ("n", [1, 128]),
        ("max_tokens", [1, 10**9]),
        ("min_tokens", [0, 5]),
        ("temperature", [0.0, 5e-324, 1e-9, 100.0, 1e6]),
        ("top_k", [0, 1]),
        ("top_p", [1e-9, 1.0]),
        ("min_p", [0.0, 1.0]),
        ("repetition_penalty", [0.001, 0.5, 2.0, 1000.0]),
        ("logit_bias", [(), ((0, -100.0), (5, 100.0))]),
        ("seed", [0, 2**63 - 1]),
        ("stop", [(), ("a", "b")]),
        ("stop_token_ids", [(), (0, 5)]),
    ],
)
def test_values_in_range_are_taken(name: str, values: list[Any]) -> None:
    for value in values:
        assert getattr(SamplingParams(**{name: value}), name) == value


@pytest.mark.parametrize(
    ("name", "values"),
    [
        ("n", [0, -1, 129]),
        ("max_tokens", [0, -1, 2**63]),
        ("min_tokens", [-1, 2**63]),
        ("temperature", [-0.1, math.inf, math.nan, 1.1e6, 1e308]),
        ("top_k", [-2, 2**63]),
        ("top_p", [0.0, 1.01, math.nan]),
        ("min_p", [-0.1, 1.1, math.nan]),
        ("repetition_penalty", [0.0, -1.0, math.inf, math.nan, 5e-324, 1e-4, 1001.0, 1e39]),
        ("seed", [-1, 2**63]),
        ("stop", [("",), ("a", "")]),
        ("stop_token_ids", [(-1,), (3, -1), (2**63,)]),
    ],
)
def test_values_out_of_range_are_refused_by_name_and_value(name: str, values: list[Any]) -> None:
    for value in values:
        with pytest.raises(ValueError, match=f"^{name} must be") as refused:
            SamplingParams(**{name: value})
        assert repr(value) in str(refused.value)


def test_only_temperature_zero_and_what_float32_takes_for_it_is_greedy() -> None:
    assert SamplingParams(temperature=0.0).is_greedy
    assert not SamplingParams(temperature=1e-9).is_greedy
    assert SamplingParams(temperature=1e-46).is_greedy, "no float32 can be divided by it"


def test_params_do_not_change() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        BASE.seed = 4  # type: ignore[misc]


def test_as_dict_is_json_with_every_parameter() -> None:
    assert tuple(json.loads(json.dumps(BASE.as_dict()))) == PARAM_NAMES


# -- overrides --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("overrides", [{}, {"temperature": None, "stop": None}])
def test_nothing_given_is_the_base_itself(overrides: dict[str, Any]) -> None:
    assert merge_params(BASE, overrides) is BASE


def test_overrides_win_over_the_base_and_leave_the_rest() -> None:
    assert merge_params(BASE, {"max_tokens": 9, "seed": None}) == dataclasses.replace(BASE, max_tokens=9)


@pytest.mark.parametrize(
    ("name", "given", "taken"),
    [
        ("temperature", 1, 1.0),
        ("max_tokens", 9.0, 9),
        ("top_k", -1, 0),
        ("top_k", 40, 40),
        ("stop", "END", ("END",)),
        ("stop", ["a", "b"], ("a", "b")),
        ("stop", [], ()),
        ("stop_token_ids", 5, (5,)),
        ("stop_token_ids", [5, 6], (5, 6)),
        ("n", 3.0, 3),
        ("logit_bias", {}, ()),
        ("logit_bias", {"7": 1, "3": -100}, ((3, -100.0), (7, 1.0))),
        ("logit_bias", {7: 0.5}, ((7, 0.5),)),
        ("ignore_eos", True, True),
        ("seed", 2**63 - 1, 2**63 - 1),
    ],
)
def test_one_value_may_be_spelled_in_several_ways(name: str, given: Any, taken: Any) -> None:
    value = getattr(merge_params(BASE, {name: given}), name)

    assert value == taken
    assert type(value) is type(taken)


@pytest.mark.parametrize(
    ("name", "value", "words"),
    [
        ("temperature", "1", "must be a number"),
        ("temperature", True, "must be a number"),
        ("temperature", [1], "must be a number"),
        ("max_tokens", 1.5, "must be a whole number"),
        ("max_tokens", math.inf, "must be a whole number"),
        ("max_tokens", math.nan, "must be a whole number"),
        ("seed", "3", "must be a number"),
        ("top_k", False, "must be a number"),
        ("stop", 3, "a string or a list of strings"),
        ("stop", ["a", 3], "a string or a list of strings"),
        ("stop", {"a": 1}, "a string or a list of strings"),
        ("stop_token_ids", True, "a list of token ids"),
        ("stop_token_ids", [1, True], "a list of token ids"),
        ("stop_token_ids", ["1"], "a list of token ids"),
        ("stop_token_ids", 1.0, "a list of token ids"),
        ("ignore_eos", 1, "true or false"),
        ("skip_special_tokens", "yes", "true or false"),
        ("max_tokens", 0, "at least 1"),
        ("top_k", -2, "0 or -1"),
        ("n", 0, "from 1 to 128"),
        ("n", 1.5, "a whole number"),
        ("n", True, "must be a number"),
        ("logit_bias", [[1, 2]], "an object of token ids"),
        ("logit_bias", "-100", "an object of token ids"),
    ],
)
def test_wrong_types_are_refused_by_name_and_value(name: str, value: Any, words: str) -> None:
    with pytest.raises(ValueError, match=f"^{name} must be .*{words}|^{name} {words}") as refused:
        merge_params(BASE, {name: value})
    assert repr(value) in str(refused.value)


@pytest.mark.parametrize("name", PARAM_NAMES)
def test_every_parameter_refuses_an_object(name: str) -> None:
    with pytest.raises(ValueError, match=name):
        merge_params(BASE, {name: {"a": 1}})


def test_unknown_parameter_is_refused_with_the_known_ones() -> None:
    with pytest.raises(
        ValueError, match=r"unknown sampling parameter 'temprature'; known are n, max_tokens,.*temperature"
    ):
        merge_params(BASE, {"temprature": 1})


def test_unknown_parameter_that_is_null_asks_for_nothing() -> None:
    assert merge_params(BASE, {"temprature": None}) is BASE


@pytest.mark.parametrize("key", ["x", "", "-1", "1.0", " 1", "\u0663", "1" * 20, -1, 2**63, True, 1.0, None])
def test_a_logit_bias_is_for_token_ids(key: Any) -> None:
    with pytest.raises(ValueError, match=r"^logit_bias must have token ids as keys, not ") as refused:
        merge_params(BASE, {"logit_bias": {key: 1}})
    assert repr(key) in str(refused.value)


@pytest.mark.parametrize("bias", [100.1, -101, math.nan, math.inf, "1", True, 10**400])
def test_a_logit_bias_is_a_number_from_minus_100_to_100(bias: Any) -> None:
    with pytest.raises(ValueError, match=r"^logit_bias "):
        merge_params(BASE, {"logit_bias": {"1": bias}})


@pytest.mark.parametrize(
    ("name", "value"),
    [(name, 10**400) for name in PARAM_NAMES] + [("logit_bias", {"5": 10**5000}), ("temperature", [10**5000])],
)
def test_numbers_beyond_any_register_are_refused_by_name(name: str, value: Any) -> None:
    with pytest.raises(ValueError, match=f"^{name} "):
        merge_params(BASE, {name: value})


def test_messages_stay_short() -> None:
    with pytest.raises(ValueError, match=r"^stop must be") as refused:
        merge_params(BASE, {"stop": [1] * 100_000})
    assert len(str(refused.value)) < 200
    assert shown(10**5000) == "a number of thousands of digits"


def test_params_with_a_bias_can_be_hashed_and_written() -> None:
    params = merge_params(BASE, {"logit_bias": {"7": 1, "3": -100}})
    assert hash(params) != hash(BASE)
    assert json.loads(json.dumps(params.as_dict()))["logit_bias"] == {"3": -100.0, "7": 1.0}
    assert merge_params(BASE, params.as_dict()) == params


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        ({"stop_token_ids": [3, 50, 9]}, "stop token id 50"),
        ({"logit_bias": {"191222": -100, "1": 1}}, "logit_bias token id 191222"),
    ],
)
def test_token_ids_outside_the_vocabulary_are_refused_by_name(overrides: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=rf"^{words} is outside the vocabulary \(0 to 49\)$"):
        check_vocabulary(merge_params(BASE, overrides), 50)


def test_the_last_id_of_the_vocabulary_is_in_it() -> None:
    check_vocabulary(merge_params(BASE, {"stop_token_ids": [49], "logit_bias": {"49": 1}}), 50)
    check_vocabulary(BASE, 1)


def test_null_biases_are_none() -> None:
    """Arrow gives every row the token ids of all rows."""
    assert merge_params(SamplingParams(), {"logit_bias": {"5": None, "7": 1.5}}).logit_bias == ((7, 1.5),)
    assert merge_params(SamplingParams(), {"logit_bias": {"5": None}}).logit_bias == ()
