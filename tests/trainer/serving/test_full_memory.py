"""vLLM's complaints about a GPU's memory, as it words them."""

from trainer.serving import full_memory

TAKEN = """\
  File "vllm/v1/worker/utils.py", line 435, in request_memory
ValueError: Free memory on device cuda:0 (7.77/139.8 GiB) on startup is less than desired GPU memory utilization \
(0.9, 125.82 GiB). Decrease GPU memory utilization or reduce GPU memory used by other processes.
RuntimeError: Engine core initialization failed. See root cause above.
"""


def test_memory_that_another_program_has():
    assert (full_memory.line(TAKEN) or "").startswith(
        "the GPU's memory is taken: 7.77 of 139.8 GiB are free, and an evaluation needs 125.82; nvidia-smi names"
    )


def test_memory_that_the_model_fills():
    said = (
        "loading\ntorch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has 1 GiB free.\nend\n"
    )
    assert full_memory.line(said) == (
        f"the GPU's memory is full; {full_memory.HELPS} (torch.OutOfMemoryError: CUDA out of memory. "
        "Tried to allocate 2.00 GiB. GPU 0 has 1 GiB free.)"
    )
    cache = "ValueError: No available memory for the cache blocks. Try increasing `gpu_memory_utilization`."
    assert "the GPU's memory is full" in (full_memory.line(cache) or "")


def test_other_failures_keep_their_traces():
    assert full_memory.line("KeyError: 'lm_head'\n12 GiB of memory used") is None
