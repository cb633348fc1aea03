"""GGUF files: de-quantized once into transformers' own layout, with the tokenizer as in training.

Enters: `ModelFiles` that may name a GGUF file. Leaves: `ModelFiles` of a directory, kept in the cache by the identity
of the file. Reading the format is transformers' and gguf's work.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from cbgen.engine.hf_loading import named_errors, quiet_transformers
from cbgen.engine.model_files import ModelFiles, conversion_directory

_CONVERTED_GGUF_BYTES = 1 << 30  # larger files are de-quantized on every load rather than kept in the cache
_SPLITS_DIGITS = ("smollm", "starcoder", "refact", "command-r", "codeshell")  # values of tokenizer.ggml.pre


def converted(files: ModelFiles) -> ModelFiles:
    """De-quantize a small GGUF file once and keep it in transformers' layout: later loads are memory-mapped."""
    if files.gguf_file is None or (files.directory / files.gguf_file).stat().st_size > _CONVERTED_GGUF_BYTES:
        return files
    target = conversion_directory(files)
    if not target.is_dir():
        with quiet_transformers(), named_errors(files.description):
            _convert(files, target)
    return replace(files, directory=target, gguf_file=None)


def _convert(files: ModelFiles, target: Path) -> None:
    """Write config, float32 weights and tokenizer to a temporary directory, then rename: never half a model."""
    from safetensors.torch import save_file
    from transformers import AutoModelForCausalLM

    target.parent.mkdir(parents=True, exist_ok=True)
    temporary = Path(tempfile.mkdtemp(prefix=".converting-", dir=target.parent))
    try:
        model = AutoModelForCausalLM.from_pretrained(files.directory, gguf_file=files.gguf_file, dtype=torch.float32)
        tied = set(model.all_tied_weights_keys)
        weights = {key: value.contiguous() for key, value in model.state_dict().items() if key not in tied}
        save_file(weights, temporary / "model.safetensors", metadata={"format": "pt"})
        model.config.dtype = torch.bfloat16  # the type `auto` runs in; weights stay exact in float32
        if hasattr(model.config, "quantization_config"):
            del model.config.quantization_config
        model.config.save_pretrained(temporary)
        model.generation_config.save_pretrained(temporary)
        gguf_tokenizer(files).save_pretrained(temporary)
        with contextlib.suppress(OSError):  # another process was faster: its copy is as good
            os.rename(temporary, target)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def gguf_tokenizer(files: ModelFiles) -> Any:
    """The tokenizer inside a GGUF file. transformers rebuilds it from the vocabulary but, for models whose `pre` type
    splits digits one by one, forgets that step; numbers would then be tokenized unlike in training."""
    from gguf import GGUFReader
    from tokenizers import pre_tokenizers
    from transformers import AutoTokenizer

    assert files.gguf_file is not None
    tokenizer = AutoTokenizer.from_pretrained(files.directory, gguf_file=files.gguf_file)
    field = GGUFReader(files.directory / files.gguf_file).get_field("tokenizer.ggml.pre")
    pre = field.contents() if field else None
    if pre in _SPLITS_DIGITS:
        backend = tokenizer.backend_tokenizer
        backend.pre_tokenizer = pre_tokenizers.Sequence(
            [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
        )
    return tokenizer
