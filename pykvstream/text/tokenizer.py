"""Text to token ids and back, from the vocabulary inside a GGUF file.

``Tokenizer.from_metadata`` checks the vocabulary at once; the merge table of the ``tokenizers`` package is
built on the first ``encode``, so that looking at a file does not pay for it.

Order: special tokens are cut out first (longest first, only when asked for), the pre-tokenizer cuts the rest,
and bytes are merged inside each piece. No Unicode normalization: bytes round-trip.
Units: limits count Unicode code points of the text.
Source: spec/model.md 7.1 and 7.2; token types are those of ``tokenizer.ggml.token_type``.
Holds: user text never turns into a control (3) or user-defined (4) token unless ``specials=True``. Other
readers always cut out user-defined tokens; here ``</think>`` or ``<tool_call>`` typed by a user stays text. A
vocabulary whose merges spell a user-defined token still reaches it that way: there it is an ordinary word.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import TypeAlias, TypeGuard

import numpy as np
from tokenizers import Regex, models, pre_tokenizers
from tokenizers import Tokenizer as _Backend

from pykvstream.errors import FormatError, InvalidArgument, Unsupported
from pykvstream.text.pretokenizers import PRE_TOKENIZERS, PreTokenizer

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = 1, 2, 3, 4, 5, 6

ANSWER_TAGS = frozenset(("<think>", "</think>", "<tool_call>", "</tool_call>"))
"""The parts of an answer are told apart by these: they are text, also where a file calls them control tokens."""

MAX_TEXT_CHARS = 1 << 25
MAX_SPECIAL_CHARS = 512
# The regular expression engine gives up after ten million retries in one match, and a run of white space
# costs two or three for each character; every other class is matched without retries.
MAX_WHITESPACE_RUN = 1 << 20

_KEY = "tokenizer.ggml."
_Merges: TypeAlias = tuple[tuple[str, str], ...]
_WHITESPACE_RUN = re.compile(r"\s+")
_EOG_TEXTS = ("<|im_end|>", "<|endoftext|>", "<|eot_id|>", "<|eom_id|>", "<|end_of_text|>", "<|end|>")
_EOG_SPECIAL_TEXTS = ("<|fim_pad|>", "<|repo_name|>", "<|file_sep|>")


def _byte_alphabet() -> dict[int, str]:
    """Return the GPT-2 map: printable Latin-1 bytes stand for themselves, the others for U+0100 and up."""
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    hidden = iter(range(0x100, 0x200))
    return {byte: chr(byte if byte in printable else next(hidden)) for byte in range(256)}


_BYTE_TO_CHAR = _byte_alphabet()
_CHAR_TO_BYTE = {char: bytes([byte]) for byte, char in _BYTE_TO_CHAR.items()}


def _is_strings(value: object) -> TypeGuard[Sequence[str]]:
    return isinstance(value, Sequence) and not isinstance(value, str | bytes | bytearray)


def _strings(metadata: Mapping[str, object], name: str) -> tuple[str, ...]:
    key = _KEY + name
    value = metadata.get(key)
    if value is None:
        raise FormatError("the vocabulary is missing", key=key)
    if not _is_strings(value):
        raise FormatError(f"need an array of strings, have {type(value).__name__}", key=key)
    strings = tuple(value)
    for i, string in enumerate(strings):
        if not isinstance(string, str):
            raise FormatError(f"need strings, have {type(string).__name__} at index {i}", key=key)
    return strings


def _numbers(metadata: Mapping[str, object], name: str, kinds: str, length: int) -> np.ndarray | None:
    """Return a numeric array of exactly ``length`` elements, or None where the key is absent."""
    key = _KEY + name
    value = metadata.get(key)
    if value is None:
        return None
    if isinstance(value, str | bytes) or not isinstance(value, np.ndarray | Sequence):
        raise FormatError(f"need a numeric array, have {type(value).__name__}", key=key)
    if not isinstance(value, np.ndarray) and not all(isinstance(x, int | float) for x in value):
        raise FormatError("need a numeric array, have mixed or non-numeric elements", key=key)
    array = np.asarray(value)
    if array.ndim != 1 or array.size != length:
        raise FormatError(f"need {length} elements (one a token), have shape {array.shape}", key=key)
    if array.size and array.dtype.kind not in kinds:
        raise FormatError(f"need elements of kind {kinds!r}, have {array.dtype}", key=key)
    return array


def _flag(metadata: Mapping[str, object], name: str) -> bool:
    value = metadata.get(_KEY + name, False)
    if not isinstance(value, bool | np.bool_):
        raise FormatError(f"need a boolean, have {type(value).__name__}", key=_KEY + name)
    return bool(value)


def _token_id(metadata: Mapping[str, object], name: str, n_vocab: int) -> int | None:
    key = f"{_KEY}{name}_token_id"
    value = metadata.get(key)
    if value is None:
        return None
    if isinstance(value, bool | np.bool_) or not isinstance(value, int | np.integer):
        raise FormatError(f"need a token id, have {type(value).__name__}", key=key)
    if not 0 <= value < n_vocab:
        raise FormatError(f"token id {int(value)} is outside the vocabulary of {n_vocab}", key=key)
    return int(value)


def _pre_tokenizer(metadata: Mapping[str, object]) -> PreTokenizer:
    model = metadata.get(_KEY + "model")
    if model is None:
        raise FormatError("the tokenizer's kind is missing", key=_KEY + "model")
    if model != "gpt2":
        raise Unsupported(f"tokenizer model {str(model)[:80]!r}: supported is 'gpt2' (byte-level BPE)")
    pre = metadata.get(_KEY + "pre")
    if pre is None:
        raise FormatError("the pre-tokenizer's name is missing", key=_KEY + "pre")
    if not isinstance(pre, str) or pre not in PRE_TOKENIZERS:
        raise Unsupported(f"pre-tokenizer {str(pre)[:80]!r}: supported are {', '.join(PRE_TOKENIZERS)}")
    return PRE_TOKENIZERS[pre]


def _token_types(metadata: Mapping[str, object], n_vocab: int) -> bytes:
    array = _numbers(metadata, "token_type", "iu", n_vocab)
    if array is None:
        return bytes([NORMAL]) * n_vocab
    bad = np.flatnonzero((array < 0) | (array > BYTE))
    if bad.size:
        message = f"token type {int(array[bad[0]])} at index {int(bad[0])} is not one of 0-6"
        raise FormatError(message, key=_KEY + "token_type")
    return array.astype(np.uint8).tobytes()


def _merges(metadata: Mapping[str, object], ids: Mapping[str, int], types: bytes) -> _Merges:
    """The merges that can take place. A vocabulary that was cut keeps merges of tokens that it has no more."""
    key = _KEY + "merges"
    merges: list[tuple[str, str]] = []
    for i, line in enumerate(_strings(metadata, "merges")):
        left, separator, right = line.partition(" ")
        if not (left and separator and right) or " " in right:
            raise FormatError(f"merge {i} is not two words: {line[:80]!r}", key=key)
        parts = (left, right, left + right)
        for part in parts:
            if part in ids and types[ids[part]] in (UNKNOWN, CONTROL):
                raise FormatError(f"merge {i} spells {part[:80]!r}, which is a control token", key=key)
        if all(part in ids for part in parts):
            merges.append((left, right))
    if len(set(merges)) != len(merges):
        raise FormatError("a merge occurs twice", key=key)
    return tuple(merges)


class _Specials:
    """Finds the texts of special tokens: by first character, then by known lengths, longest first."""

    __slots__ = ("_first", "_ids", "_lengths", "foreign")

    def __init__(self, ids: Mapping[str, int]) -> None:
        self._ids = ids
        lengths: dict[str, set[int]] = {}
        for text in ids:
            lengths.setdefault(text[0], set()).add(len(text))
        self._lengths = {first: sorted(known, reverse=True) for first, known in lengths.items()}
        self._first = re.compile("[" + "".join(map(re.escape, lengths)) + "]")
        used = set().union(*ids)
        self.foreign = next(point for point in range(0x10FFFF, 0, -1) if chr(point) not in used)

    def spans(self, text: str) -> Iterator[tuple[int, int, int]]:
        """Yield ``(start, end, id)`` from the left."""
        at = 0
        while (hit := self._first.search(text, at)) is not None:
            start = hit.start()
            at = start + 1
            for length in self._lengths[text[start]]:
                token = self._ids.get(text[start : start + length])
                if token is not None:
                    at = start + length
                    yield start, at, token
                    break


@dataclass(frozen=True, eq=False)
class Tokenizer:
    """A byte-level BPE vocabulary; build it with ``from_metadata``.

    ``n_vocab`` is the number of tokens that have a text. The output matrix may have more rows
    (``n_vocab_rows``); their ids decode to nothing and must never be sampled.
    """

    tokens: tuple[str, ...] = field(repr=False)
    types: bytes = field(repr=False)
    merges: _Merges = field(repr=False)
    rule: PreTokenizer = field(repr=False)
    n_vocab_rows: int
    bos_id: int | None
    eos_id: int | None
    eog_ids: frozenset[int]
    add_bos: bool
    add_eos: bool
    _ids: Mapping[str, int] = field(repr=False)

    @classmethod
    def from_metadata(cls, metadata: Mapping[str, object], n_vocab_rows: int) -> Tokenizer:
        """Check the ``tokenizer.ggml.*`` keys; return the tokenizer of a model with ``n_vocab_rows`` logits.

        Raises ``FormatError`` naming the malformed key, ``Unsupported`` for another model or pre-tokenizer.
        """
        rule = _pre_tokenizer(metadata)
        tokens = _strings(metadata, "tokens")
        n_vocab = len(tokens)
        if not n_vocab:
            raise FormatError("the vocabulary is empty", key=_KEY + "tokens")
        if n_vocab > n_vocab_rows:
            message = f"the vocabulary has {n_vocab} tokens, the model only {n_vocab_rows} logits"
            raise FormatError(message, key=_KEY + "tokens")
        ids = {token: i for i, token in enumerate(tokens)}
        _refuse_duplicates(tokens, ids)
        _numbers(metadata, "scores", "f", n_vocab)
        types = bytearray(_token_types(metadata, n_vocab))
        bos, eos, *others = (_token_id(metadata, name, n_vocab) for name in ("bos", "eos", "eot", "eom"))
        eog = {i for i in (eos, *others) if i is not None}
        eog |= {ids[text] for text in _EOG_TEXTS if text in ids}
        eog |= {ids[t] for t in _EOG_SPECIAL_TEXTS if t in ids and types[ids[t]] in (CONTROL, USER_DEFINED)}
        for i in eog | ({bos} if bos is not None else set()):
            # Some files mark their own end-of-turn token as a normal word; user text could then spell it.
            if types[i] != USER_DEFINED:
                types[i] = CONTROL
        add_bos, add_eos = _flag(metadata, "add_bos_token"), _flag(metadata, "add_eos_token")
        if add_bos and bos is None:
            raise FormatError("a leading token is asked for but not named", key=_KEY + "bos_token_id")
        if add_eos and eos is None:
            raise FormatError("a trailing token is asked for but not named", key=_KEY + "eos_token_id")
        _refuse_long_specials(tokens, types)
        merges = _merges(metadata, ids, bytes(types))
        kinds, eogs = bytes(types), frozenset(eog)
        return cls(tokens, kinds, merges, rule, n_vocab_rows, bos, eos, eogs, add_bos, add_eos, ids)

    @property
    def n_vocab(self) -> int:
        """Tokens that exist; an id at or above this is padding of the output matrix."""
        return len(self.tokens)

    def token_id(self, text: str) -> int | None:
        """Return the id of the token spelled exactly ``text`` in the file, or None."""
        return self._ids.get(text)

    def is_special(self, token: int) -> bool:
        """Whether the token is a control or user-defined one, which user text never becomes."""
        return token < self.n_vocab and self.types[token] in (CONTROL, USER_DEFINED)

    def encode(self, text: str, *, specials: bool = False, bos: bool = False) -> list[int]:
        """Return the ids of ``text``; ``bos`` adds the leading token where the file asks for one.

        With ``specials`` the texts of control and user-defined tokens become those tokens, longest first.
        """
        spans = self.special_spans(text) if specials else []
        ids = self.encode_spans(text, spans)
        return [self.bos_id, *ids] if bos and self.add_bos and self.bos_id is not None else ids

    @property
    def bos_token(self) -> str:
        """The text of the leading token, "" where the file names none."""
        return "" if self.bos_id is None else self.tokens[self.bos_id]

    @property
    def eos_token(self) -> str:
        """The text of the closing token, "" where the file names none."""
        return "" if self.eos_id is None else self.tokens[self.eos_id]

    def special_spans(self, text: str, marks: bytes | None = None) -> list[tuple[int, int, int]]:
        """Return ``(start, end, id)`` of the special tokens spelled in ``text``: leftmost, longest first.

        With ``marks``, one byte a character, only characters whose mark is not 0 can be part of one; the
        others cannot even make a longer token out of a shorter one.
        """
        specials = self._specials
        if specials is None:
            return []
        if marks is not None:
            points = np.frombuffer(text.encode("utf-32-le", "surrogatepass"), np.uint32).copy()
            points[np.frombuffer(marks, np.uint8) == 0] = specials.foreign
            text = points.tobytes().decode("utf-32-le", "surrogatepass")
        return list(specials.spans(text))

    def encode_spans(self, text: str, spans: Iterable[tuple[int, int, int]]) -> list[int]:
        """Encode ``text`` with ascending, disjoint ``(start, end, id)`` replaced by ids, the rest plain."""
        _check_text(text)
        ids: list[int] = []
        at = 0
        for start, end, token in spans:
            ids += self._encode_plain(text[at:start])
            ids.append(token)
            at = end
        ids += self._encode_plain(text[at:])
        return ids

    def token_bytes(self, token: int, *, specials: bool = False) -> bytes:
        """Return the bytes that ``token`` adds to the text, those of a control token only with ``specials``.

        ``ANSWER_TAGS`` are text in any case. Unused tokens and padding rows have no bytes. An id outside the output
        matrix is refused.
        """
        if not 0 <= token < self.n_vocab_rows:
            raise InvalidArgument(f"token id {token} is not below the {self.n_vocab_rows} vocabulary rows")
        if token >= self.n_vocab:
            return b""
        kind = self.types[token]
        if kind == NORMAL:
            return b"".join([_CHAR_TO_BYTE.get(c) or c.encode("utf-8", "replace") for c in self.tokens[token]])
        text = self.tokens[token]
        is_read = kind == USER_DEFINED or (kind == CONTROL and text in ANSWER_TAGS)
        if is_read or (specials and kind in (UNKNOWN, CONTROL)):
            return text.encode("utf-8", "replace")
        return b""

    def decode(self, ids: Iterable[int], *, specials: bool = False) -> str:
        """Return the text of ``ids``; bytes that are not UTF-8 become U+FFFD."""
        return b"".join(self.token_bytes(i, specials=specials) for i in ids).decode("utf-8", "replace")

    @cached_property
    def _specials(self) -> _Specials | None:
        kinds = (CONTROL, USER_DEFINED)
        pairs = enumerate(zip(self.tokens, self.types, strict=True))
        ids = {text: i for i, (text, kind) in pairs if kind in kinds and text}
        return _Specials(ids) if ids else None

    @cached_property
    def _backend(self) -> _Backend:
        # Special tokens stay outside, or a rule that skips the merges would find them whole in user text.
        spelled = {part for left, right in self.merges for part in (left, right, left + right)}
        pairs = enumerate(zip(self.tokens, self.types, strict=True))
        vocab = {t: i for i, (t, kind) in pairs if kind == NORMAL or t in spelled}
        backend = _Backend(models.BPE(vocab, list(self.merges), ignore_merges=self.rule.ignore_merges))
        cuts = [pre_tokenizers.Split(Regex(pattern), "isolated") for pattern in self.rule.patterns]
        to_bytes = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
        backend.pre_tokenizer = pre_tokenizers.Sequence([*cuts, to_bytes])
        return backend

    @cached_property
    def _missing_bytes(self) -> re.Pattern[bytes] | None:
        missing = [byte for byte, char in _BYTE_TO_CHAR.items() if not self._is_plain(char)]
        return re.compile(b"[" + b"".join(re.escape(bytes([b])) for b in missing) + b"]") if missing else None

    def _is_plain(self, text: str) -> bool:
        token = self._ids.get(text)
        return token is not None and self.types[token] == NORMAL

    def _encode_plain(self, text: str) -> list[int]:
        if not text:
            return []
        if self._missing_bytes is not None and (hit := self._missing_bytes.search(text.encode())):
            # Merging would drop the byte without a word.
            raise InvalidArgument(f"the text has byte 0x{hit.group()[0]:02x}, which no token can spell")
        encoding = self._backend.encode_batch_fast([text], add_special_tokens=False)[0]
        ids: list[int] = encoding.ids
        return ids


def _refuse_duplicates(tokens: Sequence[str], ids: Mapping[str, int]) -> None:
    if len(ids) == len(tokens):
        return
    for i, token in enumerate(tokens):
        if ids[token] != i:
            raise FormatError(f"token {token[:80]!r} stands at {i} and at {ids[token]}", key=_KEY + "tokens")


def _refuse_long_specials(tokens: Sequence[str], types: Sequence[int]) -> None:
    for i, (token, kind) in enumerate(zip(tokens, types, strict=True)):
        if kind in (CONTROL, USER_DEFINED) and len(token) > MAX_SPECIAL_CHARS:
            message = f"special token {i} has {len(token)} characters, at most {MAX_SPECIAL_CHARS} may be"
            raise FormatError(message, key=_KEY + "tokens")


def _check_text(text: str) -> None:
    if len(text) > MAX_TEXT_CHARS:
        raise InvalidArgument(f"the text has {len(text)} characters, at most {MAX_TEXT_CHARS} can be encoded")
    if len(text) > MAX_WHITESPACE_RUN:
        run = max((m.end() - m.start() for m in _WHITESPACE_RUN.finditer(text)), default=0)
        if run > MAX_WHITESPACE_RUN:
            message = f"the text has {run} white space characters in a row"
            raise InvalidArgument(f"{message}, at most {MAX_WHITESPACE_RUN} can be encoded")
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise InvalidArgument(f"the text has a lone surrogate at character {error.start}") from None
