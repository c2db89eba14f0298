#!/usr/bin/env bash
# GRPO on Llama-3.3-70B-Instruct with a Megatron actor (tensor, pipeline and sequence parallel).
#
# Hardware: NNODES nodes (default 8) of 8 GPUs with 80 GB; the actor spans 32 GPUs (TP 8, PP 4); rollout replicas of 8
#           GPUs, one on each node.
#           Needs megatron-core and Megatron-Bridge, which needs Python 3.12. Tests loaded the policy with mbridge instead
#           (megatron.vanilla_mbridge=True), which verl has deprecated: a fallback.
# Data:     $DATA/dapo-math-17k.parquet and $DATA/aime-2024.parquet (recipes/README.md).
# Drafter:  DRAFTER=RedHatAI/Llama-3.3-70B-Instruct-speculator.eagle3 is a public head, not tested with this policy.
#           Or train one with `verl-tlt warmup`, or start without.
# Watch:    tlt/errors 0. Run `verl-tlt doctor`. If it says that this layout cannot capture hidden states, the drafter is
#           not trained: give a trained one.
#
#   DATA=/data DRAFTER=/drafters/llama-3.3-70b recipes/grpo_llama3.3_70b_megatron.sh [more verl overrides]
set -euo pipefail
DATA=${DATA:-$HOME/data}

exec python -m verl.trainer.main_ppo model_engine=megatron \
  algorithm.adv_estimator=grpo \
  data.train_files="$DATA/dapo-math-17k.parquet" data.val_files="$DATA/aime-2024.parquet" \
  data.train_batch_size=128 data.max_prompt_length=2048 data.max_response_length=14336 \
  data.filter_overlong_prompts=True data.filter_overlong_prompts_workers=32 data.truncation=error \
  actor_rollout_ref.model.path="${MODEL:-meta-llama/Llama-3.3-70B-Instruct}" \
  actor_rollout_ref.model.use_remove_padding=True \
  actor_rollout_ref.actor.optim.lr=1e-6 actor_rollout_ref.actor.ppo_mini_batch_size=64 \
  actor_rollout_ref.actor.use_dynamic_bsz=True actor_rollout_ref.actor.ppo_max_token_len_per_gpu=16384 \
  actor_rollout_ref.actor.use_kl_loss=False \
  actor_rollout_ref.actor.megatron.tensor_model_parallel_size=8 \
  actor_rollout_ref.actor.megatron.pipeline_model_parallel_size=4 \
  actor_rollout_ref.actor.megatron.param_offload=True actor_rollout_ref.actor.megatron.optimizer_offload=True \
  actor_rollout_ref.actor.megatron.use_mbridge=True \
  actor_rollout_ref.actor.megatron.override_transformer_config.recompute_granularity=full \
  actor_rollout_ref.actor.megatron.override_transformer_config.recompute_method=uniform \
  actor_rollout_ref.actor.megatron.override_transformer_config.recompute_num_layers=1 \
  actor_rollout_ref.rollout.name=vllm actor_rollout_ref.rollout.n=8 \
  actor_rollout_ref.rollout.tensor_model_parallel_size=8 actor_rollout_ref.rollout.gpu_memory_utilization=0.7 \
  actor_rollout_ref.rollout.max_model_len=16384 actor_rollout_ref.rollout.max_num_seqs=256 \
  actor_rollout_ref.rollout.log_prob_use_dynamic_bsz=True \
  actor_rollout_ref.rollout.log_prob_max_token_len_per_gpu=32768 \
  actor_rollout_ref.rollout.val_kwargs.do_sample=True actor_rollout_ref.rollout.val_kwargs.temperature=1.0 \
  actor_rollout_ref.rollout.val_kwargs.top_p=0.7 \
  trainer.logger='["console","wandb"]' trainer.project_name=verl-tlt trainer.experiment_name=grpo_llama3.3_70b \
  trainer.n_gpus_per_node=8 trainer.nnodes="${NNODES:-8}" trainer.balance_batch=True \
  trainer.save_freq=20 trainer.test_freq=10 trainer.total_epochs=1 trainer.max_actor_ckpt_to_keep=2 \
  +trainer.plugin=tlt tlt.drafter.path="${DRAFTER:-null}" \
  "$@"
