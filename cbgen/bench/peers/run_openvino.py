"""OpenVINO GenAI: `ContinuousBatchingPipeline` over token ids, on an IR of 16-bit weights exported once.

Knobs: `max_num_seqs`, `max_num_batched_tokens`, `kv_gib`, `prefix_caching`. The IR is kept in
`<cache>/<digest of the model's directory>`; the environment variable CBGEN_BENCH_CACHE names the cache.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from protocol import Answers, Generate, Task, no_facts, serve


def exported(model: str, cache: Path) -> Path:
    """The model as OpenVINO reads it: weights in 16 bits, 32 where the model's own type is float32."""
    files = sorted(path for path in Path(model).iterdir() if path.is_file())
    digest = hashlib.sha256()
    for path in files:
        digest.update(f"{path.name}\0{path.stat().st_size}\0{path.stat().st_mtime_ns}\0".encode())
    target = cache / digest.hexdigest()[:24]
    if not target.is_dir():
        from optimum.exporters.openvino import main_export

        cache.mkdir(parents=True, exist_ok=True)
        temporary = Path(tempfile.mkdtemp(prefix=".exporting-", dir=cache))
        try:
            from optimum.intel import OVConfig

            main_export(
                model,
                output=temporary,
                task="text-generation-with-past",
                ov_config=OVConfig(dtype="fp16"),
                stateful=True,
            )
            for path in files:  # the pipeline looks for the tokenizer's and the generation settings here
                if path.suffix in (".json", ".jinja") and not (temporary / path.name).exists():
                    shutil.copy(path, temporary)
            temporary.rename(target)
        finally:
            shutil.rmtree(temporary, ignore_errors=True)
    return target


def load(task: Task) -> tuple[Generate, Callable[[], dict[str, Any]]]:
    """Export if need be, and build the pipeline."""
    import numpy as np
    import openvino
    import openvino_genai

    cache = Path(os.environ.get("CBGEN_BENCH_CACHE") or Path(tempfile.gettempdir()) / "cbgen-bench") / "openvino"
    directory = exported(task.model, cache)
    scheduler = openvino_genai.SchedulerConfig()
    scheduler.max_num_seqs = int(task.knobs.get("max_num_seqs", 64))
    if "max_num_batched_tokens" in task.knobs:
        scheduler.max_num_batched_tokens = int(task.knobs["max_num_batched_tokens"])
    scheduler.cache_size = int(task.knobs.get("kv_gib", 0))  # 0 grows as needed
    scheduler.enable_prefix_caching = bool(task.knobs.get("prefix_caching", False))
    properties = {
        "INFERENCE_NUM_THREADS": task.threads,
        "INFERENCE_PRECISION_HINT": {"bfloat16": "bf16", "float16": "f16", "float32": "f32"}[task.dtype],
    }
    pipeline = openvino_genai.ContinuousBatchingPipeline(str(directory), scheduler, "CPU", properties)

    def generate(work: Task) -> Answers:
        configs = []
        for length in work.lengths:
            config = openvino_genai.GenerationConfig()
            config.max_new_tokens = length
            config.ignore_eos = True
            config.do_sample = False
            config.apply_chat_template = False
            configs.append(config)
        inputs = [openvino.Tensor(np.array([ids], dtype=np.int64)) for ids in work.prompts]
        results = pipeline.generate(inputs, configs)
        return [list(result.m_generation_ids[0]) for result in results]

    return generate, no_facts


if __name__ == "__main__":
    sys.argv = sys.argv[:1]
    serve(("openvino-genai", "openvino", "optimum-intel"), load)
