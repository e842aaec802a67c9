NPROC_PER_NODE=1 megatron sft \
    --model tiny://qwen3-moe --dataset tiny://tickets --max_length 64 \
    --train_type lora --lora_rank 16 --lora_alpha 32 --target_modules all-linear \
    --micro_batch_size 8 --global_batch_size 16 --train_iters 60 --lr 5e-3
