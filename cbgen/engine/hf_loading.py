"""How transformers is made to behave while it loads: silent, and with errors that are one sentence."""

from __future__ import annotations

import contextlib
import io
from collections.abc import Iterator
from typing import Any

from cbgen.errors import CbgenError, ModelError


@contextlib.contextmanager
def named_errors(name: str) -> Iterator[None]:
    """Whatever loading raises becomes one sentence that names the model."""
    try:
        yield
    except CbgenError:
        raise
    except Exception as error:
        reason = " ".join(str(error).split())
        if "trust_remote_code" in reason:
            reason = "it needs Python code that ships with it; read that code, then allow it with --trust-remote-code"
        raise ModelError(f"cannot load {name}: {reason[:400] or type(error).__name__}") from error


@contextlib.contextmanager
def quiet_transformers() -> Iterator[None]:
    """No progress bars and no advice on stderr while loading."""
    from transformers.utils import logging

    hf_logging: Any = logging
    verbosity, bars = hf_logging.get_verbosity(), hf_logging.is_progress_bar_enabled()
    hf_logging.set_verbosity_error()
    hf_logging.disable_progress_bar()
    try:
        with contextlib.redirect_stderr(io.StringIO()):  # GGUF conversion draws its bar without asking
            yield
    finally:
        hf_logging.set_verbosity(verbosity)
        if bars:
            hf_logging.enable_progress_bar()
