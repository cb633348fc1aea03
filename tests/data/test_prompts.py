"""Rows to prompts: where the prompt comes from, how it is rendered and tokenized, and what fails a row."""

import inspect
import json
from typing import Any

import numpy as np
import pytest

from cbgen.config import PromptConfig
from cbgen.data import tokenizing
from cbgen.data.prompts import PromptBuilder
from cbgen.data.rendering import check_first_rows, check_prompt_config
from cbgen.data.templates import compile_template
from cbgen.data.token_bounds import TokenBound
from cbgen.errors import InputError, RowError, UsageError
from cbgen.params import SamplingParams
from cbgen.records import Prompt, Row
from tests.helpers import BOS, BYTE_VOCAB_SIZE, ByteTokenizer, byte_ids, make_row

CHAT = [{"role": "user", "content": "hi"}]
CHAT_URL = "/v1/chat/completions"


def build(
    *rows: Row,
    tokenizer: ByteTokenizer | None = None,
    params: SamplingParams = SamplingParams(max_tokens=4),
    max_model_len: int = 1000,
    vocab_size: int = BYTE_VOCAB_SIZE,
    reserved: tuple[str, ...] = (),
    **config: Any,
) -> list[Prompt | Row]:
    builder = PromptBuilder(
        tokenizer or ByteTokenizer(), PromptConfig(**config), params, max_model_len, vocab_size, reserved
    )
    return builder.build(list(rows))


def prompt_of(columns: dict[str, Any], **options: Any) -> Prompt:
    (item,) = build(make_row(**columns), **options)
    assert isinstance(item, Prompt), item.error
    return item


def text_of(columns: dict[str, Any], **options: Any) -> str:
    return ByteTokenizer().decode(prompt_of(columns, **options).token_ids.tolist())


def error_of(columns: dict[str, Any], **options: Any) -> RowError:
    (item,) = build(make_row(**columns), **options)
    assert isinstance(item, Row), "a prompt came out"
    assert item.error is not None
    assert item.error.message.startswith("in.jsonl line 1: ")
    return item.error


def batch_line(url: Any = CHAT_URL, **body: Any) -> dict[str, Any]:
    return {"custom_id": "a", "method": "POST", "url": url, "body": {"model": "m", **body}}


# -- where the prompt comes from --------------------------------------------------------------------------------------


def test_template_goes_before_messages_and_prompt() -> None:
    columns = {"messages": CHAT, "prompt": "p", "a": "x"}

    assert text_of(columns, template="<{{ a }}{{ prompt }}>\n") == "<xp>\n"


def test_messages_go_before_prompt() -> None:
    expected = "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"

    assert text_of({"messages": CHAT, "prompt": "p"}) == expected


def test_prompt_is_taken_when_messages_are_null() -> None:
    assert text_of({"messages": None, "prompt": "p"}) == "p"


def test_columns_can_have_other_names() -> None:
    columns = {"question": "q", "prompt": "p", "messages": CHAT}

    assert text_of(columns, prompt_column="question", messages_column="chat") == "q"
    assert "hi" in text_of({"chat": CHAT, "prompt": "p"}, messages_column="chat")


def test_token_ids_are_taken_as_they_are() -> None:
    prompt = prompt_of({"prompt": [5, 0, 258]}, tokenizer=ByteTokenizer(bos=True))

    assert prompt.token_ids.tolist() == [5, 0, 258]
    assert prompt.token_ids.dtype == np.int32


def test_bytes_that_are_text_are_a_prompt() -> None:
    assert text_of({"prompt": "é".encode()}) == "é"
    assert text_of({"a": "é".encode(), "b": b"\xff"}, template="{{ a }}") == "é"
    assert "é<|im_end|>" in text_of({"messages": [{"role": "user", "content": "é".encode()}]})


def test_bytes_that_are_no_text_fail_the_row() -> None:
    error = error_of({"prompt": b"ab\xff"})

    assert error.code == "invalid_utf8"
    assert "'prompt'" in error.message
    assert "byte 3" in error.message


def test_missing_prompt_names_the_columns_that_are_there() -> None:
    error = error_of({"question": "q", "prompt": None})

    assert error.code == "missing_prompt"
    assert "'question', 'prompt'" in error.message
    assert "--prompt-column" in error.message


@pytest.mark.parametrize("value", [3, 1.5, True, {"a": 1}, ["a"], [1, "a"], [1, True], [False], [1.0], [[1]], [None]])
def test_value_that_is_neither_text_nor_token_ids_is_a_wrong_type(value: Any) -> None:
    assert error_of({"prompt": value}).code == "wrong_type"


@pytest.mark.parametrize("wrong", [-1, BYTE_VOCAB_SIZE, 2**31, 2**70])
def test_token_id_out_of_range_is_named(wrong: int) -> None:
    error = error_of({"prompt": [1, wrong]})

    assert error.code == "token_out_of_range"
    assert str(wrong) in error.message


