"""Byte-level BPE of the demo hybrid, and token streams of text and tasks.

Units: tokens. Streams are uint16.
Source: Sennrich et al. 2016 (BPE); the ``qwen35`` pre-tokenizer as ``pykvstream.text.pretokenizers`` states it.
Holds: ``train_tokenizer``, ``encode_documents``, ``encode_tasks``.
"""

from __future__ import annotations

import multiprocessing
import random
from collections.abc import Sequence
from functools import partial
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

from tools.train_demo_hybrid.tasks import make_task

N_VOCAB = 6144
SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>", "<think>", "</think>", "<tool_call>", "</tool_call>",
           "<tool_response>", "</tool_response>")  # fmt: skip
END = 0
"""Id of ``<|endoftext|>``; the special tokens come first."""
PATTERN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
ANSWER_WEIGHT = 4


def train_tokenizer(documents: Sequence[str], path: Path) -> Tokenizer:
    """Train on a sample of the documents and write ``tokenizer.json``."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(PATTERN), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=N_VOCAB,
        special_tokens=list(SPECIAL),
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(documents, trainer)
    if tokenizer.get_vocab_size() != N_VOCAB:
        raise SystemExit(f"the corpus gives {tokenizer.get_vocab_size()} tokens, {N_VOCAB} are wanted")
    tokenizer.save(str(path))
    return tokenizer


def encode_documents(tokenizer: Tokenizer, documents: Sequence[str]) -> NDArray[np.uint16]:
    """One stream, an end token behind each document."""
    parts = []
    for begin in range(0, len(documents), 512):
        for encoding in tokenizer.encode_batch_fast(list(documents[begin : begin + 512]), add_special_tokens=False):
            parts.append(np.array([*encoding.ids, END], dtype=np.uint16))
    return np.concatenate(parts)


def _weights(offsets: Sequence[tuple[int, int]], spans: Sequence[tuple[int, int]]) -> NDArray[np.uint8]:
    """Weight of each token's loss: higher where it lies in an answer."""
    begins = np.array([begin for begin, _ in offsets])
    weights = np.ones(len(offsets), dtype=np.uint8)
    for begin, end in spans:
        first, last = np.searchsorted(begins, (begin, end))
        weights[first:last] = ANSWER_WEIGHT
    return weights


_fillers: list[str] = []
"""The text between facts, which worker processes inherit when they are forked: it is too long to send."""


def _task_rows(path: str, width: int, n_rows: int, seed: int) -> tuple[NDArray[np.uint16], NDArray[np.uint8]]:
    """Rows of ``width`` tokens filled with tasks; the last one of a row is cut from the left: it keeps its end."""
    filler = _fillers[0]
    tokenizer = Tokenizer.from_file(path)
    rng = random.Random(seed)
    tokens = np.zeros((n_rows, width), dtype=np.uint16)
    weights = np.zeros((n_rows, width), dtype=np.uint8)
    for row in range(n_rows):
        at = 0
        while at < width:
            room = width - at
            n_chars = int(room * 3.0 * (1.0 if room < 400 else rng.uniform(0.2, 1.0)))
            text, spans = make_task(rng, filler, n_chars)
            encoding = tokenizer.encode(text, add_special_tokens=False)
            ids = np.array([*encoding.ids, END], dtype=np.uint16)
            marks = np.append(_weights(encoding.offsets, spans), np.uint8(1))
            ids, marks = ids[-room:], marks[-room:]
            tokens[row, at : at + len(ids)] = ids
            weights[row, at : at + len(ids)] = marks
            at += len(ids)
    return tokens, weights


def encode_tasks(
    path: Path, filler: str, width: int, n_rows: int, seed: int, processes: int
) -> tuple[NDArray[np.uint16], NDArray[np.uint8]]:
    """``[n_rows, width]`` tokens and loss weights, made by several processes, the same for every number of them."""
    piece = 16
    seeds = [seed * 1_000_003 + i for i in range(-(-n_rows // piece))]
    _fillers[:] = [filler]
    with multiprocessing.get_context("fork").Pool(processes) as pool:
        parts = pool.map(partial(_task_rows, str(path), width, piece), seeds, chunksize=1)
    tokens = np.concatenate([part[0] for part in parts])[:n_rows]
    weights = np.concatenate([part[1] for part in parts])[:n_rows]
    return tokens, weights
