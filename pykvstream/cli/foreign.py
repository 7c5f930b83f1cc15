"""Flags of llama.cpp and of its streaming forks that mean nothing here: refused by name, or ignored with a note.

Holds: ``FOREIGN``, the one table of them, and ``add_foreign``, which puts it into a parser. A flag whose value
asks for what happens anyway is ignored with a note; any other is refused with the reason, because a user who gives
a flag relies on it.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

NOTES = "notes"
"""Where a parsed namespace keeps the notes on ignored flags."""

_DRAFT_MODEL = "no second model drafts in this version; n-grams and MTP heads do (--spec-type), the text is the same"
_DRAFT_TYPES = "the MTP head keeps its keys and values in the types of the model (--cache-type-k, --cache-type-v)"
_FIRST_HIT = "this drafter drafts the first time that a key is met again"
_IMAGES = "images are not part of this version"
_ADAPTERS = "adapters are not part of this version"
_DEVICES = "one device beside the CPU, whole layers: --device NAME and --gpu-layers N"
_POSITIONS = "positions are computed as the file says; other ones change the text"
_HISTORY = "the whole history lives in host memory and --arena-mib bounds the rest"
_DROPS = "no token is ever dropped; an answer ends with context_full"
_CHAINS = "the order of the sampling chain is fixed; each filter has a flag to switch it off"
_GRAMMARS = "constrained output is not part of this version"
_FETCH = "no files are fetched; give a path, or the name demo or demo-hybrid"
_SAVING = "a conversation is saved with its cache: --save-session FILE, or /save-session in a chat, and --session FILE"
_SERVER = "there is no server in this version"
_LOADING = "weights are read from a mapping of the file, whole, once"
_PINNING = "the CPU backend pins no thread; use --threads"
_THINKING = "thinking is always told apart; --json has both, and the text as it came"
_USE_CHAT = "a conversation is the command `pykvstream chat`"
_PLAN = "nothing is fitted behind your back; `pykvstream plan` prints the smallest and the recommended arena"
_RESIDENCY = "which pages stay on the device follows from --arena-mib"


@dataclass(frozen=True, slots=True)
class Foreign:
    """``names``: the spellings. ``nargs``: 0 for a switch, None for a value, "?" for a value that may be missing.

    ``harmless``: values that ask for what happens anyway; "" is the flag without a value.
    """

    names: tuple[str, ...]
    reason: str
    nargs: int | str | None = None
    harmless: frozenset[str] = frozenset()

    def verdict(self, name: str, value: str) -> tuple[bool, str]:
        """Whether the flag may be ignored, and the sentence to print."""
        given = f"{name} {value}".strip()
        if value.lower() in self.harmless:
            return True, f"{given} is ignored: {self.reason}"
        return False, f"{given} is refused: {self.reason}"


def _switch(names: str, reason: str, *, harmless: bool = False) -> Foreign:
    return Foreign(tuple(names.split()), reason, 0, frozenset({""}) if harmless else frozenset())


def _value(names: str, reason: str, harmless: str = "") -> Foreign:
    return Foreign(tuple(names.split()), reason, None, frozenset(harmless.split()))


FOREIGN: tuple[Foreign, ...] = (
    _value("--parallel -np", "one conversation at a time; several sessions are in the Python interface", "1"),
    Foreign(
        ("--flash-attn", "-fa"),
        "attention always walks the pages of the history",
        "?",
        frozenset({"", "on", "auto", "1"}),
    ),
    Foreign(("--fit", "-fit"), _PLAN, "?", frozenset({"off", "0"})),
    _value("--fit-target -fitt", _PLAN),
    _value("--fit-ctx -fitc", _PLAN),
    _switch("--context-shift", _DROPS),
    _switch("--no-context-shift", _DROPS, harmless=True),
    _value("--keep", _DROPS, "0"),
    _switch("--swa-full", _DROPS),
    _value("--cache-reuse", _DROPS, "0"),
    _switch("--no-kv-offload -nkvo", _HISTORY),
    _switch("--kv-offload -kvo", _HISTORY, harmless=True),
    _switch("--kv-unified -kvu", "pages belong to a layer and a sequence; there is no common buffer"),
    _switch("--no-kv-unified -no-kvu", "pages belong to a layer and a sequence", harmless=True),
    _value("--defrag-thold -dt", "pages are of one size; there is nothing to defragment", "-1"),
    _switch("--mlock", _LOADING),
    _switch("--no-mmap", _LOADING),
    _switch("--mmap", _LOADING, harmless=True),
    _value("--load-mode", _LOADING, "none mmap"),
    _value("--numa", _PINNING),
    _value("--cpu-mask -C", _PINNING),
    _value("--cpu-range -Cr", _PINNING),
    _value("--prio", _PINNING, "0"),
    _value("--poll", _PINNING),
    _value("--threads-batch -tb", "prompts and answers share the threads of --threads"),
    _switch("--warmup", "there is nothing to warm up", harmless=True),
    _switch("--no-warmup", "there is nothing to warm up", harmless=True),
    _value("--split-mode -sm", _DEVICES, "none"),
    _value("--tensor-split -ts", _DEVICES),
    _value("--main-gpu -mg", _DEVICES, "0"),
    _value("--rpc", _DEVICES),
    _value("--override-tensor -ot", _DEVICES),
    _switch("--cpu-moe -cmoe", _DEVICES),
    _value("--n-cpu-moe -ncmoe", _DEVICES, "0"),
    _value("--override-kv", "metadata is what the file says"),
    _value("--mmproj -mm", _IMAGES),
    _value("--mmproj-url -mmu", _IMAGES),
    _value("--image", _IMAGES),
    _value("--lora", _ADAPTERS),
    _value("--lora-scaled", _ADAPTERS),
    _value("--control-vector", _ADAPTERS),
    _value("--rope-scaling", _POSITIONS),
    _value("--rope-scale", _POSITIONS),
    _value("--rope-freq-base", _POSITIONS),
    _value("--rope-freq-scale", _POSITIONS),
    _value("--yarn-orig-ctx", _POSITIONS),
    _value("--yarn-ext-factor", _POSITIONS),
    _value("--spec-draft-type-k -ctkd --cache-type-k-draft", _DRAFT_TYPES),
    _value("--spec-draft-type-v -ctvd --cache-type-v-draft", _DRAFT_TYPES),
    _value("--spec-ngram-simple-min-hits", _FIRST_HIT, "1"),
    _value("--spec-ngram-map-k-min-hits", _FIRST_HIT, "1"),
    _value("--model-draft -md", _DRAFT_MODEL),
    _value("--device-draft -devd", _DRAFT_MODEL),
    _value("--n-gpu-layers-draft --gpu-layers-draft -ngld", _DRAFT_MODEL),
    _value("--kv-stream-auxiliary-layers", _DRAFT_MODEL, "0"),
    _switch("--no-kv-stream-rs-rollback", "recurrent layers are not part of this version"),
    _switch("--kv-stream-spec-dynamic", _RESIDENCY),
    _value("--kv-stream-spec-keep-pages", _RESIDENCY),
    _switch("--kv-stream-mtp-dynamic", _RESIDENCY),
    _value("--kv-stream-mtp-eject-pages", _RESIDENCY),
    _value("--kv-stream-mtp-reenable-pages", _RESIDENCY),
    _value("--kv-stream-mtp-stable-decodes", _RESIDENCY),
    _value("--kv-stream-mtp-kv-pages", _RESIDENCY),
    _value("--mirostat", _CHAINS, "0"),
    _value("--mirostat-lr", _CHAINS),
    _value("--mirostat-ent", _CHAINS),
    _value("--dynatemp-range", _CHAINS, "0 0.0"),
    _value("--dynatemp-exp", _CHAINS),
    _value("--samplers", _CHAINS),
    _value("--sampling-seq --sampler-seq", _CHAINS),
    _value("--grammar", _GRAMMARS),
    _value("--grammar-file", _GRAMMARS),
    _value("--json-schema -j", _GRAMMARS),
    _switch("--escape -e", "prompts are taken as they stand; write \\n by the shell or use --prompt-file"),
    _switch("--no-escape", "prompts are taken as they stand", harmless=True),
    _value("--reverse-prompt -r", "use --stop"),
    _switch("--interactive -i", _USE_CHAT),
    _switch("--interactive-first -if", _USE_CHAT),
    _switch("--conversation -cnv", _USE_CHAT),
    _switch("--no-conversation -no-cnv", "use `pykvstream generate`; with --raw also without the chat template"),
    _switch("--single-turn -st", "use `pykvstream generate`"),
    _switch("--no-display-prompt", "prompts are never printed", harmless=True),
    _switch("--jinja", "chat templates are always rendered", harmless=True),
    _switch("--no-jinja", "chat templates are always rendered, --raw leaves them out"),
    _value("--chat-template", "use --chat-template-file, or the template inside the file"),
    _value("--reasoning-format", _THINKING, "auto deepseek"),
    _value("--hf-repo -hf -hfr", _FETCH),
    _value("--hf-file -hff", _FETCH),
    _value("--model-url -mu", _FETCH),
    _value("--prompt-cache", _SAVING),
    _switch("--prompt-cache-all", _SAVING),
    _value("--slot-save-path", _SAVING),
    _value("--host", _SERVER),
    _value("--port", _SERVER),
)


class _ForeignAction(argparse.Action):
    """Ends parsing with the reason, or leaves a note."""

    def __init__(self, option_strings: Sequence[str], dest: str, *, foreign: Foreign, **kwargs: Any) -> None:
        super().__init__(option_strings, dest, default=argparse.SUPPRESS, help=argparse.SUPPRESS, **kwargs)
        self._foreign = foreign

    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: str | Sequence[Any] | None,
        option_string: str | None = None,
    ) -> None:
        value = values if isinstance(values, str) else ""
        is_ignored, sentence = self._foreign.verdict(option_string or self.option_strings[0], value)
        if not is_ignored:
            parser.error(sentence)
        setattr(namespace, NOTES, [*getattr(namespace, NOTES, []), sentence])


def add_foreign(parser: argparse.ArgumentParser) -> None:
    """Teach a parser the whole table; none of it appears in ``--help``."""
    for foreign in FOREIGN:
        parser.add_argument(*foreign.names, dest=NOTES, nargs=foreign.nargs, action=_ForeignAction, foreign=foreign)