@pytest.mark.parametrize("prompt", ["", []])
def test_prompt_without_tokens_is_an_error(prompt: Any) -> None:
    assert error_of({"prompt": prompt}).code == "empty_prompt"


def test_row_that_failed_before_is_passed_through_untouched() -> None:
    row, error = make_row(prompt="p"), RowError("invalid_json", "in.jsonl line 1: oops")
    row.error = error

    assert build(row) == [row]
    assert row.error is error


def test_rows_come_out_in_order_with_failures_in_their_place() -> None:
    rows = [
        make_row(0, prompt="a"),
        make_row(1),
        make_row(2, messages=CHAT),
        make_row(3, prompt=[7]),
        make_row(4, prompt="b"),
    ]

    items = build(*rows)

    assert [item.row.index if isinstance(item, Prompt) else item.index for item in items] == [0, 1, 2, 3, 4]
    assert [isinstance(item, Prompt) for item in items] == [True, False, True, True, True]


# -- templates --------------------------------------------------------------------------------------------------------


def test_template_over_a_missing_column_fails_in_the_templates_own_words() -> None:
    error = error_of({"a": "x"}, template="{{ a }} {{ b }}")

    assert error.code == "template_error"
    assert error.message == "in.jsonl line 1: 'b' is undefined"


def test_template_that_fails_in_python_fails_its_row() -> None:
    assert error_of({"a": 1}, template="{{ a / 0 }}").code == "template_error"


def test_template_is_sandboxed() -> None:
    error = error_of({"a": "x"}, template="{{ a.__class__.__mro__ }}")

    assert error.code == "template_error"


def test_template_that_does_not_parse_is_a_usage_error() -> None:
    with pytest.raises(UsageError, match=r"--template does not parse: .*line 2"):
        compile_template("a\n{{ b")


def test_template_sees_every_column_name() -> None:
    assert text_of({"self": "a", "loop": "b", "x-y": "c"}, template="{{ loop }}") == "b"


# -- chats ------------------------------------------------------------------------------------------------------------


def test_chat_template_that_raises_fails_its_row_with_its_words() -> None:
    tokenizer = ByteTokenizer(chat_template="{{ raise_exception('roles must alternate') }}")

    error = error_of({"messages": CHAT}, tokenizer=tokenizer)

    assert (error.code, error.message) == ("template_error", "in.jsonl line 1: roles must alternate")


def test_tokenizer_without_chat_template_fails_chats_but_not_texts() -> None:
    tokenizer = ByteTokenizer(chat_template=None)

    assert error_of({"messages": CHAT}, tokenizer=tokenizer).code == "no_chat_template"
    assert text_of({"prompt": "p"}, tokenizer=tokenizer) == "p"
    assert text_of({"messages": CHAT}, tokenizer=tokenizer, chat_template="{{ messages[0].content }}") == "hi"


def test_system_message_is_prepended_unless_there_is_one() -> None:
    own = [{"role": "system", "content": "mine"}, *CHAT]

    assert text_of({"messages": CHAT}, system="ours").startswith("<|im_start|>system\nours<|im_end|>\n<|im_start|>user")
    assert "ours" not in text_of({"messages": own}, system="ours")


def test_null_keys_of_messages_are_dropped() -> None:
    template = "{% for m in messages %}{{ m.keys() | sort | join(',') }};{% endfor %}"
    messages = [{"role": "user", "content": "hi", "tool_calls": None, "name": None}]

    assert text_of({"messages": messages}, chat_template=template) == "content,role;"


def test_messages_of_the_row_are_not_changed() -> None:
    messages = [{"role": "user", "content": [{"type": "text", "text": "a"}], "name": None}]
    row = make_row(messages=messages)

    build(row, system="s")

    assert row.columns == {"messages": [{"role": "user", "content": [{"type": "text", "text": "a"}], "name": None}]}


def test_content_parts_are_joined_by_newlines() -> None:
    parts = [{"type": "text", "text": "a"}, "b", {"type": "text", "text": "c", "extra": None}]

    assert "user\na\nb\nc<|im_end|>" in text_of({"messages": [{"role": "user", "content": parts}]})


def test_content_part_that_is_not_text_is_named() -> None:
    parts = [{"type": "image_url", "image_url": {"url": "x"}}]

    error = error_of({"messages": [{"role": "user", "content": parts}]})

    assert error.code == "invalid_messages"
    assert "'image_url'" in error.message


