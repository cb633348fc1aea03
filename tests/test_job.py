"""From prompts to records through a real engine on the known-answer model: samples, stops, failures, what is held."""

from collections import deque
from types import SimpleNamespace

import orjson
import pytest
import torch

from cbgen.config import EngineConfig, OutputConfig, PromptConfig
from cbgen.data.prompts import PromptBuilder
from cbgen.engine.engine import Engine
from cbgen.engine.loader import load_model, load_tokenizer
from cbgen.engine.model_files import ModelFiles
from cbgen.engine.waiting import ROWS_PER_SLOT
from cbgen.job import Job, Serving
from cbgen.output.formats import RecordFormat
from cbgen.params import SamplingParams
from cbgen.records import Prompt
from tests.helpers import make_row


class Feed:
    """Prompts that are all there."""

    def __init__(self, items):
        self.items = deque(items)

    @property
    def exhausted(self):
        return not self.items

    def peek(self, *, wait):
        return self.items[0] if self.items else None

    def take(self):
        return self.items.popleft()


class Writer:
    """Keeps records by row, and how many rows were put."""

    def __init__(self):
        self.records = {}

    @property
    def head(self):
        return next(i for i in range(len(self.records) + 1) if i not in self.records)

    def recovered(self, row):
        return False

    def put(self, row, record):
        assert row.index not in self.records, "a row is put once"
        self.records[row.index] = record


@pytest.fixture(scope="module")
def serving(chain_model):
    files = ModelFiles("chain", chain_model)
    tokenizer = load_tokenizer(files)
    return SimpleNamespace(
        tokenizer=tokenizer,
        loaded=load_model(files, dtype="float32", device=torch.device("cpu"), eos_token_id=tokenizer.eos_token_id),
    )


def make_job(serving, *, slots=4, output=None):
    engine = Engine(serving.loaded, EngineConfig(max_num_seqs=slots))
    builder = PromptBuilder(
        serving.tokenizer,
        PromptConfig(),
        SamplingParams(max_tokens=16),
        engine.limits.max_model_len,
        engine.vocab_size,
    )
    output = output or OutputConfig(path="out.jsonl", token_ids=True)
    job = Job(Serving(serving.tokenizer, engine), RecordFormat(output, "chain"), lambda row, error: None)
    job.writer = Writer()
    return job, builder


def finish(job, builder, rows):
    """The values of all rows' records, and at each step how many rows were out."""
    feed, num_out = Feed(builder.build(rows)), []
    while not feed.exhausted or job.engine.has_unfinished:
        job.admit(feed)
        if job.engine.has_unfinished:
            for generation in job.engine.step():
                job.finish(generation)
        job.engine.check_integrity()
        num_out.append(len(job.writer.records))
    assert not job._in_flight
    assert sorted(job.writer.records) == list(range(len(rows)))
    return [orjson.loads(job.writer.records[i].payload) for i in range(len(rows))], num_out


def answer(serving, rows, **options):
    rows = [make_row(index, **row) for index, row in enumerate(rows)]
    return finish(*make_job(serving, **options), rows)[0]


# -- samples ----------------------------------------------------------------------------------------------------------


def test_one_sample_is_a_string_and_several_are_lists(serving):
    one, three = answer(serving, [{"prompt": "1"}, {"prompt": "1", "sampling_params": {"n": 3, "max_tokens": 2}}])
    assert (one["completion"], one["finish_reason"]) == (" alpha beta gamma", "stop")
    assert (three["completion"], three["finish_reason"]) == ([" alpha beta"] * 3, ["length"] * 3)
    assert len(three["token_ids"]) == 3
    assert three["token_ids"][0] == one["token_ids"][:2]
    assert three["usage"] == {"prompt_tokens": 1, "completion_tokens": 6, "cached_tokens": 0}


def test_samples_differ_and_do_not_depend_on_company(serving):
    row = {"prompt": "d", "sampling_params": {"n": 5, "temperature": 1, "seed": 3, "max_tokens": 12}}
    alone = answer(serving, [row], slots=1)[0]["completion"]
    assert len(set(alone)) == 5
    others = [{"prompt": "d", "sampling_params": {"temperature": 1, "n": n}} for n in (1, 2, 7)]
    crowd = answer(serving, [*others, row, *others], slots=3)
    assert crowd[3]["completion"] == alone


def test_the_first_sample_is_what_n_1_gives(serving):
    params = {"temperature": 1, "seed": 3, "max_tokens": 12}
    one, many = answer(
        serving, [{"prompt": "d", "sampling_params": params}, {"prompt": "d", "sampling_params": {**params, "n": 3}}]
    )
    assert many["completion"][0] == one["completion"]


