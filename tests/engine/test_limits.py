"""How memory and speed become slots, tokens and blocks; GPUs and models are numbers here."""

import dataclasses
from dataclasses import dataclass

import pytest
import torch

from cbgen.config import EngineConfig
from cbgen.engine.kv_cache import LayerSpec, bytes_per_block
from cbgen.engine.limits import (
    Limits,
    ModelSizes,
    Resources,
    choose_limits,
    examine,
    prompt_tokens_a_step,
    slots_for,
)
from cbgen.engine.loader import LoadedModel
from cbgen.engine.machine_probe import MachineSpeed
from cbgen.errors import ModelError, UsageError
from tests.engine.parity import load
from tests.models import build_model

MB = 1 << 20
GIB = 1 << 30


@pytest.fixture(scope="module")
def loaded(tmp_path_factory):
    return load(build_model("llama-ratio-1", tmp_path_factory.mktemp("m")))


def test_with_plenty_of_memory_every_slot_can_hold_a_whole_context(loaded):
    limits = choose_limits(loaded, EngineConfig(), Resources(1000 * MB))
    assert limits.num_blocks * limits.block_size == limits.max_num_seqs * loaded.max_context
    assert (limits.max_model_len, limits.notices) == (loaded.max_context, ())


def test_activations_and_logits_come_off_before_the_cache(loaded):
    wide = dataclasses.replace(loaded, hidden_size=10_000)
    narrow_blocks = choose_limits(loaded, EngineConfig(), Resources(30 * MB)).num_blocks
    with pytest.raises(ModelError, match="lower --max-num-batched-tokens or --max-num-seqs, or free memory"):
        choose_limits(wide, EngineConfig(max_model_len=128), Resources(30 * MB))
    assert narrow_blocks > 0


def test_a_cache_smaller_than_the_context_shortens_it_and_says_so(loaded):
    memory = 3 * bytes_per_block(loaded.layers, 16, loaded.dtype)
    limits = choose_limits(loaded, EngineConfig(kv_cache_memory=memory))
    assert (limits.num_blocks, limits.max_model_len) == (3, 48)
    assert "context limited to 48 tokens (the model allows 128)" in limits.notices[0]


def test_a_context_that_was_asked_for_and_does_not_fit_is_refused(loaded):
    memory = 3 * bytes_per_block(loaded.layers, 16, loaded.dtype)
    with pytest.raises(ModelError, match="room for 48 tokens, fewer than one row of 64"):
        choose_limits(loaded, EngineConfig(kv_cache_memory=memory, max_model_len=64))


def test_a_context_beyond_the_model_is_refused(loaded):
    with pytest.raises(UsageError, match="--max-model-len 129 is more than the model's 128"):
        choose_limits(loaded, EngineConfig(max_model_len=129))


def test_a_small_token_budget_lowers_the_slots_and_many_slots_raise_the_budget(loaded):
    assert choose_limits(loaded, EngineConfig(max_num_batched_tokens=5)).max_num_seqs == 5
    assert choose_limits(loaded, EngineConfig(max_num_seqs=600)).max_num_batched_tokens == 600


# -- GPUs, by their numbers -------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Gpu:
    """Of data sheets, bandwidth and arithmetic lowered to what programs reach of them, roughly."""

    bandwidth: float
    flops: float
    memory: int

    @property
    def speed(self) -> MachineSpeed:
        return MachineSpeed(self.bandwidth, self.flops)


GPUS = {
    "H200": Gpu(4.2e12, 700e12, 139 * GIB),
    "A100": Gpu(1.7e12, 250e12, 79 * GIB),
    "L4": Gpu(0.25e12, 60e12, 22 * GIB),
    "4090": Gpu(0.9e12, 160e12, 23 * GIB),
}


@dataclass(frozen=True)
class Shape:
    """Parameters (those of an embedding that is only looked up apart) and sizes; everything in bfloat16."""

    parameters: float
    looked_up: float
    layers: int
    kv_heads: int
    head_dim: int
    hidden: int
    intermediate: int
    vocab: int

    @property
    def stored_bytes(self) -> int:
        return int(2 * (self.parameters + self.looked_up))

    def loaded(self, device: str = "cuda") -> LoadedModel:
        """As if it were loaded; its module does not exist."""
        layers = [
            LayerSpec(i, self.kv_heads, self.head_dim, self.head_dim, None, 4 * self.kv_heads)
            for i in range(self.layers)
        ]
        return LoadedModel(
            model=torch.nn.Identity(), layers=layers, windows={}, vocab_size=self.vocab, max_context=32_768,
            max_context_reason="", eos_token_ids=frozenset(), dtype=torch.bfloat16, device=torch.device(device),
            hidden_size=self.hidden, intermediate_size=self.intermediate, weight_bytes=int(2 * self.parameters),
        )  # fmt: skip


