"""Every change to verl or vLLM that verl-tlt makes at run time, and what would make it unnecessary.

`docs/generate.py` writes README.md from this list and from that of the CPU platform (cpu_changes.py). Subclasses that
verl and vLLM load by name (scheduler, worker extension, trainers) are no changes.
"""

from __future__ import annotations

from dataclasses import dataclass

CAUSES_IN = {"verl": "0.9.1", "vllm": "0.28.0", "megatron-core": "0.16.1"}
"""The releases whose line numbers the causes name."""


@dataclass(frozen=True)
class UpstreamChange:
    """One change to an upstream library while it runs."""

    name: str
    """What holds with the change."""
    changes: tuple[str, ...]
    """`module:symbol` of what is replaced."""
    symptom: str
    """What goes wrong without it."""
    cause: str
    """File, line and code of a release in `CAUSES_IN`, and why that is the cause."""
    applied_by: str
    """`module:function` or `module:Class.method` of the code that makes the change."""
    releases: str
    """Those it applies to."""
    removed_by: str
    """What upstream has to have so that the change can go; the code steps aside by itself where it says so."""
    upstream: str = "none found"
    """Issues and pull requests."""
    patch: str = ""
    """Upstream form of the change: a diff below patches/."""


OFFERED = {
    "verl/0007-weights-reach-the-v2-drafter.patch": "verl syncs the policy's weights into a drafter of vLLM's V1 model "
    "runner alone (`verl/workers/rollout/vllm_rollout/utils.py`, `_get_drafter_model`). V2, the default for every "
    "model from vLLM 0.29 on, calls it `speculator`: an MTP head then stays as it was loaded, and nothing says so. "
    "verl-tlt loads its drafters itself.",
}
"""Diffs of defects that verl-tlt met upstream and does without: the file below patches/, and what it is for."""

