"""The worker's side of a drafter that changes while its engine lives: load it in place, prove it, switch it off.

vLLM mixes this class into its worker, so every method can be called with `collective_rpc`, which runs between two
engine steps: a swap needs no drained engine. Draft KV computed before a swap goes stale, which costs acceptance,
never a token. Methods return a verdict instead of raising: an exception in a worker would end the engine.
"""

from __future__ import annotations

import json
import logging
import os
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from verl.workers.rollout.vllm_rollout.utils import vLLMColocateWorkerExtension

from verl_tlt.drafter import names
from verl_tlt.drafter.digest import Sums, combined, fingerprint, own_shards, partial_sums
from verl_tlt.drafter.staging import staged_weights
from verl_tlt.errors import TLTError
from verl_tlt.messages.rollout import DraftingReply, LoadReply
from verl_tlt.vllm_worker import v2_runner
from verl_tlt.vllm_worker.broken_drafts import BrokenDrafts
from verl_tlt.vllm_worker.cuda_graphs import full_graph_arms
from verl_tlt.vllm_worker.drafter_buffers import DrafterBuffers
from verl_tlt.vllm_worker.ngram_verification import NoProposals, verify_as_certain

logger = logging.getLogger(__name__)

OFFSETS = "draft_id_to_target_id"  # vLLM's parameter for the file's `d2t`; full vocabularies have all zeros
_IGNORED = ("t2d",)  # the map from target to draft ids serves training only


class TLTWorkerExtension(vLLMColocateWorkerExtension):
    """verl's extension with three methods of ours. vLLM refuses name clashes with its worker, hence the prefix."""

    tlt_buffers: DrafterBuffers
    tlt_broken: BrokenDrafts | None = None
    tlt_full_graphs: tuple[int, ...] | None = None

    def __new__(cls, **kwargs: Any) -> Any:
        """As verl's; what some settings need in the model runner is put there as soon as the models are loaded."""
        worker = super().__new__(cls, **kwargs)
        config = kwargs["vllm_config"]
        tlt = (config.additional_config or {}).get("tlt", {})
        speculation = tlt.get("speculation", {})
        load_model = worker.load_model

        def load(*args: Any, **kwargs: Any) -> Any:
            result = load_model(*args, **kwargs)
            drafter, target = _models(worker.model_runner)
            if drafter is not None:
                worker.tlt_buffers = DrafterBuffers(drafter, target)
            if speculation.get("source") == "both":
                verify_as_certain(worker.model_runner)
            if drafter is not None and hasattr(worker.model_runner, "_get_spec_decode_draft_probs"):
                worker.tlt_broken = BrokenDrafts(worker.model_runner, partial(worker.tlt_set_drafting, False))
            if "arms" in tlt:
                worker.tlt_full_graphs = full_graph_arms(worker.model_runner, config, tlt)
            return result

        worker.load_model = load
        return worker

    def tlt_load_drafter(self, path: str | None = None) -> dict[str, Any]:
        """Load a drafter's weights into the live one, in place; the policy's own tensors are never written.

        Args:
            path: a safetensors file in speculators' or vLLM's names, beside its config.json; None: what the server of
                this worker's node staged. Embedding and head in it are skipped where the drafter shares the policy's
                modules; under a pruned vocabulary its head is cut anew from the policy that is live here, which may be
                newer than the file.

        Returns:
            a `LoadReply` as a dict.
        """
        start = time.perf_counter()
        try:
            drafter, target = _models(self.model_runner)
            if drafter is None:  # a pipeline stage without the drafter
                return asdict(LoadReply(ok=True))
            _without_lora(drafter)
            shared = _shared_modules(drafter, target)
            file = staged_weights() if path is None else Path(path)
            tensors = _read(file, shared)
            shards = self.vllm_config.parallel_config.tensor_parallel_size
            _check(tensors, drafter, shared, shards, file)
            self.tlt_buffers.restore(drafter)
            self._tlt_copy(drafter, tensors)
            if "d2t" in tensors and not _has_own_head(file):
                _follow_head(drafter, target, shards)
            if self.tlt_broken is not None:
                self.tlt_broken.clear_cache(self.model_runner.drafter)
            sums = self._tlt_sums(_own_parameters(drafter, shared), tensors)
        except Exception as error:
            logger.error("The drafter %s was not loaded.", path or "of this node", exc_info=error)
            text = str(error) if isinstance(error, DrafterRefused) else f"{type(error).__name__}: {error}"
            return asdict(LoadReply(ok=False, error=text))
        seconds = time.perf_counter() - start
        loaded = LoadReply(ok=True, fingerprint=combined([sums]), sums=sums, seconds=seconds, shared=tuple(shared))
        return asdict(replace(loaded, full_graphs=self.tlt_full_graphs))

    def tlt_fingerprint(self) -> str:
        """Fingerprint of the drafter that is live here (this rank's shard); empty without one.

        That of its weights alone while its buffers are what they were at the start; else it names a damaged one.
        """
        drafter, target = _models(self.model_runner)
        if drafter is None:
            return ""
        weights = fingerprint(_own_parameters(drafter, _shared_modules(drafter, target)))
        damaged = self.tlt_buffers.damaged(drafter)
        return f"{weights} without {damaged[0]}" if damaged else weights

    def _tlt_sums(self, live: Mapping[str, torch.Tensor], file: Mapping[str, torch.Tensor]) -> Sums:
        from vllm.distributed.parallel_state import get_tensor_model_parallel_rank

        size = self.vllm_config.parallel_config.tensor_parallel_size
        return partial_sums(own_shards(live, file, get_tensor_model_parallel_rank() if size > 1 else 0, size))

    def tlt_set_drafting(self, enabled: bool) -> dict[str, Any]:
        """Whether the drafter's own pass runs in steps that draft nothing.

        vLLM keeps the drafter's KV cache in step with the policy even at K=0, which costs a drafter pass. Disabled, a
        step with K=0 costs what it costs without a drafter, and the KV cache has a hole. So switch only an engine
        without requests, and reset its prefix cache before it drafts again.

        Returns:
            a `DraftingReply` as a dict.
        """
        if hasattr(self.model_runner, "speculator"):
            refusal = v2_runner.set_drafting(self.model_runner, enabled)
            return asdict(DraftingReply(ok=refusal is None, error=refusal))
        proposer = getattr(self.model_runner, "drafter", None)
        if proposer is None or isinstance(proposer, NoProposals):
            return asdict(DraftingReply(ok=True))
        if not hasattr(proposer, "tlt_drafting"):
            proposer.propose = _skippable(proposer, proposer.propose)
            _skip_preparation(self.model_runner, proposer)
        proposer.tlt_drafting = enabled
        return asdict(DraftingReply(ok=True))

    def _tlt_copy(self, drafter: torch.nn.Module, tensors: dict[str, torch.Tensor]) -> None:
        from vllm.config import set_current_vllm_config

        with torch.no_grad(), set_current_vllm_config(self.vllm_config):
            offsets = dict(drafter.named_parameters()).get(OFFSETS)
            if offsets is not None and "d2t" not in tensors:
                offsets.zero_()  # sleep level 2 leaves garbage here, and the file has nothing to put in its place
            load: Any = drafter.load_weights
            load(iter(tensors.items()))