SHAPES = {
    "0.135B": Shape(134.5e6, 0, 30, 3, 64, 576, 1536, 49_152),
    "0.6B": Shape(596e6, 0, 28, 8, 128, 1024, 3072, 151_936),
    "8B": Shape(7.505e9, 0.525e9, 32, 8, 128, 4096, 14_336, 128_256),
    "32B": Shape(32.0e9, 0.78e9, 64, 8, 128, 5120, 25_600, 151_936),
    "70B": Shape(69.5e9, 1.05e9, 80, 8, 128, 8192, 28_672, 128_256),
}


def limits_on(gpu: str, shape: str, config: EngineConfig | None = None, **resources) -> Limits:
    free = GPUS[gpu].memory - SHAPES[shape].stored_bytes
    return choose_limits(
        SHAPES[shape].loaded(), config or EngineConfig(), Resources(free, GPUS[gpu].speed, **resources)
    )


@pytest.mark.parametrize(
    ("gpu", "shape", "seqs", "prompt_tokens"),
    [
        ("H200", "0.135B", 256, 8192),  # the host's time decides: 10,400 tokens in 4 ms
        ("H200", "0.6B", 256, 2560),
        ("H200", "8B", 448, 768),  # 30 GB of contexts of 67 MB; 4 x 167 tokens
        ("H200", "32B", 512, 768),  # 960 wanted, memory for about 550 contexts of 134 MB
        ("A100", "0.135B", 256, 3840),
        ("A100", "8B", 448, 768),
        ("L4", "0.135B", 256, 1024),
        ("L4", "0.6B", 256, 1024),
        ("L4", "8B", 64, 1024),
        ("4090", "0.6B", 256, 768),
        ("4090", "8B", 64, 768),
    ],
)
def test_slots_and_tokens_by_the_speed_of_the_device(gpu, shape, seqs, prompt_tokens):
    limits = limits_on(gpu, shape)
    assert (limits.max_num_seqs, limits.max_num_batched_tokens) == (seqs, prompt_tokens + seqs)


@pytest.mark.parametrize("gpu", GPUS)
@pytest.mark.parametrize("shape", SHAPES)
def test_memory_is_never_promised_twice(gpu, shape):
    """Weights, the largest step, cache and the spare block stay below what the device has; or it is refused."""
    free = GPUS[gpu].memory - SHAPES[shape].stored_bytes
    try:
        limits = limits_on(gpu, shape)
    except ModelError:
        assert free < 3 * GIB
        return
    sizes = ModelSizes.of(SHAPES[shape].loaded())
    block = limits.block_size * sizes.kv_bytes_per_token
    size = limits.max_num_batched_tokens, limits.max_num_seqs
    assert (limits.num_blocks + 1) * block + sizes.step_bytes(*size) <= 0.9 * free
    assert limits.kv_cache_bytes == limits.num_blocks * block
    assert limits.max_num_seqs % 64 == 0
    assert 64 <= limits.max_num_seqs <= 1024
    assert (limits.max_num_batched_tokens - limits.max_num_seqs) % 256 == 0


def test_8b_on_139_gib_by_hand():
    """149.25 GB, less 16.06 of weights: 133.19 are free, 119.87 usable.

    A token's cache is 2 x 32 layers x 8 heads x 128 x 2 bytes = 131,072; a context of 512 is 67.1 MB. Twice the
    15.01 GB that a step reads are 447 contexts: 448 slots. Arithmetic equals reading at 700e12 / 4.2e12 = 167 tokens;
    four times that, in steps of 256, is 768. So a step has 1,216 tokens, takes 1,216 x (12 x 4,096 + 3 x 14,336) x 2 =
    0.224 GB of activations and 448 x 128,256 x 18 = 1.034 GB of logits. 118.61 GB are left:
    56,558 blocks of 2.097 MB, one of them for padding.
    """
    limits = limits_on("H200", "8B")
    assert (limits.max_num_seqs, limits.max_num_batched_tokens) == (448, 1216)
    assert limits.num_blocks == 56_557
    assert limits.kv_cache_bytes == 56_557 * 16 * 131_072
    assert limits.max_model_len == 32_768


def test_what_the_user_states_is_not_touched():
    both = limits_on("H200", "8B", EngineConfig(max_num_seqs=37, max_num_batched_tokens=999))
    assert (both.max_num_seqs, both.max_num_batched_tokens) == (37, 999)
    assert limits_on("H200", "8B", EngineConfig(max_num_seqs=2000)).max_num_batched_tokens == 2768
    few_tokens = limits_on("H200", "8B", EngineConfig(max_num_batched_tokens=100))
    assert (few_tokens.max_num_seqs, few_tokens.max_num_batched_tokens) == (100, 100)
    cache = EngineConfig(kv_cache_memory=8 * GIB)
    assert limits_on("H200", "8B", cache).max_num_seqs == 128, "8 GiB hold 128 contexts"
    assert limits_on("H200", "8B", cache).kv_cache_bytes == 8 * GIB


def test_without_a_measured_speed_the_kind_of_device_decides():
    limits = choose_limits(SHAPES["8B"].loaded(), EngineConfig(), Resources(100 * GIB))
    assert (limits.max_num_seqs, limits.max_num_batched_tokens) == (256, 4096)