CHANGES = (
    UpstreamChange(
        name="a run with trainer.plugin=tlt is a TLT run or does not start",
        changes=("verl.utils.config:validate_config", "verl.trainer.ppo.v1.trainer_base:get_trainer_cls"),
        symptom="A run that depends on a plugin trains without it, silently, where the plugin cannot load.",
        cause='`verl/__init__.py:76` `debug("Failed to load plugin` hides the error, and verl has no key that '
        "asks for a plugin by name.",
        applied_by="verl_tlt.plugin:arm",
        releases="verl 0.9.1",
        removed_by="A verl with the patch: the plugin hooks nothing there.",
        upstream="https://github.com/verl-project/verl/pull/7102 (open) needs the same for one kind of plugin; "
        "https://github.com/verl-project/verl/issues/1354 is the discussion about extensions",
        patch="verl/0001-trainer-plugin-key.patch",
    ),
    UpstreamChange(
        name="TLT knows of samples that verl may still ask for",
        changes=("verl.trainer.ppo.v1.replay_buffer:ReplayBuffer._sync_metadata_from_transfer_queue",),
        symptom="A replica that has finished cannot be told from one that will get more requests of this rollout.",
        cause="`verl/trainer/ppo/v1/replay_buffer.py:201` `def _sync_metadata_from_transfer_queue` is where the "
        "buffer learns it; it tells nobody.",
        applied_by="verl_tlt.trainer.watch:BufferWatch.__init__",
        releases="verl 0.9.1",
        removed_by="A hook of the replay buffer, called after each look.",
    ),
    UpstreamChange(
        name="the drafter is in a checkpoint before verl names it as the one to resume from",
        changes=("verl.single_controller.ray.base:RayWorkerGroup",),
        symptom="A run that is killed while it saves would resume a policy without its drafter.",
        cause="`verl/trainer/ppo/v1/trainer_base.py:1024` `with open(local_latest_checkpointed_iteration` "
        "follows the policy's files directly: there is no hook between them.",
        applied_by="verl_tlt.trainer.checkpoints:followed",
        releases="verl 0.9.1",
        removed_by="A callback of verl's before the step's name is written.",
    ),
    UpstreamChange(
        name="hidden states are taken from the old-log-prob pass",
        changes=(
            "verl.workers.engine.fsdp.transformer_impl:FSDPEngine.forward_step",
            "verl.workers.engine.megatron.transformer_impl:MegatronEngine.forward_step",
        ),
        symptom="Forward hooks see packed rows without the sequences they belong to.",
        cause="`verl/workers/engine/fsdp/transformer_impl.py:1549` `def forward_step` is the one place that has "
        "a micro-batch and its forward pass together.",
        applied_by="verl_tlt.actor.adapters:FSDPAdapter.intercept",
        releases="verl 0.9.1",
        removed_by="A hook of the engine around a micro-batch.",
    ),
    UpstreamChange(
        name="what policy and drafter share is copied while weights are synced",
        changes=("verl.workers.engine.base:BaseEngine.get_per_tensor_param",),
        symptom="The drafter's embedding and head would need a second gathering of the policy's weights.",
        cause="`verl/workers/engine_workers.py:786` `per_tensor_param, peft_config = "
        "self.actor.engine.get_per_tensor_param` gathers them and hands them to the rollout alone.",
        applied_by="verl_tlt.actor.worker:TLTActorWorker.update_weights",
        releases="verl 0.9.1",
        removed_by="A hook of the weight sync that sees each tensor.",
    ),
    UpstreamChange(
        name="a vLLM worker is prepared between model load and graph capture",
        changes=("vllm.v1.worker.gpu_worker:Worker.load_model",),
        symptom="Graphs are captured before a worker extension's methods can be called.",
        cause="`vllm/v1/worker/gpu_worker.py:450` `def load_model` is followed by profiling and capture; an "
        "extension has no method that is called in between.",
        applied_by="verl_tlt.vllm_worker.extension:TLTWorkerExtension.__new__",
        releases="vllm 0.24 to 0.33",
        removed_by="A hook of worker extensions after model load.",
    ),
    UpstreamChange(
        name="FULL CUDA graphs for every draft length",
        changes=(
            "vllm.v1.cudagraph_dispatcher:CudagraphDispatcher.initialize_cudagraph_keys",
            "vllm.v1.worker.gpu_model_runner:GPUModelRunner._warmup_and_capture",
            "vllm.v1.worker.gpu_model_runner:GPUModelRunner._determine_batch_execution_and_padding",
        ),
        symptom="Steps of every draft length but the longest, 0 included, run on piecewise graphs, padded to 1 + "
        "K_max tokens. It costs most at the small batches where speculation matters. Not run on a GPU.",
        cause="`vllm/v1/cudagraph_dispatcher.py:221` `if x <= max_num_tokens and x >= uniform_decode_query_len` "
        "captures for 1 + num_speculative_tokens tokens a request alone.",
        applied_by="verl_tlt.vllm_worker.cuda_graphs:capture_every_arm",
        releases="vllm 0.24 to 0.33 with the V1 model runner, where its source is a known one; not with "
        "TLT_FULL_GRAPHS=0",
        removed_by="A vLLM that captures several query lengths (`cudagraph_decode_query_lens` in the patch).",
        upstream="https://github.com/vllm-project/vllm/issues/48494 is about the V2 runner; none about V1",
        patch="vllm/0003-full-graphs-for-several-draft-lengths.patch",
    ),
    UpstreamChange(
        name="no drafter pass in a rollout that is OFF",
        changes=(
            "vllm.v1.spec_decode.llm_base_proposer:SpecDecodeBaseProposer.propose",
            "vllm.v1.worker.gpu_model_runner:GPUModelRunner.propose_draft_token_ids",
        ),
        symptom="A step with K=0 costs more than one of an engine that has no drafter.",
        cause="`vllm/v1/spec_decode/llm_base_proposer.py:618` `if self.num_speculative_tokens == 0` comes after "
        "the drafter's own pass over the step's tokens, which keeps its KV cache complete.",
        applied_by="verl_tlt.vllm_worker.drafter_pass:set_drafting",
        releases="vllm 0.24 to 0.33; of the V2 model runner `execute_model` and its speculator's `propose`",
        removed_by="A switch of vLLM's that leaves the pass out until the prefix cache is reset.",
    ),
    UpstreamChange(
        name="no round trip to the workers after a step without drafts",
        changes=("vllm.v1.engine.core:EngineCore.post_step",),
        symptom="With synchronous scheduling the model waits after every step, also where K was 0: with a 30M "
        "policy on the CPU backend at batch 1 a step took 16.4 ms, and 14.6 ms without the call.",
        cause="`vllm/v1/engine/core.py:619` `if self.check_for_draft_tokens and not self.async_scheduling` does "
        "not ask whether drafts were asked for.",
        applied_by="verl_tlt.engine_core.scheduler:skip_empty_fetch",
        releases="every vLLM whose `post_step` calls `take_draft_token_ids`; others stay as they are",
        removed_by="A vLLM that looks at `scheduler.drafts_expected`: nothing is changed there.",
        upstream="none found; https://github.com/vllm-project/vllm/pull/36391 (open) changes the same condition "
        "for another purpose",
        patch="vllm/0005-no-call-for-empty-drafts.patch",
    ),
    UpstreamChange(
        name="a response ends at the token that completes a stop string",
        changes=("vllm.v1.engine.output_processor:OutputProcessor.process_outputs",),
        symptom="With `stop` and speculation, what a step brought behind the stop string stays in `token_ids` and "
        "log-probabilities, and RL trains on it; the text is right.",
        cause="`vllm/v1/engine/detokenizer.py:118` `for new_token_id in new_token_ids:` takes in the whole step before "
        "stop strings are looked for, and `output_processor.py:405` hands on all token ids beside the shortened text.",
        applied_by="verl_tlt.server.stop_strings:end_at_stop_strings",
        releases="vllm 0.24 to 0.31, in rollout servers with speculation",
        removed_by="vLLM 0.32, which cuts tokens itself in `OutputProcessor._trim_surplus_tokens`: nothing is changed "
        "there.",
        upstream="https://github.com/vllm-project/vllm/pull/47616 is about the same",
        patch="vllm/0007-stop-strings-end-token-ids.patch",
    ),
    UpstreamChange(
        name="a call that waits for an engine ends when the engine dies",
        changes=("vllm.v1.engine.core_client:MPClient",),
        symptom="A weight sync, or any other call into the engine core, waits forever if the core is killed meanwhile.",
        cause="`vllm/v1/engine/core_client.py:1136` `self.utility_results[call_id] = future` is a future that only the "
        "core's answer completes; when it died, later calls are refused and those that wait are not.",
        applied_by="verl_tlt.server.engine_calls:fail_calls_when_dead",
        releases="vllm 0.24 to 0.33, in rollout servers and in engines that commands start",
        removed_by="vLLM's pull request 56416: nothing waits there.",
        upstream="https://github.com/vllm-project/vllm/pull/56416 (open)",
    ),
    UpstreamChange(
        name="a rollout server can ask the scheduler",
        changes=("vllm.v1.engine.core:EngineCore",),
        symptom="Statistics, calibration and the choice of OFF need the scheduler, which runs in a child process.",
        cause="`vllm/v1/engine/core.py:1525` `(method := getattr(self, method_name))` calls the engine core by method "
        "name, and it has none that leads to a scheduler's own; `collective_rpc` reaches workers only.",
        applied_by="verl_tlt.engine_core.scheduler:TLTScheduler.__init__",
        releases="vllm 0.24 to 0.33",
        removed_by="A call of vLLM's into a scheduler given by `scheduler_cls`.",
    ),
    UpstreamChange(
        name="n-gram drafts are verified as certain",
        changes=(
            "vllm.v1.worker.gpu_model_runner:GPUModelRunner.execute_model",
            "vllm.v1.worker.gpu_model_runner:GPUModelRunner._get_spec_decode_draft_probs",
        ),
        symptom="With source=both an n-gram verified with the drafter's probability of another token would leave "
        "the policy's distribution.",
        cause="`vllm/v1/worker/gpu_model_runner.py:5115` `draft_probs_rows.append(self._draft_probs[row_idx, "
        ":num_draft])` gives every draft the drafter's probabilities, whoever drafted it.",
        applied_by="verl_tlt.vllm_worker.draft_probabilities:verify_as_certain",
        releases="vllm 0.24 to 0.33, with source=both",
        removed_by="Drafts that carry their own probabilities through vLLM's scheduler.",
    ),
    UpstreamChange(
        name="a broken drafter's drafts are rejected",
        changes=(
            "vllm.v1.worker.gpu_model_runner:GPUModelRunner._get_spec_decode_draft_probs",
            "vllm.v1.worker.gpu_model_runner:GPUModelRunner.sample_tokens",
            "vllm.v1.worker.gpu.model_runner:GPUModelRunner.sample_tokens",
            "vllm.v1.worker.gpu.spec_decode.eagle.speculator:EagleSpeculator.propose",
        ),
        symptom="Weights that are NaN, infinite or huge make the rejection sampler emit token 0.",
        cause="`vllm/v1/sample/rejection_sampler.py:829` `accepted = draft_prob > 0 and target_prob / "
        "draft_prob` rejects at NaN, and what is drawn in its place is compared with NaN too. In V2's "
        "`rejection_sampler_utils.py` `ratio < 1.0` is false for every token then.",
        applied_by="verl_tlt.vllm_worker.draft_probabilities:BrokenDrafts.__init__",
        releases="vllm 0.24 to 0.33 with the V1 model runner, 0.32 and 0.33 with V2",
        removed_by="A rejection sampler that treats a draft without numbers as one without a chance.",
    ),
    UpstreamChange(
        name="a row without drafts reads the recurrent state of its last accepted token",
        changes=("vllm.v1.worker.gpu_model_runner:GPUModelRunner._build_attention_metadata",),
        symptom="With a hybrid policy (linear attention) wrong tokens, and no error, where K changes to 0 or a token "
        "budget leaves rows of a step without drafts.",
        cause="`vllm/v1/worker/gpu_model_runner.py:2297` `use_spec_decode = len(scheduler_output."
        "scheduled_spec_decode_tokens) > 0` and the sum of drafts in `gdn_attn.py` tell rows with drafts from others; "
        "others read the state after the first token of their last draft.",
        applied_by="verl_tlt.vllm_worker.hybrid_states:count_rows_without_drafts",
        releases="vllm 0.24 to 0.31 with the V1 model runner, for hybrid policies",
        removed_by="vLLM 0.32, whose `GDNAttentionMetadataBuilder.build` does not ask how many drafts there are: "
        "nothing is changed there.",
        patch="vllm/0008-recurrent-states-of-rows-without-drafts.patch",
    ),
    UpstreamChange(
        name="a request that sat out steps knows how many tokens its last one accepted",
        changes=("vllm.v1.worker.gpu_model_runner:GPUModelRunner._update_states",),
        symptom="With a hybrid policy wrong tokens, and no error, of a request that a token budget left out of a step.",
        cause="`vllm/v1/worker/gpu_input_batch.py:486` `self.num_accepted_tokens_cpu[req_index] = 1` for whatever "
        "comes into the batch, also for what was in it before.",
        applied_by="verl_tlt.vllm_worker.hybrid_states:remember_accepted",
        releases="vllm 0.24 to 0.31 with the V1 model runner and synchronous scheduling, for hybrid policies; 0.32 has "
        "the same line",
        removed_by="The patch: nothing is changed where that line is another.",
        patch="vllm/0009-accepted-tokens-of-requests-that-sat-out.patch",
    ),
    UpstreamChange(
        name="a drafter reads the policy's embedding without its LoRA",
        changes=("vllm.lora.layers.vocal_parallel_embedding:VocabParallelEmbeddingWithLoRA",),
        symptom="A draft step fails in an engine with LoRA.",
        cause="`vllm/lora/layers/vocal_parallel_embedding.py:103` `indices_1 = "
        "self.punica_wrapper._embeddings_indices` belongs to the policy's batch, and a draft step has another.",
        applied_by="verl_tlt.vllm_worker.live_drafter:unwrap_embedding",
        releases="vllm 0.24 to 0.33 with the V1 model runner and LoRA on the policy; V2 shares the embedding so itself",
        removed_by="A vLLM that shares the embedding below its LoRA wrapper with a drafter.",
    ),
)
