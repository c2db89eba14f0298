"""The drafter in verl's checkpoints and at the end of a run, and the guard under which TLT does its part of a step."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cached_property
from pathlib import Path
from typing import Any

import ray

from verl_tlt.config import TLTConfig
from verl_tlt.drafter import files_digest
from verl_tlt.messages.training import DrafterProvenance
from verl_tlt.trainer.bootstrap import CHECKPOINT
from verl_tlt.trainer.fleet import Fleet
from verl_tlt.trainer.step_log import StepLog

logger = logging.getLogger(__name__)


class KeepsDrafter:
    """The part of `TLTMixin` that keeps the drafter on disk."""

    # What verl's `PPOTrainer` brings.
    config: Any
    global_steps: int
    # What `TLTMixin` sets.
    tlt: TLTConfig
    _tlt_acceptance: list[float]
    _tlt_errors: dict[str, int]
    _tlt_fleet: Fleet
    _tlt_log: StepLog
    _tlt_spot: bool
    _tlt_tokens: int
    _tlt_version: int

    def _save_checkpoint(self) -> None:
        # Written while the policy is, which takes longer. Killed before it is done, a resume takes the previous one.
        saving = None
        if self._tlt_spot:
            with self._tlt_guard("checkpoint"), self._tlt_log.overhead("save"):
                saving = self._tlt_save(
                    Path(self.config.trainer.default_local_dir) / f"global_step_{self.global_steps}" / CHECKPOINT
                )
        super()._save_checkpoint()  # type: ignore[misc]
        if saving is not None:
            with self._tlt_guard("checkpoint"), self._tlt_log.overhead("save"):
                ray.get(saving)

    def _tlt_save(self, directory: Path) -> Any:
        """The served drafter, its training state and where they come from, atomically; done when the reference is."""
        worker = next(iter(self._tlt_fleet.workers().values()))
        facts = DrafterProvenance(
            version=self._tlt_version,
            policy_step=self.global_steps,
            policy=self.config.actor_rollout_ref.model.path,
            data=str(self.config.data.train_files),
            data_sha256=self._tlt_data_digest,
            objective=self.tlt.drafter.objective,
            temperature=self.config.actor_rollout_ref.rollout.temperature,
            acceptance=self._tlt_acceptance,
            tokens_trained=self._tlt_tokens,
        )
        directory.parent.mkdir(parents=True, exist_ok=True)
        return worker.save.remote(str(directory.absolute()), facts)

    @cached_property
    def _tlt_data_digest(self) -> str | None:
        """Names the training data in the drafter's model card; None where it is not on this disk."""
        named = self.config.data.train_files
        files = [Path(str(f)) for f in ([named] if isinstance(named, str) else named)]
        return files_digest(files) if all(f.is_file() for f in files) else None

    def fit(self, agent_loop_manager: Any) -> None:
        """verl's training loop; the drafter is left behind as a directory that vLLM serves."""
        try:
            super().fit(agent_loop_manager)  # type: ignore[misc]
        finally:
            if self._tlt_spot:
                with self._tlt_guard("final drafter"):
                    ray.get(self._tlt_save(Path(str(self.tlt.drafter.save_dir))))

    @contextmanager
    def _tlt_guard(self, what: str) -> Iterator[None]:
        """A failure inside is logged (in full the first time), counted and contained."""
        try:
            yield
        except Exception as error:
            first = what not in self._tlt_errors
            self._tlt_errors[what] = self._tlt_errors.get(what, 0) + 1
            if first:
                logger.exception("TLT: %s failed; the run goes on without it", what)
            else:
                logger.error("TLT: %s failed again (%d times): %s", what, self._tlt_errors[what], error)