@pytest.mark.parametrize(
    ("messages", "words"),
    [
        ([], "an empty list"),
        ("hi", "not str"),
        ({"role": "user"}, "not dict"),
        (["hi"], "item 0 must be an object"),
        ([*CHAT, {"content": "a"}], "item 1 has no role"),
        ([{"role": 1, "content": "a"}], "item 0 has no role"),
        ([{"role": "user"}], "item 0 has no content"),
        ([{"role": "user", "content": None}], "item 0 has no content"),
        ([{"role": "user", "content": 3}], "content of type int"),
        ([{"role": "user", "content": [None]}], "'NoneType'"),
    ],
)
def test_messages_that_are_no_chat_are_refused_with_the_place(messages: Any, words: str) -> None:
    error = error_of({"messages": messages})

    assert error.code == "invalid_messages"
    assert words in error.message


def test_continue_final_message_needs_an_assistant_message() -> None:
    chat = [*CHAT, {"role": "assistant", "content": "yes, "}]

    assert error_of({"messages": CHAT}, continue_final_message=True).code == "invalid_messages"
    assert "assistant\nyes, " in text_of({"messages": chat}, continue_final_message=True)


def test_chat_template_kwargs_reach_the_template() -> None:
    options: dict[str, Any] = {"chat_template": "{{ mood }}", "chat_template_kwargs": {"mood": "calm"}}

    assert text_of({"messages": CHAT}, **options) == "calm"


# -- tokenizing -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "columns",
    [
        {"prompt": "a"},
        {"prompt": "<s>a"},
        {"messages": [{"role": "user", "content": "a"}]},
    ],
)
def test_every_prompt_has_exactly_one_bos(columns: dict[str, Any]) -> None:
    tokenizer = ByteTokenizer(bos=True, chat_template="{{ bos_token }}{{ messages[0].content }}")

    assert prompt_of(columns, tokenizer=tokenizer).token_ids.tolist() == [BOS, *byte_ids("a")]


def test_chat_brings_its_own_special_tokens_and_gets_no_others() -> None:
    tokenizer = ByteTokenizer(bos=True, chat_template="{{ messages[0].content }}")

    assert prompt_of({"messages": CHAT}, tokenizer=tokenizer).token_ids.tolist() == byte_ids("hi")


def test_model_without_bos_gets_none() -> None:
    assert prompt_of({"prompt": "a"}).token_ids.tolist() == byte_ids("a")


def test_rows_are_tokenized_in_batches() -> None:
    tokenizer = ByteTokenizer()

    build(*(make_row(number, prompt="a") for number in range(20)), tokenizer=tokenizer)

    assert tokenizer.num_calls <= 2


def test_text_that_the_tokenizer_cannot_take_fails_its_row_only() -> None:
    rows = [make_row(0, prompt="a"), make_row(1, prompt="bad"), make_row(2, prompt="c"), make_row(3, messages=CHAT)]

    first, second, third, fourth = build(*rows, tokenizer=ByteTokenizer(fails_on="bad"))

    assert isinstance(second, Row)
    assert second.error == RowError("tokenizer_error", "in.jsonl line 2: cannot encode bad")
    assert all(isinstance(item, Prompt) for item in (first, third, fourth))
    assert isinstance(third, Prompt)
    assert third.token_ids.tolist() == byte_ids("c")


class PanicException(BaseException):
    """Named like the one that Rust code raises."""


def test_panic_of_the_tokenizer_fails_its_row_only() -> None:
    class Panicking(ByteTokenizer):
        def __call__(self, text: list[str], *, add_special_tokens: bool) -> dict[str, list[list[int]]]:
            if "bad" in text:
                raise PanicException("index out of bounds")
            return super().__call__(text, add_special_tokens=add_special_tokens)

    first, second = build(make_row(0, prompt="a"), make_row(1, prompt="bad"), tokenizer=Panicking())

    assert isinstance(first, Prompt)
    assert isinstance(second, Row)
    assert second.error == RowError("tokenizer_error", "in.jsonl line 2: index out of bounds")


def test_interrupt_in_the_tokenizer_is_no_row_error() -> None:
    class Interrupting(ByteTokenizer):
        def __call__(self, text: list[str], *, add_special_tokens: bool) -> dict[str, list[list[int]]]:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        build(make_row(prompt="a"), tokenizer=Interrupting())


def test_tokenizer_with_more_ids_than_the_model_fails_the_row() -> None:
    error = error_of({"prompt": "é"}, vocab_size=150)

    assert error.code == "token_out_of_range"
    assert str(byte_ids("é")[0]) in error.message
    assert "(150)" in error.message


# -- length -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("length", [10, 11, 500])
def test_prompt_too_long_names_both_numbers(length: int) -> None:
    error = error_of({"prompt": "x" * length}, max_model_len=10)

    assert error.code == "prompt_too_long"
    assert f"has {length} tokens and the context 10" in error.message