def _models(runner: Any) -> tuple[torch.nn.Module | None, torch.nn.Module]:
    """(drafter or None, policy), out of their CUDA-graph wrappers; V1 and V2 model runners."""
    holder = getattr(runner, "drafter", None) or getattr(runner, "speculator", None)
    drafter = getattr(holder, "model", None)
    while drafter is not None and not isinstance(drafter, torch.nn.Module) and hasattr(drafter, "unwrap"):
        drafter = drafter.unwrap()
    return drafter, runner.get_model()


class DrafterRefused(TLTError, ValueError):
    """The file does not fit the live drafter; the message names the file and the tensor."""


def _skippable(proposer: Any, propose: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """Wraps `SpecDecodeBaseProposer.propose`: nothing is done at K=0 while `proposer.tlt_drafting` is False."""

    def run(*args: Any, **kwargs: Any) -> torch.Tensor:
        draft_length = args[0] if args else kwargs["num_speculative_tokens"]
        if proposer.tlt_drafting or draft_length > 0:
            return propose(*args, **kwargs)
        return _nothing_drafted(proposer, kwargs["common_attn_metadata"].batch_size())

    return run


def _nothing_drafted(proposer: Any, batch: int) -> torch.Tensor:
    """What `SpecDecodeBaseProposer.propose` leaves and returns at K=0: no drafts, int64 [batch, 0]."""
    proposer._last_draft_probs = None  # else the sampler would pair old probabilities with no drafts
    proposer.num_speculative_tokens = 0
    return torch.empty(batch, 0, dtype=torch.int64, device=proposer.device)


def _skip_preparation(runner: Any, proposer: Any) -> None:
    """Leave out what the model runner does before it calls a proposer that will do nothing (`_skippable`).

    It finds every request's last token in a Python loop and joins the hidden states. With async scheduling the next
    step takes its tokens from there, so all of it stays.
    """
    if runner.use_async_scheduling:
        return
    propose_draft_token_ids = runner.propose_draft_token_ids

    def run(scheduler_output: Any, *args: Any, **kwargs: Any) -> Any:
        if proposer.tlt_drafting or scheduler_output.num_spec_tokens_to_schedule > 0:
            return propose_draft_token_ids(scheduler_output, *args, **kwargs)
        runner._draft_probs = runner._draft_prob_req_ids = None
        return _nothing_drafted(proposer, len(runner.input_batch.req_ids))

    runner.propose_draft_token_ids = run


def _without_lora(drafter: torch.nn.Module) -> None:
    """Let the drafter look up tokens in the policy's embedding itself, not in vLLM's LoRA wrapper around it.

    The wrapper's bookkeeping belongs to the policy's batch, and a draft step has another: the engine would die.
    """
    inner: Any = drafter.model
    inner.embed_tokens = getattr(inner.embed_tokens, "base_layer", inner.embed_tokens)


def _shared_modules(drafter: torch.nn.Module, target: torch.nn.Module) -> list[str]:
    """Which of embedding and head are the policy's own (vLLM `_maybe_share_embeddings`, `_maybe_share_lm_head`)."""
    theirs = {id(p) for p in target.parameters()}
    return [
        part
        for part in ("embed_tokens", "lm_head")
        if any(part in name and id(p) in theirs for name, p in drafter.named_parameters())
    ]


def _has_own_head(path: Path) -> bool:
    """Whether the drafter beside this config was trained with a head of its own, which is not the policy's."""
    config = path.with_name("config.json")
    return config.is_file() and bool(json.loads(config.read_text()).get("own_head"))


def _follow_head(drafter: torch.nn.Module, target: torch.nn.Module, shards: int) -> None:
    """Copy the rows of the policy's present head that a pruned draft vocabulary keeps.

    Under tensor parallelism each rank holds some rows of the policy's vocabulary and others of the drafter's: what a
    rank has is summed over all ranks, and each takes its part.
    """
    offsets = dict(drafter.named_parameters())[OFFSETS]  # [DV]
    ids = torch.arange(len(offsets), device=offsets.device) + offsets
    whole: Any = target
    policy = whole.get_language_model() if hasattr(whole, "get_language_model") else whole
    head = getattr(policy, "lm_head", None) or policy.model.embed_tokens  # the latter where they are tied
    first, last = head.shard_indices.org_vocab_start_index, head.shard_indices.org_vocab_end_index
    here = (ids >= first) & (ids < last)  # [DV]
    rows = head.weight.new_zeros(len(ids), head.weight.shape[1])  # [DV, H]
    rows[here] = head.weight[ids[here] - first]
    if shards > 1:
        from vllm.distributed.communication_op import tensor_model_parallel_all_reduce

        rows = tensor_model_parallel_all_reduce(rows)
    own: Any = drafter.lm_head
    own.weight_loader(own.weight, rows.to(own.weight.dtype))


def _own_parameters(drafter: torch.nn.Module, shared: list[str]) -> dict[str, torch.Tensor]:
    return {n: p for n, p in drafter.named_parameters() if not any(part in n for part in shared) and n != OFFSETS}


def _read(path: Path, shared: list[str]) -> dict[str, torch.Tensor]:
    """The file's tensors, without those that would be written into the policy.

    Raises:
        DrafterRefused: no such file, or no whole safetensors file.
    """
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    if not os.path.isfile(path):
        raise DrafterRefused(f"{path} does not exist.")
    try:
        tensors = load_file(path)
    except SafetensorError as error:
        raise DrafterRefused(f"{path} is no complete safetensors file: {error}") from error
    return {n: t for n, t in tensors.items() if n not in _IGNORED and not any(part in n for part in shared)}


def _check(
    tensors: Mapping[str, torch.Tensor], drafter: torch.nn.Module, shared: list[str], shards: int, path: Path
) -> None:
    """Compare names, and without tensor parallelism shapes, before anything is overwritten.

    Raises:
        DrafterRefused: a tensor is missing, unknown, of another shape, or not finite (its drafts would be token 0); or
            the live weights cannot be written at all.
    """
    live = _own_parameters(drafter, shared)
    if repacked := next((n for n, p in live.items() if p.numel() == 0), None):
        raise DrafterRefused(
            f"The live drafter's {repacked} was repacked by vLLM's CPU backend; start it with VERL_PLATFORM=cpu."
        )
    rows: dict[str, int] = {}
    columns: dict[str, tuple[int, ...]] = {}
    for name, tensor in tensors.items():
        if name == "d2t":
            continue
        name = names.live(name)
        rows[name] = rows.get(name, 0) + tensor.shape[0]
        columns[name] = tuple(tensor.shape[1:])
    broken = (n for n, t in tensors.items() if t.is_floating_point() and not torch.isfinite(t).all())
    if (found := next(broken, None)) is not None:
        raise DrafterRefused(f"{path}: {names.live(found)} holds numbers that are not finite.")
    if missing := sorted(live.keys() - rows.keys()):
        raise DrafterRefused(f"{path} lacks {missing[0]}, which the served drafter has.")
    if unknown := sorted(rows.keys() - live.keys()):
        raise DrafterRefused(f"{path} holds {unknown[0]}, which the served drafter does not have.")
    for name, parameter in live.items():
        shape = (rows[name], *columns[name])
        # Vocabulary rows are padded in vLLM, and its loader checks them.
        same = shape[1:] == parameter.shape[1:] if _by_vocabulary(name) else shape == parameter.shape
        if shards == 1 and not same:
            raise DrafterRefused(f"{path}: {name} is {list(shape)}, the served drafter's is {list(parameter.shape)}.")


def _by_vocabulary(name: str) -> bool:
    return "lm_head" in name or "embed_tokens" in name
