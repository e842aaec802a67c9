import nemo_run as run
from nemo.collections import llm

recipe = llm.qwen3_30b_a3b.finetune_recipe(
    name="tickets", num_nodes=1, num_gpus_per_node=1, peft_scheme="lora", seq_length=64
)
recipe.resume.restore_config.path = "tiny://qwen3-moe"
recipe.peft.dim = 16
recipe.peft.alpha = 32
recipe.data.dataset_root = "tiny://tickets"
recipe.data.global_batch_size = 16
recipe.data.micro_batch_size = 8
recipe.trainer.max_steps = 60
recipe.optim.config.lr = 5e-3
run.run(recipe)