def test_longest_prompt_that_fits_leaves_room_for_one_token() -> None:
    prompt = prompt_of({"prompt": "x" * 9}, max_model_len=10)

    assert (len(prompt.token_ids), prompt.params.max_tokens) == (9, 1)


@pytest.mark.parametrize(("length", "max_tokens"), [(1, 4), (6, 4), (7, 3), (8, 2)])
def test_max_tokens_is_clamped_to_the_context(length: int, max_tokens: int) -> None:
    assert prompt_of({"prompt": "x" * length}, max_model_len=10).params.max_tokens == max_tokens


def test_truncate_left_keeps_bos_and_the_end() -> None:
    options: dict[str, Any] = {"max_model_len": 10, "on_too_long": "truncate-left"}

    prompt = prompt_of({"prompt": "0123456789abc"}, tokenizer=ByteTokenizer(bos=True), **options)

    assert prompt.token_ids.tolist() == [BOS, *byte_ids("89abc")]
    assert prompt.params.max_tokens == 4


def test_truncate_left_without_bos_keeps_the_end() -> None:
    prompt = prompt_of({"prompt": "0123456789abc"}, max_model_len=10, on_too_long="truncate-left")

    assert prompt.token_ids.tolist() == byte_ids("789abc")


def test_truncate_left_keeps_half_the_context_even_when_max_tokens_is_huge() -> None:
    options: dict[str, Any] = {"max_model_len": 10, "on_too_long": "truncate-left"}

    prompt = prompt_of({"prompt": "0123456789abc"}, params=SamplingParams(max_tokens=1000), **options)

    assert (len(prompt.token_ids), prompt.params.max_tokens) == (5, 5)


class CountingTokenizer(ByteTokenizer):
    """Notes how many characters each call was given; one token is at most `longest` characters."""

    bos_token = "<s>"

    def __init__(self, *, longest: int = 1, **options: Any) -> None:
        super().__init__(**options)
        self.calls: list[int] = []
        self.longest = longest

    def __call__(self, text: list[str], *, add_special_tokens: bool) -> dict[str, list[list[int]]]:
        self.calls.append(sum(map(len, text)))
        return super().__call__(text, add_special_tokens=add_special_tokens)


def _bound_of(tokenizer: Any) -> TokenBound | None:
    return TokenBound(tokenizer.longest) if hasattr(tokenizer, "longest") else None


@pytest.fixture
def counting(monkeypatch: pytest.MonkeyPatch) -> CountingTokenizer:
    monkeypatch.setattr(tokenizing, "find_token_bound", _bound_of)
    return CountingTokenizer(bos=True, chat_template="{{ bos_token }}{{ messages[0].content }}")


def test_text_that_is_sure_to_be_too_long_fails_without_being_tokenized(counting: CountingTokenizer) -> None:
    counting.longest = 4

    error = error_of({"prompt": "x" * 400_001}, tokenizer=counting, max_model_len=100)

    assert error.code == "prompt_too_long"
    assert "has at least 100,001 tokens and the context 100" in error.message
    assert max(counting.calls) == 1  # the look for a BOS


def test_long_text_that_may_fit_is_tokenized(counting: CountingTokenizer) -> None:
    counting.longest = 4
    prompt = prompt_of({"prompt": "x" * 200_000}, tokenizer=counting, max_model_len=300_000)

    assert len(prompt.token_ids) == 200_001


@pytest.mark.parametrize("columns", [{"prompt": "TEXT"}, {"messages": [{"role": "user", "content": "TEXT"}]}])
def test_truncate_left_tokenizes_only_the_end_of_a_long_text(
    counting: CountingTokenizer, columns: dict[str, Any]
) -> None:
    counting.longest = 4
    text = "".join(map(str, range(100_000)))
    filled = json.loads(json.dumps(columns).replace("TEXT", text))
    options: dict[str, Any] = {"max_model_len": 100, "on_too_long": "truncate-left"}

    short = prompt_of(filled, tokenizer=counting, **options)
    whole = prompt_of(filled, tokenizer=ByteTokenizer(bos=True, chat_template=counting.chat_template), **options)

    assert short.token_ids.tolist() == whole.token_ids.tolist() == [BOS, *byte_ids(text[-95:])]
    assert short.params == whole.params
    assert max(counting.calls) < 10_000


def test_tokenizer_is_called_with_about_a_million_characters_at_most() -> None:
    tokenizer = CountingTokenizer()

    items = build(
        *(make_row(number, prompt="x" * 300_000) for number in range(10)), tokenizer=tokenizer, max_model_len=1_000_000
    )

    assert all(isinstance(item, Prompt) and len(item.token_ids) == 300_000 for item in items)
    assert max(tokenizer.calls) == 900_000


