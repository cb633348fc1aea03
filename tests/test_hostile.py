"""Whatever people, rows and machines do: a documented exit code, one sentence, and no file touched that is not ours."""

import json
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pyarrow.parquet as pq
import pytest

from cbgen.cli import main
from tests.quick import Quick, SteadyEngine

REPOSITORY = Path(__file__).parent.parent
EXIT_CODES = {0, 1, 2, 3, 4, 5, 75, 130}


@pytest.fixture
def quick(tmp_path, monkeypatch):
    """Three good rows; the directory is the working directory."""
    quick = Quick(tmp_path / "work")
    quick.write([{"id": number, "prompt": f"p{number}"} for number in range(3)])
    monkeypatch.chdir(quick.directory)
    return quick


def run(quick, *options, output="out.jsonl", model="model"):
    """The command as it is typed, with relative paths."""
    outcome = quick.command("run", "in.jsonl", "-o", output, "--model", model, *map(str, options))
    assert outcome.code in EXIT_CODES
    assert "Traceback" not in outcome.stderr
    assert "internal fault" not in outcome.stderr
    return outcome


def tree(directory):
    """Every path with its content, links with where they lead."""
    found = {}
    for path in sorted(directory.rglob("*")):
        name = str(path.relative_to(directory))
        if path.is_symlink():
            found[name] = os.readlink(path)
        else:
            found[name] = path.read_bytes() if path.is_file() else None
    return found


def assert_refused(outcome, code, says):
    assert (outcome.code, outcome.stdout) == (code, ""), outcome.message
    assert says in outcome.message
    assert "\n" not in outcome.message


# -- templates --------------------------------------------------------------------------------------------------------

BOMBS = [
    "{{ 2**100000000 }}",
    "{{ prompt * 10**9 }}",
    "{{ range(10**9)|list }}",
    "{{ ('x' * 99999999)|replace('x', 'yy' * 9999) }}",
    "{{ '%999999999d'|format(1) }}",
    "{{ '{:999999999}'.format(1) }}",
    "{{ 'a'.center(999999999) }}",
    "{{ [1] * 10**9 }}",
    "{{ prompt|indent(999999999) }}",
    "{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}",
]
ESCAPES = [
    "{{ ''.__class__.__mro__[1].__subclasses__() }}",
    "{{ prompt.__class__ }}",
    "{{ cycler.__init__.__globals__.os.popen('touch pwned') }}",
    "{{ lipsum.__globals__['os'].system('touch pwned') }}",
    "{{ self._TemplateReference__context }}",
    "{{ '' | attr('__class__') }}",
    "{{ dict(a=1).__init__.__globals__ }}",
    "{{ joiner.__init__.__globals__ }}",
    "{{ '{0.__class__.__init__.__globals__}'.format(id) }}",
    "{{ prompt.format.__globals__ }}",
    "{{ id.bit_length.__self__.__class__ }}",
]
UNPARSED = ["{% include '/etc/passwd' %}", "{% import 'os' as x %}", "{% extends 'x' %}", "{{ x", "{{ a|nosuch }}"]


@pytest.mark.parametrize("template", [*BOMBS, *ESCAPES])
def test_a_template_can_neither_escape_nor_explode(quick, template):
    before = set(tree(quick.directory))
    assert run(quick, "--template", template).code == 3
    assert {row["error"]["code"] for row in quick.records()} == {"template_error"}
    made = set(tree(quick.directory)) - before
    assert all(name.startswith("out.jsonl") for name in made)


@pytest.mark.parametrize("template", UNPARSED)
def test_a_template_that_cannot_be_used_is_refused_at_once(quick, template):
    before = tree(quick.directory)
    assert_refused(run(quick, "--template", template), 2, "--template")
    assert tree(quick.directory) == before


def test_a_row_cannot_be_a_template(quick):
    quick.write([{"prompt": text, "id": 1} for text in (*BOMBS, *ESCAPES, *UNPARSED)])
    assert run(quick, "--template", "{{ prompt }}").code == 0
    assert sorted(quick.asked) == sorted([*BOMBS, *ESCAPES, *UNPARSED])


