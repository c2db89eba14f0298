"""Methods that verl-tlt adds to vLLM's worker: load a drafter into the running engine, skip its pass.

vLLM mixes `TLTWorkerExtension` into its worker, so each method can be called with `collective_rpc`, which runs between
two engine steps: a drafter is replaced without draining the engine. Draft KV computed before a swap is stale, so fewer
drafts are accepted at first; the output distribution is unchanged. A load does not raise: each rank returns what went
wrong.

The drafter that a worker serves is an EAGLE-3 head, or the policy's own MTP head: of both vLLM's `load_weights` takes
the names of a checkpoint.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Self

import torch
from verl.workers.rollout.vllm_rollout.utils import vLLMColocateWorkerExtension

from verl_tlt.drafter.checkpoint import staged_weights
from verl_tlt.drafter.tensor_file import not_finite, read_file, stacked
from verl_tlt.errors import DrafterError
from verl_tlt.vllm_worker import drafter_pass
from verl_tlt.vllm_worker.finite_logits import keep_logits_finite
from verl_tlt.vllm_worker.hybrid_states import keep_states_right

if TYPE_CHECKING:
    from vllm.config.vllm import VllmConfig
    from vllm.model_executor.models.llama_eagle3 import Eagle3LlamaForCausalLM
    from vllm.v1.worker.gpu_model_runner import GPUModelRunner

logger = logging.getLogger(__name__)

OFFSETS = "draft_id_to_target_id"  # vLLM's parameter for the file's `d2t`; full vocabularies have all zeros
_IGNORED = ("t2d",)  # the map from target to draft ids serves training only
_HEAD = "lm_head.weight"
_AS_LOADED = ("CPU", "TRITON", "BATCHED_TRITON")
"""Kernels of experts that keep weights as they are loaded; the others reorder them once (`oracle/unquantized.py`)."""


class LiveDrafter:
    """The drafter of one worker (V1 or V2 model runner), and the policy that it shares modules with.

    vLLM's sleep level 2 (verl's default) discards all weights, and before 0.28 the drafter's buffers too: its rotary
    table comes back as garbage, and no file holds it. So its buffers are kept on the host. Those that are its own are
    written back with every load, and those that it shares with the policy must be what they were.
    """

    def __init__(self, runner: GPUModelRunner, vllm_config: VllmConfig) -> None:
        self.model: Eagle3LlamaForCausalLM = find_drafter(runner)
        unwrap_embedding(self.model)
        self._policy = runner.get_model()
        self._config = vllm_config
        self._shards: int = vllm_config.parallel_config.tensor_parallel_size
        self._kept_buffers = {name: buffer.to("cpu", copy=True) for name, buffer in self._buffers().items()}
        self._own_buffers = tuple(own_buffers(self.model, self._policy))
        self._finite: tuple[int, ...] | None = None
        """Version of the last file whose numbers were all finite."""

    def shared_modules(self) -> tuple[str, ...]:
        """Which of embedding and head are the policy's own (vLLM `_maybe_share_embeddings`, `_maybe_share_lm_head`)."""
        policys = {id(p) for p in self._policy.parameters()}
        parts = {name for name, p in self.model.named_parameters() if id(p) in policys}
        return tuple(part for part in ("embed_tokens", "lm_head") if any(part in name for name in parts))

    def load(self, file: Path | None) -> None:
        """Write a file's weights into the drafter.

        `file`: safetensors in speculators' or vLLM's names, or in the policy's for its MTP head, beside its
        config.json; None: what the server of this node staged. The policy's own tensors are never written. Under a
        pruned vocabulary the head is cut from the policy that is live here, and the file's rows are not read.

        A `DrafterError` where the file does not fit, or could not be written, here or on another rank of the engine: a
        drafter that was not written whole must not draft before it is loaded again.
        """
        from vllm.distributed.parallel_state import get_tensor_model_parallel_rank

        rank = get_tensor_model_parallel_rank() if self._shards > 1 else 0
        with self._together("refuses the drafter's file"):
            file = file or staged_weights()
            tensors = self._read_checked(file, rank)
            self._restore_buffers()
        with self._together("could not write the drafter"):
            self._copy(tensors)
            rows = self._policys_rows() if _takes_policys_rows(tensors) else None
        if rows is not None:
            self._write_head(rows)

    def _read_checked(self, file: Path, rank: int) -> dict[str, torch.Tensor]:
        """Read the file, and check that it fits; `DrafterError` or whatever reading it raises."""
        version = _version(file)
        tensors = _read(file, self.shared_modules())
        self._check(tensors, file)
        if version != self._finite:
            device = next(self.model.parameters()).device  # it is quicker there
            checked_here = dict(sorted(tensors.items())[rank :: self._shards])  # each rank checks its share
            if name := not_finite(checked_here, device):
                raise DrafterError(f"{file}: {name} holds numbers that are not finite.")
            self._finite = version
        return tensors

    @contextmanager
    def _together(self, failure: str) -> Iterator[None]:
        """Make a part of a load fail on all ranks if it fails on one: the others would wait for that rank later."""
        try:
            yield
        except Exception:
            self._all_succeed(False)
            raise
        if not self._all_succeed(True):
            raise DrafterError(f"Another rank of this engine {failure}.")

    def _all_succeed(self, here: bool) -> bool:
        """Whether every rank of this engine succeeded; each one calls it, and waits for the others."""
        if self._shards == 1:
            return here
        from vllm.distributed.communication_op import tensor_model_parallel_all_reduce

        device = next(self.model.parameters()).device
        return not tensor_model_parallel_all_reduce(torch.full((1,), float(not here), device=device)).any()

    def _buffers(self) -> dict[str, torch.Tensor]:
        """The drafter's buffers by name, persistent or not, the policy's among them."""
        return {name: buffer.detach() for name, buffer in self.model.named_buffers() if buffer.numel()}

    def _restore_buffers(self) -> None:
        """Write back the drafter's own buffers; `DrafterError` where one of the policy's is not what it was."""
        live = self._buffers()
        for name, kept in self._kept_buffers.items():
            if name in self._own_buffers:
                live[name].copy_(kept)  # in place: captured graphs still see them
            elif not _same_bits(live[name], kept):
                changed = f"The policy's buffer {name}, which the drafter shares, changed while the engine slept"
                raise DrafterError(f"{changed}, so the policy itself may be wrong. Run verl-tlt doctor --gpu.")

    def _own_parameters(self) -> dict[str, torch.Tensor]:
        """The parameters that are not the policy's, the head without the rows that vLLM pads it with."""
        shared = self.shared_modules()
        own = {n: p for n, p in self.model.named_parameters() if not any(part in n for part in shared)}
        if _HEAD in own:
            own[_HEAD] = own[_HEAD][: self.model.lm_head.shard_indices.num_org_elements]
        return own

    def _check(self, tensors: Mapping[str, torch.Tensor], file: Path) -> None:
        """Compare the file with the live drafter before anything is overwritten; `DrafterError` where it does not fit.

        With tensor parallelism shapes are not compared: a rank's parameter is a part of the file's tensor.
        """
        elsewhere = (OFFSETS, _HEAD) if _takes_policys_rows(tensors) else (OFFSETS,)
        live = {stacked(name): p for name, p in self._own_parameters().items() if name not in elsewhere}
        self._check_replaceable(live)
        if "d2t" in tensors:
            self._check_draft_vocabulary(tensors["d2t"], file)
        rows: dict[str, int] = {}
        columns: dict[str, tuple[int, ...]] = {}
        for name, tensor in tensors.items():
            if name != "d2t":
                whole = stacked(name)
                rows[whole] = rows.get(whole, 0) + tensor.shape[0]
                columns[whole] = tuple(tensor.shape[1:])
        if missing := sorted(live.keys() - rows.keys()):
            raise DrafterError(f"{file} lacks {missing[0]}, which the served drafter has.")
        if unknown := sorted(rows.keys() - live.keys()):
            raise DrafterError(f"{file} holds {unknown[0]}, which the served drafter does not have.")
        if self._shards > 1:
            return
        for name, parameter in live.items():
            shape = (rows[name], *columns[name])
            served = tuple(parameter.shape)
            has_vocabulary_rows = "lm_head" in name or "embed_tokens" in name
            first = 1 if has_vocabulary_rows else 0  # vLLM pads such rows, and its loader checks their number
            if shape[first:] != served[first:]:
                raise DrafterError(f"{file}: {name} is {list(shape)}, the served drafter's is {list(served)}.")

    def _check_replaceable(self, live: Mapping[str, torch.Tensor]) -> None:
        """Raise a `DrafterError` where vLLM keeps the live weights in another form than a file has them."""
        for name, parameter in live.items():
            if parameter.numel() == 0:
                raise DrafterError(
                    f"The live drafter's {name} was repacked by vLLM's CPU backend; start it with VERL_PLATFORM=cpu."
                )
        kernel = experts_kernel(self.model)
        if kernel is not None and kernel not in _AS_LOADED:
            raise DrafterError(
                f"vLLM's {kernel} kernel reorders the head's experts once they are loaded, so no others can follow; "
                "set ++actor_rollout_ref.rollout.engine_kwargs.vllm.moe_backend=triton."
            )

    def _check_draft_vocabulary(self, d2t: torch.Tensor, file: Path) -> None:
        """Raise a `DrafterError` unless `d2t`, [DV], has as many tokens as are served, all of them the policy's."""
        offsets = dict(self.model.named_parameters()).get(OFFSETS)
        if offsets is None or len(offsets) != len(d2t):
            served = "all tokens of the policy" if offsets is None else f"{len(offsets)} tokens"
            raise DrafterError(f"{file} can draft {len(d2t)} tokens, and the served drafter {served}.")
        tokens = torch.arange(len(d2t)) + d2t  # [DV]
        if tokens.min() < 0 or tokens.max() >= self.model.config.vocab_size:
            raise DrafterError(f"{file}: d2t names a token outside the policy's vocabulary.")

    def _copy(self, tensors: Mapping[str, torch.Tensor]) -> None:
        from vllm.config import set_current_vllm_config

        with torch.no_grad(), set_current_vllm_config(self._config):
            offsets = dict(self.model.named_parameters()).get(OFFSETS)
            if offsets is not None and "d2t" not in tensors:
                offsets.zero_()  # sleep level 2 leaves garbage here, and the file has nothing to put in its place
            self.model.load_weights(iter(tensors.items()))

    def _policys_rows(self) -> torch.Tensor:
        """Rows of the policy's present head that a pruned draft vocabulary keeps, [DV, H]; other ranks' are zeros."""
        offsets = dict(self.model.named_parameters())[OFFSETS]  # [DV]
        ids = torch.arange(len(offsets), device=offsets.device) + offsets
        whole = self._policy
        policy = whole.get_language_model() if hasattr(whole, "get_language_model") else whole
        head = getattr(policy.lm_head, "base_layer", policy.lm_head)  # the former under a LoRA wrapper
        first, last = head.shard_indices.org_vocab_start_index, head.shard_indices.org_vocab_end_index
        on_rank = (ids >= first) & (ids < last)  # [DV]
        rows = head.weight.new_zeros(len(ids), head.weight.shape[1])  # [DV, H]
        rows[on_rank] = head.weight[ids[on_rank] - first]
        return rows

    def _write_head(self, rows: torch.Tensor) -> None:
        """Write `_policys_rows` into the drafter's head; ranks sum what they have, and each takes its part."""
        if self._shards > 1:
            from vllm.distributed.communication_op import tensor_model_parallel_all_reduce

            rows = tensor_model_parallel_all_reduce(rows)
        head = self.model.lm_head
        head.weight_loader(head.weight, rows.to(head.weight.dtype))


