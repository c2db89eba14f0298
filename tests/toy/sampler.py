"""verl's replay buffer, polled often enough for steps of a few seconds.

verl looks for finished responses every 2 s, which rounds the rollout time of a toy up to the next 2 s and hides what is
to be measured. Every arm of a comparison uses this class: `trainer.v1.sampler.custom_sampler.path=pkg://tests.toy.sampler`
and `.name=FastPollReplayBuffer`.
"""

from typing import Any

from verl.trainer.ppo.v1.replay_buffer import ReplayBuffer, ReplayBufferAsync


class FastPollReplayBuffer(ReplayBuffer):
    """`ReplayBuffer` with a poll every 0.2 s; sync trainer, no DAPO group filtering.

    verl builds a custom sampler without the settings of group filtering (trainer_base.py, `_build_replay_buffer`), so
    they keep `ReplayBuffer`'s defaults here: off.
    """

    def __init__(self, *args: Any, poll_interval: float = 0.2, **kwargs: Any) -> None:
        super().__init__(*args, poll_interval=poll_interval, **kwargs)


class FastPollReplayBufferAsync(ReplayBufferAsync):
    """The same for verl's asynchronous trainers."""

    def __init__(self, *args: Any, poll_interval: float = 0.2, **kwargs: Any) -> None:
        super().__init__(*args, poll_interval=poll_interval, **kwargs)
