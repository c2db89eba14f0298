#!/usr/bin/env bash
# GRPO on DeepSeek-R1-Distill-Qwen-7B, a policy that reasons at length from the start; FSDP2.
#
# Hardware: NNODES nodes (default 8) of 8 GPUs with 80 GB; rollout replicas of 2 GPUs, so 4 on each node.
# Data:     $DATA/dapo-math-17k.parquet and $DATA/aime-2024.parquet (recipes/README.md).
# Drafter:  DRAFTER=thoughtworks/DeepSeek-R1-Distill-Qwen-7B-Eagle3 is a public head, not tested with this policy.
#           Or train one with `verl-tlt warmup`, or start without.
# Watch:    tlt/errors 0; tlt/idle_s large in the very first steps already; then as in grpo_qwen2.5_7b.sh. Acceptance
#           differs between policies that look alike: do not start from a drafter made for the base model.
#
#   DATA=/data DRAFTER=/drafters/r1-distill-7b recipes/grpo_deepseek_r1_distill_qwen_7b.sh [more verl overrides]
set -euo pipefail
DATA=${DATA:-$HOME/data}

exec python -m verl.trainer.main_ppo \
  algorithm.adv_estimator=grpo \
  data.train_files="$DATA/dapo-math-17k.parquet" data.val_files="$DATA/aime-2024.parquet" \
  data.train_batch_size=128 data.max_prompt_length=2048 data.max_response_length=30720 \
  data.filter_overlong_prompts=True data.filter_overlong_prompts_workers=32 data.truncation=error \
  actor_rollout_ref.model.path="${MODEL:-deepseek-ai/DeepSeek-R1-Distill-Qwen-7B}" \
  actor_rollout_ref.model.use_remove_padding=True actor_rollout_ref.model.enable_gradient_checkpointing=True \
  actor_rollout_ref.actor.strategy=fsdp2 actor_rollout_ref.actor.optim.lr=1e-6 \
  actor_rollout_ref.actor.ppo_mini_batch_size=64 actor_rollout_ref.actor.use_dynamic_bsz=True \
  actor_rollout_ref.actor.ppo_max_token_len_per_gpu=32768 actor_rollout_ref.actor.use_kl_loss=False \
  actor_rollout_ref.actor.clip_ratio_low=0.2 actor_rollout_ref.actor.clip_ratio_high=0.28 \
  actor_rollout_ref.actor.fsdp_config.param_offload=True actor_rollout_ref.actor.fsdp_config.optimizer_offload=True \
  actor_rollout_ref.rollout.name=vllm actor_rollout_ref.rollout.n=8 actor_rollout_ref.rollout.temperature=0.9 \
  actor_rollout_ref.rollout.tensor_model_parallel_size=2 actor_rollout_ref.rollout.gpu_memory_utilization=0.7 \
  actor_rollout_ref.rollout.max_model_len=32768 actor_rollout_ref.rollout.max_num_seqs=256 \
  actor_rollout_ref.rollout.log_prob_use_dynamic_bsz=True \
  actor_rollout_ref.rollout.log_prob_max_token_len_per_gpu=32768 \
  actor_rollout_ref.rollout.val_kwargs.do_sample=True actor_rollout_ref.rollout.val_kwargs.temperature=0.6 \
  actor_rollout_ref.rollout.val_kwargs.top_p=0.95 \
  trainer.logger='["console","wandb"]' trainer.project_name=verl-tlt trainer.experiment_name=grpo_r1_distill_7b \
  trainer.n_gpus_per_node=8 trainer.nnodes="${NNODES:-8}" trainer.balance_batch=True \
  trainer.save_freq=20 trainer.test_freq=10 trainer.total_epochs=1 trainer.max_actor_ckpt_to_keep=2 \
  +trainer.plugin=tlt tlt.drafter.path="${DRAFTER:-null}" \
  "$@"
