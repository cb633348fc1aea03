"""The command line: help, precedence of flag, environment and file, and user mistakes. No model is loaded here."""

import json
import re
import shlex
import subprocess
import sys
import time
from pathlib import Path

import click
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cbgen import cli
from cbgen.config import EngineConfig, ErrorAllowance, OutputConfig, ReportConfig, RunConfig, StopConfig
from cbgen.errors import CbgenError, RefusedError, Stopped
from cbgen.options import Duration, GroupedOption
from cbgen.params import PARAM_NAMES
from tests.fuzzing import fuzz

README = (Path(__file__).parent.parent / "README.md").read_text("utf-8")
SPELLINGS = {
    spelling: param
    for param in cli.run.params
    if isinstance(param, GroupedOption) and param.name not in ("config", "print_config")
    for spelling in param.spellings
}
A_VALUE = {
    "format": "parquet", "dtype": "float32", "on_too_long": "error", "batching": "static", "order": "longest",
    "disable": "prediction", "progress": "bar",
    "chat_template_kwargs": "{}", "logit_bias": "{}", "fail_on_error": "0.1",
    **dict.fromkeys(
        ("output", "state_dir", "keep", "result_prefix", "model", "revision", "device", "template", "prompt_column",
         "messages_column", "system", "chat_template", "stop"), "text"),
}  # fmt: skip


@pytest.fixture
def configs(monkeypatch):
    """What `cbgen run` would have run."""
    seen = []
    monkeypatch.setattr("cbgen.pipeline.run", lambda config: seen.append(config) or 0)
    return seen


def run(*arguments):
    with pytest.raises(SystemExit) as exit_:
        cli.main(["run", "in.jsonl", "-o", "out.jsonl", *arguments])
    return exit_.value.code


def test_help_is_quick_and_imports_no_torch():
    code = "import sys; from cbgen.cli import cli; cli(['run', '--help'], standalone_mode=False); " + (
        "assert not {'torch', 'transformers', 'pyarrow'} & set(sys.modules)"
    )
    seconds = []
    for _ in range(3):
        started = time.perf_counter()
        subprocess.run([sys.executable, "-c", code], check=True, capture_output=True)
        seconds.append(time.perf_counter() - started)
    assert min(seconds) < 0.3


def test_help_groups_its_options(capsys):
    cli.main(["run", "--help"])
    text = capsys.readouterr().out
    headings = re.findall(r"^(\w[^\n]*):$", text, re.MULTILINE)
    assert [heading.split(" (")[0] for heading in headings] == [
        "Output", "Input", "Model", "Prompts", "Sampling", "Engine", "Stopping", "Progress", "Other",
    ]  # fmt: skip


def test_flag_beats_environment_beats_file_beats_default(configs, monkeypatch, tmp_path):
    file = tmp_path / "c.yaml"
    file.write_text("max-num-seqs: 3\ntop_k: 5\nseed: 9\nstop: [a, b]\nchat_template_kwargs: {x: 1}\n")
    monkeypatch.setenv("CBGEN_TOP_K", "6")
    monkeypatch.setenv("CBGEN_SEED", "10")
    assert run("--config", str(file), "--seed", "11") == 0
    config = configs[0]
    assert config.engine.max_num_seqs == 3
    assert config.sampling == {"top_k": 6, "seed": 11, "stop": ("a", "b")}
    assert config.prompt.chat_template_kwargs == {"x": 1}


def test_toml_config(configs, tmp_path):
    file = tmp_path / "c.toml"
    file.write_text('model = "x/y"\nkv-cache-memory = "2G"\n')
    run("--config", str(file))
    assert (configs[0].model.name, configs[0].engine.kv_cache_memory) == ("x/y", 2 << 30)