def test_a_template_that_takes_for_ever_can_be_stopped(tmp_path):
    quick = Quick(tmp_path)
    quick.write([{"prompt": "a"}])
    endless = "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}"
    command = [sys.executable, "-m", "tests.quick", str(tmp_path), "0", "run", str(quick.path("in.jsonl"))]
    command += ["-o", str(quick.path("out.jsonl")), "--model", str(quick.path("model")), "--template", endless]
    process = subprocess.Popen(command, cwd=REPOSITORY, stderr=subprocess.PIPE, text=True)
    state = quick.path("out.jsonl.cbgen/state.json")
    deadline = time.monotonic() + 60
    while not state.exists() and time.monotonic() < deadline:
        time.sleep(0.01)
    process.send_signal(signal.SIGTERM)
    _, errors = process.communicate(timeout=30)
    assert process.returncode == 75
    assert "stopped by SIGTERM after row 0" in errors


@pytest.mark.parametrize(
    ("template", "code", "says"),
    [
        ("{{ 2**100000000 }}", 2, "--chat-template cannot use ** (line 1)"),
        ("{{ x", 2, "--chat-template does not parse"),
        ("{% for m in messages %}", 2, "--chat-template does not parse"),
        ("{% include '/etc/passwd' %}", 3, "template_error"),
        ("{{ ''.__class__.__mro__[1].__subclasses__() }}", 3, "template_error"),
        ("{{ cycler.__init__.__globals__.os.popen('touch pwned') }}", 3, "template_error"),
        ("{{ messages.append(1) }}", 3, "template_error"),
        ("{% for i in range(9999999) %}{% endfor %}", 3, "template_error"),
        ("{{ raise_exception('no\nway') }}", 3, "template_error"),
    ],
)
def test_a_chat_template_is_held_in_the_same_sandbox(tmp_path, chain_model, capsys, template, code, says):
    (tmp_path / "in.jsonl").write_text('{"messages": [{"role": "user", "content": "hi"}]}\n')
    (tmp_path / "template").write_text(template)
    output = tmp_path / "out.jsonl"
    options = ["-o", str(output), "--model", str(chain_model), "--chat-template", str(tmp_path / "template")]
    with pytest.raises(SystemExit) as exit_:
        main(["run", str(tmp_path / "in.jsonl"), *options])
    assert exit_.value.code == code
    assert says in (capsys.readouterr().err if code == 2 else json.loads(output.read_text())["error"]["code"])
    assert not list(Path().glob("**/pwned"))


@pytest.mark.parametrize("name", ["messages", "conversation", "tokenize", "add_generation_prompt", "chat_template"])
def test_arguments_of_the_call_are_no_variables_of_a_template(quick, name):
    outcome = run(quick, "--chat-template-kwargs", json.dumps({name: 1}))
    assert_refused(outcome, 2, f"--chat-template-kwargs cannot set {name!r}")


# -- paths ------------------------------------------------------------------------------------------------------------


def circle(quick):
    os.symlink("b", "a.jsonl")
    os.symlink("a.jsonl", "b")
    return "a.jsonl"


def link_to_nowhere(quick):
    os.symlink("gone/x.jsonl", "a.jsonl")
    return "a.jsonl"


def directory_of_others(quick):
    quick.write([], "d/notes.txt")
    return "d/"


def part_of_others(quick):
    quick.write([], "d/part-000000.jsonl").write_text("{}\n")
    return "d"


def file_as_directory(quick):
    quick.write([], "f")
    return "f/"


def sidecar_that_is_a_file(quick):
    quick.write([], "out.jsonl.cbgen")
    return "out.jsonl"


def sidecar_of_others(quick):
    quick.write([], "out.jsonl.cbgen/wal-notes.jsonl")
    quick.write([], "out.jsonl.cbgen/summary.json")
    return "out.jsonl"


def pipe(quick):
    os.mkfifo("pipe")
    return "pipe"


