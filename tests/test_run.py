"""`cbgen run` end to end on a model with known answers: rows in, records out, in order, whatever a row holds."""

import gzip
import hashlib
import io
import json
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from cbgen.cli import main


def run(tmp_path, model, rows, *arguments, name="out.jsonl"):
    """Run the command in this process; returns (exit code, records or None)."""
    prompts, output = tmp_path / "in.jsonl", tmp_path / name
    prompts.write_text("".join(row if isinstance(row, str) else json.dumps(row) + "\n" for row in rows), "utf-8")
    with pytest.raises(SystemExit) as exit_:
        main(["run", str(prompts), "-o", str(output), "--model", str(model), *arguments])
    records = [json.loads(line) for line in output.read_text("utf-8").split("\n")[:-1]] if output.exists() else None
    return exit_.value.code, records


def summary(tmp_path, name="out.jsonl"):
    return json.loads((tmp_path / f"{name}.cbgen" / "summary.json").read_text())


def test_rows_come_back_in_order_with_text_reason_and_usage(tmp_path, chain_model):
    rows = [{"id": i, "prompt": f"say {'126'[i % 3]}"} for i in range(30)]
    code, records = run(tmp_path, chain_model, rows, "--max-num-seqs", "4")
    assert code == 0
    assert [r["id"] for r in records] == list(range(30))
    assert [r["completion"] for r in records] == [" alpha beta gamma", " one END|two", ""] * 10
    assert records[0] == {
        "id": 0,
        "prompt": "say 1",
        "completion": " alpha beta gamma",
        "finish_reason": "stop",
        "usage": {"prompt_tokens": 5, "completion_tokens": 4, "cached_tokens": 0},
        "error": None,
    }


def test_orders_and_what_is_switched_off_change_no_record(tmp_path, chain_model):
    """Of a record only `cached_tokens` may differ; and it adds up to what the summary says."""
    begin = "what most rows begin with, "
    rows = [
        {"prompt": f"{begin if i % 4 else ''}{i} {'1235d~'[i % 6]}", "sampling_params": {"max_tokens": 1 + i % 11}}
        for i in range(120)
    ]
    arguments = ("--max-num-seqs", "4", "--temperature", "0.5")
    outputs, cached = [], []
    without = ["--order", "file", "--disable", "prefix-cache,prediction"]
    for number, choice in enumerate((without, ["--order", "longest"], [])):
        name = f"{number}.jsonl"
        _, records = run(tmp_path, chain_model, rows, *arguments, *choice, name=name)
        cached.append(sum(record["usage"].pop("cached_tokens") for record in records))
        outputs.append(records)
        found = summary(tmp_path, name)
        failed = sum(16 for r in records if r["error"] and r["prompt"].startswith(begin))  # error records hold zeros
        assert cached[-1] <= found["cached_prompt_tokens"] <= cached[-1] + failed
    assert outputs[0] == outputs[1] == outputs[2]
    assert cached[0] == 0
    assert min(cached[1:]) > 16 * 60


def test_bad_rows_are_error_records_in_their_place(tmp_path, chain_model, capsys):
    rows = [
        {"prompt": "say 1"},
        '{"prompt": "cut\n',
        "\n",
        "[1, 2]\n",
        {"text": "no prompt"},
        {"prompt": "x" * 100},
        {"prompt": "say ~"},
        {"messages": [{"role": "bad", "content": "x"}]},
        {"prompt": "say 2", "sampling_params": {"temprature": 1}},
        {"prompt": "say 2"},
    ]
    code, records = run(tmp_path, chain_model, rows)
    assert code == 3
    codes = [r["error"] and r["error"]["code"] for r in records]
    assert codes == [
        None,
        "invalid_json",
        "not_an_object",
        "missing_prompt",
        "prompt_too_long",
        "nan_logits",
        "template_error",
        "invalid_params",
        None,
    ]
    assert "line 4" in records[2]["error"]["message"], "blank lines count as lines"
    assert "100" in records[4]["error"]["message"]
    assert "64" in records[4]["error"]["message"]
    assert "role bad is not allowed" in records[6]["error"]["message"]
    assert all(set(r) >= {"completion", "finish_reason", "usage", "error"} for r in records)
    assert summary(tmp_path)["rows_failed"] == 7
    assert "Traceback" not in capsys.readouterr().err


