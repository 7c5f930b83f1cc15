"""What is saved of a conversation, and how it comes back: on the same model, in whatever arena.

Sections: ``setting`` says of what model and cache the history is and how long it is; ``tokens``, pending ones too, as
uint32; ``messages``, as JSON; ``state``, the image of the
recurrent state, empty without one; ``kept``, the newest earlier one, from which a chunk that a prompt has begun is
taken as a whole; ``pages``, whole records, page by page and in each the layers in order; ``head``, what the MTP head
knows. Rows behind the last token are zeros, whatever stood there.
Holds: ``Saved``, ``save_context``, ``load_context``. Nothing that exists is touched by a file that is refused.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import reduce

import numpy as np
from numpy.typing import NDArray

from pykvstream.core.kv import PAGE_TOKENS, Bytes, KvLayer, Seq, Side, pack_rows, unpack_rows
from pykvstream.core.state import cut_image, join_images
from pykvstream.errors import Busy, FormatError, InvalidArgument
from pykvstream.gguf import GgmlType, GgufFile
from pykvstream.runtime.context import Context
from pykvstream.runtime.layout import pages_of, require_int
from pykvstream.runtime.saving_head import NAME as HEAD_SECTION
from pykvstream.runtime.saving_head import head_section, load_head
from pykvstream.runtime.session_file import SectionReader, write_sections
from pykvstream.runtime.target import Target
from pykvstream.text.transcript import Transcript

_LARGEST_SETTING = 1 << 20
_LARGEST_MESSAGES = 1 << 25
_LARGEST_STATE_HEAD = 1 << 20
_SAMPLE_BYTES = 256
_U64_MAX = (1 << 64) - 1


@dataclass(frozen=True, slots=True)
class Saved:
    """A conversation without its history. ``seed`` and ``tokens`` are all that a sampler remembers.

    ``n_forks``: forks that were made, which decide the seed of the next. ``ran``: the phase in which each token was
    run; those that are no longer in the cache are run again like that. ``chosen``: 1 for those that were chosen.
    """

    ctx_tokens: int
    tokens: tuple[int, ...]
    seed: int
    n_forks: int
    transcript: Transcript
    ran: bytes = b""
    chosen: bytes = b""


def weights_digest(file: GgufFile) -> str:
    """A digest of the tensor table and of the first, middle and last bytes of every tensor."""
    file.require_whole()
    digest = hashlib.blake2b(digest_size=16)
    for name, info in sorted(file.tensors.items()):
        digest.update(f"{name}\0{info.type.name}\0{info.shape}\0".encode())
        data = file.tensor_data(name)
        middle = max(len(data) // 2 - _SAMPLE_BYTES // 2, 0)
        for part in (data[:_SAMPLE_BYTES], data[middle : middle + _SAMPLE_BYTES], data[-_SAMPLE_BYTES:]):
            digest.update(part.data)
    return digest.hexdigest()


def _identity(target: Target) -> dict[str, object]:
    """What must be the same for a history to mean the same, by names that a refusal can give."""
    blueprint = target.blueprint
    model = asdict(blueprint.config)
    del model["name"], model["n_ctx_train"]  # the same weights under another name read the same history
    caches = [
        {**asdict(layer), "flags": int(layer.flags), "record": record.version, "record_bytes": record.record_bytes}
        for layer, record in zip(target.layers, target.records, strict=True)
    ]
    own = {**model, "page_tokens": PAGE_TOKENS, "caches": caches, "weights": weights_digest(blueprint.file)}
    plain: dict[str, object] = json.loads(json.dumps(own))
    return plain


def save_context(path: str | os.PathLike[str], target: Target, context: Context, saved: Saved) -> None:
    """Write a conversation whose history is ``context``; the caller holds ``turn``.

    Raises ``DeviceError`` or ``InvalidArgument``; then a file of that name is as it was.
    """
    if not 0 <= saved.seed <= _U64_MAX:
        raise InvalidArgument(f"seed must be in 0 .. 2**64 - 1, got {saved.seed}")
    target.publish_wait()
    n_cached = context.n_tokens
    kept = target.newest_kept(context, n_cached) or 0
    setting = {
        "model": _identity(target),
        "ctx_tokens": saved.ctx_tokens,
        "n_tokens": len(saved.tokens),
        "n_cached": n_cached,
        "seed": saved.seed,
        "n_forks": saved.n_forks,
        "ran": _stretches(saved.ran),
        "chosen": _stretches(saved.chosen),
        "kept": kept,
    }
    write_sections(
        path,
        {
            "setting": [json.dumps(setting).encode()],
            "tokens": [np.array(saved.tokens, "<u4").tobytes()],
            "messages": [_messages_json(saved.transcript)],
            "state": _joined(_images(context)) if n_cached else [],
            "kept": _joined(target.kept_images(context, kept)) if kept else [],
            "pages": _records([part.seq for part in context.parts], n_cached),
            HEAD_SECTION: head_section(target, context, kept),
        },
        target.before_file,
    )


def _stretches(bits: bytes) -> list[int]:
    """How many zeros, then ones, then zeros and so on: tokens that were run as a prompt, or as an answer."""
    lengths = [0]
    for bit in bits:
        if bit != (len(lengths) - 1) % 2:
            lengths.append(0)
        lengths[-1] += 1
    return lengths


def _read_stretches(
    file: SectionReader, setting: Mapping[str, object], name: str, n_least: int, n_most: int
) -> bytes:
    lengths = setting.get(name)
    if not isinstance(lengths, list) or not all(type(n) is int and 0 <= n <= n_most for n in lengths):
        raise file.refusal("setting", f"{name} is {lengths!r:.40}, no list of numbers of tokens")
    if not n_least <= sum(lengths) <= n_most:
        raise file.refusal("setting", f"{name} has {sum(lengths)} tokens, not {n_least} to {n_most}")
    return b"".join(bytes([i % 2]) * n for i, n in enumerate(lengths))


def _messages_json(transcript: Transcript) -> bytes:
    try:
        data = json.dumps(transcript.dump(), default=_plain).encode()
    except (TypeError, ValueError, RecursionError) as error:
        raise InvalidArgument(f"the messages of this conversation cannot be saved as JSON: {error}") from None
    if len(data) > _LARGEST_MESSAGES:
        raise InvalidArgument(f"the messages of this conversation are {len(data)} bytes, at most {_LARGEST_MESSAGES}")
    return data


def _plain(value: object) -> object:
    """Templates take every mapping and sequence as what JSON knows."""
    if isinstance(value, Mapping):
        return dict(value)
    if isinstance(value, Sequence) and not isinstance(value, bytes | bytearray):
        return list(value)
    raise TypeError(f"{type(value).__name__} among them")


def _images(context: Context) -> list[NDArray[np.uint8]]:
    """Of the recurrent state in each part. Where the parts have folded other tokens, as after a failure between them,
    all are folded: that changes no bit."""
    states = [part.state for part in context.parts if part.state is not None]
    if len({state.info.folded_tokens for state in states}) > 1:
        for state in states:
            state.fold()
    return [state.save() for state in states]


def _joined(images: Sequence[NDArray[np.uint8]]) -> list[memoryview]:
    """One image of all layers, wherever the model was cut: files do not tell of that."""
    return [reduce(join_images, images).data] if images else []


def _records(seqs: Sequence[Seq], n_tokens: int) -> Iterator[memoryview]:
    layers = [(seq, i, layer) for seq in seqs for i, layer in enumerate(seq.cache.layers)]
    for page in range(pages_of(n_tokens)):
        n_rows = min(n_tokens - page * PAGE_TOKENS, PAGE_TOKENS)
        for seq, i, layer in layers:
            published = seq.page(i, page).published_rows
            if published < n_rows:
                raise Busy(f"page {page} of layer {i}: {published} of {n_rows} rows are in the history")
            record = seq.read_page(i, page)
            if n_rows < PAGE_TOKENS:
                _clear_rows(layer, record, n_rows)
            yield record.data


def _clear_rows(layer: KvLayer, record: Bytes, first_row: int) -> None:
    """Forget what a failed pass or a truncation has left behind the last token."""
    n_rows = PAGE_TOKENS - first_row
    for head in range(layer.n_kv_heads):
        for side in Side:
            blocks = unpack_rows(layer, record, head, side, first_row, n_rows)
            pack_rows(layer, record, head, side, first_row, np.zeros_like(blocks))


def load_context(
    path: str | os.PathLike[str], target: Target, ctx_tokens: int | None
) -> tuple[Saved, Context]:
    """Read a conversation into a new context of ``ctx_tokens``, by default as it had; the caller holds ``turn``.

    Raises ``FormatError`` for a file that is damaged or of another model or cache, ``InvalidArgument`` where the
    conversation or its context is longer than asked for or planned, ``NoSpace`` for a state whose log is too short.
    """
    with SectionReader(path, target.before_file) as file:
        saved, n_cached, kept = _read_saved(file, target, ctx_tokens)
        context = target.context(saved.ctx_tokens)
        try:
            _load_history(file, target, context, n_cached, kept)
        except BaseException:
            target.release(context)
            raise
        return saved, context


def _read_saved(file: SectionReader, target: Target, wanted: int | None) -> tuple[Saved, int, int]:
    """Everything but the history, the tokens that it has, and those of the kept state; all sizes are right then.

    A file can claim any length without being as long on disk: nothing is read that the model has no use for.
    """
    setting = _read_object(file, "setting", _LARGEST_SETTING)
    _check_identity(file, setting.get("model"), _identity(target))
    ctx_tokens = _int_of(file, setting, "ctx_tokens", 1, (1 << 32) - 1)
    n_tokens = _int_of(file, setting, "n_tokens", 0, ctx_tokens)
    n_cached = _int_of(file, setting, "n_cached", 0, n_tokens)
    seed = _int_of(file, setting, "seed", 0, _U64_MAX)
    n_forks = _int_of(file, setting, "n_forks", 0, _U64_MAX - 1)
    ran = _read_stretches(file, setting, "ran", n_cached, n_tokens)
    chosen = _read_stretches(file, setting, "chosen", len(ran), len(ran))
    kept = _int_of(file, setting, "kept", 0, n_cached if target.is_recurrent else 0)
    size = ctx_tokens if wanted is None else wanted
    require_int("ctx_size", size)
    if n_tokens > min(size, target.plan.ctx_tokens):
        raise InvalidArgument(f"the saved conversation has {n_tokens} tokens, the context {size}")
    file.require_size("tokens", 4 * n_tokens)
    file.require_size("pages", pages_of(n_cached) * sum(record.record_bytes for record in target.records))
    _check_state(file, target, "state", n_cached)
    _check_state(file, target, "kept", kept)
    tokens: NDArray[np.uint32] = file.read("tokens").view("<u4")
    is_bad = tokens >= target.n_vocab_rows
    if is_bad.any():
        at = int(is_bad.argmax())
        raise file.refusal("tokens", f"token {tokens[at]} of a vocabulary of {target.n_vocab_rows}", 4 * at)
    transcript = Transcript.of(_read_object(file, "messages", _LARGEST_MESSAGES))
    if transcript is None:
        raise file.refusal("messages", "neither a list of messages nor none")
    return Saved(size, tuple(tokens.tolist()), seed, n_forks, transcript, ran, chosen), n_cached, kept


def _check_state(file: SectionReader, target: Target, name: str, n_tokens: int) -> None:
    """Whether a section is about as long as the image of a state, or empty where there is none."""
    most = target.state_bytes + _LARGEST_STATE_HEAD if target.is_recurrent and n_tokens else 0
    if (most > 0) != (file.size(name) > 0) or file.size(name) > most:
        raise file.refusal(name, f"{file.size(name)} bytes behind {n_tokens} tokens, at most {most}")


def _read_object(file: SectionReader, name: str, largest: int) -> dict[str, object]:
    if file.size(name) > largest:
        raise file.refusal(name, f"{file.size(name)} bytes, at most {largest}")
    try:
        value = json.loads(file.read(name).tobytes())
    except FormatError:
        raise
    except (ValueError, RecursionError):
        value = None
    if not isinstance(value, dict):
        raise file.refusal(name, "no JSON object")
    return value


def _check_identity(file: SectionReader, found: object, own: Mapping[str, object]) -> None:
    if not isinstance(found, dict):
        raise file.refusal("setting", "it does not say what model it is of")
    types, own_types = _cache_types(found.get("caches")), _cache_types(own["caches"])
    if types is not None and types != own_types:
        raise file.refusal("setting", f"saved with {types}; this model was opened with {own_types}")
    for key in (*own, *found):
        if key not in found or key not in own or found[key] != own[key]:
            raise file.refusal(
                "setting",
                f"saved with another model or cache: {key} is {found.get(key)!r:.200}, here {own.get(key)!r:.200}",
            )


def _cache_types(caches: object) -> str | None:
    """Types of keys and values in words, where all layers have the same; None for what cannot be told."""
    if not isinstance(caches, list) or not all(isinstance(layer, dict) for layer in caches):
        return None
    pairs = {(repr(layer.get("type_k")), repr(layer.get("type_v"))) for layer in caches}
    known = {repr(kind.id): kind.name.lower() for kind in GgmlType}
    if len(pairs) != 1:
        return None
    key, value = pairs.pop()
    return f"K {known[key]}, V {known[value]}" if key in known and value in known else None


def _int_of(file: SectionReader, setting: Mapping[str, object], key: str, least: int, most: int) -> int:
    value = setting.get(key)
    if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= most:
        raise file.refusal("setting", f"{key} is {value!r:.40}, not from {least} to {most}")
    return value


def _load_history(file: SectionReader, target: Target, context: Context, n_cached: int, kept: int) -> None:
    if _load_state(file, "kept", context, kept):
        target.keep(context)
    if n_cached:
        for part in context.parts:
            part.seq.append(n_cached)
            part.seq.commit(n_cached)
    sizes = [record.record_bytes for record in target.records]
    n_pages = pages_of(n_cached)
    layers = [(part.seq, i) for part in context.parts for i in range(len(part.seq.cache.layers))]
    slots = ((page, *layer) for page in range(n_pages) for layer in layers)
    # The generator of pieces comes first, so that it is asked once more at the end, where it checks the digest.
    for record, (page, seq, i) in zip(file.chunks("pages", sizes * n_pages), slots, strict=True):
        seq.write_page(i, page, record, min(n_cached - page * PAGE_TOKENS, PAGE_TOKENS))
    if _load_state(file, "state", context, n_cached):
        for part in context.parts:
            if part.state is not None:
                part.state.attach(part.seq)
    load_head(file, target, context, n_cached)


def _load_state(file: SectionReader, name: str, context: Context, n_tokens: int) -> bool:
    """Put an image in place of the states, which belong to no sequence then. Whether there was one."""
    image = file.read(name)
    states = [part.state for part in context.parts if part.state is not None]
    if not states or len(image) == 0:
        return False
    first = 0
    for state in states:
        n_layers = len(state.layers)
        try:
            # A state with all the layers takes the whole image, and refuses one with more.
            state.load(image if len(states) == 1 else cut_image(image, first, n_layers))
        except (FormatError, InvalidArgument) as error:
            raise file.refusal(name, str(error)) from None
        if state.info.position != n_tokens:
            raise file.refusal(name, f"it is behind {state.info.position} tokens, not {n_tokens}")
        first += n_layers
    return True
