"""How much is fast, and how much fits: slots, tokens of a step, context and KV blocks.

Enters: a loaded model, what the user asked for, and what the device has (`Resources`). Leaves: `Limits`. Memory =
weights (loaded by now) + activations and logits of the largest step + CUDA graphs + KV cache. The KV cache gets what
is left, and never more than all slots could use. All of it is arithmetic on plain numbers, so that a machine without
a GPU can check what one with a GPU will do; `examine` alone asks the device.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import psutil

from cbgen.config import EngineConfig
from cbgen.engine.containment import judge
from cbgen.engine.dry_run import DryRun
from cbgen.engine.kv_cache import bytes_per_block
from cbgen.engine.loader import LoadedModel
from cbgen.engine.machine_probe import MachineSpeed, free_device_memory, measure_speed, peak_memory_of
from cbgen.engine.sequence import FinishReason
from cbgen.errors import ModelError, UsageError

BLOCK_SIZE = 16  # tokens
_DEFAULT_SEQS = {"cpu": 128, "cuda": 256}  # where the device's speed is unknown
_DEFAULT_TOKENS = {"cpu": 512, "cuda": 4096}
_USABLE_SHARE = {"cpu": 0.5, "cuda": 0.9}  # of free memory; on CPU other programs live there too

_TYPICAL_CONTEXT = 512  # tokens a running row is taken to hold when slots are chosen
_CACHE_TO_WEIGHTS = 2  # a step reads so much more KV cache than weights before more slots stop paying
_SLOTS_STEP, _LEAST_SLOTS, _MOST_SLOTS = 64, 256, 1024
_BEYOND_BALANCE = 4  # a step's prompt tokens, in units of those at which arithmetic takes as long as reading weights
_HOST_SECONDS = 0.004  # taken to pass until the host has launched a step with prompts: arithmetic should last as long
_TOKENS_STEP, _LEAST_TOKENS, _MOST_TOKENS = 256, 512, 8192


@dataclass(frozen=True, slots=True)
class Limits:
    """Resolved limits of one engine.

    Attributes:
        max_model_len: longest sequence, prompt plus output, in tokens.
        num_blocks: KV blocks of `block_size` tokens; there is memory for one more, which padding may write to.
        notices: the model's, and one sentence for each limit that is lower than the user might expect.
    """

    max_num_seqs: int
    max_num_batched_tokens: int
    max_model_len: int
    num_blocks: int
    block_size: int
    kv_cache_bytes: int
    notices: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class ModelSizes:
    """A model as memory and arithmetic see it. `weight_bytes` is what a step reads, 0 where that is not known."""

    weight_bytes: int
    kv_bytes_per_token: int
    itemsize: int
    vocab_size: int
    hidden_size: int
    intermediate_size: int

    @classmethod
    def of(cls, loaded: LoadedModel) -> ModelSizes:
        return cls(
            loaded.weight_bytes,
            bytes_per_block(loaded.layers, 1, loaded.dtype),
            loaded.dtype.itemsize,
            loaded.vocab_size,
            loaded.hidden_size,
            loaded.intermediate_size,
        )

    def activation_bytes(self, num_tokens: int) -> int:
        """Estimate of what is alive at once in the widest layer."""
        return num_tokens * (12 * self.hidden_size + 3 * self.intermediate_size) * self.itemsize

    def logits_bytes(self, num_seqs: int) -> int:
        """In the model's dtype, then float32 copies in the sampler."""
        return num_seqs * self.vocab_size * (self.itemsize + 4 * 4)

    def step_bytes(self, num_tokens: int, num_seqs: int) -> int:
        """Estimate of a step's memory beyond weights and KV cache."""
        return self.activation_bytes(num_tokens) + self.logits_bytes(num_seqs)


@dataclass(frozen=True, slots=True)
class Resources:
    """What a device has left once the weights are there.

    Attributes:
        free_bytes: free memory.
        speed: None where it was not measured; then sizes are chosen by the kind of device.
        measured_step_bytes: runs a step of so many tokens and so many rows of logits, and says what the model took at
            its peak; raises what short memory raises where that is too much. None: estimates must do.
    """

    free_bytes: int
    speed: MachineSpeed | None = None
    measured_step_bytes: Callable[[int, int], int] | None = None


def examine(loaded: LoadedModel) -> Resources:
    """Measure the device that a model is on: memory everywhere, speed and a step's memory on CUDA."""
    device = loaded.device
    if device.type != "cuda":
        return Resources(_free_host_memory())
    return Resources(
        free_device_memory(device),
        measure_speed(device, loaded.dtype),
        lambda num_tokens, num_logits: peak_memory_of(_dry_run(loaded, num_tokens, num_logits).run, device),
    )


