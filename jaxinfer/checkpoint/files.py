"""The small files of a checkpoint: JSON configurations, chat templates, and what `generation_config.json` says.

Knows: their names in Hugging Face directories, which our Orbax directories share. Knows no weights and no tokenizer.
"""

import json
from pathlib import Path
from typing import Any

from jaxinfer.errors import CheckpointError

CHAT_TEMPLATE = "chat_template.jinja"
_TEMPLATES = "chat_templates"
_TOKENIZER_CONFIG = "tokenizer_config.json"
_DEFAULT = "default"


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
    """The chat template of `directory`, None where there is none.

    The first that is there: `chat_template.jinja`, `chat_templates/default.jinja`, and the one in
    `tokenizer_config.json`, of several the one called `default`. Others in `chat_templates` (`tool_use`, `rag`) are for
    what we do not offer. Raises CheckpointError for a template that is no text.
    """
    for path in (directory / CHAT_TEMPLATE, directory / _TEMPLATES / f"{_DEFAULT}.jinja"):
        if path.is_file():
            return _read_text(path)
    if not (directory / _TOKENIZER_CONFIG).is_file():
        return None
    template = read_json(directory / _TOKENIZER_CONFIG).get("chat_template")
    if isinstance(template, list):
        named = {entry.get("name"): entry.get("template") for entry in template if isinstance(entry, dict)}
        template = named.get(_DEFAULT)
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
