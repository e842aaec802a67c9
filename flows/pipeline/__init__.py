"""The pipeline of the flows finetune and pretrain, and the command line that both have."""