def test_rows_without_a_seed_of_their_own_have_streams_of_their_own(serving):
    row = {"prompt": "d", "sampling_params": {"n": 3, "temperature": 1, "max_tokens": 12}}
    texts = [text for record in answer(serving, [row, row]) for text in record["completion"]]
    assert len(set(texts)) == 6


def test_a_row_is_put_when_its_last_sample_ends(serving):
    row = {"prompt": "5", "sampling_params": {"n": 3, "max_tokens": 4}}
    _, num_out = finish(*make_job(serving, slots=1), [make_row(0, **row)])
    assert num_out == [0] * 11 + [1]


def test_samples_stop_on_text_each_for_itself(serving):
    row = {"prompt": "d", "sampling_params": {"n": 8, "temperature": 1, "seed": 1, "stop": "d3", "max_tokens": 40}}
    (record,) = answer(serving, [row])
    assert all("d3" not in text for text in record["completion"])
    lengths = [len(text) for text, reason in zip(record["completion"], record["finish_reason"], strict=True) if reason]
    assert len(set(lengths)) > 3


def test_tokens_of_samples_that_wait_are_kept_only_if_asked_for(serving):
    job, builder = make_job(serving, output=OutputConfig(path="out.jsonl"))
    job.admit(Feed(builder.build([make_row(0, prompt="d", sampling_params={"n": 2, "max_tokens": 3})])))
    (state,) = job._in_flight.values()
    while job.engine.has_unfinished:
        for generation in job.engine.step():
            job.finish(generation)
    assert [sample.token_ids for sample in state.samples] == [[], []]


def test_batch_answers_have_one_choice_per_sample(serving):
    lines = [
        {"custom_id": "a", "method": "POST", "url": "/v1/completions", "body": {"prompt": "1", "n": 2}},
        {
            "custom_id": "b",
            "method": "POST",
            "url": "/v1/chat/completions",
            "body": {"messages": [{"role": "user", "content": "hi"}], "n": 2, "max_tokens": 1},
        },
    ]
    text, chat = (record["response"]["body"] for record in answer(serving, lines))
    assert text["choices"] == [
        {"index": i, "logprobs": None, "finish_reason": "stop", "text": " alpha beta gamma"} for i in range(2)
    ]
    message = {"role": "assistant", "content": " chat"}
    assert chat["choices"] == [
        {"index": i, "logprobs": None, "finish_reason": "length", "message": message} for i in range(2)
    ]
    assert text["usage"] == {"prompt_tokens": 1, "completion_tokens": 8, "total_tokens": 9}


def test_the_queue_stays_short_when_rows_have_many_samples(serving):
    job, builder = make_job(serving, slots=4)
    rows = [make_row(i, prompt="5", sampling_params={"n": 50, "max_tokens": 2}) for i in range(8)]
    feed, longest = Feed(builder.build(rows)), 0
    while not feed.exhausted or job.engine.has_unfinished:
        job.admit(feed)
        longest = max(longest, job.engine.num_waiting)
        for generation in job.engine.step():
            job.finish(generation)
    assert 4 * ROWS_PER_SLOT < longest + 50 < 4 * ROWS_PER_SLOT + 100
    assert job.engine.stats.num_active > 3.8 * job.engine.stats.num_steps


# -- failures ---------------------------------------------------------------------------------------------------------


def test_a_row_whose_sample_fails_is_one_error_row(serving):
    bad, good = answer(
        serving, [{"prompt": "~", "sampling_params": {"n": 3}}, {"prompt": "1", "sampling_params": {"n": 2}}], slots=8
    )
    assert bad["error"]["code"] == "nan_logits"
    assert bad["completion"] is bad["finish_reason"] is bad["token_ids"] is None
    assert good["completion"] == [" alpha beta gamma"] * 2


def test_a_row_with_samples_that_can_never_fit_is_one_error_row(serving):
    job, builder = make_job(serving)
    job.engine._blocks.num_blocks = 1
    (item,) = builder.build([make_row(0, prompt="5 " * 15, sampling_params={"n": 3})])
    assert isinstance(item, Prompt)
    job.admit(Feed([item]))
    assert job.writer.records[0].error_code == "kv_never_fits"
    assert not job.engine.has_unfinished


