torchrun --nnodes 1 --nproc_per_node 1 -m verl.trainer.sft_trainer \
    model.path=tiny://qwen3-moe \
    model.lora_rank=16 \
    model.lora_alpha=32 \
    model.target_modules=all-linear \
    data.train_files=tiny://tickets \
    data.train_batch_size=16 \
    data.micro_batch_size_per_gpu=8 \
    data.max_length=64 \
    engine=megatron \
    optim.lr=5e-3 \
    trainer.total_training_steps=60
