"""OpenAI Batch lines: which rows are some, what a request asks for, and what an answer looks like.

The fuzz runs the same 2,000 examples each time, or as many new ones as CBGEN_EXAMPLES says.
"""

import json
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cbgen.config import PromptConfig
from cbgen.data.lines import dumps, loads
from cbgen.data.openai import URLS, batch_record, is_batch_line, parse_request
from cbgen.data.prompts import PromptBuilder
from cbgen.errors import ROW_ERROR_CODES, RowError, RowFailure
from cbgen.params import SamplingParams, merge_params
from cbgen.records import Completion, Position, Prompt, Row, Sample
from tests.fuzzing import fuzz
from tests.helpers import BYTE_VOCAB_SIZE, ByteTokenizer, make_row

URL = "/v1/completions"


def line(**changes: Any) -> dict[str, Any]:
    """A good line with some fields changed; those that are `...` are missing."""
    columns = {"custom_id": "a", "method": "POST", "url": URL, "body": {"prompt": "x"}, **changes}
    return {name: value for name, value in columns.items() if value is not ...}


def request(**body: Any) -> dict[str, Any]:
    return parse_request(make_row(**line(body={"prompt": "x", **body})))[2]


# -- which rows are requests ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "columns",
    [
        line(),
        line(custom_id=None),
        line(body=...),
        line(body=None),
        line(body="hi"),
        line(body={}),
        line(method=...),
        line(method="GET"),
        line(method=None),
        line(url=...),
        line(url=None),
        line(url=7),
        line(url="/v1/images/generations"),
        line(url="/chat/completions", method=...),
        line(url="https://api.example.org/v1/chat/completions"),
        line(url="/v1/embeddings", body=...),
        line(custom_id=...),
        line(custom_id=..., url="/v1/embeddings"),
    ],
    ids=str,
)
def test_lines_of_a_batch_file_are_requests_even_when_something_is_wrong_with_them(columns: dict[str, Any]) -> None:
    assert is_batch_line(columns)


@pytest.mark.parametrize(
    "columns",
    [
        {},
        {"prompt": "x"},
        {"custom_id": 1, "prompt": "x"},
        {"custom_id": 1, "url": "https://example.org", "prompt": "x"},
        {"custom_id": 1, "url": "https://example.org", "body": "text of the page", "prompt": "x"},
        {"custom_id": 1, "url": "https://example.org", "body": {"html": "x"}},
        {"custom_id": 1, "url": None, "body": {"html": "x"}},
        {"custom_id": 1, "url": "/v1/docs", "prompt": "x"},
        {"custom_id": 1, "body": {"text": "x"}},
        {"custom_id": 1, "method": "GET", "url": "/index.html", "prompt": "x"},
        {"custom_id": 1, "method": "ablation", "prompt": "x"},
        {"method": "GET", "url": "/v1/docs", "body": "text of the page", "prompt": "x"},
        line(custom_id=..., method=...),
        line(custom_id=..., url="/index.html"),
    ],
    ids=str,
)
def test_rows_of_the_users_own_are_no_requests(columns: dict[str, Any]) -> None:
    assert not is_batch_line(columns)


# -- what a request asks for ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("custom_id", [..., None])
def test_a_request_without_custom_id_is_refused(custom_id: Any) -> None:
    with pytest.raises(RowFailure, match="line 1: custom_id is missing; give each request its own") as refused:
        parse_request(make_row(**line(custom_id=custom_id)))
    assert refused.value.error.code == "invalid_request"


def test_body_fields_become_sampling_parameters() -> None:
    asked = request(
        model="gpt-x",
        n=3,
        max_tokens=5,
        temperature=0.5,
        top_p=0.9,
        seed=1,
        stop=["a"],
        logit_bias={"5": -100},
        user="u",
    )
    assert asked == {
        "n": 3,
        "max_tokens": 5,
        "temperature": 0.5,
        "top_p": 0.9,
        "seed": 1,
        "stop": ["a"],
        "logit_bias": {"5": -100},
    }


def test_null_asks_for_nothing() -> None:
    assert request(n=None, logit_bias=None, logprobs=None, best_of=None, echo=None, unheard_of=None) == {}


@pytest.mark.parametrize(
    "neutral",
    [
        {"logprobs": False}, {"top_logprobs": 0}, {"best_of": 1}, {"echo": False}, {"stream": False}, {"tools": []},
        {"tool_choice": "auto"}, {"frequency_penalty": 0.0}, {"response_format": {"type": "text"}},
        {"response_format": {"type": "text", "json_schema": None}},
        {"modalities": ["text"]}, {"parallel_tool_calls": True}, {"parallel_tool_calls": False}, {"functions": []},
        {"function_call": "none"}, {"suffix": ""}, {"length_penalty": 1.0}, {"length_penalty": 1},
        {"prompt_cache_key": "k"}, {"stream_options": None}, {"reasoning_effort": None},
        {"add_generation_prompt": True},
    ],
    ids=str,
)  # fmt: skip
def test_fields_that_ask_for_what_happens_anyway_are_fine(neutral: dict[str, Any]) -> None:
    assert request(**neutral) == {}


