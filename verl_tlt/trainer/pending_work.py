"""What verl's sampler may still send: pending groups, open agent loops, and refills of the batch."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING

from omegaconf import OmegaConf

from verl_tlt.idle.planner import PendingWork

if TYPE_CHECKING:
    from omegaconf import DictConfig
    from verl.trainer.ppo.v1.replay_buffer import ReplayBuffer

logger = logging.getLogger(__name__)


AskPending = Callable[[], PendingWork]


def takes_turns(config: DictConfig, dataset: Sequence[Mapping[str, object]]) -> bool:
    """Whether an agent loop may send another turn: verl's single-turn loop and its subclasses do not.

    Any other loop, also an unknown one, may.

    verl runs for each row of `dataset` the loop that its `agent_name` names, or else the default one.
    """
    from verl.experimental.agent_loop.agent_loop import _agent_loop_registry
    from verl.experimental.agent_loop.single_turn_agent_loop import SingleTurnAgentLoop
    from verl.experimental.agent_loop.utils import resolve_config_path
    from verl.utils.import_utils import load_class_from_fqn

    rollout = config.actor_rollout_ref.rollout
    path = rollout.agent.agent_loop_config_path
    names = [rollout.agent.default_agent_loop]
    try:
        if "agent_name" in dataset[0]:
            names = dataset.dataframe.unique("agent_name")  # type: ignore[attr-defined]  # verl's RLHFDataset
        known = dict(_agent_loop_registry)
        if path:
            known |= {loop.name: loop for loop in OmegaConf.load(resolve_config_path(path))}
        loops = [load_class_from_fqn(known[name]["_target_"]) for name in names]
        may_be_others = rollout.multi_turn.enable or rollout.agent.get("agent_loop_manager_class")
        if not may_be_others and all(issubclass(loop, SingleTurnAgentLoop) for loop in loops):
            return False
        logger.info("no replica leaves while agent loops run: they may send more turns")
    except Exception as error:
        logger.warning("no replica leaves while agent loops run: %s may send more turns: %r", names, error)
    return True


class BufferWatch:
    """The pending work, counted from verl's replay buffer (`verl/trainer/ppo/v1/replay_buffer.py`).

    The watch reads it from another thread than the one in which verl's buffer empties its sets, asks TransferQueue and
    fills them again. So the work is counted right after the buffer has done so, and the watch reads the last count.
    A sampler that is not derived from verl's cannot be counted, so no replica may leave. `wanted`: groups that one
    sampling takes.
    """

    # Changes verl: patches/README.md#tlt-sees-when-verl-may-request-more-samples
    def __init__(self, buffer: ReplayBuffer, *, multi_turn: bool, wanted: int) -> None:
        self._buffer = buffer
        self._multi_turn = multi_turn
        self._wanted = wanted
        try:
            look = buffer._sync_metadata_from_transfer_queue
            self._counted = self._count()
        except AttributeError:
            logger.warning("%s does not say what may still arrive, so no replica leaves early.", type(buffer).__name__)
            self._counted = PendingWork(more=True)
            return

        def look_and_count() -> None:
            look()
            self._counted = self._count()

        buffer._sync_metadata_from_transfer_queue = look_and_count

    def __call__(self) -> PendingWork:
        return self._counted

    def _count(self) -> PendingWork:
        """The groups that wait, and whether more requests may come: for groups that are replaced, or further turns."""
        buffer = self._buffer
        done = buffer.finished_keys["train"]
        filters = buffer.filter_groups_metric is not None
        if filters:  # DAPO: only after its look the buffer finds out which groups have a signal (None), and so count
            classified = buffer._dapo_classification_cache["train"]
            done = {uid for uid, shared in classified.items() if shared is None} & done
        replaces_groups = filters or buffer.sync_refill_failed_groups
        may_refill = replaces_groups and len(done) < self._wanted
        may_turn = self._multi_turn and bool(buffer.running_keys["train"])
        return PendingWork(len(buffer.pending_keys["train"]), may_refill or may_turn)