def test_stop_string_across_tokens_leaves_exact_text(tmp_path, chain_model):
    rows = [
        {"prompt": "say 2"},
        {"prompt": "say 2", "sampling_params": {"include_stop": True}},
        {"prompt": "say 1"},
        {"prompt": "say 2", "sampling_params": {"stop": []}},
    ]
    _, records = run(tmp_path, chain_model, rows, "--stop", "END")
    assert [r["completion"] for r in records] == [" one ", " one END", " alpha beta gamma", " one END|two"]
    assert [r["finish_reason"] for r in records] == ["stop"] * 4


def test_characters_in_several_tokens_come_out_whole(tmp_path, chain_model):
    _, records = run(tmp_path, chain_model, [{"prompt": "say 3"}], "--token-ids")
    assert records[0]["completion"] == "\N{GRINNING FACE} ok"
    assert len(records[0]["token_ids"]) == records[0]["usage"]["completion_tokens"] == 6


def test_max_tokens_is_clamped_to_the_context(tmp_path, chain_model):
    _, records = run(tmp_path, chain_model, [{"prompt": "a5"}, {"prompt": "a5", "sampling_params": {"max_tokens": 3}}])
    assert [(r["usage"]["completion_tokens"], r["finish_reason"]) for r in records] == [(62, "length"), (3, "length")]


def test_chat_template_system_and_openai_batch_lines(tmp_path, chain_model):
    chat = {"messages": [{"role": "user", "content": "hi"}]}
    batch = {"custom_id": "a", "method": "POST", "url": "/v1/chat/completions", "body": {"model": "m", **chat}}
    wrong = {**batch, "custom_id": "b", "url": "/v1/images"}
    _, records = run(tmp_path, chain_model, [chat, batch, wrong], "--system", "Be brief.")
    assert records[0]["completion"] == " chat reply"
    assert records[1]["response"]["body"]["choices"][0]["message"]["content"] == " chat reply"
    assert records[1]["response"]["body"]["usage"]["prompt_tokens"] == records[0]["usage"]["prompt_tokens"]
    assert (records[2]["custom_id"], records[2]["error"]["code"]) == ("b", "invalid_request")


def test_template_over_the_row(tmp_path, chain_model):
    rows = [{"q": "say", "n": 1}, {"q": "say"}]
    code, records = run(tmp_path, chain_model, rows, "--template", "{{ q }} {{ n }}")
    assert code == 3
    assert records[0]["completion"] == " alpha beta gamma"
    assert records[1]["error"]["code"] == "template_error"
    assert "'n' is undefined" in records[1]["error"]["message"]


@pytest.mark.parametrize("arguments", [("--max-num-seqs", "1"), ("--max-num-seqs", "7"), ("--batching", "static")])
def test_draws_do_not_depend_on_the_batch(tmp_path, chain_model, arguments):
    rows = [{"prompt": f"row {i} d"} for i in range(12)]
    options = ("--temperature", "1", "--max-tokens", "8", "--seed", "5")
    _, expected = run(tmp_path, chain_model, rows, *options, name="expected.jsonl")
    _, records = run(tmp_path, chain_model, rows, *options, *arguments)
    assert records == expected
    assert len({r["completion"] for r in records}) == 12


def test_a_row_with_its_own_seed_answers_alike_wherever_it_stands(tmp_path, chain_model):
    rows = [{"prompt": "d", "sampling_params": {"seed": 7}}, {"prompt": "d"}] * 3
    _, records = run(tmp_path, chain_model, rows, "--temperature", "1", "--max-tokens", "8")
    assert len({r["completion"] for r in records[::2]}) == 1
    assert len({r["completion"] for r in records[1::2]}) == 3