def test_weights_that_nobody_counted_leave_the_least():
    loaded = dataclasses.replace(SHAPES["8B"].loaded(), weight_bytes=0)
    limits = choose_limits(loaded, EngineConfig(), Resources(100 * GIB, GPUS["H200"].speed))
    assert (limits.max_num_seqs, limits.max_num_batched_tokens) == (256, 1024)


def test_more_bandwidth_needs_fewer_prompt_tokens_and_more_arithmetic_more():
    sizes = ModelSizes.of(SHAPES["70B"].loaded())
    tokens = [prompt_tokens_a_step(sizes, MachineSpeed(b * 1e12, f * 1e12)) for b, f in ((8, 700), (4, 700), (4, 2000))]
    assert tokens == [512, 768, 2048]
    assert prompt_tokens_a_step(sizes, MachineSpeed(1e11, 1e16)) == 8192


def test_more_room_never_means_fewer_slots():
    sizes = ModelSizes.of(SHAPES["70B"].loaded())
    slots = [slots_for(sizes, room * GIB, 512) for room in range(200)]
    assert slots == sorted(slots)
    assert (slots[0], slots[-1]) == (64, 1024)
    assert slots_for(sizes, 30 * GIB, 64) == 1024, "short contexts leave room for more rows"


def test_graphs_come_off_the_cache():
    loaded, resources = SHAPES["8B"].loaded(), Resources(60 * GIB, GPUS["H200"].speed)
    asked = []

    def graph_bytes(num_tokens: int, num_seqs: int) -> int:
        asked.append((num_tokens, num_seqs))
        return 3 * GIB

    without = choose_limits(loaded, EngineConfig(), resources)
    limits = choose_limits(loaded, EngineConfig(), resources, graph_bytes)
    assert asked == [(limits.max_num_batched_tokens, limits.max_num_seqs)]
    assert without.kv_cache_bytes - limits.kv_cache_bytes == 3 * GIB


# -- a step that is measured ------------------------------------------------------------------------------------------


def test_a_measured_step_that_takes_more_than_thought_comes_off_the_cache():
    plain = limits_on("H200", "8B")
    measured = limits_on("H200", "8B", measured_step_bytes=lambda tokens, seqs: 10 * GIB)
    sampler = 448 * 128_256 * 16
    step = ModelSizes.of(SHAPES["8B"].loaded()).step_bytes(1216, 448)
    lost = plain.kv_cache_bytes - measured.kv_cache_bytes
    assert lost == pytest.approx(10 * GIB + sampler - step, abs=2 * 16 * 131_072)
    less = limits_on("H200", "8B", measured_step_bytes=lambda tokens, seqs: 1)
    assert less == plain, "what one run did not need another may"


def test_a_step_that_takes_half_of_the_memory_is_made_smaller():
    """Of 8,192 prompt tokens; each takes 4 MB here, and 27 GB are usable."""
    tried = []

    def measured(num_tokens: int, num_seqs: int) -> int:
        tried.append(num_tokens)
        if num_tokens > 6000:
            raise torch.OutOfMemoryError("CUDA out of memory.")
        return num_tokens * 4 * MB

    loaded, resources = SHAPES["0.135B"].loaded(), Resources(30 * GIB, GPUS["H200"].speed, measured)
    limits = choose_limits(loaded, EngineConfig(), resources)
    assert tried == [8192 + 256, 4096 + 256, 2048 + 256]
    assert (limits.max_num_seqs, limits.max_num_batched_tokens) == (256, 2048 + 256)


@pytest.mark.parametrize(("config", "num_tried"), [({}, 6), ({"max_num_batched_tokens": 5000}, 1)])
def test_a_step_that_never_fits_is_refused(config, num_tried):
    """After the smallest that is worth running; what the user stated is tried once."""
    tried = []

    def measured(num_tokens: int, num_seqs: int) -> int:
        tried.append(num_tokens)
        raise RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`")

    resources = Resources(30 * GIB, GPUS["H200"].speed, measured)
    with pytest.raises(ModelError, match=r"a step of [\d,]+ tokens and 256 rows needs about 0\.\d GB, and 29\.0 GB"):
        choose_limits(SHAPES["0.135B"].loaded(), EngineConfig(**config), resources)
    assert len(tried) == num_tried


def test_a_step_that_fails_otherwise_is_not_taken_for_short_memory():
    def measured(num_tokens: int, num_seqs: int) -> int:
        raise ValueError("no")

    with pytest.raises(ValueError, match=r"^no$"):
        choose_limits(SHAPES["8B"].loaded(), EngineConfig(), Resources(60 * GIB, GPUS["H200"].speed, measured))


def test_this_machine_is_examined_without_running_anything(loaded):
    resources = examine(loaded)
    assert resources.free_bytes > 0
    assert (resources.speed, resources.measured_step_bytes) == (None, None)
