"""vLLM: `LLM.generate` over token ids, all rows at once. On a CPU all cores are bound to it.

Knobs: `max_num_seqs`, `max_num_batched_tokens`, `kv_gib` (KV cache on a CPU), `prefix_caching`.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

from protocol import Answers, Generate, Task, no_facts, serve


def load(task: Task) -> tuple[Generate, Callable[[], dict[str, Any]]]:
    """Environment first: vLLM reads it on import."""
    cores = sorted(os.sched_getaffinity(0))[: task.threads]
    os.environ["VLLM_CPU_OMP_THREADS_BIND"] = ",".join(map(str, cores))
    os.environ["VLLM_CPU_KVCACHE_SPACE"] = str(task.knobs.get("kv_gib", 4))
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    os.environ["HF_HUB_OFFLINE"] = "1"
    os.environ["VLLM_NO_USAGE_STATS"] = "1"
    from vllm import LLM, SamplingParams

    options = {name: task.knobs[name] for name in ("max_num_seqs", "max_num_batched_tokens") if name in task.knobs}
    llm = LLM(
        model=task.model,
        dtype=task.dtype,
        max_model_len=task.max_model_len,
        enable_prefix_caching=bool(task.knobs.get("prefix_caching", False)),
        skip_tokenizer_init=True,
        **options,
    )

    def generate(work: Task) -> Answers:
        params = [
            SamplingParams(temperature=0.0, max_tokens=n, ignore_eos=True, detokenize=False) for n in work.lengths
        ]
        outputs = llm.generate([{"prompt_token_ids": ids} for ids in work.prompts], params, use_tqdm=False)
        return [list(output.outputs[0].token_ids) for output in outputs]

    return generate, no_facts


if __name__ == "__main__":
    serve(("vllm-cpu", "vllm", "torch", "transformers"), load)
