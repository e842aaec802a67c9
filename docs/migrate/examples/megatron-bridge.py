from megatron.bridge import AutoBridge
from megatron.bridge.peft.lora import LoRA
from megatron.bridge.recipes.common import _peft_common


def tickets_peft_config():
    cfg = _peft_common()
    cfg.model = AutoBridge.from_hf_pretrained("tiny://qwen3-moe").to_megatron_provider(load_weights=False)
    cfg.dataset.dataset_name = "tiny://tickets"
    cfg.dataset.seq_length = 64
    cfg.peft = LoRA(dim=16, alpha=32)
    cfg.train.train_iters = 60
    cfg.train.global_batch_size = 16
    cfg.train.micro_batch_size = 8
    cfg.optimizer.lr = 5e-3
    cfg.scheduler.lr_warmup_iters = 5
    return cfg
