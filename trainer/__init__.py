from trainer.startup import ahead

ahead.begin()