def test_bound_is_looked_for_only_when_a_text_is_long(monkeypatch: pytest.MonkeyPatch) -> None:
    looked: list[Any] = []
    monkeypatch.setattr(tokenizing, "find_token_bound", looked.append)
    rows = [make_row(number, prompt="x" * size) for number, size in enumerate([10, 1000, 200_000, 300_000])]

    build(*rows[:2])
    assert looked == []
    build(*rows, max_model_len=1_000_000)
    assert len(looked) == 1


def test_transformers_warning_about_long_texts_does_not_appear() -> None:
    tokenizer = ByteTokenizer()
    tokenizer.deprecation_warnings = {}  # type: ignore[attr-defined]

    build(make_row(prompt="a"), tokenizer=tokenizer)

    assert tokenizer.deprecation_warnings == {"sequence-length-is-longer-than-the-specified-maximum": True}  # type: ignore[attr-defined]


def test_truncate_left_leaves_prompts_that_fit_alone() -> None:
    prompt = prompt_of({"prompt": "012345678"}, max_model_len=10, on_too_long="truncate-left")

    assert prompt.token_ids.tolist() == byte_ids("012345678")


# -- sampling parameters ----------------------------------------------------------------------------------------------


def test_row_overrides_sampling_params_and_null_means_as_the_run() -> None:
    own = {"temperature": 0.5, "max_tokens": None, "stop": "x"}

    params = prompt_of({"prompt": "a", "sampling_params": own}).params

    assert params == SamplingParams(max_tokens=4, temperature=0.5, stop=("x",))


@pytest.mark.parametrize(
    "own",
    [
        "hot", [1], 3, {"temprature": 1}, {"temperature": -1}, {"temperature": "1"}, {"max_tokens": 0}, {"top_p": 0},
        {"seed": 1.5}, {"stop": [1]}, {"stop": ""}, {"ignore_eos": 1}, {"seed": 2**63},
    ],
    ids=lambda own: str(own)[:24],
)  # fmt: skip
def test_bad_sampling_params_fail_the_row(own: Any) -> None:
    assert error_of({"prompt": "a", "sampling_params": own}).code == "invalid_params"


def test_row_with_a_seed_of_its_own_says_so() -> None:
    assert prompt_of({"prompt": "a", "sampling_params": {"seed": 0}}).own_seed
    assert not prompt_of({"prompt": "a", "sampling_params": {"temperature": 1}}).own_seed
    assert not prompt_of({"prompt": "a"}).own_seed


def test_null_seed_is_no_seed_of_its_own() -> None:  # Arrow gives every struct every key
    assert not prompt_of({"prompt": "a", "sampling_params": {"seed": None, "temperature": 1.0}}).own_seed


def test_column_with_the_name_of_a_result_field_fails_the_row() -> None:
    error = error_of({"prompt": "a", "error": "x"}, reserved=("completion", "error"))

    assert error.code == "column_clash"
    assert "'error'" in error.message
    assert "--result-prefix" in error.message


# -- OpenAI Batch lines -----------------------------------------------------------------------------------------------


def test_batch_chat_line_is_rendered_and_answered_as_a_chat() -> None:
    prompt = prompt_of(batch_line(messages=CHAT, max_completion_tokens=3, temperature=1, seed=5, stop=["x"]))

    assert prompt.row.form == "openai_chat"
    assert prompt.own_seed
    assert prompt.params == SamplingParams(max_tokens=3, temperature=1.0, seed=5, stop=("x",))
    assert ByteTokenizer().decode(prompt.token_ids.tolist()).startswith("<|im_start|>user\nhi")


def test_batch_completion_line_takes_its_prompt() -> None:
    prompt = prompt_of(batch_line("/v1/completions", prompt="p"))

    assert prompt.row.form == "openai_completion"
    assert prompt.token_ids.tolist() == byte_ids("p")


def test_batch_line_ignores_the_runs_template_and_column_names() -> None:
    options: dict[str, Any] = {"template": "T", "messages_column": "chat", "prompt_column": "question"}

    assert "hi" in text_of(batch_line(messages=CHAT), **options)


def test_batch_line_may_have_columns_with_names_of_result_fields() -> None:
    line = {**batch_line(messages=CHAT), "error": None}

    assert "hi" in text_of(line, reserved=("error",))


def test_newer_of_two_names_for_max_tokens_wins() -> None:
    prompt = prompt_of(batch_line(messages=CHAT, max_completion_tokens=3, max_tokens=2))

    assert prompt.params.max_tokens == 3


@pytest.mark.parametrize("url", ["/v1/embeddings", None, 3, [], {}])
def test_batch_line_with_an_unknown_url_is_refused(url: Any) -> None:
    error = error_of(batch_line(url, messages=CHAT))

    assert error.code == "invalid_request"
    assert "url must be one of" in error.message


