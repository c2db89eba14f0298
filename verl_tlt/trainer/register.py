"""Makes the TLT trainers known to verl under `tlt_<mode>`; the plugin calls it once verl's own are registered."""

from __future__ import annotations

MODES = ("sync",)


def register_trainers() -> None:
    """Register `tlt_sync` with verl's trainer registry; harmless when called again."""
    from verl.trainer.ppo.v1.trainer_base import TRAINER_REGISTRY, register_trainer
    from verl.trainer.ppo.v1.trainer_sync import PPOTrainerSync

    if "tlt_sync" in TRAINER_REGISTRY:
        return
    from verl_tlt.trainer.mixin import TLTMixin

    @register_trainer("tlt_sync")
    class TLTTrainerSync(TLTMixin, PPOTrainerSync):
        """verl's synchronous trainer with TLT."""

        tlt_base_mode = "sync"