def test_model_defaults_are_used_and_flags_win(tmp_path):
    from tests.chain import build_chain_model

    model = build_chain_model(tmp_path / "m", generation={"do_sample": True, "temperature": 0.5, "top_k": 4})
    rows = [{"prompt": "say 1"}]
    run(tmp_path, model, rows)
    assert {"temperature": 0.5, "top_k": 4}.items() <= summary(tmp_path)["settings"]["sampling"].items()
    run(tmp_path, model, rows, "--temperature", "0", name="greedy.jsonl")
    assert summary(tmp_path, "greedy.jsonl")["settings"]["sampling"]["temperature"] == 0


def test_a_finished_output_is_left_alone_and_a_grown_input_continued(tmp_path, chain_model, capsys):
    rows = [{"prompt": "say 1"}, {"prompt": "x" * 99}]
    code, _ = run(tmp_path, chain_model, rows)
    before = (tmp_path / "out.jsonl").read_bytes()
    assert run(tmp_path, chain_model, rows)[0] == code == 3
    assert "nothing to generate" in capsys.readouterr().err
    assert (tmp_path / "out.jsonl").read_bytes() == before
    run(tmp_path, chain_model, [*rows, {"prompt": "say 2"}])
    assert (tmp_path / "out.jsonl").read_bytes().startswith(before)
    assert summary(tmp_path)["rows"] == 3
    assert summary(tmp_path)["resumed_rows"] == 2


def test_changed_input_or_settings_are_refused_with_the_difference(tmp_path, chain_model, capsys):
    rows = [{"prompt": "say 1"}, {"prompt": "say 2"}]
    run(tmp_path, chain_model, rows)
    before = (tmp_path / "out.jsonl").read_bytes()
    assert run(tmp_path, chain_model, rows, "--max-tokens", "9")[0] == 4
    assert "sampling.max_tokens: 1024 before, 9 now" in capsys.readouterr().err
    assert run(tmp_path, chain_model, [{"prompt": "new"}, *rows])[0] == 4
    assert "the input differs" in capsys.readouterr().err
    assert (tmp_path / "out.jsonl").read_bytes() == before
    assert run(tmp_path, chain_model, rows, "--max-tokens", "2", "--overwrite")[0] == 0
    assert [path.read_bytes() for path in tmp_path.glob("out.jsonl.backup-*")] == [before]


