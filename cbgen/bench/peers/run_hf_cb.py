"""transformers' continuous batching, the machinery of `generate_batch`, with a length of its own for each row.

Knobs: `max_requests` at once, `max_batch_tokens` of a step, `page_size`, `attention` (`sdpa`; flash where installed).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from protocol import Answers, Generate, Task, no_facts, serve

_PATIENCE_S = 600.0  # for one row; a thread that died is noticed at once


def load(task: Task) -> tuple[Generate, Callable[[], dict[str, Any]]]:
    """Model, and one manager that stays for all rows."""
    import torch
    import transformers

    library: Any = transformers  # has no types where it matters here
    torch.set_num_threads(task.threads)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    model = library.AutoModelForCausalLM.from_pretrained(
        task.model,
        dtype=getattr(torch, task.dtype),
        attn_implementation=task.knobs.get("attention", "sdpa"),
    ).to(device)
    page_size = int(task.knobs.get("page_size", 32))
    max_requests = int(task.knobs.get("max_requests", 64))
    longest = max(len(p) + n for p, n in zip(task.prompts, task.lengths, strict=True))
    config = library.ContinuousBatchingConfig(
        page_size=page_size,
        num_blocks=(max_requests + 1) * (-(-longest // page_size) + 1),
        max_batch_tokens=int(task.knobs.get("max_batch_tokens", 512)),
        max_requests_per_batch=max_requests,
        allow_block_sharing=bool(task.knobs.get("prefix_caching", False)),
    )
    greedy = library.GenerationConfig(do_sample=False, max_new_tokens=longest, eos_token_id=-1)
    manager = model.init_continuous_batching(generation_config=greedy, continuous_batching_config=config)
    manager.start()

    def generate(work: Task) -> Answers:
        places = {}
        for row, (ids, length) in enumerate(zip(work.prompts, work.lengths, strict=True)):
            places[manager.add_request(ids, max_new_tokens=length, eos_token_id=-1)] = row
        answers: Answers = [[] for _ in work.prompts]
        for _ in work.prompts:
            result = manager.get_result(timeout=_PATIENCE_S)
            if result is None or result.error:
                raise RuntimeError(f"a request failed: {result.error if result else 'no result'}")
            answers[places[result.request_id]] = list(result.generated_tokens)
        return answers

    return generate, no_facts


if __name__ == "__main__":
    serve(("transformers", "torch"), load)
