#!/usr/bin/env bash
# GRPO with LoRA on Qwen3-8B, FSDP2: the adapter is trained and served, the base stays as it is.
#
# Hardware: 1 node of 8 GPUs with 80 GB (2 GPUs do, with smaller batches); rollout replicas of 1 GPU.
# Data:     $DATA/gsm8k/{train,test}.parquet (recipes/README.md).
# Drafter:  DRAFTER=RedHatAI/Qwen3-8B-speculator.eagle3 is a public head, not tested with this policy.
#           Or train one with `verl-tlt warmup`, or start without.
# Watch:    tlt/errors 0. The drafter learns from the policy with its adapter on; embedding and head never change.
#
#   DATA=/data DRAFTER=/drafters/qwen3-8b recipes/grpo_lora_qwen3_8b.sh [more verl overrides]
set -euo pipefail
DATA=${DATA:-$HOME/data}

exec python -m verl.trainer.main_ppo \
  algorithm.adv_estimator=grpo \
  data.train_files="$DATA/gsm8k/train.parquet" data.val_files="$DATA/gsm8k/test.parquet" \
  data.train_batch_size=128 data.max_prompt_length=512 data.max_response_length=8192 \
  data.filter_overlong_prompts=True data.truncation=error \
  actor_rollout_ref.model.path="${MODEL:-Qwen/Qwen3-8B}" \
  actor_rollout_ref.model.lora_rank=64 actor_rollout_ref.model.lora_alpha=32 \
  actor_rollout_ref.model.use_remove_padding=True actor_rollout_ref.model.enable_gradient_checkpointing=True \
  actor_rollout_ref.actor.strategy=fsdp2 actor_rollout_ref.actor.optim.lr=3e-6 \
  actor_rollout_ref.actor.ppo_mini_batch_size=64 actor_rollout_ref.actor.use_dynamic_bsz=True \
  actor_rollout_ref.actor.ppo_max_token_len_per_gpu=24576 \
  actor_rollout_ref.actor.use_kl_loss=True actor_rollout_ref.actor.kl_loss_coef=0.001 \
  actor_rollout_ref.actor.kl_loss_type=low_var_kl \
  actor_rollout_ref.ref.log_prob_use_dynamic_bsz=True actor_rollout_ref.ref.log_prob_max_token_len_per_gpu=49152 \
  actor_rollout_ref.rollout.name=vllm actor_rollout_ref.rollout.n=8 \
  actor_rollout_ref.rollout.load_format=safetensors actor_rollout_ref.rollout.layered_summon=True \
  actor_rollout_ref.rollout.tensor_model_parallel_size=1 actor_rollout_ref.rollout.gpu_memory_utilization=0.8 \
  actor_rollout_ref.rollout.max_model_len=8704 actor_rollout_ref.rollout.max_num_seqs=256 \
  actor_rollout_ref.rollout.log_prob_use_dynamic_bsz=True \
  actor_rollout_ref.rollout.log_prob_max_token_len_per_gpu=49152 \
  trainer.logger='["console","wandb"]' trainer.project_name=verl-tlt trainer.experiment_name=grpo_lora_qwen3_8b \
  trainer.n_gpus_per_node=8 trainer.nnodes=1 trainer.balance_batch=True \
  trainer.save_freq=20 trainer.test_freq=10 trainer.total_epochs=15 trainer.max_actor_ckpt_to_keep=2 \
  +trainer.plugin=tlt tlt.drafter.path="${DRAFTER:-null}" \
  "$@"
