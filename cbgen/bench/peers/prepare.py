"""The model as every engine reads it, its sizes, and the workload's prompts as its token ids.

    in   {"model": "demo", "shape": null, "dtype": "bfloat16", "texts": [...], "cache": DIR}
    out  {"directory": DIR, "prompts": [[ids]] or null, "shape": {...}, "description": "...",
          "threads": 2}
    or   {"error": "..."}

A GGUF model is written once, in the benchmark's dtype, to the cache; a shape becomes a model of random weights there.
What is a directory of safetensors already is used where it is. A model without a tokenizer has no prompts.
"""

from __future__ import annotations

import json
import os
import shutil
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from cbgen.engine.model_files import DEMO, ModelFiles, find_model, model_identity
from cbgen.errors import CbgenError

SHAPES: dict[str, dict[str, Any]] = {
    "0.6b": {
        "hidden_size": 1024,
        "num_hidden_layers": 28,
        "num_attention_heads": 16,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "intermediate_size": 3072,
        "vocab_size": 151936,
    },
    "tiny": {
        "hidden_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "intermediate_size": 128,
        "vocab_size": 49152,
    },
}
"""Models of random weights, in the layout of Qwen3 with tied embeddings. `tiny` is for tests."""


def main() -> None:
    """One question from stdin, one answer to stdout."""
    question = json.loads(sys.stdin.readline())
    stdout = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    try:
        answer = prepare(question)
    except CbgenError as error:
        answer = {"error": str(error), "exit_code": error.exit_code}
    stdout.write(json.dumps(answer) + "\n")
    stdout.flush()


def prepare(question: dict[str, Any]) -> dict[str, Any]:
    """Answer one question."""
    from cbgen.engine.cpu_settings import choose_threads

    cache, dtype = Path(question["cache"]), question["dtype"]
    if question.get("shape"):
        name = question["shape"]
        directory = _kept(cache / f"{name}-{dtype}", lambda target: _write_random(SHAPES[name], dtype, target))
        description = f"random weights, shape {name}"
    else:
        files = find_model(question["model"])
        directory, description = _plain(files, dtype, cache), files.description
    return {
        "directory": str(directory),
        "description": description,
        "prompts": _token_ids(directory, question["texts"]),
        "shape": _sizes(directory, dtype),
        "threads": choose_threads(),
    }


def _plain(files: ModelFiles, dtype: str, cache: Path) -> Path:
    """A directory in transformers' layout; of a GGUF file one in the dtype asked for."""
    if files.gguf_file is None:
        return files.directory
    return _kept(cache / f"{model_identity(files)}-{dtype}", lambda target: _write_converted(files, dtype, target))


def _kept(target: Path, write: Callable[[Path], None]) -> Path:
    """`target`, written first if it is not there: never half of it."""
    if not target.is_dir():
        target.parent.mkdir(parents=True, exist_ok=True)
        temporary = Path(tempfile.mkdtemp(prefix=".writing-", dir=target.parent))
        try:
            write(temporary)
            temporary.rename(target)
        finally:
            shutil.rmtree(temporary, ignore_errors=True)
    return target


def _write_converted(files: ModelFiles, dtype: str, target: Path) -> None:
    import torch
    from transformers import AutoModelForCausalLM

    from cbgen.engine.gguf import converted
    from cbgen.engine.loader import load_tokenizer

    source = converted(files)
    gguf: dict[str, Any] = {"gguf_file": source.gguf_file} if source.gguf_file else {}
    AutoModelForCausalLM.from_pretrained(source.directory, dtype=getattr(torch, dtype), **gguf).save_pretrained(target)
    load_tokenizer(files).save_pretrained(target)


def _write_random(sizes: dict[str, Any], dtype: str, target: Path) -> None:
    """Weights as a training run would begin with; the demo model's tokenizer where there is one."""
    import torch
    import transformers

    from cbgen.engine.loader import load_tokenizer

    library: Any = transformers
    config = library.Qwen3Config(**sizes, max_position_embeddings=8192, tie_word_embeddings=True, eos_token_id=2)
    torch.manual_seed(0)
    library.AutoModelForCausalLM.from_config(config, dtype=getattr(torch, dtype)).save_pretrained(target)
    try:
        load_tokenizer(find_model(DEMO)).save_pretrained(target)
    except CbgenError:
        return  # prompts are random ids then


def _token_ids(directory: Path, texts: list[str]) -> list[list[int]] | None:
    if not any((directory / name).exists() for name in ("tokenizer.json", "tokenizer.model", "vocab.json")):
        return None
    from cbgen.engine.loader import load_tokenizer

    tokenizer = load_tokenizer(ModelFiles(str(directory), directory))
    ids: list[list[int]] = tokenizer(texts, add_special_tokens=True)["input_ids"]
    return ids


def _sizes(directory: Path, dtype: str) -> dict[str, int]:
    """Fields of `cbgen.bench.roofline.ModelShape`, from the model built without memory."""
    import torch
    import transformers

    library: Any = transformers
    config = library.AutoConfig.from_pretrained(directory)
    text = config.get_text_config()
    with torch.device("meta"):
        model = library.AutoModelForCausalLM.from_config(config)
    embedding = {id(weight) for weight in model.get_input_embeddings().parameters()}
    head = {id(weight) for weight in model.get_output_embeddings().parameters()}
    layers = sum(w.numel() for w in model.parameters() if id(w) not in embedding | head)
    return {
        "layer_weights": layers,
        "head_weights": sum(w.numel() for w in model.get_output_embeddings().parameters()),
        "num_layers": text.num_hidden_layers,
        "num_kv_heads": getattr(text, "num_key_value_heads", None) or text.num_attention_heads,
        "head_dim": getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads,
        "itemsize": getattr(torch, dtype).itemsize,
        "vocab_size": text.vocab_size,
    }


if __name__ == "__main__":
    main()
