"""transformers' `generate` over static batches of rows sorted by length, padded on the left.

A batch runs until its longest row has its tokens; what shorter rows emit beyond theirs is thrown away. Knobs:
`batch_size`; `sort`: `length` (tokens to emit, which real rows do not tell beforehand: the kindest case), `prompt` or
`none`.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

from protocol import Answers, Generate, Task, no_facts, serve


def batches(prompts: list[list[int]], lengths: list[int], batch_size: int, sort: str) -> list[list[int]]:
    """Row numbers of each batch, longest first."""
    keys: dict[str, Callable[[int], tuple[int, ...]]] = {
        "length": lambda row: (-lengths[row], -len(prompts[row])),
        "prompt": lambda row: (-len(prompts[row]),),
        "none": lambda row: (row,),
    }
    order = sorted(range(len(prompts)), key=keys[sort])
    return [order[start : start + batch_size] for start in range(0, len(order), batch_size)]


def load(task: Task) -> tuple[Generate, Callable[[], dict[str, Any]]]:
    """The model as transformers loads it by default."""
    import torch
    import transformers

    library: Any = transformers  # has no types where it matters here
    torch.set_num_threads(task.threads)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    model = library.AutoModelForCausalLM.from_pretrained(task.model, dtype=getattr(torch, task.dtype)).to(device)
    batch_size, sort = int(task.knobs.get("batch_size", 32)), str(task.knobs.get("sort", "length"))

    def generate(work: Task) -> Answers:
        answers: Answers = [[] for _ in work.prompts]
        for rows in batches(work.prompts, work.lengths, batch_size, sort):
            width = max(len(work.prompts[row]) for row in rows)
            input_ids = torch.zeros(len(rows), width, dtype=torch.long)  # [B, width]
            mask = torch.zeros_like(input_ids)
            for place, row in enumerate(rows):
                ids = work.prompts[row]
                input_ids[place, width - len(ids) :] = torch.tensor(ids)
                mask[place, width - len(ids) :] = 1
            longest = max(work.lengths[row] for row in rows)
            config = library.GenerationConfig(
                do_sample=False, max_new_tokens=longest, eos_token_id=None, pad_token_id=0
            )
            output = model.generate(
                input_ids.to(device), attention_mask=mask.to(device), generation_config=config
            )  # [B, width + longest]
            for place, row in enumerate(rows):
                answers[row] = output[place, width : width + work.lengths[row]].tolist()
        return answers

    return generate, no_facts


if __name__ == "__main__":
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    serve(("transformers", "torch"), load)
