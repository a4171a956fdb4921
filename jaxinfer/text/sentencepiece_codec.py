"""SentencePiece models (arXiv 1808.06226): the `.model` file, and the same rebuilt from a GGUF file's lists.

Knows: the protobuf of a `.model`. Knows nothing of BOS rules or chat.
"""

from collections.abc import Mapping
from typing import Any

from google.protobuf.message import DecodeError
from sentencepiece import SentencePieceProcessor, sentencepiece_model_pb2

from jaxinfer.errors import CheckpointError
from jaxinfer.text.codec import METASPACE, ControlTokens, Place, is_marker
from jaxinfer.text.settings import CONFIG, NOTHING_SAID, AddedToken, TokenizerSettings

_proto: Any = sentencepiece_model_pb2
_Kind = _proto.ModelProto.SentencePiece
_BPE = _proto.TrainerSpec.BPE


class SentencePieceCodec:
    """One parsed `.model` with what `settings` say beside it.

    Raises CheckpointError where it is damaged, where the settings contradict it, or where it decodes in a way that is
    not byte-exact.
    """

    def __init__(self, model: bytes, settings: TokenizerSettings = NOTHING_SAID) -> None:
        proto = _parse(model)
        changed = _add(proto, settings)
        self._model = proto.SerializeToString() if changed else model
        self._pieces = [(piece.piece, piece.type) for piece in proto.pieces]
        self.controls = _controls(proto, settings)
        normalizer = proto.normalizer_spec
        self.drops_space = normalizer.add_dummy_prefix or normalizer.remove_extra_whitespaces
        _make_markers_unspeakable(proto)
        self._first = _processor(proto)
        normalizer.add_dummy_prefix = False
        self._later = _processor(proto) if self.drops_space else self._first

    @property
    def size(self) -> int:
        """Ids run from 0 to size - 1."""
        return len(self._pieces)

    def encode(self, text: str, place: Place) -> list[int]:
        """Ids of literal text; the dummy prefix, where the model has one, goes before the first piece only."""
        return (self._later if place == "inside" else self._first).encode(text)

    def token_bytes(self, token: int) -> bytes:
        """A byte piece's byte, a control piece's spelling, any other piece with its spaces restored."""
        spelling, kind = self._pieces[token]
        if kind == _Kind.BYTE:
            return bytes([int(spelling[3:-1], 16)])
        if kind in (_Kind.CONTROL, _Kind.UNKNOWN):
            return spelling.encode()
        return spelling.replace(METASPACE, " ").encode()

    def files(self) -> dict[str, bytes]:
        """The `.model` file, with what the settings changed of it."""
        return {"tokenizer.model": self._model}


def _parse(model: bytes) -> Any:
    try:
        proto = _proto.ModelProto.FromString(model)
    except DecodeError as error:
        raise CheckpointError(
            f"the SentencePiece model is no protobuf of that kind ({error}); fetch it again"
        ) from None
    if not proto.pieces:
        raise CheckpointError("the SentencePiece model holds no pieces; fetch it again")
    if proto.trainer_spec.treat_whitespace_as_suffix or proto.denormalizer_spec.precompiled_charsmap:
        raise CheckpointError(
            "the SentencePiece model rewrites text as it decodes; expected one that only joins pieces"
        )
    for piece in proto.pieces:
        if piece.type == _Kind.BYTE and not _is_byte(piece.piece):
            raise CheckpointError(f"byte piece {piece.piece!r:.40} is misspelled; expected <0x00> to <0xFF>")
    return proto


def _is_byte(spelling: str) -> bool:
    digits = spelling[3:-1]
    return spelling == f"<0x{digits}>" and len(digits) == 2 and set(digits) <= set("0123456789ABCDEF")


def _add(proto: Any, settings: TokenizerSettings) -> bool:
    """Put the added tokens into the model, and mark those that have a name as control pieces; True where it changed."""
    before = proto.SerializeToString(deterministic=True)
    for token, added in sorted(settings.added.items()):
        if token == len(proto.pieces):
            proto.pieces.add(piece=added.content, score=0.0)
        _mark(proto, token, added)
    ids = {piece.piece: piece for piece in proto.pieces}
    for spelling in (settings.named | {settings.bos, settings.eos}) & ids.keys():
        if ids[spelling].type == _Kind.USER_DEFINED or spelling in (settings.bos, settings.eos):
            ids[spelling].type = _Kind.CONTROL
    for spelling in filter(None, (settings.bos, settings.eos, *settings.listed)):
        if spelling not in ids:
            raise CheckpointError(f"{CONFIG} names the token {spelling!r:.60}, which tokenizer.model does not hold")
    return before != proto.SerializeToString(deterministic=True)