def find_drafter(runner: GPUModelRunner) -> Eagle3LlamaForCausalLM | None:
    """The drafter's module, out of its CUDA-graph wrapper; None: n-grams draft."""
    holder = getattr(runner, "drafter", None) or getattr(runner, "speculator", None)
    drafter = getattr(holder, "model", None)
    while drafter is not None and not isinstance(drafter, torch.nn.Module) and hasattr(drafter, "unwrap"):
        drafter = drafter.unwrap()
    return drafter


def experts_kernel(drafter: torch.nn.Module) -> str | None:
    """Which of vLLM's kernels computes a drafter's experts; None: it has none."""
    for module in drafter.modules():
        method = getattr(module, "quant_method", None)
        kernel = getattr(method, "unquantized_backend", None)
        if kernel is not None:
            return kernel.name
    return None


# Changes vllm: patches/README.md#a-drafter-reads-the-policys-embedding-without-its-lora
def unwrap_embedding(drafter: Eagle3LlamaForCausalLM) -> None:
    """Give the drafter the policy's embedding without vLLM's LoRA wrapper.

    Call it before vLLM compiles the drafter: a module that is replaced later is not the one that was compiled.
    """
    embedding = drafter.model.embed_tokens
    drafter.model.embed_tokens = getattr(embedding, "base_layer", embedding)