def choose_limits(
    loaded: LoadedModel,
    config: EngineConfig,
    resources: Resources | None = None,
    graph_bytes: Callable[[int, int], int] = lambda num_tokens, num_seqs: 0,
) -> Limits:
    """Fill in what the user left open.

    Args:
        loaded: the model, on its device.
        config: the user's wishes.
        resources: of the device; measured when None.
        graph_bytes: memory to set aside for recorded steps, given the limits on tokens and rows of a step.

    Raises:
        UsageError: --max-model-len is beyond what the model can do.
        ModelError: the KV cache would be too small, or a step does not fit.
    """
    notices = list(loaded.notices)
    max_model_len = _context(loaded, config, notices)
    sizes = ModelSizes.of(loaded)
    resources = examine(loaded) if resources is None else resources
    usable = int(resources.free_bytes * _USABLE_SHARE.get(loaded.device.type, 0.5))
    wish = _wish(sizes, config, resources.speed, loaded.device.type, max_model_len, usable)
    block_bytes = bytes_per_block(loaded.layers, BLOCK_SIZE, loaded.dtype)
    if config.kv_cache_memory is None:
        step, taken = _fitting_step(sizes, wish, resources.measured_step_bytes, usable)
        graphs = graph_bytes(step.num_tokens, step.num_seqs)
        budget = usable - taken - graphs - block_bytes  # one block for padding
    else:
        step, budget = wish, config.kv_cache_memory
    wanted = step.num_seqs * -(-max_model_len // BLOCK_SIZE)
    num_blocks = min(wanted, max(budget, 0) // block_bytes)
    capacity = num_blocks * BLOCK_SIZE
    if capacity < max_model_len:
        if config.max_model_len is not None or capacity < 2:
            raise ModelError(
                f"the KV cache has room for {capacity} tokens, fewer than one row of {max_model_len}: free memory, "
                "raise --kv-cache-memory, or lower --max-model-len"
            )
        notices.append(f"context limited to {capacity} tokens (the model allows {max_model_len}): KV cache memory")
        max_model_len = capacity
    kv_cache_bytes = num_blocks * block_bytes
    return Limits(step.num_seqs, step.num_tokens, max_model_len, num_blocks, BLOCK_SIZE, kv_cache_bytes, tuple(notices))


def _context(loaded: LoadedModel, config: EngineConfig, notices: list[str]) -> int:
    reason = f" ({loaded.max_context_reason})" if loaded.max_context_reason else ""
    if config.max_model_len is None:
        if reason:
            notices.append(f"context limited to {loaded.max_context} tokens{reason}")
        return loaded.max_context
    if config.max_model_len > loaded.max_context:
        raise UsageError(
            f"--max-model-len {config.max_model_len} is more than the model's {loaded.max_context} tokens{reason}"
        )
    return config.max_model_len


# -- what is fast -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class StepSize:
    """The largest step: tokens, and rows among them. `is_fixed` where the user stated the tokens."""

    num_tokens: int
    num_seqs: int
    is_fixed: bool


def _wish(
    sizes: ModelSizes, config: EngineConfig, speed: MachineSpeed | None, kind: str, max_model_len: int, usable: int
) -> StepSize:
    """The user's sizes, else what is fast on a device of this speed, else what is usual on one of this kind."""
    stated_tokens, stated_seqs = config.max_num_batched_tokens, config.max_num_seqs
    if speed is None:
        tokens = stated_tokens or max(_DEFAULT_TOKENS.get(kind, 512), stated_seqs or 0)
        seqs = stated_seqs or min(_DEFAULT_SEQS.get(kind, 32), tokens)
    else:
        prompt_tokens = prompt_tokens_a_step(sizes, speed)
        room = usable - sizes.step_bytes(prompt_tokens + _MOST_SLOTS, _LEAST_SLOTS)
        cache_bytes = room if config.kv_cache_memory is None else config.kv_cache_memory
        seqs = stated_seqs or slots_for(sizes, cache_bytes, min(_TYPICAL_CONTEXT, max_model_len))
        tokens = stated_tokens or prompt_tokens + seqs
        seqs = stated_seqs or min(seqs, tokens)
    return StepSize(tokens, seqs, is_fixed=stated_tokens is not None)


def prompt_tokens_a_step(sizes: ModelSizes, speed: MachineSpeed) -> int:
    """Prompt tokens worth one step: a multiple of 256 from 512 to 8192.

    Enough that arithmetic, not reading the weights, takes most of the step's time, and that the device is busy for as
    long as the host needs to launch it: small models need many more tokens for that than large ones.
    """
    wanted = _BEYOND_BALANCE * speed.balanced_tokens(sizes.itemsize)
    if sizes.weight_bytes:
        wanted = max(wanted, _HOST_SECONDS * speed.flops * sizes.itemsize / (2 * sizes.weight_bytes))
    return max(_LEAST_TOKENS, min(math.ceil(wanted / _TOKENS_STEP) * _TOKENS_STEP, _MOST_TOKENS))


def slots_for(sizes: ModelSizes, cache_bytes: int, context: int) -> int:
    """Rows worth running at once: a multiple of 64, from 256 where the cache has room for them to 1024.

    Each row adds the reading of its own context; the weights are read once for all. When the contexts weigh twice as
    much as the weights, twice the slots would give a fifth more tokens a second, for twice the memory.
    """
    row_bytes = sizes.kv_bytes_per_token * context
    wanted = round(_CACHE_TO_WEIGHTS * sizes.weight_bytes / (row_bytes * _SLOTS_STEP)) * _SLOTS_STEP
    wanted = max(_LEAST_SLOTS, min(wanted, _MOST_SLOTS))
    fitting = cache_bytes // row_bytes // _SLOTS_STEP * _SLOTS_STEP
    return max(_SLOTS_STEP, min(wanted, fitting))


# -- what fits --------------------------------------------------------------------------------------------------------


def _fitting_step(
    sizes: ModelSizes, wish: StepSize, measured_step_bytes: Callable[[int, int], int] | None, usable: int
) -> tuple[StepSize, int]:
    """The largest step up to the wish that leaves half of the memory to the cache, and what it takes.

    Only tokens that we chose ourselves are reduced, and not below those of running rows and a few prompts.

    Raises:
        ModelError: it does not fit.
    """
    step = wish
    while True:
        taken = _step_bytes(sizes, step, measured_step_bytes, usable)
        smaller = StepSize(step.num_seqs + (step.num_tokens - step.num_seqs) // 2, step.num_seqs, step.is_fixed)
        is_smallest = step.is_fixed or smaller.num_tokens - smaller.num_seqs < _TOKENS_STEP
        if taken is not None and (2 * taken <= usable or is_smallest):
            return step, taken
        if is_smallest:
            needed = sizes.step_bytes(step.num_tokens, step.num_seqs)
            raise ModelError(
                f"a step of {step.num_tokens:,} tokens and {step.num_seqs:,} rows needs about {needed / 1e9:,.1f} GB, "
                f"and {usable / 1e9:,.1f} GB are usable: lower --max-num-batched-tokens or --max-num-seqs, or free "
                "memory"
            )
        step = smaller


def _step_bytes(
    sizes: ModelSizes, step: StepSize, measured_step_bytes: Callable[[int, int], int] | None, usable: int
) -> int | None:
    """Peak memory of one step beyond weights and KV cache; None where that is more than there is."""
    estimate = sizes.step_bytes(step.num_tokens, step.num_seqs)
    if estimate > usable or measured_step_bytes is None:
        return estimate if estimate <= usable else None
    try:
        measured = measured_step_bytes(step.num_tokens, step.num_seqs)
    except Exception as error:
        if judge(error).reason is FinishReason.OUT_OF_MEMORY:
            return None
        raise
    sampler_bytes = sizes.logits_bytes(step.num_seqs) - step.num_seqs * sizes.vocab_size * sizes.itemsize
    return max(estimate, measured + sampler_bytes)


def _dry_run(loaded: LoadedModel, num_tokens: int, num_logits: int) -> DryRun:
    length = min(num_tokens, loaded.max_context, _MOST_TOKENS)
    lengths = [min(length, num_tokens - start) for start in range(0, num_tokens, length)]
    return DryRun(loaded, lengths, min(num_logits, num_tokens))


def _free_host_memory() -> int:
    """Free memory, also below the container's own limit."""
    free = int(psutil.virtual_memory().available)
    with contextlib.suppress(OSError, ValueError):  # no cgroup v2, or no limit ("max")
        limit = int(Path("/sys/fs/cgroup/memory.max").read_text())
        free = min(free, limit - int(Path("/sys/fs/cgroup/memory.current").read_text()))
    return free
