"""Every field case, one test each; see tests/field_cases/README.md."""

import json
from dataclasses import replace

import pytest

from tests.field_cases.cases import load_cases
from tests.field_cases.records import difference, parse_answer, read_answers
from tests.field_cases.runner import CaseRunner, fork_server

CASES = load_cases()


@pytest.fixture(scope="session")
def case_runner(tmp_path_factory):
    with fork_server(tmp_path_factory.mktemp("field-cases")) as runner:
        yield runner


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.id)
def test_field_case(case, case_runner):
    assert case_runner.problems(case) == [], case.title


def test_no_case_is_lost():
    assert len({case.id for case in CASES}) == 110
    assert all(case.directory.is_dir() for case in CASES)


RECORD = {"id": 7, "completion": " a", "finish_reason": "stop", "usage": {"prompt_tokens": 2}, "error": None}


def answer(**changes):
    return parse_answer(json.dumps({**RECORD, **changes}).encode())


@pytest.mark.parametrize(
    "changes",
    [
        {"completion": " b"},
        {"completion": "a"},
        {"finish_reason": "length"},
        {"usage": {"prompt_tokens": 3}},
        {"id": "7"},
        {"id": 8},
        {"error": {"code": "invalid_json", "message": "line 1"}},
    ],
)
def test_every_compared_field_can_fail_a_case(changes):
    expected = {"ok": True, "text": " a", "finish": "stop", "prompt_tokens": 2, "keep": {"id": 7}}
    assert difference(expected, answer()) is None
    assert difference(expected, answer(**changes)) is not None


def test_an_error_must_say_what_the_case_asks_for():
    failed = answer(completion=None, error={"code": "invalid_json", "message": "in.jsonl line 2: not JSON"})
    assert difference({"ok": False, "code": "invalid_json", "says": ["line 2"]}, failed) is None
    assert difference({"ok": False, "code": "invalid_json", "says": ["line 3"]}, failed) is not None
    assert difference({"ok": False, "code": "invalid_json"}, answer()) is not None


def test_lines_that_are_not_strict_json_fail(tmp_path):
    output = tmp_path / "out.jsonl"
    for text in ('{"completion": NaN}\n', '{"completion": ""}', '{"completion": \n'):
        output.write_text(text)
        with pytest.raises(ValueError, match=r"bare NaN|no final newline|Expecting value"):
            read_answers(output)


def test_a_case_fails_when_its_command_does(case_runner):
    """The runner itself: a wrong command, a traceback and a missed step are all noticed."""
    plain = next(case for case in CASES if case.id == "A-01")
    nothing = CaseRunner(case_runner.socket, case_runner.models, command="true")
    assert "FileNotFoundError" in str(nothing.problems(plain))
    stepped = replace(plain, steps=("must false; must_not true; echo Traceback >&2",), records=None, num_records=None)
    assert [problem.split(";")[0] for problem in case_runner.problems(stepped)] == [
        "MUST FAILED: false",
        "MUST NOT FAILED: true",
        "traceback on stderr",
    ]