def own_buffers(drafter: Eagle3LlamaForCausalLM, policy: torch.nn.Module) -> dict[str, torch.Tensor]:
    """The drafter's buffers by name, without those of the policy (vLLM builds one rotary table for equal settings)."""
    policys = {buffer.data_ptr() for buffer in policy.buffers()}
    return {name: b.detach() for name, b in drafter.named_buffers() if b.numel() and b.data_ptr() not in policys}


def _version(file: Path) -> tuple[int, ...] | None:
    """Inode, time and size, which change when a file is staged again; None: there is no file."""
    if not file.is_file():
        return None
    stat = file.stat()
    return stat.st_ino, stat.st_mtime_ns, stat.st_size


def _same_bits(live: torch.Tensor, kept: torch.Tensor) -> bool:
    """Whether all bytes are the same: NaN differs from itself."""
    live, kept = (tensor.detach().cpu().reshape(-1).view(torch.uint8) for tensor in (live, kept))
    return torch.equal(live, kept)


def _has_own_head(directory: Path) -> bool:
    config = directory / "config.json"
    return config.is_file() and bool(json.loads(config.read_text()).get("own_head"))


def _read(file: Path, shared: tuple[str, ...]) -> dict[str, torch.Tensor]:
    """The file's tensors, without those that would be written into the policy; `DrafterError` for a broken file."""
    tensors = read_file(file)
    cut = (_HEAD,) if "d2t" in tensors and not _has_own_head(file.parent) else ()
    left_out = (*_IGNORED, *shared, *cut)
    return {name: tensor for name, tensor in tensors.items() if not any(part in name for part in left_out)}


