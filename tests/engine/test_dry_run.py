"""A made-up step answers as each of its sequences does alone, whatever their lengths."""

import pytest
import torch

from cbgen.engine.dry_run import DryRun
from cbgen.engine.preparation import prepare
from tests.engine import parity
from tests.models import build_model


@pytest.fixture(scope="module")
def loaded(tmp_path_factory):
    return prepare(parity.load(build_model("llama-ratio-3", tmp_path_factory.mktemp("m"))), {"native"}, print)


@pytest.mark.parametrize("lengths", [[1], [6, 5], [16, 1, 17], [128, 3, 3, 40]])
def test_each_sequence_answers_as_alone(loaded, lengths):
    together = DryRun(loaded, lengths).run()
    assert together.shape == (len(lengths), loaded.vocab_size)
    starts = [sum(lengths[:i]) for i in range(len(lengths))]
    for row, length, start in zip(together, lengths, starts, strict=True):
        tokens = (7 * torch.arange(start, start + length) + 3) % loaded.vocab_size
        alone = DryRun(loaded, [length])
        alone._input_ids = tokens
        torch.testing.assert_close(row, alone.run()[0], rtol=1e-4, atol=1e-4)


def test_logits_of_the_first_tokens_contain_those_of_the_last(loaded):
    everything = DryRun(loaded, [6, 5], num_logits=11).run()
    torch.testing.assert_close(everything[[5, 10]], DryRun(loaded, [6, 5]).run(), rtol=1e-4, atol=1e-4)
    assert DryRun(loaded, [6, 5], num_logits=2).run().shape[0] == 2
