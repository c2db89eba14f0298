#!/usr/bin/env bash
# GRPO on Qwen3-8B on one node: the recipe to try TLT with; FSDP2.
#
# Hardware: 1 node of 8 GPUs with 80 GB; 8 rollout replicas of 1 GPU. More replicas on a node leave more idle time.
# Data:     $DATA/dapo-math-17k.parquet and $DATA/aime-2024.parquet (recipes/README.md).
# Drafter:  DRAFTER=RedHatAI/Qwen3-8B-speculator.eagle3 is a public head, not tested with this policy.
#           Or train one with `verl-tlt warmup`, or start without.
# Watch:    tlt/errors 0; tlt/idle_s / (8 x timing_s/gen), the share of GPU time that is idle. With one node there are more
#           requests for each engine than in a cluster, so expect less than a cluster gains.
#
#   DATA=/data DRAFTER=/drafters/qwen3-8b recipes/grpo_qwen3_8b.sh [more verl overrides]
set -euo pipefail
DATA=${DATA:-$HOME/data}

exec python -m verl.trainer.main_ppo \
  algorithm.adv_estimator=grpo \
  data.train_files="$DATA/dapo-math-17k.parquet" data.val_files="$DATA/aime-2024.parquet" \
  data.train_batch_size=64 data.max_prompt_length=2048 data.max_response_length=14336 \
  data.filter_overlong_prompts=True data.filter_overlong_prompts_workers=32 data.truncation=error \
  actor_rollout_ref.model.path="${MODEL:-Qwen/Qwen3-8B}" \
  actor_rollout_ref.model.use_remove_padding=True actor_rollout_ref.model.enable_gradient_checkpointing=True \
  actor_rollout_ref.actor.strategy=fsdp2 actor_rollout_ref.actor.optim.lr=1e-6 \
  actor_rollout_ref.actor.ppo_mini_batch_size=32 actor_rollout_ref.actor.use_dynamic_bsz=True \
  actor_rollout_ref.actor.ppo_max_token_len_per_gpu=24576 \
  actor_rollout_ref.actor.use_kl_loss=True actor_rollout_ref.actor.kl_loss_coef=0.001 \
  actor_rollout_ref.actor.kl_loss_type=low_var_kl \
  actor_rollout_ref.actor.fsdp_config.param_offload=True actor_rollout_ref.actor.fsdp_config.optimizer_offload=True \
  actor_rollout_ref.ref.fsdp_config.param_offload=True actor_rollout_ref.ref.log_prob_use_dynamic_bsz=True \
  actor_rollout_ref.ref.log_prob_max_token_len_per_gpu=49152 \
  actor_rollout_ref.rollout.name=vllm actor_rollout_ref.rollout.n=8 \
  actor_rollout_ref.rollout.tensor_model_parallel_size=1 actor_rollout_ref.rollout.gpu_memory_utilization=0.8 \
  actor_rollout_ref.rollout.max_model_len=16384 actor_rollout_ref.rollout.max_num_seqs=256 \
  actor_rollout_ref.rollout.log_prob_use_dynamic_bsz=True \
  actor_rollout_ref.rollout.log_prob_max_token_len_per_gpu=49152 \
  actor_rollout_ref.rollout.val_kwargs.do_sample=True actor_rollout_ref.rollout.val_kwargs.temperature=1.0 \
  actor_rollout_ref.rollout.val_kwargs.top_p=0.7 \
  trainer.logger='["console","wandb"]' trainer.project_name=verl-tlt trainer.experiment_name=grpo_qwen3_8b \
  trainer.n_gpus_per_node=8 trainer.nnodes=1 trainer.balance_batch=True \
  trainer.save_freq=20 trainer.test_freq=10 trainer.total_epochs=1 trainer.max_actor_ckpt_to_keep=2 \
  +trainer.plugin=tlt tlt.drafter.path="${DRAFTER:-null}" \
  "$@"