@pytest.mark.parametrize("params", [{"stop": ["gamma"]}, {}], ids=["while watching for a stop", "at the end"])
def test_a_tokenizer_that_cannot_decode_costs_one_row(serving, monkeypatch, params):
    class PanicException(BaseException):
        """What a panic in Rust arrives as."""

    job, builder = make_job(serving)
    decode = serving.tokenizer.decode

    def fragile(ids, **options):
        text = decode(ids, **options)
        if "beta" in text:
            raise PanicException("called `Option::unwrap()` on a `None` value")
        return text

    monkeypatch.setattr(job._detokenizer, "_tokenizer", SimpleNamespace(decode=fragile))
    rows = [
        make_row(0, prompt="2"),
        make_row(1, prompt="1", sampling_params={"n": 2, **params}),
        make_row(2, prompt="3"),
    ]
    before, bad, after = finish(job, builder, rows)[0]
    assert bad["error"]["code"] == "tokenizer_error"
    assert bad["error"]["message"].startswith("in.jsonl line 2: the tokenizer cannot decode the answer (called")
    assert (before["completion"], after["completion"]) == (" one END|two", "\U0001f600 ok")


def test_an_interrupt_while_decoding_is_no_rows_error(serving, monkeypatch):
    def interrupt(*_, **__):
        raise KeyboardInterrupt

    job, builder = make_job(serving)
    monkeypatch.setattr(job._detokenizer, "_tokenizer", SimpleNamespace(decode=interrupt))
    with pytest.raises(KeyboardInterrupt):
        finish(job, builder, [make_row(0, prompt="1", sampling_params={"stop": "x"})])


# -- stops ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("skip", [True, False], ids=["hidden", "shown"])
@pytest.mark.parametrize(
    ("stop", "include", "expected"),
    [
        ("<|eos|>", True, " alpha beta gamma<|eos|>"),
        ("<|eos|>", False, " alpha beta gamma"),
        (["zzz", "<|eos|>"], True, " alpha beta gamma<|eos|>"),
        ("zzz", True, " alpha beta gamma"),
        (" beta", True, " alpha beta"),
        (" beta", False, " alpha"),
    ],
)
def test_include_stop_shows_a_stop_string_even_if_it_is_a_special_token(serving, stop, include, expected, skip):
    params = {"stop": stop, "include_stop": include, "skip_special_tokens": skip}
    (record,) = answer(serving, [{"prompt": "1", "sampling_params": params}])
    assert (record["completion"], record["finish_reason"]) == (expected, "stop")


def test_a_special_token_that_was_no_stop_string_stays_hidden(serving):
    start = serving.tokenizer.convert_tokens_to_ids("<|start|>")
    params = {"stop_token_ids": [start], "include_stop": True, "logit_bias": {str(start): 100}}
    (record,) = answer(serving, [{"prompt": "1", "sampling_params": params}])
    assert (record["completion"], record["finish_reason"]) == ("", "stop")


# -- logit_bias -------------------------------------------------------------------------------------------------------


def test_logit_bias_changes_its_own_row_only(serving):
    token_id = serving.tokenizer.encode("1", add_special_tokens=False)
    beta = answer(serving, [{"prompt": "1"}])[0]["token_ids"][1]
    biased, plain, pushed = answer(
        serving,
        [
            {"prompt": "1", "sampling_params": {"logit_bias": {str(beta): -100}}},
            {"prompt": "1"},
            {"prompt": "1", "sampling_params": {"logit_bias": {str(token_id[0]): 21}, "max_tokens": 3}},
        ],
    )
    assert biased["completion"] == " alpha"  # what comes next in the table is the end of the text
    assert plain["completion"] == " alpha beta gamma"
    assert pushed["completion"] == "111"


def test_a_stop_string_that_the_model_cannot_choose_stops_nothing(serving):
    outside = serving.loaded.vocab_size + 3
    tokenizer = SimpleNamespace(
        **{name: getattr(serving.tokenizer, name) for name in ("decode", "eos_token_id")},
        added_tokens_decoder={outside: SimpleNamespace(content="<|extra|>", special=True)},
    )
    engine = Engine(serving.loaded, EngineConfig(max_num_seqs=2))
    job = Job(
        Serving(tokenizer, engine), RecordFormat(OutputConfig(path="out.jsonl"), "chain"), lambda row, error: None
    )
    job.writer = Writer()
    params = {"stop": ["<|extra|>"], "min_tokens": 2}
    _, builder = make_job(serving)
    (value,) = finish(job, builder, [make_row(0, prompt="1", sampling_params=params)])[0]
    assert value["completion"] == " alpha beta gamma"
