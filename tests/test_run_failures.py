"""`cbgen run` end to end when the model fails: on one row, on every row, on a broken device; and rows of samples."""

import json

import pytest
from transformers import AutoTokenizer

from cbgen.engine.model_runner import ModelRunner
from tests.test_run import run, summary

ROWS = [{"id": i, "prompt": f"say {'125'[i % 3]}", "sampling_params": {"max_tokens": 3 + i % 5}} for i in range(24)]


@pytest.fixture
def clean(tmp_path_factory, chain_model):
    return run(tmp_path_factory.mktemp("clean"), chain_model, ROWS)[1]


def break_model(monkeypatch, fails):
    """`fails(model input, number of the pass)` gives an exception to raise, or None."""
    really, passes = ModelRunner.run, [0]

    def run_or_fail(self, model_input):
        passes[0] += 1
        error = fails(model_input, passes[0])
        if error:
            raise error
        return really(self, model_input)

    monkeypatch.setattr(ModelRunner, "run", run_or_fail)


def one_line_on(capsys):
    error = capsys.readouterr().err
    assert "Traceback" not in error
    return error.strip().splitlines()[-1]


@pytest.mark.parametrize(
    ("error", "code", "says"),
    [
        (ValueError("bad shape\nand more"), "engine_error", "the model failed on this row, while others went well"),
        (MemoryError("no room"), "out_of_memory", "memory ran out with no other row in the step"),
    ],
)
def test_a_row_that_the_model_fails_on_is_an_error_record(tmp_path, chain_model, monkeypatch, clean, error, code, says):
    rows = [*ROWS[:7], {**ROWS[7], "prompt": "say z5"}, *ROWS[8:]]
    letter = AutoTokenizer.from_pretrained(chain_model).encode("z")[0]
    break_model(monkeypatch, lambda m, _: error if letter in m.input_ids else None)
    exit_code, records = run(tmp_path, chain_model, rows, "--max-num-seqs", "5")
    assert exit_code == 3
    failed = records.pop(7)
    assert failed["error"]["code"] == code
    assert failed["error"]["message"].startswith("in.jsonl line 8: ")
    assert says in failed["error"]["message"]
    assert str(error).splitlines()[0] in failed["error"]["message"]
    assert records == [record for record in clean if record["id"] != 7]


def test_short_memory_changes_no_record(tmp_path, chain_model, monkeypatch, clean):
    break_model(monkeypatch, lambda m, _: MemoryError() if m.num_tokens > 3 else None)
    assert run(tmp_path, chain_model, ROWS, "--max-num-seqs", "8") == (0, clean)
    assert summary(tmp_path)["rows_ok"] == 24


@pytest.mark.parametrize(
    ("error", "says"),
    [
        (RuntimeError("CUDA error: an illegal memory access was encountered\nCompile with"), "the device failed"),
        (ValueError("weights are gone"), "the model fails on every row (ValueError: weights are gone)"),
    ],
)
def test_a_model_that_breaks_in_the_middle_ends_the_run_and_the_next_one_goes_on(
    tmp_path, chain_model, monkeypatch, capsys, clean, error, says
):
    break_model(monkeypatch, lambda _, number: error if number > 12 else None)
    code, before = run(tmp_path, chain_model, ROWS, "--max-num-seqs", "4")
    assert code == 1
    assert says in one_line_on(capsys)
    assert not before or all(record["error"] is None for record in before)
    monkeypatch.undo()
    assert run(tmp_path, chain_model, ROWS, "--max-num-seqs", "4") == (0, clean)
    assert summary(tmp_path)["resumed_rows"] > 0


def test_rows_of_samples_resume(tmp_path, chain_model, capsys):
    rows = [{"prompt": "d"}, {"prompt": "1"}, {"prompt": "d", "sampling_params": {"n": 1}}, {"prompt": "d"}]
    options = ("--n", "3", "--temperature", "1", "--max-tokens", "8", "--token-ids")
    (tmp_path / "whole").mkdir()
    code, whole = run(tmp_path / "whole", chain_model, rows, *options)
    assert code == 0
    assert [type(record["completion"]) for record in whole] == [list, list, str, list]
    assert len({json.dumps(text) for record in whole for text in record["token_ids"]}) > 7
    assert run(tmp_path, chain_model, rows, *options, "--limit", "2") == (0, whole[:2])
    assert run(tmp_path, chain_model, rows, *options) == (0, whole)
    capsys.readouterr()
    assert run(tmp_path, chain_model, rows, *options, "--n", "2")[0] == 4
    assert "sampling.n: 3 before, 2 now" in capsys.readouterr().err


def test_logit_bias_of_a_run_and_of_a_row(tmp_path, chain_model):
    rows = [{"prompt": "say 1"}, {"prompt": "say 1", "sampling_params": {"logit_bias": {}}}]
    code, records = run(tmp_path, chain_model, rows, "--token-ids")
    beta = records[0]["token_ids"][1]
    code, records = run(tmp_path, chain_model, rows, "--logit-bias", json.dumps({beta: -100}), name="biased.jsonl")
    assert code == 0
    assert [record["completion"] for record in records] == [" alpha", " alpha beta gamma"]