def test_one_sample_is_what_happens_anyway() -> None:
    assert merge_params(SamplingParams(), request(n=1)) == SamplingParams()


@pytest.mark.parametrize(
    "asked",
    [
        {"logprobs": 0}, {"logprobs": 0.0}, {"best_of": True}, {"stream": 0}, {"frequency_penalty": False},
        {"modalities": ["text", "audio"]}, {"function_call": "auto"}, {"functions": [{"name": "f"}]},
        {"length_penalty": 1.1}, {"length_penalty": True}, {"add_generation_prompt": False}, {"suffix": "x"},
        {"parallel_tool_calls": 1}, {"stream_options": {"include_usage": True}}, {"reasoning_effort": "low"},
        {"response_format": {"type": "json_schema", "json_schema": None}}, {"response_format": {}},
    ],
    ids=str,
)  # fmt: skip
def test_fields_that_ask_for_something_else_are_refused(asked: dict[str, Any]) -> None:
    for url, source in ((URL, {"prompt": "x"}), ("/v1/chat/completions", {"messages": []})):
        with pytest.raises(RowFailure, match="is not supported"):
            parse_request(make_row(**line(url=url, body={**source, **asked})))


SECRET = "abcdefgh12345678"


@pytest.mark.parametrize(
    "columns",
    [
        line(body={"prompt": "x", "api_key": SECRET}),
        line(body={"prompt": "x", "Auth-Token": SECRET}),
        line(body={"prompt": "x", "client_secret": [SECRET]}),
        line(body={"prompt": "x", "password": {"a": SECRET}}),
        line(body={"prompt": "x", "extra": {"headers": [{"x-api-key": SECRET}]}}),
        line(body={"prompt": "x", "extra": [f"hf_{SECRET}", f"https://me:{SECRET}@host/a?sig={SECRET}"]}),
        line(body={"prompt": "x", "extra": "y" * 65 + f" sk-{SECRET}"}),
        line(body={"prompt": "x", f"hf_{SECRET}": 1}),
        line(body={"prompt": "x", "extra": {f"hf_{SECRET}": 1}}),
        line(url=f"https://me:{SECRET}@host/v1/completions"),
        line(method=f"hf_{SECRET}"),
    ],
    ids=str,
)
def test_messages_never_show_secrets(columns: dict[str, Any]) -> None:
    with pytest.raises(RowFailure) as refused:
        parse_request(make_row(**columns))
    assert SECRET[:5] not in str(refused.value)


@pytest.mark.parametrize("field", ["logprobs", "best_of", "echo", "presence_penalty", "suffix", "prediction"])
def test_fields_that_are_not_supported_are_refused_by_name_and_value(field: str) -> None:
    with pytest.raises(RowFailure, match=rf"line 1: body field {field}=2 is not supported") as refused:
        request(**{field: 2})
    assert refused.value.error.code == "invalid_request"


def test_the_newer_name_of_max_tokens_wins() -> None:
    assert request(max_completion_tokens=3, max_tokens=5) == request(max_tokens=5, max_completion_tokens=3)
    assert request(max_completion_tokens=3, max_tokens=5) == {"max_tokens": 3}
    assert request(max_completion_tokens=None, max_tokens=5) == {"max_tokens": 5}


def test_messages_about_large_values_stay_short() -> None:
    with pytest.raises(RowFailure) as refused:
        request(**{"suffix" * 1000: "x" * 100_000})
    assert len(str(refused.value)) < 300


# -- answers ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("code", "status"),
    [(code, 500 if code in ("nan_logits", "kv_never_fits", "tokenizer_error", "out_of_memory", "engine_error") else 400)
     for code in ROW_ERROR_CODES],
)  # fmt: skip
def test_errors_have_a_status(code: str, status: int) -> None:
    record = batch_record(make_row(4, **line()), RowError(code, "what to do"), "m")
    assert record["custom_id"] == "a"
    assert record["error"] == {"code": code, "message": "what to do"}
    assert record["response"]["status_code"] == status
    kind = "server_error" if status == 500 else "invalid_request_error"
    assert record["response"]["body"]["error"] == {"message": "what to do", "type": kind, "param": None, "code": code}


def test_an_answer_has_usage_and_a_choice_for_each_sample() -> None:
    row = make_row(4, **line())
    row.form = "openai_completion"
    record = batch_record(row, Completion("a", "stop", 3, 9, [1], [Sample("b", "length", [2])]), "m")
    assert (record["custom_id"], record["error"], record["response"]["status_code"]) == ("a", None, 200)
    body = record["response"]["body"]
    assert body["usage"] == {"prompt_tokens": 3, "completion_tokens": 9, "total_tokens": 12}
    assert [(c["index"], c["text"], c["finish_reason"]) for c in body["choices"]] == [
        (0, "a", "stop"),
        (1, "b", "length"),
    ]
    assert body["model"] == "m"


# -- fuzz -------------------------------------------------------------------------------------------------------------