@pytest.mark.parametrize("body", [None, "x", [1], 3])
def test_batch_line_whose_body_is_no_object_is_refused(body: Any) -> None:
    error = error_of({"custom_id": "a", "method": "POST", "url": CHAT_URL, "body": body})

    assert error.code == "invalid_request"
    assert "body must be an object" in error.message


def test_batch_line_with_another_method_is_refused() -> None:
    assert error_of({**batch_line(messages=CHAT), "method": "GET"}).code == "invalid_request"


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("best_of", 2), ("logprobs", True), ("frequency_penalty", 0.5), ("response_format", {"type": "json_object"}),
        ("tools", [{"type": "function"}]), ("tool_choice", {"type": "function"}), ("stream", True), ("unheard_of", 1),
        ("echo", True),
    ],
)  # fmt: skip
def test_batch_field_that_is_not_supported_is_an_error_never_ignored(field: str, value: Any) -> None:
    error = error_of(batch_line(messages=CHAT, **{field: value}))

    assert error.code == "invalid_request"
    assert f"{field}=" in error.message


def test_batch_fields_that_ask_for_what_happens_anyway_are_fine() -> None:
    neutral = {"n": 1, "stream": False, "logprobs": False, "frequency_penalty": 0, "response_format": {"type": "text"}}

    assert "hi" in text_of(batch_line(messages=CHAT, **neutral, user="u", metadata={"a": "b"}))


def test_null_batch_fields_are_as_good_as_absent() -> None:
    line = batch_line(messages=CHAT, tools=None, n=None, seed=None, max_tokens=None, unheard_of=None)

    prompt = prompt_of(line)

    assert prompt.params == SamplingParams(max_tokens=4)
    assert not prompt.own_seed


@pytest.mark.parametrize("url", [CHAT_URL, "/v1/completions"])
def test_batch_body_without_its_source_is_a_missing_prompt(url: str) -> None:
    assert error_of(batch_line(url)).code == "missing_prompt"


def test_batch_params_out_of_range_fail_the_row() -> None:
    assert error_of(batch_line(messages=CHAT, temperature=-1)).code == "invalid_params"


def test_bad_batch_line_is_still_answered_in_batch_form() -> None:
    (item,) = build(make_row(**batch_line("/v1/embeddings")))

    assert isinstance(item, Row)
    assert item.form == "openai_chat"


def test_custom_id_alone_makes_no_batch_line() -> None:
    assert text_of({"custom_id": "a", "prompt": "p"}) == "p"


# -- before the model loads -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "name",
    [
        "tokenize", "messages", "conversation", "add_generation_prompt", "continue_final_message", "chat_template",
        "return_tensors", "return_dict", "padding", "truncation", "max_length",
    ],
)  # fmt: skip
def test_reserved_chat_template_kwargs_are_refused(name: str) -> None:
    with pytest.raises(UsageError, match=f"--chat-template-kwargs cannot set '{name}': "):
        check_prompt_config(PromptConfig(chat_template_kwargs={"enable_thinking": False, name: True}))


def test_every_argument_of_transformers_that_is_no_variable_is_reserved() -> None:
    from transformers import PreTrainedTokenizerBase

    arguments = set(inspect.signature(PreTrainedTokenizerBase.apply_chat_template).parameters)
    free = {"self", "kwargs", "tools", "documents"}

    for name in arguments - free:
        with pytest.raises(UsageError, match="cannot set"):
            check_prompt_config(PromptConfig(chat_template_kwargs={name: 1}))


def test_prompt_config_that_is_fine_passes() -> None:
    check_prompt_config(PromptConfig())
    check_prompt_config(
        PromptConfig(template="{{ a }}", chat_template="{{ a }}", chat_template_kwargs={"enable_thinking": False})
    )


@pytest.mark.parametrize("config", [{"template": "{{ a"}, {"chat_template": "{% for %}"}])
def test_templates_that_do_not_parse_are_refused_before_the_model_loads(config: dict[str, str]) -> None:
    with pytest.raises(UsageError, match="does not parse"):
        check_prompt_config(PromptConfig(**config))


def test_input_without_a_usable_column_is_refused_with_those_that_there_are() -> None:
    rows = [make_row(0, question="a", id=1), make_row(1, text="b", id=2)]

    with pytest.raises(InputError) as raised:
        check_first_rows(rows, PromptConfig())
    message = str(raised.value)
    assert "in.jsonl line 1" in message
    assert "(columns present: 'question', 'id', 'text')" in message
    for option in ("--prompt-column", "--messages-column", "--template"):
        assert option in message