@pytest.mark.parametrize("overwrite", [(), ("--overwrite",)], ids=["", "overwrite"])
@pytest.mark.parametrize(
    ("output", "code", "says"),
    [
        (circle, 2, "is a link that leads nowhere"),
        (link_to_nowhere, 2, "is a link that leads nowhere"),
        (file_as_directory, 2, "-o f/"),
        (sidecar_that_is_a_file, 2, "out.jsonl.cbgen is no directory; move it away"),
        (sidecar_of_others, 4, "holds other files ('wal-notes.jsonl')"),
        (pipe, 2, "is no regular file"),
        (".", 4, "is the input"),
        ("..", 4, "is the input"),
        ("/", 4, "is the input"),
        ("./in.jsonl", 4, "is the input"),
        ("in.jsonl/out.jsonl", 2, "Not a directory"),
        ("n" * 300 + ".jsonl", 2, "File name too long"),
        ("n" * 245 + ".parquet", 2, "File name too long"),
        ("/".join(["d" * 200] * 30), 2, "File name too long"),
        ("/dev/null", 2, "is no regular file"),
        ("/proc/self/out.jsonl", 2, "No such file or directory"),
        ("foo://x/y", 2, "foo:// is not known"),
        ("s3://", 2, "names no bucket"),
    ],
    ids=lambda value: value if isinstance(value, str) and len(value) < 40 else getattr(value, "__name__", ""),
)
def test_an_output_that_cannot_be_is_refused_and_touches_nothing(quick, output, code, says, overwrite):
    path = output if isinstance(output, str) else output(quick)
    quick.make_engine = lambda: pytest.fail("the model was loaded")
    before = tree(quick.directory.parent)
    outcome = run(quick, *overwrite, output=path)
    if "Not a directory" in outcome.message:
        says = "Not a directory"
    assert_refused(outcome, code, says)
    assert tree(quick.directory.parent) == before


@pytest.mark.parametrize("output", [directory_of_others, part_of_others])
def test_a_directory_of_others_is_refused_and_with_overwrite_kept(quick, output):
    path = output(quick)
    before = tree(quick.directory)
    assert_refused(run(quick, output=path), 4, "was not made by a run that can be continued")
    assert tree(quick.directory) == before
    assert run(quick, "--overwrite", output=path).code == 0
    (backup,) = quick.directory.glob("d.backup-*")
    assert {path.name for path in backup.iterdir()} == {Path(name).name for name in before if name.startswith("d/")}


@pytest.mark.parametrize(
    "name",
    [
        "a\nb",
        "%s%20",
        "ünïcode 🎉",
        " ",
        "-x",
        "~",
        "a'b\"c",
        "$(touch pwned)",
        "a;b",
        "c\\d",
        "[x]*?",
        "x" * 230,
        "\x1b[2J",
    ],
    ids=ascii,
)
def test_names_are_only_names(quick, name):
    for suffix in (".jsonl", ".parquet", "/"):
        assert run(quick, output=f"{name}{suffix}").code == 0
        assert run(quick, output=f"{name}{suffix}").code == 0
    outcome = run(quick, "--verify", output=f"{name}.jsonl")
    assert outcome.code == 0
    assert all(character.isprintable() or character == "\n" for character in outcome.stderr)
    made = {path.name for path in quick.directory.iterdir()} - {"in.jsonl", "model"}
    assert made == {name, *(f"{name}{end}" for end in (".jsonl", ".jsonl.cbgen", ".parquet", ".parquet.cbgen"))}


@pytest.mark.skipif(not hasattr(os, "geteuid") or os.geteuid() == 0, reason="root may write anywhere")
def test_a_directory_without_permission_is_refused(quick):
    Path("d").mkdir(mode=0o500)
    assert_refused(run(quick, output="d/out.jsonl"), 2, "Permission denied")


# -- state directories ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("overwrite", [(), ("--overwrite",)], ids=["", "overwrite"])
@pytest.mark.parametrize("directory", [".", "model", "mine"])
def test_a_state_directory_with_other_files_is_refused(quick, directory, overwrite):
    for name in ("draft.tmp", "summary.json", "marks", "retry/x", "notes.txt", *(["run.json"] if overwrite else [])):
        quick.write([{"mine": 1}], f"mine/{name}")
    before = tree(quick.directory)
    outcome = run(quick, "--state-dir", directory, *overwrite)
    assert outcome.code == 4
    assert tree(quick.directory) == before