def _mark(proto: Any, token: int, added: AddedToken) -> None:
    """Give the piece `token` the flags of `added`, which must have its spelling."""
    if token >= len(proto.pieces):
        raise CheckpointError(f"token {added.content!r:.40} is added as {token}; the next id is {len(proto.pieces)}")
    piece = proto.pieces[token]
    if added.content not in (piece.piece, piece.piece.replace(METASPACE, " ")):
        raise CheckpointError(
            f"token {token} is added as {added.content!r:.40}; in tokenizer.model it is {piece.piece!r:.40}"
        )
    if added.single_word:
        raise CheckpointError(f"token {added.content!r:.40} is a single_word; that is not implemented")
    if piece.type != _Kind.UNKNOWN:
        piece.type = _Kind.CONTROL if added.special else _Kind.USER_DEFINED
    if piece.type == _Kind.USER_DEFINED and not is_marker(added.content):
        piece.piece = added.content.replace(" ", METASPACE)


def _controls(proto: Any, settings: TokenizerSettings) -> ControlTokens:
    special, markers = {}, {}
    for index, piece in enumerate(proto.pieces):
        if piece.type in (_Kind.CONTROL, _Kind.UNKNOWN):
            special[piece.piece] = index
        elif piece.type == _Kind.USER_DEFINED and is_marker(piece.piece):
            markers[piece.piece] = index
    trainer = proto.trainer_spec
    bos = settings.bos or (trainer.bos_piece if trainer.bos_piece in special else "")
    eos = settings.eos or (trainer.eos_piece if trainer.eos_piece in special else "")
    adds_bos = bool(bos) if settings.adds_bos is None else settings.adds_bos and bool(bos)
    strips = {added.content: (added.lstrip, added.rstrip) for added in settings.added.values()}
    return ControlTokens(special, markers, bos, eos, adds_bos, strips)


def _make_markers_unspeakable(proto: Any) -> None:
    """User-defined pieces always match in text; control pieces never do."""
    for piece in proto.pieces:
        if piece.type == _Kind.USER_DEFINED and is_marker(piece.piece):
            piece.type = _Kind.CONTROL


def _processor(proto: Any) -> SentencePieceProcessor:
    try:
        return SentencePieceProcessor(model_proto=proto.SerializeToString())
    except RuntimeError as error:
        raise CheckpointError(f"the SentencePiece model does not load: {error}") from None


def model_from_gguf(fields: Mapping[str, Any]) -> bytes:
    """A `.model` from `tokenizer.ggml.tokens`, `scores` and `token_type`, whose numbers mean the same as here."""
    tokens, scores = fields["tokenizer.ggml.tokens"], fields.get("tokenizer.ggml.scores")
    kinds = fields.get("tokenizer.ggml.token_type")
    if scores is None or kinds is None or not len(tokens) == len(scores) == len(kinds):
        raise CheckpointError("tokenizer.ggml.tokens, scores and token_type differ in length; expected one of each")
    proto, known = _proto.ModelProto(), set(_Kind.Type.values())
    for spelling, score, kind in zip(tokens, scores, kinds, strict=True):
        if kind not in known:
            raise CheckpointError(f"token {spelling!r:.40} has type {kind!r}; expected 1 to 6")
        spelling = spelling.replace(" ", METASPACE) if kind == _Kind.USER_DEFINED else spelling
        try:
            proto.pieces.add(piece=spelling, score=score, type=kind)
        except (TypeError, ValueError) as error:
            raise CheckpointError(f"token {spelling!r:.40} cannot be a SentencePiece: {error}") from None
    unknown = fields.get("tokenizer.ggml.unknown_token_id", 0)
    _fill_specs(proto, fields, unknown)
    return proto.SerializeToString()


def _fill_specs(proto: Any, fields: Mapping[str, Any], unknown: int) -> None:
    for index, piece in enumerate(proto.pieces):  # converters mark the unknown piece as a control piece
        if index == unknown:
            piece.type = _Kind.UNKNOWN
        elif piece.type == _Kind.UNKNOWN:
            piece.type = _Kind.CONTROL
    trainer, normalizer = proto.trainer_spec, proto.normalizer_spec
    trainer.model_type = _BPE
    trainer.vocab_size = len(proto.pieces)
    trainer.byte_fallback = any(piece.type == _Kind.BYTE for piece in proto.pieces)
    trainer.unk_id, trainer.unk_piece = unknown, proto.pieces[unknown].piece
    for name in ("bos", "eos"):
        index = fields.get(f"tokenizer.ggml.{name}_token_id", -1)
        setattr(trainer, f"{name}_id", index)
        setattr(trainer, f"{name}_piece", proto.pieces[index].piece if index >= 0 else f"<no {name}>")
    normalizer.name = "identity"
    normalizer.add_dummy_prefix = bool(fields.get("tokenizer.ggml.add_space_prefix", True))
    normalizer.remove_extra_whitespaces = False
