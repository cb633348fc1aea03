"""The error tree: exit codes as documented, and a closed list of row error codes that the code keeps to."""

import ast
import inspect
from pathlib import Path

import pytest

import cbgen
from cbgen import errors
from cbgen.errors import ROW_ERROR_CODES, CbgenError, RowError, RowFailure


@pytest.mark.parametrize(
    ("name", "code"),
    [
        ("CbgenError", 1),
        ("UsageError", 2),
        ("InputError", 2),
        ("BrokenInputError", 1),
        ("RefusedError", 4),
        ("ModelError", 5),
        ("Stopped", 75),
    ],
)
def test_exception_carries_its_exit_code(name: str, code: int) -> None:
    assert getattr(errors, name)("why").exit_code == code


def test_a_stop_may_carry_the_code_of_its_reason() -> None:
    assert errors.Stopped("too many errors", exit_code=errors.EXIT_ROW_ERRORS).exit_code == 3
    assert errors.Stopped("why").exit_code == 75


def test_exit_codes_that_are_no_exceptions() -> None:
    assert (errors.EXIT_OK, errors.EXIT_ROW_ERRORS, errors.EXIT_SECOND_SIGNAL) == (0, 3, 130)


def test_every_exception_that_ends_a_run_is_in_one_tree_and_in_the_table() -> None:
    classes = [c for _, c in inspect.getmembers(errors, inspect.isclass) if issubclass(c, Exception)]
    table = errors.__doc__ or ""

    for cls in classes:
        if cls is not RowFailure:
            assert issubclass(cls, CbgenError)
            assert f"{cls.__name__} " in table
            assert f" {cls.exit_code} " in next(line for line in table.splitlines() if cls.__name__ in line)


def test_row_failure_is_no_error_of_the_run() -> None:
    failure = RowFailure("empty_prompt", "why")

    assert not isinstance(failure, CbgenError)
    assert failure.error == RowError("empty_prompt", "why")


@pytest.mark.parametrize("cls", [RowError, RowFailure])
def test_code_outside_the_list_is_refused(cls: type) -> None:
    with pytest.raises(AssertionError, match="unknown row error code 'oops'"):
        cls("oops", "why")


@pytest.mark.parametrize("code", ROW_ERROR_CODES)
def test_documented_code_is_taken_and_used_somewhere(code: str) -> None:
    assert RowError(code, "why").code == code
    assert any(code in literals(path) for path in sources() if path.name != "errors.py")


def test_every_code_that_the_source_names_is_in_the_list() -> None:
    named = {
        node.args[0].value
        for path in sources()
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Call)
        and isinstance(node.func, ast.Name)
        and node.func.id in ("RowError", "RowFailure")
        and node.args
        and isinstance(node.args[0], ast.Constant)
    }

    assert len(named) > 10
    assert named <= set(ROW_ERROR_CODES)


def sources() -> list[Path]:
    return sorted(Path(cbgen.__path__[0]).rglob("*.py"))


def literals(path: Path) -> set[str]:
    return {
        node.value
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Constant) and isinstance(node.value, str)
    }