def test_two_outputs_that_share_a_state_directory_harm_neither(quick):
    run(quick, "--state-dir", "state", output="a.jsonl")
    whole = quick.path("a.jsonl").read_bytes()
    quick.write([{"prompt": "other"}] * 9, "other.jsonl")
    outcome = quick.command(
        "run", "other.jsonl", "-o", "b.jsonl", "--model", "model", "--state-dir", "state", "--overwrite"
    )
    assert outcome.code == 0
    assert run(quick, "--state-dir", "state", output="a.jsonl").code == 4
    assert quick.path("a.jsonl").read_bytes() == whole
    assert len(quick.records("b.jsonl")) == 9


def test_two_runs_at_once_write_one_output(tmp_path):
    quick = Quick(tmp_path)
    quick.write([{"prompt": f"p{number}"} for number in range(40)])
    command = [sys.executable, "-m", "tests.quick", str(tmp_path), "0.02", "run", str(quick.path("in.jsonl"))]
    command += ["-o", str(quick.path("out.jsonl")), "--model", str(quick.path("model"))]
    both = [
        subprocess.Popen(command, cwd=REPOSITORY, stderr=subprocess.PIPE, text=True, start_new_session=True)
        for _ in range(3)
    ]
    messages = [process.communicate(timeout=60)[1] for process in both]
    codes = sorted(process.returncode for process in both)
    assert codes == [0, 4, 4] or codes == [0, 0, 4] or codes == [0, 0, 0], messages  # a late one finds all done
    assert all("another run is writing" in m for m, p in zip(messages, both, strict=True) if p.returncode == 4)
    assert [row["completion"] for row in quick.records()] == [f"re:p{number}" for number in range(40)]


# -- models and settings ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "model",
    ["", "/", ".", "/etc/passwd", "a/b/c", "-x", "../x", "x" * 5000, "~", "x\ny", "demo ", "%s", "in.jsonl", "a/b@c"],
    ids=lambda name: ascii(name[:20]),
)
def test_a_model_that_is_none_is_one_sentence(quick, model):
    before = tree(quick.directory)
    outcome = run(quick, model=model)
    assert outcome.code == 5
    assert outcome.message.startswith("--model ")
    assert tree(quick.directory) == before


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (("--repetition-penalty", "1e39"), "repetition_penalty must be"),
        (("--limit", 2**70), "--limit 1180591620717411303424 is too large"),
        (("--fail-on-error", 10**30), "is neither a count"),
        (("--progress-interval", "nan"), "is not a time"),
        (("--grace", "inf"), "is not a time"),
        (("--max-time", "1e999"), "is not a time"),
        (("--kv-cache-memory", "1e999"), "is not a size"),
        (("--rows-per-part", 2**64), "is too large"),
        (("--n", 10**6), "n must be from 1"),
        (("--logit-bias", "[" * 100_000), "not valid JSON"),
        (("--logit-bias", '{"5": 1e999}'), "logit_bias must be"),
        (("--chat-template-kwargs", '{"a":' * 5000 + "1" + "}" * 5000), "not valid JSON"),
        (("--prompt-column", "x" * 10**5), "--prompt-column"),
        (("--system", "x\0y"), "holds a NUL character"),
        (("--config", "/dev/zero"), "it is larger than 16 MiB"),
        (("--config", "/"), "Is a directory"),
        (("--template", "@/dev/zero"), "it is larger than 16 MiB"),
        (("--chat-template", "/dev/zero"), "it is larger than 16 MiB"),
        (("--chat-template", "/"), "Is a directory"),
        (("--template", "@in.jsonl/x"), "Not a directory"),
        (("--state-dir", "x" * 300), "File name too long"),
    ],
    ids=lambda value: str(value)[:40],
)
def test_absurd_settings_are_refused_before_anything_happens(quick, options, says):
    quick.make_engine = lambda: pytest.fail("the model was loaded")
    before = tree(quick.directory)
    assert_refused(run(quick, *options), 2, says)
    assert tree(quick.directory) == before


