"""Which of torch's attention kernels the reference lets itself be computed by; its answers are compared elsewhere."""

import torch

from cbgen.engine.attention.reference import _plain_kernels


def enabled():
    flags = torch.backends.cuda
    return flags.cudnn_sdp_enabled(), flags.mem_efficient_sdp_enabled(), flags.math_sdp_enabled()


def test_on_cuda_it_goes_without_cudnn_and_leaves_torch_as_it_was():
    before = enabled()
    assert before == (True, True, True)
    with _plain_kernels(torch.device("cuda", 0)):
        assert enabled() == (False, True, True)
    assert enabled() == before
    with _plain_kernels(torch.device("cpu")):
        assert enabled() == before
