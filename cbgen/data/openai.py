"""OpenAI Batch lines: recognising them, reading a request body, and answering in the Batch output form.

A line is `{"custom_id": ..., "method": "POST", "url": "/v1/chat/completions", "body": {...}}`. What this engine
cannot do is an error for that line, never ignored. The answer names the model that really ran.
"""

from __future__ import annotations

import re
from typing import Any

from cbgen.data.addresses import redact
from cbgen.data.messages import without_nulls
from cbgen.errors import RowError, RowFailure
from cbgen.params import shown
from cbgen.records import Completion, Form, Row, Sample

URLS: dict[str, Form] = {"/v1/chat/completions": "openai_chat", "/v1/completions": "openai_completion"}

# Body field -> sampling parameter. Names that are not OpenAI's are common extensions of compatible servers.
_PARAMS = {
    "n": "n",
    "max_tokens": "max_tokens",
    "max_completion_tokens": "max_tokens",
    "min_tokens": "min_tokens",
    "temperature": "temperature",
    "top_p": "top_p",
    "top_k": "top_k",
    "min_p": "min_p",
    "repetition_penalty": "repetition_penalty",
    "seed": "seed",
    "stop": "stop",
    "stop_token_ids": "stop_token_ids",
    "logit_bias": "logit_bias",
    "ignore_eos": "ignore_eos",
    "skip_special_tokens": "skip_special_tokens",
    "include_stop_str_in_output": "include_stop",
}
_IGNORED = frozenset(
    {
        "model", "messages", "prompt", "user", "metadata", "store", "service_tier", "safety_identifier",
        "prompt_cache_key",
    }
)  # fmt: skip
_NEUTRAL: dict[str, tuple[Any, ...]] = {  # other fields are fine while they ask for what happens anyway
    "stream": (False,),
    "logprobs": (False,),  # 0 asks for the log-probability of each sampled token
    "top_logprobs": (0,),
    "frequency_penalty": (0,),
    "presence_penalty": (0,),
    "length_penalty": (1,),
    "echo": (False,),
    "best_of": (1,),
    "response_format": ({"type": "text"},),
    "tools": ([],),
    "tool_choice": ("none", "auto"),
    "parallel_tool_calls": (False, True),
    "functions": ([],),
    "function_call": ("none",),
    "modalities": (["text"],),
    "suffix": ("",),
    "add_generation_prompt": (True,),
}
_SECRET_NAME = re.compile(r"key|token|secret|passw|credential|authorization", re.IGNORECASE)
_SERVER_ERRORS = frozenset({"nan_logits", "kv_never_fits", "tokenizer_error", "out_of_memory", "engine_error"})


def is_batch_line(columns: dict[str, Any]) -> bool:
    """Whether a row is an OpenAI Batch request, perhaps a bad one, rather than a row of the user's own columns.

    People's own rows have a `custom_id` or a `url`, too; so it takes an API path, or a `body` object that is sent
    somewhere, and all of it where the `custom_id` is missing.
    """
    url = columns.get("url")
    path = url if isinstance(url, str) and url.startswith("/") else ""
    if "custom_id" not in columns:
        return path.startswith("/v1/") and "method" in columns and isinstance(columns.get("body"), dict)
    if path.startswith("/v1/") and ("method" in columns or "body" in columns):
        return True
    return isinstance(columns.get("body"), dict) and ("method" in columns or bool(path))


def parse_request(row: Row) -> tuple[Form, dict[str, Any], dict[str, Any]]:
    """A Batch line as (form, columns with `messages` or `prompt`, sampling parameters).

    Raises:
        RowFailure: the line is incomplete, names an unknown url, or asks for something that is not done here.
    """
    form, body = _form_and_body(row)
    params: dict[str, Any] = {}
    for name, value in body.items():
        if name in _PARAMS and value is not None:
            if not (name == "max_tokens" and body.get("max_completion_tokens") is not None):  # the newer name wins
                params[_PARAMS[name]] = value
        elif name == "chat_template_kwargs" and isinstance(value, dict):
            continue  # a common extension; goes to the template with the messages
        elif value is not None and name not in _IGNORED and not _is_neutral(name, value):
            field = _shown_field(name, value)
            raise RowFailure("invalid_request", f"{row.place}: body field {field} is not supported")
    source = "messages" if form == "openai_chat" else "prompt"
    if body.get(source) is None:
        raise RowFailure("missing_prompt", f"{row.place}: body has no {source!r}")
    return form, {name: body[name] for name in (source, "chat_template_kwargs") if name in body}, params