def _takes_policys_rows(tensors: Mapping[str, torch.Tensor]) -> bool:
    """Whether a file has a pruned draft vocabulary and no head: the head's rows are then the policy's."""
    return "d2t" in tensors and _HEAD not in tensors


class TLTWorkerExtension(vLLMColocateWorkerExtension):
    """verl's extension with three methods of ours. vLLM refuses name clashes with its worker, hence the prefix."""

    tlt_drafter: LiveDrafter | None = None
    tlt_pass: drafter_pass.ContainedPass | None = None
    """The drafter's pass where it is contained."""

    # Changes vllm: patches/README.md#a-vllm-worker-is-prepared-between-model-load-and-graph-capture
    def __new__(cls, **kwargs: object) -> Self:
        """As verl's; the model runner is prepared as soon as the models are loaded."""
        worker = super().__new__(cls, **kwargs)
        load_model = worker.load_model

        def load(*args: object, **options: object) -> None:
            load_model(*args, **options)
            worker.tlt_prepare(kwargs["vllm_config"])

        worker.load_model = load
        return worker

    def tlt_prepare(self, vllm_config: VllmConfig) -> None:
        """Change what speculation needs in the model runner; an exception here keeps the engine from starting."""
        keep_states_right(self.model_runner, vllm_config)
        drafter = find_drafter(self.model_runner)
        if drafter is not None:
            self.tlt_drafter = LiveDrafter(self.model_runner, vllm_config)
            keep_logits_finite(drafter)
            if not hasattr(self.model_runner, "speculator"):
                drafter_pass.count_positions(self.model_runner.drafter, vllm_config)
            self.tlt_pass = drafter_pass.contain(self.model_runner, vllm_config)

    def tlt_load_drafter(self, path: str | None = None) -> str | None:
        """Load a file into the live drafter; None: what this server staged.

        Returns why it was not loaded (the drafter is as it was, unless vLLM itself failed half way); None: it was.
        """
        assert self.tlt_drafter is not None
        try:
            if failure := self._tlt_failure():
                raise DrafterError(failure)
            self.tlt_drafter.load(Path(path) if path else None)
        except Exception as error:
            logger.error("The drafter %s was not loaded.", path or "of this node", exc_info=error)
            return str(error) if isinstance(error, DrafterError) else f"{type(error).__name__}: {error}"
        return None

    def tlt_set_drafting(self, enabled: bool) -> str | None:
        """Run the drafter's pass, or skip it; returns why it cannot run any more, None: it can."""
        drafter_pass.set_drafting(self.model_runner, enabled)
        return self._tlt_failure() if enabled else None

    def _tlt_failure(self) -> str | None:
        """Why this engine does not draft for the rest of the run; None: it does."""
        if self.tlt_pass is None or not self.tlt_pass.failure:
            return None
        return f"This engine does not draft for the rest of the run, because {self.tlt_pass.failure}."