@pytest.mark.parametrize(
    ("content", "says"),
    [
        ("temprature: 1", "sets 'temprature', which is no option of `cbgen run`; did you mean 'temperature'?"),
        ("engine: {max-num-seqs: 2}", "'engine'"),
        ("- a", "mapping"),
        ("5", "mapping"),
        ("a: [", "line 2"),
        ("1: 2", "sets 1,"),
        ("on: 1", "sets True,"),
        ("? [a]\n: b", "line 1"),
        ("top-k: 1\ntop_k: 2", "'top-k' and 'top_k'"),
        ("top-k: 1\ntop-k: 2", "twice"),
        ("keep-special-tokens: true\nskip_special_tokens: true", "are the same option"),
        ("max-tokens: true", "max-tokens to True, but it must be a whole number"),
        ("max-tokens: 1.5", "whole number"),
        ("max_tokens: [1]", "whole number"),
        ("max_tokens: {a: 1}", "whole number"),
        ("seed: lots", "set by file"),
        ("temperature: [0.5]", "must be a number"),
        ("kv-cache-memory: [1]", "must be a number"),
        ("max-time: .inf", "--max-time"),
        ("overwrite: 1", "true or false"),
        ("progress: off", "one of auto, bar, plain, none"),
        ("stop: [a, 3]", "stop to 3"),
        ("revision: 2024-01-01", "in quotes"),
        ("seed: 2024-13-45", "cannot read"),
        ("chat_template_kwargs: [1]", "a mapping"),
        ("chat_template_kwargs: {a: .nan}", "not valid JSON"),
        ("chat_template_kwargs: &a {x: *a}", "not valid JSON"),
        ("limit: 99999999999999999999", "too large"),
        ('model: "a\\0b"', "NUL"),
        ("!!python/object/apply:os.getcwd []", "line 1"),
        ("a: " + "[" * 5000, "deep"),
    ],
)
def test_a_config_file_with_a_mistake_is_refused_in_one_sentence(configs, tmp_path, capsys, content, says):
    file = tmp_path / "c.yaml"
    file.write_text(content + "\n")
    assert run("--config", str(file)) == 2
    message = capsys.readouterr().err
    assert says in message
    assert message.startswith("cbgen: ")
    assert message.count("\n") == 1
    assert configs == []


@pytest.mark.parametrize(
    ("name", "content", "says"),
    [
        ("c.toml", b"a = [", "cannot read"),
        ("c.yaml", b"\xff", "UTF-8"),
        ("c.toml", b"seed = 1\nseed = 2", "cannot read"),
    ],
)
def test_a_config_file_that_cannot_be_read_is_refused(configs, tmp_path, capsys, name, content, says):
    (tmp_path / name).write_bytes(content)
    assert run("--config", str(tmp_path / name)) == 2
    assert says in capsys.readouterr().err
    assert run("--config", str(tmp_path / "none.yaml")) == 2


@fuzz(150)
@given(
    st.dictionaries(
        st.sampled_from(sorted(SPELLINGS)) | st.text(max_size=5),
        st.recursive(
            st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
            lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=2),
            max_leaves=5,
        ),
        max_size=4,
    )
)
def test_any_config_file_is_taken_or_refused_and_never_a_traceback(tmp_path, monkeypatch, values):
    monkeypatch.setattr("cbgen.pipeline.run", lambda config: 0)
    monkeypatch.chdir(tmp_path)
    file = tmp_path / "c.yaml"
    file.write_text(json.dumps(values))
    assert run("--config", str(file)) in (0, 2)


def test_every_spelling_of_every_option_is_understood_in_files_and_environment(tmp_path, monkeypatch, capsys):
    for spelling, param in SPELLINGS.items():
        value = A_VALUE.get(param.name) or ("true" if param.is_flag else "5")
        (tmp_path / "c.yaml").write_text(f"{spelling.replace('_', '-')}: {value}\n")
        cli.main(["run", "--print-config", "--config", str(tmp_path / "c.yaml")])
        assert capsys.readouterr().out.count("file ") == 1, spelling
        monkeypatch.setenv(f"CBGEN_{spelling.upper()}", str(value))
        cli.main(["run", "--print-config"])
        assert capsys.readouterr().out.count(f"environment CBGEN_{spelling.upper()}\n") == 1, spelling
        monkeypatch.delenv(f"CBGEN_{spelling.upper()}")


@pytest.mark.parametrize(
    ("variable", "text", "name", "value"),
    [
        ("STOP", "a b", "stop", ("a b",)),
        ("STOP", '["a", "b c"]', "stop", ("a", "b c")),
        ("STOP", "[INST]", "stop", ("[INST]",)),
        ("STOP", "[1]", "stop", ("[1]",)),
        ("STOP_TOKEN_ID", "5", "stop_token_ids", (5,)),
        ("STOP_TOKEN_IDS", "5, 6 7", "stop_token_ids", (5, 6, 7)),
        ("STOP_TOKEN_IDS", "[5]", "stop_token_ids", (5,)),
        ("KEEP_SPECIAL_TOKENS", "1", "skip_special_tokens", False),
        ("SKIP_SPECIAL_TOKENS", "no", "skip_special_tokens", False),
        ("INCLUDE_STOP", "true", "include_stop", True),
    ],
)
def test_environment_variables_as_people_write_them(configs, monkeypatch, variable, text, name, value):
    monkeypatch.setenv(f"CBGEN_{variable}", text)
    assert run() == 0
    assert configs[0].sampling == {name: value}