@pytest.mark.parametrize(
    "options",
    [
        ("--limit", 2**63 - 1),
        ("--max-output-tokens", 2**63 - 1),
        ("--max-time", "1e300"),
        ("--grace", "1e300"),
        ("--rows-per-part", 2**63 - 1),
        ("--max-tokens", 2**62),
        ("--min-tokens", 2**62),
        ("--top-k", 2**62),
        ("--temperature", "1e-320"),
        ("--fail-on-error", 2**63 - 1),
        ("--stop", "x" * 10**5),
        ("--result-prefix", "\n"),
        ("--system", ""),
    ],
    ids=lambda value: str(value)[:40],
)
def test_large_settings_are_just_settings(quick, options):
    assert run(quick, *options).code == 0
    assert len(quick.records()) == 3
    assert run(quick, *options).code == 0, "they are stored and read again"


@pytest.mark.parametrize(
    "options", [("--max-num-seqs", 2**62), ("--max-num-seqs", 10**7), ("--max-num-batched-tokens", 2**62)], ids=str
)
def test_steps_that_are_too_large_are_blamed_for_it(tmp_path, chain_model, capsys, options):
    (tmp_path / "in.jsonl").write_text('{"prompt": "1"}\n')
    arguments = ["-o", str(tmp_path / "out.jsonl"), "--model", str(chain_model), *map(str, options)]
    with pytest.raises(SystemExit) as exit_:
        main(["run", str(tmp_path / "in.jsonl"), *arguments])
    assert exit_.value.code == 5
    assert "lower --max-num-batched-tokens or --max-num-seqs" in capsys.readouterr().err
    assert not (tmp_path / "out.jsonl.cbgen").exists()


def test_a_prompt_beyond_the_context_is_no_warning(tmp_path, chain_model):
    """transformers would say that the token indices sequence length is longer than the specified maximum."""
    (tmp_path / "in.jsonl").write_text(json.dumps({"prompt": "x" * 500}) + "\n")
    command = [sys.executable, "-m", "cbgen", "run", str(tmp_path / "in.jsonl"), "--model", str(chain_model)]
    command += ["-o", str(tmp_path / "out.jsonl"), "--progress", "none", "--on-too-long", "truncate-left"]
    result = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, check=False, timeout=120)
    assert result.returncode == 0
    assert "sequence length" not in result.stderr
    assert result.stdout == ""


@pytest.mark.parametrize(
    ("variables", "code"),
    [
        ({"CBGEN_MAX_TOKENS": "x"}, 2),
        ({"CBGEN_JSON": "maybe"}, 2),
        ({"CBGEN_CONFIG": "/nowhere"}, 2),
        ({"CBGEN_LOGIT_BIAS": "{"}, 2),
        ({"CBGEN_STOP": "[" * 5000}, 0),
        ({"CBGEN_LIMIT": ""}, 0),
        ({"CBGEN_NOSUCH": "1"}, 0),
        ({"TMPDIR": "/nowhere", "HOME": "/nowhere"}, 0),
        ({"LC_ALL": "C", "LANG": "xx_YY.bad"}, 0),
        ({"COLUMNS": "-5", "LINES": "x"}, 0),
        ({"GITHUB_ACTIONS": "true", "GITHUB_STEP_SUMMARY": "/dev/full"}, 0),
        ({"GITHUB_ACTIONS": "true", "GITHUB_STEP_SUMMARY": "/nowhere/x", "GITHUB_WORKSPACE": "\udcff"}, 0),
        ({"CI": "\udcff", "TQDM_MININTERVAL": "x"}, 0),
    ],
    ids=str,
)
def test_garbage_in_the_environment(quick, monkeypatch, variables, code):
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert run(quick).code == code


def test_a_limit_of_no_rows(quick):
    outcome = run(quick, "--limit", "0")
    assert outcome.code == 0
    assert "nothing to generate: --limit is 0" in outcome.stderr
    assert quick.records() == []


