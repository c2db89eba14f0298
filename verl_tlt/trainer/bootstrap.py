"""The drafter a run starts with: resumed, given, or random; built once on the driver and handed to everybody.

Servers need it before the first weight sync, spot workers before the first session, and both must hold the same one.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from verl_tlt.config import TLTConfig
from verl_tlt.drafter.policy import LONGEST_DRAFT
from verl_tlt.messages.rollout import DrafterFile
from verl_tlt.trainer.checkpoints import saved_drafter


@dataclass(frozen=True)
class Start:
    """What a run starts with."""

    trainable: DrafterFile
    """float32, for spot workers."""
    served: DrafterFile
    """In the rollout's dtype, for engines."""
    aux_layers: tuple[int, ...]
    origin: str
    """One phrase for the log: where it came from."""
    tokens_trained: int = 0
    """By spot workers of this run before it was resumed."""


def first_drafter(config: TLTConfig, policy_dir: str, dtype: str, context: int, resume_from: Path | None) -> Start:
    """Build or load the drafter.

    Args:
        config: all settings.
        policy_dir: local Hugging Face directory of the policy.
        dtype: the rollout's dtype, e.g. "bfloat16".
        context: longest sequence of the rollout plus the longest draft, in tokens.
        resume_from: a `global_step_N` directory being resumed, if any.

    Raises:
        verl_tlt.drafter.DrafterError: the given drafter does not fit, or may be another user's; one sentence naming
            file and field.
    """
    from verl_tlt.drafter import (
        build_drafter,
        check_owner,
        load_drafter,
        policy_shape,
        provenance,
        to_drafter_file,
    )

    checkpoint = saved_drafter(resume_from)
    acceptance: tuple[float, ...] = ()
    version = tokens = 0
    if checkpoint is not None:
        model, origin = load_drafter(str(checkpoint), policy_dir, min_context=context), f"checkpoint {checkpoint}"
        facts = provenance(checkpoint)
        version, acceptance = int(facts.get("version", 0)), tuple(facts.get("acceptance", ()))
        tokens = int(facts.get("tokens_trained", 0))
    elif config.drafter.path:
        check_owner(config.drafter.path)
        model, origin = load_drafter(config.drafter.path, policy_dir, min_context=context), config.drafter.path
        acceptance = tuple(provenance(config.drafter.path).get("acceptance", ()))
    else:
        shape = policy_shape(policy_dir)
        model = build_drafter(
            shape,
            aux_layers=config.drafter.aux_layers,
            intermediate_size=config.drafter.intermediate_size,
            # The policy's own range, not this run's: a resumed run may be longer.
            max_position_embeddings=max(context, shape.max_position_embeddings + LONGEST_DRAFT),
            seed=config.drafter.seed,
        )
        origin = "a random head"
        # Known without measuring: nothing is accepted, so the engines need not find out.
        acceptance = (0.0,) * config.speculation.longest
    aux_layers = tuple(model.config.eagle_aux_hidden_state_layer_ids)

    def file(as_dtype: str) -> DrafterFile:
        text, weights, fingerprint = to_drafter_file(model, as_dtype)
        return DrafterFile(version, text, weights, fingerprint, acceptance)

    return Start(file("float32"), file(dtype), aux_layers, origin, tokens)