@pytest.mark.parametrize(
    "variables",
    [
        {"STOP_TOKEN_ID": "1", "STOP_TOKEN_IDS": "1"},
        {"KEEP_SPECIAL_TOKENS": "maybe"},
        {"MAX_TOKENS": "x"},
        {"STOP_TOKEN_IDS": "[1, [2]]"},
    ],
)
def test_environment_variables_with_a_mistake_are_refused_by_name(configs, monkeypatch, capsys, variables):
    for name, value in variables.items():
        monkeypatch.setenv(f"CBGEN_{name}", value)
    assert run() == 2
    assert all(f"CBGEN_{name}" in capsys.readouterr().err for name in list(variables)[:1])


def test_a_scalar_in_a_file_is_one_value_of_a_repeatable_option(configs, tmp_path):
    file = tmp_path / "c.yaml"
    file.write_text("stop: gamma\nstop-token-id: 7\nkeep-special-tokens: true\nkeep: a,b\nseed:\n")
    assert run("--config", str(file)) == 0
    assert configs[0].sampling == {"stop": ("gamma",), "stop_token_ids": (7,), "skip_special_tokens": False}
    assert configs[0].output.keep == ("a", "b")


def test_inputs_and_output_may_come_from_a_file(configs, tmp_path):
    (tmp_path / "c.toml").write_text('inputs = ["a.jsonl", "b.jsonl"]\noutput = "o.jsonl"\n')
    with pytest.raises(SystemExit):
        cli.main(["run", "--config", str(tmp_path / "c.toml")])
    assert (configs[0].inputs, configs[0].output.path) == (("a.jsonl", "b.jsonl"), "o.jsonl")


def test_print_config_shows_values_and_where_they_came_from(configs, capsys, monkeypatch, tmp_path):
    (tmp_path / "c.yaml").write_text("top-k: 3\n")
    monkeypatch.setenv("CBGEN_SEED", "4")
    cli.main(["run", "--print-config", "--config", str(tmp_path / "c.yaml"), "--max-time", "2m"])
    rows = [line.split(maxsplit=2) for line in capsys.readouterr().out.splitlines()]
    values = {name: (value, source) for name, value, source in rows}
    assert values["--top-k"] == ("3", f"file {tmp_path / 'c.yaml'}")
    assert values["--seed"] == ("4", "environment CBGEN_SEED")
    assert values["--max-time"] == ("120.0", "flag")
    assert values["--model"] == ("demo", "default")
    assert configs == []


def test_options_reach_the_config(configs):
    run(*shlex.split("--format parquet --rows-per-part 5 --state-dir s --keep a,b --keep c --append-message --source"))
    run(*shlex.split("--max-time 1h --max-output-tokens 9 --grace 2 --fail-on-error 1%"))
    run(*shlex.split("--progress none --progress-interval 2m --json --github --verify"))
    run(*shlex.split("--retry-errors --n 3 --no-github --fail-fast --fail-on-error 3 --keep"), "")
    run(*shlex.split("--order longest --disable prefix-cache,prediction --disable native --decode-steps 6"))
    assert configs[0].output == OutputConfig(
        path="out.jsonl", format="parquet", rows_per_part=5, state_dir="s", keep=("a", "b", "c"), append_message=True,
        source=True,
    )  # fmt: skip
    assert configs[1].stop == StopConfig(
        max_seconds=3600, max_output_tokens=9, grace_seconds=2, fail_on_error=ErrorAllowance(0, 0.01)
    )
    assert configs[2].report == ReportConfig(progress="none", progress_seconds=120, json=True, github=True)
    assert configs[2].verify
    assert (configs[3].output.retry_errors, configs[3].output.keep, configs[3].sampling) == (True, (), {"n": 3})
    assert configs[3].report.github is False
    assert configs[4].engine == EngineConfig(
        order="longest", disabled=frozenset({"native", "prefix-cache", "prediction"}), decode_steps=6
    )
    assert configs[3].stop == StopConfig(fail_fast=True, fail_on_error=ErrorAllowance(3))


