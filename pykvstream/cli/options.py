"""What the user asked for, as typed options.

Holds: the options of each command, and ``build``, which makes them from parsed arguments and refuses with
``InvalidArgument`` what can be known to be wrong without the model.
"""

from __future__ import annotations

import argparse
import secrets
from collections.abc import Callable
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path

from pykvstream.cli.drafting import DraftingOptions, drafting_options
from pykvstream.errors import InvalidArgument
from pykvstream.sampling.params import SamplingParams
from pykvstream.text.wishes import UNLIMITED, Reasoning

PROGRAM = "pykvstream"
DEFAULT_CACHE_TYPE = "q8_0"
DEFAULT_UBATCH = 256
DEFAULT_DRY_BREAKERS = ("\n", ":", '"', "*")
RANDOM_SEED = -1
REASONING_MODES = {"auto": None, "on": True, "off": False}
_TEMPLATE_FLAGS: dict[str, object] = {
    "system": None,
    "chat_template_file": None,
    "chat_template_kwargs": {},
    "tools": None,
    "reasoning": "auto",
    "reasoning_preserve": None,
    "reasoning_budget": UNLIMITED,
    "reasoning_budget_message": None,
}
"""Flags that need the chat template, and what they are where they are left out."""
SAMPLING_FIELDS = {
    "temp": "temperature",
    "top_k": "top_k",
    "top_p": "top_p",
    "min_p": "min_p",
    "typical": "typical_p",
    "top_n_sigma": "top_n_sigma",
    "xtc_probability": "xtc_probability",
    "xtc_threshold": "xtc_threshold",
    "repeat_last_n": "penalty_last_n",
    "repeat_penalty": "repeat_penalty",
    "presence_penalty": "presence_penalty",
    "frequency_penalty": "frequency_penalty",
    "dry_multiplier": "dry_multiplier",
    "dry_base": "dry_base",
    "dry_allowed_length": "dry_allowed_length",
    "dry_penalty_last_n": "dry_last_n",
}
"""Flags of the sampling group and the fields of ``SamplingParams`` that they set."""


@dataclass(frozen=True, slots=True)
class ModelOptions:
    """Which model, and how it is opened; None is the model's or the engine's own choice."""

    model: str
    device: str
    ctx_size: int | None
    arena_mib: float | None
    cache_type_k: str
    cache_type_v: str
    ubatch_size: int
    threads: int
    kv_rotation: bool
    checkpoint_mib: float | None = None
    kernels: tuple[Path, ...] = ()
    gpu_layers: int | str = "all"
    cpu_arena_mib: float | None = None
    wait_limit_s: float | None = None


@dataclass(frozen=True, slots=True)
class GenerationOptions:
    """``dry_breakers`` are texts: only who holds the vocabulary can turn them into the token ids of ``params``.

    ``session_file``: a saved session to go on with, which has a seed of its own.
    """

    n_predict: int
    seed: int
    stop: tuple[str, ...]
    ignore_eos: bool
    params: SamplingParams
    dry_breakers: tuple[str, ...]
    session_file: Path | None
    drafting: DraftingOptions


@dataclass(frozen=True, slots=True)
class PromptOptions:
    """At most one of ``text`` and ``file`` is given; the file ``-`` is standard input.

    ``variables`` go to the template as they are; ``tools_file`` holds a JSON list of tools.
    """

    text: str | None
    file: str | None
    system: str | None
    raw: bool
    template_file: Path | None
    tools_file: Path | None
    reasoning: Reasoning
    variables: dict[str, object]


@dataclass(frozen=True, slots=True)
class OutputOptions:
    """``progress``: None where the terminal decides. ``trace_file``: where a timeline goes."""

    json: bool
    stats: bool
    progress: bool | None
    trace_file: Path | None


@dataclass(frozen=True, slots=True)
class GenerateOptions:
    """Behind the answer ``save_file`` takes the session, ``hidden_file`` the rows that feed the MTP head."""

    model: ModelOptions
    generation: GenerationOptions
    prompt: PromptOptions
    output: OutputOptions
    save_file: Path | None
    hidden_file: Path | None


@dataclass(frozen=True, slots=True)
class ChatOptions:
    model: ModelOptions
    generation: GenerationOptions
    prompt: PromptOptions
    output: OutputOptions


@dataclass(frozen=True, slots=True)
class InspectOptions:
    model: str
    json: bool
    tensors: bool
    template: bool
    gpu_layers: int | str | None = None


@dataclass(frozen=True, slots=True)
class DevicesOptions:
    json: bool


