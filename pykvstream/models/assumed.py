"""Keys that would change what a model computes, and the values at which they say what is computed here anyway.

The lists hold what files of other architectures state beside the keys that ``ModelConfig`` reads: a file of ours that
states them means it, and a reader that passed over them would compute another model. Not in the lists, and accepted
with any value, are

- information for people and tools: ``vocab_size``, ``context_length``, ``rope.scaling.original_context_length``,
  ``rope.scaling.finetuned``, ``tensor_data_layout``, ``pooling_type``, ``attention.layer_norm_epsilon``;
- what acts only beside a key that is refused: ``attention.sliding_window_pattern``, ``rope.freq_base_swa``,
  ``expert_group_scale``;
- what comes with tensors of its own, because those are refused: ``attention.q_lora_rank``, ``altup.*``;
- what nobody here has heard of. New files bring new information more often than new mathematics, new mathematics
  mostly brings tensors, and a file that runs everywhere else is not refused for a word.

Source: GGUF metadata keys ``<architecture>.*`` (spec/model.md 1.1).
Holds: ``refuse_other_mathematics``.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Final

import numpy as np

from pykvstream.errors import Unsupported
from pykvstream.gguf import GgufFile, MetaValue

_Values = tuple[float, ...]

# A factor of 0 is how the format writes that there is none.
_NO_FACTOR: Final[_Values] = (0.0, 1.0)
_NONE: Final[_Values] = (0.0,)

_EVERYWHERE: Final[Mapping[str, _Values]] = {
    "activation_sparsity_scale": _NONE,
    "attention.causal": (True,),
    "attention.clamp_kqv": _NONE,
    "attention.max_alibi_bias": _NONE,
    "attention.output_scale": _NO_FACTOR,
    "attention.shared_kv_layers": _NONE,
    "attention.sliding_window": _NONE,
    "attention.temperature_length": _NONE,
    "attention.temperature_scale": _NONE,
    "attn_logit_softcapping": _NONE,
    "embedding_scale": _NO_FACTOR,
    "final_logit_softcapping": _NONE,
    "logit_scale": _NO_FACTOR,
    "rescale_every_n_layers": _NONE,
    "residual_scale": _NO_FACTOR,
    "rope.scaling.alpha": _NO_FACTOR,
    "rope.scaling.attn_factor": (1.0,),
    # Beside a type other than YaRN, which alone is accepted: below 0, as the type says; and then these act no more.
    "rope.scaling.yarn_attn_factor": (-1.0, 1.0),
    "rope.scaling.yarn_beta_fast": (-1.0, 32.0),
    "rope.scaling.yarn_beta_slow": (-1.0, 1.0),
    "rope.scaling.yarn_ext_factor": (-1.0, 0.0),
    "rope.scaling.yarn_log_multiplier": _NONE,
    "ssm.dt_b_c_rms": (False,),
    "swiglu_clamp_exp": _NONE,
    "swiglu_clamp_shexp": _NONE,
    "use_parallel_residual": (False,),
}

# A dense model, whose ``expert_count`` is 0, may say of experts what it likes.
_OF_EXPERTS: Final[Mapping[str, _Values]] = {
    "expert_gating_func": (0, 1),  # not stated, softmax
    "expert_group_count": (0, 1),
    "expert_group_used_count": (0, 1),
    "expert_weights_norm": (True,),
    "interleave_moe_layer_step": (0, 1),
    "leading_dense_block_count": _NONE,
    "moe_every_n_layers": (0, 1),
    "moe_latent_size": _NONE,
    "router_logit_softcapping": _NONE,
}


def refuse_other_mathematics(file: GgufFile, arch: str, head_dim: int, *, has_experts: bool) -> None:
    """Raises ``Unsupported`` naming the key and what it would have to be. ``head_dim`` is that of the keys."""
    computed = {
        "attention.scale": (0.0, 1 / math.sqrt(head_dim)),
        **_EVERYWHERE,
        **(_OF_EXPERTS if has_experts else {}),
    }
    for name, accepted in computed.items():
        key = f"{arch}.{name}"
        if key in file.metadata and not _says(file.metadata[key], accepted):
            values = " or ".join(f"{value:.7g}" if type(value) is float else str(value) for value in accepted)
            raise Unsupported(f"{key} {_shown(file.metadata[key])} is not supported; supported: {values}")


def _says(value: MetaValue, accepted: _Values) -> bool:
    """Whether a number, or each of several, is one of ``accepted`` as far as a float32 can tell."""
    if isinstance(value, int | float):
        return any(math.isclose(value, one, rel_tol=1e-6) for one in accepted)
    return isinstance(value, np.ndarray) and all(_says(one, accepted) for one in value.tolist())


def _shown(value: MetaValue) -> str:
    if isinstance(value, np.ndarray):
        return f"{value[:8].tolist()}"
    return f"{value:.7g}" if type(value) is float else f"{value!r:.40}"
