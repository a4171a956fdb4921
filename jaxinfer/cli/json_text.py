"""Findings as JSON that every reader takes."""

import json
import math
from typing import Any


def json_text(value: Any) -> str:
    """`value`, plain data, as one line of JSON. A number that is not finite is null: JSON has no word for it."""
    return json.dumps(_finite(value), allow_nan=False)


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _finite(item) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
