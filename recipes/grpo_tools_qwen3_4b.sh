#!/usr/bin/env bash
# GRPO over several turns with a tool (a calculator in calculator_tool.py) on Qwen3-4B, FSDP2.
#
# Hardware: 1 node of 8 GPUs with 80 GB; 8 rollout replicas of 1 GPU.
# Data:     $DATA/gsm8k/{train,test}.parquet (recipes/README.md); the chat template announces the tool.
# Drafter:  DRAFTER=AngelSlim/Qwen3-4B_eagle3 is a public head, not tested with this policy.
#           Or train one with `verl-tlt warmup`, or start without.
# Watch:    tlt/errors 0; num_turns/mean is above 2 if the policy calls the tool. A conversation sends another
#           request after each tool call. So replicas stay until all conversations end.
#
#   DATA=/data DRAFTER=/drafters/qwen3-4b recipes/grpo_tools_qwen3_4b.sh [more verl overrides]
set -euo pipefail
DATA=${DATA:-$HOME/data}

exec python -m verl.trainer.main_ppo \
  algorithm.adv_estimator=grpo \
  data.train_files="$DATA/gsm8k/train.parquet" data.val_files="$DATA/gsm8k/test.parquet" \
  data.train_batch_size=128 data.max_prompt_length=1024 data.max_response_length=8192 data.return_raw_chat=True \
  data.filter_overlong_prompts=True data.truncation=error \
  actor_rollout_ref.model.path="${MODEL:-Qwen/Qwen3-4B}" \
  actor_rollout_ref.model.use_remove_padding=True actor_rollout_ref.model.enable_gradient_checkpointing=True \
  actor_rollout_ref.actor.strategy=fsdp2 actor_rollout_ref.actor.optim.lr=1e-6 \
  actor_rollout_ref.actor.ppo_mini_batch_size=64 actor_rollout_ref.actor.use_dynamic_bsz=True \
  actor_rollout_ref.actor.ppo_max_token_len_per_gpu=24576 actor_rollout_ref.actor.use_kl_loss=False \
  actor_rollout_ref.rollout.name=vllm actor_rollout_ref.rollout.n=8 \
  actor_rollout_ref.rollout.tensor_model_parallel_size=1 actor_rollout_ref.rollout.gpu_memory_utilization=0.7 \
  actor_rollout_ref.rollout.max_model_len=9216 actor_rollout_ref.rollout.max_num_seqs=256 \
  actor_rollout_ref.rollout.log_prob_use_dynamic_bsz=True \
  actor_rollout_ref.rollout.log_prob_max_token_len_per_gpu=49152 \
  actor_rollout_ref.rollout.multi_turn.enable=True actor_rollout_ref.rollout.multi_turn.format=hermes \
  actor_rollout_ref.rollout.multi_turn.max_assistant_turns=6 \
  actor_rollout_ref.rollout.multi_turn.function_tool_path="$(dirname "$(realpath "$0")")/calculator_tool.py" \
  actor_rollout_ref.rollout.agent.default_agent_loop=tool_agent \
  trainer.logger='["console","wandb"]' trainer.project_name=verl-tlt trainer.experiment_name=grpo_tools_qwen3_4b \
  trainer.n_gpus_per_node=8 trainer.nnodes=1 trainer.balance_batch=True \
  trainer.save_freq=20 trainer.test_freq=10 trainer.total_epochs=15 trainer.max_actor_ckpt_to_keep=2 \
  +trainer.plugin=tlt tlt.drafter.path="${DRAFTER:-null}" \
  "$@"
