"""The command line: help, precedence of flag, environment and file, and user mistakes. No model is loaded here."""

import re
import subprocess
import sys
import time
from pathlib import Path

import click
import pytest

from cbgen import cli
from cbgen.params import PARAM_NAMES

README = (Path(__file__).parent.parent / "README.md").read_text("utf-8")


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
        "Output", "Input", "Model", "Prompts", "Sampling", "Engine", "Progress", "Other",
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
    ("content", "says"), [("temprature: 1\n", "'temprature'"), ("- a\n", "mapping"), ("a: [\n", "cannot read")]
)
def test_a_config_file_with_a_mistake_is_refused(configs, tmp_path, capsys, content, says):
    file = tmp_path / "c.yaml"
    file.write_text(content)
    assert run("--config", str(file)) == 2
    assert says in capsys.readouterr().err
    assert configs == []


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
    assert configs[0].prompt.template == "{{ x }}\n"
    assert run("--template", "@nowhere") == 2
    assert "cannot read nowhere" in capsys.readouterr().err


def test_every_sampling_parameter_is_an_option():
    options = {param.name for param in cli.run.params}
    assert set(PARAM_NAMES) <= options


def test_resume_and_overwrite_exclude_each_other(configs, capsys):
    assert run("--resume", "--overwrite") == 2


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