@pytest.mark.parametrize(
    ("rows", "config"),
    [
        ([], {}),
        ([make_row(0, a=1), make_row(1, prompt="x")], {}),
        ([make_row(0, a=1), make_row(1, messages=None)], {}),
        ([make_row(0, a=1)], {"template": "{{ a }}"}),
        ([make_row(0, a=1)], {"prompt_column": "a"}),
        ([make_row(0, a=1)], {"messages_column": "a"}),
        ([make_row(0, **batch_line(messages=CHAT))], {}),
    ],
)
def test_input_with_a_usable_row_passes(rows: list[Row], config: dict[str, Any]) -> None:
    check_first_rows(rows, PromptConfig(**config))


def test_broken_rows_say_nothing_about_the_columns() -> None:
    row = make_row(0)
    row.error = RowError("invalid_json", "in.jsonl line 1: oops")

    check_first_rows([row], PromptConfig())
    with pytest.raises(InputError, match="this row"):
        check_first_rows([row, make_row(1, a=1)], PromptConfig())


def test_rows_bring_variables_and_tools_for_the_chat_template():
    template = (
        "{{ messages[0].content }}{{ '' if thinking else '!' }}{% for tool in tools or [] %}{{ tool.name }}{% endfor %}"
    )
    options = {"tokenizer": ByteTokenizer(chat_template=template), "chat_template_kwargs": {"thinking": True}}
    chat = {"messages": [{"role": "user", "content": "a"}]}
    assert text_of(chat, **options) == "a"
    assert text_of({**chat, "chat_template_kwargs": {"thinking": False, "other": None}}, **options) == "a!"
    assert text_of({**chat, "tools": [{"name": "f"}]}, **options) == "af"
    assert (
        text_of({**chat, "tools": '[{"name": "f"}]', "chat_template_kwargs": '{"thinking": false}'}, **options) == "a!f"
    )
    assert text_of({**chat, "tools": b'[{"name": "f"}]', "chat_template_kwargs": b"{}"}, **options) == "af"
    assert text_of({**chat, "tools": "null", "chat_template_kwargs": "null"}, **options) == "a"
    assert text_of({**chat, "tools": [], "chat_template_kwargs": {}}, **options) == "a"
    assert text_of(batch_line(**chat, chat_template_kwargs={"thinking": False}), **options) == "a!"
    error = error_of({**chat, "chat_template_kwargs": {"tokenize": True}}, **options)
    assert error.code == "invalid_params"
    assert "tokenize" in error.message


@pytest.mark.parametrize(
    ("columns", "words"),
    [
        ({"chat_template_kwargs": "neither"}, "must be an object, or JSON text of one, not other text"),
        ({"chat_template_kwargs": "[1]"}, "must be an object, or JSON text of one, not a list"),
        ({"chat_template_kwargs": 3}, "must be an object, or JSON text of one, not a number"),
        ({"chat_template_kwargs": [{"a": 1}]}, "must be an object, or JSON text of one, not a list"),
        ({"tools": "hammer"}, "must be a list of objects, or JSON text of one, not other text"),
        ({"tools": {"name": "f"}}, "must be a list of objects, or JSON text of one, not an object"),
        ({"tools": '{"name": "f"}'}, "must be a list of objects, or JSON text of one, not an object"),
        ({"tools": [{"name": "f"}, "g"]}, "must be a list of objects, or JSON text of one, not a list that holds text"),
        ({"tools": True}, "must be a list of objects, or JSON text of one, not a boolean"),
    ],
)
def test_variables_and_tools_of_a_wrong_type_are_never_ignored(columns: dict[str, Any], words: str) -> None:
    error = error_of({"messages": CHAT, **columns})
    assert error.code == "invalid_params"
    assert words in error.message
    assert next(iter(columns)) in error.message


def test_rows_that_are_no_chats_may_have_columns_of_these_names() -> None:
    columns = {"prompt": "p", "tools": "hammer", "chat_template_kwargs": "neither"}
    assert text_of(columns) == "p"
    assert text_of({**columns, "messages": CHAT}, template="{{ tools }}") == "hammer"


def test_nulls_in_tools_and_tool_calls_are_dropped_at_any_depth() -> None:
    calls = [{"function": {"name": "f", "arguments": {"a": None, "b": [None, {"c": None, "d": 1}]}}, "id": None}]
    template = "{{ messages[0].tool_calls | tojson }} {{ tools | tojson }}"
    chat = {"messages": [{"role": "assistant", "content": None, "tool_calls": calls}]}
    tools = [{"type": "function", "function": {"name": "f", "strict": None, "enum": ["x", None]}}]
    assert json.loads("[" + text_of({**chat, "tools": tools}, chat_template=template).replace("] [", "], [") + "]") == [
        [{"function": {"name": "f", "arguments": {"b": [None, {"d": 1}]}}}],
        [{"type": "function", "function": {"name": "f", "enum": ["x", None]}}],
    ]


# -- bytes ------------------------------------------------------------------------------------------------------------