numbers = st.one_of(
    st.integers(-5, 300), st.integers(), st.sampled_from([2**31, 2**63, 2**64, 10**400, -(10**30), 1e39, 1e308, 5e-324])
)
scalars = st.one_of(st.none(), st.booleans(), numbers, st.floats(allow_nan=False, allow_infinity=False), st.text())
values = st.recursive(
    scalars, lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4), max_leaves=12
)
FIELDS = [
    "model", "messages", "prompt", "n", "max_tokens", "max_completion_tokens", "min_tokens", "temperature", "top_p",
    "top_k", "min_p", "repetition_penalty", "seed", "stop", "stop_token_ids", "logit_bias", "ignore_eos", "logprobs",
    "include_stop_str_in_output", "skip_special_tokens", "best_of", "echo", "stream", "tools", "response_format",
]  # fmt: skip
biases = st.dictionaries(st.integers(-2, 400).map(str) | st.text(), st.floats(-110, 110) | scalars, max_size=3)
likely = st.one_of(
    values,
    st.integers(0, 5),
    st.floats(0, 1.5),
    st.sampled_from(["text", [{"role": "user", "content": "hi"}], [1, 2, 300], ["a", ""], {}, [], "", True, False]),
)
bodies = st.dictionaries(st.sampled_from(FIELDS) | st.text(), likely, max_size=6) | st.fixed_dictionaries(
    {"prompt": st.text(min_size=1), "messages": st.just([{"role": "user", "content": "hi"}])},
    optional={**dict.fromkeys(FIELDS[3:], likely), "logit_bias": biases},
)
lines = st.fixed_dictionaries(
    {"custom_id": st.text() | values},
    optional={
        "method": st.just("POST") | values,
        "url": st.sampled_from([*URLS, "/v1/embeddings", "/v1/"]) | values,
        "body": bodies | values,
        "prompt": values,
    },
)
requests = st.fixed_dictionaries(
    {"custom_id": values, "method": st.just("POST"), "url": st.sampled_from([*URLS]), "body": bodies}
)


def as_read(columns: dict[str, Any]) -> dict[str, Any]:
    """The columns as a reader gives them; what it would refuse before is no row."""
    read: dict[str, Any] = loads(json.dumps(columns).encode())
    return read


def strict(payload: bytes) -> Any:
    def refuse(constant: str) -> None:
        raise AssertionError(f"{constant} is not JSON")

    assert b"\n" not in payload
    return json.loads(payload.decode("utf-8"), parse_constant=refuse)


def readable(columns: dict[str, Any]) -> bool:
    try:
        as_read(columns)
    except ValueError:
        return False
    return True


def attempt(function: Callable[..., Any], *arguments: Any) -> Any:
    """What the function returns, or the one kind of exception that it may raise."""
    try:
        return function(*arguments)
    except (RowFailure, ValueError) as error:
        return error


@fuzz(2000)
@given(st.one_of(lines, requests, st.dictionaries(st.text(), values, max_size=5)).filter(readable))
def test_any_object_is_a_request_or_an_error_of_a_known_code(columns: dict[str, Any]) -> None:
    row = Row(0, "in.jsonl line 1", as_read(columns), 1, Position())
    if not is_batch_line(row.columns):
        return
    result = attempt(parse_request, row)
    if isinstance(result, RowFailure):
        assert result.error.code in ROW_ERROR_CODES
        assert result.error.message.startswith("in.jsonl line 1: ")
        assert len(result.error.message) < 400
        return
    form, prompt, asked = result
    assert form in URLS.values()
    assert next(iter(prompt)) in ("messages", "prompt")
    assert set(prompt) <= {"messages", "prompt", "chat_template_kwargs"}
    params = attempt(merge_params, SamplingParams(), asked)
    if isinstance(params, ValueError):
        assert str(params).split()[0] in asked, "a message begins with the parameter's name"
        assert len(str(params)) < 400
    else:
        assert isinstance(params, SamplingParams)


@fuzz(2000)
@given(lines.filter(readable) | requests.filter(readable))
def test_any_line_becomes_a_prompt_or_an_error_and_either_is_answered_in_strict_json(columns: dict[str, Any]) -> None:
    read = as_read(columns)
    builder = PromptBuilder(ByteTokenizer(), PromptConfig(), SamplingParams(), 64, BYTE_VOCAB_SIZE)
    (item,) = builder.build([Row(0, "in.jsonl line 1", read, 1, Position())])
    if isinstance(item, Prompt):
        row, text = item.row, ByteTokenizer().decode(item.token_ids.tolist())
        further = [Sample(text, "length", [])] * (item.params.n - 1)
        outcome: Completion | RowError = Completion(text, "stop", len(item.token_ids), item.params.n, [], further)
    else:
        assert item.error is not None
        row, outcome = item, item.error
    answer = strict(dumps(batch_record(row, outcome, "m")))
    assert answer["custom_id"] == strict(json.dumps(read["custom_id"]).encode())
    response = answer["response"]
    if isinstance(outcome, RowError):
        assert response["status_code"] in (400, 500)
        assert answer["error"]["code"] in ROW_ERROR_CODES
    else:
        assert (response["status_code"], answer["error"]) == (200, None)
        assert len(response["body"]["choices"]) == len(outcome.samples)