def test_an_output_that_was_cut_short_is_repaired(tmp_path, chain_model, capsys):
    rows = [{"prompt": f"row {i} 1"} for i in range(6)]
    run(tmp_path, chain_model, rows)
    whole = (tmp_path / "out.jsonl").read_bytes()
    (tmp_path / "out.jsonl").write_bytes(whole[: len(whole) // 2])
    assert run(tmp_path, chain_model, rows)[0] == 0
    assert (tmp_path / "out.jsonl").read_bytes() == whole
    assert "was cut short: 3 of 6 rows are whole" in capsys.readouterr().err


@pytest.mark.parametrize("name", ["state.json", "run.json"])
@pytest.mark.parametrize("content", [None, b"", b"[1]", b'{"rows": 1}'])
def test_a_lost_or_broken_sidecar_file_never_costs_rows(tmp_path, chain_model, capsys, name, content):
    rows = [{"prompt": "say 1"}, {"prompt": "say 2"}]
    run(tmp_path, chain_model, rows)
    before = (tmp_path / "out.jsonl").read_bytes()
    path = tmp_path / "out.jsonl.cbgen" / name
    path.unlink() if content is None else path.write_bytes(content)
    assert run(tmp_path, chain_model, rows)[0] == 4
    assert "--overwrite" in capsys.readouterr().err
    assert (tmp_path / "out.jsonl").read_bytes() == before
    assert run(tmp_path, chain_model, rows, "--overwrite")[0] == 0


@pytest.mark.parametrize("edit", ["first lines gone", "a line in the middle gone", "longer"])
def test_an_output_that_was_edited_is_refused_and_left_alone(tmp_path, chain_model, capsys, edit):
    rows = [{"id": i, "prompt": f"row {i} 1"} for i in range(9)]
    run(tmp_path, chain_model, rows)
    lines = (tmp_path / "out.jsonl").read_bytes().splitlines(keepends=True)
    if edit == "first lines gone":
        edited = b"".join(lines[3:])
    elif edit == "a line in the middle gone":
        edited = b"".join(lines[:4] + lines[5:])
    else:
        edited = b"".join(lines).replace(b"alpha", b"ALPHABET")
    (tmp_path / "out.jsonl").write_bytes(edited)
    assert run(tmp_path, chain_model, rows)[0] == 4
    assert "was edited since it was written" in capsys.readouterr().err
    assert (tmp_path / "out.jsonl").read_bytes()[: len(edited) // 2] == edited[: len(edited) // 2]


def test_a_late_column_clash_is_a_row_error_after_a_resume_too(tmp_path, chain_model):
    rows = [{"prompt": "say 1"} for _ in range(150)]
    rows[120]["error"] = "mine"
    assert len(run(tmp_path, chain_model, rows, "--limit", "60")[1]) == 60
    code, records = run(tmp_path, chain_model, rows)
    assert (code, len(records), records[120]["error"]["code"]) == (3, 150, "column_clash")


def test_a_refused_run_keeps_what_is_left_of_the_sidecar(tmp_path, chain_model):
    rows = [{"prompt": "say 1"}]
    run(tmp_path, chain_model, rows)
    saved = (tmp_path / "out.jsonl.cbgen" / "run.json").read_bytes()
    (tmp_path / "out.jsonl.cbgen" / "run.json").unlink()
    assert run(tmp_path, chain_model, rows)[0] == 4
    (tmp_path / "out.jsonl.cbgen" / "run.json").write_bytes(saved)
    assert run(tmp_path, chain_model, rows)[0] == 0


def test_an_empty_input_needs_no_model(tmp_path):
    code, records = run(tmp_path, "demo", [], "--limit", "0")
    assert (code, records) == (0, [])


def test_limit_takes_the_first_rows_and_a_higher_one_goes_on(tmp_path, chain_model):
    rows = [{"prompt": f"row {i} 1"} for i in range(6)]
    assert len(run(tmp_path, chain_model, rows, "--limit", "2")[1]) == 2
    assert len(run(tmp_path, chain_model, rows, "--limit", "4")[1]) == 4
    assert summary(tmp_path)["resumed_rows"] == 2


@pytest.mark.parametrize(
    ("arguments", "code", "says"),
    [
        (("--model", "nowhere/at-all"), 5, "nowhere/at-all"),
        (("--model", "./nowhere"), 5, "no such file or directory"),
        (("--max-num-seqs", "0"), 2, "--max-num-seqs must be at least 1"),
        (("--max-num-seqs", "9", "--max-num-batched-tokens", "4"), 2, "below --max-num-seqs 9"),
        (("--max-model-len", "65"), 2, "more than the model's 64 tokens"),
        (("--kv-cache-memory", "1"), 5, "raise --kv-cache-memory"),
        (("--temperature", "-1"), 2, "temperature must be 0 or more"),
        (("--template", "{{ x"), 2, "--template does not parse"),
        (("--device", "cuda:99"), 5, "CUDA"),
        (("--device", "tpu"), 2, "--device must be auto, cpu, cuda or cuda:N, not 'tpu'"),
        (("--max-tokens", str(2**70)), 2, "is too large"),
        (("--kv-cache-memory", "inf"), 2, "512M"),
        (("--stop", ""), 2, "stop must be non-empty strings"),
        (("--stop-token-id", "99999"), 2, "stop token id 99999 is outside the vocabulary"),
    ],
    ids=str,
)
def test_what_cannot_work_is_one_sentence_and_leaves_nothing_behind(
    tmp_path, chain_model, capsys, arguments, code, says
):
    assert run(tmp_path, chain_model, [{"prompt": "say 1"}], *arguments) == (code, None)
    error = capsys.readouterr().err
    assert says in error
    assert "Traceback" not in error
    assert not (tmp_path / "out.jsonl.cbgen").exists()


def test_a_result_field_among_the_columns_is_refused_with_the_way_out(tmp_path, chain_model, capsys):
    rows = [{"prompt": "say 1", "error": "mine"}]
    assert run(tmp_path, chain_model, rows) == (2, None)
    assert "--result-prefix" in capsys.readouterr().err
    code, records = run(tmp_path, chain_model, rows, "--result-prefix", "gen_")
    assert (code, records[0]["error"], records[0]["gen_completion"]) == (0, "mine", " alpha beta gamma")


@pytest.mark.parametrize("kind", ["gz", "zst", "parquet", "stdin", "two files"])
def test_every_kind_of_input_gives_the_same_records(tmp_path, chain_model, monkeypatch, kind):
    rows = [{"id": i, "prompt": f"row {i} {i % 2 + 1}"} for i in range(20)]
    _, expected = run(tmp_path, chain_model, rows, name="expected.jsonl")
    lines = (tmp_path / "in.jsonl").read_bytes()
    inputs = [str(tmp_path / f"in.{kind}")]
    if kind == "gz":
        Path(inputs[0]).write_bytes(gzip.compress(lines[:100]) + gzip.compress(lines[100:]))
    elif kind == "zst":
        Path(inputs[0]).write_bytes(pa.compress(lines, "zstd", asbytes=True))
    elif kind == "parquet":
        pq.write_table(pa.Table.from_pylist(rows), inputs[0], row_group_size=7)
    elif kind == "stdin":
        inputs = ["-"]
        monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BufferedReader(io.BytesIO(lines))))
    else:
        cut = lines.index(b"\n") + 1
        inputs = [str(tmp_path / "a.jsonl"), str(tmp_path / "b.jsonl")]
        Path(inputs[0]).write_bytes(lines[:cut])
        Path(inputs[1]).write_bytes(lines[cut:])
    output = tmp_path / "out.jsonl"
    with pytest.raises(SystemExit) as exit_:
        main(["run", *inputs, "-o", str(output), "--model", str(chain_model)])
    assert exit_.value.code == 0
    assert [json.loads(line) for line in output.read_text().splitlines()] == expected


def test_a_torn_file_ends_the_run_after_its_last_whole_rows_and_a_whole_one_continues(tmp_path, chain_model, capsys):
    texts = [hashlib.sha256(b"%d" % i).hexdigest()[:40] for i in range(3000)]
    rows = b"".join(b'{"id": %d, "prompt": "%s 1"}\n' % (i, text.encode()) for i, text in enumerate(texts))
    whole = gzip.compress(rows)
    (tmp_path / "in.gz").write_bytes(whole[: len(whole) // 2])
    command = ["run", str(tmp_path / "in.gz"), "-o", str(tmp_path / "out.jsonl"), "--model", str(chain_model)]
    with pytest.raises(SystemExit) as exit_:
        main(command)
    assert exit_.value.code == 1
    assert "the same command continues once the file is whole" in capsys.readouterr().err
    kept = (tmp_path / "out.jsonl").read_bytes()
    assert kept.count(b"\n") > 500
    (tmp_path / "in.gz").write_bytes(whole)
    with pytest.raises(SystemExit) as exit_:
        main(command)
    assert exit_.value.code == 0
    output = (tmp_path / "out.jsonl").read_bytes()
    assert output.startswith(kept)
    assert [json.loads(line)["id"] for line in output.splitlines()] == list(range(3000))