# -- rows -------------------------------------------------------------------------------------------------------------

ODD_NAMES = ["", " ", "\n", "a.b", "\x00", "é", "e\u0301", "__class__", "\U0001f600", 'a"b\\', "X", "x", "k" * 10**5]


@pytest.mark.parametrize("output", ["out.jsonl", "out.parquet"])
def test_columns_of_any_name_are_carried_through(quick, output):
    row = {"prompt": "a\x00b", **{name: number for number, name in enumerate(ODD_NAMES)}}
    quick.write([row, row])
    assert run(quick, output=output).code == 0
    assert run(quick, "--verify", output=output).code == 0
    found = quick.records() if output.endswith("jsonl") else pq.read_table(quick.path(output)).to_pylist()
    assert [{name: record[name] for name in row} for record in found] == [row, row]
    assert [record["completion"] for record in found] == ["re:a\x00b"] * 2


@pytest.mark.parametrize("output", ["out.jsonl", "out.parquet"])
def test_ten_thousand_columns(quick, output):
    row = {"prompt": "a", **{f"c{number}": number for number in range(10_000)}}
    quick.write([row] * 2)
    assert run(quick, output=output).code == 0
    found = quick.records() if output.endswith("jsonl") else pq.read_table(quick.path(output)).to_pylist()
    assert [{name: record[name] for name in row} for record in found] == [row] * 2


@pytest.mark.parametrize("output", ["out.jsonl", "out.parquet"])
def test_values_nested_deeper_than_parquet_can_be_read(quick, output):
    value = json.loads("[" * 200 + "]" * 200)
    objects = json.loads('{"a":' * 60 + "1" + "}" * 60)
    quick.write([{"prompt": "a", "x": value, "y": objects}] * 2)
    assert run(quick, output=output).code == 0
    records = quick.records() if output.endswith("jsonl") else pq.read_table(quick.path(output)).to_pylist()
    if output.endswith("parquet"):
        records = [json.loads(record["extra_columns"]) for record in records]
    assert [(record["x"], record["y"]) for record in records] == [(value, objects)] * 2


def test_a_key_that_stands_twice_counts_once(quick):
    quick.write(['{"prompt": "a", "prompt": "b", "x": 1, "x": 2}'])
    run(quick)
    (record,) = quick.records()
    assert (record["prompt"], record["x"], record["completion"]) == ("b", 2, "re:b")


def test_rows_cannot_say_where_things_are(quick):
    """Names of settings and paths in a row are only columns."""
    row = {"prompt": "a", "output": "/tmp/pwned", "model": "/", "template": "{{ 1 }}", "chat_template": "{{ 1 }}"}
    quick.write([{**row, "sampling_params": {name: 1}} for name in ("output", "__class__", "chat_template")] + [row])
    assert run(quick).code == 3
    codes = [record["error"] and record["error"]["code"] for record in quick.records()]
    assert codes == ["invalid_params"] * 3 + [None]
    assert quick.asked == ["a"]


def test_nothing_is_read_or_written_elsewhere(quick):
    """Every file that a run opens for writing is the output or in its sidecar."""
    opened = []

    def audit(event, arguments):
        if threading.current_thread() is not recorder["main"] or not recorder["on"]:
            return
        if event == "open" and isinstance(arguments[0], str | bytes) and _writes(arguments):
            opened.append(os.path.abspath(os.fsdecode(arguments[0])))

    recorder = {"on": True, "main": threading.current_thread()}
    sys.addaudithook(audit)
    quick.make_engine = lambda: quick.engine(SteadyEngine)
    try:
        assert run(quick).code == 0
        assert run(quick, output="out.parquet").code == 0
    finally:
        recorder["on"] = False
    assert len(opened) > 5
    assert {path for path in opened if not path.startswith(str(quick.path("out.")))} == set()


def _writes(arguments):
    _, mode, flags = arguments
    return bool((flags or 0) & (os.O_WRONLY | os.O_RDWR)) or any(letter in (mode or "") for letter in "wax+")
