"""What the small files beside a tokenizer say about it: BOS, EOS, and tokens that are added or marked special.

Knows: `tokenizer_config.json`, and `special_tokens_map.json` and `added_tokens.json` of older checkpoints. Does not
know how text is split. Where files contradict each other, the rules are those of transformers 5, each of them measured:

* `added_tokens_decoder` in `tokenizer_config.json` overrides the flags that `tokenizer.json` gives a token; where it
  stands, the two older files are not read;
* where it does not stand, `special_tokens_map.json` overrides `tokenizer_config.json`, and `added_tokens.json` adds
  tokens, which are special where some special name is given to them;
* a token that has a name (`eos_token`, `image_token`, a value of an `extra_special_tokens` object) is special;
  one that `additional_special_tokens` merely lists keeps the flag it has.

One rule differs, and is llama.cpp's: `add_bos_token` counts where it stands, also beside a `tokenizer.json`. So a
checkpoint reads the same from its own files and from the GGUF made of them. `add_eos_token` asks for the end of a text
after a prompt, where nothing could follow it, and is not read.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from jaxinfer.errors import CheckpointError

CONFIG, MAP, ADDED = "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json"
_LISTS = ("additional_special_tokens", "extra_special_tokens")


@dataclass(frozen=True, slots=True)
class AddedToken:
    """One token and its flags, as `added_tokens_decoder` and a `tokenizer.json` have them.

    special: no part of decoded text. lstrip, rstrip: swallows the white space on that side. normalized: looked for in
    normalised text. single_word: found only between word boundaries, which nobody here implements.
    """

    content: str
    special: bool = False
    lstrip: bool = False
    rstrip: bool = False
    normalized: bool = False
    single_word: bool = False


@dataclass(frozen=True, slots=True)
class TokenizerSettings:
    """bos, eos: spellings, "" where not named. adds_bos: None where no file says. eos_ids: further ends of a text.

    named: spellings that have a name of their own, and so are special. listed: spellings that must exist. added: tokens
    by id, beyond those of the tokenizer's own file, or in place of their flags.
    """

    bos: str = ""
    eos: str = ""
    adds_bos: bool | None = None
    eos_ids: tuple[int, ...] = ()
    named: frozenset[str] = frozenset()
    listed: tuple[str, ...] = ()
    added: Mapping[int, AddedToken] = field(default_factory=dict)


NOTHING_SAID = TokenizerSettings()


def read_settings(directory: Path) -> TokenizerSettings:
    """The settings of the tokenizer in `directory`; no file must be there. Raises CheckpointError, naming the field."""
    config = _read(directory / CONFIG)
    if "added_tokens_decoder" in config:
        return _settings(config, _decoder(config["added_tokens_decoder"]))
    config |= _read(directory / MAP)
    return _settings(config, _older(_read(directory / ADDED), config))


def _settings(config: Mapping[str, Any], added: dict[int, AddedToken]) -> TokenizerSettings:
    extra = config.get("extra_special_tokens")
    by_name = extra if isinstance(extra, dict) else {}
    names = _names({**config, **by_name})
    return TokenizerSettings(
        bos=names.get("bos_token", ""),
        eos=names.get("eos_token", ""),
        adds_bos=_flag(config, "add_bos_token"),
        eos_ids=_ids(config.get("eos_token_ids")),
        named=frozenset(filter(None, names.values())),
        listed=_listed(config),
        added=added,
    )


def _names(config: Mapping[str, Any]) -> dict[str, str]:
    """Spellings by name; what other names hold that is no text has another meaning."""
    return {
        name: spelling(value, name)
        for name, value in config.items()
        if name in ("bos_token", "eos_token") or (name.endswith("_token") and isinstance(value, str | dict))
    }


def _listed(config: Mapping[str, Any]) -> tuple[str, ...]:
    """Spellings in the first of the two lists that is there and is not empty."""
    for name in _LISTS[::-1]:
        entries = config.get(name)
        if entries and not isinstance(entries, dict):
            if not isinstance(entries, list):
                raise CheckpointError(f"{CONFIG}: {name} is a {type(entries).__name__}; expected a list")
            return tuple(spelling(entry, name) for entry in entries)
    return ()


def _decoder(entries: Any) -> dict[int, AddedToken]:
    if not isinstance(entries, dict):
        raise CheckpointError(f"{CONFIG}: added_tokens_decoder is a {type(entries).__name__}; expected an object")
    return {_token_id(key): added_token(entry, CONFIG) for key, entry in entries.items()}


def _token_id(key: str) -> int:
    if not key.isdecimal() or not key.isascii() or len(key) > 9:
        raise CheckpointError(f"{CONFIG}: added_tokens_decoder holds the id {key!r:.40}; expected a whole number")
    return int(key)


def added_token(entry: Any, where: str) -> AddedToken:
    """A token with its flags; those that are not given are off. Raises CheckpointError, naming the file `where`."""
    content = spelling(entry, "an added token", where)
    if not isinstance(entry, dict) or not content:
        raise CheckpointError(f"{where} adds the token {entry!r:.80}; expected an object with a content")
    flags = {
        name: entry[name] for name in ("special", "lstrip", "rstrip", "normalized", "single_word") if name in entry
    }
    for name, flag in flags.items():
        if not isinstance(flag, bool):
            raise CheckpointError(f"{where}: {name} of token {content!r:.40} is {flag!r:.40}; expected true or false")
    return AddedToken(content, **flags)


def _older(ids: Mapping[str, Any], config: Mapping[str, Any]) -> dict[int, AddedToken]:
    """`added_tokens.json`, ids by spelling. Raises CheckpointError where two spellings share an id."""
    special = {*_names(config).values(), *_listed(config)}
    added: dict[int, AddedToken] = {}
    for content, token in ids.items():
        if isinstance(token, bool) or not isinstance(token, int) or token < 0 or token in added:
            raise CheckpointError(f"{ADDED}: {content!r:.40} has the id {token!r:.40}; expected an id of its own")
        added[token] = AddedToken(content, special=content in special, normalized=content not in special)
    return added


def spelling(entry: Any, name: str, where: str = CONFIG) -> str:
    """A token's spelling: a string, an object with `content`, or null, which is ""."""
    text = (entry.get("content") if isinstance(entry, dict) else entry) or ""
    if not isinstance(text, str) or any("\ud800" <= letter <= "\udfff" for letter in text):
        raise CheckpointError(f"{where}: {name} is {text!r:.60}; expected Unicode text")
    return text


def _flag(config: Mapping[str, Any], name: str) -> bool | None:
    if not isinstance(value := config.get(name), bool | None):
        raise CheckpointError(f"{CONFIG}: {name} is {value!r:.40}; expected true or false")
    return value


def _ids(value: Any) -> tuple[int, ...]:
    """`eos_token_ids`, which our own directories write."""
    if value is None:
        return ()
    if not isinstance(value, list) or not all(isinstance(token, int) for token in value):
        raise CheckpointError(f"{CONFIG}: eos_token_ids is {value!r:.40}; expected a list of whole numbers")
    return tuple(value)


def _read(path: Path) -> dict[str, Any]:
    """The JSON object in an optional file; {} where it is not there."""
    if not path.is_file():
        return {}
    try:
        value = json.loads(path.read_bytes())
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{path.name} is not JSON ({error}); fetch it again") from None
    except OSError as error:
        raise CheckpointError(f"{path.name} cannot be read: {error.strerror}") from None
    if not isinstance(value, dict):
        raise CheckpointError(f"{path.name} holds a {type(value).__name__}; expected an object")
    return value