def test_defaults_of_the_command_line_are_those_of_the_config(configs):
    run()
    assert configs[0] == RunConfig(inputs=("in.jsonl",), output=OutputConfig(path="out.jsonl"))


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ("--disable fusion,prefix", "--disable prefix: no such optimization; there are native, fusion, "),
        ("--decode-steps 65", "--decode-steps must be between 0 and 64, not 65"),
        ("--resume --overwrite", "exclude each other"),
        ("--retry-errors --overwrite", "exclude each other"),
        ("--verify --overwrite", "exclude each other"),
        ("--verify --retry-errors", "exclude each other"),
        ("--json -o -", "-o -"),
        ("--verify -o -", "-o -"),
        ("--retry-errors -o -", "-o -"),
        ("- -", "stdin"),
        ("--rows-per-part 0", "--rows-per-part"),
        ("--progress-interval nan", "nan"),
        ("--progress-interval inf", "inf"),
        ("--progress-interval 0", "0.1"),
        ("--max-time 1e400", "1e400"),
        ("--max-time -5", "-5"),
        ("--grace -1", "-1"),
        ("--max-output-tokens 0", "--max-output-tokens"),
        ("--fail-on-error 1.5", "fraction"),
        ("--fail-on-error -1", "fraction"),
        ("--fail-on-error nan%", "fraction"),
        ("--limit 99999999999999999999", "too large"),
        ("--format csv", "csv"),
        ("--bogus", "--bogus"),
    ],
)
def test_mistakes_in_options_are_one_sentence(configs, capsys, arguments, says):
    assert run(*arguments.split()) == 2
    message = capsys.readouterr().err
    assert says in message
    assert message.startswith("cbgen: ")
    assert message.count("\n") == 1
    assert configs == []


@pytest.mark.parametrize("option", ["--output", "--stop", "--template", "--model", "--system", "--state-dir", ""])
def test_what_is_not_utf8_is_refused_without_a_traceback(configs, capsys, option):
    assert run(*([option] if option else []), "caf\udce9") == 2
    assert "not valid UTF-8" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("error", "code", "message"),
    [
        (RefusedError("no"), 4, "no"),
        (OSError(28, "full"), 1, "[Errno 28] full; every committed row is safe, and the same command continues"),
        (Stopped("x"), 75, "x"),
    ],
)
def test_what_ends_a_run_early_is_a_record_and_an_annotation(monkeypatch, capsys, error, code, message):
    def fail(config):
        raise error

    monkeypatch.setattr("cbgen.pipeline.run", fail)
    assert run("--json", "--github") == code
    out, err = capsys.readouterr()
    assert json.loads(out) == {"type": "error", "exit_code": code, "message": message}
    assert f"::{'warning' if code == 75 else 'error'}::{message}\n" in err
    assert f"cbgen: {message}\n" in err
    assert run() == code
    assert capsys.readouterr().out == ""


def test_a_fault_of_ours_is_one_sentence_with_its_place(monkeypatch, capsys):
    def fail(config):
        return [][0]

    monkeypatch.setattr("cbgen.pipeline.run", fail)
    assert run("--json") == 1
    out, err = capsys.readouterr()
    assert err.startswith("cbgen: internal fault (IndexError: list index out of range; test_cli.py line ")
    assert err.count("\n") == 1
    assert json.loads(out)["message"] == err.removeprefix("cbgen: ").rstrip()


