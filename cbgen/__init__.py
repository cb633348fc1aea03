"""cbgen: offline batch generation with LLMs, one completion per input row, in input order, resumable."""

__version__ = "0.1.0"
