#!/usr/bin/env bash
# DAPO on Qwen2.5-32B: dynamic sampling, overlong reward shaping, decoupled clipping, token-mean loss; FSDP2.
#
# Hardware: NNODES nodes (default 8) of 8 GPUs with 80 GB; rollout replicas of 4 GPUs, so 2 on each node.
# Data:     $DATA/dapo-math-17k.parquet and $DATA/aime-2024.parquet (recipes/README.md).
# Drafter:  no public head is known: train one with `verl-tlt warmup`, or start without.
# Watch:    tlt/errors 0. Dynamic sampling may ask for more groups at any moment. Replicas leave only after verl has all
#           groups, so there is little idle time.
#
#   DATA=/data DRAFTER=/drafters/qwen2.5-32b recipes/dapo_qwen2.5_32b.sh [more verl overrides]
set -euo pipefail
DATA=${DATA:-$HOME/data}

exec python -m verl.trainer.main_ppo \
  algorithm.adv_estimator=grpo algorithm.use_kl_in_reward=False \
  algorithm.filter_groups.enable=True algorithm.filter_groups.metric=acc \
  data.train_files="$DATA/dapo-math-17k.parquet" data.val_files="$DATA/aime-2024.parquet" \
  data.train_batch_size=256 data.max_prompt_length=2048 data.max_response_length=20480 data.truncation=left \
  actor_rollout_ref.model.path="${MODEL:-Qwen/Qwen2.5-32B}" \
  actor_rollout_ref.model.use_remove_padding=True actor_rollout_ref.model.enable_gradient_checkpointing=True \
  actor_rollout_ref.actor.strategy=fsdp2 actor_rollout_ref.actor.optim.lr=1e-6 \
  actor_rollout_ref.actor.optim.lr_warmup_steps=10 actor_rollout_ref.actor.optim.weight_decay=0.1 \
  actor_rollout_ref.actor.ppo_mini_batch_size=32 actor_rollout_ref.actor.use_dynamic_bsz=True \
  actor_rollout_ref.actor.ppo_max_token_len_per_gpu=22528 actor_rollout_ref.actor.use_kl_loss=False \
  actor_rollout_ref.actor.clip_ratio_low=0.2 actor_rollout_ref.actor.clip_ratio_high=0.28 \
  actor_rollout_ref.actor.clip_ratio_c=10.0 actor_rollout_ref.actor.loss_agg_mode=token-mean \
  actor_rollout_ref.actor.fsdp_config.param_offload=True actor_rollout_ref.actor.fsdp_config.optimizer_offload=True \
  actor_rollout_ref.rollout.name=vllm actor_rollout_ref.rollout.n=16 \
  actor_rollout_ref.rollout.tensor_model_parallel_size=4 actor_rollout_ref.rollout.gpu_memory_utilization=0.8 \
  actor_rollout_ref.rollout.max_model_len=22528 actor_rollout_ref.rollout.max_num_seqs=112 \
  actor_rollout_ref.rollout.max_num_batched_tokens=22528 actor_rollout_ref.rollout.enable_chunked_prefill=True \
  actor_rollout_ref.rollout.log_prob_use_dynamic_bsz=True \
  actor_rollout_ref.rollout.log_prob_max_token_len_per_gpu=45056 \
  actor_rollout_ref.rollout.val_kwargs.do_sample=True actor_rollout_ref.rollout.val_kwargs.temperature=1.0 \
  actor_rollout_ref.rollout.val_kwargs.top_p=0.7 \
  reward.reward_manager.name=dapo \
  +reward.reward_kwargs.overlong_buffer_cfg.enable=True +reward.reward_kwargs.overlong_buffer_cfg.len=4096 \
  +reward.reward_kwargs.overlong_buffer_cfg.penalty_factor=1.0 +reward.reward_kwargs.overlong_buffer_cfg.log=False \
  +reward.reward_kwargs.max_resp_len=20480 \
  trainer.logger='["console","wandb"]' trainer.project_name=verl-tlt trainer.experiment_name=dapo_qwen2.5_32b \
  trainer.n_gpus_per_node=8 trainer.nnodes="${NNODES:-8}" trainer.balance_batch=True \
  trainer.save_freq=10 trainer.test_freq=10 trainer.total_epochs=1 trainer.max_actor_ckpt_to_keep=2 \
  +trainer.plugin=tlt tlt.drafter.path="${DRAFTER:-null}" \
  "$@"
