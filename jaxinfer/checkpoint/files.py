"""The small files of a checkpoint: JSON configurations, the chat template, end-of-text ids.

Knows: their names in Hugging Face directories, which our Orbax directories share. Knows no weights and no tokenizer.
"""

import json
from pathlib import Path
from typing import Any

from jaxinfer.errors import CheckpointError

CHAT_TEMPLATE = "chat_template.jinja"
_TOKENIZER_CONFIG = "tokenizer_config.json"


def read_json(path: Path) -> dict[str, Any]:
    """The JSON object in the file at `path`; raises CheckpointError where it is missing or something else."""
    try:
        value = json.loads(_read_text(path))
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{path.name} is no JSON: {error}") from error
    if not isinstance(value, dict):
        raise CheckpointError(f"{path.name} holds a {type(value).__name__}; expected a JSON object")
    return value


def chat_template(directory: Path) -> str | None:
    """The chat template: `chat_template.jinja`, or the one in `tokenizer_config.json` (of several, `default`)."""
    if (directory / CHAT_TEMPLATE).is_file():
        return _read_text(directory / CHAT_TEMPLATE)
    if not (directory / _TOKENIZER_CONFIG).is_file():
        return None
    template = read_json(directory / _TOKENIZER_CONFIG).get("chat_template")
    if isinstance(template, list):
        named = {entry.get("name"): entry.get("template") for entry in template if isinstance(entry, dict)}
        template = named.get("default")
    if template is not None and not isinstance(template, str):
        raise CheckpointError(f"{_TOKENIZER_CONFIG}: chat_template is a {type(template).__name__}; expected text")
    return template


def eos_ids(value: Any, where: str) -> frozenset[int]:
    """Ids out of an `eos_token_id` field: one, a list, or null."""
    ids = value if isinstance(value, list) else [] if value is None else [value]
    if not all(isinstance(token, int) and not isinstance(token, bool) for token in ids):
        raise CheckpointError(f"{where}: end-of-text id is {value!r:.80}; expected whole numbers")
    return frozenset(ids)


def _read_text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise CheckpointError(f"{path.name} is no UTF-8 text: {error.reason}") from error
    except OSError as error:
        raise CheckpointError(f"{path.name} cannot be read: {error.strerror}") from error