@dataclass(frozen=True, slots=True)
class KernelsOptions:
    """``archs``: 90 for sm_90; without any, that of the device. ``output``: the pack to write, None to list alone.

    ``has_all``: the whole catalogue beside what ``models`` need.
    """

    models: tuple[ModelOptions, ...]
    archs: tuple[int, ...]
    has_all: bool
    output: Path | None
    json: bool
    progress: bool | None


@dataclass(frozen=True, slots=True)
class PlanOptions:
    model: ModelOptions
    contexts: tuple[int, ...]
    json: bool


@dataclass(frozen=True, slots=True)
class EvalOutputOptions:
    """``folder``: where state, table and result go. ``argv``: the command line that makes the figures again."""

    json: bool
    progress: bool | None
    folder: Path | None
    plot: bool
    argv: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class PerplexityOptions:
    model: ModelOptions
    text_file: str
    n_chunks: int | None
    output: EvalOutputOptions


@dataclass(frozen=True, slots=True)
class DivergenceOptions:
    model: str
    device: str
    ubatch_size: int
    threads: int
    text_file: str
    contexts: tuple[int, ...]
    percents: tuple[float, ...]
    cache_types: tuple[str, ...]
    references: tuple[str, ...]
    output: EvalOutputOptions


@dataclass(frozen=True, slots=True)
class NeedleOptions:
    model: str
    device: str
    ubatch_size: int
    threads: int
    cache_types: str
    text_file: str | None
    contexts: tuple[int, ...]
    depths: tuple[Fraction, ...]
    n_repeats: int
    percent: float
    only_nonresident: bool
    seed: int
    output: EvalOutputOptions


EvalOptions = PerplexityOptions | DivergenceOptions | NeedleOptions
Options = GenerateOptions | ChatOptions | InspectOptions | DevicesOptions | KernelsOptions | PlanOptions | EvalOptions


def build(args: argparse.Namespace) -> Options:
    """The options of the command that ``args`` names."""
    return _BUILDERS[args.command](args)


def _generate_options(args: argparse.Namespace) -> GenerateOptions:
    if args.prompt is None and args.prompt_file is None:
        raise InvalidArgument("no prompt: give --prompt TEXT or --prompt-file FILE (- for standard input)")
    for flag, value in _TEMPLATE_FLAGS.items():
        if args.raw and getattr(args, flag) != value:
            flag = f"--{flag.replace('_', '-')}"
            raise InvalidArgument(f"{flag} needs the chat template that --raw leaves out")
    _refuse_beside_session(args)
    output = OutputOptions(args.json, args.stats, args.progress, args.trace)
    return GenerateOptions(
        _model_options(args),
        _generation_options(args),
        _prompt_options(args, args.raw),
        output,
        args.save_session,
        args.embeddings_nextn,
    )


def _chat_options(args: argparse.Namespace) -> ChatOptions:
    _refuse_beside_session(args)
    output = OutputOptions(False, args.stats, args.progress, args.trace)
    return ChatOptions(_model_options(args), _generation_options(args), _prompt_options(args, False), output)


def _refuse_beside_session(args: argparse.Namespace) -> None:
    if args.session is not None and args.seed != RANDOM_SEED:
        raise InvalidArgument("--seed does not go with --session: the saved session has its own")
    if args.session is not None and args.system is not None:
        raise InvalidArgument("--system does not go with --session: the saved session has begun already")


def _inspect_options(args: argparse.Namespace) -> InspectOptions:
    if args.json and args.template:
        raise InvalidArgument("--template prints the template alone: it does not go with --json")
    return InspectOptions(_model_name(args), args.json, args.tensors, args.template, args.gpu_layers)


def _devices_options(args: argparse.Namespace) -> DevicesOptions:
    return DevicesOptions(args.json)


def _kernels_options(args: argparse.Namespace) -> KernelsOptions:
    is_pack = args.action == "pack"
    if is_pack and not args.models and not args.all:
        raise InvalidArgument("no model: give GGUF files, names, or --all")
    models = tuple(_opening(args, name) for name in args.models) if is_pack else (_model_options(args),)
    has_card = not args.arch
    if is_pack and has_card:
        raise InvalidArgument("no architecture: give --arch sm_90, or several as in sm_80,sm_90")
    return KernelsOptions(
        models, args.arch, is_pack and args.all, args.output if is_pack else None, args.json, args.progress
    )


def _plan_options(args: argparse.Namespace) -> PlanOptions:
    return PlanOptions(_model_options(args), args.contexts, args.json)


