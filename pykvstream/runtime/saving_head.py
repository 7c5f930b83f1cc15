"""What the MTP head knows of a conversation, in a section of the saved file: true rows, and hidden rows to go on from.

Layout, little endian: eight numbers (``_HEAD``), hidden rows, the hidden row before the kept state, whole page records.
The section is empty for a model that was opened without its head. Whoever has one and finds none, begins where the
conversation goes on: drafts alone depend on it.
Holds: ``head_section``, ``load_head``.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator

import numpy as np

from pykvstream.core.kv import PAGE_TOKENS
from pykvstream.runtime.context import Context
from pykvstream.runtime.head import hidden_bound
from pykvstream.runtime.layout import pages_of
from pykvstream.runtime.session_file import SectionReader
from pykvstream.runtime.target import Target

NAME = "head"
_HEAD = struct.Struct("<8Q")


def head_section(target: Target, context: Context, kept: int) -> Iterator[memoryview | bytes]:
    """The section in pieces; the caller holds ``turn``. ``kept``: the position of the state that is saved too."""
    head, known = target.head, context.head
    if head is None or known is None:
        return
    head.recover()
    head.pager.publish_wait()
    first = max(known.hidden.first, known.end - 1)
    rows = known.hidden.between(first, max(known.hidden.end, first))
    kept_row = known.kept_row(kept)
    record_bytes = head.blueprint.record_bytes
    n_kept = 0 if kept_row is None else 1
    yield _HEAD.pack(head.blueprint.n_embd, record_bytes, known.base, known.n_true, first, len(rows), kept, n_kept)
    yield rows.tobytes()
    if kept_row is not None:
        yield kept_row.tobytes()
    for page in range(pages_of(known.n_true)):
        yield known.seq.read_page(0, page).data


def load_head(file: SectionReader, target: Target, context: Context, n_cached: int) -> None:
    """Bring it back into a context whose history has been read. Raises ``FormatError``."""
    known, config = context.head, target.blueprint.config
    n_embd, record_bytes, bound = config.n_embd, target.records[0].record_bytes, hidden_bound(config.n_embd)
    row_bytes = 4 * n_embd
    most = 0 if config.hybrid is None else _HEAD.size + (bound + 1) * row_bytes + pages_of(n_cached) * record_bytes
    if file.size(NAME) > most or 0 < file.size(NAME) < _HEAD.size:
        raise file.refusal(NAME, f"{file.size(NAME)} bytes, need 0 or {_HEAD.size} to {most}")
    data = file.read(NAME)
    if known is None or len(data) == 0:
        return
    stated = _HEAD.unpack_from(data[: _HEAD.size].tobytes())
    if stated[:2] != (n_embd, record_bytes):
        raise file.refusal(NAME, f"rows of {stated[0]} values and records of {stated[1]} bytes, of another head")
    base, n_true, first, n_rows, kept, n_kept = stated[2:]
    n_pages = pages_of(n_true) if n_true <= n_cached else 0
    is_placed = base + n_true <= n_cached and first + n_rows in (n_cached, first) and n_rows <= bound and n_kept <= 1
    size = _HEAD.size + (n_rows + n_kept) * row_bytes + n_pages * record_bytes
    if not is_placed or kept > n_cached or file.size(NAME) != size:
        raise file.refusal(NAME, f"{n_true} rows from {base} and {n_rows} from {first} behind {n_cached} tokens")
    rows = data[_HEAD.size : _HEAD.size + (n_rows + n_kept) * row_bytes].view(np.float32).reshape(-1, n_embd)
    known.base, known.n_true = base, n_true
    if n_rows:
        known.hidden.append(first, rows[:n_rows])
    if n_kept:
        known.keep_row(kept, rows[n_rows:])
    if n_true:
        known.seq.append(n_true)
        known.seq.commit(n_true)
    pages = data[size - n_pages * record_bytes :].reshape(n_pages, record_bytes)
    for page in range(n_pages):
        known.seq.write_page(0, page, pages[page], min(n_true - page * PAGE_TOKENS, PAGE_TOKENS))
