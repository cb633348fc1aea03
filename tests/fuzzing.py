"""How many examples hypothesis makes: the same ones in every run of the tests, or as many new ones as CBGEN_EXAMPLES
says.
"""

import os
from typing import Any

from hypothesis import HealthCheck, settings

_ASKED = os.environ.get("CBGEN_EXAMPLES")


def fuzz(max_examples: int, **options: Any) -> settings:
    """Settings for so many examples; none of them depends on the clock or on what earlier runs left behind."""
    return settings(
        max_examples=int(_ASKED or max_examples),
        derandomize=_ASKED is None,
        deadline=None,
        database=None,
        suppress_health_check=list(HealthCheck),
        **options,
    )