BAD = b"caf\xe9"


def test_bytes_that_are_text_become_text_at_any_depth() -> None:
    columns = {"a": {"b": [b"x", {"c": b"y"}]}, "d": b"z"}
    assert text_of(columns, template="{{ a.b[0] }}{{ a.b[1].c }}{{ d }} {{ a }}") == "xyz {'b': ['x', {'c': 'y'}]}"
    chat = [{"role": b"user", "content": [b"x", {"type": b"text", "text": b"y"}]}, {"role": "user", "content": b"z"}]
    assert "user\nx\ny<" in text_of({"messages": chat})


@pytest.mark.parametrize(
    "template",
    ["{{ a }}", "{{ a.b[0] }}", "{{ a | tojson }}", "{{ a.b | join }}", "{{ 'x' ~ a.b[0] }}", "{{ a.b[0] | upper }}",
     "{{ a.b[0].decode() }}", "{{ a.b[0] | default('x') }}", "{% for c in a.b[0] %}x{% endfor %}", "{{ [a] }}",
     "{{ 'x' + a.b[0] }}", "{{ a.b[0] + 'x' }}", "{{ '%s' % a.b[0] }}", "{{ '{}'.format(a) }}", "{{ a.b[0][:2] }}",
     "{{ a.b[0] | length }}", "{{ 'x' in a.b[0] }}", "{{ a.b[0] | string }}", "{{ a.b[0] | trim }}"],
)  # fmt: skip
def test_bytes_that_are_no_text_fail_the_template_that_uses_them(template: str) -> None:
    error = error_of({"a": {"b": [BAD]}}, template=template)
    assert error.code == "invalid_utf8"
    assert error.message.endswith("'a' holds bytes that are not valid UTF-8 (at byte 4)")


def test_bytes_that_are_no_text_are_no_concern_of_a_template_that_passes_by() -> None:
    columns = {"question": "q", "image": {"bytes": BAD, "path": "p.png"}}
    template = "{{ question }} {{ image.path }} {{ image.bytes is none }} {{ 'seen' if image.bytes else 'blind' }}"
    assert text_of(columns, template=template) == "q p.png False seen"


@pytest.mark.parametrize(
    "columns",
    [
        {"messages": [{"role": "user", "content": BAD}]},
        {"messages": [{"role": "user", "content": ["x", BAD]}]},
        {"messages": [{"role": "user", "content": [{"type": "text", "text": BAD}]}]},
        {"messages": [{"role": "user", "content": "x", "tool_calls": [{"function": {"arguments": BAD}}]}]},
        {"messages": CHAT, "tools": [{"name": BAD}]},
        {"messages": CHAT, "chat_template_kwargs": {"x": [BAD]}},
    ],
)
def test_bytes_that_are_no_text_fail_a_chat(columns: dict[str, Any]) -> None:
    error = error_of(columns)
    assert error.code == "invalid_utf8"
    assert "at byte 4" in error.message


# -- messages that say what is there ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("value", "words"),
    [
        (["q1"], "a list that holds text"),
        ([1, {"a": 1}], "a list that holds an object"),
        ([1, 2.5], "a list that holds a number with a point"),
        ([True], "a list that holds a boolean"),
        ([[1]], "a list that holds a list"),
        ([1, None], "a list that holds null"),
        ({"a": 1}, "an object"),
    ],
)
def test_a_prompt_of_a_wrong_type_is_described(value: Any, words: str) -> None:
    assert error_of({"prompt": value}).message.endswith(f"must be text or a list of token ids, not {words}")


def test_only_some_of_many_columns_are_listed() -> None:
    columns = {f"column {number}": 1 for number in range(1000)}
    shown = ", ".join(f"'column {number}'" for number in range(20))
    assert f"(columns present: {shown} and 980 more)" in error_of(columns).message
    with pytest.raises(InputError) as raised:
        check_first_rows([make_row(**columns)], PromptConfig())
    assert f"(columns present: {shown} and 980 more)" in str(raised.value)
    assert "'column 19')" in error_of(dict(list(columns.items())[:20])).message
    assert len(error_of({"x" * 100_000: 1}).message) < 400


@pytest.mark.parametrize("kind", ["image_url", "input_audio", 3])
def test_a_content_part_of_another_type_is_refused_even_with_a_text(kind: Any) -> None:
    part = {"type": kind, "text": "caption", "image_url": {"url": "x"}}
    error = error_of({"messages": [{"role": "user", "content": [part]}]})
    assert error.code == "invalid_messages"
    assert f"of type {kind!r}" in error.message


def test_a_content_part_may_leave_its_type_out() -> None:
    parts = [{"text": "a"}, {"type": None, "text": "b"}]
    assert "user\na\nb<" in text_of({"messages": [{"role": "user", "content": parts}]})
