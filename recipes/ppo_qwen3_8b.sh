#!/usr/bin/env bash
# PPO with a critic (GAE) on Qwen3-8B, FSDP2.
#
# Hardware: 1 node of 8 GPUs with 80 GB; 8 rollout replicas of 1 GPU. The critic shares the GPUs.
#           Needs flash-attn: verl 0.9.1 loads the critic with it, whatever critic.model.override_config says.
# Data:     $DATA/gsm8k/{train,test}.parquet and $DATA/math/{train,test}.parquet (recipes/README.md).
# Drafter:  DRAFTER=RedHatAI/Qwen3-8B-speculator.eagle3 is a public head, not tested with this policy.
#           Or train one with `verl-tlt warmup`, or start without.
# Watch:    tlt/errors 0. The critic's forward and update lengthen the step outside the rollout, so the same
#           tlt/saved_estimate_s is a smaller share of it than under GRPO.
#
#   DATA=/data DRAFTER=/drafters/qwen3-8b recipes/ppo_qwen3_8b.sh [more verl overrides]
set -euo pipefail
DATA=${DATA:-$HOME/data}
MODEL=${MODEL:-Qwen/Qwen3-8B}

exec python -m verl.trainer.main_ppo \
  algorithm.adv_estimator=gae \
  data.train_files="['$DATA/gsm8k/train.parquet','$DATA/math/train.parquet']" \
  data.val_files="['$DATA/gsm8k/test.parquet','$DATA/math/test.parquet']" \
  data.train_batch_size=512 data.max_prompt_length=1024 data.max_response_length=8192 \
  data.filter_overlong_prompts=True data.truncation=error \
  actor_rollout_ref.model.path="$MODEL" \
  actor_rollout_ref.model.use_remove_padding=True actor_rollout_ref.model.enable_gradient_checkpointing=True \
  actor_rollout_ref.actor.strategy=fsdp2 actor_rollout_ref.actor.optim.lr=1e-6 \
  actor_rollout_ref.actor.ppo_mini_batch_size=128 actor_rollout_ref.actor.use_dynamic_bsz=True \
  actor_rollout_ref.actor.ppo_max_token_len_per_gpu=24576 \
  actor_rollout_ref.actor.fsdp_config.param_offload=True actor_rollout_ref.actor.fsdp_config.optimizer_offload=True \
  critic.strategy=fsdp2 critic.model.path="$MODEL" critic.optim.lr=1e-5 \
  critic.model.use_remove_padding=True critic.model.enable_gradient_checkpointing=True \
  critic.use_dynamic_bsz=True critic.ppo_max_token_len_per_gpu=24576 \
  critic.fsdp.param_offload=True critic.fsdp.optimizer_offload=True \
  actor_rollout_ref.rollout.name=vllm actor_rollout_ref.rollout.n=1 \
  actor_rollout_ref.rollout.tensor_model_parallel_size=1 actor_rollout_ref.rollout.gpu_memory_utilization=0.8 \
  actor_rollout_ref.rollout.max_model_len=9216 actor_rollout_ref.rollout.max_num_seqs=256 \
  actor_rollout_ref.rollout.log_prob_use_dynamic_bsz=True \
  actor_rollout_ref.rollout.log_prob_max_token_len_per_gpu=49152 \
  trainer.logger='["console","wandb"]' trainer.project_name=verl-tlt trainer.experiment_name=ppo_qwen3_8b \
  trainer.n_gpus_per_node=8 trainer.nnodes=1 trainer.balance_batch=True trainer.critic_warmup=0 \
  trainer.save_freq=20 trainer.test_freq=10 trainer.total_epochs=15 \
  trainer.max_actor_ckpt_to_keep=2 trainer.max_critic_ckpt_to_keep=2 \
  +trainer.plugin=tlt tlt.drafter.path="${DRAFTER:-null}" \
  "$@"