def test_an_interrupt_while_the_message_is_printed_is_a_second_one(monkeypatch):
    def fail(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr("cbgen.cli._complain", fail)
    assert run("--limit", "x") == 130


def test_a_message_cannot_steer_the_terminal(configs, capsys):
    assert run("--template", "@\x1b[2J") == 2
    assert "\\x1b[2J" in capsys.readouterr().err


def test_no_message_shows_a_secret(monkeypatch, capsys):
    def fail(config):
        raise CbgenError(f"cannot write {config.output.path}")

    monkeypatch.setattr("cbgen.pipeline.run", fail)
    secret = "wJalrXUtnFEMI"
    assert run("--json", "--github", "-o", f"s3://AKIAIOSFODNN7EXAMPLE:{secret}@bucket/out") == 1
    cli.main(["run", "--print-config", "-o", f"s3://AKIAIOSFODNN7EXAMPLE:{secret}@bucket/out"])
    out, err = capsys.readouterr()
    assert "bucket/out" in out
    assert secret not in out + err


def test_a_mistake_in_options_is_a_record_too(configs, capsys):
    assert run("--json", "--resume", "--overwrite") == 2
    assert json.loads(capsys.readouterr().out)["exit_code"] == 2


def test_a_time_as_people_write_it():
    assert [Duration().convert(text, None, None) for text in ("5", "90s", "1.5m", "2H", "1d", 7)] == [
        5, 90, 90, 7200, 86400, 7,
    ]  # fmt: skip


@pytest.mark.parametrize("command", ["simulate --lengths 5,5", "run --help", "run --print-config"])
@pytest.mark.parametrize(("redirect", "code"), [("| true", 1), (">&-", 0), (">/dev/full", 1), ("2>&-", 0)])
def test_a_stdout_that_is_closed_or_full_ends_without_a_traceback(command, redirect, code):
    result = subprocess.run(
        ["bash", "-c", f"sleep 0.1; {sys.executable} -m cbgen {command} {redirect}; exit ${{PIPESTATUS[0]}}"],
        capture_output=True, text=True,
    )  # fmt: skip
    assert "Traceback" not in result.stderr
    assert "Exception ignored" not in result.stderr
    assert result.returncode == code or (redirect == "| true" and result.returncode == 0)


@pytest.mark.parametrize(
    ("text", "size"), [("1024", 1024), ("512M", 512 << 20), ("1.5g", 3 << 29), ("2GiB", 2 << 30), ("4kb", 4096)]
)
def test_sizes_as_people_write_them(text, size):
    assert cli.Size().convert(text, None, None) == size


def test_a_size_that_is_none_is_a_usage_error(configs, capsys):
    assert run("--kv-cache-memory", "lots") == 2
    assert "512M" in capsys.readouterr().err


def test_template_from_a_file(configs, tmp_path, capsys):
    (tmp_path / "t.jinja").write_text("{{ x }}\n")
    run("--template", f"@{tmp_path / 't.jinja'}")
    assert configs[0].prompt.template == "{{ x }}"
    assert run("--template", "@nowhere") == 2
    assert "cannot read nowhere" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("data", "template"),
    [
        (b"{{ x }}", "{{ x }}"),
        (b"{{ x }}\n\n", "{{ x }}\n"),
        (b"a\r\n{{ x }}\r\n", "a\r\n{{ x }}"),
        (b"{{ x }}\r", "{{ x }}\r"),
        (b"\xef\xbb\xbf{{ x }}\n", "{{ x }}"),
        (b"\n", ""),
        (b"", ""),
    ],
)
def test_byte_order_mark_and_last_line_end_of_a_template_file_are_dropped(configs, tmp_path, data, template):
    (tmp_path / "t.jinja").write_bytes(data)
    run("--template", f"@{tmp_path / 't.jinja'}", "--chat-template", str(tmp_path / "t.jinja"))
    assert configs[0].prompt.template == template
    assert configs[0].prompt.chat_template == data.removeprefix(b"\xef\xbb\xbf").decode()


def test_a_template_given_as_text_stays_as_it_is(configs):
    run("--template", "{{ x }}\n")
    assert configs[0].prompt.template == "{{ x }}\n"


def test_every_sampling_parameter_is_an_option():
    options = {param.name for param in cli.run.params}
    assert set(PARAM_NAMES) <= options


def test_usage_errors_exit_2(capsys):
    with pytest.raises(SystemExit) as exit_:
        cli.main(["run", "in.jsonl"])
    assert exit_.value.code == 2
    assert "--output" in capsys.readouterr().err


def test_every_option_is_in_the_readme():
    """The README's option tables are complete, and name no option that does not exist."""
    options = {
        name
        for command in cli.cli.commands.values()
        for param in command.params
        if isinstance(param, click.Option)
        for name in (*param.opts, *param.secondary_opts)
        if name.startswith("--")
    }
    named = set(re.findall(r"`(--[a-z][a-z-]*)", README))
    assert options - named == set()
    assert named - options <= {"--help", "--no-deps", "--version"}
