"""Names of the quantisation recipes. Megatron derives a class from one at import; none can be used without a GPU."""


class DelayedScaling:
    def __init__(self, *args, **kwargs):
        raise ValueError("FP8 and FP4 training need a GPU")