def _eval_options(args: argparse.Namespace) -> EvalOptions:
    if args.plot and args.output is None:
        raise InvalidArgument("--plot draws into a folder: give --output DIR")
    output = EvalOutputOptions(args.json, args.progress, args.output, args.plot, args.argv)
    if args.measure == "ppl":
        return PerplexityOptions(_model_options(args), args.text, args.chunks, output)
    shared = _model_name(args), args.device, args.ubatch_size, max(args.threads, 0)
    if args.measure == "kld":
        return DivergenceOptions(
            *shared, args.text, args.ctx, args.resident, args.cache_types, args.against, output
        )
    if args.only_nonresident and args.resident == 100:
        raise InvalidArgument("--only-nonresident needs a --resident share below 100: else every page is resident")
    return NeedleOptions(
        *shared,
        cache_types=f"{args.cache_type_k}/{args.cache_type_v}",
        text_file=args.text,
        contexts=args.ctx,
        depths=args.depths,
        n_repeats=args.repeat,
        percent=args.resident,
        only_nonresident=args.only_nonresident,
        seed=args.seed,
        output=output,
    )


_BUILDERS: dict[str, Callable[[argparse.Namespace], Options]] = {
    "generate": _generate_options,
    "chat": _chat_options,
    "inspect": _inspect_options,
    "devices": _devices_options,
    "kernels": _kernels_options,
    "plan": _plan_options,
    "eval": _eval_options,
}


def _model_name(args: argparse.Namespace) -> str:
    names = [name for name in (args.model, args.model_flag) if name is not None]
    if not names:
        raise InvalidArgument("no model: give a GGUF file or one of the names demo and demo-hybrid")
    if len(set(names)) > 1:
        raise InvalidArgument(f"two models: {names[0]} and {names[1]}")
    return str(names[0])


def _model_options(args: argparse.Namespace) -> ModelOptions:
    return _opening(args, _model_name(args))


def _opening(args: argparse.Namespace, model: str) -> ModelOptions:
    if args.batch_size is not None and args.batch_size < args.ubatch_size:
        raise InvalidArgument(f"--batch-size {args.batch_size} is below --ubatch-size {args.ubatch_size}")
    return ModelOptions(
        model=model,
        device=args.device,
        ctx_size=args.ctx_size or None,
        arena_mib=args.arena_mib,
        cache_type_k=args.cache_type_k,
        cache_type_v=args.cache_type_v,
        ubatch_size=args.ubatch_size,
        threads=max(args.threads, 0),
        kv_rotation=args.kv_rotation,
        checkpoint_mib=args.checkpoint_mib,
        kernels=tuple(args.kernels),
        gpu_layers=args.gpu_layers,
        cpu_arena_mib=args.cpu_arena_mib,
        wait_limit_s=args.wait_limit_s,
    )


def require_utf8(what: str, text: str) -> None:
    """Refuse text out of bytes that are none, as the system hands them on: Raises ``InvalidArgument`` with the byte."""
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        at = len(text[: error.start].encode("utf-8"))
        raise InvalidArgument(f"{what} is not UTF-8: byte {at}") from None


def _generation_options(args: argparse.Namespace) -> GenerationOptions:
    if "" in args.stop:
        raise InvalidArgument("--stop needs a text that is not empty")
    breakers = args.dry_sequence_breaker
    if breakers is not None and "" in breakers:
        raise InvalidArgument("--dry-sequence-breaker needs a text that is not empty; none switches them off")
    return GenerationOptions(
        n_predict=args.n_predict,
        seed=secrets.randbits(32) if args.seed == RANDOM_SEED else args.seed,
        stop=tuple(args.stop),
        ignore_eos=getattr(args, "ignore_eos", False),
        params=SamplingParams(
            **{field: getattr(args, flag) for flag, field in SAMPLING_FIELDS.items()}, logit_bias=dict(args.logit_bias)
        ),
        dry_breakers=DEFAULT_DRY_BREAKERS if breakers is None else tuple(text for text in breakers if text != "none"),
        session_file=args.session,
        drafting=drafting_options(args),
    )


def _prompt_options(args: argparse.Namespace, raw: bool) -> PromptOptions:
    if args.reasoning_budget_message is not None and args.reasoning_budget == UNLIMITED:
        raise InvalidArgument("--reasoning-budget-message needs --reasoning-budget N")
    if args.prompt_file == "":
        raise InvalidArgument("--prompt-file needs the name of a file; - is standard input")
    for flag, text in (("--prompt", args.prompt), ("--system", args.system)):
        if text is not None:
            require_utf8(flag, text)
    return PromptOptions(
        text=args.prompt,
        file=args.prompt_file,
        system=args.system,
        raw=raw,
        template_file=args.chat_template_file,
        tools_file=getattr(args, "tools", None),
        reasoning=Reasoning(
            enabled=REASONING_MODES[args.reasoning],
            preserve=args.reasoning_preserve,
            budget=args.reasoning_budget,
            message=args.reasoning_budget_message or "",
        ),
        variables=args.chat_template_kwargs,
    )
