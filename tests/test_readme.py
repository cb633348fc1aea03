"""The README tells the truth: error codes, exit codes, summary fields, and the simulator's output as it really is."""

import re
from pathlib import Path

import pytest
import yaml

from cbgen import errors
from cbgen.cli import cli, main
from cbgen.records import EngineStats, Tally
from cbgen.report.metrics import RunSummary, Timings, summarize

README = (Path(__file__).parent.parent / "README.md").read_text("utf-8")


def test_every_error_code_is_listed_with_its_meaning():
    listed = dict(re.findall(r"^\| `(\w+)` \| (.+) \|$", README, re.MULTILINE))
    assert {code: listed.get(code) for code in errors.ROW_ERROR_CODES} == errors.ROW_ERROR_CODES


def test_every_exit_code_is_listed():
    codes = {errors.EXIT_OK, errors.EXIT_ROW_ERRORS, errors.EXIT_SECOND_SIGNAL}
    codes |= {kind.exit_code for kind in (errors.CbgenError, *errors.CbgenError.__subclasses__())}
    assert {int(code) for code in re.findall(r"^\| (\d+) \| ", README, re.MULTILINE)} == codes


def test_every_summary_field_is_documented():
    summary = summarize(
        RunSummary(
            complete=True,
            tally=Tally(),
            resumed_rows=0,
            prompt_tokens=0,
            completion_tokens=0,
            timings=Timings(),
            stats=EngineStats(),
            slots=0,
            peak_memory_bytes=0,
            peak_device_memory_bytes=0,
            settings={},
            versions={},
        )
    )
    section = README.split("## The summary, for scripts")[1].split("\n## ")[0]
    documented = set(re.findall(r"`(\w+)`", section))
    assert {*summary, *summary["step_seconds"]} <= documented


def test_the_recipe_for_ci_is_valid_and_its_commands_are_understood(tmp_path):
    recipe = yaml.safe_load(re.search(r"```yaml\n(jobs:.*?)```", README, re.DOTALL)[1])
    commands = [step["run"].split() for step in recipe["jobs"]["generate"]["steps"] if "run" in step]
    assert commands[0] == ["make", "setup"]
    names = set()
    for program, name, *arguments in commands[1:]:
        assert program == ".venv/bin/cbgen"
        cli.commands[name].make_context(name, arguments)
        names.add(name)
    assert names == {"run", "doctor"}


def test_the_simulator_prints_what_the_readme_shows(capsys):
    for command, shown in re.findall(r"^\$ cbgen simulate (.+)\n((?:.*\n)+?)```", README, re.MULTILINE):
        main(["simulate", *command.split()])
        assert capsys.readouterr().out.rstrip() == shown.rstrip()
        break
    else:
        pytest.fail("the README shows no simulation")


def test_the_picture_is_what_the_simulator_draws(tmp_path):
    main(["simulate", "--lengths", "100,20,50,200,30", "--svg", str(tmp_path / "slots.svg")])
    stored = Path(__file__).parent.parent / "examples" / "slots.svg"
    assert (tmp_path / "slots.svg").read_text() == stored.read_text()