def _form_and_body(row: Row) -> tuple[Form, dict[str, Any]]:
    columns = row.columns
    if columns.get("custom_id") is None:
        raise RowFailure("invalid_request", f"{row.place}: custom_id is missing; give each request its own")
    url, method, body = columns.get("url"), columns.get("method", "POST"), columns.get("body")
    if not isinstance(url, str) or url not in URLS:
        raise RowFailure("invalid_request", f"{row.place}: url must be one of {', '.join(URLS)}, not {_shown(url)}")
    if method != "POST":
        raise RowFailure("invalid_request", f"{row.place}: method must be POST, not {_shown(method)}")
    if not isinstance(body, dict):
        raise RowFailure("invalid_request", f"{row.place}: body must be an object, not {type(body).__name__}")
    return URLS[url], body


def _is_neutral(name: str, value: Any) -> bool:
    """Whether a field asks for what happens anyway. For Python False is 0, and for OpenAI it is not."""
    value = without_nulls(value)  # Arrow gives an object every key that it has in any row
    return any(
        isinstance(value, bool) is isinstance(neutral, bool) and value == neutral for neutral in _NEUTRAL.get(name, ())
    )


def _shown_field(name: str, value: Any) -> str:
    """A field of a body for a message, without what may be a secret."""
    return redact(name)[:80] if _SECRET_NAME.search(name) else f"{redact(name)[:80]}={_shown(value)}"


def _shown(value: Any) -> str:
    return shown(_masked(value))


def _masked(value: Any) -> Any:
    """A value without what may be a secret, at any depth."""
    if isinstance(value, str):
        return redact(value)
    if isinstance(value, dict):
        return {
            redact(str(key)): "***" if _SECRET_NAME.search(str(key)) else _masked(item) for key, item in value.items()
        }
    return [_masked(item) for item in value] if isinstance(value, list) else value


def batch_record(row: Row, outcome: Completion | RowError, model: str) -> dict[str, Any]:
    """One line of a Batch output file."""
    identifier = f"batch_req_{row.index}"
    custom_id = row.columns.get("custom_id")
    if isinstance(outcome, RowError):
        status = 500 if outcome.code in _SERVER_ERRORS else 400  # the rest is the request's fault
        kind = "server_error" if status >= 500 else "invalid_request_error"
        error = {"message": outcome.message, "type": kind, "param": None, "code": outcome.code}
        response = {"status_code": status, "request_id": identifier, "body": {"error": error}}
        outer = {"code": outcome.code, "message": outcome.message}
        return {"id": identifier, "custom_id": custom_id, "response": response, "error": outer}
    body = {
        "id": f"cmpl-{row.index}",
        "object": "chat.completion" if row.form == "openai_chat" else "text_completion",
        "model": model,
        "choices": [_choice(index, sample, row.form) for index, sample in enumerate(outcome.samples)],
        "usage": {
            "prompt_tokens": outcome.num_prompt_tokens,
            "completion_tokens": outcome.num_completion_tokens,
            "total_tokens": outcome.num_prompt_tokens + outcome.num_completion_tokens,
        },
    }
    response = {"status_code": 200, "request_id": identifier, "body": body}
    return {"id": identifier, "custom_id": custom_id, "response": response, "error": None}


def _choice(index: int, sample: Sample, form: Form) -> dict[str, Any]:
    answer: dict[str, Any] = {"text": sample.text}
    if form == "openai_chat":
        answer = {"message": {"role": "assistant", "content": sample.text}}
    return {"index": index, "logprobs": None, "finish_reason": sample.finish_reason, **answer}
