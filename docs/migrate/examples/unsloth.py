from datasets import load_dataset
from trl import SFTConfig, SFTTrainer
from unsloth import FastLanguageModel

model, tokenizer = FastLanguageModel.from_pretrained("tiny://qwen3-moe", max_seq_length=64, load_in_4bit=False)
model = FastLanguageModel.get_peft_model(
    model,
    r=16,
    lora_alpha=32,
    target_modules=["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"],
)
trainer = SFTTrainer(
    model=model,
    tokenizer=tokenizer,
    train_dataset=load_dataset("tiny://tickets", split="train"),
    args=SFTConfig(
        per_device_train_batch_size=8,
        gradient_accumulation_steps=2,
        max_steps=60,
        learning_rate=5e-3,
        max_length=64,
    ),
)
trainer.train()
